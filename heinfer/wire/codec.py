"""Events to bytes and back, by protobuf; those of queries and results are in `heinfer.wire.query_codec`.

Decoding is total: whatever the bytes, the result is a well-formed event or a `RemoteProtocolError`. Fields that this
version does not know are ignored; the protocol version tells peers apart.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire.limits import Limits
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


def encode_node_event(event: NodeEvent, limits: Limits) -> bytes:
    """Encode what a node says to a server.

    Raises:
        LocalProtocolError: no such event, or it exceeds `limits.message_bytes`. So do all encoders here.
    """

    def convert() -> Any:
        match event:
            case Hello():
                return pb.NodeMessage(
                    hello=pb.Hello(
                        protocol_version=event.protocol_version, plan_hash=event.plan_hash, session=event.session
                    )
                )
            case BlockRequest():
                request = pb.BlockRequest(
                    session=event.session,
                    plan_hash=event.plan_hash,
                    block=event.block,
                    request_id=event.request_id,
                    attempt=event.attempt,
                    mode=number(event.mode),
                    samples=event.samples,
                    rows=event.rows,
                )
                message = pb.NodeMessage(request=request)
                if event.first is not None:
                    _fill(message.request.first, event.first)
                return message
            case Chunk():
                message = pb.NodeMessage()
                _fill(message.chunk, event)
                return message

    return encode(convert, limits)


def decode_node_event(data: bytes, limits: Limits) -> NodeEvent:
    """Decode what a node said.

    Raises:
        RemoteProtocolError: anything else. So do all decoders here.
    """

    def convert(message: Any) -> NodeEvent:
        match message.WhichOneof("kind"):
            case "hello":
                hello = message.hello
                return Hello(hello.plan_hash, hello.session, hello.protocol_version)
            case "request":
                request = message.request
                return BlockRequest(
                    session=request.session,
                    plan_hash=request.plan_hash,
                    block=request.block,
                    request_id=request.request_id,
                    samples=request.samples,
                    rows=request.rows,
                    attempt=request.attempt,
                    mode=Mode(request.mode),
                    first=_first_event(request),
                )
            case "chunk":
                return _chunk_event(message.chunk)
            case kind:
                raise LocalProtocolError(f"message of unknown kind {kind}")

    return decode(pb.NodeMessage(), data, limits, convert)


def encode_server_event(event: ServerEvent, limits: Limits) -> bytes:
    """Encode what a server says to a node. Raises as `encode_node_event`."""

    def convert() -> Any:
        match event:
            case Ready():
                return pb.ServerMessage(ready=pb.Ready())
            case BlockAnswer():
                answer = pb.BlockAnswer(request_id=event.request_id, rows=event.rows, compute_seconds=event.compute_s)
                message = pb.ServerMessage(answer=answer)
                if event.first is not None:
                    _fill(message.answer.first, event.first)
                return message
            case Chunk():
                message = pb.ServerMessage()
                _fill(message.chunk, event)
                return message
            case Failure():
                return pb.ServerMessage(failure=pb.Failure(code=number(event.code)))

    return encode(convert, limits)


def decode_server_event(data: bytes, limits: Limits) -> ServerEvent:
    """Decode what a server said. Raises as `decode_node_event`."""

    def convert(message: Any) -> ServerEvent:
        match message.WhichOneof("kind"):
            case "ready":
                return Ready()
            case "answer":
                answer = message.answer
                return BlockAnswer(answer.request_id, answer.rows, answer.compute_seconds, _first_event(answer))
            case "chunk":
                return _chunk_event(message.chunk)
            case "failure":
                return Failure(FailureCode(message.failure.code))
            case kind:
                raise LocalProtocolError(f"message of unknown kind {kind}")

    return decode(pb.ServerMessage(), data, limits, convert)


def encode(convert: Callable[[], Any], limits: Limits) -> bytes:
    """Serialise the message that `convert` makes; None, or whatever it raises, is a LocalProtocolError."""
    try:
        message = convert()
        if message is None:
            raise LocalProtocolError("this event does not travel in this direction")
        data: bytes = message.SerializeToString()
    except (ValueError, TypeError, EncodeError) as error:
        raise LocalProtocolError(f"event cannot be encoded: {error}") from None
    if len(data) > limits.message_bytes:
        raise LocalProtocolError(f"message of {len(data)} bytes, at most {limits.message_bytes} are allowed")
    return data


def decode(message: Any, data: bytes, limits: Limits, convert: Callable[[Any], T]) -> T:
    """Parse into an empty message and convert; whatever goes wrong is a RemoteProtocolError."""
    if len(data) > limits.message_bytes:
        raise RemoteProtocolError(f"message of {len(data)} bytes, at most {limits.message_bytes} are allowed")
    try:
        message.ParseFromString(data)
        return convert(message)
    except (DecodeError, LocalProtocolError, ValueError) as error:  # ValueError: an enum value that is not ours
        raise RemoteProtocolError(f"malformed {type(message).__name__}: {error}") from None


def number(member: enum.Enum) -> Any:
    """The value of an enum on the wire; Any because generated stubs want a type of theirs."""
    return member.value


def _fill(message: Any, chunk: Chunk) -> None:
    """Write a chunk in place: protobuf copies a message that is made first and then put into another."""
    message.request_id, message.first_row, message.rows = chunk.request_id, chunk.first_row, chunk.rows
    message.data = chunk.data


def _first_event(announcement: Any) -> Chunk | None:
    return _chunk_event(announcement.first) if announcement.HasField("first") else None


def _chunk_event(message: Any) -> Chunk:
    return Chunk(message.request_id, message.first_row, message.rows, message.data)
