"""Convolutions with few outputs, directly: no matrix of patches, no BLAS.

Worked example: 16 channels of 34x34 to 16 by a 3x3 kernel. Building the patches would copy every residue 9 times for a
product that uses each copy 16 times, and takes as long as the product itself. Here the limbs of a tile are written
once, as padded planes, and every sum reads them in place: input (channel, ky, kx) of a line of outputs is the line
itself at an offset. Where the window strides across, a line is stored as its phases (every sx-th residue), so that
neighbouring outputs always read neighbouring limbs.

Proof of exactness. Rows of weights sum to 2**28 - 1 at most in magnitude (matrices of one chunk of inputs only), limbs
are below 2**25, so every partial sum is an integer below 2**53, exact in float64 with or without FMA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.microkernel import LANES, sum_four, sum_one
from heinfer.operators.windows import Geometry, reach, split_line
from heinfer.processes import core_count
from heinfer.ring import (
    THREADED_WORK,
    ModularMatrix,
    even_slices,
    join_limbs,
    kernel,
    run_tiles,
    scratch_array,
)

Residues = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Positions across in a tile, limbs that its planes should not exceed (the second-level cache) and must not exceed, and
#: multiply-adds of limbs that make a tile of several samples or groups.
_TILE_POSITIONS, _TILE_LIMBS, _MOST_LIMBS, _TILE_WORK = 1024, 1 << 16, 1 << 22, 1_000_000
#: Positions whose sums are joined at once: they stay in the first-level cache.
_BATCH = 256
#: Outputs per call of the microkernel.
_BLOCK = 4


class _Tile(NamedTuple):
    """Units (a group of a sample each), lines of outputs, and positions across: half-open ranges."""

    unit: int
    end_unit: int
    top: int
    bottom: int
    left: int
    right: int


class DirectConvolution:
    """A grouped convolution by the direct kernel; immutable and safe to share between threads.

    Args:
        matrices: one a group, shape (outputs of a group, channels of a group * kernel points), one chunk each.
        geometry: see `heinfer.operators.windows`.
    """

    def __init__(self, matrices: Sequence[ModularMatrix], geometry: Geometry) -> None:
        weights = np.stack([m.weights for m in matrices])
        self._groups, self._outputs, self._inputs = weights.shape
        self._block = 1 if self._outputs == 1 else _BLOCK
        self._modulus = matrices[0].parameters.modulus
        self._geometry = geometry
        blocks = -(-self._outputs // self._block)
        padded = np.zeros((self._groups, blocks * self._block, self._inputs))
        padded[:, : self._outputs] = weights
        ordered = padded.reshape(self._groups, blocks, self._block, self._inputs).transpose(0, 1, 3, 2)
        self._weights = np.ascontiguousarray(ordered).reshape(-1)

    @staticmethod
    def fits(matrices: Sequence[ModularMatrix], geometry: Geometry) -> bool:
        """Whether row sums allow it and the smallest tile is of a reasonable size."""
        channels = matrices[0].inputs // int(geometry[2] * geometry[3])
        smallest = _limbs(geometry, channels, 1, min(int(geometry[11]), _TILE_POSITIONS))
        return all(len(m.chunks) == 1 for m in matrices) and smallest <= _MOST_LIMBS

    def run(self, x: Residues, out: Residues) -> None:
        """Convolve x, shape (samples, elements), into `out`, shape (samples, channels, positions)."""
        work = 2 * self._groups * self._outputs * self._inputs * out.shape[0] * out.shape[2]
        channels = self._inputs // int(self._geometry[2] * self._geometry[3])

        def tile(job: _Tile) -> None:
            size = _limbs(self._geometry, channels, job.bottom - job.top, job.right - job.left)
            planes = scratch_array("limbs", 1, size)[0]
            width = max(_BATCH, job.right - job.left) + LANES
            sums = scratch_array("product", 1, 2 * self._block * width)[0]
            shape = np.array([self._groups, self._outputs, self._inputs, self._block], np.int64)
            _convolve(x, self._geometry, shape, self._weights, self._modulus, np.array(job), planes, sums, out)

        run_tiles(tile, list(self._tiles(out.shape[0] * self._groups, channels, work)), work=work)

    def _tiles(self, units: int, channels: int, work: int) -> Iterator[_Tile]:
        """Parts of a unit where it is large or alone, several units where they are small."""
        height, width = int(self._geometry[10]), int(self._geometry[11])
        across = even_slices(width, -(-width // _TILE_POSITIONS))
        one, two = (_limbs(self._geometry, channels, lines, min(width, _TILE_POSITIONS)) for lines in (1, 2))
        bands = -(-height // max(1, 1 + (_TILE_LIMBS - one) // (two - one)))
        if work >= THREADED_WORK and units < core_count():
            bands = max(bands, min(core_count(), height))
        lines = -(-height // bands)
        together = max(1, min(_TILE_WORK * units // work, -(-units // core_count())))
        for unit in range(0, units, together):
            for top in range(0, height, lines):
                for span in across:
                    bottom = min(top + lines, height)
                    yield _Tile(unit, min(unit + together, units), top, bottom, span.start, span.stop)


def _limbs(geometry: Geometry, channels: int, lines: int, positions: int) -> int:
    """Size of the planes of a tile, with room for reading a vector past the end."""
    _, _, kh, kw, sy, sx, _, _, dy, dx, _, _ = (int(value) for value in geometry)
    phase = -(-((positions - 1) * sx + (kw - 1) * dx + 1) // sx)
    return 2 * channels * ((lines - 1) * sy + (kh - 1) * dy + 1) * sx * phase + 2 * LANES


@kernel
def _split_planes(x: Residues, first: int, channels: int, geometry: Geometry, tile: Residues, planes: Floats) -> int:
    """Write the padded planes of a tile: all upper limbs, by channel, line, phase and position, then all lower ones.

    Args:
        x: one sample, shape (elements,).
        first: first element of the group's channels.
        channels: channels of the group.
        geometry: see `heinfer.operators.windows`.
        tile: see `_Tile`.
        planes: output, one-dimensional.

    Returns:
        Positions of a phase.
    """
    height, width, kh, kw, sy, sx, pad_top, pad_left, dy, dx, _, _ = geometry
    _, _, top, bottom, left, right = tile
    lines = (bottom - top - 1) * sy + (kh - 1) * dy + 1
    phase: int = -(-((right - left - 1) * sx + (kw - 1) * dx + 1) // sx)
    lower = channels * lines * sx * phase
    for channel in range(channels):
        for line in range(lines):
            iy = top * sy - pad_top + line
            for part in range(sx):
                at = ((channel * lines + line) * sx + part) * phase
                shift = left * sx - pad_left + part
                begin, stop = reach(width, sx, shift, phase)
                if not 0 <= iy < height or stop == begin:
                    begin = stop = phase
                for i in range(at, at + begin):
                    planes[i] = 0.0
                    planes[lower + i] = 0.0
                for i in range(at + stop, at + phase):
                    planes[i] = 0.0
                    planes[lower + i] = 0.0
                if begin == stop:
                    continue
                source = first + (channel * height + iy) * width + shift
                split_line(
                    x[source + begin * sx : source + (stop - 1) * sx + 1],
                    sx,
                    planes[at + begin : at + stop],
                    planes[lower + at + begin : lower + at + stop],
                )
    return phase


@kernel
def _convolve(
    x: Residues,
    geometry: Geometry,
    shape: Residues,
    weights: Floats,
    modulus: int,
    tile: Residues,
    planes: Floats,
    sums: Floats,
    out: Residues,
) -> None:
    """Convolve a tile.

    Args:
        x: residues, shape (samples, elements).
        geometry: see `heinfer.operators.windows`.
        shape: groups, outputs and inputs of a group, outputs of a block.
        weights: integers in the order group, block, input, output of the block; missing outputs are zero.
        modulus: q.
        tile: see `_Tile`.
        planes: scratch of `_limbs` limbs.
        sums: scratch, 2 * block rows, each of `_BATCH` sums or a line, whichever is longer, and a vector.
        out: residues, shape (samples, channels, positions).
    """
    height, width, kh, kw, sy, sx, _, _, dy, dx, _, out_width = geometry
    groups, outputs, inputs, block = shape
    unit, end_unit, top, bottom, left, right = tile
    channels, blocks = inputs // (kh * kw), -(-outputs // block)
    lines, count = (bottom - top - 1) * sy + (kh - 1) * dy + 1, right - left
    # Lines whose sums are joined at once; lines that are cut are not neighbours in the result.
    batch = max(1, _BATCH // out_width) if count == out_width else 1
    row = sums.shape[0] // (2 * block)
    inverse = 1.0 / modulus
    offsets = np.empty(inputs, np.int64)
    for index in range(unit, end_unit):
        sample, group = divmod(index, groups)
        phase = _split_planes(x[sample], group * channels * height * width, channels, geometry, tile, planes)
        lower = channels * lines * sx * phase
        for k in range(inputs):
            channel, point = divmod(k, kh * kw)
            down, across = (point // kw) * dy, (point % kw) * dx
            offsets[k] = ((channel * lines + down) * sx + across % sx) * phase + across // sx
        for first in range(top, bottom, batch):
            end = min(first + batch, bottom)
            start, run = first * out_width + left, (end - first - 1) * out_width + count
            for part in range(blocks):
                weight = (group * blocks + part) * inputs * block
                for oy in range(first, end):
                    base = (oy - top) * sy * sx * phase
                    column = (oy - first) * count  # a vector that sticks out is overwritten by the next line
                    for ox in range(0, count, LANES):
                        at = base + ox
                        if block == 1:
                            sum_one(planes, at, lower, offsets, inputs, weights, weight, sums, row, column + ox)
                        else:
                            sum_four(planes, at, lower, offsets, inputs, weights, weight, sums, row, column + ox)
                for number in range(min(block, outputs - part * block)):
                    upper_sums = sums[2 * number * row : 2 * number * row + run]
                    lower_sums = sums[(2 * number + 1) * row : (2 * number + 1) * row + run]
                    target = out[sample, group * outputs + part * block + number, start : start + run]
                    for i in range(run):
                        target[i] = join_limbs(upper_sums[i], lower_sums[i], modulus, inverse)
