"""Bring a model to one opset version.

    requires  a checked model without local functions
    ensures   opset 21, or the newer one that the model came with

Models of opset 7 to 20 are converted by onnx. It keeps the meaning of all operators but one: Upsample and Resize of
opset 10 and before map an output position to position / scale, while Resize has mapped the middle of pixels by default
since opset 11 (https://onnx.ai/onnx/operators/onnx__Resize.html). So the old ones are given their mapping here; how it
rounds, the specification of opset 10 leaves open, and onnxruntime decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import onnx
from onnx import numpy_helper, version_converter

from heinfer.errors import UnsupportedModelError
from partitioner.shapes import DATA_LIMIT
from partitioner.tensors import put_inputs

#: Models of older opsets are converted to this one; newer ones are taken as they are.
OPSET = 21
#: onnx has no operators before this version that it could convert.
OLDEST = 7
#: The last opset whose Resize has no coordinate_transformation_mode.
_WITHOUT_MAPPING = 10
STANDARD_DOMAINS = ("", "ai.onnx")


def convert(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model that is older than `OPSET`.

    Raises:
        UnsupportedModelError: older than `OLDEST`, newer than the installed onnx, or onnx can't convert an operator.
    """
    for imported in proto.opset_import:
        if imported.domain in STANDARD_DOMAINS:
            imported.domain = ""  # two names of one domain
    version = max((o.version for o in proto.opset_import if not o.domain), default=0)
    newest = onnx.defs.onnx_opset_version()
    if version > newest:
        raise UnsupportedModelError(f"opset {version} is newer than {newest}, the newest of the installed onnx")
    if version >= OPSET:
        return proto
    if version < OLDEST:
        raise UnsupportedModelError(f"opset {version} is too old: expected {OLDEST} at least; export the model again")
    weights = _take_weights(proto)
    try:
        converted = version_converter.convert_version(proto, OPSET)
    except (RuntimeError, ValueError, version_converter.ConvertError) as error:
        raise UnsupportedModelError(f"opset {version} can't be converted to {OPSET}: {error}") from error
    converted.graph.initializer.extend(weights)
    if version <= _WITHOUT_MAPPING:
        constants = {tensor.name: tensor for tensor in converted.graph.initializer}
        for node in converted.graph.node:
            if node.op_type == "Resize":
                _map_as_before(node, constants)
    return converted


def _take_weights(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Leave inputs in place of large constants, which onnx would copy several times; return these."""
    weights = [tensor for tensor in proto.graph.initializer if prod(tensor.dims) > DATA_LIMIT]
    put_inputs(proto.graph, {tensor.name: (tensor.data_type, tensor.dims) for tensor in weights})
    return weights


def _map_as_before(resize: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> None:
    """Set the mapping of opset 10: position / scale; to the neighbour below, but above where the picture shrinks."""
    scales = constants.get(resize.input[2])
    shrinks = scales is not None and bool(np.any(numpy_helper.to_array(scales) < 1))
    mapping = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil" if shrinks else "floor"}
    kept = [attribute for attribute in resize.attribute if attribute.name not in mapping]
    del resize.attribute[:]
    resize.attribute.extend(kept)
    resize.attribute.extend(onnx.helper.make_attribute(name, mode) for name, mode in mapping.items())
