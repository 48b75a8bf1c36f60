"""Free the batch axis of a model that was simplified at a batch of 1.

    requires  a simplified model, composite operators rewritten, whose inputs have a batch of 1 in front
    ensures   inputs take any number of samples, as do the operators whose constants had fixed it at 1; operators with
              weights have the batch in front of what they read wherever the model had it on one axis, alone or merged

| operator           | what is repaired                                                                           |
|--------------------|--------------------------------------------------------------------------------------------|
| Reshape            | the axis that holds the batch becomes -1, all others numbers                               |
| Expand             | 1 on the batch axis, which keeps what is there                                             |
| Resize             | sizes for the other axes only                                                              |
| Squeeze            | without axes: those of size 1 but the batch                                                |
| Concat, GridSample | constant operands are expanded to the batch                                                |

Operators that index the batch axis itself (Slice, Gather, Squeeze) mix samples, and stay. Which axis of a reshaped
value holds the batch follows from row-major order up to axes of size 1; so the result is a conjecture until
`partitioner.verification` has compared it with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from partitioner.batch_axes import BatchAxis, BatchTracker, Layout, batch_axes
from partitioner.importing import BATCH
from partitioner.leading import Turner
from partitioner.lowering import constant
from partitioner.misfits import blamed
from partitioner.shapes import Shape
from partitioner.simplification import tidy


def free_batch(model: ir.Model) -> None:
    """Free the batch axis in place."""
    tracker = BatchTracker(model.graph)
    turner = Turner(tracker)
    for node in list(model.graph):
        repair = _REPAIRS.get(node.op_type)
        with blamed(node):
            if repair is not None and node.domain in ("", "ai.onnx"):
                repair(node, tracker)
            tracker.infer(node)
            turner.turn(node)
    _make_symbolic(model.graph, tracker)
    tidy(model)


def _make_symbolic(graph: ir.Graph, tracker: BatchTracker) -> None:
    """Declare the batch on inputs and results; forget the other shapes, which held for a batch of 1."""
    for node in graph:
        for value in node.outputs:
            value.shape = None
    for value in (*graph.inputs, *graph.outputs):
        layout = tracker.layout(value)
        if layout is not None and layout.batch is not None and layout.batch.leads:
            value.shape = ir.Shape([BATCH, *layout.shape[1:]])


def _free_reshape(node: ir.Node, tracker: BatchTracker) -> None:
    source, target = tracker.layout(node.inputs[0]), constant(node.inputs[1])
    if source is None or source.batch is None or target is None:
        return
    sizes = _resolve(target, source.shape, bool(node.attributes.get_int("allowzero", 0)))
    batch = None if sizes is None else _choose_axis(source, sizes, list(target))
    if sizes is None or batch is None:
        return
    freed = [-1 if axis == batch.axis else size for axis, size in enumerate(sizes)]
    node.attributes.pop("allowzero", None)
    node.replace_input_with(1, tracker.add_constant(node, np.array(freed, np.int64)))


def _resolve(target: NDArray[Any], source: Shape, keeps_zero: bool) -> Shape | None:
    """Return a Reshape's target in numbers; None if it or the source is empty, or they don't fit."""
    if not keeps_zero and any(size == 0 for size in target[len(source) :]):
        return None
    sizes = [source[axis] if size == 0 and not keeps_zero else int(size) for axis, size in enumerate(target)]
    known = prod(size for size in sizes if size != -1)
    if known == 0 or prod(source) == 0:
        return None
    return tuple(prod(source) // known if size == -1 else size for size in sizes)


def _choose_axis(source: Layout, sizes: Shape, target: list[int]) -> BatchAxis | None:
    """Choose among the axes that may hold the batch.

    An axis of its own comes first, best where the batch was before; then one that the exporter had computed (-1); then
    one that the batch starts, unless it is the last, which holds features; then one that it ends.
    """
    batch = source.batch

    def preference(found: BatchAxis) -> tuple[bool, bool, bool, bool, bool]:
        alone, last = found.merged == 1, found.axis == len(sizes) - 1
        stays = batch is not None and alone and found.axis == batch.axis
        return alone, stays, target[found.axis] == -1, found.outer == 1 and not last, found.inner == 1

    # The first of equals: max returns it.
    return max(batch_axes(source.front, sizes), key=preference, default=None)


def _free_expand(node: ir.Node, tracker: BatchTracker) -> None:
    source, target = tracker.layout(node.inputs[0]), constant(node.inputs[1])
    if source is None or source.batch is None or target is None:
        return
    axis = source.batch.axis + len(target) - len(source.shape)
    if axis < 0 or target[axis] in (1, -1):
        return
    freed = target.copy()
    freed[axis] = 1
    node.replace_input_with(1, tracker.add_constant(node, freed))


def _free_resize(node: ir.Node, tracker: BatchTracker) -> None:
    sizes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    layout = tracker.layout(node.inputs[0])
    if sizes is None or layout is None or layout.batch is None:
        return
    rank = len(layout.shape)
    axes = [axis % rank for axis in node.attributes.get_ints("axes", tuple(range(rank)))]
    if len(sizes) != len(axes):
        return
    kept = [place for place, axis in enumerate(axes) if axis != layout.batch.axis]
    node.attributes["axes"] = ir.AttrInt64s("axes", [axes[place] for place in kept])
    node.replace_input_with(3, tracker.add_constant(node, sizes[kept]))


def _free_squeeze(node: ir.Node, tracker: BatchTracker) -> None:
    layout = tracker.layout(node.inputs[0])
    if layout is None or layout.batch is None or (len(node.inputs) > 1 and node.inputs[1] is not None):
        return
    axes = [axis for axis, size in enumerate(layout.shape) if size == 1 and axis != layout.batch.axis]
    if axes:
        node.resize_inputs(2)
        node.replace_input_with(1, tracker.add_constant(node, np.array(axes, np.int64)))


def _expand_constants(node: ir.Node, tracker: BatchTracker) -> None:
    """Give constants that have 1 where the other operands have the batch the size of the batch."""
    carrier = next((value for value in node.inputs if tracker.batch(value) is not None), None)
    batch = tracker.batch(carrier)
    if carrier is None or batch is None or batch.merged != 1:
        return
    for position, value in enumerate(node.inputs):
        array = constant(value)
        if value is None or array is None or array.ndim <= batch.axis or array.shape[batch.axis] != 1:
            continue
        axis = node.attributes.get_int("axis", array.ndim)
        if axis % (array.ndim + 1) != batch.axis:
            node.replace_input_with(position, _expanded(node, value, carrier, batch, tracker))


def _expanded(node: ir.Node, value: ir.Value, carrier: ir.Value, batch: BatchAxis, tracker: BatchTracker) -> ir.Value:
    """Expand a constant along the batch axis of another value."""
    layout = tracker.layout(value)
    assert layout is not None  # constants always have one
    attributes = [ir.AttrInt64("start", batch.axis), ir.AttrInt64("end", batch.axis + 1)]
    samples = tracker.insert(node, "Shape", [carrier], attributes)
    ones = np.ones(len(layout.shape), np.int64)
    front = tracker.add_constant(node, ones[: batch.axis])
    behind = tracker.add_constant(node, ones[batch.axis + 1 :])
    target = tracker.insert(node, "Concat", [front, samples, behind], [ir.AttrInt64("axis", 0)])
    expanded = tracker.insert(node, "Expand", [value, target])
    expanded.type = value.type
    tracker.layouts[expanded] = Layout(layout.shape, BatchAxis(batch.axis))
    return expanded


_REPAIRS: Mapping[str, Callable[[ir.Node, BatchTracker], None]] = {
    "Concat": _expand_constants,
    "Expand": _free_expand,
    "GridSample": _expand_constants,
    "Reshape": _free_reshape,
    "Resize": _free_resize,
    "Squeeze": _free_squeeze,
}
