"""Messages of the Open Inference Protocol's gRPC form to queries, and back. Knows no sockets and no event loop.

    ModelInferRequest(model_name="mnist", inputs=[x: FP32, [1, 1, 28, 28]], raw_input_contents=[3136 bytes])
        --read_inputs--> {"x": float32, (1, 1, 28, 28)}
        --Query--> ServedModel.submit --QueryResult--> {"y": float32, (1, 10)}
        --write_result--> ModelInferResponse(outputs=[y: FP32, [1, 10]], raw_output_contents=[40 bytes])

The first dimension of every tensor counts samples. Inputs come all as bytes, or all as typed contents; outputs go as
bytes. What the protocol's extensions add and a node has not (shared memory, classification, sequences) is refused by
name: passed over, it would make a wrong answer of a right one.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.plan import TensorSpec
from trusted_node.serving import metadata
from trusted_node.serving.datatypes import datatype_of, dtype_of
from trusted_node.serving.interface import VERSION, Query, ServedModel
from trusted_node.serving.proto import inference_pb2 as pb

#: Where typed contents of a datatype are; FP16 has no such field.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
#: The widest type that such a field holds.
_WIDEST = {"int_contents": np.dtype("<i4"), "uint_contents": np.dtype("<u4")}
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MICROSECONDS = 1e6
#: Of a request, at its top: inputs, outputs, raw values and parameters.
_MAX_FIELDS = 16_384
_RAW_FIELD = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
#: Wire type of whatever has a length (protobuf's encoding).
_DELIMITED = 2

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read.

    Attributes:
        request: itself.
        model: that it asks.
        outputs: names of the tensors that it wants.
        query: what its model is given.
    """

    request: pb.ModelInferRequest
    model: ServedModel
    outputs: tuple[str, ...]
    query: Query

    @property
    def samples(self) -> int:
        """How many it has."""
        return max((len(x) for x in self.query.inputs.values()), default=0)


def structure_bytes(raw: bytes) -> int:
    """Return how many bytes of a request are something else than raw values, without reading it.

    What is not raw takes many times its size once it is read: two bytes make an input that is empty.

    Raises:
        InputError: it has more fields than any request needs.
    """
    left, position = len(raw), 0
    for _ in range(_MAX_FIELDS):
        if position >= len(raw):
            return left
        tag, position = _varint(raw, position)
        if tag & 7 != _DELIMITED:
            return left  # none of ours: the rest counts as it is
        size, position = _varint(raw, position)
        position += size
        if tag >> 3 == _RAW_FIELD and position <= len(raw):
            left -= size
    raise InputError(f"the request has more than {_MAX_FIELDS} fields")


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """Return a number of protobuf's and where it ends; one that is cut or too long ends the message."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(raw):
            break
        octet = raw[position]
        position += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position
    return 0, len(raw)


def parse_request(raw: bytes) -> pb.ModelInferRequest:
    """Read a request to infer.

    Raises:
        InputError: the bytes are no such message.
    """
    try:
        return pb.ModelInferRequest.FromString(raw)
    except DecodeError:
        raise InputError("the request is no ModelInferRequest of package inference") from None


def id_of(raw: bytes, largest: int) -> str:
    """Return the id of a request whatever else is wrong with it; empty where it can't be read.

    Args:
        raw: the request.
        largest: how many bytes beside raw values are read.
    """
    try:
        return parse_request(raw).id if structure_bytes(raw) <= largest else ""
    except InputError:
        return ""


def request_id(request: pb.ModelInferRequest) -> str:
    """Return the request's id if it is fit for a log, else a random one."""
    return request.id if _SAFE_ID.fullmatch(request.id) else secrets.token_hex(8)


def read_timeout(request: pb.ModelInferRequest) -> float:
    """Return the seconds that the request allows, infinity where it says nothing or 0.

    Raises:
        InputError: the parameter is no positive number of microseconds.
    """
    if "timeout" not in request.parameters:
        return math.inf
    parameter = request.parameters["timeout"]
    kind = parameter.WhichOneof("parameter_choice")
    value = getattr(parameter, kind) if kind in ("int64_param", "uint64_param") else -1
    if value < 0:
        raise InputError("parameter 'timeout': expected microseconds as an integer, 0 or more (0: no limit)")
    return value / _MICROSECONDS if value else math.inf


def read_inputs(model: ServedModel, request: pb.ModelInferRequest) -> Tensors:
    """Return a request's tensors.

    Raises:
        InputError: they are not as the model's metadata say, or an extension is asked for that is not here.
    """
    _refuse_sequences(request)
    raw = request.raw_input_contents
    for tensor in request.inputs:
        if raw and tensor.HasField("contents"):  # an example of Triton's looks for these words
            raise InputError(
                f"contents field must not be specified when using raw_input_contents for {tensor.name!r} for model "
                f"{model.name!r}: send one of the two"
            )
    if raw and len(raw) != len(request.inputs):
        raise InputError(
            f"raw_input_contents: expected bytes of all {len(request.inputs)} inputs, found those of {len(raw)}; a "
            "request has its tensors either there or in the inputs' contents"
        )
    specs = {spec.name: spec for spec in model.plan.inputs}
    tensors: Tensors = {}
    for position, tensor in enumerate(request.inputs):
        spec = specs.get(tensor.name)
        if spec is None or tensor.name in tensors:
            problem = "is unknown" if spec is None else "is there twice"
            raise InputError(f"input {tensor.name!r} {problem}: expected {sorted(specs)}, each once")
        shape = _check_tensor(tensor, spec, model.max_samples)
        read = _read_raw(tensor, raw[position], shape) if raw else _read_contents(tensor, shape)
        tensors[tensor.name] = read
    return tensors


def wanted_outputs(model: ServedModel, request: pb.ModelInferRequest) -> tuple[str, ...]:
    """Return the names of the outputs that a request asks for, in its order; all of the model's where it names none.

    Raises:
        InputError: the model has no such output, one is named twice, or one is asked for in a form that is not here.
    """
    known = [spec.name for spec in model.plan.outputs]
    names = [output.name for output in request.outputs]
    for output in request.outputs:
        if output.name not in known or names.count(output.name) > 1:
            problem = "is unknown" if output.name not in known else "is asked for twice"
            raise InputError(f"output {output.name!r} {problem}: expected of {sorted(known)}, each once")
        _refuse_shared_memory(f"output {output.name!r}", output.parameters)
        if "classification" in output.parameters:
            raise InputError(f"output {output.name!r}: classification is not served; ask for the tensor and sort it")
    return tuple(names or known)


def write_result(asked: Asked, outputs: Mapping[str, NDArray[Any]]) -> pb.ModelInferResponse:
    """Make the response to a request."""
    request = asked.request
    response = pb.ModelInferResponse(model_name=asked.model.name, model_version=VERSION, id=request.id)
    for name in asked.outputs:
        values = outputs[name]
        datatype = datatype_of(values.dtype.name)
        response.outputs.add(name=name, datatype=datatype, shape=values.shape)
        response.raw_output_contents.append(values.astype(dtype_of(datatype), order="C", copy=False).tobytes())
    if _is_true(request.parameters, "triton_enable_empty_final_response"):
        response.parameters["triton_final_response"].bool_param = True
    return response


def server_metadata() -> pb.ServerMetadataResponse:
    """Say who this is."""
    return ParseDict(metadata.server_metadata(), pb.ServerMetadataResponse())


def model_metadata(model: ServedModel) -> pb.ModelMetadataResponse:
    """Say what goes into a model and what comes out."""
    return ParseDict(metadata.model_metadata(model), pb.ModelMetadataResponse())


def model_config(model: ServedModel) -> pb.ModelConfigResponse:
    """Say the same as a Triton model configuration, as far as one is true of a node."""
    return pb.ModelConfigResponse(config=ParseDict(metadata.model_configuration(model), pb.ModelConfig()))


def model_statistics(counts: Sequence[Mapping[str, Any]]) -> pb.ModelStatisticsResponse:
    """Write down what was counted of models, given as the protocol's JSON has it."""
    return pb.ModelStatisticsResponse(model_stats=[ParseDict(dict(count), pb.ModelStatistics()) for count in counts])


def _check_tensor(tensor: pb.ModelInferRequest.InferInputTensor, spec: TensorSpec, max_samples: int) -> tuple[int, ...]:
    """Compare what a tensor says of itself with what the model takes; return its shape."""
    where = f"input {spec.name!r}"
    _refuse_shared_memory(where, tensor.parameters)
    shape = tuple(tensor.shape)
    dtype_of(tensor.datatype)
    if tensor.datatype != datatype_of(spec.dtype):
        raise InputError(f"{where}: expected datatype {datatype_of(spec.dtype)}, found {tensor.datatype}")
    if shape[1:] != spec.shape or not shape or shape[0] < 1:
        raise InputError(f"{where}: expected shape {('samples', *spec.shape)}, found {shape}")
    if shape[0] > max_samples:
        raise InputError(f"{where}: a request may have {max_samples} samples, found {shape[0]}; send several requests")
    return shape


def _read_raw(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes, shape: tuple[int, ...]) -> NDArray[Any]:
    where = f"input {tensor.name!r}"
    dtype = dtype_of(tensor.datatype)
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise InputError(f"{where}: {tensor.datatype} of shape {shape} has {expected} bytes, found {len(raw)}")
    if tensor.datatype == "BOOL" and raw.strip(b"\0\1"):
        raise InputError(f"{where}: a BOOL is a byte 0 or 1, found others")
    return np.frombuffer(raw, dtype).reshape(shape)


def _read_contents(tensor: pb.ModelInferRequest.InferInputTensor, shape: tuple[int, ...]) -> NDArray[Any]:
    where = f"input {tensor.name!r}"
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise InputError(f"{where}: {tensor.datatype} has no typed contents; send it in raw_input_contents")
    filled = [descriptor.name for descriptor, _ in tensor.contents.ListFields()]
    if filled not in ([], [field]):
        raise InputError(f"{where}: {tensor.datatype} belongs into {field} alone, found {', '.join(filled)}")
    values = getattr(tensor.contents, field)
    if len(values) != math.prod(shape):
        raise InputError(f"{where}: shape {shape} has {math.prod(shape)} values, found {len(values)}")
    dtype = dtype_of(tensor.datatype)
    wide = np.fromiter(values, _WIDEST.get(field, dtype), len(values))
    narrow = wide.astype(dtype, copy=False)
    if narrow.dtype != wide.dtype and not np.array_equal(narrow, wide):
        raise InputError(f"{where}: a value is outside the range of {tensor.datatype}")
    return narrow.reshape(shape)


def _refuse_sequences(request: pb.ModelInferRequest) -> None:
    if "sequence_id" in request.parameters:
        raise InputError("sequences are not served: requests are independent of each other; leave sequence_id out")


def _refuse_shared_memory(where: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    if any(name.startswith("shared_memory_") for name in parameters):
        raise InputError(f"{where}: shared memory is not served; send and take tensors in messages")


def _is_true(parameters: Mapping[str, pb.InferParameter], name: str) -> bool:
    return name in parameters and parameters[name].bool_param
