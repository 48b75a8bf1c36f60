"""Geometry of sliding windows over any number of axes, as the ONNX operator specification defines it.

    auto_pad, pads, strides, dilations  -->  `Geometry`  -->  `Window` over (channels, height, width)

A sequence is a plane of one row. What has three spatial axes is cut into planes by its users.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.operators.steps import Shape, Window


@dataclass(frozen=True, slots=True)
class Geometry:
    """A sliding window; one number a spatial axis each.

    Attributes:
        kernel: points of the window.
        strides: from one position to the next.
        begin: zeros in front; a negative number crops.
        end: zeros at the end.
        dilations: from one point of the window to the next.
        output: positions.
    """

    kernel: Shape
    strides: Shape
    begin: tuple[int, ...]
    end: tuple[int, ...]
    dilations: Shape
    output: Shape

    @property
    def rank(self) -> int:
        """Spatial axes."""
        return len(self.kernel)

    @property
    def reach(self) -> Shape:
        """What all positions together cover, padding included."""
        return tuple(
            (o - 1) * s + (k - 1) * d + 1
            for o, s, k, d in zip(self.output, self.strides, self.kernel, self.dilations, strict=True)
        )

    def axes(self, first: int, last: int) -> Geometry:
        """Return the same along some axes only."""
        part = slice(first, last)
        return Geometry(
            self.kernel[part],
            self.strides[part],
            self.begin[part],
            self.end[part],
            self.dilations[part],
            self.output[part],
        )

    def window(self) -> Window:
        """Return the window over a plane; one axis is a row."""
        row = Geometry((1,), (1,), (0,), (0,), (1,), (1,))
        plane = row.joined(self) if self.rank == 1 else self
        (down, across), (top, left), (bottom, right) = plane.kernel, plane.begin, plane.end
        (stride_down, stride_across), (dilation_down, dilation_across) = plane.strides, plane.dilations
        height, width = plane.output
        return Window(
            (down, across),
            (stride_down, stride_across),
            (top, left, bottom, right),
            (dilation_down, dilation_across),
            (height, width),
        )

    def joined(self, other: Geometry) -> Geometry:
        """Return the window over the axes of both."""
        return Geometry(
            (*self.kernel, *other.kernel),
            (*self.strides, *other.strides),
            (*self.begin, *other.begin),
            (*self.end, *other.end),
            (*self.dilations, *other.dilations),
            (*self.output, *other.output),
        )

    def inside(self, source: Shape) -> NDArray[np.float64]:
        """Return how many points of the window at every position lie inside the input; shape `output`."""
        counts = np.ones(())
        for axis, length in enumerate(source):
            starts = np.arange(self.output[axis]) * self.strides[axis] - self.begin[axis]
            points = starts[:, None] + np.arange(self.kernel[axis]) * self.dilations[axis]
            counts = np.multiply.outer(counts, ((points >= 0) & (points < length)).sum(axis=1))
        return np.asarray(counts, np.float64)


def sliding_window(node: ir.Node, source: Shape, target: Shape, kernel: Shape) -> Geometry:
    """Return the geometry of a Conv or pooling node.

    Args:
        node: node with the attributes strides, dilations, pads, auto_pad.
        source: spatial shape of its input.
        target: spatial shape of its output, as onnx has inferred it.
        kernel: points of the window along each spatial axis.
    """
    rank = len(kernel)
    strides = tuple(node.attributes.get_ints("strides", (1,) * rank))
    dilations = tuple(node.attributes.get_ints("dilations", (1,) * rank))
    pads = tuple(node.attributes.get_ints("pads", (0,) * (2 * rank)))
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    geometry = Geometry(kernel, strides, pads[:rank], pads[rank:], dilations, target)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        total = [max(reach - length, 0) for reach, length in zip(geometry.reach, source, strict=True)]
        begin, end = split_padding(total, upper=auto_pad == "SAME_UPPER")
        return Geometry(kernel, strides, begin, end, dilations, target)
    if auto_pad == "VALID":
        return Geometry(kernel, strides, (0,) * rank, (0,) * rank, dilations, target)
    return geometry


def split_padding(total: list[int], *, upper: bool) -> tuple[Shape, Shape]:
    """Share padding between both ends of every axis; an odd zero goes to the end with `upper`, else to the front."""
    small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    return (small, large) if upper else (large, small)
