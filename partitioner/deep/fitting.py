"""Fit polynomials to activations, on the values that calibration data bring there.

    least squares    the values seen, with a thin uniform weight over the whole interval, so that no tail is ignored
    minimax          Chebyshev interpolation of the function on the interval: close to the smallest largest error

Polynomials are in u = y / range, where the interval is [-1, 1]. Sources: N. Trefethen, Approximation Theory and
Approximation Practice (2013), chapters 4 and 16, for interpolation in Chebyshev points and how near it is to the best.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.polynomial import chebyshev, polynomial
from numpy.typing import NDArray

Floats = NDArray[np.float64]
#: Points of the uniform part, and its weight against all values that were seen.
_GRID: Final = 257
_UNIFORM_SHARE: Final = 0.05
#: From so many values on, a sample of them does.
_ENOUGH: Final = 20_000


class Fit(enum.Enum):
    """How polynomials are fitted."""

    LEAST_SQUARES = "least-squares"
    MINIMAX = "minimax"


def fit_polynomial(function: Callable[[Floats], Floats], seen: Floats, degree: int, fit: Fit) -> Floats:
    """Fit a polynomial on [-1, 1].

    Args:
        function: of values in [-1, 1], shape (n,) to shape (n,).
        seen: values that calibration data bring, most of them in [-1, 1].
        degree: of the polynomial.
        fit: how.

    Returns:
        c_0 ... c_degree.
    """
    if fit is Fit.MINIMAX:
        points = chebyshev.chebpts1(degree + 1)
        exact = chebyshev.chebfit(points, function(points), degree)
        return _to_powers(exact, degree)
    values = seen if len(seen) <= _ENOUGH else seen[:: -(-len(seen) // _ENOUGH)]
    grid = np.linspace(-1, 1, _GRID)
    points = np.concatenate([values, grid])
    weights = np.concatenate(
        [np.full(len(values), np.sqrt((1 - _UNIFORM_SHARE) / max(1, len(values)))),
         np.full(_GRID, np.sqrt(_UNIFORM_SHARE / _GRID))]
    )  # fmt: skip
    fitted = chebyshev.chebfit(points, function(points), degree, w=weights)
    return _to_powers(fitted, degree)


def squared_error(function: Callable[[Floats], Floats], seen: Floats, coefficients: Floats) -> tuple[float, float]:
    """Return the mean square error on the values seen, and the variance of the function itself on them."""
    expected = function(seen)
    return float(np.mean((polynomial.polyval(seen, coefficients) - expected) ** 2)), float(np.var(expected))


def _to_powers(series: object, degree: int) -> Floats:
    powers = np.asarray(chebyshev.cheb2poly(series), np.float64)  # type: ignore[call-overload]
    return np.pad(powers, (0, degree + 1 - len(powers)))
