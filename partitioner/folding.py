"""Fold BatchNormalization and products with constants into neighbouring weights; put Gemm into one form.

    requires  a simplified model
    ensures   no BatchNormalization, Mul or Div by a constant follows a Conv, ConvTranspose, Gemm, MatMul or
              BatchNormalization with constant weights that nothing else reads, where the product folds; no Gemm
              transposes an activation or adds one

BatchNormalization folds by onnxscript's rules. A product in front of weights (input normalisation) folds when only
weighted operators read it and the factor is one number, or one a channel (a feature for Gemm and MatMul).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)

from partitioner.lowering import add_initialiser, constant, operand
from partitioner.misfits import blamed
from partitioner.shapes import Shape, infer_shapes

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_BATCH_NORM_RULES = (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)


def fold(model: ir.Model) -> None:
    """Fold in place."""
    rewrite(model, list(_BATCH_NORM_RULES))
    _split_gemm(model)
    _untranspose_gemm(model)
    shapes = infer_shapes(model)
    for node in list(model.graph):
        if node.op_type in ("Mul", "Div"):
            with blamed(node):
                _fold_product(model, node, shapes)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    common_passes.NameFixPass()(model)


def _fold_product(model: ir.Model, node: ir.Node, shapes: Mapping[str, Shape]) -> None:
    operands = [(constant(v), v) for v in node.inputs]
    constants = [(i, c) for i, (c, _) in enumerate(operands) if c is not None]
    if len(constants) != 1 or (node.op_type == "Div" and constants[0][0] == 0):
        return
    position, factor = constants[0]
    value = node.inputs[1 - position]
    if value is None or factor.dtype != np.float32 or not np.all(np.isfinite(factor)) or not np.all(factor):
        return
    factor = factor.astype(np.float64)
    factor = 1 / factor if node.op_type == "Div" else factor
    producer = value.producer()
    shape, product = shapes.get(str(value.name)), shapes.get(str(node.outputs[0].name))
    widens = factor.size > 1 and (shape is None or shape != product)  # readers need the product's axes, not the value's
    if not widens and _readers_fold(node, factor):
        for use in list(node.outputs[0].uses()):
            scale_input(model, use.node, factor)
        node.outputs[0].replace_all_uses_with(value)
        return
    bias = _bias_between(producer, value)
    weighted = producer if bias is None or producer is None else operand(producer, 1 - bias).producer()
    made = value if bias is None or producer is None else operand(producer, 1 - bias)
    if weighted is None or not _producer_folds(weighted, made):
        return
    rows = _row_factors(weighted, factor, None if shape is None else len(shape) + 1)
    if rows is None:
        return
    _scale_rows(model, weighted, rows)
    if bias is not None and producer is not None:
        added = constant(producer.inputs[bias])
        assert added is not None  # `_bias_between` has found it
        _replace(model, producer, bias, added.astype(np.float64) * factor)
    take_over(node.outputs[0], value)


def _bias_between(producer: ir.Node | None, value: ir.Value) -> int | None:
    """Return which operand of an Add or Sub in front of a product is constant; None if it is no such bias."""
    if producer is None or producer.op_type not in ("Add", "Sub") or len(list(value.uses())) != 1:
        return None
    found = [i for i, value in enumerate(producer.inputs) if constant(value) is not None]
    if len(found) != 1 or value.is_graph_output() or (producer.op_type == "Sub" and found[0] == 0):
        return None
    array = constant(producer.inputs[found[0]])
    return found[0] if array is not None and array.dtype == np.float32 and np.all(np.isfinite(array)) else None


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace a value everywhere; a result of the model keeps its name."""
    name, is_result = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if is_result:
        old.name, new.name = f"{name}.folded", name


def _readers_fold(node: ir.Node, factor: NDArray[np.float64]) -> bool:
    """Whether all that reads a product are weighted operators, in the place of their activation, and can take it in."""
    uses = list(node.outputs[0].uses())
    return (
        bool(uses)
        and not node.outputs[0].is_graph_output()
        and all(u.node.op_type in WEIGHTED and u.idx == 0 and input_factors(u.node, factor) is not None for u in uses)
    )


def input_factors(reader: ir.Node, factor: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return what a reader's weights are multiplied with, shaped like them up to broadcasting; None if it can't be.

    A factor of higher rank than the weights might add an axis to the activation and does not fold.
    """
    weights = constant(reader.inputs[1])
    if weights is None or factor.ndim > weights.ndim:
        return None
    if factor.size == 1:
        return factor.reshape(())
    if reader.op_type in _CONVOLUTIONS:
        transposed = reader.op_type == "ConvTranspose"
        group = reader.attributes.get_int("group", 1)
        channels = weights.shape[0] if transposed else weights.shape[1] * group
        if (1,) * (weights.ndim - factor.ndim) + factor.shape != (1, channels, *([1] * (weights.ndim - 2))):
            return None
        if transposed:
            return factor.reshape(-1, *([1] * (weights.ndim - 1)))
        by_group = np.repeat(factor.reshape(group, -1), weights.shape[0] // group, axis=0)
        return by_group.reshape(*weights.shape[:2], *([1] * (weights.ndim - 2)))
    by_rows = bool(reader.attributes.get_int("transB", 0))
    if weights.ndim != 2 or not factor.size == factor.shape[-1] == weights.shape[1 if by_rows else 0]:
        return None
    return factor.reshape(1, -1) if by_rows else factor.reshape(-1, 1)


def _producer_folds(producer: ir.Node, value: ir.Value) -> bool:
    """Whether the operator in front of a product has constant weights, and nothing else reads its result."""
    return (
        producer.op_type in (*WEIGHTED, "BatchNormalization")
        and all(constant(value) is not None for value in producer.inputs[1:] if value is not None)
        and len(list(value.uses())) == 1
        and not value.is_graph_output()
    )


def _row_factors(producer: ir.Node, factor: NDArray[np.float64], rank: int | None) -> NDArray[np.float64] | None:
    """Return the factor of every output row (channel or column), None if the factor varies along another axis.

    Args:
        producer: the operator whose rows they are.
        factor: what its result is multiplied with.
        rank: axes of that result; None if unknown.
    """
    rows = _outputs(producer)
    if producer.op_type != "BatchNormalization":
        rank = _rank(producer.inputs[1])
    if rank is None:
        return None
    if factor.ndim > rank or (rank == 1 and factor.size > 1):
        return None  # the factor might add an axis, or meets one that is none of the weights'
    if factor.size == 1:
        return np.full(rows, factor.reshape(-1)[0])
    if producer.op_type in (*_CONVOLUTIONS, "BatchNormalization"):
        fits = (1,) * (rank - factor.ndim) + factor.shape == (1, rows, *([1] * (rank - 2)))
    else:
        fits = factor.shape[-1] == rows == factor.size
    return factor.reshape(-1) if fits else None


def _rank(weights: ir.Value | None) -> int:
    """Rank of constant weights; -1 for anything else."""
    array = constant(weights)
    return -1 if array is None else array.ndim


def _outputs(producer: ir.Node) -> int:
    weights = constant(producer.inputs[1])
    assert weights is not None  # the callers have checked
    if producer.op_type == "ConvTranspose":
        return int(weights.shape[1]) * producer.attributes.get_int("group", 1)
    first = producer.op_type in ("Conv", "BatchNormalization") or producer.attributes.get_int("transB")
    return int(weights.shape[0 if first else -1])


def _scale_rows(model: ir.Model, node: ir.Node, rows: NDArray[np.float64]) -> None:
    """Multiply the output rows of a weighted operator, its bias included."""
    weights, bias = constant(node.inputs[1]), constant(node.inputs[2]) if len(node.inputs) > 2 else None
    assert weights is not None  # the callers have checked
    if node.op_type == "ConvTranspose":
        group = node.attributes.get_int("group", 1)
        by_group = weights.reshape(group, weights.shape[0] // group, *weights.shape[1:])
        factors = rows.reshape(group, 1, -1, *([1] * (weights.ndim - 2)))
        _replace(model, node, 1, (by_group * factors).reshape(weights.shape))
    else:
        first = node.op_type in ("Conv", "BatchNormalization") or node.attributes.get_int("transB")
        shaped = rows.reshape(-1, *([1] * (weights.ndim - 1))) if first else rows
        _replace(model, node, 1, weights * shaped)
    if bias is not None:
        _replace(model, node, 2, bias * rows)


def scale_input(model: ir.Model, node: ir.Node, factor: NDArray[np.float64]) -> None:
    """Multiply the weights of an operator with a factor of what it reads, which `input_factors` has accepted."""
    weights, factors = constant(node.inputs[1]), input_factors(node, factor)
    assert weights is not None  # the callers have checked
    assert factors is not None
    _replace(model, node, 1, weights.astype(np.float64) * factors)


def _replace(model: ir.Model, node: ir.Node, position: int, array: NDArray[np.float64]) -> None:
    name = f"{node.name}.scaled.{position}.{len(model.graph.initializers)}"
    node.replace_input_with(position, add_initialiser(model, name, array.astype(np.float32)))


def _untranspose_gemm(model: ir.Model) -> None:
    """Gemm(A', W) = Gemm(Transpose(A), W), and Gemm(W, B) = Transpose(Gemm(B', W')) for constant W."""
    for node in list(model.graph):
        if node.op_type != "Gemm":
            continue
        left, right = constant(node.inputs[0]), constant(node.inputs[1])
        if right is not None and left is None and node.attributes.get_int("transA"):
            turned = _transpose(node, node.inputs[0])
            node.replace_input_with(0, turned)
            node.attributes["transA"] = ir.AttrInt64("transA", 0)
        elif left is not None and right is None:
            _swap_gemm(model, node, left)


def _split_gemm(model: ir.Model) -> None:
    """Gemm(A, W, C) with an activation C is Gemm(A, W) plus beta C."""
    for node in list(model.graph):
        added = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        if added is None or constant(added) is not None or all(constant(v) is None for v in node.inputs[:2]):
            continue
        graph = node.graph
        assert graph is not None  # nodes of a model always have one
        beta = node.attributes.get_float("beta", 1.0)
        if beta != 1.0:
            factor = add_initialiser(model, f"{node.name}.beta", np.array(beta, np.float32))
            scaled = ir.Node("", "Mul", [added, factor], name=f"{node.name}.scaled")
            graph.insert_before(node, scaled)
            added = scaled.outputs[0]
        alone = ir.Node("", "Gemm", list(node.inputs[:2]), list(node.attributes.values()), name=node.name)
        graph.insert_before(node, alone)
        total = ir.Node("", "Add", [alone.outputs[0], added], name=f"{node.name}.sum")
        graph.insert_before(node, total)
        total.outputs[0].type = node.outputs[0].type
        take_over(node.outputs[0], total.outputs[0])
        graph.remove(node, safe=True)


def _swap_gemm(model: ir.Model, node: ir.Node, weights: NDArray[Any]) -> None:
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    transposed_b = node.attributes.get_int("transB")
    activation = node.inputs[1] if transposed_b else _transpose(node, node.inputs[1])
    matrix = weights if not node.attributes.get_int("transA") else weights.T
    operands = [activation, add_initialiser(model, f"{node.name}.swapped", np.ascontiguousarray(matrix))]
    if bias is not None:
        turned = np.ascontiguousarray(np.atleast_2d(bias).T)
        operands.append(add_initialiser(model, f"{node.name}.swapped_bias", turned))
    attributes = [
        ir.AttrFloat32("alpha", node.attributes.get_float("alpha", 1.0)),
        ir.AttrFloat32("beta", node.attributes.get_float("beta", 1.0)),
        ir.AttrInt64("transA", 0),
        ir.AttrInt64("transB", 1),
    ]
    swapped = ir.Node("", "Gemm", operands, attributes, name=node.name)
    graph = node.graph
    assert graph is not None  # nodes of a model always have one
    graph.insert_before(node, swapped)
    back = ir.Node("", "Transpose", [swapped.outputs[0]], [ir.AttrInt64s("perm", (1, 0))], name=f"{node.name}.back")
    graph.insert_after(swapped, back)
    back.outputs[0].type = node.outputs[0].type
    take_over(node.outputs[0], back.outputs[0])
    graph.remove(node, safe=True)


def _transpose(node: ir.Node, value: ir.Value | None) -> ir.Value:
    transpose = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", (1, 0))], name=f"{node.name}.turn")
    graph = node.graph
    assert graph is not None  # nodes of a model always have one
    graph.insert_before(node, transpose)
    return transpose.outputs[0]
