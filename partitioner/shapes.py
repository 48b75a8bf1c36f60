"""Shapes of all values, with the batch axis told apart from the others.

    requires  a model whose inputs have a symbolic first axis
    ensures   for every float32 value that onnx's inference can follow: its shape per sample, if the batch leads it

onnx infers shapes at batch 2 and at batch 3; an axis that changes is the batch axis. A value that has it anywhere but
in front, or whose shape stays unknown, has no shape per sample and can't cross to the server.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir
from onnx import shape_inference

from heinfer.errors import UnsupportedModelError

Shape = tuple[int, ...]


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
    return found


def _at_batch(model: ir.Model, samples: int) -> dict[str, Shape]:
    proto = ir.to_proto(model)
    for value in (*proto.graph.input, *proto.graph.output):
        dims = value.type.tensor_type.shape.dim
        if dims:
            dims[0].ClearField("dim_param")
            dims[0].dim_value = samples
    del proto.graph.value_info[:]
    for value in proto.graph.output:  # inferred anew, not trusted
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError as error:
        raise UnsupportedModelError(f"shapes don't fit together: {str(error).strip().splitlines()[0]}") from error
    return dict(_known(inferred))


def _known(proto: onnx.ModelProto) -> Mapping[str, Shape]:
    shapes = {}
    for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        tensor = value.type.tensor_type
        # Only float32 values are ever encrypted; whatever touches others runs on the node.
        floats = tensor.elem_type == onnx.TensorProto.FLOAT
        if floats and tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            shapes[value.name] = tuple(d.dim_value for d in tensor.shape.dim)
    return shapes
