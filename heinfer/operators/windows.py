"""Sliding windows for kernels: their geometry as numbers, and lines of a plane."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.steps import Shape, Window
from heinfer.ring import high_limb, kernel, low_limb

#: height, width, kernel (2), strides (2), pads at top and left, dilations (2), output height and width. Pads may be
#: negative: the window then starts inside the plane.
Geometry = NDArray[np.int64]


def window_geometry(window: Window, source: Shape) -> Geometry:
    """Pack a window over (channels, height, width).

    A kernel of one point that visits the whole plane in order is flattened to one long line.
    """
    height, width = source[1:]
    point = (window.kernel, window.strides, window.pads[:2]) == ((1, 1), (1, 1), (0, 0))
    if point and window.output == (height, width):
        return np.array([1, height * width, 1, 1, 1, 1, 0, 0, 1, 1, 1, height * width], np.int64)
    return np.array(
        [height, width, *window.kernel, *window.strides, *window.pads[:2], *window.dilations, *window.output], np.int64
    )


@kernel
def reach(length: int, stride: int, shift: int, count: int) -> tuple[int, int]:
    """Range of positions p in [0, count) for which p * stride + shift is in [0, length)."""
    first = min(max(-(shift // stride), 0), count)
    return first, max(min((length - 1 - shift) // stride + 1, count), first)


@kernel
def split_line(line: NDArray[np.int64], stride: int, upper: NDArray[np.float64], lower: NDArray[np.float64]) -> None:
    """Split every `stride`-th residue of a line into limbs."""
    if stride == 1:  # lets the compiler vectorise
        for i in range(upper.shape[0]):
            upper[i] = high_limb(line[i])
            lower[i] = low_limb(line[i])
    else:
        for i in range(upper.shape[0]):
            upper[i] = high_limb(line[i * stride])
            lower[i] = low_limb(line[i * stride])
