"""Bring a model with static shapes into its plainest form.

    requires  a model whose inputs have static shapes, functions inlined
    ensures   what follows from shapes and constants alone is an initialiser (the Shape, Gather, Concat and
              ConstantOfShape idioms of exporters among it); no Constant, Identity or Dropout; every node and value has
              a name of its own; shapes and types as far as onnx's inference goes

Folding, elimination and inference are those of onnxscript, onnx-ir and onnx.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript import optimizer
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import dropout_inference_rule, dropout_zero_rule

from heinfer.errors import UnsupportedModelError
from partitioner.shapes import SAME_SHAPE

#: Quantised constants stay recognisable: `partitioner.rewriting` turns them into weights.
_KEPT = ("DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear")
#: An operator on constants alone whose result has more elements than its operands is left from here on.
_LARGEST = 2**27


def simplify(model: ir.Model) -> None:
    """Simplify in place, until nothing changes."""
    common_passes.RemoveInitializersFromInputsPass()(model)
    nodes = len(model.graph)
    while nodes != (nodes := _fold_once(model)) or _complete_shapes(model):
        pass
    rewrite(model, [dropout_inference_rule, dropout_zero_rule])
    tidy(model)


def tidy(model: ir.Model) -> None:
    """Remove what nothing reads, put nodes in order, and give every node and value a unique name."""
    common_passes.IdentityEliminationPass()(model)
    common_passes.RemoveInitializersFromInputsPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    common_passes.NameFixPass()(model)


def restore_results(model: ir.Model, names: Sequence[str]) -> None:
    """Give every result its name again: where identities are eliminated, equal results become one value.

    Args:
        model: the model.
        names: of its results, in order, when it was read.
    """
    for position, name in enumerate(names):
        value = model.graph.outputs[position]
        if value.name != name:
            identity = ir.Node("", "Identity", [value], name=f"{name}.result")
            result = identity.outputs[0]
            result.name, result.type, result.shape = name, value.type, value.shape
            model.graph.append(identity)
            model.graph.outputs[position] = result


def _fold_once(model: ir.Model) -> int:
    """Fold along the graph; return the number of nodes that are left."""
    lift = common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
    lift(model)
    try:
        with np.errstate(all="ignore"):  # masks are made of infinities
            optimizer.fold_constants_ir(
                model, onnx_shape_inference=True, output_size_limit=_LARGEST, should_fold=_folds_at_any_size
            )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"constants of the model can't be computed: {error}") from error
    lift(model)
    tidy(model)
    return len(model.graph)


def _complete_shapes(model: ir.Model) -> bool:
    """Give results of operators that onnx has no inference for the shapes of what they read; say whether any is new."""
    found = False
    for node in model.graph:
        value, result = (node.inputs[0] if node.inputs else None), node.outputs[0]
        if node.op_type in SAME_SHAPE and value is not None and value.shape is not None and result.shape is None:
            result.shape, result.type, found = value.shape.copy(), value.type, True
    return found


def _folds_at_any_size(node: ir.Node) -> bool | None:
    """Fold weights too, which onnxscript leaves as operators by default."""
    return None if node.op_type in _KEPT else True
