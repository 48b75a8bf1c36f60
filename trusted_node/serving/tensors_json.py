"""Tensors of the Open Inference Protocol v2 over HTTP: JSON, with values in it or behind it in binary.

    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 1]}]}

    Inference-Header-Content-Length: 120        the first 120 bytes of the body are JSON,
    {"inputs": [{..., "parameters": {"binary_data_size": 8}}], ...}<8 bytes>    values follow in the order of inputs

Values in JSON are flat, row-major, or nested as the shape says. They must be what the type can hold: a number with a
fraction is no INT32, 300 no UINT8, true no number. NaN and Infinity are no JSON. Messages name tensors and sizes, and
quote no values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.plan import Plan, TensorSpec
from trusted_node.serving.datatypes import datatype_of, dtype_of
from trusted_node.serving.request_models import InferRequest, Parameters, RequestInput, read_json

#: Microseconds: a century.
_MAX_TIMEOUT = 3_155_760_000_000_000
#: What Triton offers and a node does not: such a parameter would change what the answer means.
_REFUSED = {
    "classification": "the classification extension is not offered: ask for the values and sort them",
    "shared_memory_region": "shared memory is not offered: send values in the body",
    "sequence_id": "sequences are not offered: a query of this node has no state",
}


@dataclass(frozen=True, slots=True)
class Inference:
    """A query that was read.

    Attributes:
        id: to be repeated in the answer, None where there is none.
        inputs: by name.
        outputs: names of those that are wanted, in order, and whether in binary.
        timeout_s: seconds that the client waits; infinity where it does not say.
    """

    id: str | None
    inputs: dict[str, NDArray[Any]]
    outputs: tuple[tuple[str, bool], ...]
    timeout_s: float


def read_inference(plan: Plan, body: bytes | bytearray, json_bytes: int | None) -> Inference:
    """Read a request's body.

    Args:
        plan: of the model that is asked.
        body: uncompressed.
        json_bytes: how much of it is JSON; None: all of it.

    Raises:
        InputError: it is malformed, or asks for what is not offered.
    """
    view = memoryview(body)
    size = len(view) if json_bytes is None else json_bytes
    if size > len(view):
        raise InputError(f"the header announces {size} bytes of JSON, and the body has {len(view)}")
    request = read_json(InferRequest, view[:size])
    _refuse_parameters(request.parameters)
    inputs = _read_inputs(plan, request.inputs, view[size:])
    return Inference(request.id, inputs, _wanted(plan, request), _timeout_s(request.parameters))


def write_inference(
    model: str, version: str, inference: Inference, plan: Plan, results: Mapping[str, NDArray[Any]]
) -> tuple[bytes, int | None]:
    """Write the answer; return its bytes, and how many of them are JSON where values follow in binary."""
    specs = {t.name: t for t in plan.outputs}
    outputs, tail = [], []
    for name, binary in inference.outputs:
        values = results[name]
        output: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(specs[name].dtype),
            "shape": list(values.shape),
        }
        if binary:
            raw = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
            output["parameters"] = {"binary_data_size": len(raw)}
            tail.append(raw)
        else:
            output["data"] = values.ravel().tolist()
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if inference.id is not None:
        answer["id"] = inference.id
    head = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
    return (b"".join([head, *tail]), len(head)) if tail else (head, None)


def read_tensor(spec: RequestInput, raw: memoryview | None) -> NDArray[Any]:
    """Return an input as an array, from `raw` or, where that is None, from its JSON.

    Raises:
        InputError: values and shape, or values and type, do not fit.
    """
    dtype = dtype_of(spec.datatype)
    shape = tuple(spec.shape)
    if raw is None:
        return _from_json(spec, shape, dtype)
    if spec.data is not None:
        raise InputError(f"input {spec.name!r} has values in JSON and in binary: send one of them")
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise InputError(
            f"input {spec.name!r}: {spec.datatype} of shape {list(shape)} has {expected} bytes, found {len(raw)}"
        )
    if spec.datatype == "BOOL":
        octets = np.frombuffer(raw, np.uint8)
        if octets.size and octets.max() > 1:
            raise InputError(f"input {spec.name!r}: BOOL in binary has bytes 0 and 1 only")
    # Behind JSON of any length values seldom begin where the processor likes to have them.
    return np.require(np.frombuffer(raw, dtype), None, "A").reshape(shape)


def _read_inputs(plan: Plan, inputs: Sequence[RequestInput], tail: memoryview) -> dict[str, NDArray[Any]]:
    known = {t.name: t for t in plan.inputs}
    read: dict[str, NDArray[Any]] = {}
    position = 0
    for spec in inputs:
        if spec.name in read:
            raise InputError(f"input {spec.name!r} is there twice")
        _check_announced(spec, known)
        _refuse_parameters(spec.parameters)
        raw = None
        if "binary_data_size" in spec.parameters:
            end = position + _count(spec.parameters, "binary_data_size")
            if end > len(tail):
                raise InputError(
                    f"input {spec.name!r} announces {end - position} bytes, and {len(tail) - position} are left: is "
                    "Inference-Header-Content-Length right?"
                )
            raw, position = tail[position:end], end
        read[spec.name] = read_tensor(spec, raw)
    if position != len(tail):
        raise InputError(f"{len(tail) - position} bytes behind the JSON belong to no input")
    return read


def _check_announced(spec: RequestInput, known: Mapping[str, TensorSpec]) -> None:
    """Refuse an input by its description, before its values are converted."""
    tensor = known.get(spec.name)
    if tensor is None:
        raise InputError(f"input {spec.name!r} is unknown: expected {sorted(known)}")
    expected = datatype_of(tensor.dtype)
    dtype_of(spec.datatype)  # says more of those that no model takes
    if spec.datatype != expected:
        raise InputError(f"input {spec.name!r}: expected datatype {expected}, found {spec.datatype}")
    if tuple(spec.shape[1:]) != tensor.shape:
        raise InputError(f"input {spec.name!r}: expected shape {['samples', *tensor.shape]}, found {spec.shape}")


def _wanted(plan: Plan, request: InferRequest) -> tuple[tuple[str, bool], ...]:
    names = [t.name for t in plan.outputs]
    usual = _flag(request.parameters, "binary_data_output", False)
    wanted = []
    for output in request.outputs:
        if output.name not in names:
            raise InputError(f"output {output.name!r} is unknown: expected {names}")
        _refuse_parameters(output.parameters)
        wanted.append((output.name, _flag(output.parameters, "binary_data", usual)))
    if len({name for name, _ in wanted}) != len(wanted):
        raise InputError("an output is asked for twice")
    return tuple(wanted) or tuple((name, usual) for name in names)


def _timeout_s(parameters: Parameters) -> float:
    if "timeout" not in parameters:
        return math.inf
    microseconds = _count(parameters, "timeout")
    if microseconds > _MAX_TIMEOUT:
        raise InputError(f"parameter 'timeout': expected microseconds, at most {_MAX_TIMEOUT}")
    return microseconds / 1e6 if microseconds else math.inf  # Triton: 0 is none


def _refuse_parameters(parameters: Parameters) -> None:
    for name, reason in _REFUSED.items():
        if parameters.get(name):
            raise InputError(reason)


def _count(parameters: Parameters, name: str) -> int:
    value = parameters[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"parameter {name!r}: expected a whole number from 0 on")
    return value


def _flag(parameters: Parameters, name: str, usual: bool) -> bool:
    value = parameters.get(name, usual)
    if not isinstance(value, bool):
        raise InputError(f"parameter {name!r}: expected true or false")
    return value


def _from_json(spec: RequestInput, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if spec.data is None:
        raise InputError(f"input {spec.name!r} has neither data nor the parameter binary_data_size")
    flat = _flattened(spec, shape)
    if len(flat) != math.prod(shape):
        raise InputError(f"input {spec.name!r}: shape {list(shape)} has {math.prod(shape)} values, found {len(flat)}")
    kinds = set(map(type, flat))
    allowed = _JSON_TYPES[dtype.kind]
    if not kinds <= allowed:
        raise InputError(f"input {spec.name!r}: expected {_CALLED[dtype.kind]} for {spec.datatype}")
    if dtype.kind in "iu" and flat:
        limits = np.iinfo(dtype)
        if min(flat) < limits.min or max(flat) > limits.max:
            raise InputError(f"input {spec.name!r}: {spec.datatype} holds {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):  # what becomes infinite is refused with what came so
        try:
            return np.array(flat, dtype).reshape(shape)
        except OverflowError:
            raise InputError(f"input {spec.name!r} holds a number beyond FP64") from None


_JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "f": {int, float}, "i": {int}, "u": {int}}
_CALLED = {"b": "true or false", "f": "numbers", "i": "whole numbers", "u": "whole numbers"}


def _flattened(spec: RequestInput, shape: tuple[int, ...]) -> list[Any]:
    """Return nested values as a flat list; one that is not nested is taken as it is."""
    values = spec.data or []
    if not values or not isinstance(values[0], list):
        return values
    for axis, length in enumerate(shape):
        if axis:
            if not all(isinstance(row, list) and len(row) == length for row in values):
                raise InputError(f"input {spec.name!r}: nested data must have shape {list(shape)} or be flat")
            values = list(chain.from_iterable(values))
        elif len(values) != length:
            raise InputError(f"input {spec.name!r}: expected {length} samples as its shape says, found {len(values)}")
    return values
