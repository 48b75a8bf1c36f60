"""Lowering of sums, and of products and shifts by constants: Add, Sub, Sum, Mean, Neg, Mul, Div, BatchNormalization.

A product with a tensor of constants holds weights and is pinned to the server; one with a single number changes nothing
but the scale of the result, which is the node's; so do signs and powers of two, channel by channel, which is what
`partitioner.homogeneous` leaves of a normalisation. Constants that are added are biases, and the node's too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.operators.steps import Rescale, Scale, Sum
from partitioner.lowering import (
    NOT_LEADING,
    ON_NODE,
    Builder,
    Context,
    Lowered,
    Placement,
    constant,
    expand,
    operand,
    per_sample,
    shift,
)


def lower_batch_normalization(node: ir.Node, context: Context) -> Lowered:
    """BatchNormalization that did not fold into a neighbour: a product with the channel's gain, then a shift.

    Gains that are powers of two with signs hold no weights, and the operator is free.
    """
    parameters = [constant(value) for value in node.inputs[1:5]]
    source = context.shape(node.inputs[0])
    if any(p is None for p in parameters):
        return ON_NODE
    gain, beta, mean, variance = (np.asarray(p, np.float64) for p in parameters)
    gain = gain / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    free = bool(np.all((gain == 0) | (np.frexp(gain)[0] == np.copysign(0.5, gain))))
    if free and (source is None or not np.all(gain)):
        return ON_NODE
    if source is None:
        return context.refuse(node, NOT_LEADING)
    channels = (-1, *([1] * (len(source) - 1)))

    def emit(builder: Builder, values: Sequence[int]) -> int:
        factors = builder.array(np.broadcast_to(gain.reshape(channels), source).copy())
        step = Rescale(values[0], factors, source) if free else Scale(values[0], factors, source)
        return shift(builder, builder.add(step), (beta - mean * gain).reshape(channels))

    return Lowered(Placement.LINEAR if free else Placement.WEIGHTED, (operand(node, 0),), emit)


def lower_product(node: ir.Node, context: Context) -> Lowered:
    """Mul and Div by a constant: free for a single number, pinned to the server for a tensor of weights."""
    divides = node.op_type == "Div"
    position, factor = _constant_operand(node)
    target = context.shape(node.outputs[0])
    if factor is None or factor.dtype.kind != "f" or (divides and position == 0):
        return ON_NODE
    source_value = operand(node, 1 - position)
    source = context.shape(source_value)
    with np.errstate(divide="ignore"):
        factor = 1 / factor.astype(np.float64) if divides else factor.astype(np.float64)
    if not np.all(np.isfinite(factor)):
        return ON_NODE  # division by zero: what it means is the plain operator's business
    if factor.size == 1 and not np.any(factor):
        return ON_NODE
    sample = None if target is None else per_sample(factor, target)
    if source is None or target is None or sample is None:
        return ON_NODE if factor.size == 1 else context.refuse(node, NOT_LEADING)

    def emit(builder: Builder, values: Sequence[int]) -> int:
        value = expand(builder, values[0], target)
        array = np.broadcast_to(sample, target).copy()
        if factor.size == 1:
            return builder.add(Rescale(value, builder.array(array), target))
        return builder.add(Scale(value, builder.array(array), target))

    return Lowered(Placement.LINEAR if factor.size == 1 else Placement.WEIGHTED, (source_value,), emit)


def lower_negation(node: ir.Node, context: Context) -> Lowered:
    """Neg: the node divides by -1 once more."""
    shape = context.shape(node.inputs[0])
    if shape is None:
        return ON_NODE

    def emit(builder: Builder, values: Sequence[int]) -> int:
        return builder.add(Rescale(values[0], builder.array(np.full(shape, -1.0)), shape))

    return Lowered(Placement.LINEAR, (operand(node, 0),), emit)


def lower_sum(node: ir.Node, context: Context) -> Lowered:
    """Add, Sub, Sum and Mean of activations and constants, of which each operand may broadcast."""
    target = context.shape(node.outputs[0])
    sources = tuple(value for value in node.inputs if value is not None and constant(value) is None)
    if target is None or not sources or any(context.shape(value) is None for value in sources):
        return ON_NODE
    offset: NDArray[np.float64] | None = None
    signs: list[Literal[-1, 1]] = []
    for position, value in enumerate(node.inputs):
        sign: Literal[-1, 1] = -1 if node.op_type == "Sub" and position else 1
        array = constant(value)
        if array is None:
            signs.append(sign)
            continue
        sample = per_sample(array, target)
        if array.dtype.kind != "f" or sample is None or not np.all(np.isfinite(sample)):
            return ON_NODE
        offset = sign * sample.astype(np.float64) + (0.0 if offset is None else offset)
    share = 1 / len(node.inputs) if node.op_type == "Mean" else 1.0

    def emit(builder: Builder, values: Sequence[int]) -> int:
        value = _signed_sum(builder, [expand(builder, v, target) for v in values], signs)
        value = shift(builder, value, offset)
        return value if share == 1.0 else builder.add(Rescale(value, builder.array(np.full(target, share)), target))

    return Lowered(Placement.LINEAR, sources, emit, joins=len(sources) > 1)


def _signed_sum(builder: Builder, values: Sequence[int], signs: Sequence[Literal[-1, 1]]) -> int:
    shape = builder.shapes[values[0]]
    if len(values) > 1:
        return builder.add(Sum(tuple(values), tuple(signs), shape))
    if signs[0] == 1:
        return values[0]
    return builder.add(Rescale(values[0], builder.array(np.full(shape, -1.0)), shape))


def _constant_operand(node: ir.Node) -> tuple[int, NDArray[Any] | None]:
    """Return position and array of the one constant operand; None if both or neither are constant."""
    left, right = constant(node.inputs[0]), constant(node.inputs[1])
    if (left is None) == (right is None):
        return 1, None
    return (0, left) if left is not None else (1, right)
