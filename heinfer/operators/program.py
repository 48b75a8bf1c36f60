"""A linear program: the affine map of one block, as numbered values and steps, checked for consistency.

The partitioner writes two programs a block: the full one, with biases and output scales, for reference; and the
server's, which is purely linear. Both are data (plan.json), so everything that comes from a file is checked here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from heinfer.errors import PlanError
from heinfer.operators.steps import (
    CONFIG,
    LARGEST_VALUE,
    WEIGHTED,
    Conv,
    MatMul,
    Rescale,
    Shape,
    Shift,
    Step,
    Sum,
    Take,
    Window,
    WindowSum,
    array_of,
    sources_of,
)

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, config=CONFIG)
class Program:
    """An affine (full) or linear (server) map.

    Attributes:
        inputs: shape of every input, batch axis excluded.
        steps: in order; step i makes value len(inputs) + i.
        outputs: numbers of the values that are returned.
    """

    inputs: tuple[Shape, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check numbering, shapes and the rule of one weighted step on every path.

        Raises:
            PlanError: the program is inconsistent.
        """
        large = [shape for shape in self.shapes if prod(shape) > LARGEST_VALUE or max(shape, default=0) > LARGEST_VALUE]
        if large:
            raise PlanError(f"a value of shape {large[0]} is too large: expected {LARGEST_VALUE} elements at most")
        shapes = list(self.inputs)
        weighted = [0] * len(self.inputs)
        for position, step in enumerate(self.steps):
            sources = sources_of(step)
            if not sources or any(not 0 <= s < len(shapes) for s in sources):
                raise PlanError(f"step {position} ({step.kind}) reads a value that does not exist yet")
            _check_shape(position, step, [shapes[s] for s in sources])
            depths = {weighted[s] for s in sources}
            depth = depths.pop() + isinstance(step, WEIGHTED)
            if depths or depth > 1:
                raise PlanError(f"step {position} ({step.kind}): every path must pass exactly one weighted step")
            shapes.append(step.shape)
            weighted.append(depth)
        if not self.outputs or any(not 0 <= o < len(shapes) or weighted[o] != 1 for o in self.outputs):
            raise PlanError("an output of a block does not exist or no weighted step leads to it")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of all values."""
        return (*self.inputs, *(step.shape for step in self.steps))

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the outputs."""
        shapes = self.shapes
        return tuple(shapes[o] for o in self.outputs)

    def for_server(self, digits: int = 1) -> Program:
        """Return the program without `Shift` and `Rescale`, which belong to the node.

        Args:
            digits: of the weights: the weighted steps, and what follows them, are there once for every digit. Outputs
                are output 0 of digit 0, output 0 of digit 1, ..., output 1 of digit 0, ...
        """
        count = len(self.inputs)
        renamed = [[number] * digits for number in range(count)]  # by digit
        weighted = [False] * count
        kept: list[Step] = []
        for step in self.steps:
            weighted.append(isinstance(step, WEIGHTED) or weighted[sources_of(step)[0]])
            if isinstance(step, Shift | Rescale):
                renamed.append(renamed[step.source])
                continue
            copies = digits if weighted[-1] else 1
            numbers = range(count + len(kept), count + len(kept) + copies)
            kept += [_for_digit(step, digit, renamed) for digit in range(copies)]
            renamed.append(list(numbers) * (digits // copies))
        return Program(self.inputs, tuple(kept), tuple(number for o in self.outputs for number in renamed[o]))

    def check_arrays(self, arrays: Arrays) -> None:
        """Check that every named array is there, of the right shape, with indices in range.

        Raises:
            PlanError: an array is missing or does not fit.
        """
        self._check(arrays, self.steps)

    def check_maps(self, maps: Arrays) -> None:
        """Check the index maps alone; what `check_arrays` says of them holds here."""
        self._check(maps, [step for step in self.steps if isinstance(step, Take)])

    def _check(self, arrays: Arrays, steps: Sequence[Step]) -> None:
        shapes = self.shapes
        for step in steps:
            name = array_of(step)
            if name is None:
                continue
            if name not in arrays:
                raise PlanError(f"array {name!r} is missing")
            array = arrays[name]
            expected = _array_shape(step, [shapes[s] for s in sources_of(step)])
            if array.shape != expected:
                raise PlanError(f"array {name!r}: expected shape {expected}, found {array.shape}")
            if isinstance(step, Take):
                limit = sum(prod(shapes[s]) for s in step.sources)
                if array.dtype != np.int32 or (array.size and not -1 <= array.min() <= array.max() < limit):
                    raise PlanError(f"array {name!r}: expected int32 indices from -1 to {limit - 1}")

    def multiply_adds(self) -> int:
        """Return the multiply-adds per sample of all weighted steps."""
        shapes, total = self.shapes, 0
        for step in self.steps:
            match step:
                case Conv():
                    channels = shapes[step.source][0] // step.group
                    total += prod(step.shape) * channels * prod(step.window.kernel)
                case MatMul():
                    total += prod(step.shape) * shapes[step.source][-1]
                case _:
                    total += prod(step.shape) if isinstance(step, WEIGHTED) else 0
        return total


def digit_name(weights: str, digit: int) -> str:
    """Return the name of one digit of some weights; the first has the name of the weights."""
    return weights if digit == 0 else f"{weights}.digit{digit}"


def _for_digit(step: Step, digit: int, renamed: Sequence[Sequence[int]]) -> Step:
    """Return a step as it is for one digit; `renamed` has the new numbers of values by digit."""
    if isinstance(step, Take | Sum):
        return dataclasses.replace(step, sources=tuple(renamed[s][digit] for s in step.sources))
    moved = dataclasses.replace(step, source=renamed[step.source][digit])
    if isinstance(moved, WEIGHTED):
        return dataclasses.replace(moved, weights=digit_name(moved.weights, digit))
    return moved


def _array_shape(step: Step, sources: list[Shape]) -> Shape:
    match step:
        case Conv():
            return (step.shape[0], sources[0][0] // step.group, *step.window.kernel)
        case MatMul():
            return (sources[0][-1], step.shape[-1])
        case Take():
            return (prod(step.shape),)
        case _:
            return step.shape


def _check_shape(position: int, step: Step, sources: list[Shape]) -> None:
    match step:
        case Conv():
            fits = (
                len(sources[0]) == 3
                and len(step.shape) == 3
                and sources[0][0] % step.group == 0 == step.shape[0] % step.group
                and step.shape[1:] == step.window.output
                and _window_fits(step.window, sources[0])
            )
        case WindowSum():
            fits = (
                len(sources[0]) == 3
                and step.shape == (sources[0][0], *step.window.output)
                and all(k <= s for k, s in zip(step.window.kernel, _padded(step.window, sources[0]), strict=True))
            )
        case MatMul():
            fits = len(sources[0]) >= 1 and len(step.shape) >= 1 and sources[0][:-1] == step.shape[:-1]
        case Take():
            fits = step.indices is not None or sum(map(prod, sources)) == prod(step.shape)
        case Sum():
            fits = len(step.signs) == len(sources) and all(s == step.shape for s in sources)
        case _:
            fits = sources[0] == step.shape
    if not fits:
        raise PlanError(f"step {position} ({step.kind}): shapes {sources} do not give {step.shape}")


def _window_fits(window: Window, source: Shape) -> bool:
    """Whether the last window ends inside the padded plane."""
    padded = _padded(window, source)
    return all(
        (window.output[i] - 1) * window.strides[i] + (window.kernel[i] - 1) * window.dilations[i] < padded[i]
        for i in range(2)
    )


def _padded(window: Window, source: Shape) -> tuple[int, int]:
    top, left, bottom, right = window.pads
    return source[1] + top + bottom, source[2] + left + right
