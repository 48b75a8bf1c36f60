"""Lowering of operators with learned weights: Conv, Gemm, MatMul, and Mul, Add and BatchNormalization with constants.

Formulas are those of the ONNX operator specification, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.operators.steps import Conv, MatMul, Rescale, Scale, Shape
from partitioner.lowering import (
    ON_NODE,
    Builder,
    Context,
    Lowered,
    Placement,
    constant,
    expand,
    reshape,
    shift,
    transpose_last,
)
from partitioner.windows import padded_window

NOT_LEADING = "the batch is not the first axis of what it reads, or its shape is unknown"


def lower_conv(node: ir.Node, context: Context) -> Lowered:
    """Conv with constant weights; every attribute."""
    weights = constant(node.inputs[1])
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if weights is None:
        return ON_NODE  # a product of two activations
    if source is None or target is None:
        return context.refuse(node, NOT_LEADING)
    if weights.ndim != 4:
        return context.refuse(node, f"the server has 2-D convolutions only, found {weights.ndim - 2}-D")
    window = padded_window(node, source, target, (int(weights.shape[2]), int(weights.shape[3])))
    group = node.attributes.get_int("group", 1)
    added = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(added)
    if added is not None and bias is None:
        return context.refuse(node, "its bias is not constant; use Conv and Add")

    def emit(builder: Builder, values: Sequence[int]) -> int:
        result = builder.add(Conv(values[0], builder.array(weights.astype(np.float64)), window, group, target))
        return shift(builder, result, None if bias is None else bias.reshape(-1, 1, 1))

    return Lowered(Placement.WEIGHTED, (_value(node, 0),), emit)


def lower_matmul(node: ir.Node, context: Context) -> Lowered:
    """MatMul with a constant on either side."""
    left, right = constant(node.inputs[0]), constant(node.inputs[1])
    if left is None and right is None:
        return ON_NODE
    weights, position = (right, 0) if right is not None else (left, 1)
    assert weights is not None  # one of the two is constant
    source, target = context.shape(node.inputs[position]), context.shape(node.outputs[0])
    if source is None or target is None:
        return context.refuse(node, NOT_LEADING)
    while weights.ndim > 2 and weights.shape[0] == 1:
        weights = weights[0]
    if weights.ndim > 2:
        return context.refuse(node, f"the server multiplies by matrices, found a constant of shape {weights.shape}")
    if position == 1:
        return _left_matmul(node, weights, source, target)
    matrix = weights.reshape(weights.shape[0], -1).astype(np.float64)
    full = (*source[:-1], matrix.shape[1])

    def emit(builder: Builder, values: Sequence[int]) -> int:
        return reshape(builder, builder.add(MatMul(values[0], builder.array(matrix), full)), target)

    return Lowered(Placement.WEIGHTED, (_value(node, 0),), emit)


def _left_matmul(node: ir.Node, weights: NDArray[Any], source: Shape, target: Shape) -> Lowered:
    """W x = (x' W')' over the last two axes."""
    matrix = weights.reshape(-1, weights.shape[-1]).T.astype(np.float64)

    def emit(builder: Builder, values: Sequence[int]) -> int:
        turned = transpose_last(builder, values[0], source)
        product = builder.add(MatMul(turned, builder.array(matrix), (*builder.shapes[turned][:-1], matrix.shape[1])))
        return reshape(builder, transpose_last(builder, product, builder.shapes[product]), target)

    if len(source) < 2:  # the only other axis is the batch, which would be summed over
        return ON_NODE
    return Lowered(Placement.WEIGHTED, (_value(node, 1),), emit)


def lower_gemm(node: ir.Node, context: Context) -> Lowered:
    """Gemm with constant B; transposes of activations were taken out by `partitioner.folding`."""
    weights = constant(node.inputs[1])
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if weights is None:
        return ON_NODE
    if source is None or target is None or len(source) != 1 or node.attributes.get_int("transA"):
        return context.refuse(node, NOT_LEADING)
    matrix = weights.T if node.attributes.get_int("transB") else weights
    matrix = node.attributes.get_float("alpha", 1.0) * matrix.astype(np.float64)
    added = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(added)
    if added is not None and bias is None:
        return context.refuse(node, "C is not constant; use MatMul and Add")
    if bias is not None and bias.ndim == 2 and bias.shape[0] != 1:
        return context.refuse(node, f"C has a row for every sample (shape {bias.shape})")
    beta = node.attributes.get_float("beta", 1.0)

    def emit(builder: Builder, values: Sequence[int]) -> int:
        result = builder.add(MatMul(values[0], builder.array(matrix), target))
        return shift(builder, result, None if bias is None else beta * bias.astype(np.float64).reshape(-1))

    return Lowered(Placement.WEIGHTED, (_value(node, 0),), emit)


def lower_batch_normalization(node: ir.Node, context: Context) -> Lowered:
    """BatchNormalization that did not fold into a neighbour: a product with the channel's gain, then a shift."""
    parameters = [constant(value) for value in node.inputs[1:5]]
    source = context.shape(node.inputs[0])
    if any(p is None for p in parameters):
        return ON_NODE
    if source is None:
        return context.refuse(node, NOT_LEADING)
    gain, beta, mean, variance = (np.asarray(p, np.float64) for p in parameters)
    gain = gain / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    channels = (-1, *([1] * (len(source) - 1)))

    def emit(builder: Builder, values: Sequence[int]) -> int:
        weights = np.broadcast_to(gain.reshape(channels), source).copy()
        result = builder.add(Scale(values[0], builder.array(weights), source))
        return shift(builder, result, (beta - mean * gain).reshape(channels))

    return Lowered(Placement.WEIGHTED, (_value(node, 0),), emit)


def lower_product(node: ir.Node, context: Context) -> Lowered:
    """Mul and Div by a constant: free for a single number, pinned to the server for a tensor of weights."""
    divides = node.op_type == "Div"
    position, factor = _constant_operand(node)
    target = context.shape(node.outputs[0])
    if factor is None or factor.dtype.kind != "f" or (divides and position == 0):
        return ON_NODE
    source_value = _value(node, 1 - position)
    source = context.shape(source_value)
    with np.errstate(divide="ignore"):
        factor = 1 / factor.astype(np.float64) if divides else factor.astype(np.float64)
    if not np.all(np.isfinite(factor)):
        return ON_NODE  # division by zero: what it means is the plain operator's business
    if factor.size == 1 and not np.any(factor):
        return ON_NODE
    sample = _per_sample(factor, target)
    if source is None or target is None or sample is None:
        return ON_NODE if factor.size == 1 else context.refuse(node, NOT_LEADING)

    def emit(builder: Builder, values: Sequence[int]) -> int:
        value = expand(builder, values[0], target)
        array = np.broadcast_to(sample, target).copy()
        if factor.size == 1:
            return builder.add(Rescale(value, builder.array(array), target))
        return builder.add(Scale(value, builder.array(array), target))

    return Lowered(Placement.LINEAR if factor.size == 1 else Placement.WEIGHTED, (source_value,), emit)


def lower_constant_sum(node: ir.Node, context: Context) -> Lowered:
    """Add and Sub with one constant operand: a shift, which the node applies, and a change of sign for c - x."""
    position, offset = _constant_operand(node)
    target = context.shape(node.outputs[0])
    source_value = _value(node, 1 - position)
    if offset is None or offset.dtype.kind != "f" or target is None or context.shape(source_value) is None:
        return ON_NODE
    subtracts = node.op_type == "Sub"
    sample = _per_sample(offset.astype(np.float64), target)
    if sample is None or not np.all(np.isfinite(sample)):
        return ON_NODE

    def emit(builder: Builder, values: Sequence[int]) -> int:
        value = expand(builder, values[0], target)
        if subtracts and position == 0:
            value = builder.add(Rescale(value, builder.array(np.full(target, -1.0)), target))
        return shift(builder, value, -sample if subtracts and position == 1 else sample)

    return Lowered(Placement.LINEAR, (source_value,), emit)


def _per_sample(array: NDArray[np.float64], target: Shape | None) -> NDArray[np.float64] | None:
    """Drop the batch axis of a constant; None if it has a value for every sample or does not broadcast."""
    if target is None or array.ndim > len(target) + 1:
        return None
    if array.ndim == len(target) + 1:
        if array.shape[0] != 1:
            return None
        array = array[0]
    return array


def _constant_operand(node: ir.Node) -> tuple[int, NDArray[Any] | None]:
    """Return position and array of the one constant operand; None if both or neither are constant."""
    left, right = constant(node.inputs[0]), constant(node.inputs[1])
    if (left is None) == (right is None):
        return 1, None
    return (0, left) if left is not None else (1, right)


def _value(node: ir.Node, position: int) -> ir.Value:
    value = node.inputs[position]
    assert value is not None  # a required input, as the checker has verified
    return value
