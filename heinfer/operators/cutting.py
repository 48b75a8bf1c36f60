"""Cut a block's program for prepared mode: choose planes, bands and ciphertexts, and place every uploaded value.

requires  a server program and its index maps, the degree N, and which steps take a dense hint by choice
ensures   a `PreparedForm`: same function as the program, no position used twice, every plane within a ciphertext

Who cuts chooses degree and dense hints (`outlines` lists what is open, the partitioner takes the cheapest by
forecast); all else follows, so that node and server repeat the cut from the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.operators.plain import evaluate_step
from heinfer.operators.planes import Plane, common_plane, extent, reach_of, window_over
from heinfer.operators.prepared import Hint, HintKind, Maps, Outline, PreparedForm
from heinfer.operators.program import Program
from heinfer.operators.steps import WEIGHTED, Conv, MatMul, Scale, Step, Sum, Take, Window, sources_of
from heinfer.operators.uploads import Upload, flat_plane_upload, flat_upload, plane_upload, token_upload

#: Largest degree that a block takes: the default prime serves all degrees up to here.
MAX_DEGREE: Final = 8192
#: Positions up to which a step may take a dense hint, which has a row for each of them and each channel: a product of
#: polynomials costs a node 17 times what a row does, but rows are kept, and read.
MAX_DENSE_POSITIONS: Final = 16
_NONE = np.empty(0, np.int64)


def degrees_from(degree: int) -> tuple[int, ...]:
    """Return the degrees that a block may take in a plan whose ring has some degree."""
    doubled = [degree]
    while 2 * doubled[-1] <= MAX_DEGREE:
        doubled.append(2 * doubled[-1])
    return tuple(doubled)


def outlines(program: Program, degree: int) -> Iterator[Outline]:
    """Outline every cut of a server program that is worth comparing: degrees, bands, kinds of hints.

    What costs least at one degree depends on what is kept and sent beside what is computed. A hint's kind does not
    change uploads, so steps that are better dense are those of few positions, whatever the others are.

    Args:
        program: server program of a block.
        degree: smallest N to use.

    Yields:
        Outlines, the smallest degree first; none where a row of a window fits no degree up to `MAX_DEGREE`, and the
        step has too many positions to be dense.
    """
    positions = {number: count for number, step in enumerate(program.steps) if (count := _choice(step))}
    for n in degrees_from(degree):
        for limit in (0, *sorted(set(positions.values()))):
            dense = [number for number, count in positions.items() if count <= limit]
            try:
                yield _Cutter(program, {}, n, dense).outline()
            except _TooLarge:
                continue  # with dense hints for more steps it may fit


def prepare_form(program: Program, maps: Maps, degree: int, dense: Collection[int] = ()) -> PreparedForm | None:
    """Cut a server program for prepared mode.

    Args:
        program: server program of a block.
        maps: at least its index maps.
        degree: N.
        dense: numbers of steps that take a dense hint instead of a polynomial one. Vectors always do.

    Returns:
        The cut; None where a row of a window of a step that is not dense does not fit into N coefficients.
    """
    try:
        return _Cutter(program, maps, degree, dense).cut()
    except _TooLarge:
        return None


def _choice(step: Step) -> int:
    """Return the positions of a step whose hint may be dense or polynomial; 0 for others."""
    if isinstance(step, Conv):
        count = prod(step.window.output)
    elif isinstance(step, MatMul):
        count = prod(step.shape[:-1])
    else:
        return 0
    return count if 1 < count <= MAX_DENSE_POSITIONS else 0


class _TooLarge(Exception):  # noqa: N818 - a signal: try a larger degree
    """Not even a band of rows fits."""


class _Cutter:
    """Builds a `PreparedForm`, server input after server input and step after step."""

    def __init__(self, program: Program, maps: Maps, degree: int, dense: Collection[int]) -> None:
        self._old = program
        self._maps = maps
        self._degree = degree
        self._wanted = frozenset(dense)
        self._chosen: list[int] = []  # steps that are dense by choice
        self._shapes = program.shapes
        self._uploads: list[Upload] = []
        self._firsts: list[int] = []  # first ciphertext of every server input
        self._ciphertexts = 0
        self._known: dict[tuple[object, ...], int] = {}  # server inputs
        self._steps: list[Step] = []
        self._arrays: dict[str, NDArray[Any]] = {}
        self._hints: list[Hint] = []

    def outline(self) -> Outline:
        plans = self._cut_all()
        return Outline(
            self._degree,
            tuple(self._chosen),
            tuple(hint for parts in plans.values() for _, hint in parts),
            self._ciphertexts,
            sum(prod(upload.shape) for upload in self._uploads),
            sum(map(prod, self._old.output_shapes)),
            _joined(plans.values()),
        )

    def cut(self) -> PreparedForm:
        depth = [0] * len(self._old.inputs)
        for step in self._old.steps:
            depth.append(depth[sources_of(step)[0]] + isinstance(step, WEIGHTED))
        plans = self._cut_all()
        inputs, renamed = len(self._uploads), dict[int, int]()
        for number, step in enumerate(self._old.steps, len(self._old.inputs)):
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
        positions = [first * self._degree + u.places() for first, u in zip(self._firsts, self._uploads, strict=True)]
        shapes = tuple(upload.shape for upload in self._uploads)
        return PreparedForm(
            self._degree,
            front,
            gathered,
            gather,
            np.concatenate(positions) if positions else _NONE,
            self._ciphertexts,
            Program(shapes, tuple(self._steps), tuple(renamed[o] for o in self._old.outputs)),
            self._arrays,
            tuple(self._hints),
            tuple(self._chosen),
            _joined(plans.values()),
        )

    def _cut_all(self) -> dict[int, list[tuple[Step, Hint]]]:
        """Return what replaces every weighted step, by the number of its value."""
        first = len(self._old.inputs)
        weighted = [(first + i, s) for i, s in enumerate(self._old.steps) if isinstance(s, WEIGHTED)]
        planes = self._choose_planes(weighted)
        return {number: self._cut_weighted(number - first, step, planes) for number, step in weighted}

    # -- uploads --------------------------------------------------------------------------------------------------

    def _choose_planes(self, weighted: Sequence[tuple[int, Step]]) -> dict[int, Plane]:
        """Return one plane for every value that convolutions read: what all of them together reach."""
        readers: dict[int, list[Conv]] = {}
        for _, step in weighted:
            if isinstance(step, Conv) and not _is_single(step):
                readers.setdefault(step.source, []).append(step)
        planes = {value: common_plane(convs) for value, convs in readers.items()}
        return {value: plane.settled(self._shapes[value][0], self._degree) for value, plane in planes.items()}

    def _cut_weighted(self, number: int, step: Step, planes: Mapping[int, Plane]) -> list[tuple[Step, Hint]]:
        """Return the steps that replace a weighted step, each with its hint; sources are server inputs."""
        match step:
            case Conv() if not _is_single(step):
                return self._cut_conv(step, planes[step.source], self._chooses(number, step))
            case Conv():
                window = step.window
                plane = Plane(-window.pads[0], -window.pads[1], *reach_of(window))
                source = self._upload_plane(step.source, plane, flat=True)
                moved = dataclasses.replace(step, source=source, window=window_over(window, plane))
                return [(moved, self._dense(source, prod(step.shape)))]
            case MatMul():
                return self._cut_matmul(step, self._chooses(number, step))
            case Scale():
                source = self._upload_flat(step.source)
                hint = Hint(
                    -1,
                    HintKind.ELEMENTWISE,
                    prod(step.shape),
                    self._firsts[source],
                    self._uploads[source].ciphertexts,
                    _NONE,
                )
                return [(dataclasses.replace(step, source=source), hint)]
        raise ParameterError(f"a {step.kind} has no weights")

    def _chooses(self, number: int, step: Step) -> bool:
        """Whether a step is to be dense though it need not be."""
        if number not in self._wanted or not _choice(step):
            return False
        self._chosen.append(number)
        return True

    def _cut_conv(self, step: Conv, plane: Plane, dense: bool) -> list[tuple[Step, Hint]]:
        window = step.window
        fits = plane.size <= self._degree
        if fits or dense:
            source = self._upload_plane(step.source, plane, flat=not fits)
            moved = dataclasses.replace(step, source=source, window=window_over(window, plane))
            hint = self._dense(source, prod(step.shape)) if dense else self._polynomial(moved, source, plane)
            return [(moved, hint)]
        own = common_plane([step])
        strides = window_over(window, own).strides  # over what is uploaded
        reach = self._degree // own.columns * own.phases[0]
        if reach < extent(window, 0):
            raise _TooLarge
        rows = (reach - extent(window, 0)) // strides[0] + 1
        parts: list[tuple[Step, Hint]] = []
        for first in range(0, window.output[0], rows):
            count = min(rows, window.output[0] - first)
            height = (count - 1) * strides[0] + extent(window, 0)
            phases = (min(height, own.phases[0]), own.phases[1])
            band = dataclasses.replace(own, top=own.top + first * window.strides[0], height=height, phases=phases)
            source = self._upload_plane(step.source, band)
            part = Window(window.kernel, strides, (0, 0, 0, 0), window.dilations, (count, window.output[1]))
            moved = Conv(source, step.weights, part, step.group, (step.shape[0], *part.output))
            parts.append((moved, self._polynomial(moved, source, band)))
        return parts

    def _cut_matmul(self, step: MatMul, dense: bool) -> list[tuple[Step, Hint]]:
        tokens = prod(step.shape[:-1])
        if tokens == 1:
            source = self._upload_flat(step.source)
            return [(dataclasses.replace(step, source=source), self._dense(source, step.shape[-1]))]
        parts: list[tuple[Step, Hint]] = []
        for first in range(0, tokens, self._degree):
            count = min(self._degree, tokens - first)
            source = self._upload_tokens(step.source, first, count)
            moved = MatMul(source, step.weights, (count, step.shape[-1]))
            parts.append((moved, self._dense(source, prod(moved.shape)) if dense else self._tokens(moved, source)))
        return parts

    def _upload(self, key: tuple[object, ...], make: Callable[[], Upload]) -> int:
        """Return the server input of a key, added where it is new."""
        if key not in self._known:
            self._known[key] = len(self._uploads)
            self._firsts.append(self._ciphertexts)
            self._uploads.append(make())
            self._ciphertexts += self._uploads[-1].ciphertexts
        return self._known[key]

    def _upload_plane(self, value: int, plane: Plane, flat: bool = False) -> int:
        make = flat_plane_upload if flat else plane_upload
        return self._upload((value, plane, flat), lambda: make(value, self._shapes[value], plane, self._degree))

    def _upload_flat(self, value: int) -> int:
        return self._upload((value,), lambda: flat_upload(value, self._shapes[value], self._degree))

    def _upload_tokens(self, value: int, first: int, count: int) -> int:
        inputs = self._shapes[value][-1]
        return self._upload((value, first, count), lambda: token_upload(value, first, count, inputs, self._degree))

    # -- hints ----------------------------------------------------------------------------------------------------

    def _dense(self, source: int, outputs: int) -> Hint:
        return Hint(-1, HintKind.DENSE, outputs, self._firsts[source], self._uploads[source].ciphertexts, _NONE)

    def _polynomial(self, step: Conv, source: int, plane: Plane) -> Hint:
        """Describe a hint of an uploaded plane; where its windows start is the business of who makes it."""
        window = step.window
        y, x = (np.arange(window.output[i]) * (window.strides[i] // plane.phases[i]) for i in range(2))
        return Hint(
            -1,
            HintKind.POLYNOMIAL,
            step.shape[0],
            self._firsts[source],
            self._uploads[source].ciphertexts,
            (y[:, None] * plane.columns + x).ravel(),
            row_stride=prod(window.output),
            planes=self._degree // plane.size,
            plane=plane.size,
            width=plane.columns,
            phases=plane.phases,
        )

    def _tokens(self, step: MatMul, source: int) -> Hint:
        count, outputs = step.shape
        return Hint(
            -1,
            HintKind.POLYNOMIAL,
            outputs,
            self._firsts[source],
            self._uploads[source].ciphertexts,
            np.arange(count),
            row_stride=1,
            read_stride=outputs,
            planes=self._degree // count,
            plane=count,
            width=count,
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
        used = [local[upload.value] for upload in self._uploads]
        uploaded = [upload.elements() for upload in self._uploads]
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
            parts = [np.where(elements < 0, -1, flat[i][elements]) for i, elements in enumerate(uploaded)]
            return (), tuple(range(count)), np.concatenate(parts).astype(np.int32)
        gathered = tuple(dict.fromkeys(used))
        shapes = [self._shapes[numbers[v]] for v in gathered]
        starts = np.cumsum([0, *(prod(shape) for shape in shapes)])
        begin = {v: int(start) for v, start in zip(gathered, starts, strict=False)}
        parts = [np.where(elements < 0, -1, elements + begin[used[i]]) for i, elements in enumerate(uploaded)]
        return steps, gathered, np.concatenate(parts).astype(np.int32)


def _renumber(step: Step, local: Mapping[int, int]) -> Step:
    if isinstance(step, Take | Sum):
        return dataclasses.replace(step, sources=tuple(local[s] for s in step.sources))
    return dataclasses.replace(step, source=local[step.source])


def _joined(plans: Iterable[Sequence[tuple[Step, Hint]]]) -> int:
    """Return the elements of what is put together from several steps."""
    return sum(prod(step.shape) for parts in plans if len(parts) > 1 for step, _ in parts)


def _is_single(step: Conv) -> bool:
    """Whether a convolution has one position: it is a dense layer."""
    return prod(step.window.output) == 1
