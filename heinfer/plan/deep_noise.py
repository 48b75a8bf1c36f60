"""How far the outputs of a deep block may be from its polynomials in the clear, with the weights that the model has.

    encryption, rescaling, relinearisation --> standard deviation of every value -+
    weights rounded to integers --> largest error of every value -----------------+--> layers, |f'| --> outputs

Worked example. At N = 16384 a rescaling to 2**32 leaves sqrt(N / 2 * N / 18) / 2**32 = 6.4e-7 of a range in a slot. A
weight in units of 2**-18 of a range is off by half a unit at most: a row of 25 weights, of values up to 1, is off by
25 * 2**-19 = 4.8e-5 of its range, and its square by 2 * (1 + |h|) times that.

Nothing here depends on a query: the bound is made of plan, weights and calibrated ranges when a model is partitioned.
It holds for samples whose values, in front of every activation too, lie within the ranges of calibration, which are
[-1, 1] in the units of a layer; only there polynomials and their slopes are bounded. It tells nothing of others. Nobody
sees the values inside a block; the node looks at those that go into it and come out.

Each source of noise is independent of the others, and of another element's of its own kind; so at the first layer that
reads it, standard deviations add in squares. What two rows of a layer read in common makes their noise dependent: from
there on it is added as if it were all of one sign, which no dependence exceeds (Minkowski), or by the norms of matrix
and covariance, whichever gives less. What rounding does is no noise: it is added up in absolute value from the first
layer to the last, or by norms likewise. An activation multiplies either by |f'| at most, taken on [-1, 1] widened by
what they may be, up to [-2, 2]: where they may be more than a whole range, the bound tells nothing anyway, and supposes
that values stay there. Every layer multiplies the worst case, so that it grows with depth much faster than errors do.

`TAIL`. Rounding is multiplied by the secret, whose value in a slot is close to complex normal: in the worst of N / 2
slots it is sqrt(ln(N / 2) + 7) times the usual, save for a chance of 0.001; beyond six standard deviations of the rest
is what less than one of 5e8 values reaches. Sources: J. Cheon, A. Kim, M. Kim, Y. Song, Homomorphic Encryption for
Arithmetic of Approximate Numbers (2017), section 3 for the noise of each operation; A. Kim et al., Approximate
Homomorphic Encryption with Reduced Approximation Error (2022), for its size in slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, prod, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.polynomials import levels
from heinfer.plan.deep import DeepBlock, Layer, layer_matrix

Floats = NDArray[np.float64]
#: Of SEAL's noise; and the variance of what rounding to integers leaves.
_NOISE: Final = 3.2
_ROUNDING: Final = 1 / 12
#: Standard deviations of a normal distribution.
_NORMAL: Final = 6.0
#: Points at which polynomials are looked at, and what may be missed between them: from its largest value to the next
#: point a polynomial of degree n falls by n**2 (n**2 - 1) / 3 * (step / 2)**2 / 2 of it at most (V. Markov's inequality
#: for second derivatives), 0.0015 at degree 7.
_GRID: Final = 513
_BETWEEN: Final = 1 / (1 - 0.0015)
#: Ranges beyond which slopes are not looked at; polynomials explode there.
_FARTHEST: Final = 2.0
#: Up to this size the spectral norm of a matrix is computed, with room for what float64 does to it; else bounded.
_LARGEST_GRAM: Final = 1024
_EIGENVALUES: Final = 1 + 1e-6
#: What decoding in float64 leaves, of values of 2**52 in 74 bits.
_DECODING: Final = 2.0**-40


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the elements of a value may be off, one by one and together; what travels through the layers.

    Of rounding: the largest error of each element, and the largest Euclidean length of all errors. Of noise: standard
    deviations, and the root of the largest eigenvalue of their covariance. Both go through a matrix W alike: an element
    has |W| `elements` at most, and the norm of its row times `length`; all have the norm of W times `length`.

    Attributes:
        elements: by element.
        length: of all together.
    """

    elements: Floats
    length: float

    @classmethod
    def within(cls, elements: Floats, length: float) -> Spread:
        """Return a spread of which both are bounds: none is larger than what the other makes of it."""
        return cls(np.minimum(elements, length), min(length, float(np.linalg.norm(elements))))

    def through(self, matrix: _Matrix) -> Spread:
        """Return what a matrix makes of it."""
        return Spread.within(
            np.minimum(matrix.sizes @ self.elements, matrix.row_norms * self.length), matrix.norm * self.length
        )

    def times(self, factors: Floats) -> Spread:
        """Return what a factor an element makes of it, each at most so large."""
        return Spread.within(factors * self.elements, float(factors.max()) * self.length)

    def plus(self, other: Spread | None) -> Spread:
        """Return the sum with another, as if both were of one sign."""
        return self if other is None else Spread(self.elements + other.elements, self.length + other.length)


def deep_error_bounds(
    block: DeepBlock, arrays: Mapping[str, NDArray[Any]], rounded: Mapping[str, Spread] | None = None
) -> list[Floats]:
    """Return how far each element of every output may be from its polynomials in the clear, in the units of its layer.

    Args:
        block: the block.
        arrays: of its layers.
        rounded: what rounding a layer's weights does (`spread_of_rounding`), by the layer's name. Layers that are not
            named have the very weights that they should have; None: all of them, so that the bound is the distance
            from `evaluate_deep`.

    Returns:
        One array an output, of its shape. They hold for samples whose values stay within the ranges of calibration;
        casts to float32 are not in them.
    """
    given = rounded or {}
    degree = block.chain.degree
    tail = _NORMAL * sqrt(log(degree / 2) + 7)
    sizes = [prod(t.shape) for t in block.inputs]
    values = [_Error(np.full(s, _encryption(degree) / block.input_scale), {}, Spread(np.zeros(s), 0.0)) for s in sizes]
    scales = [block.input_scale] * len(values)
    for layer in block.layers:
        error = _after_matrix(layer, layer_matrix(layer, arrays), values, scales, given.get(layer.name))
        if layer.activation != "none":
            slope = _largest_slope(layer, arrays, min(_FARTHEST, 1 + float(np.max(error.largest(tail)))))
            error = _Error(
                fresh=np.full(layer.rows, _activation(block, layer)),
                old={origin: noise.times(slope) for origin, noise in error.old.items()},
                rounding=error.rounding.times(slope),
            )
        values.append(error)
        scales.append(layer.scale if layer.activation == "none" else block.activation_scale)
    return [
        (values[r].largest(tail) + _DECODING).reshape(t.shape)
        for r, t in zip(block.results, block.outputs, strict=True)
    ]


def spread_of_rounding(difference: Floats, read: Floats) -> Spread:
    """Return what rounding the weights of a layer does to its result.

    Args:
        difference: of rounded and real weights, in the units of the layer, shape (rows, columns).
        read: how large what the layer reads can be (`largest_values`), its sources joined.
    """
    matrix = _Matrix(difference)
    return Spread(read, float(np.linalg.norm(read))).through(matrix)


def largest_values(layer: Layer, arrays: Mapping[str, NDArray[Any]], read: Floats) -> Floats:
    """Return how large the elements of a layer's result can be within the ranges of calibration, activation included.

    Args:
        layer: the layer.
        arrays: of it.
        read: how large what it reads can be, its sources joined; for sums.
    """
    if layer.kind == "sum":
        return np.asarray(np.abs(layer_matrix(layer, arrays)) @ read)
    if layer.activation == "none":
        return np.ones(layer.rows)
    if layer.activation == "square":
        return np.asarray((1 + np.abs(arrays[f"{layer.name}.shift"])) ** 2)
    return _largest_magnitude(arrays[f"{layer.name}.coefficients"], 1.0)


@dataclass(frozen=True, slots=True)
class _Error:
    """What is wrong with a value's elements.

    Attributes:
        fresh: standard deviations of noise of its own, independent from element to element.
        old: noise that came with what it was made of, by the number of the value that it comes from.
        rounding: what rounding weights did.
    """

    fresh: Floats
    old: Mapping[int, Spread]
    rounding: Spread

    def largest(self, tail: float) -> Floats:
        """Return the largest errors, those of noise `tail` standard deviations."""
        deviations = np.sqrt(sum((noise.elements**2 for noise in self.old.values()), start=self.fresh**2))
        return np.asarray(tail * deviations + self.rounding.elements)


class _Matrix:
    """A matrix by what it does to spreads: magnitudes, norms of its rows, and a bound of its spectral norm."""

    def __init__(self, weights: Floats) -> None:
        self.sizes = np.abs(weights)
        self.row_norms = np.linalg.norm(weights, axis=1)
        if min(weights.shape) <= _LARGEST_GRAM:
            gram = weights @ weights.T if len(weights) <= weights.shape[1] else weights.T @ weights
            self.norm = sqrt(max(0.0, float(np.linalg.eigvalsh(gram)[-1]))) * _EIGENVALUES
        else:  # Schur's test
            self.norm = sqrt(float(self.sizes.sum(axis=1).max()) * float(self.sizes.sum(axis=0).max()))


def _after_matrix(
    layer: Layer, weights: Floats, values: list[_Error], scales: list[float], rounded: Spread | None
) -> _Error:
    """Return what is wrong with a layer's result: no noise is added to that of its sources, as integers are exact."""
    old: dict[int, Spread] = {}
    bias = np.full(layer.rows, 0.5 / layer.scale if layer.kind == "weighted" else 0.0)
    rounding = Spread(bias, float(np.linalg.norm(bias))).plus(rounded)
    start = 0
    for source in layer.sources:
        error = values[source]
        matrix = _Matrix(weights[:, start : start + len(error.fresh)] * (scales[source] / layer.scale))
        start += len(error.fresh)
        own = np.sqrt(matrix.sizes**2 @ error.fresh**2)
        parts = {origin: noise.through(matrix) for origin, noise in error.old.items()}
        parts[source] = Spread.within(own, matrix.norm * float(error.fresh.max()))
        old.update({origin: part.plus(old.get(origin)) for origin, part in parts.items()})
        rounding = rounding.plus(error.rounding.through(matrix))
    return _Error(np.zeros(layer.rows), old, rounding)


def _largest_slope(layer: Layer, arrays: Mapping[str, NDArray[Any]], reach: float) -> Floats:
    """Return the largest |f'(v)| of every row, |v| <= reach."""
    if layer.activation == "square":
        return np.asarray(2 * (reach + np.abs(arrays[f"{layer.name}.shift"])))
    coefficients = arrays[f"{layer.name}.coefficients"]
    return _largest_magnitude(coefficients[:, 1:] * np.arange(1, layer.degree + 1), reach)


def _largest_magnitude(coefficients: Floats, reach: float) -> Floats:
    """Return the largest |f(v)| of every row of coefficients, |v| <= reach."""
    own, rows = np.unique(coefficients, axis=0, return_inverse=True)
    powers = np.linspace(-reach, reach, _GRID)[:, None] ** np.arange(coefficients.shape[1])
    return np.asarray(_BETWEEN * np.abs(own @ powers.T).max(axis=1)[rows.reshape(-1)])


def _slots(variance: float, degree: int) -> float:
    """Return the standard deviation in a slot of noise with a variance in every coefficient."""
    return sqrt(degree / 2 * variance)


def _encryption(degree: int) -> float:
    return _slots(_NOISE**2 + _ROUNDING, degree)


def _rescaling(degree: int) -> float:
    """Both polynomials are rounded; the second is multiplied by a secret of which two thirds are not zero."""
    return _slots(_ROUNDING * (1 + 2 * degree / 3), degree)


def _activation(block: DeepBlock, layer: Layer) -> float:
    """Return what an activation adds: rescalings to about its scale, factors' rounding, and switching keys."""
    degree, target = block.chain.degree, block.activation_scale
    rescalings = 1 if layer.activation == "square" else 2 ** (levels(layer.degree) - 1)
    rounding = sqrt(rescalings) * _rescaling(degree) / target
    factors = 0.0 if layer.activation == "square" else (layer.degree + 1) / target
    moduli = np.array(block.chain.primes[: layer.primes], np.float64) / block.chain.special
    switching = _slots(degree * _NOISE**2 * _ROUNDING * float(np.sum(moduli**2)) + 2 * degree / 3, degree)
    dropped = block.chain.primes[layer.primes_left]  # of the last rescaling, before which keys are switched
    return rounding + factors + sqrt(rescalings) * switching / (target * dropped)
