"""Read an ONNX file and bring it into the form that the other passes expect.

    requires  a file
    ensures   a checked model of one opset version, functions inlined, constants folded, no Identity or Dropout, and the
              batch axis symbolic on every input and output

Folding, inlining and opset conversion are those of onnx, onnx-ir and onnxscript.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import google.protobuf.message
import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnx import version_converter
from onnxscript import optimizer
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import dropout_inference_rule, dropout_zero_rule

from heinfer.errors import Offence, UnsupportedModelError

#: Models of older opsets are converted to this one; newer ones are taken as they are.
OPSET = 21
#: The first version of the file format that may hold that opset.
IR_VERSION = 10
BATCH = "batch"
_STANDARD_DOMAINS = ("", "ai.onnx")
_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")


@dataclass(frozen=True, slots=True)
class Imported:
    """A model as it came and as the passes see it.

    Attributes:
        name: file name without its ending, or the folder's name for a file called model.onnx.
        content: the original, serialised, weights included.
        fixed_batch: whether the original takes exactly one sample.
        model: the graph that the passes work on.
    """

    name: str
    content: bytes
    fixed_batch: bool
    model: ir.Model

    @property
    def sha256(self) -> str:
        """Digest of the original."""
        return hashlib.sha256(self.content).hexdigest()


def import_model(path: Path) -> Imported:
    """Read, check, convert, inline and fold a model.

    Raises:
        UnsupportedModelError: not ONNX, or something in it that is never taken (control flow, custom domains, training
            mode, a fixed batch size above 1, axes that stay dynamic).
    """
    proto = _read(path)
    try:
        content = proto.SerializeToString()
    except (ValueError, google.protobuf.message.EncodeError) as error:
        raise UnsupportedModelError(f"{path}: models above 2 GiB are not supported yet") from error
    _refuse(proto)
    fixed_batch = _batch_is_fixed(proto)
    model = _parse(_convert(_inline(proto)))
    # Below version 4 an initialiser has to be an input as well, which the passes undo.
    model.ir_version = max(model.ir_version, IR_VERSION)
    common_passes.InlinePass()(model)
    _name_nodes(model)
    if not fixed_batch:
        _make_symbolic(model)
    _simplify(model)
    if fixed_batch:
        _make_symbolic(model)
        _free_reshapes(model)
        _simplify(model)
    name = path.stem if path.stem != "model" else path.resolve().parent.name
    return Imported(name, content, fixed_batch, model)


def _read(path: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load_model(path, format="protobuf")  # whatever the name's ending
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"{error.filename or path} does not exist") from error
    except (google.protobuf.message.DecodeError, onnx.checker.ValidationError, OSError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"{path} is not an ONNX model, or it is truncated: {error}") from error
    if not proto.graph.node or not proto.opset_import:
        raise UnsupportedModelError(f"{path} is not an ONNX model, or it is truncated: it has no operators")
    return proto


def _refuse(proto: onnx.ModelProto) -> None:
    """Refuse what is never taken, all of it at once, before the checker stops at the first."""
    local = {(f.domain, f.name) for f in proto.functions}
    offences = []
    for position, node in enumerate([*proto.graph.node, *(n for f in proto.functions for n in f.node)]):
        name = node.name or (node.output[0] if node.output else f"node {position}")
        if node.op_type in _CONTROL_FLOW and node.domain in _STANDARD_DOMAINS:
            offences.append(Offence(name, node.op_type, "control flow is not supported; export the model without it"))
        elif node.domain not in _STANDARD_DOMAINS and (node.domain, node.op_type) not in local:
            offences.append(
                Offence(name, f"{node.domain}.{node.op_type}", "custom operator; export with standard ONNX operators")
            )
        elif node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
            offences.append(Offence(name, node.op_type, "in training mode; export in evaluation mode"))
    if offences:
        raise UnsupportedModelError(f"{len(offences)} operators can't be partitioned:", offences)
    try:
        onnx.checker.check_model(proto)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"onnx refuses the model: {str(error).strip().splitlines()[0]}") from error


def _batch_is_fixed(proto: onnx.ModelProto) -> bool:
    """Whether the first axis is fixed at 1; refuse inputs that have no usable batch axis."""
    initialisers = {i.name for i in proto.graph.initializer}
    fixed, offences = [], []
    for value in proto.graph.input:
        if value.name in initialisers:
            continue
        dims = value.type.tensor_type.shape.dim
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape") or not dims:
            offences.append(Offence(value.name, "input", "has no batch axis: expected a tensor with samples first"))
            continue
        if dims[0].HasField("dim_value") and dims[0].dim_value != 1:
            offences.append(
                Offence(
                    value.name, "input", f"batch size fixed at {dims[0].dim_value}; export with 1 or a symbolic axis"
                )
            )
        dynamic = [i for i, d in enumerate(dims) if i and not (d.HasField("dim_value") and d.dim_value > 0)]
        if dynamic:
            offences.append(Offence(value.name, "input", f"axes {dynamic} are dynamic; export with fixed sizes"))
        fixed.append(dims[0].HasField("dim_value"))
    if offences:
        raise UnsupportedModelError("the model's inputs can't be used:", offences)
    if not fixed:
        raise UnsupportedModelError("the model has no inputs")
    return any(fixed)


def _inline(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Inline local functions, which onnx's version converter would drop."""
    return onnx.inliner.inline_local_functions(proto) if proto.functions else proto


def _convert(proto: onnx.ModelProto) -> onnx.ModelProto:
    version = max(o.version for o in proto.opset_import if o.domain in _STANDARD_DOMAINS)
    if version >= OPSET:
        return proto
    try:
        return version_converter.convert_version(proto, OPSET)
    except RuntimeError as error:
        raise UnsupportedModelError(f"opset {version} can't be converted to {OPSET}: {error}") from error


def _parse(proto: onnx.ModelProto) -> ir.Model:
    try:
        return ir.from_proto(proto)
    except ir.serde.SerdeError as error:
        raise UnsupportedModelError(f"not a valid ONNX model: {str(error).splitlines()[0]}") from error


def _simplify(model: ir.Model) -> None:
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    optimizer.fold_constants_ir(model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    rewrite(model, [dropout_inference_rule, dropout_zero_rule])
    common_passes.IdentityEliminationPass()(model)
    common_passes.RemoveInitializersFromInputsPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    _name_nodes(model)


def _name_nodes(model: ir.Model) -> None:
    """Give every node and value a unique name: errors and plans refer to them."""
    common_passes.NameFixPass()(model)


def _make_symbolic(model: ir.Model) -> None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None and len(value.shape):
            value.shape = ir.Shape([BATCH, *list(value.shape)[1:]])
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None


def _free_reshapes(model: ir.Model) -> None:
    """Let constants that a batch of one has left in Reshape copy the batch axis; the result is verified later."""
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or node.inputs[1].const_value is None:
            continue
        target = node.inputs[1].const_value.numpy().copy()
        if len(target) and target[0] == 1 and not np.any(target == 0):
            target[0] = 0  # copies the batch axis
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
            name = f"{node.name}.shape"
            shape = ir.Value(name=name, shape=ir.Shape([len(target)]), type=ir.TensorType(ir.DataType.INT64))
            shape.const_value = ir.tensor(target, name=name)
            model.graph.initializers[name] = shape
            node.replace_input_with(1, shape)
