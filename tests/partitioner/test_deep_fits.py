"""Fits of activations: minimax near the best there is, least squares best where values are."""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi

import numpy as np
import pytest
from numpy.polynomial import chebyshev, polynomial
from numpy.typing import NDArray
from scipy.optimize import linprog

from partitioner.deep.fitting import Fit, fit_polynomial

Floats = NDArray[np.float64]
GRID = np.linspace(-1, 1, 2001)


def best_error(function: Callable[[Floats], Floats], degree: int) -> float:
    """Return the smallest largest error on the grid: a linear programme in coefficients and error."""
    basis = chebyshev.chebvander(GRID, degree)
    values, ones = function(GRID), np.ones((len(GRID), 1))
    rows = np.block([[basis, -ones], [-basis, -ones]])
    solved = linprog(
        [0] * (degree + 1) + [1], rows, np.concatenate([values, -values]), bounds=[(None, None)] * (degree + 2)
    )
    return float(solved.fun)


def test_the_best_error_is_the_known_one() -> None:
    assert best_error(np.abs, 2) == pytest.approx(1 / 8, rel=1e-3)  # x**2 + 1/8, by equal oscillation


@pytest.mark.parametrize("degree", [2, 3, 5, 7])
@pytest.mark.parametrize("function", [np.abs, lambda x: np.tanh(3 * x), lambda x: np.maximum(x, 0)])
def test_minimax_is_within_lebesgues_constant_of_the_best(function: Callable[[Floats], Floats], degree: int) -> None:
    fitted = fit_polynomial(function, np.empty(0), degree, Fit.MINIMAX)
    error = np.abs(polynomial.polyval(GRID, fitted) - function(GRID)).max()
    best = best_error(function, degree)
    assert best * 0.999 <= error <= (2 + 2 / pi * log(degree + 1)) * best


def test_least_squares_follow_the_values_seen() -> None:
    rng = np.random.default_rng(0)
    seen = rng.normal(0.3, 0.1, 5000).clip(-1, 1)
    errors = {}
    for fit in Fit:
        fitted = fit_polynomial(np.abs, seen, 3, fit)
        errors[fit] = float(np.sqrt(np.mean((polynomial.polyval(seen, fitted) - np.abs(seen)) ** 2)))
        assert len(fitted) == 4
    assert errors[Fit.LEAST_SQUARES] < errors[Fit.MINIMAX] / 2


def test_polynomials_are_fitted_as_they_are() -> None:
    rng = np.random.default_rng(1)
    coefficients = rng.normal(size=4)
    for fit in Fit:
        fitted = fit_polynomial(lambda x: polynomial.polyval(x, coefficients), rng.uniform(-1, 1, 500), 5, fit)
        assert fitted == pytest.approx([*coefficients, 0, 0], abs=1e-9)
