"""Which operators may run where.

requires  a simplified model whose composite operators are rewritten, and the shapes of its values
ensures   a `Lowered` for every node, or one error that lists every node that can't be placed

`RULES` is the one list of what the server can do; docs/operators.md is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from heinfer.errors import UnsupportedModelError
from partitioner.convolutions import lower_conv, lower_conv_transpose
from partitioner.elementwise import lower_batch_normalization, lower_negation, lower_product, lower_sum
from partitioner.lowering import ON_NODE, Context, Lowered, constant
from partitioner.misfits import blamed
from partitioner.movements import lower_movement, lower_resize, lower_where
from partitioner.pooling import lower_average_pool, lower_cumulative_sum, lower_reduction
from partitioner.products import lower_einsum, lower_gemm, lower_matmul
from partitioner.rewriting import why_left
from partitioner.shapes import Shape


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator is placed.

    Attributes:
        lower: makes its `Lowered`, or refuses.
        note: what the server can do of it, for docs/operators.md.
        weighted: whether it may hold weights.
    """

    lower: Callable[[ir.Node, Context], Lowered]
    note: str
    weighted: bool = False


_ALL = "all attributes"
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "Conv": Rule(lower_conv, "1-D, 2-D, 3-D; all attributes, depthwise and grouped too", weighted=True),
        "ConvTranspose": Rule(lower_conv_transpose, "1-D, 2-D, 3-D; all attributes", weighted=True),
        "Gemm": Rule(lower_gemm, "all attributes; the constant on either side", weighted=True),
        "MatMul": Rule(lower_matmul, "a constant of any rank on either side", weighted=True),
        "Einsum": Rule(
            lower_einsum, "one activation and one constant, any equation; one activation alone", weighted=True
        ),
        "BatchNormalization": Rule(
            lower_batch_normalization,
            "folds into a Conv, ConvTranspose or Gemm in front of it, or through Relu into weights behind it; else a "
            "block of its own",
            weighted=True,
        ),
        "Mul": Rule(
            lower_product, "by constants: folds channel by channel where it can; else a block of its own", weighted=True
        ),
        "Div": Rule(lower_product, "by constants, as Mul", weighted=True),
        "Add": Rule(lower_sum, "of activations, of an activation and a constant"),
        "Sub": Rule(lower_sum, "as Add"),
        "Sum": Rule(lower_sum, "of activations and constants"),
        "Mean": Rule(lower_sum, "of activations and constants"),
        "Neg": Rule(lower_negation, _ALL),
        "AveragePool": Rule(lower_average_pool, "1-D, 2-D, 3-D; all attributes"),
        "GlobalAveragePool": Rule(lower_reduction, _ALL),
        "ReduceMean": Rule(lower_reduction, "axes constant, without the batch"),
        "ReduceSum": Rule(lower_reduction, "axes constant, without the batch"),
        "CumSum": Rule(lower_cumulative_sum, "axis constant, not the batch"),
        "CenterCropPad": Rule(lower_movement, _ALL),
        "Concat": Rule(lower_movement, "of activations; constants are added to zeros in their place"),
        "DepthToSpace": Rule(lower_movement, _ALL),
        "Expand": Rule(lower_movement, "shape constant"),
        "Flatten": Rule(lower_movement, "from the first axis after the batch"),
        "Gather": Rule(lower_movement, "indices constant"),
        "Identity": Rule(lower_movement, _ALL),
        "Pad": Rule(lower_movement, "all modes; pads and value constant"),
        "Reshape": Rule(lower_movement, "shape constant"),
        "Resize": Rule(lower_resize, "to the nearest neighbour; what interpolates runs on the node"),
        "Slice": Rule(lower_movement, "bounds constant"),
        "SpaceToDepth": Rule(lower_movement, _ALL),
        "Squeeze": Rule(lower_movement, _ALL),
        "Tile": Rule(lower_movement, "repeats constant"),
        "Transpose": Rule(lower_movement, _ALL),
        "Trilu": Rule(lower_movement, "k constant"),
        "Unsqueeze": Rule(lower_movement, _ALL),
        "Where": Rule(lower_where, "condition constant; one branch may be constant and finite"),
    }
)

#: Operators that hold learned weights where an input is constant, and that the server lacks: position of that input.
LACKING: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "CausalConvWithState": (1,),
        "ConvInteger": (1,),
        "DeformConv": (1,),
        "GRU": (1,),
        "LSTM": (1,),
        "MatMulInteger": (0, 1),
        "QLinearConv": (3,),
        "QLinearMatMul": (0, 3),
        "RNN": (1,),
    }
)

_FINITE = ("BatchNormalization", "Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul")
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
    for position in LACKING.get(node.op_type, ()):
        if position < len(node.inputs) and constant(node.inputs[position]) is not None:
            reason = why_left(node) or "its weights belong on the server, which has no such operator"
            return context.refuse(node, reason)
    weights = [array for array in map(constant, node.inputs) if array is not None and array.dtype.kind == "f"]
    if node.op_type in _FINITE and any(array.dtype != np.float32 for array in weights):
        return context.refuse(node, f"weights are {weights[0].dtype}; export the model in float32")
    if node.op_type in _FINITE and not all(np.all(np.isfinite(array)) for array in weights):
        return context.refuse(node, "weights hold NaN or infinity")
    if node.op_type in _NUMBERS and any(np.any(np.isnan(array)) for array in weights):
        return context.refuse(node, "weights hold NaN or infinity")
    rule = RULES.get(node.op_type)
    if rule is None or node.domain not in ("", "ai.onnx") or (not weights and _is_empty(node, context)):
        return ON_NODE
    with blamed(node):
        return rule.lower(node, context)


def _is_empty(node: ir.Node, context: Context) -> bool:
    """Whether an operator's result has no elements."""
    return any(0 in (context.shape(value) or ()) for value in node.outputs)
