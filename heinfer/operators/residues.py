"""Evaluate a linear program on residues, exactly: what the untrusted server runs.

Homomorphic evaluation of y = W x is the plain operator W applied to integers modulo q, to b and to a alike; so a tensor
of ciphertexts is a tensor of residues with more samples. Inside, the batch axis comes last and elements are rows, so
that moving an element is copying a row; results are views of that layout, and feeding them back copies nothing.

Convolutions gather and split in one pass (im2col of limbs), multiply by BLAS and join in one pass, tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.operators.program import Arrays, Program
from heinfer.operators.steps import Conv, MatMul, Scale, Shape, Step, Sum, Take, Window, WindowSum
from heinfer.ring import (
    ModularMatrix,
    RingParameters,
    checked_weights,
    high_limb,
    join_limbs,
    kernel,
    low_limb,
    run_tiles,
    scratch_array,
)

Residues = NDArray[np.int64]
#: Residues per tile of the operators without weights.
_TILE_RESIDUES = 1 << 18


class ResidueProgram:
    """A server program with its integer weights, ready to run; immutable and safe to share between threads.

    Args:
        program: server program (no `Shift`, no `Rescale`).
        arrays: integer weights and index maps.
        parameters: ring.

    Raises:
        PlanError: an array is missing or does not fit.
        ParameterError: a weight that is not an integer or too large, or a step that belongs to the node.
    """

    def __init__(self, program: Program, arrays: Arrays, parameters: RingParameters) -> None:
        program.check_arrays(arrays)
        self.program = program
        self._modulus = parameters.modulus
        shapes = program.shapes
        self._run: list[Callable[[Sequence[Residues]], Residues]] = [
            _compile(step, arrays, shapes, parameters) for step in program.steps
        ]

    def evaluate(self, inputs: Sequence[Residues]) -> list[Residues]:
        """Evaluate the program.

        Args:
            inputs: int64 in [0, q), one array a program input, shape (samples, *shape), any strides; fastest where
                samples are contiguous. The range is not checked here but where residues are unpacked.

        Returns:
            int64 in [0, q), one array an output, shape (samples, *shape), samples contiguous.
        """
        if len(inputs) != len(self.program.inputs):
            raise ParameterError(f"expected {len(self.program.inputs)} inputs, found {len(inputs)}")
        samples = inputs[0].shape[0]
        values: list[Residues] = []
        for x, shape in zip(inputs, self.program.inputs, strict=True):
            if x.dtype != np.int64 or x.shape != (samples, *shape):
                raise ParameterError(f"expected int64 {(samples, *shape)}, found {x.dtype} {x.shape}")
            values.append(np.ascontiguousarray(np.moveaxis(x, 0, -1)).reshape(prod(shape), samples))
        for run in self._run:
            values.append(run(values))
        shapes = self.program.shapes
        return [np.moveaxis(values[o].reshape(*shapes[o], samples), -1, 0) for o in self.program.outputs]


def _compile(
    step: Step, arrays: Arrays, shapes: Sequence[Shape], parameters: RingParameters
) -> Callable[[Sequence[Residues]], Residues]:
    """Return a function from all values so far, shape (elements, samples) each, to the step's value."""
    modulus = parameters.modulus
    match step:
        case Conv():
            return _compile_conv(step, arrays, shapes[step.source], parameters)
        case MatMul():
            matrix = ModularMatrix(arrays[step.weights].T, parameters)
            return lambda values: _matmul(matrix, values[step.source])
        case Scale():
            weights = checked_weights(arrays[step.weights].reshape(-1, 1))[:, 0]
            return lambda values: _by_rows(prod(step.shape), values[step.source], _scale_rows, weights, modulus)
        case Take(indices=None):
            return lambda values: _joined(step, values)
        case Take(indices=str(name)):
            return lambda values: _by_rows(prod(step.shape), _joined(step, values), _take_rows, arrays[name])
        case Sum():
            return lambda values: _sum(step, values, modulus)
        case WindowSum():
            geometry = _geometry(step.window, shapes[step.source])
            return lambda values: _by_rows(prod(step.shape), values[step.source], _window_rows, geometry, modulus)
        case _:
            raise ParameterError(f"a {step.kind} belongs to the node, found in a server's program")


def _compile_conv(
    step: Conv, arrays: Arrays, source: Shape, parameters: RingParameters
) -> Callable[[Sequence[Residues]], Residues]:
    weights = arrays[step.weights]
    outputs = weights.shape[0] // step.group
    matrices = [
        ModularMatrix(weights[g * outputs : (g + 1) * outputs].reshape(outputs, -1), parameters)
        for g in range(step.group)
    ]
    geometry = _geometry(step.window, source)
    plane = source[1] * source[2]
    channels = source[0] // step.group

    def run(values: Sequence[Residues]) -> Residues:
        x = values[step.source]
        columns = prod(step.window.output) * x.shape[1]
        out = np.empty((step.shape[0], columns), np.int64)

        def tile(job: tuple[int, slice]) -> None:
            group, span = job
            matrix = matrices[group]
            limbs = scratch_array("patches", matrix.inputs, 2 * (span.stop - span.start))
            first = group * channels * plane
            _gather(x[first : first + channels * plane], geometry, span.start, span.stop, limbs)
            matrix.multiply_limbs(limbs, out[group * outputs : (group + 1) * outputs, span])

        jobs = [(g, span) for g, matrix in enumerate(matrices) for span in matrix.column_tiles(columns)]
        work = 2 * step.group * outputs * matrices[0].inputs * columns
        run_tiles(tile, jobs, work=work)
        return out.reshape(prod(step.shape), x.shape[1])

    return run


def _matmul(matrix: ModularMatrix, x: Residues) -> Residues:
    tokens = x.shape[0] // matrix.inputs
    out = np.empty((tokens * matrix.outputs, x.shape[1]), np.int64)
    for t in range(tokens):
        rows = slice(t * matrix.outputs, (t + 1) * matrix.outputs)
        matrix.multiply(x[t * matrix.inputs : (t + 1) * matrix.inputs], out=out[rows])
    return out


def _sum(step: Sum, values: Sequence[Residues], modulus: int) -> Residues:
    out = np.zeros_like(values[step.sources[0]])
    for source, sign in zip(step.sources, step.signs, strict=True):
        _accumulate(values[source], sign, modulus, out)
    return out


def _joined(step: Take, values: Sequence[Residues]) -> Residues:
    sources = [values[s] for s in step.sources]
    return sources[0] if len(sources) == 1 else np.concatenate(sources)


def _by_rows(rows: int, x: Residues, function: Callable[..., None], *arguments: object) -> Residues:
    """Make a result of `rows` rows by a kernel (x, *arguments, first row, end row, out), in tiles."""
    out = np.empty((rows, x.shape[1]), np.int64)
    step = max(1, _TILE_RESIDUES // max(1, x.shape[1]))
    tiles = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    run_tiles(lambda tile: function(x, *arguments, tile[0], tile[1], out), tiles)
    return out


def _geometry(window: Window, source: Shape) -> NDArray[np.int64]:
    """Pack a window for the kernels: height, width, kernel, strides, top and left pad, dilations, output."""
    return np.array(
        [*source[1:], *window.kernel, *window.strides, *window.pads[:2], *window.dilations, *window.output], np.int64
    )


@kernel
def _gather(x: Residues, geometry: NDArray[np.int64], start: int, stop: int, limbs: NDArray[np.float64]) -> None:
    """Write the patches of output columns [start, stop), position by position and sample by sample, as limbs.

    x is (channels * height * width, samples); limbs is (channels * kh * kw, 2 * (stop - start)).
    """
    height, width, kh, kw, sy, sx, top, left, dy, dx, _, out_width = geometry
    samples, columns = x.shape[1], stop - start
    for row in range(limbs.shape[0]):
        channel, offset = row // (kh * kw), row % (kh * kw)
        down, across = (offset // kw) * dy - top, (offset % kw) * dx - left
        column = start
        while column < stop:
            position, sample = column // samples, column % samples
            run = min(samples - sample, stop - column)
            iy, ix = (position // out_width) * sy + down, (position % out_width) * sx + across
            at = column - start
            if 0 <= iy < height and 0 <= ix < width:
                element = (channel * height + iy) * width + ix
                for i in range(run):
                    residue = x[element, sample + i]
                    limbs[row, at + i] = high_limb(residue)
                    limbs[row, columns + at + i] = low_limb(residue)
            else:
                for i in range(run):
                    limbs[row, at + i] = 0.0
                    limbs[row, columns + at + i] = 0.0
            column += run


@kernel
def _scale_rows(x: Residues, weights: NDArray[np.float64], modulus: int, start: int, stop: int, out: Residues) -> None:
    inverse = 1.0 / modulus
    for row in range(start, stop):
        weight = weights[row]
        for i in range(x.shape[1]):
            residue = x[row, i]
            out[row, i] = join_limbs(weight * high_limb(residue), weight * low_limb(residue), modulus, inverse)


@kernel
def _take_rows(x: Residues, indices: NDArray[np.int32], start: int, stop: int, out: Residues) -> None:
    for row in range(start, stop):
        if indices[row] < 0:
            for i in range(x.shape[1]):
                out[row, i] = 0
        else:
            for i in range(x.shape[1]):
                out[row, i] = x[indices[row], i]


@kernel
def _window_rows(x: Residues, geometry: NDArray[np.int64], modulus: int, start: int, stop: int, out: Residues) -> None:
    height, width, kh, kw, sy, sx, top, left, dy, dx, out_height, out_width = geometry
    for row in range(start, stop):
        channel, position = row // (out_height * out_width), row % (out_height * out_width)
        for i in range(x.shape[1]):
            out[row, i] = 0
        for offset in range(kh * kw):
            iy = (position // out_width) * sy + (offset // kw) * dy - top
            ix = (position % out_width) * sx + (offset % kw) * dx - left
            if 0 <= iy < height and 0 <= ix < width:
                element = (channel * height + iy) * width + ix
                for i in range(x.shape[1]):
                    total = out[row, i] + x[element, i]
                    out[row, i] = total - modulus if total >= modulus else total


@kernel
def _accumulate(x: Residues, sign: int, modulus: int, out: Residues) -> None:
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            total = out[row, i] + sign * x[row, i]
            if total >= modulus:
                total -= modulus
            elif total < 0:
                total += modulus
            out[row, i] = total
