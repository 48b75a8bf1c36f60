"""Lowering of operators that only move values: Reshape, Transpose, Slice, Pad, Gather by constants, and their kin.

Each becomes one index map, found by running the operator itself on numbered elements; so the map is right by
construction, whatever the attributes. Constants among the moved values are a shift, which the node applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.errors import PlanError
from heinfer.operators.steps import Shape, Take
from partitioner.lowering import (
    ON_NODE,
    Builder,
    Context,
    Lowered,
    Placement,
    constant,
    operand,
    per_sample,
    reshape,
    shift,
)
from partitioner.single_operator import run_node

#: Element types that carry numbers of elements, and the largest number that each holds exactly. onnxruntime implements
#: some movements for few of them.
_CARRIERS: Mapping[type[np.number[Any]], int] = MappingProxyType(
    {np.int64: 2**62, np.float64: 2**53, np.int32: 2**31 - 1, np.float32: 2**24}
)


def lower_movement(node: ir.Node, context: Context) -> Lowered:
    """An index map, and a shift where Pad fills with a constant."""
    moved = list(dict.fromkeys(v for v in node.inputs if v is not None and constant(v) is None))
    shapes = [context.shape(v) for v in moved]
    target = context.shape(node.outputs[0])
    known = [s for s in shapes if s is not None]
    if target is None or not moved or len(known) != len(moved) or len(node.outputs) != 1:
        return ON_NODE
    if node.op_type == "Concat" and any(constant(v) is not None for v in node.inputs):
        return ON_NODE  # `partitioner.rewriting` has put constants into a sum where it could
    indices = _index_map(node, moved, known, target)
    if indices is None:
        return ON_NODE
    fill = constant(node.inputs[2]) if node.op_type == "Pad" and len(node.inputs) > 2 else None
    value = 0.0 if fill is None or not fill.size else float(fill.reshape(-1)[0])
    if not np.isfinite(value):
        return ON_NODE
    offset = np.where(indices < 0, value, 0.0).reshape(target)
    return _moving(tuple(moved), indices, sum(map(prod, known)), target, offset)


def lower_resize(node: ir.Node, context: Context) -> Lowered:
    """Resize and Upsample to the nearest neighbour; what interpolates runs on the node."""
    if node.attributes.get_string("mode", "nearest") != "nearest":
        return ON_NODE
    return lower_movement(node, context)


def lower_where(node: ir.Node, context: Context) -> Lowered:
    """Where with a constant condition: elements of both branches, of which one may be constant."""
    condition, target = constant(node.inputs[0]), context.shape(node.outputs[0])
    chosen = None if condition is None or target is None else per_sample(condition, target)
    branches = [operand(node, 1), operand(node, 2)]
    moved = list(dict.fromkeys(v for v in branches if constant(v) is None))
    shapes = [context.shape(v) for v in moved]
    known = [s for s in shapes if s is not None]
    if chosen is None or target is None or not moved or len(known) != len(moved):
        return ON_NODE
    parts, offset = [], np.zeros(target)
    for branch, takes in zip(branches, (chosen, ~chosen), strict=True):
        array = constant(branch)
        if array is not None:
            parts.append(np.full(target, -1, np.int32))
            sample = per_sample(array, target)
            if sample is None or not np.all(np.isfinite(sample)):
                return ON_NODE
            offset = np.where(takes, sample.astype(np.float64), offset)
            continue
        place = moved.index(branch)
        numbers = np.arange(prod(known[place]), dtype=np.int32) + sum(map(prod, known[:place]))
        parts.append(np.broadcast_to(numbers.reshape(known[place]), target))
    indices = np.where(chosen, *parts).ravel().astype(np.int32)
    return _moving(tuple(moved), indices, sum(map(prod, known)), target, offset)


def _moving(
    sources: tuple[ir.Value, ...], indices: NDArray[np.int32], total: int, target: Shape, offset: NDArray[np.float64]
) -> Lowered:
    in_order = indices.size == total and np.array_equal(indices, np.arange(total))

    def emit(builder: Builder, values: Sequence[int]) -> int:
        if in_order and len(values) == 1:
            return reshape(builder, values[0], target)
        name = None if in_order else builder.array(indices)
        return shift(builder, builder.add(Take(tuple(values), name, target)), offset)

    return Lowered(Placement.LINEAR if np.any(offset) else Placement.MOVEMENT, sources, emit)


def _index_map(
    node: ir.Node, moved: Sequence[ir.Value], shapes: Sequence[Shape], target: Shape
) -> NDArray[np.int32] | None:
    """Run the operator on element numbers, two samples at once; None if it mixes samples or values."""
    total = sum(map(prod, shapes))
    result = None
    for carrier, most in _CARRIERS.items():
        if 2 * total > most:
            continue
        try:
            result = _run_numbered(node, moved, shapes, carrier)
            break
        except PlanError:
            continue
    if result is None or result.shape != (2, *target):
        return None
    first, second = result[0].ravel(), result[1].ravel()
    if first.max(initial=0) > total or not np.array_equal(second, np.where(first > 0, first + total, 0)):
        return None
    return np.asarray(first - 1, np.int32)


def _run_numbered(
    node: ir.Node, moved: Sequence[ir.Value], shapes: Sequence[Shape], carrier: type[np.number[Any]]
) -> NDArray[Any]:
    offset, total = 1, sum(map(prod, shapes))
    feeds: dict[str, NDArray[Any]] = {}
    for value, shape in zip(moved, shapes, strict=True):
        numbers = np.arange(offset, offset + prod(shape)).reshape(1, *shape)
        feeds[str(value.name)] = np.concatenate([numbers, numbers + total]).astype(carrier)
        offset += prod(shape)
    left_out = (2,) if node.op_type == "Pad" else ()  # padding gets number 0
    return run_node(node, feeds, left_out)
