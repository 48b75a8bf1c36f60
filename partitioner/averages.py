"""Average before channels are mixed, not behind: the same numbers from fewer uploads.

    requires  a simplified, folded model
    ensures   no AveragePool or GlobalAveragePool alone reads a 1x1 convolution, where they commute and values are saved

    x --> Conv 1x1 --> AveragePool      becomes      x --> AveragePool --> Conv 1x1

A 1x1 convolution acts on channels, an average on the plane, so that they commute; the bias does too, being its own
average, unless zeros around the plane are counted. The server then gets averages: a quarter of the values with 2x2
windows. The transitions of DenseNet-121 are of that kind (Huang et al. 2017, table 1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from partitioner.folding import WEIGHTED
from partitioner.homogeneous import NOTE
from partitioner.lowering import constant, operand
from partitioner.shapes import Shape, infer_shapes


def average_first(model: ir.Model, pinned: Collection[ir.Node] = ()) -> None:
    """Move averages in place.

    Args:
        model: the graph.
        pinned: operators that the user has pinned; nothing about them changes.
    """
    while _average_once(model, frozenset(pinned)):
        common_passes.TopologicalSortPass()(model)


def _average_once(model: ir.Model, pinned: frozenset[ir.Node]) -> bool:
    """Move averages in front of one convolution each; say whether anything has changed."""
    shapes, changed = infer_shapes(model), False
    for node in list(model.graph):
        mix = operand(node, 0).producer() if _averages(node) else None
        if mix is not None and not {node, mix} & pinned and _commute(mix, node, shapes):
            _swap(mix, node)
            changed = True
    return changed


def _averages(node: ir.Node) -> bool:
    """Whether a node averages windows of a plane, without counting zeros around it."""
    if node.op_type != "AveragePool":
        return node.op_type == "GlobalAveragePool"
    if not node.attributes.get_int("count_include_pad", 0):
        return True
    padded = any(node.attributes.get_ints("pads", ())) or node.attributes.get_int("ceil_mode", 0) != 0
    return not padded and node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _commute(mix: ir.Node, average: ir.Node, shapes: Mapping[str, Shape]) -> bool:
    """Whether a convolution only mixes channels, is read by the average alone, and reads what no other weights do."""
    weights = constant(mix.inputs[1]) if mix.op_type == "Conv" else None
    if weights is None or any(constant(value) is None for value in mix.inputs[1:] if value is not None):
        return False
    steps = (*mix.attributes.get_ints("strides", ()), *weights.shape[2:])
    if any(step != 1 for step in steps) or any(mix.attributes.get_ints("pads", ())):
        return False
    read, mixed, result = operand(mix, 0), mix.outputs[0], average.outputs[0]
    if (
        mixed.is_graph_output()
        or len(list(mixed.uses())) != 1
        or any(str(v.name) not in shapes for v in (read, result))
    ):
        return False
    fewer = prod(shapes[str(result.name)][1:]) < prod(shapes[str(read.name)][1:])
    return fewer and not any(use.node.op_type in WEIGHTED for use in read.uses() if use.node is not mix)


def _swap(mix: ir.Node, average: ir.Node) -> None:
    read, mixed, result = operand(mix, 0), mix.outputs[0], average.outputs[0]
    result.replace_all_uses_with(mixed, replace_graph_outputs=True)
    average.replace_input_with(0, read)
    mix.replace_input_with(0, result)
    result.name, mixed.name = mixed.name, result.name
    result.type, mixed.type = mixed.type, result.type
    result.shape, mixed.shape = None, result.shape
    average.meta[NOTE] = "moved in front of a 1x1 convolution"
