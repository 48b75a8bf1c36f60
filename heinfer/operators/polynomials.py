"""Polynomials of ciphertexts: how they are evaluated, at which levels and scales.

    degree 2     (v + h)**2                                  h goes into the bias before it, the factor to its reader
    up to 3      (c0 + c1 v) + v**2 (c2 + c3 v)              two levels
    up to 7      low(v) + v**4 high(v)                       three levels; low and high as above

The last rescaling is left to the caller, who adds polynomials of many values up before it (pooling): relinearisation
and rescaling are most of the work, and are then done once a sum.

`Arithmetic` is what evaluates: ciphertexts (server), numbers and noise (tests), or primes and scales alone (planner);
the order of operations is the same for all. A value has `primes` primes and a scale. Sums are made of terms of one
scale, exactly: the scale of every factor is chosen so that products meet. So a whole polynomial ends at the scale that
the plan asks for, whatever the primes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError

V = TypeVar("V")
Floats = NDArray[np.float64]
#: Largest degree.
MAX_DEGREE: Final = 7
#: A factor of smaller scale would lose too much by rounding to an integer.
MIN_FACTOR_BITS: Final = 20


@dataclass(frozen=True, slots=True)
class Track:
    """What is known of a ciphertext without looking at it: how many primes it has, and its scale."""

    primes: int
    scale: float


class Arithmetic(Protocol[V]):
    """Operations on ciphertexts; none changes its operands."""

    def track(self, value: V) -> Track:
        """Return primes and scale of a value."""

    def multiply(self, left: V, right: V) -> V:
        """Multiply two values of equally many primes; scales multiply. Not rescaled, so no factor of a product yet."""

    def scale_by(self, value: V, factor: float, scale: float) -> V:
        """Multiply by a constant, encoded at a scale; scales multiply. Not rescaled."""

    def add(self, left: V, right: V) -> V:
        """Add two values of the same primes and scale."""

    def shift(self, value: V, constant: float) -> V:
        """Add a constant at the value's own scale."""

    def rescale(self, value: V) -> V:
        """Drop the last prime and divide by it; ciphertexts are relinearised first, where they come of a product."""

    def lower(self, value: V, primes: int) -> V:
        """Drop last primes without dividing."""


def levels(degree: int) -> int:
    """Return how many primes a polynomial of a degree takes in the general way (degree 2 by `square`: two narrow ones).

    Raises:
        ParameterError: the degree is not from 1 to `MAX_DEGREE`.
    """
    if not 1 <= degree <= MAX_DEGREE:
        raise ParameterError(f"degree of a polynomial: expected 1 to {MAX_DEGREE}, found {degree}")
    return degree.bit_length()


def polynomial_terms(
    arithmetic: Arithmetic[V], value: V, coefficients: Sequence[float], moduli: Sequence[int], target: float
) -> V:
    """Evaluate a polynomial in the general way, save for the last rescaling.

    Args:
        arithmetic: of the values.
        value: v, `levels` primes above the result.
        coefficients: c_0 ... c_n, n from 1 to `MAX_DEGREE`; zeros don't change the order of operations.
        moduli: all primes of the chain, first to last.
        target: scale of the result, when it is rescaled.

    Returns:
        c_0 + c_1 v + ...; rescaled once, it has `levels(n)` primes less than `value`, and the target scale.

    Raises:
        ParameterError: the degree is out of range, or a factor's scale would be too small.
    """
    start = arithmetic.track(value).primes
    primes = start - levels(len(coefficients) - 1)
    if primes < 1:
        raise ParameterError(f"a polynomial of degree {len(coefficients) - 1} does not fit below {start} primes")
    powers = {1: value}
    exponent = 1
    while 2 * exponent < len(coefficients):
        powers[2 * exponent] = arithmetic.rescale(arithmetic.multiply(powers[exponent], powers[exponent]))
        exponent *= 2
    return _Terms(arithmetic, powers, moduli).make(coefficients, primes + 1, target * moduli[primes])


class _Terms(Generic[V]):
    """Sums of terms of one polynomial, not rescaled."""

    def __init__(self, arithmetic: Arithmetic[V], powers: dict[int, V], moduli: Sequence[int]) -> None:
        self._arithmetic = arithmetic
        self._powers = powers
        self._moduli = moduli

    def make(self, coefficients: Sequence[float], primes: int, scale: float) -> V:
        """Return the polynomial with so many primes, at a scale."""
        arithmetic = self._arithmetic
        if len(coefficients) <= 2:
            return arithmetic.shift(self._term(1, coefficients[1], primes, scale), coefficients[0])
        split = 1 << ((len(coefficients) - 1).bit_length() - 1)
        power = arithmetic.lower(self._powers[split], primes)
        own = arithmetic.track(power).scale
        if len(coefficients) == split + 1:
            product = self._term(split, coefficients[split], primes, scale)
        else:
            raw = self.make(coefficients[split:], primes + 1, scale / own * self._moduli[primes])
            product = arithmetic.multiply(power, arithmetic.rescale(raw))
        low = coefficients[:split]
        if len(low) == 1:
            return arithmetic.shift(product, low[0])
        return arithmetic.add(product, self.make(low, primes, scale))

    def _term(self, exponent: int, factor: float, primes: int, scale: float) -> V:
        value = self._arithmetic.lower(self._powers[exponent], primes)
        needed = scale / self._arithmetic.track(value).scale
        if needed < 2.0**MIN_FACTOR_BITS:
            raise ParameterError(f"a factor's scale would be {needed:.3g}: the chain's primes do not fit the scales")
        return self._arithmetic.scale_by(value, factor, needed)


def complete_square(coefficients: Floats) -> tuple[Floats, Floats, Floats]:
    """Write c_0 + c_1 v + c_2 v**2 as a (v + h)**2 + k.

    Args:
        coefficients: shape (rows, 3), c_2 nowhere zero.

    Returns:
        h, a, k, shape (rows,) each.
    """
    c0, c1, c2 = coefficients.T
    shift = c1 / (2 * c2)
    return shift, c2, c0 - c2 * shift**2
