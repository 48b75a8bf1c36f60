"""Encryption and decryption of deep blocks on all cores, as `trusted_node.workers` does it for standard mode.

Processes are part of the node. A secret passes to them through private pipes for the time of one upload; what they
keep between tasks is SEAL's set-up of a chain, without keys.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from heinfer.processes import core_count
from heinfer.ring import pack, packed_bytes, unpack
from heinfer.ring.chain import ChainParameters
from trusted_node.deep import DeepContext
from trusted_node.workers import end_with_parent

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed rows, one polynomial modulo one prime each; the seconds that they took."""

    rows: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class Opened:
    """Values, shape (elements, samples), and the seconds that they took."""

    values: NDArray[np.float64]
    seconds: float


class DeepPool:
    """Processes for deep blocks; a context manager. They start when they are first needed.

    Args:
        workers: processes; the cores of this process where None.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._count = workers or core_count()
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> DeepPool:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes."""
        self.close()

    def close(self) -> None:
        """Stop the processes; work that has not started is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def generate_secret(self, parameters: ChainParameters) -> bytearray:
        """Return a fresh secret for one upload, to be overwritten after it."""
        with self._lock:
            return _context(parameters).generate_secret()

    def make_keys(self, parameters: ChainParameters, secret: bytes) -> Future[Packed]:
        """Make relinearisation keys: rows of shape (primes, 2, primes and P)."""
        return self._submit(_make_keys, parameters, secret)

    def encrypt(
        self, parameters: ChainParameters, secret: bytes, values: NDArray[np.float64], scale: float
    ) -> Future[Packed]:
        """Encrypt values of shape (elements, samples): rows of shape (elements, 2, primes)."""
        return self._submit(_encrypt, parameters, secret, values, scale)

    def decrypt(
        self, parameters: ChainParameters, secret: bytes, rows: bytes, primes: int, scale: float, samples: int
    ) -> Future[Opened]:
        """Check and decrypt rows of shape (elements, 2, primes); what is none is a `CiphertextError`."""
        return self._submit(_decrypt, parameters, secret, rows, primes, scale, samples)

    def _submit(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        with self._lock:
            self._executor = self._executor or self._new_executor()
            try:
                return self._executor.submit(function, *arguments)
            except BrokenProcessPool:  # its query has failed; the next one gets new processes
                self._executor = self._new_executor()
                return self._executor.submit(function, *arguments)

    def _new_executor(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._count, mp_context=get_context("spawn"), initializer=_prepare)


_contexts: dict[ChainParameters, DeepContext] = {}


def _context(parameters: ChainParameters) -> DeepContext:
    if parameters not in _contexts:
        _contexts[parameters] = DeepContext(parameters)
    return _contexts[parameters]


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the node's to handle
    threading.Thread(target=end_with_parent, daemon=True).start()


def _make_keys(parameters: ChainParameters, secret: bytes) -> Packed:
    started = time.perf_counter()
    keys = _context(parameters).open(secret).make_keys()
    return Packed(pack(keys.reshape(-1, parameters.degree)).tobytes(), time.perf_counter() - started)


def _encrypt(parameters: ChainParameters, secret: bytes, values: NDArray[np.float64], scale: float) -> Packed:
    started = time.perf_counter()
    residues = _context(parameters).open(secret).encrypt(values, scale)
    return Packed(pack(residues.reshape(-1, parameters.degree)).tobytes(), time.perf_counter() - started)


def _decrypt(
    parameters: ChainParameters, secret: bytes, rows: bytes, primes: int, scale: float, samples: int
) -> Opened:
    started = time.perf_counter()
    residues = unpack_chain(rows, parameters.primes[:primes], parameters.degree)
    values = _context(parameters).open(secret).decrypt(residues, scale, samples)
    return Opened(values, time.perf_counter() - started)


def unpack_chain(rows: bytes, primes: tuple[int, ...], degree: int) -> NDArray[np.int64]:
    """Return residues of shape (elements, 2, primes, N), each checked to be below its prime.

    Raises:
        CiphertextError: one is not.
    """
    packed = np.frombuffer(rows, np.uint8).reshape(-1, 2, len(primes), packed_bytes(degree))
    out = np.empty((*packed.shape[:3], degree), np.int64)
    for index, prime in enumerate(primes):
        part = np.ascontiguousarray(packed[:, :, index]).reshape(-1, packed.shape[3])
        out[:, :, index] = unpack(part, degree, prime).reshape(*packed.shape[:2], degree)
    return out
