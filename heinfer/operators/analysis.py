"""What a program's integer matrix looks like row by row, without ever forming the matrix.

Scales and norms travel through the steps as tensors of the values' shapes. For a 5x5 convolution of one channel with
all weights at the limit, every row has l1 = 25 * 32767, l2 = 5 * 32767; if each weight was rounded by a quarter, the
rounding is 6.25. At a padded border fewer weights reach the output, and less rounding, but the norms are the same: in
prepared mode padding in front of the weights is uploaded, and carries noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import HeinferError
from heinfer.operators.plain import evaluate_step, output_rows, row_tiles, take, windows
from heinfer.operators.program import Program
from heinfer.operators.steps import Conv, MatMul, Rescale, Scale, Shift, Step, Sum, Take, WindowSum, sources_of
from heinfer.ring.bounds import RowNorms

Floats = NDArray[np.float64]
#: What rounding did to the weights of some output rows (`heinfer.operators.plain.output_rows`).
Rest = Callable[[slice], Floats]


class ScaleConflictError(HeinferError):
    """Values with different scales meet in one step.

    Attributes:
        step: position of the step in the program.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"step {step} adds values of different scales")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Row norms of one value, each array of shape (1, *shape).

    In front of the weights l1 counts the inputs that an element is the sum of. Where none are added, `origin` is the
    number of the input that it is, -1 for zero.
    """

    scale: Floats
    l1: Floats
    l2: Floats
    rounding: Floats
    input_rounding: Floats
    origin: Floats | None = None
    front: bool = False

    @property
    def distinct(self) -> bool:
        """Whether no input is there twice."""
        if self.origin is None:
            return False
        used = self.origin[self.origin >= 0].astype(np.int64)
        return int(np.bincount(used).max(initial=0)) <= 1

    @property
    def live(self) -> NDArray[np.bool_]:
        """Elements that depend on the input, even by weights that round to 0; the others are 0 at any scale."""
        return self.l1 > 0 if self.front else self.rounding > 0


def analyse(
    program: Program,
    integers: Mapping[str, NDArray[Any]],
    scales: Mapping[str, Floats],
    factors: Mapping[str, Floats],
    rests: Mapping[str, Rest] | None = None,
) -> list[RowNorms]:
    """Return the norms of every output of a full program.

    Args:
        program: full program.
        integers: quantised weights (a digit of them) and index maps.
        scales: weight scale of every weighted step by its weights' name: per output channel for `Conv`, per column for
            `MatMul`, per element for `Scale`.
        factors: values of `Rescale` steps.
        rests: give what rounding did to every weight of some rows, at its scale; > 0 where the weight is not 0
            (`Digit.rest`). None: a half for each.

    Raises:
        ScaleConflictError: values of different scales are added.
    """
    values: list[_Rows] = []
    first = 0
    for shape in program.inputs:
        ones = np.ones((1, *shape))
        numbers = np.arange(first, first + ones.size, dtype=np.float64).reshape(ones.shape)
        values.append(_Rows(ones, ones, ones, 0 * ones, 0 * ones, numbers, front=True))
        first += ones.size
    for position, step in enumerate(program.steps):
        sources = [values[s] for s in sources_of(step)]
        values.append(_advance(position, step, sources, integers, scales, factors, rests))
    return [
        RowNorms(rows.scale[0], rows.l1[0], rows.l2[0], rows.rounding[0], rows.input_rounding[0])
        for rows in (values[o] for o in program.outputs)
    ]


def _advance(
    position: int,
    step: Step,
    sources: Sequence[_Rows],
    integers: Mapping[str, NDArray[Any]],
    scales: Mapping[str, Floats],
    factors: Mapping[str, Floats],
    rests: Mapping[str, Rest] | None,
) -> _Rows:
    match step:
        case Conv() | MatMul() | Scale():
            rest = None if rests is None else rests[step.weights]
            return _weigh(step, sources[0], integers[step.weights], rest, scales[step.weights])
        case Take():
            return _move(step, sources, integers[step.indices] if step.indices else None)
        case Sum():
            return _add(position, sources)
        case WindowSum():
            return _pool(position, step, sources[0])
        case Rescale():
            return replace(sources[0], scale=sources[0].scale / factors[step.values][None])
        case Shift():
            return sources[0]


def _weigh(step: Conv | MatMul | Scale, rows: _Rows, weights: NDArray[Any], rest: Rest | None, scale: Floats) -> _Rows:
    """Apply weights, and what is left of them, to norms; some rows at a time: as float64 weights may be gigabytes."""
    norms: tuple[list[Floats], ...] = [], [], [], []
    distinct = rows.distinct
    for tile in row_tiles(step, weights):
        part = output_rows(step, weights, tile)
        left = np.full(part.shape, 0.5) if rest is None else rest(tile)
        for found, made in zip(norms, _weigh_rows(_narrowed(step, part), rows, part, left, distinct), strict=True):
            found.append(made)
    axis = -1 if isinstance(step, MatMul) else 1
    l1, l2, rounding, input_rounding = (f[0] if len(f) == 1 else np.concatenate(f, axis=axis) for f in norms)
    shaped = scale.reshape(-1, 1, 1) if isinstance(step, Conv) else scale
    return _Rows(np.broadcast_to(shaped, step.shape)[None].copy(), l1, l2, rounding, input_rounding)


def _narrowed(step: Conv | MatMul | Scale, weights: NDArray[Any]) -> Conv | MatMul | Scale:
    """Return a step with the outputs of some of its weights."""
    match step:
        case Conv():
            return replace(step, source=0, shape=(weights.shape[0], *step.shape[1:]))
        case MatMul():
            return replace(step, source=0, shape=(*step.shape[:-1], weights.shape[1]))
        case Scale():
            return replace(step, source=0)


def _weigh_rows(
    step: Conv | MatMul | Scale, rows: _Rows, weights: NDArray[Any], rest: Floats, distinct: bool
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return l1, l2, rounding and input rounding of the outputs of some weights."""
    absolute = np.abs(weights.astype(np.float64))

    def apply(array: Floats, x: Floats) -> Floats:
        local = step
        if isinstance(local, Conv) and x.shape[1] > 1 and np.array_equal(x, np.broadcast_to(x[:, :1], x.shape)):
            # Channels that are alike, as those of an input are, can be one: a large layer takes little longer.
            local, array, x = replace(local, group=1), array.sum(axis=1, keepdims=True), x[:, :1]
        return evaluate_step(local, {step.weights: array}, [x])

    if rows.origin is not None:
        l1 = _reduced(step, absolute, np.add)
    else:  # sums in front of the weights; what meets zeros and padding meets noise alone
        l1 = apply(absolute, rows.l1) + _reduced(step, absolute, np.add)
        l1 -= apply(absolute, rows.live.astype(np.float64))
    l2 = np.sqrt(_reduced(step, absolute**2, np.add)) if distinct else l1
    rounding = apply(rest, rows.l1)
    # Copies of one input may meet several of a row's weights, at worst all.
    input_rounding = _reduced(step, rest, np.maximum) if distinct else rounding
    return l1, l2, rounding, input_rounding


def _reduced(step: Conv | MatMul | Scale, weights: Floats, combine: np.ufunc) -> Floats:
    """Return sum or maximum of a row's weights, those that meet padding among them; shape (1, *step.shape)."""
    match step:
        case Conv():
            result = combine.reduce(weights, axis=(1, 2, 3), initial=0.0).reshape(-1, 1, 1)
        case MatMul():
            result = combine.reduce(weights, axis=0, initial=0.0)
        case Scale():
            result = weights
    return np.broadcast_to(result, step.shape)[None].copy()


def _move(step: Take, sources: Sequence[_Rows], indices: NDArray[np.int32] | None) -> _Rows:
    def moved(name: str, fill: float) -> Floats:
        return take([getattr(rows, name) for rows in sources], indices, step, fill)

    joined = any(rows.origin is None for rows in sources)
    return _Rows(
        moved("scale", 1.0),
        moved("l1", 0.0),
        moved("l2", 0.0),
        moved("rounding", 0.0),
        moved("input_rounding", 0.0),
        None if joined else moved("origin", -1.0),
        all(rows.front for rows in sources),
    )


def _add(position: int, sources: Sequence[_Rows]) -> _Rows:
    scale, live = sources[0].scale, sources[0].live
    for rows in sources[1:]:
        if not np.array_equal(scale[live & rows.live], rows.scale[live & rows.live]):
            raise ScaleConflictError(position)
        scale, live = np.where(live, scale, rows.scale), live | rows.live
    names = ("l1", "l2", "rounding", "input_rounding")
    l1, l2, rounding, input_rounding = (np.sum([getattr(rows, name) for rows in sources], axis=0) for name in names)
    return _Rows(scale, l1, l2, rounding, input_rounding, front=all(rows.front for rows in sources))


def _pool(position: int, step: WindowSum, rows: _Rows) -> _Rows:
    def pooled(values: Floats) -> Floats:
        return evaluate_step(replace(step, source=0), {}, [values])

    # All live elements of a window must have one scale, which is then the window's.
    live = windows(rows.live.astype(np.float64), step.window) > 0
    scales = windows(rows.scale, step.window)
    scale = np.where(live, scales, -np.inf).max(axis=(2, 3))
    any_live = live.any(axis=(2, 3))
    if np.any(any_live & (np.where(live, scales, np.inf).min(axis=(2, 3)) != scale)):
        raise ScaleConflictError(position)
    scale = np.where(any_live, scale, 1.0)
    names = ("l1", "l2", "rounding", "input_rounding")
    l1, l2, rounding, input_rounding = (pooled(getattr(rows, name)) for name in names)
    return _Rows(scale, l1, l2, rounding, input_rounding, front=rows.front)
