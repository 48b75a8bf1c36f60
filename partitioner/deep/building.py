"""From layers in real numbers to a deep block: polynomials, chain, levels, scales, integer weights.

    ranges of calibration data --> polynomial of every activation --> primes of every depth --> integers

Units. The result of a layer is divided by its range R, seen in calibration and widened by `MARGIN`, channel by channel:
v = y / R lies in [-1, 1]. Its polynomial is one in v. A square leaves its factor and constant to who reads it:
f(y) = a u + k with u = (v + h)**2; other polynomials are divided by the largest value that a layer's have. Factors,
ranges and scales of sources go into a layer's matrix before it is rounded, so that they cost nothing.

Scales. Inputs and activations have 2**32, results of layers 2**50, so weights are rounded to 2**-18 of the range; what
rescaling rounds, 2**13 of 2**32, weighs less than 1e-6 of a range. Results of a block have 2**52 of 74 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import Offence, ParameterError, PlanError, UnsupportedModelError
from heinfer.operators.polynomials import MAX_DEGREE, complete_square, levels
from heinfer.plan import TensorSpec
from heinfer.plan.deep import SQUARE_PRIMES, Activation, ChainInfo, DeepBlock, Layer
from heinfer.plan.deep_noise import RoundedWeights, deep_error_bounds, largest_values, spread_of_rounding
from heinfer.plan.deep_reach import Interval, layer_reach
from heinfer.plan.deep_terms import DeepOutput, DeepTerms
from heinfer.ring.chain import CHAIN_WEIGHT_LIMIT, ChainParameters, choose_chain
from partitioner.deep.built import BuiltDeep, FittedActivation
from partitioner.deep.drafting import DraftBlock, DraftLayer, evaluate_draft
from partitioner.deep.fitting import Fit, fit_polynomial, squared_error
from partitioner.deep.functions import Function

Floats = NDArray[np.float64]
ACTIVATION_SCALE: Final = 2.0**32
LAYER_SCALE: Final = 2.0**50
RESULT_SCALE: Final = 2.0**52
#: p_0 and p_1, which results keep; every level of a polynomial; both primes of a square.
BASE_BITS: Final = (50, 24)
LEVEL_BITS: Final = 50
SQUARE_BITS: Final = (34, 34)
#: How far ranges reach beyond what calibration data show.
MARGIN: Final = 1.25
#: A channel's range is at least this part of its layer's largest.
_SMALLEST_RANGE: Final = 2.0**-8
#: Largest shift of a square: a larger one would cost bits.
_LARGEST_SHIFT: Final = 4.0
#: Factors that differ less are the same, computed in other order.
_SAME_FACTOR: Final = 1e-12
#: Points at which a polynomial's largest value is looked for.
_GRID: Final = 257
#: Degrees that are tried where none is given, and how close the first one that is taken must come.
_DEGREES: Final = (2, 3, 5, 7)
TOLERANCE: Final = 0.02


class TooDeepError(UnsupportedModelError):
    """No chain is long enough for the activations of one block."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How activations become polynomials.

    Attributes:
        degree: of every activation; None: the smallest of 2, 3, 5, 7 that is close enough, else 7.
        fit: least squares on the values seen, or minimax on their range.
    """

    degree: int | None = None
    fit: Fit = Fit.LEAST_SQUARES

    def __post_init__(self) -> None:
        """Check the degree.

        Raises:
            ParameterError: it is not from 2 to `MAX_DEGREE`.
        """
        if self.degree is not None and not 2 <= self.degree <= MAX_DEGREE:
            raise ParameterError(f"degree of activations: expected 2 to {MAX_DEGREE}, found {self.degree}")


@dataclass(frozen=True, slots=True)
class _Chosen:
    """An activation's polynomial in v, by row: shape (rows, degree + 1); whether its factor must stay in it."""

    coefficients: Floats
    fitted: FittedActivation
    whole: bool = False

    @property
    def degree(self) -> int:
        return int(self.coefficients.shape[1]) - 1

    @property
    def as_square(self) -> bool:
        """Whether one multiplication does."""
        if self.whole or self.degree != 2 or np.any(self.coefficients[:, 2] == 0):
            return False
        return bool(np.abs(complete_square(self.coefficients)[0]).max() <= _LARGEST_SHIFT)


@dataclass(frozen=True, slots=True)
class _Atom:
    """A value's real meaning, scale * value + constant by element, and the scale of its ciphertexts."""

    factor: Floats
    constant: Floats
    scale: float


def build_deep(
    name: str, draft: DraftBlock, calibration: Mapping[str, NDArray[Any]], options: FitOptions, names: Sequence[str]
) -> BuiltDeep:
    """Build a deep block.

    Args:
        name: prefix of its arrays.
        draft: its layers.
        calibration: values of its inputs by name, shape (samples, *shape).
        options: how activations become polynomials.
        names: of its outputs, in order.

    Raises:
        TooDeepError: no chain is long enough.
        UnsupportedModelError: a function is not finite on its range, or weights differ too much in size.
    """
    inputs = {n: np.asarray(calibration[n], np.float64) for n in draft.inputs}
    before = evaluate_draft(draft, inputs)
    ranges = [_ranges(layer, y) for layer, y in zip(draft.layers, before, strict=True)]
    chosen = [
        None if layer.function is None else _choose(layer, layer.function, y / r, r, options)
        for layer, y, r in zip(draft.layers, before, ranges, strict=True)
    ]
    _keep_units(draft, chosen)
    chain, tops = _chain(draft, chosen)
    input_ranges = tuple(float(max(np.abs(x).max(initial=0.0), 1e-30)) * MARGIN for x in inputs.values())
    quantiser = _Quantiser(name, draft, chain, tops, chosen, ranges, input_ranges)
    layers = quantiser.run()
    count = len(draft.inputs)
    results = [draft.results[n] for n in names]
    block = DeepBlock(
        chain=ChainInfo(chain.degree, chain.primes, chain.special),
        inputs=tuple(TensorSpec(n, shape) for n, shape in draft.inputs.items()),
        outputs=tuple(TensorSpec(n, draft.shape(r)) for n, r in zip(names, results, strict=True)),
        input_scale=ACTIVATION_SCALE,
        activation_scale=ACTIVATION_SCALE,
        layers=tuple(layers),
        results=tuple(results),
        operators=tuple(draft.operators),
    )
    try:
        block.check_arrays(quantiser.arrays)
    except PlanError as error:
        raise UnsupportedModelError(
            "the values in a block differ too much in size:",
            [Offence("block", "headroom", f"{error} with a smaller degree, or end the block in front of this layer")],
        ) from error
    bounds = deep_error_bounds(block, quantiser.arrays, quantiser.rounded)
    terms = tuple(
        _output(draft.shape(r), ranges[r - count], before[r - count], bound.ravel())
        for r, bound in zip(results, bounds.outputs, strict=True)
    )
    fitted = tuple(c.fitted for c in chosen if c is not None)
    return BuiltDeep(
        block,
        quantiser.arrays,
        DeepTerms(input_ranges, terms, all(f.exact for f in fitted), bounds.always),
        fitted,
    )


def _output(shape: tuple[int, ...], ranges: Floats, seen: Floats, bound: Floats) -> DeepOutput:
    """Return what the node knows of an output, not calibrated yet; the guard is by channel, `bound` in ranges."""
    low, high = seen.min(axis=0), seen.max(axis=0)
    if len(shape) > 1:
        size = prod(shape[1:])
        low = np.repeat(low.reshape(shape[0], -1).min(axis=1), size)
        high = np.repeat(high.reshape(shape[0], -1).max(axis=1), size)
    room = (MARGIN - 1) * (high - low) / 2
    parts = (ranges, np.ones(len(ranges)), np.zeros(len(ranges)), low - room, high + room, ranges * bound)
    return DeepOutput(*(part.reshape(shape) for part in parts))


def _ranges(layer: DraftLayer, y: Floats) -> Floats:
    """Return R of every element: what was seen of its channel, with a margin."""
    peaks = np.abs(y).max(axis=0, initial=0.0)
    if len(layer.affine.shape) > 1:
        channels = peaks.reshape(layer.affine.shape[0], -1).max(axis=1)
        peaks = np.repeat(channels, prod(layer.affine.shape[1:]))
    largest = float(peaks.max(initial=0.0)) or 1.0
    return np.asarray(MARGIN * np.maximum(peaks, largest * _SMALLEST_RANGE), np.float64)


def _choose(layer: DraftLayer, function: Function, v: Floats, ranges: Floats, options: FitOptions) -> _Chosen:
    label = f"{layer.label} ({function.label})"
    exact = function.polynomial(layer.affine.shape)
    if exact is not None:
        degree = exact.shape[1] - 1
        coefficients = exact * ranges[:, None] ** np.arange(degree + 1)
        return _Chosen(coefficients, FittedActivation(label, degree, True, 0.0))
    groups = _channels(layer, function)
    degrees = _DEGREES if options.degree is None else (options.degree,)
    for degree in degrees:
        coefficients, error = _fit(layer, function, v, ranges, groups, degree, options.fit)
        if error <= TOLERANCE:
            break
    return _Chosen(coefficients, FittedActivation(label, degree, False, error))


def _channels(layer: DraftLayer, function: Function) -> NDArray[np.int64]:
    """Return the group of every element: elements of a group share a range and a function."""
    shape = layer.affine.shape
    size = prod(shape)
    if any(c.size > 1 for c in function.constants.values()) or len(shape) == 1:
        return np.arange(size)
    return np.repeat(np.arange(shape[0]), prod(shape[1:]))


def _fit(
    layer: DraftLayer, function: Function, v: Floats, ranges: Floats, groups: NDArray[np.int64], degree: int, fit: Fit
) -> tuple[Floats, float]:
    rows = len(ranges)
    coefficients = np.empty((rows, degree + 1))
    wrong, spread = 0.0, 0.0
    pointwise = all(c.size == 1 for c in function.constants.values())
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        first = int(members[0])

        def f(u: Floats, first: int = first) -> Floats:
            y = (np.asarray(u) * ranges[first])[:, None]
            if pointwise:
                return _finite(layer, function, ranges[first], function.evaluate(y, (1,))[:, 0])
            return _finite(layer, function, ranges[first], function.evaluate(y, layer.affine.shape)[:, first])

        seen = v[:, members].reshape(-1)
        fitted = fit_polynomial(f, seen, degree, fit)
        coefficients[members] = fitted
        sample = seen[:: max(1, len(seen) // 4096)]
        error, variance = squared_error(f, sample, fitted)
        wrong, spread = wrong + len(members) * error, spread + len(members) * variance
    return coefficients, sqrt(wrong / spread) if spread else 0.0


def _finite(layer: DraftLayer, function: Function, reach: float, values: Floats) -> Floats:
    """Return values of a function, which must be finite wherever a polynomial stands for it.

    Raises:
        UnsupportedModelError: they are not, as with the root of a negative number.
    """
    if not np.isfinite(values).all():
        reason = (
            f"gives NaN or infinity for some values from {-reach:.3g} to {reach:.3g}, the range that calibration data "
            "show, with its margin; end the block in front of it, or clip these values in the model"
        )
        raise UnsupportedModelError("a function is no polynomial:", [Offence(layer.label, function.label, reason)])
    return values


def _keep_units(draft: DraftBlock, chosen: list[_Chosen | None]) -> None:
    """Where a sum mixes squares of different factors, as one across channels does, evaluate them in the general way."""
    count = len(draft.inputs)
    factors: list[Floats | None] = [None] * count
    origins = list(range(count))
    for number, layer in enumerate(draft.layers):
        found = chosen[number]
        factors.append(found.coefficients[:, 2] if found is not None and found.as_square else None)
        origins.append(count + number)
        if layer.kind != "sum":
            continue
        ((source, matrix),) = layer.affine.matrices.items()
        origins[-1], own = origins[source], factors[source]
        if own is None:
            continue
        members = [np.flatnonzero(row) for row in matrix]
        if any(_differ(own[m]) for m in members):
            origin = chosen[origins[source] - count]
            assert origin is not None  # factors come of activations alone
            chosen[origins[source] - count] = dataclasses.replace(origin, whole=True)
        else:
            factors[-1] = np.array([own[m[0]] for m in members])


def _differ(factors: Floats) -> bool:
    return bool(np.ptp(factors) > _SAME_FACTOR * np.abs(factors).max())


def _chain(draft: DraftBlock, chosen: Sequence[_Chosen | None]) -> tuple[ChainParameters, list[int]]:
    """Return the chain, and how many primes a layer at each depth has."""
    bits = list(BASE_BITS)
    tops = [0] * (draft.depth + 1)
    tops[draft.depth] = len(bits)
    for depth in reversed(range(draft.depth)):
        here = [c for layer, c in zip(draft.layers, chosen, strict=True) if c is not None and layer.depth == depth]
        if all(c.as_square for c in here):
            bits += SQUARE_BITS
        else:
            bits += [LEVEL_BITS] * levels(max(c.degree for c in here))
        tops[depth] = len(bits)
    try:
        return choose_chain(bits), tops
    except ParameterError as error:
        raise TooDeepError(
            f"{draft.depth} activations in one block are too many:",
            [Offence(layer.label, "activation", f"at depth {layer.depth + 1}") for layer in draft.layers
             if layer.function is not None] + [Offence("block", "chain", str(error))],
        ) from error  # fmt: skip


def _largest(coefficients: Floats) -> float:
    """Return the largest magnitude that a layer's polynomials have on [-1, 1]; 1 where they are all zero."""
    powers = np.linspace(-1, 1, _GRID)[:, None] ** np.arange(coefficients.shape[1])
    return float(np.abs(np.unique(coefficients, axis=0) @ powers.T).max()) or 1.0


class _Quantiser:
    """Makes layers of a plan, and their arrays; `rounded` is what rounding weights does, as error bounds want it."""

    def __init__(
        self,
        name: str,
        draft: DraftBlock,
        chain: ChainParameters,
        tops: Sequence[int],
        chosen: Sequence[_Chosen | None],
        ranges: Sequence[Floats],
        input_ranges: Sequence[float],
    ) -> None:
        self._name = name
        self._draft = draft
        self._chain = chain
        self._tops = tops
        self._chosen = chosen
        self._ranges = ranges
        self._atoms = [
            _Atom(np.full(prod(shape), r), np.zeros(prod(shape)), ACTIVATION_SCALE)
            for shape, r in zip(draft.inputs.values(), input_ranges, strict=True)
        ]
        self._largest = [np.ones(prod(shape)) for shape in draft.inputs.values()]
        self._reaches = [Interval.around(ones) for ones in self._largest]  # with the model's own weights
        self.arrays: dict[str, NDArray[Any]] = {}
        self.rounded: dict[str, RoundedWeights] = {}

    def run(self) -> list[Layer]:
        made = []
        for number, draft in enumerate(self._draft.layers):
            layer = self._layer(number, draft)
            read = np.concatenate([self._largest[s] for s in layer.sources])
            self._largest.append(largest_values(layer, self.arrays, read))
            made.append(layer)
        return made

    def _layer(self, number: int, layer: DraftLayer) -> Layer:
        name = f"deep.{self._name}.{number}"
        if layer.kind == "sum":
            return self._sum(name, layer)
        chosen = self._chosen[number]
        activation, degree, primes, scale = self._activation(layer, chosen)
        ranges = self._ranges[number]
        sources = tuple(layer.affine.matrices) or (0,)
        parts, constant = [], layer.affine.constant
        for source in sources:
            atom = self._atoms[source]
            matrix = layer.affine.matrices.get(source, np.zeros((len(ranges), len(atom.factor))))
            constant = constant + matrix @ atom.constant
            parts.append(matrix * atom.factor / ranges[:, None] * (scale / atom.scale))
        real = np.concatenate(parts, axis=1)
        integers = np.rint(real)
        integers[~integers.any(axis=1), 0] = 1  # a row of nothing would be a ciphertext of nothing, which SEAL refuses
        units = np.concatenate([np.full(len(self._largest[s]), self._atoms[s].scale / scale) for s in sources])
        read = np.concatenate([self._largest[s] for s in sources])
        reach = Interval.joined([self._reaches[s] for s in sources])
        self.rounded[name] = spread_of_rounding((integers - real) * units, read, reach.largest)
        self._put(name, integers)
        self.arrays[f"{name}.bias"] = constant / ranges
        self._atoms.append(self._meaning(name, chosen, activation, ranges, scale))
        made = Layer(name, sources, len(ranges), integers.shape[1], "weighted", primes, scale, activation, degree)
        self._reaches.append(layer_reach(made, self.arrays, reach.through(real * units)).after)
        return made

    def _sum(self, name: str, layer: DraftLayer) -> Layer:
        ((source, matrix),) = layer.affine.matrices.items()
        atom = self._atoms[source]
        members = [np.flatnonzero(row) for row in matrix]
        assert not any(_differ(atom.factor[m]) for m in members)  # `_keep_units` has seen to it
        self._put(name, matrix)
        factor = np.array([atom.factor[m[0]] for m in members])
        self._atoms.append(_Atom(factor, matrix @ atom.constant, atom.scale))
        primes = self._primes_left(source)
        self._reaches.append(self._reaches[source].through(matrix))
        return Layer(name, (source,), len(matrix), matrix.shape[1], "sum", primes, atom.scale)

    def _activation(self, layer: DraftLayer, chosen: _Chosen | None) -> tuple[Activation, int, int, float]:
        """Return what follows a layer, its degree, and the primes and scale of the layer."""
        if chosen is None:
            return "none", 0, len(BASE_BITS), RESULT_SCALE
        top, after = self._tops[layer.depth], self._tops[layer.depth + 1]
        dropped = self._chain.primes[after:top]
        if len(dropped) == SQUARE_PRIMES and dropped[0].bit_length() == SQUARE_BITS[0]:
            return "square", 2, top, sqrt(ACTIVATION_SCALE * dropped[0] * dropped[1])
        return "polynomial", chosen.degree, after + levels(chosen.degree), LAYER_SCALE

    def _meaning(
        self, name: str, chosen: _Chosen | None, activation: Activation, ranges: Floats, scale: float
    ) -> _Atom:
        """Store an activation's arrays; return what its result means."""
        zeros = np.zeros(len(ranges))
        if chosen is None:
            return _Atom(ranges, zeros, scale)
        if activation == "square":
            shift, factor, constant = complete_square(chosen.coefficients)
            self.arrays[f"{name}.shift"] = shift
            return _Atom(factor, constant, ACTIVATION_SCALE)
        largest = _largest(chosen.coefficients)
        self.arrays[f"{name}.coefficients"] = chosen.coefficients / largest
        return _Atom(np.full(len(ranges), largest), zeros, ACTIVATION_SCALE)

    def _primes_left(self, atom: int) -> int:
        return self._tops[self._draft.depth_of(atom)]

    def _put(self, name: str, matrix: Floats) -> None:
        rows, columns = np.nonzero(matrix)
        self.arrays[f"{name}.indptr"] = np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int32)
        if np.abs(matrix).max(initial=0.0) > CHAIN_WEIGHT_LIMIT:
            raise UnsupportedModelError(
                "the values in a block differ too much in size:",
                [Offence(name, "layer", "a weight does not fit 28 bits; end the block in front of it")],
            )
        self.arrays[f"{name}.indices"] = columns.astype(np.int32)
        self.arrays[f"{name}.weights"] = matrix[rows, columns].astype(np.int32)
