"""What a peer may send, from noise to messages that are wrong in one number: protocol errors come of it, nothing else.

Memory is bounded as well: a size that is only declared must not be allocated, so an example gets 64 MiB more than there
is, while messages declare up to gigabytes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import ProtocolError
from heinfer.wire import (
    BlockAnswer,
    BlockShape,
    Chunk,
    Connection,
    Describe,
    Description,
    End,
    Failure,
    FailureCode,
    Limits,
    Mode,
    NodeSession,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    Ready,
    ResultHeader,
    ServerSession,
    Statistics,
    TensorChunk,
    TensorSpec,
    codec,
    query_codec,
    row_bytes,
)
from heinfer.wire.frames import Framing, query_framing, session_framing
from heinfer.wire.proto import heinfer_pb2 as pb
from heinfer.wire.tensors import read_query, read_result
from tests.fuzz.campaign import SECONDS, bounded, campaign, run_for
from tests.fuzz.mutations import mutated

Frame = tuple[bytes, bytes]
LIMITS = Limits(reply_s=5)
PLAN, SESSION = b"p" * 32, b"s" * 16
#: The last has a prepared form: 2 groups a sample up, 3 down.
BLOCKS = (BlockShape(5, 3, 64), BlockShape(4, 2, 64, 40, 70))
MEMORY_BYTES = 64 * 2**20
NUMBERS = (0, 1, 2, 3, 5, 64, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -1)


def node_frames() -> list[Frame]:
    """All that a node says in two uploads."""
    node = NodeSession(SESSION, PLAN, BLOCKS, LIMITS)
    events: list[Any] = [node.hello()]
    node.receive(Ready())
    events += node.upload(0, 3, Mode.STANDARD, bytes(5 * row_bytes(3, 64)))
    events += node.upload(1, 2, Mode.PREPARED, bytes(2 * 2 * 200))
    return [codec.encode_node_event(event) for event in events]


def server_frames() -> list[Frame]:
    """All that a server answers, and a last word."""
    row = row_bytes(3, 64)
    events = [
        Ready(),
        BlockAnswer(1, 3, 0.5, Chunk(1, 0, 2, bytes(2 * row))),
        Chunk(1, 2, 1, bytes(row)),
        BlockAnswer(2, 6, 0.25, Chunk(2, 0, 6, bytes(6 * 200))),
        Failure(FailureCode.FAILED),
    ]
    return [codec.encode_server_event(event) for event in events]


def query_frames() -> list[Frame]:
    """A question and a query of three tensors, one of them empty."""
    specs = (TensorSpec("x", "float32", (2, 3)), TensorSpec("e", "int64", (0, 4)), TensorSpec("m", "bool", (5,)))
    events = [
        Describe(),
        QueryHeader(7, specs, True, 2, TensorChunk(0, 0, bytes(20))),
        TensorChunk(0, 20, bytes(4)),
        TensorChunk(2, 0, b"\1\0\1\0\1"),
    ]
    return [query_codec.encode_query_event(event, LIMITS) for event in events]


def result_frames() -> list[Frame]:
    """A result with statistics; then what else a node may say."""
    spec = TensorSpec("y", "float64", (2, 2))
    events = [
        ResultHeader(7, (spec,), TensorChunk(0, 0, bytes(16))),
        TensorChunk(0, 16, bytes(16)),
        Statistics(b'{"rounds": 2}'),
        QueryFailure(QueryFailureCode.INPUT, "no"),
        Description(PLAN, (TensorSpec("x", "float32", (None, 3)),), (spec,), 4096, Mode.PREPARED),
    ]
    return [query_codec.encode_result_event(event, LIMITS) for event in events]


CONVERSATIONS: dict[str, tuple[list[Frame], type[Any], Framing]] = {
    "node": (node_frames(), pb.NodeMessage, session_framing(LIMITS)),
    "server": (server_frames(), pb.ServerMessage, session_framing(LIMITS)),
    "query": (query_frames(), pb.QueryMessage, query_framing(LIMITS)),
    "result": (result_frames(), pb.ResultMessage, query_framing(LIMITS)),
}


def hear_node(frames: Sequence[Frame]) -> None:
    server = ServerSession(PLAN, BLOCKS, LIMITS)
    for frame in frames:
        event = codec.decode_node_event(*frame)
        server.receive(event)
        if type(event).__name__ == "Hello":
            server.send(Ready())
    server.receive(End())


def hear_server(frames: Sequence[Frame]) -> None:
    node = NodeSession(SESSION, PLAN, BLOCKS, LIMITS)
    node.hello()
    for position, frame in enumerate(frames):
        node.receive(codec.decode_server_event(*frame))
        if position == 0:
            for _ in node.upload(0, 3, Mode.STANDARD, bytes(5 * row_bytes(3, 64))):
                pass
            for _ in node.upload(1, 2, Mode.PREPARED, bytes(2 * 2 * 200)):
                pass
    node.receive(End())


def hear_query(frames: Sequence[Frame]) -> None:
    events = (query_codec.decode_query_event(*frame, LIMITS) for frame in frames)
    for event in events:
        if isinstance(event, QueryHeader):
            read_query(iter([event, *events]), LIMITS)


def hear_result(frames: Sequence[Frame]) -> None:
    events = (query_codec.decode_result_event(*frame, LIMITS) for frame in frames)
    read_result(events, LIMITS, want_statistics=True)
    for _ in events:
        pass


HEARERS: dict[str, Callable[[Sequence[Frame]], None]] = {
    "node": hear_node,
    "server": hear_server,
    "query": hear_query,
    "result": hear_result,
}


def edit_message(message: Any, choose: Callable[[Sequence[Any]], Any]) -> None:
    """Change one field of a protobuf message, at any depth, to something else that protobuf can say."""
    field = choose(message.DESCRIPTOR.fields)
    if field.is_repeated:
        items = getattr(message, field.name)
        if len(items) and choose([True, False]):
            del items[choose(range(len(items)))]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for _ in range(choose([1, 2, 40])):
                edit_message(items.add(), choose)
        else:
            items.extend(choose([[number(field, choose)], [1] * 40]))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if choose([True, True, True, False]):
            inner = getattr(message, field.name)
            inner.SetInParent()
            if inner.DESCRIPTOR.fields:
                edit_message(inner, choose)
        else:
            message.ClearField(field.name)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        setattr(message, field.name, choose([b"", b"x", PLAN, SESSION, bytes(1000), PLAN[:-1]]))
    elif field.type == FieldDescriptor.TYPE_STRING:
        setattr(message, field.name, choose(["", "x", "float32", "object", "e" * 5000, "\0", "float64"]))
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        setattr(message, field.name, choose([0.0, -1.0, float("nan"), float("inf"), 1e300]))
    else:
        setattr(message, field.name, number(field, choose))


def number(field: Any, choose: Callable[[Sequence[Any]], Any]) -> int:
    """Return a number that the field can hold."""
    chosen = int(choose(NUMBERS))
    match field.type:
        case FieldDescriptor.TYPE_UINT32:
            return chosen % 2**32
        case FieldDescriptor.TYPE_UINT64:
            return chosen % 2**64
        case FieldDescriptor.TYPE_INT64:
            return (chosen + 2**63) % 2**64 - 2**63
        case FieldDescriptor.TYPE_BOOL:
            return chosen % 2
        case _:
            return (chosen + 2**31) % 2**32 - 2**31  # an enum


@st.composite
def edited_frames(draw: st.DrawFn, kind: str) -> list[Frame]:
    """Return a conversation with a few edits: of fields, of bytes, of the order."""
    valid, message_type, _ = CONVERSATIONS[kind]
    frames = list(valid)

    def choose(items: Sequence[Any]) -> Any:
        return draw(st.sampled_from(list(items)))

    for _ in range(draw(st.integers(1, 3))):
        if not frames:
            break
        place = choose(range(len(frames)))
        envelope, payload = frames[place]
        match choose(["field", "field", "field", "envelope", "payload", "drop", "repeat", "swap"]):
            case "field":
                message = message_type()
                with suppress(Exception):  # an envelope that was damaged before
                    message.ParseFromString(envelope)
                edit_message(message, choose)
                frames[place] = message.SerializeToString(), payload
            case "envelope":
                frames[place] = draw(mutated(envelope)), payload
            case "payload":
                frames[place] = envelope, choose([b"", bytes(payload[:-1]), bytes(payload) + b"x", bytes(2**20)])
            case "drop":
                del frames[place]
            case "repeat":
                frames.insert(place, frames[place])
            case _:
                other = choose(range(len(frames)))
                frames[place], frames[other] = frames[other], frames[place]
    return frames


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def as_bytes(frames: Sequence[Frame], framing: Framing) -> bytes:
    """Return what a connection sends for these frames."""
    near, far = tcp_pair()
    connection = Connection(near, LIMITS, framing)
    connection.send_magic()
    for frame in frames:
        connection.send(*frame)
    connection.close()
    return b"".join(_received(far))


def _received(sock: socket.socket) -> Iterator[bytes]:
    with sock:
        while data := sock.recv(2**16):
            yield data


def hear_bytes(data: bytes, framing: Framing) -> None:
    """Read a connection to its end."""
    near, far = tcp_pair()
    with near:
        near.sendall(data)
    connection = Connection(far, LIMITS, framing)
    try:
        connection.expect_magic()
        while connection.receive() is not None:
            pass
    finally:
        connection.close()


STREAMS = {kind: as_bytes(frames, framing) for kind, (frames, _, framing) in CONVERSATIONS.items()}


@st.composite
def streams(draw: st.DrawFn, kind: str) -> bytes:
    """Return the bytes of a connection, damaged, or noise."""
    if draw(st.integers(0, 4)):
        return draw(mutated(STREAMS[kind]))
    return draw(st.sampled_from([b"", CONVERSATIONS[kind][2].magic])) + draw(st.binary(max_size=200))


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_unchanged_conversations_are_heard_to_the_end_but_for_the_last_words(kind: str) -> None:
    """What is edited below is valid to begin with."""
    frames, _, framing = CONVERSATIONS[kind]
    hear_bytes(STREAMS[kind], framing)
    whole = {"server": frames[:-1]}.get(kind, frames)
    HEARERS[kind](whole)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_edited_conversation_is_heard_or_a_protocol_error(kind: str) -> None:
    refused = 0

    @campaign(200)
    @given(edited_frames(kind))
    def check(frames: list[Frame]) -> None:
        nonlocal refused
        with bounded(extra_bytes=MEMORY_BYTES):
            try:
                HEARERS[kind](frames)
            except ProtocolError:
                refused += 1

    run_for(SECONDS / len(CONVERSATIONS) / 2, check)
    assert refused > 0


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_damaged_stream_is_read_or_a_protocol_error(kind: str) -> None:
    refused, framing = 0, CONVERSATIONS[kind][2]

    @campaign(200)
    @given(streams(kind))
    def check(data: bytes) -> None:
        nonlocal refused
        with bounded(extra_bytes=MEMORY_BYTES):
            try:
                hear_bytes(data, framing)
            except ProtocolError:
                refused += 1

    run_for(SECONDS / len(CONVERSATIONS) / 2, check)
    assert refused > 0
