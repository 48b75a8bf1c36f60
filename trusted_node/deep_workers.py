"""Encryption and decryption of deep blocks on all cores, as `trusted_node.workers` does it for standard mode.

Processes are part of the node. A secret passes to them through private pipes for the time of one upload; what they
keep between tasks is SEAL's set-up of a chain, without keys.
"""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from heinfer.ring import pack, packed_bytes, unpack
from heinfer.ring.chain import ChainParameters
from trusted_node.deep import DeepContext
from trusted_node.workers import WorkerPool, end_with_parent

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


class DeepPool(WorkerPool):
    """Processes for deep blocks.

    Args:
        workers: processes; the cores of this process where None.
    """

    def __init__(self, workers: int | None = None) -> None:
        super().__init__(workers, _prepare)

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
