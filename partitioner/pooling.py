"""Lowering of averages and sums over axes and windows: pooling, reductions, cumulative sums.

All are sums over a sliding window, which the server can do; the division is the node's. Three spatial axes are pooled
one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from heinfer.operators.steps import LARGEST_EXTENT, Rescale, Shape, WindowSum
from partitioner.lowering import (
    ON_NODE,
    Builder,
    Context,
    Lowered,
    Placement,
    constant,
    operand,
    reshape,
    transpose,
)
from partitioner.single_operator import run_node
from partitioner.windows import Geometry, sliding_window


def lower_average_pool(node: ir.Node, context: Context) -> Lowered:
    """AveragePool over one to three spatial axes: a window sum; the division is the node's."""
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if source is None or target is None or not 2 <= len(source) <= 4:
        return ON_NODE
    kernel = tuple(node.attributes["kernel_shape"].as_ints())
    geometry = sliding_window(node, source[1:], target[1:], kernel)
    # By what every window is divided depends on ceil_mode, count_include_pad and the version: measured on ones.
    ones = np.ones((1, 1, *source[1:]), np.float32)
    mean = run_node(node, {str(operand(node, 0).name): ones})
    if mean.shape != (1, 1, *target[1:]) or not np.all(mean > 0):
        return ON_NODE
    counts = np.rint(geometry.inside(source[1:]) / mean[0, 0].astype(np.float64))

    def emit(builder: Builder, values: Sequence[int]) -> int:
        result = _window_sum(builder, values[0], geometry)
        return builder.add(Rescale(result, builder.array(np.broadcast_to(1 / counts, target).copy()), target))

    return Lowered(Placement.LINEAR, (operand(node, 0),), emit)


def lower_reduction(node: ir.Node, context: Context) -> Lowered:
    """ReduceSum, ReduceMean and GlobalAveragePool over axes other than the batch's."""
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    axes = _reduced_axes(node, source)
    if source is None or target is None or axes is None or prod(source) == 0:
        return ON_NODE
    count = prod(source[axis] for axis in axes)
    if count > LARGEST_EXTENT:
        return ON_NODE
    mean = node.op_type != "ReduceSum"

    def emit(builder: Builder, values: Sequence[int]) -> int:
        result = reshape(builder, sum_axes(builder, values[0], axes), target)
        if not mean:
            return result
        return builder.add(Rescale(result, builder.array(np.full(target, 1 / count)), target))

    return Lowered(Placement.LINEAR, (operand(node, 0),), emit)


def sum_axes(builder: Builder, value: int, axes: Sequence[int]) -> int:
    """Append the sum over some axes, of at most `LARGEST_EXTENT` elements; the result has the others, in order."""
    if not axes:
        return value
    shape = builder.shapes[value]
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    rest = tuple(shape[axis] for axis in kept)
    count = prod(shape[axis] for axis in axes)
    lines = reshape(builder, transpose(builder, value, [*kept, *axes]), (prod(rest), count))
    whole = Geometry((count,), (1,), (0,), (0,), (1,), (1,))
    return reshape(builder, _window_sum(builder, lines, whole), rest)


def lower_cumulative_sum(node: ir.Node, context: Context) -> Lowered:
    """CumSum along a constant axis: a window that starts in front of the first element."""
    shape, axis = context.shape(node.inputs[0]), constant(node.inputs[1])
    if shape is None or axis is None or axis.size != 1:
        return ON_NODE
    along = int(axis.reshape(-1)[0]) % (len(shape) + 1) - 1
    if along < 0 or prod(shape) == 0 or shape[along] > LARGEST_EXTENT // 2:
        return ON_NODE
    length = shape[along]
    exclusive = node.attributes.get_int("exclusive", 0)
    begin, end = length - 1 + exclusive, -exclusive
    if node.attributes.get_int("reverse", 0):
        begin, end = end, begin
    others = [a for a in range(len(shape)) if a != along]
    order = [*others, along]

    def emit(builder: Builder, values: Sequence[int]) -> int:
        turned = transpose(builder, values[0], order)
        lines = reshape(builder, turned, (prod(shape) // length, length))
        summed = _window_sum(builder, lines, Geometry((length,), (1,), (begin,), (end,), (1,), (length,)))
        back = reshape(builder, summed, tuple(shape[a] for a in order))
        return transpose(builder, back, [order.index(a) for a in range(len(shape))])

    return Lowered(Placement.LINEAR, (operand(node, 0),), emit)


def _reduced_axes(node: ir.Node, source: Shape | None) -> tuple[int, ...] | None:
    """Return the axes per sample that are reduced, in order; None if they aren't constant or hold the batch."""
    if source is None:
        return None
    rank = len(source) + 1
    if node.op_type == "GlobalAveragePool":
        return tuple(range(1, rank - 1))
    given: Sequence[int] | None = None
    if "axes" in node.attributes:
        given = node.attributes["axes"].as_ints()
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        array = constant(node.inputs[1])
        if array is None:
            return None
        given = [int(axis) for axis in array.reshape(-1)]
    if not given:
        nothing = node.attributes.get_int("noop_with_empty_axes", 0) == 1
        return () if nothing else None  # all axes, the batch too
    axes = sorted({axis % rank - 1 for axis in given})
    return None if axes[0] < 0 else tuple(axes)


def _window_sum(builder: Builder, value: int, geometry: Geometry) -> int:
    """Append the sums over a window of a value (channels, *spatial); return the number of the result."""
    shape = builder.shapes[value]
    channels, spatial = shape[0], shape[1:]
    if geometry.rank == 3:
        depth = reshape(builder, value, (channels, spatial[0], prod(spatial[1:])))
        lines = Geometry(
            (geometry.kernel[0], 1),
            (geometry.strides[0], 1),
            (geometry.begin[0], 0),
            (geometry.end[0], 0),
            (geometry.dilations[0], 1),
            (geometry.output[0], prod(spatial[1:])),
        )
        summed = _plane_sum(builder, depth, lines)
        planes = reshape(builder, summed, (channels * geometry.output[0], *spatial[1:]))
        return reshape(builder, _plane_sum(builder, planes, geometry.axes(1, 3)), (channels, *geometry.output))
    plane = reshape(builder, value, (channels, *((1,) if geometry.rank == 1 else ()), *spatial))
    return reshape(builder, _plane_sum(builder, plane, geometry), (channels, *geometry.output))


def _plane_sum(builder: Builder, value: int, geometry: Geometry) -> int:
    window = geometry.window()
    return builder.add(WindowSum(value, window, (builder.shapes[value][0], *window.output)))
