"""Events to frames and back: an envelope by protobuf and, beside it, the bytes of the chunk that it announces.

Those of queries and results are in `heinfer.wire.query_codec`.

Decoding is total: whatever the bytes, the result is a well-formed event or a `RemoteProtocolError`. Fields that this
version does not know are ignored; the protocol version tells peers apart. How long an envelope and a payload may be is
checked where frames are read and written (`heinfer.wire.frames`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire.messages import (
    BlockAnswer,
    BlockRequest,
    Chunk,
    Failure,
    FailureCode,
    Hello,
    Mode,
    NodeEvent,
    Ready,
    ServerEvent,
)
from heinfer.wire.proto import heinfer_pb2 as pb

T = TypeVar("T")
#: Envelope and payload of one frame.
Frame = tuple[bytes, bytes]
NO_PAYLOAD = b""
_MODES = {mode.value: mode for mode in Mode}  # a call of the Enum takes longer


def encode_node_event(event: NodeEvent) -> Frame:
    """Encode what a node says to a server; the payload is the chunk's own bytes, not a copy.

    Raises:
        LocalProtocolError: no such event, or a chunk without bytes.
    """
    message = pb.NodeMessage()
    try:
        match event:
            case BlockRequest():
                request = message.request
                request.session, request.plan_hash = event.session, event.plan_hash
                request.block, request.request_id, request.attempt = event.block, event.request_id, event.attempt
                request.mode, request.samples, request.rows = number(event.mode), event.samples, event.rows
                if event.trace:
                    request.trace = event.trace
                payload = _fill(request.first, event.first) if event.first is not None else NO_PAYLOAD
            case Chunk():
                payload = _fill(message.chunk, event)
            case Hello():
                hello, payload = message.hello, NO_PAYLOAD
                hello.protocol_version = event.protocol_version
                hello.plan_hash, hello.session = event.plan_hash, event.session
            case _:
                raise stray(event)
        return message.SerializeToString(), payload
    except (ValueError, TypeError, EncodeError) as error:
        raise _unencodable(error) from None


def decode_node_event(envelope: bytes, payload: bytes) -> NodeEvent:
    """Decode what a node said.

    Raises:
        RemoteProtocolError: it is no event, or the payload is not that of a chunk in it.
    """
    return parse(pb.NodeMessage(), envelope, lambda message: _node_event(message, payload))


def _node_event(message: Any, payload: bytes) -> NodeEvent:
    match message.WhichOneof("kind"):
        case "request":
            r = message.request
            first, mode = _first_event(r, payload), _mode(r.mode)
            return BlockRequest(
                r.session, r.plan_hash, r.block, r.request_id, r.samples, r.rows, r.attempt, mode, first, r.trace
            )
        case "chunk":
            return _chunk_event(message.chunk, payload)
        case "hello":
            refuse_payload(payload)
            hello = message.hello
            return Hello(hello.plan_hash, hello.session, hello.protocol_version)
        case kind:
            raise LocalProtocolError(f"message of unknown kind {kind}")


def encode_server_event(event: ServerEvent) -> Frame:
    """Encode what a server says to a node. Raises as `encode_node_event`."""
    message = pb.ServerMessage()
    try:
        match event:
            case BlockAnswer():
                answer = message.answer
                answer.request_id, answer.rows, answer.compute_seconds = event.request_id, event.rows, event.compute_s
                payload = _fill(answer.first, event.first) if event.first is not None else NO_PAYLOAD
            case Chunk():
                payload = _fill(message.chunk, event)
            case Ready():
                message.ready.SetInParent()
                payload = NO_PAYLOAD
            case Failure():
                message.failure.code = number(event.code)
                payload = NO_PAYLOAD
            case _:
                raise stray(event)
        return message.SerializeToString(), payload
    except (ValueError, TypeError, EncodeError) as error:
        raise _unencodable(error) from None


def decode_server_event(envelope: bytes, payload: bytes) -> ServerEvent:
    """Decode what a server said. Raises as `decode_node_event`."""
    return parse(pb.ServerMessage(), envelope, lambda message: _server_event(message, payload))


def _server_event(message: Any, payload: bytes) -> ServerEvent:
    match message.WhichOneof("kind"):
        case "answer":
            answer = message.answer
            first = _first_event(answer, payload)
            return BlockAnswer(answer.request_id, answer.rows, answer.compute_seconds, first)
        case "chunk":
            return _chunk_event(message.chunk, payload)
        case "ready":
            refuse_payload(payload)
            return Ready()
        case "failure":
            refuse_payload(payload)
            return Failure(FailureCode(message.failure.code))
        case kind:
            raise LocalProtocolError(f"message of unknown kind {kind}")


def serialise(message: Any, fill: Callable[[Any], bytes]) -> Frame:
    """Encode an empty message that `fill` fills; it returns the payload. What goes wrong is a LocalProtocolError."""
    try:
        payload = fill(message)
        return message.SerializeToString(), payload
    except (ValueError, TypeError, EncodeError) as error:
        raise _unencodable(error) from None


def parse(message: Any, envelope: bytes, convert: Callable[[Any], T]) -> T:
    """Parse into an empty message and convert; whatever goes wrong is a RemoteProtocolError."""
    try:
        message.ParseFromString(envelope)
        return convert(message)
    except (DecodeError, LocalProtocolError, ValueError) as error:  # ValueError: an enum value that is not ours
        raise RemoteProtocolError(f"malformed {type(message).__name__}: {error}") from None


def _mode(value: int) -> Mode:
    mode = _MODES.get(value)
    if mode is None:
        raise LocalProtocolError(f"unknown mode {value}")
    return mode


def number(member: enum.Enum) -> Any:
    """The value of an enum on the wire; Any because generated stubs want a type of theirs."""
    return member.value


def stray(event: object) -> LocalProtocolError:
    """The error for an event of the other direction, or none at all."""
    return LocalProtocolError(f"{type(event).__name__} does not travel in this direction")


def _unencodable(error: Exception) -> LocalProtocolError:
    return LocalProtocolError(f"event cannot be encoded: {error}")


def _fill(message: Any, chunk: Chunk) -> bytes:
    """Announce a chunk in place, where protobuf need not copy it; return its bytes."""
    if not chunk.data:
        raise LocalProtocolError(f"a chunk of request {chunk.request_id} has no bytes")
    message.request_id, message.first_row, message.rows = chunk.request_id, chunk.first_row, chunk.rows
    return chunk.data


def _first_event(announcement: Any, payload: bytes) -> Chunk | None:
    if announcement.HasField("first"):
        return _chunk_event(announcement.first, payload)
    refuse_payload(payload)
    return None


def _chunk_event(message: Any, payload: bytes) -> Chunk:
    if not payload:
        raise LocalProtocolError(f"a chunk of request {message.request_id} has no bytes")
    return Chunk(message.request_id, message.first_row, message.rows, payload)


def refuse_payload(payload: bytes) -> None:
    """Raise LocalProtocolError where bytes travel beside a message without a chunk."""
    if payload:
        raise LocalProtocolError(f"{len(payload)} bytes travel beside a message without a chunk")
