"""Orion v2 (orion-v2-compiler, orion-v2-evaluator): a compiled model and a server for CKKS. Licence: MIT.

    client                                    server (keys for rotation, one compiled model a layer)
    encode, encrypt   -> bytes, a round a layer ->   product by diagonals   -> bytes ->   decrypt, ReLU, ...

Orion compiles whole networks with polynomials in place of ReLU. `--form hybrid`, the default, cuts the network by hand
as heinfer does: each layer with weights is compiled alone, and the client applies the rest exactly. `--form square`
compiles the whole network with squares, for networks without branches and pooling: one round, and errors are against
the same network with squares, in the clear.

N = 8192 in the real subring (8192 slots), primes of 55 and 40 bits, a special one of 61: 156 of the 214 bits that 128
bits of security allow. With squares N = 16384, 55 and 40 for each level and 61. Secrets have 192 entries that are not
zero, Orion's default; the table is for denser ones, so take the figure as an upper estimate.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orion_compiler.nn as on
import torch
from lattigo.ckks import Encoder, Parameters
from lattigo.rlwe import (
    Ciphertext,
    Decryptor,
    Encryptor,
    GaloisKey,
    KeyGenerator,
    MemEvaluationKeySet,
    RelinearizationKey,
)
from measuring import SECURITY_TABLE, Measured, Task, Traffic, main, repeat_queries, summed_up, table_security_bits
from networks import (
    Convolution,
    Linear,
    Network,
    NotExpressibleError,
    Other,
    evaluate_hybrid,
    evaluate_prefix,
    read_network,
)
from orion_compiler import CKKSParams, Compiler
from orion_evaluator import Evaluator, Model
from orion_modules import as_module, chain, undo_gap

FIRST_BITS, SCALE_BITS, SPECIAL_BITS = 55, 40, 61
HYBRID_LOG_N, SQUARE_LOG_N = 13, 14


def parameters_for(log_n: int, levels: int) -> CKKSParams:
    """Return parameters with so many levels, in the real subring."""
    return CKKSParams(
        logn=log_n,
        logq=(FIRST_BITS, *[SCALE_BITS] * levels),
        logp=(SPECIAL_BITS,),
        log_default_scale=SCALE_BITS,
    )


@dataclass(slots=True)
class Compiled:
    """One compiled model, loaded by the server, and the layout of its outputs.

    Attributes:
        model: The server's.
        input_level: At which the client encrypts.
        galois_elements: Of the rotations that it needs.
        output_shape: Of one sample.
        encrypted_shape: Of the slots' values: (1, channels, height, width) with gaps, or (1, outputs).
        gap: Channels interleaved in each direction; 1 for none.
    """

    model: Model
    parameters: dict[str, Any]
    input_level: int
    galois_elements: list[int]
    needs_relinearisation: bool
    output_shape: tuple[int, ...]
    encrypted_shape: tuple[int, ...]
    gap: int


def compile_model(parts: list[on.Module], sample: np.ndarray, parameters: CKKSParams) -> Compiled:
    """Compile a chain of modules for inputs like the sample's."""
    compiler = Compiler(chain(on, parts), parameters)
    compiler.fit(torch.from_numpy(sample.astype(np.float32)))
    model = Model.load(compiler.compile().to_bytes())
    compiler.close()
    client, manifest, level = model.client_params()
    last = next(part for part in reversed(parts) if isinstance(part, on.Linear | on.Conv2d))
    return Compiled(
        model,
        client,
        level,
        manifest["galois_elements"],
        manifest["needs_rlk"],
        tuple(last.output_shape),
        tuple(last.fhe_output_shape),
        last.output_gap,
    )


class Client:
    """Holds the secret key."""

    def __init__(self, compiled: list[Compiled]) -> None:
        first = compiled[0].parameters
        self.parameters = Parameters.from_dict(first)
        self.slots, self.scale = self.parameters.max_slots(), self.parameters.default_scale()
        generator = KeyGenerator(self.parameters)
        secret = generator.gen_secret_key()
        self.encoder = Encoder(self.parameters)
        self.encryptor = Encryptor(self.parameters, generator.gen_public_key(secret))
        self.decryptor = Decryptor(self.parameters, secret)
        elements = sorted({element for part in compiled for element in part.galois_elements})
        galois: list[GaloisKey] = [generator.gen_galois_key(secret, element) for element in elements]
        relinearisation: RelinearizationKey | None = None
        if any(part.needs_relinearisation for part in compiled):
            relinearisation = generator.gen_relin_key(secret)
        self.keys = MemEvaluationKeySet(relinearisation, galois).marshal_binary()

    def encrypt(self, x: np.ndarray, level: int) -> list[bytes]:
        """Return one ciphertext for each `slots` values."""
        values = np.zeros(math.ceil(x.size / self.slots) * self.slots)
        values[: x.size] = x.ravel()
        rows = values.reshape(-1, self.slots)
        plaintexts = (self.encoder.encode(row.tolist(), level, self.scale) for row in rows)
        return [self.encryptor.encrypt_new(plaintext).marshal_binary() for plaintext in plaintexts]

    def decrypt(self, answers: list[bytes], compiled: Compiled) -> np.ndarray:
        """Return the outputs in their own shape, gaps undone."""
        plaintexts = (self.decryptor.decrypt_new(Ciphertext.unmarshal_binary(answer)) for answer in answers)
        values = np.concatenate([self.encoder.decode(plaintext, self.slots) for plaintext in plaintexts])
        return undo_gap(values, compiled.encrypted_shape, compiled.output_shape, compiled.gap)


@dataclass(slots=True)
class Session:
    """A client and a server that exchange bytes."""

    client: Client
    server: Evaluator
    traffics: list[Traffic] = field(default_factory=list)

    def exchange(self, x: np.ndarray, compiled: Compiled) -> np.ndarray:
        """Take values through one compiled model on the server."""
        messages = self.client.encrypt(x, compiled.input_level)
        started = time.perf_counter()
        answers = self.server.forward(compiled.model, messages)
        traffic = self.traffics[-1]
        traffic.server_s += time.perf_counter() - started
        traffic.up += sum(map(len, messages))
        traffic.down += sum(map(len, answers))
        return self.client.decrypt(answers, compiled)


def compile_hybrid(task: Task, network: Network) -> dict[str, Compiled]:
    """Compile each layer with weights alone, for the shapes that the first sample has there."""
    compiled: dict[str, Compiled] = {}
    parameters = parameters_for(HYBRID_LOG_N, 1)

    def linear(layer: Linear | Convolution, x: np.ndarray) -> np.ndarray:
        module = as_module(on, layer)
        compiled[layer.name] = compile_model([module], x, parameters)
        return module(torch.from_numpy(x.astype(np.float32))).detach().numpy()

    evaluate_hybrid(network, task.x[:1], linear)
    return compiled


def measure_hybrid(task: Task) -> Measured:
    """Measure one query after the other, a round for each layer with weights."""
    network = read_network(task.model)
    started = time.perf_counter()
    compiled = compile_hybrid(task, network)
    parts = list(compiled.values())
    client = Client(parts)
    session = Session(client, Evaluator(parts[0].parameters, client.keys))
    prepared_s = time.perf_counter() - started

    def query(sample: np.ndarray) -> np.ndarray:
        session.traffics.append(Traffic())
        return evaluate_hybrid(network, sample, lambda layer, x: session.exchange(x, compiled[layer.name]))

    note = "activations exact on the client, a round for each layer with weights"
    return _measured(task, query, session, prepared_s, parameters_for(HYBRID_LOG_N, 1), note, squares=False)


def measure_square(task: Task) -> Measured:
    """Measure the whole network encrypted, with squares in place of ReLU."""
    network = read_network(task.model)
    layers = network.layers[network.first_linear() :]
    if any(isinstance(layer, Other) and layer.kind == "Add" for layer in layers):
        raise NotExpressibleError("a network with branches, deep enough to need bootstrapping, is beyond these scripts")
    parts = [as_module(on, layer) for layer in layers]
    parameters = parameters_for(SQUARE_LOG_N, sum(not isinstance(part, on.Flatten) for part in parts))
    started = time.perf_counter()
    compiled = compile_model(parts, evaluate_prefix(network, task.x[:1]), parameters)
    client = Client([compiled])
    session = Session(client, Evaluator(compiled.parameters, client.keys))
    prepared_s = time.perf_counter() - started

    def query(sample: np.ndarray) -> np.ndarray:
        session.traffics.append(Traffic())
        return session.exchange(evaluate_prefix(network, sample), compiled)

    note = "squares in place of ReLU, the whole network encrypted; errors are against the same network with squares"
    return _measured(task, query, session, prepared_s, parameters, note, squares=True)


def _measured(
    task: Task,
    query: Callable[[np.ndarray], np.ndarray],
    session: Session,
    prepared_s: float,
    parameters: CKKSParams,
    note: str,
    squares: bool,
) -> Measured:
    outputs, seconds = repeat_queries(task, query)
    log_modulus = sum(parameters.logq) + sum(parameters.logp)
    return Measured(
        outputs,
        seconds,
        preparation_s=prepared_s,
        **summed_up(session.traffics),
        key_bytes=len(session.client.keys),
        security_bits=table_security_bits(1 << parameters.logn, log_modulus),
        squares=squares,
        note=note,
        parameters={
            "N": 1 << parameters.logn,
            "prime_bits": [*parameters.logq, *parameters.logp],
            "scale_bits": SCALE_BITS,
            "secret_weight": parameters.h,
            "security_by": f"{SECURITY_TABLE}, for denser secrets",
        },
    )


def run() -> None:
    """Choose the form, then run as every peer's script."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--form", choices=("hybrid", "square"), default="hybrid")
    form, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    measure = {"hybrid": measure_hybrid, "square": measure_square}[form.form]
    main(f"orion-v2-{form.form}", ("orion-v2-compiler", "orion-v2-evaluator", "orion-v2-lattigo"), measure)


if __name__ == "__main__":
    run()
