"""Which operators may run where.

requires  a simplified model and the shapes of its values
ensures   a `Lowered` for every node, or one error that lists every node that can't be placed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from heinfer.errors import UnsupportedModelError
from partitioner.free_operators import lower_average_pool, lower_movement, lower_sum
from partitioner.linear_operators import (
    lower_batch_normalization,
    lower_conv,
    lower_gemm,
    lower_matmul,
    lower_product,
)
from partitioner.lowering import ON_NODE, Context, Lowered, constant
from partitioner.shapes import Shape

_LOWERINGS: Mapping[str, Callable[[ir.Node, Context], Lowered]] = {
    "Conv": lower_conv,
    "Gemm": lower_gemm,
    "MatMul": lower_matmul,
    "BatchNormalization": lower_batch_normalization,
    "Mul": lower_product,
    "Div": lower_product,
    "Add": lower_sum,
    "Sub": lower_sum,
    "Sum": lower_sum,
    "AveragePool": lower_average_pool,
    "GlobalAveragePool": lower_average_pool,
    "Concat": lower_movement,
    "Flatten": lower_movement,
    "Identity": lower_movement,
    "Pad": lower_movement,
    "Reshape": lower_movement,
    "Slice": lower_movement,
    "Transpose": lower_movement,
}

#: Operators that hold learned weights where an input is constant, and that the server lacks: position of that input.
_NOT_YET: Mapping[str, tuple[int, ...]] = {
    "ConvTranspose": (1,),
    "ConvInteger": (1,),
    "DeformConv": (1,),
    "Einsum": (0, 1),
    "GRU": (1,),
    "LSTM": (1,),
    "MatMulInteger": (0, 1),
    "QLinearConv": (3,),
    "QLinearMatMul": (0, 3),
    "RNN": (1,),
}


_FINITE = ("BatchNormalization", "Conv", "Gemm", "MatMul")
#: Operators that take infinity, as in masks, but never NaN.
_NUMBERS = ("Add", "Div", "Mul", "Sub")


def classify(model: ir.Model, shapes: Mapping[str, Shape]) -> dict[ir.Node, Lowered]:
    """Return where each node may run and how.

    Raises:
        UnsupportedModelError: weighted operators that the server lacks; lists them all.
    """
    context = Context(shapes)
    found = {node: _lower(node, context) for node in model.graph}
    if context.offences:
        raise UnsupportedModelError(f"{len(context.offences)} operators can't be partitioned:", context.offences)
    if not any(lowered.placement.pinned_to_server for lowered in found.values()):
        raise UnsupportedModelError("no operator has learned weights: there is nothing to evaluate under encryption")
    return found


def _lower(node: ir.Node, context: Context) -> Lowered:
    for position in _NOT_YET.get(node.op_type, ()):
        if position < len(node.inputs) and constant(node.inputs[position]) is not None:
            return context.refuse(node, "its weights belong on the server, which has no such operator yet")
    weights = [array for array in map(constant, node.inputs) if array is not None and array.dtype.kind == "f"]
    if node.op_type in ("Conv", "Gemm", "MatMul") and any(array.dtype != np.float32 for array in weights):
        return context.refuse(node, f"weights are {weights[0].dtype}; export the model in float32")
    if node.op_type in _FINITE and not all(np.all(np.isfinite(array)) for array in weights):
        return context.refuse(node, "weights hold NaN or infinity")
    if node.op_type in _NUMBERS and any(np.any(np.isnan(array)) for array in weights):
        return context.refuse(node, "weights hold NaN or infinity")
    lowering = _LOWERINGS.get(node.op_type)
    return ON_NODE if lowering is None or node.domain not in ("", "ai.onnx") else lowering(node, context)
