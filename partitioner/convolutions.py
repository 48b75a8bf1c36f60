"""Lowering of Conv and ConvTranspose over one, two or three spatial axes.

The server convolves planes. All else is brought into that form by moving values, without another multiplication:

    1-D            a plane of one row
    3-D            slices stacked upon one another, each padded in height; a kernel of kd slices is the sum of kd
                   convolutions of the same stack, each starting at a later slice. A stride along the depth sorts the
                   slices by their remainder first.
    transposed     y[t] = sum of x[i] w[j] over i * stride + j * dilation = t + pad. Outputs whose t + pad have the same
                   remainder modulo the stride (a phase) are a convolution with every stride-th point of the kernel,
                   flipped; all of them together are one convolution with stride^n times the channels, whose results
                   are interleaved.

Formulas are those of the ONNX operator specification, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

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

#: Spatial axes of a convolution, at most.
MOST_AXES: Final = 3
Floats = NDArray[np.float64]


def lower_conv(node: ir.Node, context: Context) -> Lowered:
    """Conv with constant weights; every attribute."""
    weights = constant(node.inputs[1])
    if weights is None:
        return ON_NODE  # a product of two activations
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if source is None or target is None:
        return context.refuse(node, NOT_LEADING)
    misfit = _misfit(node, source, weights.shape[2:])
    if misfit is not None:
        return context.refuse(node, misfit)
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
    misfit = _misfit(node, source, weights.shape[2:])
    if misfit is None and len(target) != len(source):  # onnx's inference stops at the first axis that shrinks
        misfit = "its output_shape is smaller than its input; give pads instead"
    if misfit is not None:
        return context.refuse(node, misfit)
    geometry = _transposed_geometry(node, source[1:], target[1:], weights.shape[2:])
    return _lower(node, context, weights, geometry, transposed=True)


def _misfit(node: ir.Node, source: Shape, kernel: Shape) -> str | None:
    """Say what is wrong with a kernel, whose shape onnx's inference takes from the attribute where there is one."""
    stated = tuple(node.attributes.get_ints("kernel_shape", kernel))
    if stated != kernel or len(kernel) != len(source) - 1:
        return f"its kernel has shape {kernel}: expected kernel_shape, {stated}, and {len(source) - 1} axes"
    return None


def _lower(node: ir.Node, context: Context, weights: NDArray[Any], geometry: Geometry, *, transposed: bool) -> Lowered:
    if not 1 <= geometry.rank <= MOST_AXES:
        return context.refuse(node, f"convolutions have 1 to {MOST_AXES} spatial axes, found {geometry.rank}")
    group = node.attributes.get_int("group", 1)
    source = context.shape(node.inputs[0])
    channels, outputs = (
        (weights.shape[0], weights.shape[1] * group) if transposed else (weights.shape[1] * group, weights.shape[0])
    )
    if source is None or weights.ndim != geometry.rank + 2 or source[0] != channels or group < 1 or outputs % group:
        return context.refuse(
            node, f"weights of shape {weights.shape} in {group} groups don't fit an input of shape {source}"
        )
    added = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(added)
    if added is not None and bias is None:
        return context.refuse(node, "its bias is not constant; use it without bias, and Add")
    if bias is not None and bias.size != outputs:
        return context.refuse(node, f"its bias has {bias.size} elements: expected {outputs}")

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
    if geometry.rank == MOST_AXES:
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


@dataclass(frozen=True, slots=True)
class _Phases:
    """The convolutions that the outputs of a transposed one are, along one axis: all of them as one.

    Attributes:
        starts: place of the first output, by phase: output o with o + pad = place * stride + phase.
        begin: zeros in front of the input; a negative number crops.
        points: of the kernel that all phases share; point a reads the input at place - start + a - begin.
        count: places of a phase.
        taps: point of the transposed kernel, shape (stride, points); -1 for zero.
    """

    starts: tuple[int, ...]
    begin: int
    points: int
    count: int
    taps: NDArray[np.int64]

    @property
    def extent(self) -> int:
        """Elements of the input that are read, padding included."""
        return self.count + self.points - 1


def _phases(kernel: int, stride: int, dilation: int, pad: int, output: int) -> _Phases:
    """Start all phases at one place, or each at its first, whichever reads less of the input and then multiplies less.

    Example: 3 points with stride 2 and padding 1 over 4 elements, to 8. With one start, 2 points at 5 places read 6
    elements, two of them padding; the phase of two points starts a place later, so that 4 places are enough, and 5.
    """
    common, own = [pad // stride] * stride, [-((phase - pad) // stride) for phase in range(stride)]
    found = [_started(starts, kernel, stride, dilation, pad, output) for starts in (common, own)]
    return min(found, key=lambda phases: (phases.extent, phases.points * phases.count))


def _started(starts: Sequence[int], kernel: int, stride: int, dilation: int, pad: int, output: int) -> _Phases:
    reach = (kernel - 1) * dilation
    used = [phase for phase in range(stride) if phase <= reach]
    low = min(starts[phase] - (reach - phase) // stride for phase in used)
    points = max(starts[phase] for phase in used) - low + 1
    count = max((output - 1 + pad - phase) // stride - starts[phase] + 1 for phase in range(stride))
    taps = np.full((stride, points), -1)
    for phase in used:
        places = (starts[phase] - low - np.arange(points)) * stride + phase
        inside = (places >= 0) & (places <= reach) & (places % dilation == 0)
        taps[phase, inside] = places[inside] // dilation
    return _Phases(tuple(starts), -low, points, count, taps)


def _transposed_convolution(builder: Builder, value: int, weights: Floats, geometry: Geometry, group: int) -> int:
    """Append a transposed convolution; weights have shape (channels, outputs / group, *kernel)."""
    source = builder.shapes[value][1:]
    axes = [
        _phases(*numbers)
        for numbers in zip(
            geometry.kernel, geometry.strides, geometry.dilations, geometry.begin, geometry.output, strict=True
        )
    ]
    ones = (1,) * geometry.rank
    begin, count = tuple(axis.begin for axis in axes), tuple(axis.count for axis in axes)
    end = tuple(max(0, axis.extent - size - axis.begin) for axis, size in zip(axes, source, strict=True))
    inner = Geometry(tuple(axis.points for axis in axes), ones, begin, end, ones, count)
    made = convolution(builder, value, _phase_weights(weights, axes, group), inner, group)
    outputs = weights.shape[1] * group
    elements = numbered(builder, made).reshape(outputs, *geometry.strides, *count)
    reached = [np.arange(o) + b for o, b in zip(geometry.output, geometry.begin, strict=True)]
    pairs = [divmod(r, s) for r, s in zip(reached, geometry.strides, strict=True)]
    phases = np.ix_(np.arange(outputs), *(phase for _, phase in pairs))
    places = np.ix_(
        np.arange(outputs),
        *(place - np.array(axis.starts)[phase] for (place, phase), axis in zip(pairs, axes, strict=True)),
    )
    return take(builder, made, elements[(*phases, *places[1:])])


def _phase_weights(weights: Floats, axes: Sequence[_Phases], group: int) -> Floats:
    """Return the kernels of all phases: shape (outputs * phases, channels / group, *points)."""
    channels, outputs = weights.shape[:2]
    ended = np.pad(weights, [(0, 0), (0, 0), *[(0, 1)] * len(axes)])  # tap -1 is the zero at the end
    taken = ended[np.ix_(np.arange(channels), np.arange(outputs), *(axis.taps.ravel() for axis in axes))]
    # group, channel, output, then (phase, point) of every axis
    split = taken.reshape(group, -1, outputs, *(n for axis in axes for n in axis.taps.shape))
    phase_axes, point_axes = range(3, split.ndim, 2), range(4, split.ndim, 2)
    ordered = split.transpose(0, 2, *phase_axes, 1, *point_axes)
    return np.ascontiguousarray(ordered).reshape(-1, channels // group, *(axis.points for axis in axes))
