"""Remove operators that change nothing.

    requires  shapes of the values
    ensures   no Sum, Max, Min, Mean or Concat of one operand; no Cast to the same type; no Expand, Reshape, Tile,
              Slice, Pad or Transpose that leaves everything in its place; no Mul or Div by 1, no Add or Sub of 0, where
              the constant does not enlarge the result

Source: the ONNX specification of the operators. Exporters write GroupNormalization with a product by ones, for example.
Cast and Transpose go by onnxscript's rules. A Slice of the first element of an axis of size 1 stays: the axis
may be the batch's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import no_op_cast_rule, no_op_transpose_rule

from partitioner.lowering import constant


def remove_identities(model: ir.Model) -> None:
    """Remove them in place."""
    rewrite(model, [no_op_cast_rule, no_op_transpose_rule])
    for node in list(model.graph):
        kept = _KEPT_OPERAND.get(node.op_type, _never)(node)
        if kept is not None and node.domain in ("", "ai.onnx"):
            identity = ir.Node("", "Identity", [node.inputs[kept]], name=node.name)
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [identity], node.outputs, identity.outputs
            )
    common_passes.IdentityEliminationPass()(model)


def _never(node: ir.Node) -> int | None:
    return None


def _single(node: ir.Node) -> int | None:
    return 0 if len(node.inputs) == 1 else None


def _same_shape(node: ir.Node, operand: int) -> bool:
    source, result = node.inputs[operand], node.outputs[0]
    return source is not None and source.shape is not None and source.shape == result.shape


def _by_shape(node: ir.Node) -> int | None:
    return 0 if _same_shape(node, 0) else None


def _tile(node: ir.Node) -> int | None:
    repeats = constant(node.inputs[1])
    return 0 if repeats is not None and np.all(repeats == 1) else None


def _pad(node: ir.Node) -> int | None:
    pads = constant(node.inputs[1])
    return 0 if pads is not None and not np.any(pads) else None


def _slice(node: ir.Node) -> int | None:
    starts, ends, *others = (constant(value) for value in node.inputs[1:])
    if starts is None or ends is None or any(other is None for other in others) or not _same_shape(node, 0):
        return None
    steps_are_one = len(others) < 2 or np.all(others[1] == 1)
    # Of an axis of size 1, [0:1] may be the first sample, [0:] is all of them.
    return 0 if steps_are_one and not np.any(starts) and np.all(ends > 1) else None


def _neutral(neutral: int, commutes: bool) -> Callable[[ir.Node], int | None]:
    """Return a function that tells which operand a node leaves as it is, the other being neutral."""

    def kept(node: ir.Node) -> int | None:
        for operand in (0, 1) if commutes else (0,):
            array = constant(node.inputs[1 - operand])
            if array is not None and np.all(array == neutral) and _same_shape(node, operand):
                return operand
        return None

    return kept


_KEPT_OPERAND: dict[str, Callable[[ir.Node], int | None]] = {
    "Sum": _single,
    "Max": _single,
    "Min": _single,
    "Mean": _single,
    "Concat": _single,
    "Expand": _by_shape,
    "Reshape": _by_shape,
    "Tile": _tile,
    "Pad": _pad,
    "Slice": _slice,
    "Mul": _neutral(1, commutes=True),
    "Div": _neutral(1, commutes=False),
    "Add": _neutral(0, commutes=True),
    "Sub": _neutral(0, commutes=False),
}
