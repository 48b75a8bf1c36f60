"""How far values inside a deep block can go, for any inputs within their ranges.

    |x| <= 1 --> centres and half widths through a matrix --> [low, high] of a row --> polynomial there --> [low, high]

Worked example. A row of weights 1.2 and -0.7 with a bias of 0.1 reads two inputs: what it makes lies in [-1.8, 2.0].
Its seventh power lies in [-61.2, 128], and has a slope of 7 * 2**6 = 448 there; within [-1, 1] it would be 7.

Nothing is supposed of inner values, so this holds for every sample whose inputs lie within the ranges of calibration.
Elements are taken one by one, each as large as it can be, which real samples seldom make several of at once.

Polynomials are looked at on a grid. What may be missed between its points: from its largest value to the next one a
polynomial of degree n falls by n**2 (n**2 - 1) / 3 * (step / 2)**2 / 2 of it at most (V. Markov's inequality for second
derivatives), 0.0015 at degree 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.plan.deep import DeepBlock, Layer
from heinfer.plan.headroom import LARGEST_VALUE

Floats = NDArray[np.float64]
#: Ranges beyond which polynomials are not looked at: they explode there, and no plan has room for them.
FARTHEST: Final = LARGEST_VALUE
#: Points of the grid, and what is missed between two, as a part of the largest value.
_GRID: Final = 513
_MISSED: Final = 0.0015
_BETWEEN: Final = 1 / (1 - _MISSED)
#: Rows that are looked at together, 8 MB at a time.
_ROWS: Final = 2048


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the elements of a value lie.

    Attributes:
        low: smallest, by element.
        high: largest.
    """

    low: Floats
    high: Floats

    @classmethod
    def around(cls, radius: Floats) -> Interval:
        """Return intervals around 0."""
        return cls(-radius, radius)

    @classmethod
    def joined(cls, parts: list[Interval]) -> Interval:
        """Return several values as one."""
        return cls(np.concatenate([p.low for p in parts]), np.concatenate([p.high for p in parts]))

    @property
    def centre(self) -> Floats:
        """Return what is in the middle."""
        return np.asarray((self.low + self.high) / 2)

    @property
    def radius(self) -> Floats:
        """Return half the width."""
        return np.asarray((self.high - self.low) / 2)

    @property
    def largest(self) -> Floats:
        """Return the largest magnitude of every element."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def times(self, factor: float) -> Interval:
        """Return it in other units; the factor is positive."""
        return Interval(self.low * factor, self.high * factor)

    def widened(self, room: Floats) -> Interval:
        """Return it with room on either side."""
        return Interval(self.low - room, self.high + room)

    def cut(self) -> Interval:
        """Return the part of it that polynomials are looked at on."""
        return Interval(np.clip(self.low, -FARTHEST, FARTHEST), np.clip(self.high, -FARTHEST, FARTHEST))

    def through(self, matrix: Floats) -> Interval:
        """Return where the rows of a matrix, shape (rows, elements), lie."""
        middle, radius = matrix @ self.centre, np.abs(matrix) @ self.radius
        return Interval(middle - radius, middle + radius)


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the elements of a layer's result lie.

    Attributes:
        before: its activation.
        after: it, if `before` is within `FARTHEST`; else it tells nothing.
    """

    before: Interval
    after: Interval


def block_reaches(block: DeepBlock, arrays: Mapping[str, NDArray[Any]]) -> list[Reach]:
    """Return where the results of all layers lie, with the integer weights that the server has, without noise."""
    values = [Interval.around(np.ones(prod(t.shape))) for t in block.inputs]
    scales = [block.input_scale] * len(values)
    reaches = []
    for layer in block.layers:
        read = Interval.joined([values[s].times(scales[s] / layer.scale) for s in layer.sources])
        weights = arrays[f"{layer.name}.weights"].astype(np.float64)
        indices, starts = arrays[f"{layer.name}.indices"], arrays[f"{layer.name}.indptr"][:-1]
        middle = np.add.reduceat(weights * read.centre[indices], starts)
        radius = np.add.reduceat(np.abs(weights) * read.radius[indices], starts)
        reaches.append(layer_reach(layer, arrays, Interval(middle - radius, middle + radius)))
        values.append(reaches[-1].after)
        scales.append(layer.scale if layer.activation == "none" else block.activation_scale)
    return reaches


def layer_reach(layer: Layer, arrays: Mapping[str, NDArray[Any]], sums: Interval) -> Reach:
    """Return where the result of a layer lies.

    Args:
        layer: the layer.
        arrays: of it, its matrix aside.
        sums: where the rows of its matrix lie, in the units of the layer.
    """
    before = sums
    if layer.kind == "weighted":
        bias = arrays[f"{layer.name}.bias"]
        before = Interval(sums.low + bias, sums.high + bias)
    if layer.activation == "none":
        return Reach(before, before)
    seen = before.cut()
    if layer.activation == "square":
        shift = arrays[f"{layer.name}.shift"]
        moved = Interval(seen.low + shift, seen.high + shift)
        smallest = np.where(moved.low * moved.high < 0, 0.0, np.minimum(np.abs(moved.low), np.abs(moved.high)))
        return Reach(before, Interval(smallest**2, moved.largest**2))
    low, high = _on_grid(arrays[f"{layer.name}.coefficients"], seen)
    missed = _MISSED * _BETWEEN * np.maximum(np.abs(low), np.abs(high))
    return Reach(before, Interval(low - missed, high + missed))


def largest_slope(layer: Layer, arrays: Mapping[str, NDArray[Any]], where: Interval) -> Floats:
    """Return the largest |f'(v)| of every row's activation, v in its interval."""
    if layer.activation == "square":
        shift = arrays[f"{layer.name}.shift"]
        return np.asarray(2 * Interval(where.low + shift, where.high + shift).largest)
    coefficients = arrays[f"{layer.name}.coefficients"]
    return largest_magnitude(coefficients[:, 1:] * np.arange(1, layer.degree + 1), where)


def largest_magnitude(coefficients: Floats, where: Interval) -> Floats:
    """Return the largest |f(v)| of every row of coefficients, v in its interval."""
    low, high = _on_grid(coefficients, where)
    return np.asarray(_BETWEEN * np.maximum(np.abs(low), np.abs(high)))


def _on_grid(coefficients: Floats, where: Interval) -> tuple[Floats, Floats]:
    """Return the smallest and the largest f(v) of every row on its grid; rows that are the same are done once."""
    given = np.column_stack([coefficients, where.low, where.high])
    own, rows = np.unique(given, axis=0, return_inverse=True)
    grid = np.linspace(-1, 1, _GRID)
    low, high = np.empty(len(own)), np.empty(len(own))
    for first in range(0, len(own), _ROWS):
        part = own[first : first + _ROWS]
        span = Interval(part[:, -2], part[:, -1])
        points = span.centre[:, None] + span.radius[:, None] * grid
        total = np.broadcast_to(part[:, -3, None], points.shape)
        for power in range(coefficients.shape[1] - 2, -1, -1):
            total = total * points + part[:, power, None]
        low[first : first + _ROWS], high[first : first + _ROWS] = total.min(axis=1), total.max(axis=1)
    rows = rows.reshape(-1)
    return low[rows], high[rows]
