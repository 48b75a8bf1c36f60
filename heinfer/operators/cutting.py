"""Cut a block's program for prepared mode: choose planes, bands and ciphertexts, and place every uploaded value.

requires  a server program and its index maps
ensures   a `PreparedForm`: same function as the program, no position used twice, every plane within a ciphertext
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.operators.plain import evaluate_step
from heinfer.operators.prepared import Hint, HintKind, Maps, PreparedForm
from heinfer.operators.program import Program
from heinfer.operators.steps import WEIGHTED, Conv, MatMul, Scale, Shape, Step, Sum, Take, Window, sources_of

#: Largest degree that a block takes for its planes. Beyond, planes are cut into bands of rows: at 8192 the halo of a
#: 3x3 convolution over 224 columns costs 6 % of an upload, and the default prime serves all degrees up to here.
MAX_DEGREE: Final = 8192
_NONE = np.empty(0, np.int64)


def prepare_form(program: Program, maps: Maps, degree: int) -> PreparedForm | None:
    """Cut a server program for prepared mode.

    Args:
        program: server program of a block.
        maps: at least its index maps.
        degree: smallest N to use.

    Returns:
        The cut; None where a row of a window does not fit into `MAX_DEGREE` coefficients.
    """
    while True:
        try:
            return _Cutter(program, maps, degree).cut()
        except _TooLarge:
            degree *= 2
            if degree > MAX_DEGREE:
                return None


class _TooLarge(Exception):  # noqa: N818 - a signal: try a larger degree
    """A plane does not fit, and a larger degree is left to try; or not even a band of rows fits."""


@dataclass(frozen=True, slots=True)
class _Plane:
    """A part of a value (C, H, W) as it is uploaded: rows and columns from (top, left) on, every `strides`-th."""

    top: int
    left: int
    height: int
    width: int
    strides: tuple[int, int] = (1, 1)

    @property
    def size(self) -> int:
        return self.height * self.width


class _Cutter:
    """Builds a `PreparedForm`, server input after server input and step after step."""

    def __init__(self, program: Program, maps: Maps, degree: int) -> None:
        self._old = program
        self._maps = maps
        self._degree = degree
        self._shapes = program.shapes
        self._inputs: list[Shape] = []
        self._firsts: list[int] = []  # first ciphertext of every server input
        self._gather: list[tuple[int, NDArray[np.int64]]] = []  # (value, element or -1)
        self._positions: list[NDArray[np.int64]] = []
        self._ciphertexts = 0
        self._known: dict[tuple[object, ...], int] = {}
        self._steps: list[Step] = []
        self._arrays: dict[str, NDArray[Any]] = {}
        self._hints: list[Hint] = []

    def cut(self) -> PreparedForm:
        depth = [0] * len(self._old.inputs)
        for step in self._old.steps:
            depth.append(depth[sources_of(step)[0]] + isinstance(step, WEIGHTED))
        first = len(self._old.inputs)
        weighted = [(first + i, s) for i, s in enumerate(self._old.steps) if isinstance(s, WEIGHTED)]
        planes = self._choose_planes(weighted)
        plans = {number: self._cut_weighted(step, planes) for number, step in weighted}
        inputs, renamed = len(self._inputs), dict[int, int]()
        for number, step in enumerate(self._old.steps, first):
            if depth[number] == 0:
                continue
            if number in plans:
                renamed[number] = self._add_parts(number, step, plans[number], inputs)
            elif isinstance(step, Take | Sum):
                renamed[number] = self._add(
                    dataclasses.replace(step, sources=tuple(renamed[s] for s in sources_of(step))), inputs
                )
            else:
                renamed[number] = self._add(dataclasses.replace(step, source=renamed[step.source]), inputs)
        front, gathered, gather = self._front(depth)
        return PreparedForm(
            self._degree,
            front,
            gathered,
            gather,
            np.concatenate(self._positions) if self._positions else np.empty(0, np.int64),
            self._ciphertexts,
            Program(tuple(self._inputs), tuple(self._steps), tuple(renamed[o] for o in self._old.outputs)),
            self._arrays,
            tuple(self._hints),
        )

    # -- uploads --------------------------------------------------------------------------------------------------

    def _choose_planes(self, weighted: Sequence[tuple[int, Step]]) -> dict[int, _Plane]:
        """Return one plane for every value that convolutions read: what all of them together reach."""
        readers: dict[int, list[Conv]] = {}
        for _, step in weighted:
            if isinstance(step, Conv) and not _is_single(step):
                readers.setdefault(step.source, []).append(step)
        return {value: _common_plane(convs) for value, convs in readers.items()}

    def _cut_weighted(self, step: Step, planes: Mapping[int, _Plane]) -> list[tuple[Step, Hint]]:
        """Return the steps that replace a weighted step, each with its hint; sources are server inputs."""
        match step:
            case Conv() if not _is_single(step):
                return self._cut_conv(step, planes[step.source])
            case Conv():
                window = step.window
                plane = _Plane(-window.pads[0], -window.pads[1], *_reach(window))
                source = self._upload_plane(step.source, plane, flat=True)
                moved = dataclasses.replace(step, source=source, window=_moved(window, plane))
                return [(moved, self._dense(source, prod(step.shape)))]
            case MatMul():
                return self._cut_matmul(step)
            case Scale():
                source = self._upload_flat(step.source)
                hint = Hint(
                    -1, HintKind.ELEMENTWISE, prod(step.shape), self._firsts[source], self._count(source), _NONE
                )
                return [(dataclasses.replace(step, source=source), hint)]
        raise ParameterError(f"a {step.kind} has no weights")

    def _cut_conv(self, step: Conv, plane: _Plane) -> list[tuple[Step, Hint]]:
        window = step.window
        if plane.size <= self._degree:
            source = self._upload_plane(step.source, plane)
            moved = dataclasses.replace(step, source=source, window=_moved(window, plane))
            return [(moved, self._polynomial(moved, source))]
        if self._degree < MAX_DEGREE:
            raise _TooLarge
        own = _common_plane([step])
        strides = _moved(window, own).strides  # over what is uploaded
        rows = (self._degree // own.width - _extent(window, 0)) // strides[0] + 1
        if self._degree // own.width < _extent(window, 0):
            raise _TooLarge
        parts: list[tuple[Step, Hint]] = []
        for first in range(0, window.output[0], rows):
            count = min(rows, window.output[0] - first)
            height = (count - 1) * strides[0] + _extent(window, 0)
            band = dataclasses.replace(own, top=own.top + first * window.strides[0], height=height)
            source = self._upload_plane(step.source, band)
            part = Window(window.kernel, strides, (0, 0, 0, 0), window.dilations, (count, window.output[1]))
            moved = Conv(source, step.weights, part, step.group, (step.shape[0], *part.output))
            parts.append((moved, self._polynomial(moved, source)))
        return parts

    def _cut_matmul(self, step: MatMul) -> list[tuple[Step, Hint]]:
        inputs, tokens = self._shapes[step.source][-1], prod(step.shape[:-1])
        if tokens == 1:
            source = self._upload_flat(step.source)
            return [(dataclasses.replace(step, source=source), self._dense(source, step.shape[-1]))]
        if tokens > self._degree and self._degree < MAX_DEGREE:
            raise _TooLarge
        parts: list[tuple[Step, Hint]] = []
        for first in range(0, tokens, self._degree):
            count = min(self._degree, tokens - first)
            source = self._upload_tokens(step.source, first, count, inputs)
            moved = MatMul(source, step.weights, (count, step.shape[-1]))
            hint = Hint(
                -1,
                HintKind.POLYNOMIAL,
                step.shape[-1],
                self._firsts[source],
                self._count(source),
                np.arange(count),
                row_stride=1,
                read_stride=step.shape[-1],
                planes=self._degree // count,
                plane=count,
                width=count,
            )
            parts.append((moved, hint))
        return parts

    def _upload_plane(self, value: int, plane: _Plane, flat: bool = False) -> int:
        """Upload a part of every channel; positions outside the value are padding. Returns the server input."""
        channels, height, width = self._shapes[value]
        y = plane.top + plane.strides[0] * np.arange(plane.height)
        x = plane.left + plane.strides[1] * np.arange(plane.width)
        inside = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))[None]
        offsets = np.where(inside, y[:, None] * width + x[None], 0).ravel()
        elements = np.arange(channels)[:, None] * (height * width) + offsets
        elements[:, ~inside.ravel()] = -1
        planes = self._degree // plane.size if not flat else 0
        return self._upload((value, plane, flat), (channels, plane.height, plane.width), value, elements, planes)

    def _upload_flat(self, value: int) -> int:
        shape = self._shapes[value]
        return self._upload((value, "flat"), shape, value, np.arange(prod(shape))[None], 0)

    def _upload_tokens(self, value: int, first: int, count: int, inputs: int) -> int:
        """Upload some tokens; what shares a plane is one feature of all of them."""
        key = (value, "tokens", first, count)
        known = self._known.get(key)
        elements = np.arange(first * inputs, (first + count) * inputs).reshape(count, inputs)
        source = self._upload(key, (count, inputs), value, elements.T, self._degree // count)
        if known is None:  # planes are columns of the tensor: bring both into the tensor's order
            self._gather[-1] = (value, elements.ravel())
            self._positions[-1] = self._positions[-1].reshape(inputs, count).T.ravel()
        return source

    def _upload(
        self, key: tuple[object, ...], shape: Shape, value: int, elements: NDArray[np.int64], planes: int
    ) -> int:
        """Add a server input of one row of elements a plane; `planes` share a ciphertext, 0 for no planes at all."""
        if key in self._known:
            return self._known[key]
        number = len(self._inputs)
        self._known[key] = number
        self._inputs.append(shape)
        self._firsts.append(self._ciphertexts)
        if planes:
            count, size = elements.shape
            index = np.arange(count)
            starts = (self._ciphertexts + index // planes) * self._degree + index % planes * size
            positions = starts[:, None] + np.arange(size)
        else:
            positions = self._ciphertexts * self._degree + np.arange(elements.size)
        self._gather.append((value, elements.ravel()))
        self._positions.append(positions.ravel())
        last = int(positions.max(initial=self._ciphertexts * self._degree - 1))
        self._ciphertexts = last // self._degree + 1
        return number

    def _count(self, source: int) -> int:
        ends = [*self._firsts[1:], self._ciphertexts]
        return ends[source] - self._firsts[source]

    # -- hints ----------------------------------------------------------------------------------------------------

    def _dense(self, source: int, outputs: int) -> Hint:
        return Hint(-1, HintKind.DENSE, outputs, self._firsts[source], self._count(source), _NONE)

    def _polynomial(self, step: Conv, source: int) -> Hint:
        _, height, width = self._inputs[source]
        window = step.window
        y = np.arange(window.output[0]) * window.strides[0] - window.pads[0]
        x = np.arange(window.output[1]) * window.strides[1] - window.pads[1]
        return Hint(
            -1,
            HintKind.POLYNOMIAL,
            step.shape[0],
            self._firsts[source],
            self._count(source),
            (y[:, None] * width + x).ravel(),
            row_stride=prod(window.output),
            planes=self._degree // (height * width),
            plane=height * width,
            width=width,
        )

    # -- steps ----------------------------------------------------------------------------------------------------

    def _add(self, step: Step, inputs: int) -> int:
        self._steps.append(step)
        return inputs + len(self._steps) - 1

    def _add_parts(self, number: int, step: Step, parts: list[tuple[Step, Hint]], inputs: int) -> int:
        """Add the steps that replace a weighted one and put their results together; return the number of the result."""
        numbers = []
        for part, hint in parts:
            self._hints.append(dataclasses.replace(hint, step=len(self._steps)))
            numbers.append(self._add(part, inputs))
        if len(parts) == 1 and parts[0][0].shape == step.shape:
            return numbers[0]
        indices = None
        if isinstance(step, Conv):
            channels, width = step.shape[0], step.shape[2]
            first, bands = 0, []
            for part, _ in parts:
                size = prod(part.shape)
                bands.append(np.arange(first, first + size).reshape(channels, -1, width))
                first += size
            indices = f"bands.{number}"
            self._arrays[indices] = np.concatenate(bands, axis=1).ravel().astype(np.int32)
        return self._add(Take(tuple(numbers), indices, step.shape), inputs)

    def _front(self, depth: Sequence[int]) -> tuple[tuple[Step, ...], tuple[int, ...], NDArray[np.int32]]:
        """Return what the node does first. Movement of data folds into the index map; sums stay steps."""
        count = len(self._old.inputs)
        steps = tuple(s for i, s in enumerate(self._old.steps) if depth[count + i] == 0)
        # A step before the weights never reads what a step after them makes, so numbers stay right without those.
        numbers = [*range(count), *(count + i for i in range(len(self._old.steps)) if depth[count + i] == 0)]
        local = {number: i for i, number in enumerate(numbers)}
        steps = tuple(_renumber(s, local) for s in steps)
        used = [local[value] for value, _ in self._gather]
        if all(isinstance(s, Take) for s in steps):
            sizes = [prod(shape) for shape in self._old.inputs]
            starts = np.cumsum([0, *sizes])
            values = [
                np.arange(start, start + size, dtype=np.float64).reshape(1, *shape) + 1
                for start, size, shape in zip(starts, sizes, self._old.inputs, strict=False)
            ]
            for s in steps:
                values.append(evaluate_step(s, self._maps, values))  # zero, which is outside, stays zero
            flat = [values[v].ravel().astype(np.int64) - 1 for v in used]
            parts = [np.where(elements < 0, -1, flat[i][elements]) for i, (_, elements) in enumerate(self._gather)]
            return (), tuple(range(count)), np.concatenate(parts).astype(np.int32)
        gathered = tuple(dict.fromkeys(used))
        shapes = [self._shapes[numbers[v]] for v in gathered]
        starts = np.cumsum([0, *(prod(shape) for shape in shapes)])
        begin = {v: int(start) for v, start in zip(gathered, starts, strict=False)}
        parts = [np.where(elements < 0, -1, elements + begin[used[i]]) for i, (_, elements) in enumerate(self._gather)]
        return steps, gathered, np.concatenate(parts).astype(np.int32)


def _renumber(step: Step, local: Mapping[int, int]) -> Step:
    if isinstance(step, Take | Sum):
        return dataclasses.replace(step, sources=tuple(local[s] for s in step.sources))
    return dataclasses.replace(step, source=local[step.source])


def _is_single(step: Conv) -> bool:
    """Whether a convolution has one position: it is a dense layer."""
    return prod(step.window.output) == 1


def _extent(window: Window, axis: int) -> int:
    """Rows (axis 0) or columns (axis 1) that one position of a window covers."""
    return (window.kernel[axis] - 1) * window.dilations[axis] + 1


def _reach(window: Window) -> tuple[int, int]:
    """Rows and columns that all positions of a window cover, padding included."""
    down, across = ((window.output[i] - 1) * window.strides[i] + _extent(window, i) for i in range(2))
    return down, across


def _common_plane(convs: Sequence[Conv]) -> _Plane:
    """Return the smallest plane that holds what all convolutions of a value reach."""
    first = convs[0].window
    if first.kernel == (1, 1) and all(
        c.window.kernel == (1, 1) and c.window.pads == first.pads and c.window.strides == first.strides for c in convs
    ):  # what strides skip is not uploaded
        height, width = (max(c.window.output[i] for c in convs) for i in range(2))
        return _Plane(-first.pads[0], -first.pads[1], height, width, first.strides)
    top = -max(c.window.pads[0] for c in convs)
    left = -max(c.window.pads[1] for c in convs)
    height = max(_reach(c.window)[0] - c.window.pads[0] for c in convs) - top
    width = max(_reach(c.window)[1] - c.window.pads[1] for c in convs) - left
    return _Plane(top, left, height, width)


def _moved(window: Window, plane: _Plane) -> Window:
    """Return the window over an uploaded plane: no padding, and a crop where another reader reaches further."""
    top, left = window.pads[0] + plane.top, window.pads[1] + plane.left
    strides = window.strides if plane.strides == (1, 1) else (1, 1)
    return Window(window.kernel, strides, (top, left, 0, 0), window.dilations, window.output)
