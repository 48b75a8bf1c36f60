"""Orion (orion-fhe), cut by hand as heinfer cuts: each layer alone on ciphertexts, the rest on a client. Licence: MIT.

    one process:  encode, encrypt  ->  product by diagonals  ->  decrypt, ReLU, ...   once for each layer with weights

Orion keeps client and server in one: its scheme holds the secret key beside the evaluation keys, and nothing of it
serialises a ciphertext. Bytes are therefore those of the polynomials that would have to cross, 8 bytes a coefficient:
two for each prime of the level. Of the rotation keys one is serialised, which the library can, and counted for all.

N = 8192 in the real subring (8192 slots), primes of 55 and 40 bits, a special one of 61: 156 of the 214 bits that 128
bits of security allow. Secrets have 192 entries that are not zero, Orion's default; the table is for denser
ones, so take the figure as an upper estimate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import orion
import orion.nn as on
import torch
from measuring import SECURITY_TABLE, Measured, Task, Traffic, main, repeat_queries, summed_up, table_security_bits
from networks import Convolution, Linear, evaluate_hybrid, read_network
from orion.core.orion import scheme
from orion_modules import as_module, chain, undo_gap

LOG_N, PRIME_BITS, SPECIAL_BITS, SCALE_BITS, SECRET_WEIGHT = 13, [55, 40], [61], 40, 192

CONFIGURATION = {
    "ckks_params": {
        "LogN": LOG_N,
        "LogQ": PRIME_BITS,
        "LogP": SPECIAL_BITS,
        "LogScale": SCALE_BITS,
        "H": SECRET_WEIGHT,
        "RingType": "ConjugateInvariant",
    },
    "orion": {"margin": 2, "embedding_method": "hybrid", "backend": "lattigo", "debug": False, "io_mode": "none"},
}


@dataclass(slots=True)
class Compiled:
    """A layer's network, and at which level its input is encrypted."""

    network: torch.nn.Module
    layer: torch.nn.Module
    input_level: int


@dataclass(slots=True)
class Session:
    """Compiled layers by name, and what queries took."""

    compiled: dict[str, Compiled] = field(default_factory=dict)
    traffics: list[Traffic] = field(default_factory=list)

    def compile(self, layer: Linear | Convolution, x: np.ndarray) -> np.ndarray:
        """Compile a layer for inputs like these, and return its output in the clear."""
        module = as_module(on, layer)
        network = chain(on, [module])
        sample = torch.from_numpy(x.astype(np.float32))
        network.eval()
        orion.fit(network, sample)
        self.compiled[layer.name] = Compiled(network, module, orion.compile(network))
        return network(sample).detach().numpy()

    def evaluate(self, layer: Linear | Convolution, x: np.ndarray) -> np.ndarray:
        """Take values through a layer under encryption."""
        part, traffic = self.compiled[layer.name], self.traffics[-1]
        encrypted = orion.encrypt(orion.encode(torch.from_numpy(x.astype(np.float32)), part.input_level))
        part.network.he()
        started = time.perf_counter()
        answer = part.network(encrypted)
        traffic.server_s += time.perf_counter() - started
        traffic.up += _bytes(len(encrypted), part.input_level)
        traffic.down += _bytes(len(answer), part.input_level - 1)
        decrypted = orion.decrypt(answer)  # owns the plaintexts: they end with it
        slots = np.concatenate([scheme.backend.Decode(plaintext) for plaintext in decrypted.ids])
        shapes = tuple(part.layer.fhe_output_shape), tuple(part.layer.output_shape)
        return undo_gap(slots, *shapes, part.layer.output_gap)


def _bytes(ciphertexts: int, level: int) -> int:
    """Return the size of ciphertexts: two polynomials for each prime."""
    return ciphertexts * 2 * (level + 1) * (1 << LOG_N) * 8


def _key_bytes() -> int:
    """Return the size of the rotation keys: one is serialised, all are alike."""
    elements = scheme.lt_evaluator.saved_rotation_keys
    key, pointer = scheme.backend.GenerateAndSerializeRotationKey(next(iter(elements)))
    scheme.backend.FreeCArray(pointer)
    return len(key) * len(elements)


def measure(task: Task) -> Measured:
    """Measure one query after the other."""
    network = read_network(task.model)
    started = time.perf_counter()
    orion.init_scheme(CONFIGURATION)
    session = Session()
    evaluate_hybrid(network, task.x[:1], session.compile)
    prepared_s = time.perf_counter() - started

    def query(sample: np.ndarray) -> np.ndarray:
        session.traffics.append(Traffic())
        return evaluate_hybrid(network, sample, session.evaluate)

    outputs, seconds = repeat_queries(task, query)
    return Measured(
        outputs,
        seconds,
        preparation_s=prepared_s,
        **summed_up(session.traffics),
        key_bytes=_key_bytes(),
        security_bits=table_security_bits(1 << LOG_N, sum(PRIME_BITS) + sum(SPECIAL_BITS)),
        note="activations exact on the client; client and server share keys and process, bytes are computed",
        parameters={
            "N": 1 << LOG_N,
            "prime_bits": [*PRIME_BITS, *SPECIAL_BITS],
            "scale_bits": SCALE_BITS,
            "secret_weight": SECRET_WEIGHT,
            "security_by": f"{SECURITY_TABLE}, for denser secrets",
        },
    )


if __name__ == "__main__":
    main("orion-hybrid", ("orion-fhe",), measure)
