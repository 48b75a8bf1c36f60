"""Events to bytes and back, and bytes that are no events."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire import (
    BlockAnswer,
    BlockRequest,
    Chunk,
    Describe,
    Description,
    Failure,
    FailureCode,
    Greeting,
    Hello,
    Limits,
    Mode,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    Ready,
    ResultHeader,
    Statistics,
    TensorChunk,
    TensorSpec,
    codec,
    query_codec,
)
from heinfer.wire.limits import ENVELOPE_BYTES
from heinfer.wire.proto import heinfer_pb2 as pb
from heinfer.wire.queries import DTYPE_BYTES

LIMITS = Limits()
HASH, SESSION = b"h" * 32, b"s" * 16


def uints(bits, low=0):
    return st.integers(low, 2**bits - 1)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))
specs = st.builds(TensorSpec, names, dtypes, st.lists(st.integers(0, 40), max_size=4).map(tuple))
open_specs = st.builds(
    TensorSpec, names, dtypes, st.lists(st.none() | st.integers(0, 2**63 - 1), max_size=4).map(tuple)
)


def unique(elements):
    return st.lists(elements, max_size=4, unique_by=lambda spec: spec.name).map(tuple)


chunks = st.builds(Chunk, uints(64, 1), uints(64), uints(32, 1), st.binary(min_size=1, max_size=50))
tensor_chunks = st.builds(TensorChunk, uints(32), uints(64), st.binary(min_size=1, max_size=50))


def with_first(events):
    """Let some announcements carry a chunk of their own."""
    firsts = st.none() | chunks
    return st.builds(
        lambda event, first: replace(event, first=first and replace(first, request_id=event.request_id)),
        events,
        firsts,
    )


firsts = st.none() | tensor_chunks


hash_bytes, session_bytes = st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16)
EVENTS = {
    "node_event": (
        st.builds(Hello, hash_bytes, session_bytes, uints(32))
        | with_first(
            st.builds(
                BlockRequest,
                session_bytes,
                hash_bytes,
                uints(32),
                uints(64, 1),
                uints(32, 1),
                uints(64, 1),
                uints(32),
                st.sampled_from(Mode),
                trace=st.just(b"") | st.binary(min_size=24, max_size=24),
            )
        )
        | chunks
    ),
    "server_event": (
        st.just(Ready())
        | with_first(st.builds(BlockAnswer, uints(64, 1), uints(64, 1), st.floats(0, 1e300)))
        | st.builds(Failure, st.sampled_from(FailureCode))
        | chunks
    ),
    "query_event": (
        st.just(Describe())
        | st.builds(Greeting, st.text(st.characters(exclude_categories=["Cs"]), max_size=512), st.just("") | names)
        | st.builds(QueryHeader, uints(64), unique(specs), st.booleans(), uints(32), firsts, st.just("") | names)
        | tensor_chunks
    ),
    "result_event": (
        st.builds(ResultHeader, uints(64), unique(specs), firsts)
        | tensor_chunks
        | st.builds(Statistics, st.binary(max_size=50))
        | st.builds(QueryFailure, st.sampled_from(QueryFailureCode), names)
        | st.builds(
            Description,
            hash_bytes,
            unique(open_specs),
            unique(open_specs),
            uints(32, 1),
            st.sampled_from(Mode),
            model=st.just("") | names,
        )
    ),
}
KINDS = sorted(EVENTS)


def functions(kind):
    """Encoder to (envelope, payload) and decoder from them."""
    if kind in ("node_event", "server_event"):
        return getattr(codec, f"encode_{kind}"), getattr(codec, f"decode_{kind}")
    pair = getattr(query_codec, f"encode_{kind}"), getattr(query_codec, f"decode_{kind}")
    return tuple(partial(function, limits=LIMITS) for function in pair)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_round_trip(kind, data):
    encode, decode = functions(kind)
    event = data.draw(EVENTS[kind])
    assert decode(*encode(event)) == event


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_bytes_decode_or_raise_remote_protocol_error(kind, data):
    encode, decode = functions(kind)
    envelope, payload = encode(data.draw(EVENTS[kind]))
    encoded = bytearray(envelope)
    for position, value in data.draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4)):
        if position < len(encoded):
            encoded[position] = value
    garbage = data.draw(st.sampled_from([bytes(encoded), b""])) + data.draw(st.binary(max_size=40))
    try:
        event = decode(garbage, data.draw(st.just(payload) | st.binary(max_size=9)))
    except RemoteProtocolError:
        return
    assert decode(*encode(event)) == event


@pytest.mark.parametrize("kind", KINDS)
def test_empty_message_is_refused(kind):
    with pytest.raises(RemoteProtocolError):
        functions(kind)[1](b"", b"")


def test_every_truncation_is_refused():
    request = BlockRequest(SESSION, HASH, 1, 2, 3, 4, 5, Mode.PREPARED, Chunk(2, 0, 1, b"abc"))
    whole, payload = codec.encode_node_event(request)
    assert payload == b"abc"
    for size in range(len(whole)):
        with pytest.raises(RemoteProtocolError):
            codec.decode_node_event(whole[:size], payload)


def _request(**changes):
    fields = {"session": SESSION, "plan_hash": HASH, "request_id": 1, "mode": 1, "samples": 1, "rows": 1, **changes}
    return pb.NodeMessage(request=pb.BlockRequest(**fields))


def _query(*tensors):
    return pb.QueryMessage(header=pb.QueryHeader(request_id=1, tensors=tensors))


def _spec(name="x", dtype="float32", dims=(1,)):
    return pb.TensorSpec(name=name, dtype=dtype, dims=dims)


HOSTILE = {
    "short hash": ("node_event", pb.NodeMessage(hello=pb.Hello(plan_hash=HASH[1:], session=SESSION))),
    "long session": ("node_event", pb.NodeMessage(hello=pb.Hello(plan_hash=HASH, session=SESSION + b"x"))),
    "mode unset": ("node_event", _request(mode=0)),
    "mode unknown": ("node_event", _request(mode=77)),
    "no samples": ("node_event", _request(samples=0)),
    "no rows": ("node_event", _request(rows=0)),
    "id zero": ("node_event", _request(request_id=0)),
    "short trace": ("node_event", _request(trace=b"t" * 23)),
    "long trace": ("node_event", _request(trace=b"t" * 25)),
    "long traceparent": (
        "query_event",
        pb.QueryMessage(header=pb.QueryHeader(request_id=1, traceparent="0" * 257)),
    ),
    "first chunk of another request": ("node_event", _request(first=pb.Chunk(request_id=2, rows=1))),
    "first chunk without id": ("node_event", _request(first=pb.Chunk(rows=1))),
    "first chunk without rows": ("node_event", _request(first=pb.Chunk(request_id=1))),
    "first chunk empty": ("node_event", _request(first=pb.Chunk())),
    "first chunk of another answer": (
        "server_event",
        pb.ServerMessage(answer=pb.BlockAnswer(request_id=1, rows=1, first=pb.Chunk(request_id=2, rows=1))),
    ),
    "chunk without rows": ("node_event", pb.NodeMessage(chunk=pb.Chunk(request_id=1))),
    "time nan": (
        "server_event",
        pb.ServerMessage(answer=pb.BlockAnswer(request_id=1, rows=1, compute_seconds=float("nan"))),
    ),
    "time negative": (
        "server_event",
        pb.ServerMessage(answer=pb.BlockAnswer(request_id=1, rows=1, compute_seconds=-1)),
    ),
    "code unset": ("server_event", pb.ServerMessage(failure=pb.Failure())),
    "code unknown": ("server_event", pb.ServerMessage(failure=pb.Failure(code=99))),
    "dtype object": ("query_event", _query(_spec(dtype="object"))),
    "dtype of numpy's short form": ("query_event", _query(_spec(dtype="f4"))),
    "no name": ("query_event", _query(_spec(name=""))),
    "long name": ("query_event", _query(_spec(name="x" * 1025))),
    "same name twice": ("query_event", _query(_spec(), _spec())),
    "too many tensors": ("query_event", _query(*(_spec(name=str(k)) for k in range(LIMITS.max_tensors + 1)))),
    "negative dimension": ("query_event", _query(_spec(dims=(-2,)))),
    "open dimension": ("query_event", _query(_spec(dims=(-1, 3)))),
    "rank 33": ("query_event", _query(_spec(dims=(1,) * 33))),
    "product overflows 64 bits": ("query_event", _query(_spec(dims=(2**32, 2**32)))),
    "product overflows beside a zero": ("query_event", _query(_spec(dims=(2**62, 2**62, 0)))),
    "too large together": ("query_event", _query(_spec(dims=(2**30,)), _spec("y", dims=(2**30 + 1,)))),
    "open dimension in a result": (
        "result_event",
        pb.ResultMessage(header=pb.ResultHeader(tensors=[_spec(dims=(-1,))])),
    ),
    "long reason": ("result_event", pb.ResultMessage(failure=pb.QueryFailure(code=1, message="x" * 4097))),
    "no samples described": (
        "result_event",
        pb.ResultMessage(description=pb.Description(plan_hash=HASH, mode=1, protocol_version=1)),
    ),
    "mode unset in a description": (
        "result_event",
        pb.ResultMessage(description=pb.Description(plan_hash=HASH, max_samples=1, protocol_version=1)),
    ),
}


@pytest.mark.parametrize(("kind", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_content_is_refused(kind, message):
    # With a payload where there is a chunk: it is not for lack of one that these are refused.
    payload = b"x" if "chunk" in str(message) or "first" in str(message) else b""
    with pytest.raises(RemoteProtocolError):
        functions(kind)[1](message.SerializeToString(), payload)


WHOLE = [
    ("node_event", Hello(HASH, SESSION)),
    ("node_event", BlockRequest(SESSION, HASH, 0, 1, 1, 1)),
    ("server_event", Ready()),
    ("server_event", BlockAnswer(1, 1, 0.0)),
    ("server_event", Failure(FailureCode.BUSY)),
    ("query_event", Describe()),
    ("query_event", Greeting("token")),
    ("query_event", Greeting("", "digits")),
    ("query_event", QueryHeader(1, ())),
    ("result_event", ResultHeader(1, ())),
    ("result_event", Statistics(b"{}")),
    ("result_event", QueryFailure(QueryFailureCode.BUSY, "later")),
    ("result_event", Description(HASH, (), (), 1)),
]


@pytest.mark.parametrize(("kind", "event"), WHOLE)
def test_payload_without_a_chunk_is_refused(kind, event):
    encode, decode = functions(kind)
    envelope, payload = encode(event)
    assert payload == b""
    with pytest.raises(RemoteProtocolError, match="1 bytes travel beside"):
        decode(envelope, b"x")


CHUNK = Chunk(1, 0, 1, b"x")
CHUNKS = [
    ("node_event", CHUNK),
    ("node_event", BlockRequest(SESSION, HASH, 0, 1, 1, 1, first=CHUNK)),
    ("server_event", CHUNK),
    ("server_event", BlockAnswer(1, 1, 0.0, first=CHUNK)),
]


@pytest.mark.parametrize(("kind", "event"), CHUNKS)
def test_chunk_without_payload_is_refused_and_not_sent(kind, event):
    encode, decode = functions(kind)
    with pytest.raises(RemoteProtocolError, match="has no bytes"):
        decode(encode(event)[0], b"")
    empty = replace(CHUNK, data=b"")
    with pytest.raises(LocalProtocolError, match="has no bytes"):
        encode(empty if event is CHUNK else replace(event, first=empty))


TENSOR_CHUNK = TensorChunk(0, 0, b"x")


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("query_event", TENSOR_CHUNK),
        ("query_event", QueryHeader(0, (), first=TENSOR_CHUNK)),
        ("result_event", TENSOR_CHUNK),
        ("result_event", ResultHeader(0, (), TENSOR_CHUNK)),
    ],
)
def test_chunk_of_a_tensor_travels_as_payload_and_is_refused_without(kind, event):
    encode, decode = functions(kind)
    envelope, payload = encode(event)
    assert payload is TENSOR_CHUNK.data
    assert decode(envelope, payload) == event
    with pytest.raises(RemoteProtocolError, match="is empty"):
        decode(envelope, b"")


def test_bytes_of_a_chunk_are_not_copied():
    data = memoryview(bytearray(1000))
    envelope, payload = codec.encode_node_event(Chunk(1, 0, 5, data))
    assert payload is data
    assert len(envelope) < 20
    data = bytes(1000)
    assert codec.decode_node_event(envelope, data).data is data
    envelope, payload = query_codec.encode_query_event(TensorChunk(1, 5, data), LIMITS)
    assert payload is data
    assert query_codec.decode_query_event(envelope, data, LIMITS).data is data


def test_name_that_is_not_utf8_is_refused():
    data = _query(_spec(name="xyz")).SerializeToString().replace(b"xyz", b"x\xff\xfe")
    with pytest.raises(RemoteProtocolError):
        query_codec.decode_query_event(data, b"", LIMITS)


def test_envelopes_are_far_below_their_limit():
    most = 2**64 - 1
    first = Chunk(most, most, 2**32 - 1, bytes(5000))
    request = BlockRequest(SESSION, HASH, 2**32 - 1, most, 2**32 - 1, most, 2**32 - 1, Mode.PREPARED, first, bytes(24))
    envelope, payload = codec.encode_node_event(request)
    assert len(envelope) <= ENVELOPE_BYTES // 4
    assert codec.decode_node_event(envelope, payload) == request
    answer = BlockAnswer(most, most, 0.1, first)
    envelope, payload = codec.encode_server_event(answer)
    assert len(envelope) <= ENVELOPE_BYTES // 4
    assert codec.decode_server_event(envelope, payload) == answer


@pytest.mark.parametrize("event", [Ready(), Failure(FailureCode.FAILED), None])
def test_event_of_the_other_direction_is_not_encoded(event):
    with pytest.raises(LocalProtocolError):
        codec.encode_node_event(event)


@pytest.mark.parametrize("event", [Chunk(1, 0, 1, b"x"), None])
@pytest.mark.parametrize("kind", ["query_event", "result_event"])
def test_event_of_a_session_is_not_encoded_for_a_query(kind, event):
    with pytest.raises(LocalProtocolError, match="does not travel"):
        functions(kind)[0](event)


def test_lone_surrogate_in_a_name_is_a_local_error():
    with pytest.raises(LocalProtocolError):
        query_codec.encode_query_event(QueryHeader(1, (TensorSpec("\ud800", "bool", (1,)),)), LIMITS)


def test_length_prefix_beyond_the_message_is_refused():
    data = b"\x1a" + b"\xff\xff\xff\xff\x07" + struct.pack("<Q", 1)
    with pytest.raises(RemoteProtocolError):
        codec.decode_node_event(data, b"")


def test_data_and_reasons_stay_out_of_repr():
    for event in (Chunk(1, 0, 1, b"secret"), TensorChunk(0, 0, b"secret"), Statistics(b"secret")):
        assert "secret" not in repr(event)
