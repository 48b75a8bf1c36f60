"""Polynomials of ciphertexts: the order of operations gives the polynomial, at the promised level and scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from heinfer.errors import ParameterError
from heinfer.operators.polynomials import (
    Track,
    complete_square,
    levels,
    polynomial_terms,
)
from heinfer.ring.chain import choose_chain


@dataclass(frozen=True)
class Number:
    value: float
    primes: int
    scale: float


class Numbers:
    """Plain numbers that follow the rules of ciphertexts, and count multiplications."""

    def __init__(self, moduli: tuple[int, ...]) -> None:
        self.moduli = moduli
        self.products = 0

    def track(self, value: Number) -> Track:
        return Track(value.primes, value.scale)

    def multiply(self, left: Number, right: Number) -> Number:
        assert left.primes == right.primes
        self.products += 1
        return Number(left.value * right.value, left.primes, left.scale * right.scale)

    def scale_by(self, value: Number, factor: float, scale: float) -> Number:
        return Number(value.value * (round(factor * scale) / scale), value.primes, value.scale * scale)

    def add(self, left: Number, right: Number) -> Number:
        assert left.primes == right.primes
        assert left.scale == pytest.approx(right.scale, rel=1e-13)
        return replace(left, value=left.value + right.value)

    def shift(self, value: Number, constant: float) -> Number:
        return replace(value, value=value.value + constant)

    def rescale(self, value: Number) -> Number:
        return Number(value.value, value.primes - 1, value.scale / self.moduli[value.primes - 1])

    def lower(self, value: Number, primes: int) -> Number:
        assert primes <= value.primes
        return replace(value, primes=primes)


@pytest.mark.parametrize("degree", range(1, 8))
def test_polynomials_end_at_the_promised_level_and_scale(degree: int) -> None:
    moduli = choose_chain((50, 24, 50, 50, 50)).primes
    numbers = Numbers(moduli)
    coefficients = np.random.default_rng(degree).normal(size=degree + 1)
    for v in (-1.0, -0.3, 0.0, 0.7, 1.0):
        terms = polynomial_terms(numbers, Number(v, 5, 2.0**50), coefficients.tolist(), moduli, 2.0**32)
        result = numbers.rescale(terms)
        assert result.primes == 5 - levels(degree)
        assert result.scale == pytest.approx(2.0**32, rel=1e-13)
        assert result.value == pytest.approx(np.polynomial.polynomial.polyval(v, coefficients), abs=1e-8)


def test_multiplications_are_few() -> None:
    moduli = choose_chain((50, 24, 50, 50, 50)).primes
    counts = []
    for degree in range(1, 8):
        numbers = Numbers(moduli)
        polynomial_terms(numbers, Number(0.5, 5, 2.0**50), [1.0] * (degree + 1), moduli, 2.0**32)
        counts.append(numbers.products)
    assert counts == [0, 1, 2, 3, 4, 4, 5]


def test_squares() -> None:
    coefficients = np.array([[1.0, 2.0, 0.5], [0.1, -0.2, -3.0]])
    shift, factor, constant = complete_square(coefficients)
    for v in (-1.0, 0.0, 0.7):
        expected = [np.polynomial.polynomial.polyval(v, c) for c in coefficients]
        assert factor * (v + shift) ** 2 + constant == pytest.approx(expected, rel=1e-13)


def test_what_does_not_fit_is_refused() -> None:
    moduli = choose_chain((50, 24, 34)).primes
    numbers = Numbers(moduli)
    with pytest.raises(ParameterError, match="1 to 7"):
        levels(8)
    with pytest.raises(ParameterError, match="does not fit"):
        polynomial_terms(numbers, Number(0.5, 2, 2.0**50), [1.0] * 4, moduli, 2.0**32)
    with pytest.raises(ParameterError, match="factor's scale"):
        polynomial_terms(numbers, Number(0.5, 3, 2.0**50), [1.0] * 2, moduli, 2.0**32)
