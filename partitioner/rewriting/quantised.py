"""Rewrite quantised operators as float ones.

    requires  shapes of the values
    ensures   QLinearConv, QLinearMatMul, ConvInteger and MatMulInteger with constant weights are Conv and MatMul of
              float32 weights; no constant is dequantised; DynamicQuantizeLinear is applied sample by sample

With s a scale and z a zero point, formulas of the ONNX specification of the operators:

    DequantizeLinear    s (q - z) of a constant q is a constant
    QLinearConv         QuantizeLinear(Conv(DequantizeLinear(x), s_w (w - z_w), s_x s_w b)); it pads with z_x, which is
                        dequantised to the zero that Conv pads with
    QLinearMatMul       QuantizeLinear(MatMul(DequantizeLinear(a), s_b (b - z_b))), or the same with a constant a
    ConvInteger         Cast(Round(Conv(Cast(x) - z_x, w - z_w))), exact in float32 while sums are below 2^24; under
    MatMulInteger       encryption, the nearest integer of a result with an error
    DynamicQuantizeLinear
                        s = (max(x, 0) - min(x, 0)) / 255, z = round(-min(x, 0) / s), q = round(x / s) + z, saturated
                        in [0, 255], with extremes of every sample's own, as if samples came one by one

QuantizeLinear runs on the node, where a value at a tie may be rounded the other way than in integer arithmetic: a
difference of one quantisation step. Products of two quantised activations are left, they have no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import optimizer

from partitioner.lowering import constant
from partitioner.rewriting.emitter import Emitter

#: Operators that a constant goes through on the way from its quantised form to a layer.
_DEQUANTISING = ("QuantizeLinear", "DequantizeLinear", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
_NO_LIMIT = 2**62
#: Of uint8, to which DynamicQuantizeLinear quantises.
_LARGEST = 255


def dequantise_constants(model: ir.Model) -> None:
    """Fold the dequantisation of constants, and what only moves them afterwards, whatever their size."""
    optimizer.fold_constants_ir(
        model, output_size_limit=_NO_LIMIT, should_fold=lambda node: node.op_type in _DEQUANTISING
    )


def obstacle(node: ir.Node) -> str | None:
    """Return why a quantised operator with constant weights can't be rewritten, None if it can or has none."""
    position = _weights_position(node)
    if position is None:
        return None
    if node.op_type in ("ConvInteger", "MatMulInteger"):
        return _obstacle_of_integer(node, position)
    return _obstacle_of_linear(node, position)


def _obstacle_of_integer(node: ir.Node, position: int) -> str | None:
    points = _input(node, 3 - position)
    if points is not None and (points.shape is None or (points.shape.rank() == 1 and points.shape[0] != 1)):
        return "its activation has a zero point for every row or column; quantise it with one"
    return _computed({"zero point of its weights": _input(node, 2 + position)})


def _obstacle_of_linear(node: ir.Node, position: int) -> str | None:
    scale_of_activation = node.inputs[4 - position]
    scales = [array for array in map(constant, (node.inputs[position + 1], scale_of_activation)) if array is not None]
    if any(scale.dtype != np.float32 for scale in scales):
        return f"scales are {scales[0].dtype}; export the model in float32"
    scale = constant(scale_of_activation)
    if scale is not None and scale.size != 1:
        return "its activation has a scale for every row or column; quantise it with one"
    needed = {
        "scale of its weights": node.inputs[position + 1],
        "zero point of its weights": node.inputs[position + 2],
        "scale of its activation": scale_of_activation,
        "bias": _input(node, 8),
    }
    return _computed(needed)


def _computed(needed: Mapping[str, ir.Value | None]) -> str | None:
    """Return a refusal of the first value that should be constant and is not."""
    found = [name for name, value in needed.items() if value is not None and constant(value) is None]
    return f"the {found[0]} is computed from other values; export it with a constant" if found else None


def rewrite_quantised(node: ir.Node) -> None:
    """Replace a quantised operator that `obstacle` has no objection to; leave one that has no weights."""
    position = _weights_position(node)
    if node.op_type == "DynamicQuantizeLinear":
        _quantise_by_sample(node)
    elif position is not None and node.op_type in ("ConvInteger", "MatMulInteger"):
        _rewrite_integer(node, position)
    elif position is not None:
        _rewrite_linear(node, position)


def _weights_position(node: ir.Node) -> int | None:
    """Return which input holds the weights; None if there are none."""
    candidates = {"QLinearConv": (3,), "QLinearMatMul": (3, 0), "ConvInteger": (1,), "MatMulInteger": (1, 0)}
    found = [p for p in candidates.get(node.op_type, ()) if constant(node.inputs[p]) is not None]
    return found[0] if found else None


def _rewrite_linear(node: ir.Node, position: int) -> None:
    emitter, activation = Emitter(node), 3 - position
    scale, point = _array(node, position + 1), _array(node, position + 2)
    axis = 0 if node.op_type == "QLinearConv" or position == 0 else -1
    weights = _dequantised(_array(node, position), scale, point, axis)
    source = emitter.emit(
        "DequantizeLinear", node.inputs[activation], *(_scalar(emitter, node.inputs[activation + i]) for i in (1, 2))
    )
    operands = [source, emitter.constant(weights)]
    if node.op_type == "QLinearConv":
        if _input(node, 8) is not None:
            bias_scale = _array(node, 1).astype(np.float64).ravel() * scale.ravel()
            operands.append(emitter.constant((bias_scale * _array(node, 8)).astype(np.float32)))
        result = emitter.emit("Conv", *operands, **node.attributes)
    else:
        result = emitter.emit("MatMul", *(operands if position == 3 else operands[::-1]))
    emitter.replace(emitter.emit("QuantizeLinear", result, *(_scalar(emitter, node.inputs[i]) for i in (6, 7))))


def _rewrite_integer(node: ir.Node, position: int) -> None:
    emitter, activation = Emitter(node), 1 - position
    points = _input(node, 2 + position)
    axis = 0 if node.op_type == "ConvInteger" or position == 0 else -1
    zero = np.zeros((), np.float32) if points is None else _array(node, 2 + position)
    weights = emitter.constant(_dequantised(_array(node, position), np.ones((), np.float32), zero, axis))
    source = emitter.emit("Cast", node.inputs[activation], to=ir.DataType.FLOAT)
    offset = _input(node, 2 + activation)
    array = constant(offset)
    if array is not None and np.any(array):
        source = emitter.emit("Sub", source, emitter.constant(array.astype(np.float32)))
    elif offset is not None and array is None:
        source = emitter.emit("Sub", source, emitter.emit("Cast", offset, to=ir.DataType.FLOAT))
    if node.op_type == "ConvInteger":
        result = emitter.emit("Conv", source, weights, **node.attributes)
    else:
        result = emitter.emit("MatMul", *((source, weights) if position == 1 else (weights, source)))
    emitter.replace(emitter.emit("Cast", emitter.emit("Round", result), to=ir.DataType.INT32))


def _quantise_by_sample(node: ir.Node) -> None:
    source = node.inputs[0]
    if source is None or source.shape is None or any(value.is_graph_output() for value in node.outputs):
        return
    rank, first = source.shape.rank(), source.shape[:1]
    if rank < 2 or any(isinstance(size, int) and size != 1 for size in first):
        return  # the first axis is not the batch
    emitter = Emitter(node)
    axes, zero, largest = emitter.integers(*range(1, rank)), emitter.number(0), emitter.number(_LARGEST)
    low = emitter.emit("Min", emitter.emit("ReduceMin", source, axes, keepdims=1), zero)
    high = emitter.emit("Max", emitter.emit("ReduceMax", source, axes, keepdims=1), zero)
    width = emitter.emit("Sub", high, low)
    empty = emitter.emit("Equal", width, zero)
    scale = emitter.emit("Where", empty, emitter.number(1), emitter.emit("Div", width, largest))
    point = emitter.emit("Round", emitter.emit("Neg", emitter.emit("Div", low, scale)))
    level = emitter.emit("Add", emitter.emit("Round", emitter.emit("Div", source, scale)), point)
    quantised = emitter.emit("Clip", level, zero, largest)
    quantised, points = (emitter.emit("Cast", value, to=ir.DataType.UINT8) for value in (quantised, point))
    emitter.replace(quantised, scale, points)


def _dequantised(levels: NDArray[Any], scale: NDArray[Any], points: NDArray[Any], axis: int) -> NDArray[np.float32]:
    """Return s (q - z), where a scale and zero points with one axis run along the given one of q."""
    along = [1] * levels.ndim
    along[axis] = -1
    scale, points = (array.reshape(along) if array.ndim == 1 else array for array in (scale, points))
    difference = levels.astype(np.float64) - points.astype(np.float64)
    return np.asarray(scale * difference, np.float32)


def _scalar(emitter: Emitter, value: ir.Value | None) -> ir.Value | None:
    """Return a constant with one element without its axes, as quantisation of a whole tensor expects it."""
    array = constant(value)
    return value if array is None or array.size != 1 else emitter.constant(array.reshape(()))


def _array(node: ir.Node, position: int) -> NDArray[Any]:
    array = constant(node.inputs[position])
    assert array is not None  # `obstacle` has verified it
    return array


def _input(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None
