"""Lowering of linear operators without weights, which may run on either side.

Operators that only move values become one index map, found by running the operator itself on numbered elements; so the
map is right by construction, whatever the attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.operators.plain import windows
from heinfer.operators.steps import Rescale, Shape, Sum, Take, Window, WindowSum
from heinfer.plan.execution import open_session
from partitioner.linear_operators import lower_constant_sum
from partitioner.lowering import ON_NODE, Builder, Context, Lowered, Placement, constant, expand, reshape, shift
from partitioner.windows import padded_window


def lower_movement(node: ir.Node, context: Context) -> Lowered:
    """Reshape, Flatten, Transpose, Pad, Slice, Concat: an index map, and a shift where Pad fills with a constant."""
    moved = [v for v in node.inputs if v is not None and constant(v) is None]
    shapes = [context.shape(v) for v in moved]
    target = context.shape(node.outputs[0])
    known = [s for s in shapes if s is not None]
    if target is None or not moved or len(known) != len(moved) or len(node.outputs) != 1:
        return ON_NODE
    if node.op_type == "Concat" and len(moved) != len(node.inputs):
        return ON_NODE  # joins constants: affine, but not worth a special case under encryption
    indices = _index_map(node, moved, known, target)
    if indices is None:
        return ON_NODE
    fill = constant(node.inputs[2]) if node.op_type == "Pad" and len(node.inputs) > 2 else None
    value = 0.0 if fill is None or not fill.size else float(fill.reshape(-1)[0])
    if not np.isfinite(value):
        return ON_NODE
    total = sum(map(prod, known))
    in_order = indices.size == total and np.array_equal(indices, np.arange(total))

    def emit(builder: Builder, values: Sequence[int]) -> int:
        if in_order and len(values) == 1:
            return reshape(builder, values[0], target)
        name = None if in_order else builder.array(indices)
        result = builder.add(Take(tuple(values), name, target))
        return shift(builder, result, value * (indices < 0).reshape(target))

    placement = Placement.MOVEMENT if value == 0 else Placement.LINEAR
    return Lowered(placement, tuple(moved), emit)


def lower_sum(node: ir.Node, context: Context) -> Lowered:
    """Add, Sub and Sum of activations; Add and Sub with a constant."""
    if any(constant(v) is not None for v in node.inputs):
        return lower_constant_sum(node, context) if len(node.inputs) == 2 else ON_NODE
    sources = tuple(v for v in node.inputs if v is not None)
    target = context.shape(node.outputs[0])
    if target is None or any(context.shape(v) is None for v in sources):
        return ON_NODE
    last: Literal[-1, 1] = -1 if node.op_type == "Sub" else 1
    signs = tuple(last if position else 1 for position in range(len(sources)))

    def emit(builder: Builder, values: Sequence[int]) -> int:
        expanded = tuple(expand(builder, v, target) for v in values)
        return builder.add(Sum(expanded, signs, target))

    return Lowered(Placement.LINEAR, sources, emit, joins=True)


def lower_average_pool(node: ir.Node, context: Context) -> Lowered:
    """AveragePool and GlobalAveragePool over (C, H, W): a window sum; the division is the node's."""
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if source is None or target is None or len(source) != 3:
        return ON_NODE
    if node.op_type == "GlobalAveragePool":
        kernel = (source[1], source[2])
    else:
        height, width = node.attributes["kernel_shape"].as_ints()
        kernel = (height, width)
    window = padded_window(node, source, target, kernel)
    counts = _measured_counts(node, source, target, window)
    if counts is None:
        return ON_NODE

    def emit(builder: Builder, values: Sequence[int]) -> int:
        result = builder.add(WindowSum(values[0], window, target))
        return builder.add(Rescale(result, builder.array(1 / counts), target))

    return Lowered(Placement.LINEAR, (_only(node),), emit)


def _index_map(
    node: ir.Node, moved: Sequence[ir.Value], shapes: Sequence[Shape], target: Shape
) -> NDArray[np.int32] | None:
    """Run the operator on element numbers, two samples at once; None if it mixes samples."""
    offset, total = 1, sum(map(prod, shapes))
    feeds: dict[str, NDArray[np.int64]] = {}
    for value, shape in zip(moved, shapes, strict=True):
        numbers = np.arange(offset, offset + prod(shape)).reshape(1, *shape)
        feeds[str(value.name)] = np.concatenate([numbers, numbers + total]).astype(np.int64)
        offset += prod(shape)
    result = _run(node, feeds, zero_fill=True)
    if result.shape != (2, *target):
        return None
    first, second = result[0].ravel(), result[1].ravel()
    if first.max(initial=0) > total or not np.array_equal(second, np.where(first > 0, first + total, 0)):
        return None
    return np.asarray(first - 1, np.int32)


def _measured_counts(node: ir.Node, source: Shape, target: Shape, window: Window) -> NDArray[np.float64] | None:
    """Return by what each output's window sum is divided, measured by pooling ones and a window sum of ones."""
    plane = (1, 1, *source[1:])
    mean = _run(node, {str(_only(node).name): np.ones(plane, np.float32)})
    if mean.shape != (1, 1, *target[1:]) or not np.all(mean > 0):
        return None
    inside = windows(np.ones(plane), window).sum(axis=(2, 3))
    return np.broadcast_to(np.rint(inside / mean.astype(np.float64))[0], target).copy()


def _run(node: ir.Node, feeds: Mapping[str, NDArray[Any]], zero_fill: bool = False) -> NDArray[np.float64]:
    """Run one node under onnxruntime on the given inputs, its other inputs being its constants."""
    inputs = [
        ir.Value(name=n, type=ir.TensorType(ir.DataType.from_numpy(a.dtype)), shape=ir.Shape(a.shape))
        for n, a in feeds.items()
    ]
    by_name = {v.name: v for v in inputs}
    initialisers: list[ir.Value] = []
    operands: list[ir.Value | None] = []
    for position, value in enumerate(node.inputs):
        if value is None:
            operands.append(None)
        elif value.name in by_name:
            operands.append(by_name[value.name])
        elif zero_fill and node.op_type == "Pad" and position == 2:
            operands.append(None)
        else:
            copy = ir.Value(name=value.name, const_value=value.const_value)
            initialisers.append(copy)
            operands.append(copy)
    output = ir.Value(name="result")
    ir_node = ir.Node(node.domain, node.op_type, operands, list(node.attributes.values()), outputs=[output])
    output.type = ir.TensorType(inputs[0].dtype or ir.DataType.FLOAT)
    graph = ir.Graph(inputs, [output], nodes=[ir_node], initializers=initialisers, opset_imports={"": _opset(node)})
    session = open_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    result: NDArray[np.float64] = session.run(None, feeds)[0]
    return result


def _opset(node: ir.Node) -> int:
    graph = node.graph
    assert graph is not None  # nodes of a model always have one
    return graph.opset_imports[""]


def _only(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None  # a required input, as the checker has verified
    return value
