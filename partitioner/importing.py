"""Read an ONNX file and bring it into the form that the other passes expect.

    requires  a file
    ensures   a checked model of one opset version, functions inlined, every input static with a batch of 1, simplified

The batch is the first axis of every input, symbolic or 1; so an input whose first axis is 1 for another reason, such as
a mask of shape (1, T) for all samples, becomes one for each sample. Other symbolic axes (a sequence length) are fixed
at the sizes that the caller gives. `partitioner.batching` frees the batch again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import google.protobuf.message
import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from heinfer.cards import find_card
from heinfer.errors import Offence, UnsupportedModelError
from heinfer.operators.steps import LARGEST_VALUE
from partitioner.conversion import STANDARD_DOMAINS, convert
from partitioner.scratch import Scratch, leave_inputs, put_weights
from partitioner.shapes import check_consistency
from partitioner.simplification import simplify
from partitioner.tensors import check_tensors, has_text, uses_external_data

#: The first version of the file format that may hold `partitioner.conversion.OPSET`.
IR_VERSION = 10
BATCH = "batch"
_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")


@dataclass(frozen=True, slots=True)
class Imported:
    """A model as it came and as the passes see it.

    Attributes:
        name: file name without its ending, or the folder's name for a file called model.onnx.
        original: the original, serialised, weights included: bytes, shape (size,), on disk if they are many.
        model: the graph that the passes work on; large floating-point initialisers are on disk as well.
        results: names of the model's results, in order.
        card: the original's card, None where it has none.
    """

    name: str
    original: NDArray[np.uint8]
    model: ir.Model
    results: tuple[str, ...]
    card: Mapping[str, Any] | None = None

    @property
    def sha256(self) -> str:
        """Digest of the original."""
        return hashlib.sha256(self.original.data).hexdigest()


def import_model(path: Path, dimensions: Mapping[str, int] | None = None, scratch: Path | None = None) -> Imported:
    """Read, check, convert, inline, fix all sizes and simplify a model.

    Args:
        path: ONNX file.
        dimensions: sizes of symbolic axes other than the batch, by the names that the model's inputs give them.
        scratch: folder for what is kept on disk meanwhile; None: where the system has temporary files.

    Raises:
        PlanError: the weights find no room on disk.
        UnsupportedModelError: not ONNX, or something in it that is never taken (control flow, custom domains, training
            mode, a fixed batch size above 1, axes that stay dynamic), or it has no dimension of a name in `dimensions`.
    """
    proto, content = _read(path)
    _refuse(proto)
    disk = Scratch(scratch)
    original = disk.keep(np.frombuffer(content, np.uint8))
    del content
    weights = disk.take_weights(proto)
    if weights:
        proto = onnx.ModelProto.FromString(proto.SerializeToString())  # the old one's memory still has the weights
    _check(proto)
    card, results = find_card(proto.metadata_props), tuple(value.name for value in proto.graph.output)
    _fix_sizes(proto, dimensions or {})
    leave_inputs(proto, weights)
    model = _parse(convert(_inline(proto)))
    put_weights(model, weights)
    # Below version 4 an initialiser has to be an input as well, which the passes undo.
    model.ir_version = max(model.ir_version, IR_VERSION)
    common_passes.InlinePass()(model)
    common_passes.RemoveInitializersFromInputsPass()(model)
    _name_nodes(model)
    check_consistency(model)
    simplify(model)
    name = path.stem if path.stem != "model" else path.resolve().parent.name
    return Imported(name, original, model, results, card)


def given_dimensions(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the `dimensions` that a model was imported with, from the shapes that its inputs have got.

    Args:
        path: ONNX file.
        shapes: shape per sample of the inputs, by name.

    Raises:
        UnsupportedModelError: not ONNX.
    """
    return {
        dim.dim_param: size
        for value in _inputs(_read(path)[0])
        for dim, size in zip(value.type.tensor_type.shape.dim[1:], shapes.get(value.name, ()), strict=False)
        if dim.dim_param
    }


def _read(path: Path) -> tuple[onnx.ModelProto, bytes]:
    """Return a model, and its file's bytes; where its data lie in other files, the bytes with these inside."""
    try:
        content = path.read_bytes()
        proto = onnx.ModelProto.FromString(content)
        if uses_external_data(proto):
            onnx.load_external_data_for_model(proto, str(path.parent))
            content = _serialised(path, proto)
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"{error.filename or path} does not exist") from error
    except (
        google.protobuf.message.DecodeError,
        onnx.checker.ValidationError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        # OSError, RuntimeError, ValueError: data in other files, of names and extents that can't be
        raise UnsupportedModelError(f"{path} is not an ONNX model, or it is truncated: {error}") from error
    if not proto.graph.node or not proto.opset_import:
        raise UnsupportedModelError(f"{path} is not an ONNX model, or it is truncated: it has no operators")
    return proto, content


def _serialised(path: Path, proto: onnx.ModelProto) -> bytes:
    try:
        return proto.SerializeToString()
    except (ValueError, google.protobuf.message.EncodeError) as error:
        raise UnsupportedModelError(f"{path}: models above 2 GiB are not supported yet") from error


def _refuse(proto: onnx.ModelProto) -> None:
    """Refuse what is never taken, all of it at once, before the checker stops at the first."""
    if not has_text(proto):
        raise UnsupportedModelError("not a valid ONNX model: it holds names that are no text (UTF-8)")
    local = {(f.domain, f.name) for f in proto.functions}
    offences = []
    for position, node in enumerate([*proto.graph.node, *(n for f in proto.functions for n in f.node)]):
        name = node.name or (node.output[0] if node.output else f"node {position}")
        if node.op_type in _CONTROL_FLOW and node.domain in STANDARD_DOMAINS:
            offences.append(Offence(name, node.op_type, "control flow is not supported; export the model without it"))
        elif node.domain not in STANDARD_DOMAINS and (node.domain, node.op_type) not in local:
            offences.append(
                Offence(name, f"{node.domain}.{node.op_type}", "custom operator; export with standard ONNX operators")
            )
        elif node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
            offences.append(Offence(name, node.op_type, "in training mode; export in evaluation mode"))
    if offences:
        raise UnsupportedModelError(f"{len(offences)} operators can't be partitioned:", offences)
    offences = check_tensors(proto)
    if offences:
        raise UnsupportedModelError(f"{len(offences)} constants are malformed:", offences)


def _check(proto: onnx.ModelProto) -> None:
    """Let onnx check a model."""
    try:
        onnx.checker.check_model(proto.SerializeToString())
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"onnx refuses the model: {str(error).strip().splitlines()[0]}") from error


def _inputs(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    initialisers = {i.name for i in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in initialisers]


def _fix_sizes(proto: onnx.ModelProto, dimensions: Mapping[str, int]) -> None:
    """Give every input a batch of 1 and the sizes in `dimensions`; forget all shapes that depended on these."""
    inputs = _inputs(proto)
    if not inputs:
        raise UnsupportedModelError("the model has no inputs")
    _refuse_dimensions(inputs, dimensions)
    offences = [offence for value in inputs for offence in _fix_input(value, dimensions)]
    if offences:
        raise UnsupportedModelError("the model's inputs can't be used:", offences)
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")


def _refuse_dimensions(inputs: Iterable[onnx.ValueInfoProto], dimensions: Mapping[str, int]) -> None:
    names = {d.dim_param: None for value in inputs for d in value.type.tensor_type.shape.dim[1:] if d.dim_param}
    unknown = [name for name in dimensions if name not in names]
    if unknown:
        there = ", ".join(map(repr, names)) if names else "none"
        raise UnsupportedModelError(f"no input has a dimension named {unknown[0]!r}; symbolic after the batch: {there}")
    for name, size in dimensions.items():
        if size < 1:
            raise UnsupportedModelError(f"dimension {name!r}: expected a size of 1 at least, found {size}")


def _fix_input(value: onnx.ValueInfoProto, dimensions: Mapping[str, int]) -> list[Offence]:
    """Fix the sizes of one input; return what stands against it."""
    dims = value.type.tensor_type.shape.dim
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape") or not dims:
        return [Offence(value.name, "input", "has no batch axis: expected a tensor with samples first")]
    offences = []
    if dims[0].HasField("dim_value") and dims[0].dim_value != 1:
        reason = f"batch size fixed at {dims[0].dim_value}; export with 1 or a symbolic axis"
        offences.append(Offence(value.name, "input", reason))
    dims[0].dim_value = 1
    for dim in dims[1:]:
        if dim.dim_param in dimensions:
            dim.dim_value = dimensions[dim.dim_param]
    dynamic = {i: d.dim_param for i, d in enumerate(dims) if not (d.HasField("dim_value") and d.dim_value > 0)}
    if dynamic:
        offences.append(Offence(value.name, "input", _dynamic_reason(dynamic)))
    elif (size := prod(dim.dim_value for dim in dims)) > LARGEST_VALUE:
        offences.append(Offence(value.name, "input", f"has {size} elements: expected {LARGEST_VALUE} at most"))
    return offences


def _dynamic_reason(dynamic: Mapping[int, str]) -> str:
    shown = ", ".join(f"{axis} ({name})" if name else str(axis) for axis, name in dynamic.items())
    options = " ".join(f"--dimension {name}=SIZE" for name in dict.fromkeys(dynamic.values()) if name)
    remedy = f"fix them with {options}" if all(dynamic.values()) else "export with fixed sizes"
    return f"axes {shown} are dynamic; {remedy}"


def _name_nodes(model: ir.Model) -> None:
    """Call a nameless node by its result, and make names unique: errors and plans refer to nodes by name."""
    for node in model.graph:
        node.name = node.name or node.outputs[0].name
    common_passes.NameFixPass()(model)


def _inline(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Inline local functions, which onnx's version converter would drop."""
    if not proto.functions:
        return proto
    try:
        return onnx.inliner.inline_local_functions(proto)
    except (RuntimeError, ValueError) as error:  # a call with more inputs than its function has, a function of itself
        raise UnsupportedModelError(
            f"the model's local functions can't be put in place of their calls: {error}"
        ) from error


def _parse(proto: onnx.ModelProto) -> ir.Model:
    try:
        return ir.from_proto(proto)
    except ir.serde.SerdeError as error:
        raise UnsupportedModelError(f"not a valid ONNX model: {str(error).splitlines()[0]}") from error
