"""Chains of moduli for blocks that multiply ciphertexts, and exact linear maps on them.

    q = p_0 p_1 ... p_(L-1), and P for switching keys         a ciphertext loses its last prime with every rescaling
    y_j = W x_j mod p_j, for every prime p_j by itself         as `ModularMatrix` has it, for primes of any size

Worked example: one square between two layers, degree 8192. The result needs 50 + 24 bits, the square 34 + 34, P 50: in
all 192 bits, of which the security table allows 214.

Exactness is that of `heinfer.ring.product`: weights are integers, a row's sum of |weight| stays below 2**28 in every
chunk, limbs have 25 bits, so a product of limbs is exact in float64; `join_limbs_of` proves the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.ring.packing import high_limb, integer_of, join_into, kernel, low_limb, scratch_array, split_into
from heinfer.ring.parameters import (
    LIMB_BITS,
    MODULUS_BITS,
    ROW_SUM_LIMIT,
    SECURITY_BITS,
    SECURITY_TABLE,
    cut_inputs,
    is_prime,
    max_modulus_bits,
)

#: Smallest prime of a chain: below, too few are 1 modulo 2N.
MIN_PRIME_BITS: Final = 20
#: Largest magnitude of a weight: a row of one weight must fit into a chunk.
CHAIN_WEIGHT_LIMIT: Final = ROW_SUM_LIMIT
_LIMB_BASE: Final = 2.0**LIMB_BITS
_TILE: Final = 2048
_WORD_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ChainParameters:
    """Degree and moduli of a ring whose ciphertexts are multiplied, checked.

    Attributes:
        degree: N, a power of two in `SECURITY_TABLE`; a ciphertext has N / 2 slots.
        primes: p_0 ... p_(L-1), distinct, of at most 50 bits, 1 modulo 2N; the last is dropped first.
        special: P, of 50 bits, which switches keys and carries no data.

    Raises:
        ParameterError: a number breaks one of these conditions, or all of them together are above the security table.
    """

    degree: int
    primes: tuple[int, ...]
    special: int

    def __post_init__(self) -> None:
        """Check every condition."""
        allowed = max_modulus_bits(self.degree)
        numbers = (*self.primes, self.special)
        if len(set(numbers)) != len(numbers) or not self.primes:
            raise ParameterError("a chain needs distinct primes, one for data at least")
        for number in numbers:
            bits = number.bit_length()
            if not MIN_PRIME_BITS <= bits <= MODULUS_BITS or number % (2 * self.degree) != 1 or not is_prime(number):
                raise ParameterError(
                    f"chain: expected primes of {MIN_PRIME_BITS} to {MODULUS_BITS} bits that are 1 modulo "
                    f"{2 * self.degree}, found {number}"
                )
        if self.special < max(self.primes):
            raise ParameterError("chain: the prime that switches keys must be the largest")
        if self.bits > allowed:
            raise ParameterError(
                f"chain: expected at most {allowed} bits at degree {self.degree} for {SECURITY_BITS}-bit security, "
                f"found {self.bits}; use a larger degree or a shorter chain"
            )

    @property
    def slots(self) -> int:
        """Values of one ciphertext: N / 2."""
        return self.degree // 2

    @property
    def bits(self) -> int:
        """Bits of the product of all primes, P included: what the security table is about."""
        product: int = self.special
        for prime in self.primes:
            product *= prime
        return int(product).bit_length()

    @property
    def security_bits(self) -> int:
        """Bits of security at least, as the table has it for this degree."""
        return SECURITY_BITS


def choose_chain(bits: Sequence[int]) -> ChainParameters:
    """Return the smallest degree and the largest primes of the given sizes that the security table allows.

    Args:
        bits: of p_0, p_1, ... in this order.

    Raises:
        ParameterError: no degree is large enough.
    """
    for degree, allowed in SECURITY_TABLE.items():
        if degree >= 2048 and sum(bits) + MODULUS_BITS <= allowed:
            used: set[int] = set()
            special = _next_prime(MODULUS_BITS, degree, used)
            return ChainParameters(degree, tuple(_next_prime(b, degree, used) for b in bits), special)
    largest = max(SECURITY_TABLE.values())
    raise ParameterError(f"a chain of {sum(bits) + MODULUS_BITS} bits is needed, and {largest} are allowed at most")


def _next_prime(bits: int, degree: int, used: set[int]) -> int:
    """Return the largest prime of so many bits that is 1 modulo 2N and not used yet; it is used then."""
    candidate: int = 2**bits + 1 - 2 * degree
    while candidate in used or not is_prime(candidate):
        candidate -= 2 * degree
        if candidate.bit_length() < bits:
            raise ParameterError(f"there are too few primes of {bits} bits for degree {degree}")
    used.add(candidate)
    return candidate


@kernel
def join_limbs_of(high: float, low: float, modulus: int, inverse: float) -> int:
    """Reduce high * 2**25 + low modulo any modulus from 2**20 to 2**50, exactly.

    Proof. |high| < 2**53 is reduced first: high / q is below 2**33 and estimated with two roundings, so off by less
    than 2**-18, and h = high - rint(high / q) q within 0.51 q < 2**49.1 of zero. It is exact as float64, in two limbs.
    Then v = h 2**25 + low has |v| / q below 2**24.1 + 2**33, estimated with four roundings, so off by less than 2**-17,
    and v - rint(v / q) q is within 0.51 q of zero. All int64 products wrap modulo 2**64, but their differences fit.
    """
    first = integer_of(high) - integer_of(np.rint(high * inverse)) * modulus
    exact = high_limb(first) * _LIMB_BASE + low_limb(first)  # high_limb floors, so this holds for negative ones too
    quotient = integer_of(np.rint((exact * _LIMB_BASE + low) * inverse))
    rest = (first << LIMB_BITS) + integer_of(low) - quotient * modulus
    return rest + ((rest >> 63) & modulus)


@kernel
def _join(product: NDArray[np.float64], out: NDArray[np.int64], modulus: int, accumulate: bool) -> None:
    """As `join_into`, for narrow moduli."""
    if out.strides[1] != _WORD_BYTES:  # never taken; tells the compiler the stride, which lets it vectorise
        return
    inverse = 1.0 / modulus
    columns = out.shape[1]
    for row in range(out.shape[0]):
        if accumulate:
            for column in range(columns):
                total = out[row, column] + join_limbs_of(
                    product[row, column], product[row, columns + column], modulus, inverse
                )
                out[row, column] = total - modulus if total >= modulus else total
        else:
            for column in range(columns):
                out[row, column] = join_limbs_of(product[row, column], product[row, columns + column], modulus, inverse)


class ChainMatrix:
    """An integer matrix that multiplies residues modulo any prime of a chain, on the calling thread.

    Args:
        weights: float64 integers up to `CHAIN_WEIGHT_LIMIT` in magnitude, shape (outputs, inputs).
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self._weights = weights
        self._chunks = cut_inputs(np.abs(weights))

    def multiply(self, residues: NDArray[np.int64], modulus: int, out: NDArray[np.int64]) -> None:
        """Multiply.

        Args:
            residues: int64 in [0, modulus), shape (inputs, columns), C-contiguous.
            modulus: from 2**20 to 2**50.
            out: int64, shape (outputs, columns), overwritten; the last stride is one element, rows may be apart.
        """
        columns = residues.shape[1]
        join = join_into if modulus.bit_length() == MODULUS_BITS else _join
        if not self._chunks:
            out[...] = 0
        for start in range(0, columns, _TILE):
            span = slice(start, min(start + _TILE, columns))
            width = 2 * (span.stop - span.start)
            product = scratch_array("chain", len(self._weights), width)
            for chunk in self._chunks:
                limbs = scratch_array("chain limbs", chunk.stop - chunk.start, width)
                split_into(residues[chunk], span.start, limbs)
                np.matmul(self._weights[:, chunk], limbs, out=product)
                join(product, out[:, span], modulus, chunk.start > 0)
