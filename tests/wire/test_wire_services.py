"""The node's service over real connections, on 127.0.0.1 only."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from heinfer.errors import InputError, IntegrityError, LocalProtocolError, ParameterError, RemoteProtocolError
from heinfer.wire import (
    Address,
    Description,
    FailureCode,
    Limits,
    QueryFailedError,
    QueryFailureCode,
    QueryHeader,
    RefusedError,
    ResultHeader,
    Statistics,
    TensorChunk,
    TensorSpec,
    TransportError,
    add_node,
    bind,
    call_describe,
    call_infer,
    describe_tensors,
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
PLAN = b"p" * 32
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


def test_query_without_a_free_worker_is_busy_and_an_error_of_our_events_is_ours(start):
    started, go = threading.Event(), threading.Event()

    def wait(events):
        started.set()
        go.wait(TIMEOUT_S)
        yield from double(events)

    channel = start(lambda server: add_node(server, lambda: DESCRIPTION, wait, LIMITS), workers=1)
    tensors = {"x": np.arange(3, dtype=np.float32)}
    events = [QueryHeader(9, describe_tensors(tensors)), *iterate_tensor_chunks(tensors, LIMITS)]
    first = call_infer(channel, events, LIMITS, TIMEOUT_S)
    assert started.wait(TIMEOUT_S)
    with pytest.raises(RefusedError) as caught:
        read_result(call_infer(channel, events, LIMITS, TIMEOUT_S), LIMITS)
    assert caught.value.code is FailureCode.BUSY
    go.set()
    assert read_result(first, LIMITS)[1]["x"].tolist() == [0, 2, 4]
    with pytest.raises(LocalProtocolError, match="4000"):
        read_result(call_infer(channel, [TensorChunk(0, 0, bytes(5000))], LIMITS, TIMEOUT_S), LIMITS)


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
    channel = start(lambda server: add_node(server, lambda: DESCRIPTION, double, LIMITS))
    described = heinfer_pb2_grpc.NodeStub(channel).Describe(pb.DescribeRequest(), timeout=TIMEOUT_S)
    assert described.plan_hash == PLAN


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
