"""TenSEAL's batched tensors: one ciphertext a feature, thousands of samples along its slots. Licence: Apache-2.0.

    client                                                server (relinearisation key, weights)
    features in groups of `GROUP`, N / 2 samples each ->  group @ rows of the weights, summed; square; ...   -> outputs

Nothing rotates, so no rotation keys are needed and levels are few; a query for one sample costs as much as one for
N / 2 of them, which is what latency says here. As with TenSEAL's tutorial, squares stand in place of ReLU. The first
convolution's windows are unrolled before encryption: each window is a group then, and a value that lies in several
windows is sent several times. Groups go one by one, so that memory stays bounded.

Primes of 40, 26 for each level, and 40 bits; N = 4096 carries one level (106 of 106 bits), 8192 five (210 of 214).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

import numpy as np
import tenseal as ts
from measuring import SECURITY_TABLE, Measured, Task, core_count, main, table_security_bits
from networks import Convolution, Linear, Network, NotExpressibleError, evaluate_prefix, read_network, unroll

END_BITS, SCALE_BITS, GROUP = 40, 26, 49

NOTE = (
    "a query is a whole batch; squares in place of ReLU, errors and agreement are against the same network with squares"
)


def read_levels(network: Network) -> list[Linear | Convolution | None]:
    """Return the levels of the network: products, and None for a square.

    Raises:
        NotExpressibleError: Something else than products, ReLU and reshaping, a convolution that is not
            first, or more levels than there are.
    """
    levels: list[Linear | Convolution | None] = []
    for layer in network.layers[network.first_linear() :]:
        if isinstance(layer, Convolution) and (levels or layer.padding):
            raise NotExpressibleError(
                f"convolution '{layer.name}' is not the first layer, or pads: a CKKSTensor has no windows, "
                "and the client can unroll plain images only"
            )
        if isinstance(layer, Linear | Convolution):
            levels.append(layer)
        elif layer.kind == "Relu":
            levels.append(None)
        elif layer.kind not in ("Reshape", "Flatten"):
            raise NotExpressibleError(f"{layer.kind} '{layer.name}' has no counterpart on an encrypted tensor")
    if len(levels) > 5:
        raise NotExpressibleError(f"the network needs {len(levels)} levels, N = 8192 carries 5 of {SCALE_BITS} bits")
    return levels


class Server:
    """Holds the evaluation key and the weights; takes groups of features, one after the other."""

    def __init__(self, keys: bytes, levels: list[Linear | Convolution | None]) -> None:
        self.context = ts.context_from(keys, n_threads=core_count())
        self.levels = levels

    def evaluate(self, groups: Iterable[bytes]) -> bytes:
        """Take serialised CKKSTensors of the first layer's groups, return that of the outputs."""
        tensors = (ts.ckks_tensor_from(self.context, group) for group in groups)
        first, *rest = self.levels
        if isinstance(first, Convolution):
            vector, rest = self._windows(tensors, first, rest)
        else:
            vector = self._product(tensors, first)
        for level in rest:
            vector = vector.square() if level is None else vector.mm(level.weight.T.tolist()) + level.bias.tolist()
        return vector.serialize()

    @staticmethod
    def _product(tensors: Iterator[ts.CKKSTensor], layer: Linear) -> ts.CKKSTensor:
        """Sum the products of groups with their rows of the weights."""
        total, position = None, 0
        for tensor in tensors:
            rows = layer.weight.T[position : position + tensor.shape[1]]
            position += len(rows)
            part = tensor.mm(rows.tolist())
            total = part if total is None else total + part
        return total + layer.bias.tolist()

    @staticmethod
    def _windows(
        tensors: Iterator[ts.CKKSTensor], first: Convolution, rest: list[Linear | Convolution | None]
    ) -> tuple[ts.CKKSTensor, list[Linear | Convolution | None]]:
        """Take each window through convolution, square, and its share of the product behind it; sum the shares."""
        kernel = first.weight.reshape(len(first.weight), -1).T.tolist()
        product, *rest = rest[1:]
        channels = len(first.weight)
        per_window = product.weight.reshape(len(product.weight), channels, -1)
        total = None
        for position, tensor in enumerate(tensors):
            values = (tensor.mm(kernel) + first.bias.tolist()).square()
            part = values.mm(per_window[:, :, position].T.tolist())
            total = part if total is None else total + part
        return total + product.bias.tolist(), rest


def measure(task: Task) -> Measured:
    """Measure one batch that fills the slots; the samples are repeated where there are fewer."""
    network = read_network(task.model)
    levels = read_levels(network)
    first = levels[0]
    if isinstance(first, Convolution) and (
        len(levels) < 3 or levels[1] is not None or not isinstance(levels[2], Linear)
    ):
        raise NotExpressibleError("a convolution is read with an activation and a linear layer behind it only")
    started = time.perf_counter()
    degree = 4096 if len(levels) == 1 else 8192
    prime_bits = [END_BITS, *[SCALE_BITS] * len(levels), END_BITS]
    context = ts.context(ts.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=prime_bits, n_threads=core_count())
    context.global_scale = 2**SCALE_BITS
    keys = context.serialize(save_secret_key=False)
    server = Server(keys, levels)
    prepared_s = time.perf_counter() - started

    samples = np.resize(np.arange(len(task.x)), degree // 2)
    x = evaluate_prefix(network, task.x)[samples]
    started = time.perf_counter()
    sent = client_s = 0

    def encrypted() -> Iterator[bytes]:
        nonlocal sent, client_s
        for group in _groups(x, first):
            began = time.perf_counter()
            message = ts.ckks_tensor(context, ts.plain_tensor(group[:, None]), batch=True).serialize()
            client_s += time.perf_counter() - began
            sent += len(message)
            yield message

    server_started = time.perf_counter()
    answer = server.evaluate(encrypted())
    server_s = time.perf_counter() - server_started - client_s
    outputs = np.array(ts.ckks_tensor_from(context, answer).decrypt().tolist())[:, 0]
    taken_s = time.perf_counter() - started
    return Measured(
        outputs[: len(task.x)],
        [taken_s],
        preparation_s=prepared_s,
        server_s=[server_s],
        throughput_per_s=len(x) / taken_s,
        batch=len(x),
        bytes_up=sent,
        bytes_down=len(answer),
        key_bytes=len(keys),
        security_bits=table_security_bits(degree, sum(prime_bits)),
        squares=None in levels,
        note=NOTE if None in levels else "a query is a whole batch",
        parameters={
            "N": degree,
            "prime_bits": prime_bits,
            "scale_bits": SCALE_BITS,
            "security_by": SECURITY_TABLE,
        },
    )


def _groups(x: np.ndarray, first: Linear | Convolution | None) -> Iterator[np.ndarray]:
    """Yield features in groups, shape (samples, features of the group)."""
    if isinstance(first, Convolution):
        windows = unroll(x, first)
        yield from (windows[:, position] for position in range(windows.shape[1]))
        return
    flat = x.reshape(len(x), -1)
    edges = [*range(0, flat.shape[1], GROUP), flat.shape[1]]
    yield from (flat[:, start:end] for start, end in itertools.pairwise(edges))


if __name__ == "__main__":
    main("tenseal-batched", ("tenseal",), measure)
