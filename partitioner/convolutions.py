"""Lowering of Conv and ConvTranspose over one, two or three spatial axes.

The server convolves planes. All else is brought into that form by moving values, without another multiplication:

    1-D            a plane of one row
    3-D            slices stacked upon one another, each padded in height; a kernel of kd slices is the sum of kd
                   convolutions of the same stack, each starting at a later slice. A stride along the depth sorts the
                   slices by their remainder first.
    transposed     y[t] = sum of x[i] w[j] over i * stride + j * dilation = t + pad. Outputs whose t + pad have the same
                   remainder modulo the stride are a convolution with every stride-th point of the kernel, flipped; all
                   of them together are one convolution with stride^n times the channels, whose results are interleaved.

Formulas are those of the ONNX operator specification, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.operators.steps import Conv, Shape, Sum
from partitioner.lowering import (
    NOT_LEADING,
    ON_NODE,
    Builder,
    Context,
    Lowered,
    Placement,
    constant,
    numbered,
    operand,
    reshape,
    shift,
    take,
)
from partitioner.windows import Geometry, sliding_window, split_padding

_MOST_AXES = 3
Floats = NDArray[np.float64]


def lower_conv(node: ir.Node, context: Context) -> Lowered:
    """Conv with constant weights; every attribute."""
    weights = constant(node.inputs[1])
    if weights is None:
        return ON_NODE  # a product of two activations
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if source is None or target is None:
        return context.refuse(node, NOT_LEADING)
    geometry = sliding_window(node, source[1:], target[1:], weights.shape[2:])
    return _lower(node, context, weights, geometry, transposed=False)


def lower_conv_transpose(node: ir.Node, context: Context) -> Lowered:
    """ConvTranspose with constant weights; every attribute."""
    weights = constant(node.inputs[1])
    if weights is None:
        return ON_NODE
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if source is None or target is None:
        return context.refuse(node, NOT_LEADING)
    geometry = _transposed_geometry(node, source[1:], target[1:], weights.shape[2:])
    return _lower(node, context, weights, geometry, transposed=True)


def _lower(node: ir.Node, context: Context, weights: NDArray[Any], geometry: Geometry, *, transposed: bool) -> Lowered:
    if not 1 <= geometry.rank <= _MOST_AXES:
        return context.refuse(node, f"convolutions have 1 to {_MOST_AXES} spatial axes, found {geometry.rank}")
    group = node.attributes.get_int("group", 1)
    added = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(added)
    if added is not None and bias is None:
        return context.refuse(node, "its bias is not constant; use it without bias, and Add")

    def emit(builder: Builder, values: Sequence[int]) -> int:
        make = _transposed_convolution if transposed else convolution
        result = make(builder, values[0], weights.astype(np.float64), geometry, group)
        return shift(builder, result, None if bias is None else bias.reshape(-1, *([1] * geometry.rank)))

    return Lowered(Placement.WEIGHTED, (operand(node, 0),), emit)


def convolution(builder: Builder, value: int, weights: Floats, geometry: Geometry, group: int) -> int:
    """Append a convolution.

    Args:
        builder: program so far.
        value: number of the input, shape (channels, *spatial).
        weights: shape (outputs, channels / group, *kernel).
        geometry: the window.
        group: groups of channels.

    Returns:
        Number of the result, shape (outputs, *geometry.output).
    """
    shape = (len(weights), *geometry.output)
    if geometry.rank == _MOST_AXES:
        return _stacked_convolution(builder, value, weights, geometry, group)
    window = geometry.window()
    channels, spatial = builder.shapes[value][0], builder.shapes[value][1:]
    plane = reshape(builder, value, (channels, *((1,) if geometry.rank == 1 else ()), *spatial))
    kernel = weights.reshape(*weights.shape[:2], *window.kernel)
    made = builder.add(Conv(plane, builder.array(kernel), window, group, (len(weights), *window.output)))
    return reshape(builder, made, shape)


def _stacked_convolution(builder: Builder, value: int, weights: Floats, geometry: Geometry, group: int) -> int:
    """Convolve over depth, height and width: slices lie upon one another in one plane."""
    stride, dilation = geometry.strides[0], geometry.dilations[0]
    depth, height, width = geometry.output
    flat = geometry.axes(1, 3)
    rows = -(-flat.reach[0] // flat.strides[0])  # output rows from one slice to the next
    slice_rows = rows * flat.strides[0]
    steps = [divmod(point * dilation, stride) for point in range(geometry.kernel[0])]
    stacks: dict[int, int] = {}
    for phase in dict.fromkeys(remainder for _, remainder in steps):
        slices = depth + max(later for later, remainder in steps if remainder == phase)
        first = phase - geometry.begin[0] + stride * np.arange(slices)
        stacks[phase] = _stack(builder, value, first, slice_rows, flat.begin[0])
    made_shape = (len(weights), (depth - 1) * rows + height, width)
    parts = []
    for point, (later, phase) in enumerate(steps):
        moved = Geometry(
            flat.kernel,
            flat.strides,
            (-later * slice_rows, flat.begin[1]),
            (0, flat.end[1]),
            flat.dilations,
            made_shape[1:],
        )
        kernel = np.ascontiguousarray(weights[:, :, point])
        parts.append(builder.add(Conv(stacks[phase], builder.array(kernel), moved.window(), group, made_shape)))
    total = parts[0]
    if len(parts) > 1:
        signs: list[Literal[-1, 1]] = [1] * len(parts)
        total = builder.add(Sum(tuple(parts), tuple(signs), made_shape))
    read = (np.arange(depth)[:, None] * rows + np.arange(height)).ravel()
    elements = numbered(builder, total)[:, read]
    return take(builder, total, elements.reshape(len(weights), depth, height, width))


def _stack(builder: Builder, value: int, slices: NDArray[np.int64], rows: int, above: int) -> int:
    """Lay slices (channels, depth, height, width) upon one another, `rows` each, `above` of them padding."""
    channels, depth, height, width = builder.shapes[value]
    elements = np.full((channels, len(slices), rows, width), -1, np.int32)
    own = np.arange(rows) - above
    numbers = numbered(builder, value)
    there = np.flatnonzero((slices >= 0) & (slices < depth))
    lines = np.flatnonzero((own >= 0) & (own < height))
    elements[:, there[:, None], lines] = numbers[:, slices[there][:, None], own[lines]]
    return take(builder, value, elements.reshape(channels, len(slices) * rows, width))


def _transposed_geometry(node: ir.Node, source: Shape, target: Shape, kernel: Shape) -> Geometry:
    """Return strides, dilations and pads of a ConvTranspose; `output` is its output."""
    rank = len(kernel)
    strides = tuple(node.attributes.get_ints("strides", (1,) * rank))
    dilations = tuple(node.attributes.get_ints("dilations", (1,) * rank))
    pads = tuple(node.attributes.get_ints("pads", (0,) * (2 * rank)))
    extra = tuple(node.attributes.get_ints("output_padding", (0,) * rank))
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    begin, end = pads[:rank], pads[rank:]
    if "output_shape" in node.attributes or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max(0, strides[i] * (source[i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - target[i])
            for i in range(rank)
        ]
        begin, end = split_padding(total, upper=auto_pad == "SAME_UPPER")
    elif auto_pad == "VALID":
        begin = end = (0,) * rank
    return Geometry(kernel, strides, begin, end, dilations, target)


def _transposed_convolution(builder: Builder, value: int, weights: Floats, geometry: Geometry, group: int) -> int:
    """Append a transposed convolution; weights have shape (channels, outputs / group, *kernel)."""
    source = builder.shapes[value][1:]
    axes = range(geometry.rank)
    strides = geometry.strides
    points = [-(-((k - 1) * d + 1) // s) for k, d, s in zip(geometry.kernel, geometry.dilations, strides, strict=True)]
    first = [geometry.begin[i] // strides[i] for i in axes]
    count = [(geometry.output[i] - 1 + geometry.begin[i]) // strides[i] - first[i] + 1 for i in axes]
    begin = tuple(points[i] - 1 - first[i] for i in axes)
    end = tuple(max(0, count[i] + points[i] - 1 - source[i] - begin[i]) for i in axes)
    ones = (1,) * geometry.rank
    inner = Geometry(tuple(points), ones, begin, end, ones, tuple(count))
    made = convolution(builder, value, _phase_weights(weights, geometry, points, group), inner, group)
    outputs = weights.shape[1] * group
    elements = numbered(builder, made).reshape(outputs, *strides, *count)
    reached = [np.arange(geometry.output[i]) + geometry.begin[i] for i in axes]
    phases = np.ix_(np.arange(outputs), *(reached[i] % strides[i] for i in axes))
    places = np.ix_(np.arange(outputs), *(reached[i] // strides[i] - first[i] for i in axes))
    return take(builder, made, elements[(*phases, *places[1:])])


def _phase_weights(weights: Floats, geometry: Geometry, points: Sequence[int], group: int) -> Floats:
    """Return the kernels of all phases, flipped: shape (outputs * phases, channels / group, *points)."""
    channels, outputs = weights.shape[:2]
    strides = geometry.strides
    spread = np.zeros((channels, outputs, *(p * s for p, s in zip(points, strides, strict=True))))
    every = tuple(slice(0, (k - 1) * d + 1, d) for k, d in zip(geometry.kernel, geometry.dilations, strict=True))
    spread[(slice(None), slice(None), *every)] = weights
    # channel, output, then (point, phase) of every axis
    split = spread.reshape(channels, outputs, *(n for pair in zip(points, strides, strict=True) for n in pair))
    rank = geometry.rank
    point_axes, phase_axes = [2 + 2 * i for i in range(rank)], [3 + 2 * i for i in range(rank)]
    flipped = np.flip(split, tuple(point_axes)).reshape(group, channels // group, *split.shape[1:])
    order = [0, 2, *(a + 1 for a in phase_axes), 1, *(a + 1 for a in point_axes)]
    return np.ascontiguousarray(flipped.transpose(order)).reshape(-1, channels // group, *points)
