"""How residues are represented: 50-bit strings in transit, two float64 limbs in arithmetic.

Worked example: a row of 100 residues is padded with zeros to 128, four groups of 32, and takes 4 * 200 = 800 bytes.
Residue i of a row occupies bits [50 * i, 50 * i + 50) of the row, bit 0 being the lowest bit of the first byte; 32
residues fill 25 little-endian 64-bit words exactly.

In arithmetic a residue r = h * 2**25 + l is the pair of its limbs (h, l), each exact in float64; `split_into` and
`join_into` convert whole arrays, and `high_limb`, `low_limb` and `join_limbs` are for kernels that do more in one pass.

`unpack` is where residues from outside are checked: everything after it may rely on residues in [0, q).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from heinfer.errors import CiphertextError, ParameterError
from heinfer.ring.parameters import LIMB_BITS, MODULUS_BITS

Function = TypeVar("Function", bound=Callable[..., object])

#: Residues per group, and the 64-bit words that they fill: lcm(50, 64) = 1600 bits.
GROUP_RESIDUES: Final = 32
GROUP_WORDS: Final = GROUP_RESIDUES * MODULUS_BITS // 64
_WORD_BYTES: Final = 8
_SPARE_BITS: Final = 64 - MODULUS_BITS
_MASK: Final = 2**MODULUS_BITS - 1
_LIMB_BASE: Final = 2**LIMB_BITS
_LIMB_MASK: Final = 2**LIMB_BITS - 1
_PART_BITS: Final = 26
_PART: Final = 2.0**_PART_BITS
_PART_INVERSE: Final = 2.0**-_PART_BITS
#: Rows and columns of the blocks that `transpose_into` copies: 8 KiB, a quarter of the first-level cache.
_BLOCK: Final = 32


def kernel(function: Function) -> Function:
    """Compile a function with numba: no GIL, cached on disk, IEEE arithmetic (never fastmath), one thread.

    Numba does not notice when a kernel that is called from another file changes: clear `__pycache__` after an edit.
    """
    return cast(Function, numba.njit(nogil=True, cache=True, fastmath=False)(function))


@kernel
def high_limb(residue: int) -> float:
    """Upper 25 bits of a residue below 2**50, as float64."""
    return float(np.int32(residue >> LIMB_BITS))  # processors without AVX-512 convert vectors of 32 bits only


@kernel
def low_limb(residue: int) -> float:
    """Lower 25 bits of a residue, as float64."""
    return float(np.int32(residue & _LIMB_MASK))


@kernel
def integer_of(value: float) -> int:
    """Convert an integer below 2**53 in magnitude to int64, by vectors of 32 bits.

    Proof. a = rint(value / 2**26) is at most 2**27 and value - a * 2**26 at most 2**25 in magnitude; both are exact.
    """
    upper = np.rint(value * _PART_INVERSE)
    rest = value - upper * _PART
    return (np.int64(np.int32(upper)) << _PART_BITS) + np.int64(np.int32(rest))  # type: ignore[return-value]


@kernel
def join_limbs(high: float, low: float, modulus: int, inverse: float) -> int:
    """Reduce high * 2**25 + low modulo a modulus between 2**49 and 2**50, exactly.

    Proof. |high| and |low| are integers below 2**53, so v = high * 2**25 + low is below 2**78.1 and v / q below 2**29.1
    in magnitude. The float64 estimate of v / q has four roundings at most, 4 * 2**-53 relative, hence an absolute error
    below 2**-21; the rounded quotient t is within 0.5 + 2**-21 of v / q, below 2**30, and v - t * q within
    0.51 * q < 2**50 of zero.
    Both int64 products wrap modulo 2**64, but their true difference fits, so the wrapped one equals it.

    Args:
        high: integer sum of upper limbs, below 2**53 in magnitude.
        low: integer sum of lower limbs, likewise.
        modulus: q.
        inverse: 1 / q, rounded.

    Returns:
        The residue, in [0, q).
    """
    quotient = np.int64(np.int32(np.rint((high * _LIMB_BASE + low) * inverse)))
    rest = (integer_of(high) << LIMB_BITS) + integer_of(low) - quotient * modulus
    return rest + ((rest >> 63) & modulus)  # type: ignore[return-value]


@kernel
def split_into(residues: NDArray[np.int64], start: int, limbs: NDArray[np.float64]) -> None:
    """Split columns [start, start + columns) of residues into the layout of `ModularMatrix.multiply_limbs`.

    Args:
        residues: int64 in [0, 2**50), shape (inputs, any), best C-contiguous.
        start: first column.
        limbs: float64 output, shape (inputs, 2 * columns): upper limbs of all columns, then lower limbs.
    """
    columns = limbs.shape[1] // 2
    for row in range(limbs.shape[0]):
        for column in range(columns):
            residue = residues[row, start + column]
            limbs[row, column] = high_limb(residue)
            limbs[row, columns + column] = low_limb(residue)


@kernel
def join_into(product: NDArray[np.float64], out: NDArray[np.int64], modulus: int, accumulate: bool) -> None:
    """Join the limb sums of a product into residues, or add them to residues that are there.

    Args:
        product: float64 limb sums, shape (outputs, 2 * columns), laid out as in `split_into`.
        out: int64 output, shape (outputs, columns), last stride one element; rows may be apart.
        modulus: q.
        accumulate: add to `out`, which then holds residues in [0, q), instead of overwriting it.
    """
    if out.strides[1] != _WORD_BYTES:  # never taken; tells the compiler the stride, which lets it vectorise
        return
    inverse = 1.0 / modulus
    columns = out.shape[1]
    for row in range(out.shape[0]):
        if accumulate:
            for column in range(columns):
                total = out[row, column] + join_limbs(
                    product[row, column], product[row, columns + column], modulus, inverse
                )
                out[row, column] = total - modulus if total >= modulus else total
        else:
            for column in range(columns):
                out[row, column] = join_limbs(product[row, column], product[row, columns + column], modulus, inverse)


@kernel
def transpose_into(source: NDArray[np.int64], start: int, stop: int, out: NDArray[np.int64]) -> None:
    """Write columns [start, stop) of `source`, shape (rows, columns), to the same rows of `out` (columns, rows).

    Blocks go through a small buffer: rows that are a power of two apart share few cache lines, so memory is read and
    written in runs of at least four lines, and only the buffer by columns.
    """
    rows = source.shape[0]
    buffer = np.empty((_BLOCK, _BLOCK + 1), np.int64)
    for left in range(start, stop, _BLOCK):
        width = min(_BLOCK, stop - left)
        for top in range(0, rows, _BLOCK):
            height = min(_BLOCK, rows - top)
            for row in range(height):
                for column in range(width):
                    buffer[row, column] = source[top + row, left + column]
            for column in range(width):
                for row in range(height):
                    out[left + column, top + row] = buffer[row, column]


_local = threading.local()


def scratch_array(name: str, rows: int, columns: int) -> NDArray[np.float64]:
    """Lend a float64 array, shape (rows, columns), from memory that this thread keeps: fresh pages cost more than BLAS.

    Contents are arbitrary. The next call with the same name on the same thread lends the same memory again.
    """
    size = rows * columns
    kept = getattr(_local, name, None)
    if kept is None or kept.size < size:
        kept = np.empty(size)
        setattr(_local, name, kept)
    return cast("NDArray[np.float64]", kept[:size].reshape(rows, columns))


def check_array(
    name: str, array: NDArray[Any], dtype: type, shape: tuple[int, int | None], *, unit_stride: bool = False
) -> None:
    """Check type, shape (None: any length) and, on request, a last stride of one element."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 2:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ParameterError(f"{name}: expected a two-dimensional {dtype.__name__} array, found {found}; convert it")
    if array.shape[0] != shape[0] or shape[1] not in (None, array.shape[1]):
        raise ParameterError(f"{name}: expected shape {shape}, found {array.shape}; pass matching arrays")
    if unit_stride and array.strides[1] != _WORD_BYTES and array.size:
        raise ParameterError(
            f"{name}: expected a last stride of {_WORD_BYTES} bytes, found {array.strides[1]}; copy it"
        )


def packed_bytes(count: int) -> int:
    """Bytes of a packed row.

    Args:
        count: residues in the row, zero or more.

    Returns:
        200 bytes for every 32 residues or part thereof.

    Raises:
        CiphertextError: the count is negative.
    """
    if count < 0:
        raise CiphertextError(f"packed row: expected a count of zero or more, found {count}; pass the row's length")
    return -(-count // GROUP_RESIDUES) * GROUP_WORDS * _WORD_BYTES


def pack(residues: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Pack residues, 50 bits each, every row padded with zeros to a multiple of 32.

    Args:
        residues: int64 in [0, 2**50), shape (rows, count), any strides.

    Returns:
        uint8, shape (rows, packed_bytes(count)).

    Raises:
        CiphertextError: wrong shape or type, or a value outside [0, 2**50).
    """
    if residues.ndim != 2 or residues.dtype != np.int64:
        raise CiphertextError(
            f"residues: expected int64 of shape (rows, count), found {residues.dtype} {residues.shape}; convert them"
        )
    rows, count = residues.shape
    words = np.empty((rows, packed_bytes(count) // _WORD_BYTES), np.uint64)
    row = _pack_rows(np.ascontiguousarray(residues), words)
    if row >= 0:
        raise CiphertextError(
            f"residues: expected values from 0 to 2**{MODULUS_BITS} - 1, found another in row {row}; reduce them first"
        )
    return words.astype("<u8", copy=False).view(np.uint8)


def unpack(packed: NDArray[np.uint8], count: int, modulus: int) -> NDArray[np.int64]:
    """Unpack residues and check every one of them.

    Args:
        packed: uint8, shape (rows, packed_bytes(count)), any strides; may be read-only.
        count: residues per row.
        modulus: q, at most 2**50.

    Returns:
        int64 in [0, q), shape (rows, count).

    Raises:
        CiphertextError: wrong shape or type, a residue that is not below the modulus, or padding that is not zero.
    """
    expected = packed_bytes(count)
    if packed.ndim != 2 or packed.dtype != np.uint8 or packed.shape[1] != expected:
        raise CiphertextError(
            f"packed residues: expected uint8 of shape (rows, {expected}) for {count} residues per row, found "
            f"{packed.dtype} {packed.shape}; check that both sides agree on the shape"
        )
    residues = np.empty((packed.shape[0], count), np.int64)
    row = _unpack_rows(_aligned_words(packed), residues, modulus)
    if row >= 0:
        raise CiphertextError(
            f"packed residues: expected residues below the modulus {modulus} and zero padding, found otherwise in row "
            f"{row}; the data are corrupt or were made for another modulus"
        )
    return residues


def _aligned_words(packed: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """View rows as native 64-bit words; copy where strides, alignment or byte order ask for it."""
    contiguous = np.ascontiguousarray(packed)
    if contiguous.ctypes.data % _WORD_BYTES:
        contiguous = contiguous.copy()
    words: NDArray[Any] = contiguous.view("<u8")
    return words.astype(np.uint64, copy=False)


@kernel
def _pack_rows(residues: NDArray[np.int64], words: NDArray[np.uint64]) -> int:
    """Fill the words of every row; returns a row that holds a value outside [0, 2**50), or -1."""
    rows, count = residues.shape
    groups = words.shape[1] // GROUP_WORDS
    bad = -1
    for row in range(rows):
        seen = np.int64(0)
        for group in range(groups):
            word = group * GROUP_WORDS
            pending = np.uint64(0)
            filled = 0
            for lane in range(GROUP_RESIDUES):
                index = group * GROUP_RESIDUES + lane
                value = residues[row, index] if index < count else np.int64(0)
                seen |= value
                pending |= np.uint64(value) << np.uint64(filled)
                if filled >= _SPARE_BITS:
                    words[row, word] = pending
                    word += 1
                    pending = np.uint64(value) >> np.uint64(64 - filled)
                    filled -= _SPARE_BITS
                else:
                    filled += MODULUS_BITS
        if seen >> MODULUS_BITS != 0:
            bad = row
    return bad


@kernel
def _unpack_rows(words: NDArray[np.uint64], residues: NDArray[np.int64], modulus: int) -> int:
    """Fill the residues of every row; returns a row with a residue >= q or non-zero padding, or -1."""
    rows, count = residues.shape
    groups = words.shape[1] // GROUP_WORDS
    mask = np.uint64(_MASK)
    bad = -1
    for row in range(rows):
        wrong = False
        for group in range(groups):
            for lane in range(GROUP_RESIDUES):
                index = group * GROUP_RESIDUES + lane
                bit = lane * MODULUS_BITS
                word = group * GROUP_WORDS + (bit >> 6)
                shift = bit & 63
                raw = words[row, word] >> np.uint64(shift)
                if shift > _SPARE_BITS:
                    raw |= words[row, word + 1] << np.uint64(64 - shift)
                value = np.int64(raw & mask)
                if index < count:
                    residues[row, index] = value
                if value >= (modulus if index < count else 1):
                    wrong = True
        if wrong:
            bad = row
    return bad
