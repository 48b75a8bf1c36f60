"""Random numbers of a private run: AES-256 in counter mode, one stream for every purpose and step.

A counter block is 16 bytes: purpose (2), step (6), number of the block in the stream (8), all big-endian. Two streams
never meet, since none is 2^64 blocks long, and a step that is taken again draws the same numbers: after a crash the
identical step releases nothing new.

Formal guarantees: a released model's key is 32 bytes from the operating system (`from_system`). Without the key the
streams cannot be told from random ones as long as AES-256 is a pseudorandom permutation. `from_seed` is for debugging
and studies; a model trained with it is not private, since anybody can guess the seed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from heinfer.errors import ParameterError

KEY_BYTES = 32

#: Normal numbers made at a time; bounds memory to about 16 MB.
_NORMALS_AT_A_TIME = 2**16

#: Normal numbers summed into one: makes recovering them from the sum's low bits infeasible (Holohan and Braghin 2021,
#: "Secure random sampling in differential privacy", section 3; n = 2 there).
_SUMMANDS = 4


class Purpose(IntEnum):
    """What a stream is for. One (purpose, step) serves one draw, so that no two draws share numbers."""

    SAMPLING = 1
    NOISE = 2
    COUNT = 3
    AUGMENTATION = 4
    EVALUATION = 5
    INITIALISATION = 6
    AUDIT = 7
    LAYERS = 8  #: of layers that draw numbers, such as dropout


@dataclass(frozen=True, slots=True)
class KeyedRandomness:
    """A key and the streams that it opens.

    Attributes:
        key: 32 secret bytes; not shown by repr.
        seeded: made from a seed that can be guessed: the run is not private.
    """

    key: bytes = field(repr=False)
    seeded: bool

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ParameterError(f"a key has {KEY_BYTES} bytes, found {len(self.key)}")

    @classmethod
    def from_system(cls) -> KeyedRandomness:
        """A fresh secret key from the operating system: for every model that is released."""
        return cls(os.urandom(KEY_BYTES), seeded=False)

    @classmethod
    def from_seed(cls, seed: int) -> KeyedRandomness:
        """A key that anyone can compute: for debugging and studies."""
        return cls(hashlib.sha256(f"heinfer training seed {seed}".encode()).digest(), seeded=True)

    def sample_mask(self, step: int, records: int, probability: float) -> NDArray[np.bool_]:
        """Poisson sample: each record is in it with the probability, independently of the others.

        Args:
            step: number of the step.
            records: size of the data set.
            probability: in [0, 1]; met to within 2^-53.

        Raises:
            ParameterError: the probability is outside [0, 1].
        """
        if not 0 <= probability <= 1:
            raise ParameterError(f"a sampling probability is between 0 and 1, found {probability}")
        mask: NDArray[np.bool_] = _uniforms(self._stream(Purpose.SAMPLING, step), records) < probability
        return mask

    def normal(self, purpose: Purpose, step: int, size: int) -> NDArray[np.float64]:
        """Standard normal numbers, each half the sum of four from Box and Muller's formula.

        The half sum of four is again standard normal and hides the floating-point pattern of each summand, by which
        an attacker could tell which sums are possible (Mironov 2012; Holohan and Braghin 2021).
        Magnitudes end at 17: probability 1e-64 is cut off.

        Args:
            purpose: which stream.
            step: number of the step.
            size: how many numbers.
        """
        stream = self._stream(purpose, step)
        parts = list(_normals(stream, size))
        return np.concatenate(parts) if parts else np.empty(0)

    def seed(self, purpose: Purpose, step: int) -> int:
        """64 bits to seed another generator, for example of augmentation."""
        return int.from_bytes(self._stream(purpose, step).update(bytes(8)), "big")

    def _stream(self, purpose: Purpose, step: int) -> CipherContext:
        if not 0 <= step < 2**48:
            raise ParameterError(f"steps are numbered from 0 to 2^48 - 1, found {step}")
        return _keystream(self.key, int(purpose).to_bytes(2, "big") + step.to_bytes(6, "big") + bytes(8))


def _keystream(key: bytes, first_block: bytes) -> CipherContext:
    """AES in counter mode; encrypting zeros gives the keystream."""
    return Cipher(AES(key), CTR(first_block)).encryptor()


def _integers(stream: CipherContext, size: int) -> NDArray[np.uint64]:
    """Uniform integers in [0, 2^53)."""
    words = np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64, copy=False)
    return words >> np.uint64(11)


def _uniforms(stream: CipherContext, size: int) -> NDArray[np.float64]:
    """Uniform multiples of 2^-53 in [0, 1); exact."""
    return _integers(stream, size).astype(np.float64) * 2.0**-53


def _normals(stream: CipherContext, size: int) -> Iterator[NDArray[np.float64]]:
    """Pieces of `size` standard normal numbers.

    A pair of uniforms gives a cosine and a sine number (Box and Muller 1958). The four summands of a number come from
    four different pairs; the cosines make the first half of a piece and the sines the second.
    """
    for start in range(0, size, _NORMALS_AT_A_TIME):
        count = min(_NORMALS_AT_A_TIME, size - start)
        half = -(-count // 2)
        radii, angles = _uniforms(stream, 2 * _SUMMANDS * half).reshape(2, _SUMMANDS, half)
        radii = np.sqrt(-2.0 * np.log(radii + 2.0**-53))  # of (0, 1], still exact
        angles = (2.0 * np.pi) * angles
        sums = np.concatenate([np.sum(radii * turn(angles), axis=0) for turn in (np.cos, np.sin)])
        yield sums[:count] / np.sqrt(_SUMMANDS)
