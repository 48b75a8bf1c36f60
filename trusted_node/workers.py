"""Encryption and decryption on all cores.

SEAL's binding holds Python's lock, so that threads don't help: a pool of processes does, started by spawn. They are
part of the trusted node; what passes between them and the node (values, scales, a secret for the time of one upload)
passes through private pipes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from heinfer.processes import core_count
from heinfer.ring import RingParameters, add_weighted_rows, pack, packed_bytes, sums_to_residues, unpack

if TYPE_CHECKING:
    from trusted_node.seal import SealContext

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Encrypted:
    """Packed rows, b then a; their sum, each times its weight, where weights were given; the seconds that it took."""

    rows: bytes
    sums: NDArray[np.int64] | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Weighed:
    """The sum of rows, each times its weight, where weights were given: residues, shape (samples + N,); the seconds."""

    sums: NDArray[np.int64] | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Decrypted:
    """Values, shape (rows, samples), and the seconds that they took."""

    values: NDArray[np.float32]
    seconds: float


@dataclass(frozen=True, slots=True)
class RowTerms:
    """What turns decrypted integers into values: y = integer / (s_x * scale) + bias; both of shape (rows,)."""

    scale: NDArray[np.float64]
    bias: NDArray[np.float64]


class WorkerPool:
    """Processes of the node, started by spawn when they are first needed; a context manager.

    Args:
        workers: processes; the cores of this process where None.
        prepare: runs first in every process.
        arguments: what it is called with.
    """

    def __init__(self, workers: int | None, prepare: Callable[..., None], *arguments: object) -> None:
        self._count = workers or core_count()
        self._prepare = prepare
        self._arguments = arguments
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes."""
        self.close()

    def close(self) -> None:
        """Stop the processes; work that has not started is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def _submit(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Hand work to a process. Where one has died, its query fails and the next one gets new processes."""
        with self._lock:
            self._executor = self._executor or self._new_executor()
            try:
                return self._executor.submit(function, *arguments)
            except BrokenProcessPool:
                self._executor = self._new_executor()
                return self._executor.submit(function, *arguments)

    def _new_executor(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._count, mp_context=get_context("spawn"), initializer=self._prepare, initargs=self._arguments
        )


class CryptoPool(WorkerPool):
    """Processes that encrypt and decrypt in standard mode.

    Args:
        parameters: ring.
        workers: processes; the cores of this process where None.
    """

    def __init__(self, parameters: RingParameters, workers: int | None = None) -> None:
        super().__init__(workers, _prepare, parameters)
        self._parameters = parameters
        self._seal: SealContext | None = None

    def start(self) -> None:
        """Start the processes and wait until they are ready."""
        for future in [self._submit(_warm_up) for _ in range(self._count)]:
            future.result()

    def generate_secret(self) -> bytearray:
        """Return a fresh secret for one upload, to be overwritten after it."""
        with self._lock:
            self._seal = self._seal or _open_seal(self._parameters)
            return self._seal.generate_secret()

    def encrypt(
        self,
        secret: bytes,
        values: NDArray[np.float32],
        scale: NDArray[np.float64],
        weights: NDArray[np.float64] | None = None,
    ) -> Future[Encrypted]:
        """Scale, round and encrypt.

        Args:
            secret: from `generate_secret`.
            values: shape (rows, samples), samples <= N.
            scale: s_x of every sample, shape (samples,).
            weights: of every row, integers in [0, q), for the sum of the rows.
        """
        return self._submit(_encrypt, secret, values, scale, weights)

    def weigh(self, rows: bytes, samples: int, weights: NDArray[np.float64] | None) -> Future[Weighed]:
        """Look whether rows hold residues as they arrived; sum them, each times its weight, coefficient by coefficient.

        Args:
            rows: packed rows. Where a value is not below q the result is a `CiphertextError`.
            samples: coefficients of b that carry values.
            weights: of every row, integers in [0, q); None: no sum is wanted.
        """
        return self._submit(_weigh, rows, samples, weights)

    def decrypt(
        self, secret: bytes, rows: bytes, samples: int, scale: NDArray[np.float64], terms: RowTerms
    ) -> Future[Decrypted]:
        """Check, decrypt and scale back.

        Args:
            secret: the one of the upload.
            rows: packed rows as they arrived.
            samples: coefficients of b that carry values.
            scale: s_x of every sample, shape (samples,).
            terms: scale and bias of every row.
        """
        return self._submit(_decrypt, secret, rows, samples, scale, terms)


_seal: list[SealContext] = []


def _open_seal(parameters: RingParameters) -> SealContext:
    """Load TenSEAL, which a node in prepared mode never needs."""
    from trusted_node.seal import SealContext

    return SealContext(parameters)


def _prepare(parameters: RingParameters) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the node's to handle
    threading.Thread(target=end_with_parent, daemon=True).start()
    _seal.append(_open_seal(parameters))


def end_with_parent() -> None:
    """End this worker when the node is gone, however it went: nobody else would."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _warm_up() -> None:
    """Compile and load everything that a first task would wait for."""
    seal = _seal[0]
    secret = bytes(seal.generate_secret())
    scale = np.ones(1)
    sent = _encrypt(secret, np.ones((1, 1), np.float32), scale)
    _weigh(sent.rows, 1, np.ones(1))
    _decrypt(secret, sent.rows, 1, scale, RowTerms(scale, 0 * scale))


def _encrypt(
    secret: bytes, values: NDArray[np.float32], scale: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> Encrypted:
    started = time.perf_counter()
    samples = values.shape[1]
    integers = np.rint(values * scale).astype(np.int64)
    residues = _seal[0].open(secret).encrypt(integers)
    packed = np.concatenate([pack(residues[:, 0, :samples]), pack(residues[:, 1])], axis=1)
    sums = None if weights is None else _weighted_sum(residues, samples, weights)
    return Encrypted(packed.tobytes(), sums, time.perf_counter() - started)


def _weigh(rows: bytes, samples: int, weights: NDArray[np.float64] | None) -> Weighed:
    started = time.perf_counter()
    residues = _unpack_rows(rows, samples)
    sums = None if weights is None else _weighted_sum(residues, samples, weights)
    return Weighed(sums, time.perf_counter() - started)


def _weighted_sum(residues: NDArray[np.int64], samples: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Sum rows of shape (2, N), each times its weight: the leading coefficients of b, then all of a."""
    modulus = _seal[0].parameters.modulus
    joined = np.concatenate([residues[:, 0, :samples], residues[:, 1]], axis=1)
    sums = np.zeros(joined.shape[1])
    add_weighted_rows(joined, weights, modulus, sums)
    return sums_to_residues(sums, modulus)


def _unpack_rows(rows: bytes, samples: int) -> NDArray[np.int64]:
    """Return residues of shape (rows, 2, N), checked to be below q."""
    parameters = _seal[0].parameters
    head = packed_bytes(samples)
    packed = np.frombuffer(rows, np.uint8).reshape(-1, head + packed_bytes(parameters.degree))
    residues = np.zeros((len(packed), 2, parameters.degree), np.int64)
    residues[:, 0, :samples] = unpack(packed[:, :head], samples, parameters.modulus)
    residues[:, 1] = unpack(packed[:, head:], parameters.degree, parameters.modulus)
    return residues


def _decrypt(secret: bytes, rows: bytes, samples: int, scale: NDArray[np.float64], terms: RowTerms) -> Decrypted:
    started = time.perf_counter()
    residues = _unpack_rows(rows, samples)
    integers = _seal[0].open(secret).decrypt(residues)[:, :samples]
    values = integers / (scale * terms.scale[:, None]) + terms.bias[:, None]
    return Decrypted(values.astype(np.float32), time.perf_counter() - started)
