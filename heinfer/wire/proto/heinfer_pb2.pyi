from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_STANDARD: _ClassVar[Mode]
    MODE_PREPARED: _ClassVar[Mode]
    MODE_BATCH: _ClassVar[Mode]
    MODE_DEEP: _ClassVar[Mode]

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_UNSPECIFIED: _ClassVar[FailureCode]
    FAILURE_FAILED: _ClassVar[FailureCode]
    FAILURE_VERSION: _ClassVar[FailureCode]
    FAILURE_PLAN: _ClassVar[FailureCode]
    FAILURE_BUSY: _ClassVar[FailureCode]
    FAILURE_DAMAGED: _ClassVar[FailureCode]
    FAILURE_STOPPING: _ClassVar[FailureCode]

class QueryFailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUERY_FAILURE_UNSPECIFIED: _ClassVar[QueryFailureCode]
    QUERY_FAILURE_FAILED: _ClassVar[QueryFailureCode]
    QUERY_FAILURE_INPUT: _ClassVar[QueryFailureCode]
    QUERY_FAILURE_BUSY: _ClassVar[QueryFailureCode]
    QUERY_FAILURE_SERVER: _ClassVar[QueryFailureCode]
    QUERY_FAILURE_INTEGRITY: _ClassVar[QueryFailureCode]
    QUERY_FAILURE_REFUSED: _ClassVar[QueryFailureCode]
    QUERY_FAILURE_STOPPING: _ClassVar[QueryFailureCode]
MODE_UNSPECIFIED: Mode
MODE_STANDARD: Mode
MODE_PREPARED: Mode
MODE_BATCH: Mode
MODE_DEEP: Mode
FAILURE_UNSPECIFIED: FailureCode
FAILURE_FAILED: FailureCode
FAILURE_VERSION: FailureCode
FAILURE_PLAN: FailureCode
FAILURE_BUSY: FailureCode
FAILURE_DAMAGED: FailureCode
FAILURE_STOPPING: FailureCode
QUERY_FAILURE_UNSPECIFIED: QueryFailureCode
QUERY_FAILURE_FAILED: QueryFailureCode
QUERY_FAILURE_INPUT: QueryFailureCode
QUERY_FAILURE_BUSY: QueryFailureCode
QUERY_FAILURE_SERVER: QueryFailureCode
QUERY_FAILURE_INTEGRITY: QueryFailureCode
QUERY_FAILURE_REFUSED: QueryFailureCode
QUERY_FAILURE_STOPPING: QueryFailureCode

class NodeMessage(_message.Message):
    __slots__ = ("hello", "request", "chunk")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    request: BlockRequest
    chunk: Chunk
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., request: _Optional[_Union[BlockRequest, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("ready", "answer", "chunk", "failure")
    READY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    answer: BlockAnswer
    chunk: Chunk
    failure: Failure
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., answer: _Optional[_Union[BlockAnswer, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "plan_hash", "session")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    plan_hash: bytes
    session: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., plan_hash: _Optional[bytes] = ..., session: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockRequest(_message.Message):
    __slots__ = ("session", "plan_hash", "block", "request_id", "attempt", "mode", "samples", "rows", "first", "trace")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    plan_hash: bytes
    block: int
    request_id: int
    attempt: int
    mode: Mode
    samples: int
    rows: int
    first: Chunk
    trace: bytes
    def __init__(self, session: _Optional[bytes] = ..., plan_hash: _Optional[bytes] = ..., block: _Optional[int] = ..., request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., samples: _Optional[int] = ..., rows: _Optional[int] = ..., first: _Optional[_Union[Chunk, _Mapping]] = ..., trace: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("request_id", "first_row", "rows")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    first_row: int
    rows: int
    def __init__(self, request_id: _Optional[int] = ..., first_row: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class BlockAnswer(_message.Message):
    __slots__ = ("request_id", "rows", "compute_seconds", "first")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    rows: int
    compute_seconds: float
    first: Chunk
    def __init__(self, request_id: _Optional[int] = ..., rows: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., first: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: FailureCode
    def __init__(self, code: _Optional[_Union[FailureCode, str]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "dims")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    dims: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., dims: _Optional[_Iterable[int]] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("protocol_version", "plan_hash", "mode", "max_samples", "inputs", "outputs", "model")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    plan_hash: bytes
    mode: Mode
    max_samples: int
    inputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    outputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    model: str
    def __init__(self, protocol_version: _Optional[int] = ..., plan_hash: _Optional[bytes] = ..., mode: _Optional[_Union[Mode, str]] = ..., max_samples: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class Describe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("token", "model")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    token: str
    model: str
    def __init__(self, token: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class QueryMessage(_message.Message):
    __slots__ = ("header", "chunk", "describe", "greeting")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    GREETING_FIELD_NUMBER: _ClassVar[int]
    header: QueryHeader
    chunk: TensorChunk
    describe: Describe
    greeting: Greeting
    def __init__(self, header: _Optional[_Union[QueryHeader, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ..., describe: _Optional[_Union[Describe, _Mapping]] = ..., greeting: _Optional[_Union[Greeting, _Mapping]] = ...) -> None: ...

class ResultMessage(_message.Message):
    __slots__ = ("header", "chunk", "statistics", "failure", "description")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    header: ResultHeader
    chunk: TensorChunk
    statistics: Statistics
    failure: QueryFailure
    description: Description
    def __init__(self, header: _Optional[_Union[ResultHeader, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., failure: _Optional[_Union[QueryFailure, _Mapping]] = ..., description: _Optional[_Union[Description, _Mapping]] = ...) -> None: ...

class QueryHeader(_message.Message):
    __slots__ = ("request_id", "tensors", "want_statistics", "trace_samples", "first", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    WANT_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    TRACE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    want_statistics: bool
    trace_samples: int
    first: TensorChunk
    traceparent: str
    def __init__(self, request_id: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., want_statistics: _Optional[bool] = ..., trace_samples: _Optional[int] = ..., first: _Optional[_Union[TensorChunk, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class ResultHeader(_message.Message):
    __slots__ = ("request_id", "tensors", "first")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    first: TensorChunk
    def __init__(self, request_id: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., first: _Optional[_Union[TensorChunk, _Mapping]] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("tensor", "offset")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    offset: int
    def __init__(self, tensor: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class QueryFailure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: QueryFailureCode
    message: str
    def __init__(self, code: _Optional[_Union[QueryFailureCode, str]] = ..., message: _Optional[str] = ...) -> None: ...
