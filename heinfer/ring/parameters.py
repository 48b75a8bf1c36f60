"""Ring parameters: an unchecked pair (degree, modulus) becomes a checked, immutable value.

Worked example: degree 2048 with the 50-bit prime 1125899906826241. The security table allows 53 bits at that degree, so
the pair offers at least 128 bits of security, and a residue travels as 6.25 bytes.

The constants here are the contract that keeps products of integer weights with residues exact in float64: a residue is
two limbs of `LIMB_BITS` bits, and a row of weights sums to at most `ROW_SUM_LIMIT` in magnitude, so every partial sum
of a limb product stays below (2**28 - 1) * (2**25 - 1) < 2**53, where float64 represents all integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError

#: Largest log2 q, by degree, for 128-bit security with a ternary secret against classical attacks. Source: Bossuat et
#: al., Security Guidelines for Implementing Homomorphic Encryption, ePrint 2024/463, table 5.2 (stricter than the 2018
#: table of HomomorphicEncryption.org that SEAL enforces).
SECURITY_TABLE: Final[dict[int, int]] = {1024: 26, 2048: 53, 4096: 106, 8192: 214, 16384: 430, 32768: 868}

#: Security that the table stands for, in bits.
SECURITY_BITS: Final = 128

#: Bits of every modulus. Two limbs hold exactly 50 bits, and the packed form of a residue is 50 bits long.
MODULUS_BITS: Final = 50
#: Bytes that one residue takes in transit and in files.
COEFFICIENT_BYTES: Final = MODULUS_BITS / 8

#: Bits per limb: half a residue.
LIMB_BITS: Final = 25

#: Largest magnitude of an integer weight: 16-bit symmetric quantisation.
WEIGHT_LIMIT: Final = 2**15 - 1

#: Largest sum of |weight| over the part of a row that one float64 product covers: 53 bits of significand, less
#: `LIMB_BITS`, is 28. Longer rows are cut.
ROW_SUM_LIMIT: Final = 2**28 - 1

#: Largest magnitude of a noise coefficient: SEAL's centred binomial is the difference of two sums of 21 bits
#: (SEAL 4.1, native/src/seal/util/rlwe.cpp, sample_poly_cbd).
NOISE_LIMIT: Final = 21

#: Standard deviation of that noise, sqrt(21 / 2) = 3.2404, to the three digits that error bounds use. Centred
#: binomials are sub-Gaussian with their own deviation (sums of independent signs: Hoeffding's lemma).
NOISE_DEVIATION: Final = 3.24

#: Bases for which Miller-Rabin decides every integer below 3.3e24, so every 64-bit one. Source: Sorenson and Webster,
#: Strong pseudoprimes to twelve prime bases, Mathematics of Computation 86 (2017).
_BASES: Final = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def max_modulus_bits(degree: int) -> int:
    """Look up the largest modulus that keeps 128-bit security.

    Args:
        degree: ring degree N, a power of two in `SECURITY_TABLE`.

    Returns:
        Largest log2 q, in bits.

    Raises:
        ParameterError: the degree is not in the table.
    """
    if type(degree) is not int or degree not in SECURITY_TABLE:
        raise ParameterError(
            f"ring degree: expected one of {sorted(SECURITY_TABLE)}, found {degree!r}; choose a degree from the "
            "security table"
        )
    return SECURITY_TABLE[degree]


def is_prime(number: int) -> bool:
    """Decide primality of an integer below 2**64 (deterministic Miller-Rabin).

    Args:
        number: the integer, below 2**64.

    Returns:
        True exactly for primes.

    Raises:
        ParameterError: the number is 2**64 or more, where the bases used here are not meant to decide.
    """
    if number >= 2**64:
        raise ParameterError(f"primality: expected a number below 2**64, found {number}; use a smaller modulus")
    if number < 2:
        return False
    if any(number % base == 0 for base in _BASES):
        return number in _BASES
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> twos
    return all(_passes(number, pow(base, odd, number), twos) for base in _BASES)


def _passes(number: int, power: int, twos: int) -> bool:
    """One Miller-Rabin round: base**odd is 1, or one of its repeated squares is -1."""
    if power == 1:
        return True
    for _ in range(twos):
        if power == number - 1:
            return True
        power = power * power % number
    return False


def checked_weights(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Copy integer weights to a read-only array after checking them.

    Args:
        weights: integers as float64 or any integer type, shape (outputs, inputs).

    Returns:
        float64, same shape, C-contiguous, read-only.

    Raises:
        ParameterError: wrong shape or type, or a weight that is not an integer or is above `WEIGHT_LIMIT` in magnitude.
    """
    if not isinstance(weights, np.ndarray) or weights.ndim != 2:
        shape = getattr(weights, "shape", type(weights).__name__)
        raise ParameterError(f"weights: expected an array of shape (outputs, inputs), found {shape}; reshape them")
    if weights.dtype != np.float64 and weights.dtype.kind not in "iu":
        raise ParameterError(f"weights: expected float64 or an integer type, found {weights.dtype}; convert them")
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(weights.astype(np.float64)) <= WEIGHT_LIMIT) | (np.rint(weights) != weights)
    if bad.any():
        row, column = (int(index) for index in np.argwhere(bad)[0])
        raise ParameterError(
            f"weights: expected integers of magnitude at most {WEIGHT_LIMIT}, found {weights[row, column]} at row "
            f"{row}, column {column}; quantise them with a scale per row"
        )
    checked = np.array(weights, dtype=np.float64, order="C")
    checked.flags.writeable = False
    return checked


def cut_inputs(magnitudes: NDArray[np.float64]) -> tuple[slice, ...]:
    """Cut inputs greedily into the longest chunks in which no row sums to more than `ROW_SUM_LIMIT`.

    Args:
        magnitudes: |w|, float64 integers up to `WEIGHT_LIMIT`, shape (outputs, inputs).

    Returns:
        Slices that cover the inputs in order; none for no inputs.
    """
    chunks: list[slice] = []
    start = 0
    while start < magnitudes.shape[1]:
        sums = np.cumsum(magnitudes[:, start:], axis=1).max(axis=0, initial=0.0)
        stop = start + int(np.searchsorted(sums, ROW_SUM_LIMIT, side="right"))
        chunks.append(slice(start, stop))
        start = stop
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class RingParameters:
    """Degree and modulus of the ring Z_q[X] / (X^N + 1), checked.

    The modulus lies strictly between 2**49 and 2**50 and may be any such prime: the recombination of limbs in
    `heinfer.ring.product` is exact on that whole interval, whatever the distance of q from 2**50.

    Attributes:
        degree: N, a power of two in `SECURITY_TABLE`.
        modulus: q, a prime of exactly 50 bits with q = 1 mod 2N, so that the negacyclic NTT exists.

    Raises:
        ParameterError: either number breaks one of the conditions above, or log2 q is above the security table.
    """

    degree: int
    modulus: int

    def __post_init__(self) -> None:
        """Check every condition; the message says which one failed and what to use instead."""
        allowed = max_modulus_bits(self.degree)
        remedy = f"use RingParameters.default({self.degree})"
        if type(self.modulus) is not int:
            raise ParameterError(f"modulus: expected an int, found {type(self.modulus).__name__}; {remedy}")
        bits = self.modulus.bit_length()
        if bits > allowed:
            raise ParameterError(
                f"modulus: expected at most {allowed} bits at degree {self.degree} for {SECURITY_BITS}-bit security, "
                f"found {bits}; use a larger degree"
            )
        if bits != MODULUS_BITS:
            raise ParameterError(
                f"modulus: expected between 2**{MODULUS_BITS - 1} and 2**{MODULUS_BITS}, found {self.modulus} "
                f"({bits} bits); " + (remedy if allowed >= MODULUS_BITS else "use degree 2048 or more")
            )
        if self.modulus % (2 * self.degree) != 1:
            raise ParameterError(
                f"modulus: expected 1 modulo twice the degree ({2 * self.degree}), found "
                f"{self.modulus % (2 * self.degree)}; {remedy}"
            )
        if not is_prime(self.modulus):
            raise ParameterError(f"modulus: expected a prime, found the composite {self.modulus}; {remedy}")

    @classmethod
    def default(cls, degree: int = 2048) -> Self:
        """Take the largest suitable prime below 2**50: the one of SEAL's `CoeffModulus.Create(degree, [50])`.

        Args:
            degree: N, 2048 or more.

        Returns:
            Checked parameters; for degree 2048 the modulus is 1125899906826241.

        Raises:
            ParameterError: the degree is not in the table, or the table does not allow 50 bits for it.
        """
        allowed = max_modulus_bits(degree)
        if allowed < MODULUS_BITS:
            raise ParameterError(
                f"ring degree: expected one that allows {MODULUS_BITS}-bit moduli, found {degree}, which allows "
                f"{allowed}; use degree 2048 or more"
            )
        candidate = 2**MODULUS_BITS + 1 - 2 * degree
        while not is_prime(candidate):
            candidate -= 2 * degree
        return cls(degree, candidate)

    @property
    def modulus_bits(self) -> int:
        """Bits of the modulus."""
        return self.modulus.bit_length()

    @property
    def security_bits(self) -> int:
        """Security that the table vouches for, in bits: at least this much, by estimators usually more."""
        return SECURITY_BITS
