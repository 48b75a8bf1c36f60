"""Planes: which part of a value is uploaded, and how its rows and columns lie along the coefficients of ciphertexts.

    channel (H, W) --(what windows reach, padding included)--> rows and columns --(phases)--> planes of a ciphertext

Where all windows of a plane move by multiples of a stride, its rows and columns lie in phases: those whose number has
the same remainder make a plane of their own, as the channels of a convolution without strides would. Worked example:
16x16 patches of a 224x224 image. In one piece a channel has 50,176 positions, at N = 8192 seven bands and as many
polynomials an output. In 256 phases of 14x14 ten planes share 2048 coefficients, and an output has one polynomial. The
server sees neither: it gets the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from heinfer.operators.steps import Conv, Window


@dataclass(frozen=True, slots=True)
class Plane:
    """A part of a value (C, H, W) as it is uploaded: rows and columns from (top, left) on, every `strides`-th.

    In ciphertexts, rows and columns lie in `phases`, by the remainders of their numbers.
    """

    top: int
    left: int
    height: int
    width: int
    strides: tuple[int, int] = (1, 1)
    phases: tuple[int, int] = (1, 1)

    @property
    def rows(self) -> int:
        """Rows of one phase."""
        return -(-self.height // self.phases[0])

    @property
    def columns(self) -> int:
        """Columns of one phase."""
        return -(-self.width // self.phases[1])

    @property
    def size(self) -> int:
        """Positions of one phase."""
        return self.rows * self.columns

    def ciphertexts(self, channels: int, degree: int) -> int:
        """Return how many ciphertexts the planes of some channels fill; a phase fits into one."""
        return -(-channels * prod(self.phases) // (degree // self.size))

    def settled(self, channels: int, degree: int) -> Plane:
        """Return the plane without phases where these save no ciphertext: the last of a phase may be empty."""
        whole = replace(self, phases=(1, 1))
        if whole.size > degree or whole.ciphertexts(channels, degree) > self.ciphertexts(channels, degree):
            return self
        return whole


def extent(window: Window, axis: int) -> int:
    """Rows (axis 0) or columns (axis 1) that one position of a window covers."""
    return (window.kernel[axis] - 1) * window.dilations[axis] + 1


def reach_of(window: Window) -> tuple[int, int]:
    """Rows and columns that all positions of a window cover, padding included."""
    down, across = ((window.output[i] - 1) * window.strides[i] + extent(window, i) for i in range(2))
    return down, across


def common_plane(convs: Sequence[Conv]) -> Plane:
    """Return the smallest plane that holds what all convolutions of a value reach."""
    first = convs[0].window
    if first.kernel == (1, 1) and all(
        c.window.kernel == (1, 1) and c.window.pads == first.pads and c.window.strides == first.strides for c in convs
    ):  # what strides skip is not uploaded
        height, width = (max(c.window.output[i] for c in convs) for i in range(2))
        return Plane(-first.pads[0], -first.pads[1], height, width, first.strides)
    top = -max(c.window.pads[0] for c in convs)
    left = -max(c.window.pads[1] for c in convs)
    height = max(reach_of(c.window)[0] - c.window.pads[0] for c in convs) - top
    width = max(reach_of(c.window)[1] - c.window.pads[1] for c in convs) - left
    down, across = (gcd(*(c.window.strides[i] for c in convs if c.window.output[i] > 1)) or 1 for i in range(2))
    return Plane(top, left, height, width, phases=(down, across))


def window_over(window: Window, plane: Plane) -> Window:
    """Return the window over an uploaded plane: no padding, and a crop where another reader reaches further."""
    top, left = window.pads[0] + plane.top, window.pads[1] + plane.left
    strides = window.strides if plane.strides == (1, 1) else (1, 1)
    return Window(window.kernel, strides, (top, left, 0, 0), window.dilations, window.output)
