"""How far the outputs of a deep block may be from its polynomials in the clear, with the weights that the model has.

    encryption, rescaling, relinearisation --> standard deviation of every value -+
    weights rounded to integers --> largest error of every value -----------------+--> layers, |f'| --> outputs

Worked example. At N = 16384 a rescaling to 2**32 leaves sqrt(N / 2 * N / 18) / 2**32 = 6.4e-7 of a range in a slot. A
weight in units of 2**-18 of a range is off by half a unit at most: a row of 25 weights, of values up to 1, is off by
25 * 2**-19 = 4.8e-5 of its range, and its square by 2 * (1 + |h|) times that.

Nothing here depends on a query: the bound is made of plan, weights and calibrated ranges when a model is partitioned.
The node looks at what goes into a block and comes out, nobody sees the values inside. Those in front of an activation
reach so far as the inputs' ranges, [-1, 1], and the sums of the rows let them (`heinfer.plan.deep_reach`). Where that
is two ranges at most, and errors don't make it more, slopes are those there and the bound holds for all inputs within
their ranges (`ErrorBounds.always`). Elsewhere it supposes that inner values stay within [-1, 1], which is where slopes
are taken, and who states it must say so. Worked example: v**7 in a layer whose rows add up to 1.9 ranges multiplies
errors by up to 7 * 1.9**6 = 329, and by 7 in [-1, 1]; outputs may be within their ranges all the same.

Each source of noise is independent of the others, and of another element's of its own kind; so at the first layer that
reads it, standard deviations add in squares. What two rows of a layer read in common makes their noise dependent: from
there on it is added as if it were all of one sign, which no dependence exceeds (Minkowski), or by the norms of matrix
and covariance, whichever gives less. What rounding does is no noise: it is added up in absolute value from the first
layer to the last, or by norms likewise. An activation multiplies either by |f'| at most, taken where values can be with
their errors, or on [-1, 1] widened by these, up to [-2, 2]: where they may be more than a whole range, the bound tells
nothing anyway, and supposes that values stay there. Every layer multiplies the worst case, so that it grows with depth
much faster than errors do.

`TAIL`. Rounding is multiplied by the secret, whose value in a slot is close to complex normal: in the worst of N / 2
slots it is sqrt(ln(N / 2) + 7) times the usual, save for a chance of 0.001; beyond six standard deviations of the rest
is what less than one of 5e8 values reaches. Sources: J. Cheon, A. Kim, M. Kim, Y. Song, Homomorphic Encryption for
Arithmetic of Approximate Numbers (2017), section 3 for the noise of each operation; A. Kim et al., Approximate
Homomorphic Encryption with Reduced Approximation Error (2022), for its size in slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, prod, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.polynomials import levels
from heinfer.plan.deep import DeepBlock, Layer, layer_matrix
from heinfer.plan.deep_reach import FARTHEST, Interval, Reach, block_reaches, largest_magnitude, largest_slope
from heinfer.plan.headroom import fits

Floats = NDArray[np.float64]
#: Of SEAL's noise; and the variance of what rounding to integers leaves.
_NOISE: Final = 3.2
_ROUNDING: Final = 1 / 12
#: Standard deviations of a normal distribution.
_NORMAL: Final = 6.0
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


@dataclass(frozen=True, slots=True)
class RoundedWeights:
    """What rounding the weights of a layer does to its result.

    Attributes:
        calibrated: while all that it reads is within the ranges of calibration.
        reachable: while the inputs of the block are.
    """

    calibrated: Spread
    reachable: Spread


@dataclass(frozen=True, slots=True)
class ErrorBounds:
    """How far outputs may be off, in the units of their layers.

    Attributes:
        outputs: one array an output, of its shape.
        always: whether they hold for all inputs within the ranges of calibration; otherwise inner values must stay
            within theirs.
    """

    outputs: list[Floats]
    always: bool


def deep_error_bounds(
    block: DeepBlock, arrays: Mapping[str, NDArray[Any]], rounded: Mapping[str, RoundedWeights] | None = None
) -> ErrorBounds:
    """Return how far each element of every output may be from its polynomials in the clear, in the units of its layer.

    Args:
        block: the block.
        arrays: of its layers.
        rounded: what rounding a layer's weights does (`spread_of_rounding`), by the layer's name. Layers that are not
            named have the very weights that they should have; None: all of them, so that the bound is the distance
            from `evaluate_deep`.

    Returns:
        The bounds; casts to float32 are not in them.
    """
    given = rounded or {}
    reaches = block_reaches(block, arrays)
    if _have_room(block, reaches, None):
        errors = _errors(block, arrays, {name: r.reachable for name, r in given.items()}, reaches)
        if _have_room(block, reaches, errors):
            return ErrorBounds(_of_outputs(block, errors), always=True)
    errors = _errors(block, arrays, {name: r.calibrated for name, r in given.items()}, None)
    return ErrorBounds(_of_outputs(block, errors), always=False)


def _errors(
    block: DeepBlock,
    arrays: Mapping[str, NDArray[Any]],
    rounded: Mapping[str, Spread],
    reaches: Sequence[Reach] | None,
) -> list[_LayerErrors]:
    """Return the largest errors of every layer.

    Args:
        block: the block.
        arrays: of its layers.
        rounded: what rounding does, by the layer's name.
        reaches: of the layers; None: their values are supposed to stay in [-1, 1].
    """
    degree = block.chain.degree
    tail = _tail(degree)
    sizes = [prod(t.shape) for t in block.inputs]
    values = [_Error(np.full(s, _encryption(degree) / block.input_scale), {}, Spread(np.zeros(s), 0.0)) for s in sizes]
    scales = [block.input_scale] * len(values)
    found = []
    for number, layer in enumerate(block.layers):
        error = _after_matrix(layer, layer_matrix(layer, arrays), values, scales, rounded.get(layer.name))
        before = error.largest(tail)
        if layer.activation != "none":
            if reaches is None:
                where = Interval.around(np.full(layer.rows, 1 + float(before.max()))).cut()
            else:
                where = reaches[number].before.widened(before).cut()
            slope = largest_slope(layer, arrays, where)
            farthest = 1.0 if reaches is None else float(where.largest.max())
            error = _Error(
                fresh=np.full(layer.rows, _activation(block, layer, farthest)),
                old={origin: noise.times(slope) for origin, noise in error.old.items()},
                rounding=error.rounding.times(slope),
            )
        values.append(error)
        scales.append(layer.scale if layer.activation == "none" else block.activation_scale)
        found.append(_LayerErrors(before, error.largest(tail)))
    return found


def _of_outputs(block: DeepBlock, errors: Sequence[_LayerErrors]) -> list[Floats]:
    layers = [r - len(block.inputs) for r in block.results]
    return [(errors[n].after + _DECODING).reshape(t.shape) for n, t in zip(layers, block.outputs, strict=True)]


def _have_room(block: DeepBlock, reaches: Sequence[Reach], errors: Sequence[_LayerErrors] | None) -> bool:
    """Return whether polynomials are looked at wherever values can be, errors included, and no value wraps around.

    What happens within a polynomial is looked at up to `FARTHEST` by `heinfer.plan.headroom`.
    """
    results = {r - len(block.inputs) for r in block.results}
    for number, (layer, reach) in enumerate(zip(block.layers, reaches, strict=True)):
        before, after = reach.before.largest, reach.after.largest
        if errors is not None:
            before, after = before + errors[number].before, after + errors[number].after
        if layer.activation != "none" and not before.max() <= FARTHEST:
            return False
        primes = min(layer.primes_left, block.result_primes) if number in results else layer.primes_left
        scale = layer.scale if layer.activation == "none" else block.activation_scale
        if not fits(float(after.max()), scale, block.chain.primes[:primes]):
            return False
    return True


def spread_of_rounding(difference: Floats, calibrated: Floats, reachable: Floats) -> RoundedWeights:
    """Return what rounding the weights of a layer does to its result.

    Args:
        difference: of rounded and real weights, in the units of the layer, shape (rows, columns).
        calibrated: how large what the layer reads can be within the ranges of calibration (`largest_values`), its
            sources joined.
        reachable: how large it can be while the inputs of the block are within theirs, with the real weights.
    """
    matrix = _Matrix(difference)
    return RoundedWeights(*(Spread(r, float(np.linalg.norm(r))).through(matrix) for r in (calibrated, reachable)))


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
    return largest_magnitude(arrays[f"{layer.name}.coefficients"], Interval.around(np.ones(layer.rows)))


@dataclass(frozen=True, slots=True)
class _LayerErrors:
    """The largest errors of a layer's elements.

    Attributes:
        before: its activation.
        after: it.
    """

    before: Floats
    after: Floats


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


def _tail(degree: int) -> float:
    """Return how many standard deviations of noise are the largest error."""
    return _NORMAL * sqrt(log(degree / 2) + 7)


def _slots(variance: float, degree: int) -> float:
    """Return the standard deviation in a slot of noise with a variance in every coefficient."""
    return sqrt(degree / 2 * variance)


def _encryption(degree: int) -> float:
    return _slots(_NOISE**2 + _ROUNDING, degree)


def _rescaling(degree: int) -> float:
    """Both polynomials are rounded; the second is multiplied by a secret of which two thirds are not zero."""
    return _slots(_ROUNDING * (1 + 2 * degree / 3), degree)


def _activation(block: DeepBlock, layer: Layer, farthest: float) -> float:
    """Return what an activation adds: rescalings to about its scale, factors' rounding, and switching keys.

    A factor that is rounded multiplies a power of the value, |v| <= `farthest`.
    """
    degree, target = block.chain.degree, block.activation_scale
    rescalings = 1 if layer.activation == "square" else 2 ** (levels(layer.degree) - 1)
    rounding = sqrt(rescalings) * _rescaling(degree) / target
    powers = sum(max(1.0, farthest) ** n for n in range(layer.degree + 1))
    factors = 0.0 if layer.activation == "square" else powers / target
    moduli = np.array(block.chain.primes[: layer.primes], np.float64) / block.chain.special
    switching = _slots(degree * _NOISE**2 * _ROUNDING * float(np.sum(moduli**2)) + 2 * degree / 3, degree)
    dropped = block.chain.primes[layer.primes_left]  # of the last rescaling, before which keys are switched
    return rounding + factors + sqrt(rescalings) * switching / (target * dropped)
