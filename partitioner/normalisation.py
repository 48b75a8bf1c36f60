"""Fuse normalisations that exporters have taken apart, so that the node runs each as one operator.

    requires  a simplified model of opset >= 21
    ensures   mean, deviation, square root and division are a LayerNormalization; groups that go through an
              InstanceNormalization without gain, and their gain and shift, are a GroupNormalization

Taken apart, their gains are products with constants and would each cost a round trip to the server.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.fusion._layer_norm import layer_normalization_rules

from partitioner.lowering import add_initialiser, constant


def fuse_normalisations(model: ir.Model) -> None:
    """Fuse in place."""
    for node in model.graph:
        if node.op_type == "ReduceMean" and "keepdims" not in node.attributes:
            node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)  # the rules look for it
    rewrite(model, list(layer_normalization_rules))
    for node in list(model.graph):
        if node.op_type == "InstanceNormalization":
            _fuse_groups(model, node)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    common_passes.NameFixPass()(model)


def _fuse_groups(model: ir.Model, node: ir.Node) -> None:
    """Reshape to groups, InstanceNormalization, Reshape back, Mul, Add become GroupNormalization."""
    before, after = _producer(node.inputs[0], "Reshape"), _only_reader(node.outputs[0], "Reshape")
    gains, shifts = constant(node.inputs[1]), constant(node.inputs[2])
    if before is None or after is None or gains is None or shifts is None or np.any(gains != 1) or np.any(shifts != 0):
        return
    product = _only_reader(after.outputs[0], "Mul")
    total = None if product is None else _only_reader(product.outputs[0], "Add")
    source = before.inputs[0]
    if product is None or total is None or source is None or source.shape is None:
        return
    shape = [d if isinstance(d, int) else -1 for d in source.shape]
    if len(shape) < 3 or after.outputs[0].shape != source.shape:
        return
    grouped = before.outputs[0].shape
    if grouped is None or list(grouped)[:2] != [shape[0], len(gains)]:
        return  # the groups are of several samples, or not all of one
    scale, bias = _channel_constant(product, shape), _channel_constant(total, shape)
    if scale is None or bias is None:
        return
    operands = [
        source,
        *(add_initialiser(model, f"{node.name}.{name}", array) for name, array in (("scale", scale), ("bias", bias))),
    ]
    attributes = [
        ir.AttrFloat32("epsilon", node.attributes.get_float("epsilon", 1e-5)),
        ir.AttrInt64("num_groups", len(gains)),
    ]
    fused = ir.Node("", "GroupNormalization", operands, attributes, name=f"{node.name}.groups")
    model.graph.insert_after(total, fused)
    old, new = total.outputs[0], fused.outputs[0]
    new.type, new.shape, name = old.type, old.shape, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = f"{name}.fused", name


def _channel_constant(node: ir.Node, shape: list[int]) -> np.ndarray | None:
    """Return the constant operand of Mul or Add as one number a channel; None if it is anything else."""
    arrays = [array for array in map(constant, node.inputs) if array is not None]
    if len(arrays) != 1 or arrays[0].dtype != np.float32 or arrays[0].ndim > len(shape):
        return None
    array = arrays[0].reshape((1,) * (len(shape) - arrays[0].ndim) + arrays[0].shape)
    if array.size != 1 and array.shape != (1, shape[1], *([1] * (len(shape) - 2))):
        return None
    return np.broadcast_to(array.reshape(-1), (shape[1],)).copy()


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == operator else None


def _only_reader(value: ir.Value, operator: str) -> ir.Node | None:
    """Return the one node that reads a value, if it is such an operator and nothing else reads the value."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != operator:
        return None
    return uses[0].node
