"""TenSEAL as in its tutorial 4: one sample a ciphertext, the whole network encrypted. Licence: Apache-2.0.

    client                                          server (keys for rotation and relinearisation, weights)
    windows of the image, one ciphertext   ->       convolution, square, product, square, product   ->   decryption

The client unrolls the first convolution's windows before it encrypts (`im2col_encoding`), so that a convolution is a
product; further products use diagonals and rotations (`mm`). The tutorial puts squares in place of ReLU, for CKKS has
sums and products only: errors are against the same network with squares, in the clear, and accuracy is another matter.

N = 8192 and primes of 31, six times 26, and 31 bits are the tutorial's: 218 bits, the most that the standard of 2018
(homomorphicencryption.org) allows for 128 bits of security at this degree; the table of 2024 allows 214. Six levels
are one for each product and each square: two squares at most.
"""

from __future__ import annotations

import time

import numpy as np
import tenseal as ts
from measuring import SECURITY_TABLE, Measured, Task, core_count, main, repeat_queries, table_security_bits
from networks import Convolution, Linear, Network, NotExpressibleError, Other, evaluate_prefix, read_network

DEGREE, PRIME_BITS, SCALE_BITS = 8192, [31, *[26] * 6, 31], 26
LEVELS = len(PRIME_BITS) - 2

NOTE = (
    "squares in place of ReLU: this approach has no other activation; "
    "errors and agreement are against the same network with squares"
)


def check_expressible(network: Network) -> None:
    """Refuse what the tutorial's way cannot say.

    Raises:
        NotExpressibleError: An operator other than products, ReLU (as a square) and reshaping; a convolution that is
            not the first layer, has several channels or padding; more levels than there are.
    """
    levels = 0
    layers = network.layers[network.first_linear() :]
    for position, layer in enumerate(layers):
        if isinstance(layer, Convolution):
            if position:
                raise NotExpressibleError(
                    f"convolution '{layer.name}' is not the first layer: conv2d_im2col takes windows that the client "
                    "unrolled before it encrypted them"
                )
            if layer.weight.shape[1] != 1 or layer.padding:
                raise NotExpressibleError(f"convolution '{layer.name}': im2col takes one channel without padding")
            levels += 1
        elif isinstance(layer, Linear) or layer.kind == "Relu":
            levels += 1
        elif layer.kind not in ("Reshape", "Flatten"):
            raise NotExpressibleError(f"{layer.kind} '{layer.name}' has no counterpart on an encrypted vector")
    if levels > LEVELS:
        raise NotExpressibleError(f"the network needs {levels} levels, the parameters have {LEVELS}")


class Server:
    """Evaluates the network on serialised vectors; holds evaluation keys and weights."""

    def __init__(self, keys: bytes, network: Network) -> None:
        self.context = ts.context_from(keys, n_threads=core_count())
        self.network = network
        self.weights = {
            layer.name: layer.weight[:, 0].tolist() if isinstance(layer, Convolution) else layer.weight.T.tolist()
            for layer in network.linear_layers()
        }

    def evaluate(self, message: bytes, windows: int) -> bytes:
        """Take and return a serialised CKKSVector; `windows` is what im2col_encoding returned."""
        vector = ts.ckks_vector_from(self.context, message)
        for layer in self.network.layers[self.network.first_linear() :]:
            if isinstance(layer, Convolution):
                kernels = zip(self.weights[layer.name], layer.bias.tolist(), strict=True)
                vector = ts.CKKSVector.pack_vectors(
                    [vector.conv2d_im2col(kernel, windows) + bias for kernel, bias in kernels]
                )
            elif isinstance(layer, Linear):
                vector = vector.mm(self.weights[layer.name]) + layer.bias.tolist()
            elif layer.kind == "Relu":
                vector.square_()
        return vector.serialize()


def measure(task: Task) -> Measured:
    """Measure one query after the other."""
    network = read_network(task.model)
    check_expressible(network)
    started = time.perf_counter()
    context = ts.context(ts.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=PRIME_BITS, n_threads=core_count())
    context.global_scale = 2**SCALE_BITS
    context.generate_galois_keys()
    keys = context.serialize(save_secret_key=False)
    server = Server(keys, network)
    prepared_s = time.perf_counter() - started
    first = network.layers[network.first_linear()]
    server_s: list[float] = []
    up, down = b"", b""

    def query(sample: np.ndarray) -> np.ndarray:
        nonlocal up, down
        windows = 0
        values = evaluate_prefix(network, sample)
        if isinstance(first, Convolution):
            height, width = first.weight.shape[2:]
            encrypted, windows = ts.im2col_encoding(context, values[0, 0].tolist(), height, width, first.stride)
        else:
            encrypted = ts.ckks_vector(context, values.ravel().tolist())
        up = encrypted.serialize()
        server_started = time.perf_counter()
        down = server.evaluate(up, windows)
        server_s.append(time.perf_counter() - server_started)
        return np.array(ts.ckks_vector_from(context, down).decrypt())

    outputs, seconds = repeat_queries(task, query)
    squares = any(isinstance(layer, Other) and layer.kind == "Relu" for layer in network.layers)
    return Measured(
        outputs,
        seconds,
        preparation_s=prepared_s,
        server_s=server_s,
        bytes_up=len(up),
        bytes_down=len(down),
        key_bytes=len(keys),
        security_bits=table_security_bits(DEGREE, sum(PRIME_BITS)),
        squares=squares,
        note=NOTE if squares else "",
        parameters={
            "N": DEGREE,
            "prime_bits": PRIME_BITS,
            "scale_bits": SCALE_BITS,
            "security_by": SECURITY_TABLE,
        },
    )


if __name__ == "__main__":
    main("tenseal-tutorial", ("tenseal",), measure)
