"""Where every value of a model has its batch.

A reshape may merge the batch with neighbouring axes: (samples, 64, d) becomes (samples * 64, d), and a sequence-first
(T, samples, d) becomes (T * samples, d). Row-major order keeps the number of elements in front of the batch through
every reshape, which is how it is found again.

`BatchTracker` infers the shapes of one operator after the other at batch 2 and at batch 3, with onnx's inference; an
axis that changes holds the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import shape_inference

from partitioner.shapes import Shape, constant_shape, inferable_node, serialized_type, small_constant

#: Operators that keep the row-major order of elements.
_RESHAPING = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The axis that holds the batch, of outer * samples * inner elements in row-major order.

    Attributes:
        axis: its position.
        outer: elements of other axes merged in front of the batch.
        inner: elements of other axes merged behind it.
    """

    axis: int
    outer: int = 1
    inner: int = 1

    @property
    def merged(self) -> int:
        """Elements for every sample: 1 if the axis is the batch alone."""
        return self.outer * self.inner

    @property
    def leads(self) -> bool:
        """Whether samples come first, on an axis of their own."""
        return self.axis == 0 and self.merged == 1


@dataclass(frozen=True, slots=True)
class Layout:
    """A value's shape at a batch of 1, and its batch axis; None if its shape does not depend on the batch."""

    shape: Shape
    batch: BatchAxis | None

    def at(self, samples: int) -> Shape:
        """Return the shape for some number of samples."""
        axis = None if self.batch is None else self.batch.axis
        return tuple(size * samples if place == axis else size for place, size in enumerate(self.shape))

    @property
    def front(self) -> int:
        """Elements in front of the batch, in row-major order, at one index of the batch."""
        return 1 if self.batch is None else prod(self.shape[: self.batch.axis]) * self.batch.outer


def batch_axes(front: int, shape: Shape) -> list[BatchAxis]:
    """Return the axes that may hold the batch, given the number of elements in front of it.

    Args:
        front: elements in front of the batch in row-major order.
        shape: sizes at a batch of 1.
    """
    found = []
    for axis, size in enumerate(shape):
        before = prod(shape[:axis])
        if before and front % before == 0 and size and size % (front // before) == 0:
            outer = front // before
            found.append(BatchAxis(axis, outer, size // outer))
    return found


@dataclass(slots=True)
class BatchTracker:
    """Layouts of values, found in the order of the graph.

    Attributes:
        graph: the model's graph; its inputs have static shapes with a batch of 1.
        layouts: what is known so far, constants apart.
    """

    graph: ir.Graph
    layouts: dict[ir.Value, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in self.graph.inputs:
            if value.shape is not None and value.shape.is_static():
                self.layouts[value] = Layout(tuple(value.shape.numpy()), BatchAxis(0))

    def layout(self, value: ir.Value | None) -> Layout | None:
        """Return a value's layout, None if it is unknown or the batch is not one axis of it."""
        if value is None:
            return None
        shape = constant_shape(value)
        return self.layouts.get(value) if shape is None else Layout(shape, None)

    def batch(self, value: ir.Value | None) -> BatchAxis | None:
        """Return a value's batch axis, None if it has none or it is unknown."""
        layout = self.layout(value)
        return None if layout is None else layout.batch

    def infer(self, node: ir.Node) -> None:
        """Find the layouts of a node's outputs, given those of its inputs."""
        at_two, at_three = self._types(node, 2), self._types(node, 3)
        for value in node.outputs:
            name = str(value.name)
            if name not in at_two:
                continue
            if value.type is None:
                value.type = ir.serde.deserialize_type_proto_for_type(at_two[name])
            layout = self._compare(node, _static_shape(at_two[name]), _static_shape(at_three.get(name)))
            if layout is not None:
                self.layouts[value] = layout

    def insert(
        self,
        before: ir.Node,
        operator: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, ir.Attr] | Sequence[ir.Attr] = (),
        name: str | None = None,
    ) -> ir.Value:
        """Insert a node of the standard domain in front of another one; return its only output."""
        given = list(attributes.values()) if isinstance(attributes, Mapping) else attributes
        node = ir.Node("", operator, inputs, given, name=name or f"{before.name}.{operator}")
        self.graph.insert_before(before, node)
        self.infer(node)
        return node.outputs[0]

    def add_constant(self, node: ir.Node, array: NDArray[Any]) -> ir.Value:
        """Add an initialiser for a node's use; return its value."""
        name, number = f"{node.name}.constant", 0
        while name in self.graph.initializers:
            number += 1
            name = f"{node.name}.constant_{number}"
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _types(self, node: ir.Node, samples: int) -> Mapping[str, onnx.TypeProto]:
        """Infer the types of a node's outputs; of none if onnx can't."""
        operands = [value for value in node.inputs if value is not None]
        types = {}
        for value in operands:
            layout = self.layout(value)
            types[str(value.name)] = serialized_type(value, None if layout is None else layout.at(samples))
        data = {str(value.name): tensor for value in operands if (tensor := small_constant(value)) is not None}
        try:
            proto = inferable_node(node)
            schema = onnx.defs.get_schema(proto.op_type, self.graph.opset_imports[node.domain], node.domain)
            return shape_inference.infer_node_outputs(schema, proto, types, data)
        except (shape_inference.InferenceError, onnx.checker.ValidationError, onnx.defs.SchemaError, ValueError):
            return {}

    def _compare(self, node: ir.Node, at_two: Shape | None, at_three: Shape | None) -> Layout | None:
        if at_two is None or at_three is None or len(at_two) != len(at_three):
            return None
        changed = [axis for axis, size in enumerate(at_two) if size != at_three[axis]]
        if not changed:
            return Layout(at_two, None)
        axis = changed[0]
        each, rest = divmod(at_two[axis], 2)
        if len(changed) > 1 or rest or at_three[axis] != 3 * each:
            return None
        shape = (*at_two[:axis], each, *at_two[axis + 1 :])
        batch = self._origin(node, shape, axis)
        return None if batch is None else Layout(shape, batch)

    def _origin(self, node: ir.Node, shape: Shape, axis: int) -> BatchAxis | None:
        """Tell which elements of an output's axis belong to one sample, None if the operator mixes them."""
        if shape[axis] == 1:
            return BatchAxis(axis)
        if node.op_type in _RESHAPING:
            source = self.layout(node.inputs[0])
            assert source is not None  # else the output had no layout
            return next((found for found in batch_axes(source.front, shape) if found.axis == axis), None)
        for value in node.inputs:
            batch = self.batch(value)
            if batch is not None and batch.merged == shape[axis]:
                return BatchAxis(axis, batch.outer, batch.inner)
        return None


def _static_shape(proto: onnx.TypeProto | None) -> Shape | None:
    if proto is None or not proto.tensor_type.HasField("shape"):
        return None
    dims = proto.tensor_type.shape.dim
    return tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None
