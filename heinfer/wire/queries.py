"""What client and node say to each other, as typed, frozen events. The rules of `heinfer.wire.messages` hold."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire.messages import PLAN_HASH_BYTES, PROTOCOL_VERSION, Mode, check_range, check_size, check_uint

MAX_NAME_CHARACTERS = 1024
MAX_DIMS = 32  # numpy 1 stops at 32, ONNX models at about 6
MAX_REASON_CHARACTERS = 4096

#: A token of ours has 43 characters; other tools may make longer ones.
MAX_TOKEN_CHARACTERS = 512

#: W3C Trace Context's first version has 55; later ones may append to it.
MAX_TRACEPARENT_CHARACTERS = 256

#: Element types of queries and results, by numpy's name, and the bytes of one element.
DTYPE_BYTES = {
    "float16": 2, "float32": 4, "float64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "bool": 1,
}  # fmt: skip


class QueryFailureCode(enum.Enum):
    """Why a query has no result; values as on the wire."""

    FAILED = 1
    INPUT = 2
    BUSY = 3
    SERVER = 4
    INTEGRITY = 5
    REFUSED = 6
    STOPPING = 7


class QueryFailedError(RemoteProtocolError):
    """A query fails: the node said so, or we refuse what the client sent.

    Attributes:
        code: what kind of failure.
    """

    def __init__(self, code: QueryFailureCode, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of a tensor; None stands for the number of samples in a Description."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def __post_init__(self) -> None:
        check_range("length of a tensor's name", len(self.name), 1, MAX_NAME_CHARACTERS)
        if self.dtype not in DTYPE_BYTES:
            raise LocalProtocolError(f"tensor {self.name!r}: dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        check_range(f"rank of tensor {self.name!r}", len(self.shape), 0, MAX_DIMS)
        for size in self.shape:
            if size is not None:
                check_range(f"dimension of tensor {self.name!r}", size, 0, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Greeting:
    """Opens a client's connection; no answer comes unless the node refuses it.

    Attributes:
        token: says who the client is, to a node that wants to know; empty where it has none.
        model: that all questions are about, by its name; empty: the node's only or first one.
    """

    token: str = field(default="", repr=False)
    model: str = ""

    def __post_init__(self) -> None:
        check_range("length of a token", len(self.token), 0, MAX_TOKEN_CHARACTERS)
        check_range("length of a model's name", len(self.model), 0, MAX_NAME_CHARACTERS)


@dataclass(frozen=True, slots=True)
class Describe:
    """A client asks what the node serves; a Description answers."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a node serves: the plan, its inputs and outputs, the samples it takes in one query, and the model's name."""

    plan_hash: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_samples: int
    mode: Mode = Mode.STANDARD
    protocol_version: int = PROTOCOL_VERSION
    model: str = ""

    def __post_init__(self) -> None:
        check_size("plan_hash", self.plan_hash, PLAN_HASH_BYTES)
        check_range("length of a model's name", len(self.model), 0, MAX_NAME_CHARACTERS)
        check_uint("max_samples", self.max_samples, 32, low=1)
        check_uint("protocol_version", self.protocol_version, 32)


@dataclass(frozen=True, slots=True)
class QueryHeader:
    """Announces a query; the chunks of its tensors follow, the first perhaps inside: a small query is one message.

    Attributes:
        request_id: chosen by the client.
        tensors: what follows.
        want_statistics: whether the result shall end with `Statistics`.
        trace_samples: leading samples whose values around every block come back too, for the report.
        first: the same as a chunk that follows at once.
        traceparent: names the client's span, as W3C Trace Context has it; empty where it has none.
    """

    request_id: int
    tensors: tuple[TensorSpec, ...]
    want_statistics: bool = False
    trace_samples: int = 0
    first: TensorChunk | None = None
    traceparent: str = ""

    def __post_init__(self) -> None:
        check_uint("request_id", self.request_id, 64)
        check_uint("trace_samples", self.trace_samples, 32)
        check_range("length of a traceparent", len(self.traceparent), 0, MAX_TRACEPARENT_CHARACTERS)


@dataclass(frozen=True, slots=True)
class ResultHeader:
    """Announces a result; the chunks of its tensors follow, the first perhaps inside."""

    request_id: int
    tensors: tuple[TensorSpec, ...]
    first: TensorChunk | None = None

    def __post_init__(self) -> None:
        check_uint("request_id", self.request_id, 64)


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Bytes of tensor number `tensor` from `offset` on: C order, little-endian."""

    tensor: int
    offset: int
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_uint("tensor", self.tensor, 32)
        check_uint("offset", self.offset, 64)
        if not self.data:
            raise LocalProtocolError(f"chunk of tensor {self.tensor} at offset {self.offset} is empty")


@dataclass(frozen=True, slots=True)
class Statistics:
    """The last message of a result, where statistics were asked for; a JSON document, not parsed here."""

    json: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class QueryFailure:
    """Ends a query without a result. The client is in the node's domain and may read why."""

    code: QueryFailureCode
    message: str = field(repr=False)

    def __post_init__(self) -> None:
        check_range("length of a failure's message", len(self.message), 0, MAX_REASON_CHARACTERS)


QueryEvent = Greeting | Describe | QueryHeader | TensorChunk
ResultEvent = Description | ResultHeader | TensorChunk | Statistics | QueryFailure
