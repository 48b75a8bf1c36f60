"""What bodies of requests hold in JSON, as pydantic models: requests are read with them and described by them.

    read_json(InferRequest, b'{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 1]}]}')
    read_json(IndexRequest, b'{"ready": 1}')    InputError: the request's JSON does not fit at ready: ...

Members that are not known are passed over, as the protocol wants it. Messages say where something is wrong, and quote
nothing that was sent.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError
from pydantic_core import from_json

from heinfer.errors import InputError

MAX_DIMENSIONS = 32
_LARGEST_LENGTH = 2**31 - 1
_MAX_NAME = 512
_MAX_TENSORS = 4096

_Model = TypeVar("_Model", bound=BaseModel)
Parameters = dict[StrictStr, StrictStr | StrictBool | StrictInt | StrictFloat]


class RequestInput(BaseModel):
    """An input: its values are in `data`, or behind the JSON where parameters has `binary_data_size`."""

    model_config = ConfigDict(title="InferRequestInput")
    name: Annotated[StrictStr, Field(min_length=1, max_length=_MAX_NAME)]
    shape: Annotated[
        list[Annotated[StrictInt, Field(ge=0, le=_LARGEST_LENGTH)]], Field(min_length=1, max_length=MAX_DIMENSIONS)
    ]
    datatype: Annotated[StrictStr, Field(max_length=16)]
    parameters: Parameters = {}
    data: list[Any] | None = None


class RequestOutput(BaseModel):
    """An output that is wanted; `binary_data` in its parameters says how."""

    model_config = ConfigDict(title="InferRequestOutput")
    name: Annotated[StrictStr, Field(min_length=1, max_length=_MAX_NAME)]
    parameters: Parameters = {}


class InferRequest(BaseModel):
    """A query. Parameters: `timeout` in microseconds, `binary_data_output`; others change nothing."""

    model_config = ConfigDict(title="InferRequest")
    id: Annotated[StrictStr, Field(max_length=1024)] | None = None
    parameters: Parameters = {}
    inputs: Annotated[list[RequestInput], Field(min_length=1, max_length=_MAX_TENSORS)]
    outputs: Annotated[list[RequestOutput], Field(max_length=_MAX_TENSORS)] = []


class IndexRequest(BaseModel):
    """Which models are to be listed: all, or those that are ready."""

    model_config = ConfigDict(title="RepositoryIndexRequest")
    ready: StrictBool = False


class ControlRequest(BaseModel):
    """A model that is to be loaded or unloaded. Parameters change nothing."""

    model_config = ConfigDict(title="RepositoryControlRequest")
    parameters: Parameters = {}


def read_json(kind: type[_Model], data: memoryview | bytes | bytearray) -> _Model:
    """Read a JSON object.

    Raises:
        InputError: it is no JSON, or another object.
    """
    try:
        return kind.model_validate(from_json(bytes(data), allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) if isinstance(part, int) else part[:64] for part in first["loc"][:4])
        raise InputError(f"the request's JSON does not fit at {where or 'its top'}: {first['msg'].lower()}") from None
    except ValueError as error:
        raise InputError(f"the request is no JSON: {error}") from None
