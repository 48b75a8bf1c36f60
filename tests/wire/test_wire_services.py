"""The services over real connections, on 127.0.0.1 only."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading

import numpy as np
import pytest

from heinfer.errors import InputError, IntegrityError, LocalProtocolError, ParameterError, RemoteProtocolError
from heinfer.wire import (
    PROTOCOL_VERSION,
    Address,
    AnswerComplete,
    BlockAnswer,
    BlockShape,
    Chunk,
    Description,
    End,
    Failure,
    FailureCode,
    Hello,
    Limits,
    NodeSession,
    QueryFailedError,
    QueryFailureCode,
    QueryHeader,
    Ready,
    RefusedError,
    ResultHeader,
    ServerSession,
    Statistics,
    TensorSpec,
    TransportError,
    UploadComplete,
    add_evaluator,
    add_node,
    bind,
    call_describe,
    call_infer,
    call_session,
    codec,
    describe_tensors,
    iterate_row_chunks,
    iterate_tensor_chunks,
    make_server,
    open_channel,
    query_failure,
    read_query,
    read_result,
    server_options,
)
from heinfer.wire.proto import heinfer_pb2 as pb
from heinfer.wire.proto import heinfer_pb2_grpc

LOOPBACK = Address("127.0.0.1", 0)
LIMITS = Limits(chunk_bytes=2000, message_bytes=4000)
PLAN, SESSION = b"p" * 32, b"s" * 16
BLOCKS = (BlockShape(5, 3, 64),)
DESCRIPTION = Description(PLAN, (TensorSpec("x", "float32", (None, 3)),), (), 64)
TIMEOUT_S = 20


@pytest.fixture
def start():
    """Start a server of ours with the given services; returns a channel to it."""
    stops = []

    def start_server(add, workers=4, limits=LIMITS):
        server = make_server(limits, workers)
        add(server)
        address = start_server.address = bind(server, LOOPBACK)
        server.start()
        channel = open_channel(address, LIMITS)
        stops.extend([channel.close, lambda: server.stop(0).wait()])
        return channel

    yield start_server
    for stop in stops:
        stop()


def echo(events):
    """A server that answers the first rows of each request."""
    session = ServerSession(PLAN, BLOCKS, LIMITS)
    data = {}
    for event in events:
        for item in session.receive(event):
            match item:
                case Hello():
                    yield session.send(Ready())
                case Chunk():
                    data[item.request_id] = data.get(item.request_id, b"") + item.data
                case UploadComplete():
                    request_id = item.request.request_id
                    row = session.row_bytes(request_id)
                    yield session.send(BlockAnswer(request_id, 3, 0.1))
                    for chunk in iterate_row_chunks(request_id, data.pop(request_id)[: 3 * row], row, 2000):
                        yield session.send(chunk)
    session.receive(End())
    yield session.send(End())


def test_session_over_a_connection(start):
    channel = start(lambda server: add_evaluator(server, echo, LIMITS))
    node, outgoing = NodeSession(SESSION, PLAN, BLOCKS, LIMITS), queue.SimpleQueue()
    stream = call_session(channel, iter(outgoing.get, None), LIMITS, TIMEOUT_S)
    outgoing.put(node.hello())
    node.receive(next(stream))
    uploads, answers, complete = {}, {}, []
    for samples in (1, 40):
        event = node.open_request(0, samples)
        outgoing.put(event)
        row = node.row_bytes(event.request_id)
        uploads[event.request_id] = bytes(k % 251 for k in range(5 * row))
        for chunk in iterate_row_chunks(event.request_id, uploads[event.request_id], row, 2000):
            outgoing.put(node.send(chunk))
    outgoing.put(node.send(End()))
    for event in stream:
        for item in node.receive(event):
            if isinstance(item, Chunk):
                answers[item.request_id] = answers.get(item.request_id, b"") + item.data
            complete += [item] if isinstance(item, AnswerComplete) else []
    node.receive(End())
    assert len(complete) == 2
    assert answers == {key: data[: len(data) * 3 // 5] for key, data in uploads.items()}


def _say(channel, events):
    return list(call_session(channel, events, LIMITS, TIMEOUT_S))


def test_wrong_plan_gets_one_code(start):
    channel = start(lambda server: add_evaluator(server, echo, LIMITS))
    assert _say(channel, [Hello(b"x" * 32, SESSION)]) == [Failure(FailureCode.PLAN)]


def test_error_of_a_handler_says_nothing_to_the_node(start, caplog):
    def broken(events):
        next(events)
        raise ValueError("secret")
        yield

    channel = start(lambda server: add_evaluator(server, broken, LIMITS))
    with caplog.at_level(logging.DEBUG):
        assert _say(channel, [Hello(PLAN, SESSION)]) == [Failure(FailureCode.FAILED)]
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("data", [b"", b"\xff" * 30, pb.NodeMessage(hello=pb.Hello()).SerializeToString()])
def test_garbage_ends_the_session_with_one_code(start, data):
    channel = start(lambda server: add_evaluator(server, echo, LIMITS))
    raw = channel.stream_stream("/heinfer.wire.Evaluator/Session")
    answers = [codec.decode_server_event(answer, LIMITS) for answer in raw(iter([data]), timeout=TIMEOUT_S)]
    assert answers == [Failure(FailureCode.FAILED)]


def test_oversized_message_never_reaches_the_handler(start):
    seen = []

    def handler(events):
        for event in events:
            seen.append(event)
            yield Ready()

    channel = start(lambda server: add_evaluator(server, handler, LIMITS))
    wide = Limits()
    assert _say(channel, [Chunk(1, 0, 1, bytes(3900))]) == [Ready()]
    large = open_channel(start.address, wide)
    with large, pytest.raises(RemoteProtocolError):
        list(call_session(large, [Chunk(1, 0, 1, bytes(5000))], wide, TIMEOUT_S))
    assert len(seen) == 1


def test_our_own_bug_while_sending_is_a_local_error(start):
    channel = start(lambda server: add_evaluator(server, echo, LIMITS))
    with pytest.raises(LocalProtocolError, match="4000"):
        _say(channel, [Chunk(1, 0, 1, bytes(5000))])


def test_server_without_a_free_worker_is_busy_and_cancelling_frees_it(start):
    gone = threading.Event()

    def wait(events):
        yield Ready()
        with contextlib.suppress(RemoteProtocolError):  # or a plain end: gRPC does not always tell them apart
            next(events, None)
        gone.set()

    channel = start(lambda server: add_evaluator(server, wait, LIMITS), workers=1)
    stop = threading.Event()
    stream = call_session(channel, iter(stop.wait, True), LIMITS, TIMEOUT_S)
    assert next(stream) == Ready()
    with pytest.raises(RefusedError) as caught:
        _say(channel, [Hello(PLAN, SESSION)])
    assert caught.value.code is FailureCode.BUSY
    stream.cancel()
    with pytest.raises(RemoteProtocolError):
        next(stream)
    assert gone.wait(TIMEOUT_S)
    stop.set()


def test_server_that_is_not_there_is_a_remote_error():
    server = make_server(LIMITS, 1)
    address = bind(server, LOOPBACK)
    server.start()  # a server that never started would go on listening
    server.stop(0).wait()
    with open_channel(address, LIMITS) as channel, pytest.raises(RemoteProtocolError):
        call_describe(channel, LIMITS, timeout_s=TIMEOUT_S)


def double(events):
    header, tensors = read_query(events, LIMITS)
    result = {name: 2 * array for name, array in tensors.items()}
    yield ResultHeader(header.request_id, describe_tensors(result))
    yield from iterate_tensor_chunks(result, LIMITS)
    if header.want_statistics:
        yield Statistics(b"{}")


def test_node_describes_itself_and_answers(start):
    channel = start(lambda server: add_node(server, lambda: DESCRIPTION, double, LIMITS))
    assert call_describe(channel, LIMITS, TIMEOUT_S) == DESCRIPTION
    tensors = {"x": np.arange(3000, dtype=np.float32)}
    events = [QueryHeader(9, describe_tensors(tensors), want_statistics=True), *iterate_tensor_chunks(tensors, LIMITS)]
    header, result, statistics = read_result(call_infer(channel, events, LIMITS, TIMEOUT_S), LIMITS)
    assert header.request_id == 9
    assert statistics is not None
    np.testing.assert_array_equal(result["x"], 2 * tensors["x"])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InputError("array x is missing"), QueryFailureCode.INPUT, "array x is missing"),
        (IntegrityError("block 2"), QueryFailureCode.INTEGRITY, "block 2"),
        (RefusedError(FailureCode.BUSY, "later"), QueryFailureCode.BUSY, "later"),
        (RemoteProtocolError("gone"), QueryFailureCode.SERVER, "gone"),
        (KeyError("secret"), QueryFailureCode.FAILED, "internal error"),
    ],
)
def test_failure_of_a_query_tells_the_client_why(start, error, code, text):
    def fail(events):
        raise error
        yield

    channel = start(lambda server: add_node(server, lambda: DESCRIPTION, fail, LIMITS))
    with pytest.raises(QueryFailedError, match=text) as caught:
        read_result(call_infer(channel, [], LIMITS, TIMEOUT_S), LIMITS)
    assert caught.value.code is code
    assert "secret" not in str(caught.value)


def test_malformed_query_is_the_clients_fault(start):
    channel = start(lambda server: add_node(server, lambda: DESCRIPTION, double, LIMITS))
    raw = channel.stream_stream("/heinfer.wire.Node/Infer")
    (answer,) = raw(iter([b"\xff"]), timeout=TIMEOUT_S)
    assert pb.ResultMessage.FromString(answer).failure.code == pb.QUERY_FAILURE_INPUT


def test_reason_is_cut_to_what_a_message_may_hold():
    assert len(query_failure(InputError("x" * 10_000)).message) == 4096


def test_generated_stubs_call_the_same_methods(start):
    channel = start(
        lambda server: (add_node(server, lambda: DESCRIPTION, double, LIMITS), add_evaluator(server, echo, LIMITS))
    )
    described = heinfer_pb2_grpc.NodeStub(channel).Describe(pb.DescribeRequest(), timeout=TIMEOUT_S)
    assert described.plan_hash == PLAN
    hello = pb.NodeMessage(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, plan_hash=PLAN, session=SESSION))
    (answer,) = heinfer_pb2_grpc.EvaluatorStub(channel).Session(iter([hello]), timeout=TIMEOUT_S)
    assert answer.WhichOneof("kind") == "ready"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_second_server_on_a_port_fails(host):
    first, second = make_server(LIMITS, 1), make_server(LIMITS, 1)
    port = bind(first, Address(host, 0)).port
    assert port > 0
    with pytest.raises(TransportError, match="in use"):
        bind(second, Address("localhost", port))
    first.stop(0).wait()
    second.stop(0).wait()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_plain_text_beyond_this_machine_is_refused(host):
    server = make_server(LIMITS, 1)
    with pytest.raises(TransportError, match="TLS comes with the transport layer"):
        bind(server, Address(host, 0))
    with pytest.raises(TransportError, match="SSH tunnel"):
        open_channel(Address(host, 1), LIMITS)
    server.stop(0).wait()


def test_options_carry_the_limits():
    options = dict(server_options(LIMITS))
    assert options["grpc.max_receive_message_length"] == 4000
    assert options["grpc.so_reuseport"] == 0


def test_server_without_workers_is_refused():
    with pytest.raises(ParameterError):
        make_server(LIMITS, 0)
