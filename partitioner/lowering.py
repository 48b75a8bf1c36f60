"""What each ONNX operator is to the partition, and which steps it becomes on the server.

    requires  a simplified model and the shapes of its values
    ensures   every node has a `Lowered`: a placement class and, where the server can run it, how

Anything that is not linear in the encrypted values runs on the node, as the ONNX operator that it is. Operators with
learned weights that the server lacks are refused, all of them in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.errors import Offence
from heinfer.operators.steps import Shape, Shift, Step, Take


class Placement(Enum):
    """Where an operator may run.

    WEIGHTED is pinned to the server. MOVEMENT is free, even in front of the weights of a block. LINEAR is free, but
    within a block it follows the weights. NODE is pinned to the node.
    """

    WEIGHTED = "weighted"
    MOVEMENT = "movement"
    LINEAR = "linear"
    NODE = "node"

    @property
    def pinned_to_server(self) -> bool:
        """Whether the operator has learned weights."""
        return self is Placement.WEIGHTED


class Builder:
    """Collects the steps and arrays of one block's full program.

    Args:
        prefix: put before the names of arrays, so that blocks don't clash.
        inputs: shapes of the block's inputs.
    """

    def __init__(self, prefix: str, inputs: Sequence[Shape]) -> None:
        self.prefix = prefix
        self.inputs = tuple(inputs)
        self.shapes: list[Shape] = list(inputs)
        self.steps: list[Step] = []
        self.arrays: dict[str, NDArray[Any]] = {}

    def add(self, step: Step) -> int:
        """Append a step; return the number of its value."""
        self.steps.append(step)
        self.shapes.append(step.shape)
        return len(self.shapes) - 1

    def array(self, values: NDArray[Any]) -> str:
        """Store the array of the step that is added next; return its name."""
        name = f"{self.prefix}.{len(self.steps)}"
        self.arrays[name] = values
        return name


@dataclass(frozen=True, slots=True)
class Lowered:
    """One ONNX node as the partition sees it.

    Attributes:
        placement: where it may run.
        sources: the values that it reads under encryption, in the order that `emit` expects; empty for NODE.
        emit: appends the node's steps to a builder, given the numbers of the source values; returns the result's.
        joins: whether it adds values, so that they need one scale.
    """

    placement: Placement
    sources: tuple[ir.Value, ...] = ()
    emit: Callable[[Builder, Sequence[int]], int] | None = None
    joins: bool = False


ON_NODE = Lowered(Placement.NODE)
NOT_LEADING = "the batch is not the first axis of what it reads, or its shape is unknown"


@dataclass(slots=True)
class Context:
    """What a lowering function may ask for.

    Attributes:
        shapes: shape per sample of every value that the batch leads.
        offences: refusals found so far.
    """

    shapes: Mapping[str, Shape]
    offences: list[Offence] = field(default_factory=list)

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Return a value's shape per sample, None if the batch does not lead it or the shape is unknown."""
        return None if value is None or value.name is None else self.shapes.get(value.name)

    def refuse(self, node: ir.Node, reason: str) -> Lowered:
        """Record a refusal and carry on, so that all are found."""
        self.offences.append(Offence(node.name or str(node.outputs[0].name), node.op_type, reason))
        return ON_NODE


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the array of a constant value, None for anything else."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def real_values(array: NDArray[Any]) -> NDArray[Any]:
    """Return a constant as numbers to compute with: float32 and float64 as they are, for copies may be gigabytes."""
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def add_initialiser(model: ir.Model, name: str, array: NDArray[Any]) -> ir.Value:
    """Add a float32 constant to a model; return its value."""
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.const_value = ir.tensor(array, name=name)
    model.graph.initializers[name] = value
    return value


def shift(builder: Builder, value: int, offset: NDArray[Any] | None) -> int:
    """Add an offset that broadcasts to the value's shape; none adds nothing."""
    if offset is None or not np.any(offset):
        return value
    shape = builder.shapes[value]
    full = np.broadcast_to(offset.astype(np.float64), shape).copy()
    return builder.add(Shift(value, builder.array(full), shape))


def reshape(builder: Builder, value: int, shape: Shape) -> int:
    """Change the shape, elements in order."""
    return value if builder.shapes[value] == shape else builder.add(Take((value,), None, shape))


def expand(builder: Builder, value: int, shape: Shape) -> int:
    """Broadcast a value."""
    if builder.shapes[value] == shape:
        return value
    return take(builder, value, np.broadcast_to(numbered(builder, value), shape))


def transpose(builder: Builder, value: int, axes: Sequence[int]) -> int:
    """Permute the axes."""
    if list(axes) == sorted(axes):
        return value
    return take(builder, value, numbered(builder, value).transpose(axes))


def numbered(builder: Builder, value: int) -> NDArray[np.int32]:
    """Return the numbers of a value's elements, in its shape."""
    shape = builder.shapes[value]
    return np.arange(prod(shape), dtype=np.int32).reshape(shape)


def take(builder: Builder, value: int, elements: NDArray[Any]) -> int:
    """Append an index map over one value; the result has the shape of `elements`, and -1 is zero."""
    flat = np.ascontiguousarray(elements, np.int32).ravel()
    return builder.add(Take((value,), builder.array(flat), tuple(elements.shape)))


def operand(node: ir.Node, position: int) -> ir.Value:
    """Return a required input."""
    value = node.inputs[position]
    assert value is not None  # as the checker has verified
    return value


def per_sample(array: NDArray[Any], target: Shape) -> NDArray[Any] | None:
    """Drop the batch axis of a constant that broadcasts to (samples, *target); None if it has a value a sample."""
    if array.ndim > len(target) + 1:
        return None
    if array.ndim == len(target) + 1:
        if array.shape[0] != 1:
            return None
        array = array[0]
    return array
