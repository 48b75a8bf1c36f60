"""Everything secret that the node draws at random: streams, ternary secrets, noise; and how it is overwritten.

Worked example: a secret at N = 2048 takes 469 bytes of stream and noise for 2048 coefficients 16 KB; either draw takes
some 15 microseconds, most of them for the key.

Every draw encrypts zeros with AES-256 in counter mode under a key and an initial counter that `os.urandom` returns for
this draw, and drops them afterwards. There is no generator of ours that lives from one draw to the next: such a state
would be repeated by a fork or by a snapshot of the machine, and would give away other draws if it leaked. The system's
generator is not copied by a fork, and reseeds after a snapshot that the hypervisor announces (Linux 5.18, vmgenid). AES
stands between it and us for speed only: it makes gigabytes a second.

Timing. `draw_noise` and the digits of `draw_ternary` run the same instructions on the same addresses for all values:
no branch, table or division depends on them. AES is OpenSSL's: constant-time with the processor's AES or vector
instructions, with tables only where there are neither. `draw_ternary` rejects bytes of 243 and more, and the
*positions* of rejected bytes show in its time and its stores. They say nothing about the secret: whether a byte is
rejected is independent of all accepted values, which are uniform below 243.

Not overwritten: the 48 bytes from `os.urandom` (Python's bytes cannot be, and are freed at once) and OpenSSL's key
schedule, which OpenSSL itself clears.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.ring import NOISE_LIMIT, kernel

_KEY_BYTES: Final = 32
_COUNTER_BYTES: Final = 16

#: Ternary digits in a byte below 3**5 = 243, and that bound: 94.9 % of bytes are used.
_DIGITS: Final = 5
_BYTE_LIMIT: Final = 3**_DIGITS
_SPARE_BYTES: Final = 32

#: Bits of a noise value: two sums of `NOISE_LIMIT` bits.
_NOISE_MASK: Final = 2 ** (2 * NOISE_LIMIT) - 1
#: Values per stream: 256 KB of it stay in the cache, and its set-up costs a tenth of a nanosecond per value.
_NOISE_CHUNK: Final = 2**15


def keystream(count_bytes: int) -> NDArray[np.uint8]:
    """Draw bytes that nobody can tell from uniform: AES-256-CTR, key and counter fresh from the system for every call.

    Args:
        count_bytes: zero or more; far below 2**68, where counter mode would repeat itself.

    Returns:
        uint8, shape (count_bytes,); the caller's own, to be wiped after use.

    Raises:
        ParameterError: a negative count.
    """
    if count_bytes < 0:
        raise ParameterError(f"keystream: expected zero bytes or more, found {count_bytes}; pass a size")
    stream = np.zeros(count_bytes, np.uint8)
    cipher = Cipher(algorithms.AES(os.urandom(_KEY_BYTES)), modes.CTR(os.urandom(_COUNTER_BYTES)))
    written = cipher.encryptor().update_into(stream.data, stream.data)
    if written != count_bytes:  # zeros would remain: never seen, and fatal for privacy
        raise ParameterError(
            f"keystream: expected {count_bytes} bytes from AES, found {written}; reinstall cryptography"
        )
    return stream


def draw_ternary(count: int, degree: int) -> NDArray[np.int8]:
    """Draw polynomials with independent coefficients, uniform in {-1, 0, 1}, exactly.

    A byte of the stream is uniform below 256; those below 3**5 are uniform there, and their five ternary digits are
    independent. Five in a hundred bytes are rejected.

    Args:
        count: polynomials.
        degree: N.

    Returns:
        int8, shape (count, degree): secrets, to be wiped after use.
    """
    secrets = np.empty(count * degree, np.int8)
    filled = 0
    while filled < secrets.size:
        missing = -(-(secrets.size - filled) // _DIGITS)
        expected = missing * 256 // _BYTE_LIMIT
        stream = keystream(expected + expected // 64 + _SPARE_BYTES)
        filled = _ternary_digits(stream, secrets, filled)
        wipe(stream)
    return secrets.reshape(count, degree)


@kernel
def _ternary_digits(stream: NDArray[np.uint8], digits: NDArray[np.int8], filled: int) -> int:
    """Append the digits of accepted bytes, as long as there is room; returns how many digits are there then.

    A rejected byte is written like any other, and overwritten by the next. Digits by multiplication: 171 * v >> 9 is
    v // 3 for v < 256 (checked by a test), since 171 / 512 = 1/3 + 1/1536.
    """
    for byte in stream:
        if filled == digits.size:
            break
        rest = np.uint32(byte)
        for offset in range(min(_DIGITS, digits.size - filled)):
            third = (rest * np.uint32(171)) >> np.uint32(9)
            digits[filled + offset] = np.int8(rest - np.uint32(3) * third) - np.int8(1)
            rest = third
        filled = min(filled + _DIGITS * int(byte < _BYTE_LIMIT), digits.size)
    return filled


def draw_noise(count: int) -> NDArray[np.int8]:
    """Draw noise: centred binomial, the difference of two sums of 21 bits (SEAL 4.1, rlwe.cpp, sample_poly_cbd).

    The sum of 42 bits less 21 has the same distribution, since 1 - b is a uniform bit if b is: one population count.

    Args:
        count: values.

    Returns:
        int8 in [-21, 21], shape (count,): secret, to be wiped after use. Deviation sqrt(21 / 2) = 3.24.
    """
    noise = np.empty(count, np.int8)
    for start in range(0, count, _NOISE_CHUNK):
        part = noise[start : start + _NOISE_CHUNK]
        stream = keystream(8 * part.size)
        _count_bits(stream.view(np.uint64), part)
        wipe(stream)
    return noise


def _popcount(typing_context: Any, word: Any) -> tuple[Any, Callable[..., Any]]:
    """Number of ones in a 64-bit word, for kernels: LLVM's ctpop, an instruction or a few shifts and sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


popcount = cast("Callable[[int], int]", intrinsic(_popcount))


@kernel
def _count_bits(words: NDArray[np.uint64], noise: NDArray[np.int8]) -> None:
    """Fill noise with the ones among the lower 42 bits of each word, less 21."""
    mask = np.uint64(_NOISE_MASK)
    for index in range(noise.size):
        noise[index] = np.int8(popcount(words[index] & mask)) - np.int8(NOISE_LIMIT)


def wipe(*buffers: NDArray[Any] | bytearray) -> None:
    """Overwrite arrays and byte arrays with zeros, in place.

    Covers this memory only: copies that arithmetic or the system made elsewhere stay until they are used again.

    Args:
        buffers: writeable arrays of any type and strides, or bytearrays.
    """
    for buffer in buffers:
        if isinstance(buffer, bytearray):
            buffer[:] = bytes(len(buffer))
        else:
            buffer[...] = 0
