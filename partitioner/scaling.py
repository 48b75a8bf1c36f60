"""Scales of the weights of one block, and its integer matrix, in one digit or several.

    requires  the full program of a block and its real weights
    ensures   int16 weights, one scale an output row and digit, and the row norms of every output and digit; values that
              are added on the server share their scales

Every row gets the finest scale that the bits of a digit allow. Rows that meet in a sum take the coarser of their
scales; where rows can't be matched one to one, the whole block takes one scale. Scales of later digits are those of the
first times a power of two that all rows share, so that rows which agree in the first digit agree in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.operators import Program, ScaleConflictError, analyse
from heinfer.operators.plain import output_rows, row_tiles
from heinfer.operators.program import Arrays, digit_name
from heinfer.operators.steps import WEIGHTED, Conv, MatMul, Rescale, Scale, Step, Sum, Take, sources_of
from heinfer.ring import WEIGHT_BITS, Digit, RingParameters, RowNorms, input_scale, split_digits, weight_scale

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantised:
    """The integers of a block.

    Attributes:
        arrays: integer weights of every digit, and index maps, for the server.
        norms: of every output, digit by digit, for the node.
        row_sum: L, over the rows of all digits.
        digits: how many the weights have.
        bits: of each.
    """

    arrays: Mapping[str, NDArray[Any]]
    norms: tuple[tuple[RowNorms, ...], ...]
    row_sum: int
    digits: int
    bits: int

    def unit_bound(self, parameters: RingParameters) -> float:
        """Return the largest error bound of any output for inputs of magnitude 1."""
        return max(float(np.max(bounds, initial=0.0)) for bounds in self._unit_bounds(parameters))

    def relative_bound(self, parameters: RingParameters) -> float:
        """Return the same relative to the largest output for such inputs, which is ||W_j||_1, row by row."""
        largest = 0.0
        for bounds, digits in zip(self._unit_bounds(parameters), self.norms, strict=True):
            gain = np.sum([norms.gain for norms in digits], axis=0)
            largest = max(largest, float(np.max(bounds[gain > 0] / gain[gain > 0], initial=0.0)))
        return largest

    def _unit_bounds(self, parameters: RingParameters) -> list[Floats]:
        room = float(input_scale(np.ones(1), self.row_sum, parameters)[0])
        return [np.sum([norms.unit_bounds(room) for norms in digits], axis=0) for digits in self.norms]


def quantise_program(program: Program, arrays: Arrays, digits: int = 1, bits: int = WEIGHT_BITS) -> Quantised:
    """Choose scales and quantise.

    Args:
        program: full program.
        arrays: real weights and index maps.
        digits: how many digits the weights have.
        bits: of each.

    Raises:
        ScaleConflictError: values of different scales are added, whatever the weights' scales.
    """
    largest = {s.weights: _largest(s, arrays[s.weights]) for s in program.steps if isinstance(s, WEIGHTED)}
    try:
        return _quantise(program, arrays, _tied(program, largest), digits, bits)
    except ScaleConflictError:
        top = max(float(np.max(values, initial=0.0)) for values in largest.values())
        same = {name: np.full_like(values, top) for name, values in largest.items()}
        return _quantise(program, arrays, same, digits, bits)


def _quantise(program: Program, arrays: Arrays, largest: Mapping[str, Floats], digits: int, bits: int) -> Quantised:
    scales = {name: weight_scale(values, bits) for name, values in largest.items()}
    maps = {s.indices: arrays[s.indices] for s in program.steps if isinstance(s, Take) and s.indices is not None}
    factors = {s.values: np.asarray(arrays[s.values], np.float64) for s in program.steps if isinstance(s, Rescale)}
    split = {
        s.weights: _Split(s, arrays[s.weights], _aligned(s, scales[s.weights]), digits, bits)
        for s in program.steps
        if isinstance(s, WEIGHTED)
    }
    server, norms = dict(maps), []
    for digit in range(digits):
        integers = {name: found.integers[digit] for name, found in split.items()}
        rests = {name: partial(found.rest, digit) for name, found in split.items()}
        finer = {name: scale * 2.0 ** (bits * digit) for name, scale in scales.items()}
        analysed = analyse(program, {**maps, **integers}, finer, factors, rests)
        norms.append(analysed if digit == digits - 1 else [_exact(n) for n in analysed])
        server.update({digit_name(name, digit): array for name, array in integers.items()})
    row_sum = max(float(np.max(n.l1, initial=0.0)) for outputs in norms for n in outputs)
    return Quantised(server, tuple(zip(*norms, strict=True)), round(row_sum), digits, bits)


class _Split:
    """Weights in digits. What a digit leaves is made again where it is needed: it is four times what digits take."""

    def __init__(
        self, step: Conv | MatMul | Scale, weights: NDArray[Any], scale: Floats, digits: int, bits: int
    ) -> None:
        self._step, self._weights, self._scale, self._bits = step, weights, scale, bits
        self.integers = [np.empty(weights.shape, np.int16) for _ in range(digits)]
        for rows in row_tiles(step, weights):
            for integers, digit in zip(self.integers, self._split(rows, digits), strict=True):
                output_rows(step, integers, rows)[...] = digit.integers

    def rest(self, digit: int, rows: slice) -> Floats:
        """Return `Digit.rest` of some output rows."""
        return self._split(rows, digit + 1)[digit].rest

    def _split(self, rows: slice, digits: int) -> list[Digit]:
        scale = self._scale if isinstance(self._step, Scale) else self._scale[rows]
        return split_digits(output_rows(self._step, self._weights, rows), scale, digits, self._bits)


def _exact(norms: RowNorms) -> RowNorms:
    """Return the norms of a digit whose rest another digit takes up."""
    nothing = np.zeros_like(norms.rounding)
    return replace(norms, rounding=nothing, input_rounding=nothing)


def _aligned(step: Conv | MatMul | Scale, scale: Floats) -> Floats:
    """Return scales of rows so that they broadcast to the weights."""
    return scale.reshape(-1, 1, 1, 1) if isinstance(step, Conv) else scale


def _largest(step: Conv | MatMul | Scale, weights: NDArray[Any]) -> Floats:
    """Return the largest |weight| of every output row: channel of Conv, column of MatMul, element of Scale."""
    axes: tuple[int, ...]
    match step:
        case Conv():
            axes = (1, 2, 3)
        case MatMul():
            axes = (0,)
        case Scale():
            axes = ()
    above, below = (np.asarray(reduce(weights, axis=axes, initial=0), np.float64) for reduce in (np.max, np.min))
    return np.maximum(above, -below)


def _tied(program: Program, largest: Mapping[str, Floats]) -> dict[str, Floats]:
    """Let weighted steps whose results are added share their rows' largest weights."""
    result = dict(largest)
    origins: list[frozenset[str]] = [frozenset()] * len(program.inputs)
    groups: list[frozenset[str]] = []
    for step in program.steps:
        merged = frozenset().union(*(origins[s] for s in sources_of(step)))
        origins.append(_own(step) or merged)
        if merged and isinstance(step, Sum):  # in front of weights there is nothing to share
            touching = [g for g in groups if g & merged]
            groups = [g for g in groups if not g & merged] + [merged.union(*touching)]
    for names in groups:
        members = [result[name] for name in names]
        if len({m.shape for m in members}) == 1:
            joint = np.max(members, axis=0)
            result.update(dict.fromkeys(names, joint))
        else:
            top = max(float(np.max(m, initial=0.0)) for m in members)
            result.update({name: np.full_like(result[name], top) for name in names})
    return result


def _own(step: Step) -> frozenset[str]:
    return frozenset((step.weights,)) if isinstance(step, WEIGHTED) else frozenset()
