"""Shapes of all values, with the batch axis told apart from the others.

    requires  a model whose inputs have a symbolic first axis
    ensures   for every float32 value that onnx's inference can follow: its shape per sample, if the batch leads it

onnx infers shapes at batch 2 and at batch 3; an axis that changes is the batch axis. A value that has it anywhere but
in front, or whose shape stays unknown, has no shape per sample and can't cross to the server. Inference sees types and
shapes of weights and not their values, so that it costs the same whatever their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import onnx
import onnx_ir as ir
from onnx import shape_inference

from heinfer.errors import Offence, UnsupportedModelError
from heinfer.operators.steps import LARGEST_VALUE

Shape = tuple[int, ...]

#: Constants of at most this many elements keep their values in inference: targets of Reshape, axes, pads.
DATA_LIMIT = 1024
#: Operators that keep a shape, and that onnx defines as functions and has no inference for.
SAME_SHAPE = ("GroupNormalization", "MeanVarianceNormalization")


def infer_shapes(model: ir.Model) -> dict[str, Shape]:
    """Return the shape per sample of every value that the batch leads.

    Raises:
        UnsupportedModelError: onnx's inference finds the model inconsistent.
    """
    at_two, at_three = _at_batch(model, 2), _at_batch(model, 3)
    found = {}
    for name, shape in at_two.items():
        other = at_three.get(name)
        if shape[:1] == (2,) and other == (3, *shape[1:]):
            found[name] = shape[1:]
    _refuse_large(found)
    return found


def check_consistency(model: ir.Model) -> None:
    """Check types and shapes at a batch of 1, before any pass relies on them.

    Raises:
        UnsupportedModelError: onnx's inference finds the model inconsistent, or a value that is too large for a block.
    """
    varying = _varying(model)
    _refuse_large({name: shape for name, shape in _at_batch(model, 1).items() if name in varying})


def _varying(model: ir.Model) -> set[str]:
    """Return the names of values that depend on the inputs: the others are weights, which may be larger."""
    found = set(model.graph.inputs)
    for node in model.graph:
        if any(value in found for value in node.inputs):
            found.update(node.outputs)
    return {str(value.name) for value in found}


def _refuse_large(shapes: Mapping[str, Shape]) -> None:
    large = [name for name, shape in shapes.items() if prod(shape) > LARGEST_VALUE]
    if large:
        offences = [Offence(name, "value", f"it has {prod(shapes[name])} elements a sample") for name in large]
        raise UnsupportedModelError(f"values are too large: expected {LARGEST_VALUE} elements at most", offences)


def infer_types(model: ir.Model) -> dict[str, int]:
    """Return the element type (an onnx.TensorProto.DataType) of every value that onnx's inference can follow."""
    graph = shape_inference.infer_shapes(_without_weights(model, 1)).graph
    return {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}


def _at_batch(model: ir.Model, samples: int) -> dict[str, Shape]:
    proto = _without_weights(model, samples)
    try:
        inferred = shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except (shape_inference.InferenceError, onnx.checker.ValidationError, ValueError) as error:
        raise UnsupportedModelError(f"shapes don't fit together: {str(error).strip().splitlines()[0]}") from error
    return dict(_known(inferred))


def _without_weights(model: ir.Model, samples: int) -> onnx.ModelProto:
    """Serialise a model for inference: a batch of `samples`, large constants as inputs of their type and shape."""
    proto = onnx.ModelProto(ir_version=model.ir_version)
    proto.opset_import.extend(onnx.helper.make_opsetid(domain, v) for domain, v in model.opset_imports.items())
    graph = proto.graph
    graph.name = "shapes"
    graph.node.extend(map(inferable_node, model.graph))
    for value in model.graph.inputs:
        described = ir.serde.serialize_value(value)
        if described.type.tensor_type.shape.dim:
            described.type.tensor_type.shape.dim[0].dim_value = samples
        graph.input.append(described)
    for value in model.graph.outputs:  # inferred anew, not trusted
        graph.output.add(name=str(value.name)).type.CopyFrom(serialized_type(value, None))
    for name, value in model.graph.initializers.items():
        data = small_constant(value)
        if data is not None:
            graph.initializer.append(data)
        else:
            graph.input.add(name=name).type.CopyFrom(serialized_type(value, constant_shape(value)))
    return proto


def inferable_node(node: ir.Node) -> onnx.NodeProto:
    """Serialise a node for inference; Identity stands for the operators of `SAME_SHAPE`."""
    proto = ir.serde.serialize_node(node)
    if node.op_type in SAME_SHAPE:
        return onnx.helper.make_node("Identity", proto.input[:1], proto.output)
    return proto


def serialized_type(value: ir.Value, shape: Shape | None) -> onnx.TypeProto:
    """Return a value's type with a shape of our choice, None for an unknown one."""
    if value.type is None:
        return onnx.TypeProto()
    proto = ir.serde.serialize_type(value.type)
    if shape is not None:
        ir.serde.serialize_shape_into(proto, ir.Shape(shape))
    return proto


def constant_shape(value: ir.Value) -> Shape | None:
    """Return the shape of a constant value, None for anything else."""
    return None if value.const_value is None else tuple(value.const_value.shape.numpy())


def small_constant(value: ir.Value) -> onnx.TensorProto | None:
    """Serialise a constant that inference may have to read, None for a large one and for anything else."""
    tensor = value.const_value
    if tensor is None or tensor.size > DATA_LIMIT:
        return None
    proto = ir.serde.serialize_tensor(tensor)
    proto.name = str(value.name)
    return proto


def _known(proto: onnx.ModelProto) -> Mapping[str, Shape]:
    shapes = {}
    for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        tensor = value.type.tensor_type
        # Only float32 values are ever encrypted; whatever touches others runs on the node.
        floats = tensor.elem_type == onnx.TensorProto.FLOAT
        if floats and tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            shapes[value.name] = tuple(d.dim_value for d in tensor.shape.dim)
    return shapes
