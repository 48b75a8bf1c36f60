"""Convolutions of residues, exactly, samples first: (samples, channels * height * width).

Worked example: 64 channels of 32x32 to 64 by a 3x3 kernel are one matrix, 64 x 576, times 1024 columns, one a position.
A pass over the input gathers the patches of a tile of columns and splits them into limbs, one float64 product covers
both limbs, and a pass joins them into the result. Columns of all samples form one range, so a tile is a part of a
sample or several of them.

Few outputs don't pay for gathering, and depthwise groups would drown in calls of BLAS: `direct` is for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.direct import DirectConvolution
from heinfer.operators.steps import Conv, Shape
from heinfer.operators.windows import Geometry, reach, split_line, window_geometry
from heinfer.ring import ModularMatrix, join_limbs, kernel, run_tiles, scratch_array

Residues = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Outputs of a group up to which the direct kernel is faster than gathering and BLAS, measured: where lines are short
#: (gathering costs more), where they are long, and for kernels of one point (nothing to gather).
_SHORT_LINE, _SHORT_OUTPUTS, _LONG_OUTPUTS, _POINT_OUTPUTS = 32, 64, 48, 8


def compile_conv(step: Conv, matrices: Sequence[ModularMatrix], source: Shape) -> Callable[[Residues], Residues]:
    """Return the convolution as a function from (samples, elements) to (samples, elements).

    Args:
        step: geometry.
        matrices: one a group, shape (outputs / groups, channels / groups * kernel points).
        source: shape of a sample, (channels, height, width).
    """
    geometry = window_geometry(step.window, source)
    few = 0 < matrices[0].outputs <= _direct_outputs(step) and matrices[0].inputs > 0
    direct = DirectConvolution(matrices, geometry) if few and DirectConvolution.fits(matrices, geometry) else None
    no_inputs = matrices[0].inputs == 0
    products = matrices if direct is None else ()  # the direct kernel has the weights in its own order

    def run(x: Residues) -> Residues:
        out = np.empty((x.shape[0], step.shape[0], prod(step.window.output)), np.int64)
        if out.size == 0 or no_inputs:
            out[...] = 0
        elif direct is not None:
            direct.run(x, out)
        else:
            _run_products(x, source, geometry, products, out)
        return out.reshape(x.shape[0], prod(step.shape))

    return run


def _direct_outputs(step: Conv) -> int:
    if step.window.kernel == (1, 1):
        return _POINT_OUTPUTS
    return _SHORT_OUTPUTS if step.window.output[1] <= _SHORT_LINE else _LONG_OUTPUTS


def _run_products(
    x: Residues, source: Shape, geometry: Geometry, matrices: Sequence[ModularMatrix], out: Residues
) -> None:
    outputs = matrices[0].outputs
    elements = prod(source) // len(matrices)
    columns = out.shape[0] * out.shape[2]

    def tile(job: tuple[int, slice]) -> None:
        group, span = job
        matrix = matrices[group]
        width = 2 * (span.stop - span.start)
        product = scratch_array("product", outputs, width)
        for chunk in matrix.chunks:
            limbs = scratch_array("limbs", chunk.stop - chunk.start, width)
            _gather(x, group * elements, geometry, chunk.start, span.start, limbs)
            np.matmul(matrix.weights[:, chunk], limbs, out=product)
            _join(product, group * outputs, span.start, matrix.parameters.modulus, chunk.start > 0, out)

    jobs = [(g, span) for g, matrix in enumerate(matrices) for span in matrix.column_tiles(columns)]
    run_tiles(tile, jobs, work=2 * outputs * matrices[0].inputs * len(matrices) * columns)


@kernel
def _gather(x: Residues, element: int, geometry: Geometry, first_input: int, start: int, limbs: Floats) -> None:
    """Write patches as limbs: row k is input first_input + k (channel, then kernel point), column c is start + c.

    Args:
        x: residues, shape (samples, elements).
        element: first element of the group's channels.
        geometry: see `heinfer.operators.windows`.
        first_input: input of the first row.
        start: first column; columns are positions of the first sample, then of the next.
        limbs: output, shape (inputs, 2 * columns): upper limbs of all columns, then lower ones.
    """
    height, width, kh, kw, sy, sx, top, left, dy, dx, out_height, out_width = geometry
    columns = limbs.shape[1] // 2
    first_sample, rest = divmod(start, out_height * out_width)
    first_y, first_x = divmod(rest, out_width)
    for row in range(limbs.shape[0]):
        channel, point = divmod(first_input + row, kh * kw)
        down, across = (point // kw) * dy - top, (point % kw) * dx - left
        low, high = reach(width, sx, across, out_width)
        plane = element + channel * height * width + across
        sample, oy, ox, at = first_sample, first_y, first_x, 0
        upper, lower = limbs[row, :columns], limbs[row, columns:]
        while at < columns:
            end = min(out_width, ox + columns - at)
            iy = oy * sy + down
            begin = min(max(low, ox), end) if 0 <= iy < height else end
            stop = max(min(high, end), begin)
            origin = at - ox
            for i in range(at, origin + begin):
                upper[i] = 0.0
                lower[i] = 0.0
            line = plane + iy * width
            if stop > begin:
                split_line(
                    x[sample, line + begin * sx : line + (stop - 1) * sx + 1],
                    sx,
                    upper[origin + begin : origin + stop],
                    lower[origin + begin : origin + stop],
                )
            for i in range(origin + stop, origin + end):
                upper[i] = 0.0
                lower[i] = 0.0
            at, ox, oy = origin + end, 0, oy + 1
            if oy == out_height:
                oy, sample = 0, sample + 1


@kernel
def _join(product: Floats, channel: int, start: int, modulus: int, accumulate: bool, out: Residues) -> None:
    """Join limb sums into channels [channel, channel + outputs) of `out`, (samples, channels, positions).

    Column c of the product, shape (outputs, 2 * columns), is position start + c, counted through all samples; with
    `accumulate` it is added to the residues that are there.
    """
    inverse = 1.0 / modulus
    positions = out.shape[2]
    columns = product.shape[1] // 2
    for row in range(product.shape[0]):
        at = 0
        while at < columns:
            sample, position = divmod(start + at, positions)
            run = min(positions - position, columns - at)
            target = out[sample, channel + row, position : position + run]
            upper = product[row, at : at + run]
            lower = product[row, columns + at : columns + at + run]
            if accumulate:
                for i in range(run):
                    total = target[i] + join_limbs(upper[i], lower[i], modulus, inverse)
                    target[i] = total - modulus if total >= modulus else total
            else:
                for i in range(run):
                    target[i] = join_limbs(upper[i], lower[i], modulus, inverse)
            at += run
