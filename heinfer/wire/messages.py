"""What node and server say to each other, as typed, frozen events. No protobuf, no sockets.

An event that exists is well formed by itself: the constructor checks ranges and sizes and raises
`LocalProtocolError`; the codec turns that into `RemoteProtocolError` for what a peer sent. Whether an event may
come *now* is decided by `heinfer.wire.session`, whether it is too large by `Limits`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.spans import CONTEXT_BYTES

#: 2: the first chunk may travel inside its announcement, which version 1 would not see, and bytes beside protobuf.
#: 3: queries travel in frames too.
PROTOCOL_VERSION = 3
PLAN_HASH_BYTES = 32  # SHA-256
SESSION_BYTES = 16


class Mode(enum.Enum):
    """How the ciphertexts of a request are made, and so what a row is; values as on the wire.

    STANDARD: both parts travel, a row is one ciphertext. PREPARED: b alone travels, a row is a group of 32 residues.
    BATCH: b alone travels, a row is one ciphertext's. DEEP: for deep blocks alone; relinearisation keys travel first,
    then both parts, and a row is one polynomial modulo one prime of the block's chain.
    """

    STANDARD = 1
    PREPARED = 2
    BATCH = 3
    DEEP = 4

    __hash__ = object.__hash__  # that of an Enum is in Python and slow


class FailureCode(enum.Enum):
    """All that a server says about why a session is over; values as on the wire."""

    FAILED = 1
    VERSION = 2
    PLAN = 3
    BUSY = 4
    DAMAGED = 5
    STOPPING = 6


class RefusedError(RemoteProtocolError):
    """A session is refused: by the peer, or by us because of what the peer sent.

    Attributes:
        code: what the server tells the node.
    """

    def __init__(self, code: FailureCode, message: str) -> None:
        self.code = code
        super().__init__(message)


def failure_code(error: Exception) -> FailureCode:
    """The code that may leave the server for an error found there: FAILED unless the error carries another."""
    return error.code if isinstance(error, RefusedError) else FailureCode.FAILED


def out_of_range(name: str, value: int, low: int, high: int) -> LocalProtocolError:
    """The error for a value that is not in [low, high]."""
    return LocalProtocolError(f"{name} must be in [{low}, {high}], got {value}")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise LocalProtocolError unless low <= value <= high."""
    if not low <= value <= high:
        raise out_of_range(name, value, low, high)


#: Bounds of the integers on the wire, for the first look of a constructor: `check_uint` says what is wrong.
_UINT32, _UINT64 = 2**32, 2**64


def check_uint(name: str, value: int, bits: int, low: int = 0) -> None:
    """Raise LocalProtocolError unless low <= value < 2**bits."""
    if not low <= value < 1 << bits:
        raise out_of_range(name, value, low, 2**bits - 1)


def check_size(name: str, value: bytes, size: int) -> None:
    """Raise LocalProtocolError unless the value has that many bytes."""
    if len(value) != size:
        raise LocalProtocolError(f"{name} must have {size} bytes, got {len(value)}")


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session; node to server. The server compares the plan hash (32 bytes) with its own plan's."""

    plan_hash: bytes
    session: bytes
    protocol_version: int = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        check_size("plan_hash", self.plan_hash, PLAN_HASH_BYTES)
        check_size("session", self.session, SESSION_BYTES)
        check_uint("protocol_version", self.protocol_version, 32)


@dataclass(frozen=True, slots=True)
class Ready:
    """The server's consent to a Hello."""


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Announces the ciphertexts of one block; node to server, its chunks follow, the first perhaps inside.

    Attributes:
        session: as in Hello.
        plan_hash: as in Hello.
        block: index into the plan's blocks.
        request_id: larger than those before it in this session, at least 1.
        samples: inputs that it carries.
        rows: how many of them it has; `BlockShape.rows_up` says how many must be.
        attempt: 0, then 1, 2, ... each time the same bytes are sent again.
        mode: how the ciphertexts were made.
        first: the same as a chunk that follows at once.
        trace: names the node's span (`heinfer.spans.TraceContext`), where the server may know; empty otherwise.
    """

    session: bytes
    plan_hash: bytes
    block: int
    request_id: int
    samples: int
    rows: int
    attempt: int = 0
    mode: Mode = Mode.STANDARD
    first: Chunk | None = None
    trace: bytes = b""

    def __post_init__(self) -> None:
        check_size("session", self.session, SESSION_BYTES)
        check_size("plan_hash", self.plan_hash, PLAN_HASH_BYTES)
        if not (
            0 <= self.block < _UINT32
            and 0 < self.request_id < _UINT64
            and 0 < self.samples < _UINT32
            and 0 < self.rows < _UINT64
            and 0 <= self.attempt < _UINT32
        ):
            check_uint("block", self.block, 32)
            check_uint("request_id", self.request_id, 64, low=1)
            check_uint("samples", self.samples, 32, low=1)
            check_uint("rows", self.rows, 64, low=1)
            check_uint("attempt", self.attempt, 32)
        if self.trace:
            check_size("trace", self.trace, CONTEXT_BYTES)
        if self.first is not None:
            _check_first(self.request_id, self.first)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first_row, first_row + rows) of a request (node to server) or of an answer (server to node)."""

    request_id: int
    first_row: int
    rows: int
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not (0 < self.request_id < _UINT64 and 0 <= self.first_row < _UINT64 and 0 < self.rows < _UINT32):
            check_uint("request_id", self.request_id, 64, low=1)
            check_uint("first_row", self.first_row, 64)
            check_uint("rows", self.rows, 32, low=1)


@dataclass(frozen=True, slots=True)
class BlockAnswer:
    """Announces the answer to a request; its chunks follow, the first perhaps inside.

    Attributes:
        request_id: of the request.
        rows: how many the answer has.
        compute_s: what the block took, in seconds.
        first: the same as a chunk that follows at once.
    """

    request_id: int
    rows: int
    compute_s: float
    first: Chunk | None = None

    def __post_init__(self) -> None:
        if not (0 < self.request_id < _UINT64 and 0 < self.rows < _UINT64):
            check_uint("request_id", self.request_id, 64, low=1)
            check_uint("rows", self.rows, 64, low=1)
        if not (math.isfinite(self.compute_s) and self.compute_s >= 0):
            raise LocalProtocolError(f"compute_s must be finite and not negative, got {self.compute_s}")
        if self.first is not None:
            _check_first(self.request_id, self.first)


def _check_first(request_id: int, first: Chunk) -> None:
    if first.request_id != request_id:
        raise LocalProtocolError(f"request {request_id} carries a chunk of request {first.request_id}")


@dataclass(frozen=True, slots=True)
class Failure:
    """The server ends the session."""

    code: FailureCode


@dataclass(frozen=True, slots=True)
class End:
    """The sender's half of the stream is over. Nothing on the wire: TCP says it by closing."""


@dataclass(frozen=True, slots=True)
class UploadComplete:
    """Made by the server's session after the last row of a request."""

    request: BlockRequest


@dataclass(frozen=True, slots=True)
class AnswerComplete:
    """Made by the node's session after the last row of an answer."""

    request: BlockRequest


NodeEvent = Hello | BlockRequest | Chunk
ServerEvent = Ready | BlockAnswer | Chunk | Failure
