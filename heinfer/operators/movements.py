"""Operators on residues without products of matrices: scaling, index maps, sums; (samples, elements) each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.steps import Sum
from heinfer.ring import high_limb, join_limbs, kernel, low_limb, run_tiles

Residues = NDArray[np.int64]
#: Residues per tile, and elements of a result below which one thread does everything.
_TILE_RESIDUES = 1 << 17


def by_tiles(x: Residues, elements: int, function: Callable[..., None], *arguments: object) -> Residues:
    """Make a result of `elements` a sample by a kernel (x, *arguments, first and end of samples and elements, out)."""
    out = np.empty((x.shape[0], elements), np.int64)
    width = max(1, min(elements, _TILE_RESIDUES))
    height = _TILE_RESIDUES // width
    tiles = [
        (top, min(top + height, x.shape[0]), left, min(left + width, elements))
        for top in range(0, x.shape[0], height)
        for left in range(0, elements, width)
    ]
    run_tiles(lambda tile: function(x, *arguments, *tile, out), tiles)
    return out


def join_sources(sources: Sequence[int], values: Sequence[Residues]) -> Residues:
    """Elements of several values, one after the other."""
    found = [values[s] for s in sources]
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)


def add_values(step: Sum, values: Sequence[Residues], modulus: int) -> Residues:
    """Sum values with their signs, modulo q."""
    out = np.zeros_like(values[step.sources[0]])
    for source, sign in zip(step.sources, step.signs, strict=True):
        _accumulate(values[source].reshape(-1), sign, modulus, out.reshape(-1))
    return out


@kernel
def scale_elements(
    x: Residues, weights: NDArray[np.float64], modulus: int, top: int, bottom: int, left: int, right: int, out: Residues
) -> None:
    """Multiply every element by its own weight; one product of a limb is below 2**40, hence exact."""
    inverse = 1.0 / modulus
    for sample in range(top, bottom):
        source, target = x[sample, left:right], out[sample, left:right]
        factors = weights[left:right]
        for i in range(source.shape[0]):
            residue, weight = source[i], factors[i]
            target[i] = join_limbs(weight * high_limb(residue), weight * low_limb(residue), modulus, inverse)


@kernel
def take_elements(
    x: Residues, indices: NDArray[np.int32], top: int, bottom: int, left: int, right: int, out: Residues
) -> None:
    """Copy elements by index; -1 is zero."""
    for sample in range(top, bottom):
        source, target = x[sample], out[sample]
        for i in range(left, right):
            index = indices[i]
            target[i] = 0 if index < 0 else source[index]


@kernel
def sum_windows(
    x: Residues, geometry: NDArray[np.int64], modulus: int, top: int, bottom: int, left: int, right: int, out: Residues
) -> None:
    """Sum over sliding windows, channel by channel; geometry as in `heinfer.operators.windows`."""
    height, width, kh, kw, sy, sx, above, before, dy, dx, out_height, out_width = geometry
    for sample in range(top, bottom):
        source, target = x[sample], out[sample]
        for line in range(left // out_width, -(-right // out_width)):
            channel, oy = divmod(line, out_height)
            begin, end = max(left, line * out_width), min(right, (line + 1) * out_width)
            target[begin:end] = 0
            for ky in range(kh):
                iy = oy * sy + ky * dy - above
                if not 0 <= iy < height:
                    continue
                row = source[(channel * height + iy) * width : (channel * height + iy + 1) * width]
                for kx in range(kw):
                    shift = kx * dx - before
                    first = max(-(shift // sx), begin - line * out_width)
                    last = min((width - 1 - shift) // sx + 1, end - line * out_width)
                    for ox in range(first, last):
                        total = target[line * out_width + ox] + row[ox * sx + shift]
                        target[line * out_width + ox] = total - modulus if total >= modulus else total


@kernel
def _accumulate(x: Residues, sign: int, modulus: int, out: Residues) -> None:
    for i in range(x.shape[0]):
        total = out[i] + sign * x[i]
        out[i] = total - modulus if total >= modulus else (total + modulus if total < 0 else total)
