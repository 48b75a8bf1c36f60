"""A node's service and its clients over real connections, on 127.0.0.1 only."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from heinfer.errors import InputError, IntegrityError, LocalProtocolError, ParameterError, RemoteProtocolError
from heinfer.wire import (
    Address,
    BlockShape,
    Describe,
    Description,
    FailureCode,
    Limits,
    QueryClient,
    QueryFailedError,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    RefusedError,
    ResultHeader,
    Statistics,
    TensorChunk,
    TensorSpec,
    TransportError,
    connect,
    describe_tensors,
    iterate_tensor_chunks,
    query_client,
    query_failure,
    query_framing,
    serve_queries,
    serve_sessions,
)
from heinfer.wire.frames import SESSION_MAGIC
from heinfer.wire.query_codec import decode_result_event, encode_query_event
from tests.captured_traffic import framed
from tests.waiting import soon
from trusted_node.link import ServerLink

LOOPBACK = Address("127.0.0.1", 0)
LIMITS = Limits(chunk_bytes=2000, message_bytes=4000, reply_s=10.0)
PLAN = b"p" * 32
DESCRIPTION = Description(PLAN, (TensorSpec("x", "float32", (None, 3)),), (), 64)
SOON_S = 5.0
TIMEOUT_S = 20


class Double:
    """Answers with twice the tensors; refuses, fails or waits when asked to."""

    def __init__(self):
        self.answered = 0
        self.refusal = self.error = None
        self.started, self.go = threading.Event(), threading.Event()
        self.go.set()

    def describe(self):
        return DESCRIPTION

    def needs(self, header):
        return 1

    def check(self, header):
        if self.refusal is not None:
            raise self.refusal

    def answer(self, header, tensors, gone):
        self.answered += 1
        self.started.set()
        self.go.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        result = {name: 2 * array for name, array in tensors.items()}
        chunks = iterate_tensor_chunks(result, LIMITS)
        yield ResultHeader(header.request_id, describe_tensors(result), next(chunks, None))
        yield from chunks
        if header.want_statistics:
            yield Statistics(b"{}")


@pytest.fixture
def handler():
    return Double()


@pytest.fixture
def start(handler):
    """Start a node; returns a client of it, with the server as an attribute."""
    stops = []

    def start_node(workers=4, limits=LIMITS, address=LOOPBACK, **options):
        server = serve_queries(address, handler, LIMITS, workers, **options)
        client = QueryClient(server.address, limits)
        client.server = server
        stops.extend([client.close, lambda: server.stop(0)])
        return client

    yield start_node
    handler.go.set()
    for stop in stops:
        stop()
    assert not [t for t in threading.enumerate() if t.name in ("heinfer-query", "heinfer-accept")]


def ask(client, size=3, number=9, statistics=False):
    """Ask for the double of 0, 1, 2, ...; 500 numbers fill a chunk."""
    tensors = {"x": np.arange(size, dtype=np.float32)}
    chunks = iterate_tensor_chunks(tensors, LIMITS)
    header = QueryHeader(number, describe_tensors(tensors), statistics, first=next(chunks, None))
    result, found = client.ask(header, chunks)
    np.testing.assert_array_equal(result["x"], 2 * tensors["x"])
    return found


@contextlib.contextmanager
def raw_connection(client):
    connection = connect(client.server.address, LIMITS, query_framing(LIMITS))
    try:
        yield connection
    finally:
        connection.close()


def hear(connection):
    """All that a node says until it closes."""
    events = []
    while (message := connection.receive()) is not None:
        events.append(decode_result_event(*message, LIMITS))
    return events


@contextlib.contextmanager
def raises_soon(kind, **arguments):
    started = time.monotonic()
    with pytest.raises(kind, **arguments) as caught:
        yield caught
    assert time.monotonic() - started < SOON_S


# --- questions and answers -----------------------------------------------------------------------------------------


def test_node_describes_itself_and_answers(start):
    client = start()
    assert client.describe() == DESCRIPTION
    for size in (0, 1, 500, 501, 3000):
        assert ask(client, size) is None
        assert ask(client, size, statistics=True) == Statistics(b"{}")


def test_questions_one_after_the_other_share_a_connection(start, monkeypatch):
    made = []
    monkeypatch.setattr(query_client, "connect", lambda *arguments: made.append(connect(*arguments)) or made[-1])
    client = start()
    for number in range(5):
        client.describe()
        ask(client, 1000, number)
    assert len(made) == 1


def test_client_that_names_a_model_is_answered_by_it_alone(handler):
    others = {"a": Double(), "b": Double()}

    def about(name):
        if name not in others:
            raise InputError(f"no model {name!r}")
        return others[name]

    server = serve_queries(LOOPBACK, handler, LIMITS, 4, about=about)
    try:
        for name, answering in (("", handler), ("a", others["a"]), ("b", others["b"])):
            with contextlib.closing(QueryClient(server.address, LIMITS, model=name)) as client:
                assert client.describe() == DESCRIPTION
                ask(client)
                ask(client)
            assert answering.answered == 2
        with contextlib.closing(QueryClient(server.address, LIMITS, model="c")) as client:
            with pytest.raises(QueryFailedError, match="no model 'c'") as caught:
                client.describe()
            assert caught.value.code is QueryFailureCode.INPUT
    finally:
        server.stop(0)


def test_client_that_names_a_model_where_there_is_one_without_a_name_is_refused(start):
    node = start()
    with contextlib.closing(QueryClient(node.server.address, LIMITS, model="a")) as client:
        with pytest.raises(QueryFailedError, match="without a name") as caught:
            ask(client)
        assert caught.value.code is QueryFailureCode.INPUT


def test_queries_from_several_threads_are_answered_each_with_its_own(start, handler):
    client = start(workers=8)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: ask(client, 100 * number, number), range(64)))
    assert handler.answered == 64
    assert soon(lambda: len(client.server._serving) <= 4)  # no more are kept


def test_answer_that_takes_longer_than_any_limit_is_waited_for(start, handler):
    client = start(limits=replace(LIMITS, reply_s=0.2))
    handler.go.clear()
    threading.Timer(0.8, handler.go.set).start()
    ask(client, 1000)


def test_answer_to_another_query_is_refused(start, handler, monkeypatch):
    answer = handler.answer
    monkeypatch.setattr(handler, "answer", lambda header, *rest: answer(replace(header, request_id=8), *rest))
    with pytest.raises(RemoteProtocolError, match="query 9, got 8"):
        ask(start())


# --- busy ----------------------------------------------------------------------------------------------------------


def test_query_without_a_free_worker_is_busy_at_once_and_others_are_answered(start, handler):
    client = start(workers=1)
    handler.go.clear()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(ask, client)
        assert handler.started.wait(TIMEOUT_S)
        for size in (3, 30_000):
            with raises_soon(QueryFailedError, match="try again later") as caught:
                ask(client, size)
            assert caught.value.code is QueryFailureCode.BUSY
        assert client.describe() == DESCRIPTION
        handler.go.set()
        first.result()
    ask(client)
    assert handler.answered == 2


def test_connections_that_ask_nothing_take_no_worker(start):
    client = start(workers=1)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(raw_connection(client))
        ask(client)


def test_connection_beyond_the_bound_is_busy(start):
    client = start(connections=1)
    with raw_connection(client) as connection:
        connection.send(*encode_query_event(Describe(), LIMITS))
        assert connection.receive() is not None
        with raises_soon(QueryFailedError) as caught:
            ask(client, 30_000)
    assert caught.value.code is QueryFailureCode.BUSY
    assert soon(lambda: not client.server._serving)
    ask(client)


@pytest.mark.parametrize("half", [True, False], ids=["upload", "answer"])
def test_client_that_goes_away_in_the_middle_frees_its_place(start, handler, half):
    client = start(workers=1)
    header = QueryHeader(1, (TensorSpec("x", "uint8", (4_000_000,)),))
    with raw_connection(client) as connection:
        connection.send(*encode_query_event(header, LIMITS))
        if half:
            connection.send(*encode_query_event(TensorChunk(0, 0, bytes(2000)), LIMITS))
            time.sleep(0.1)
            with pytest.raises(QueryFailedError) as caught:
                ask(client)
            assert caught.value.code is QueryFailureCode.BUSY
        else:
            for offset in range(0, 4_000_000, 2000):
                connection.send(*encode_query_event(TensorChunk(0, offset, bytes(2000)), LIMITS))
            assert connection.receive() is not None
            time.sleep(0.1)

    def answered():
        with contextlib.suppress(QueryFailedError):
            ask(client)
            return True

    assert soon(answered)


# --- failures ------------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("where", ["refusal", "error"])
def test_failure_of_a_query_tells_the_client_why(start, handler, caplog, error, code, text, where):
    setattr(handler, where, error)
    client = start()
    with caplog.at_level(logging.DEBUG), raises_soon(QueryFailedError, match=text) as caught:
        ask(client)
    assert caught.value.code is code
    assert "secret" not in str(caught.value)
    assert soon(lambda: caplog.text.count("query ended by") == 1)
    assert type(error).__name__ in caplog.text
    assert not any(word in caplog.text for word in ("secret", "missing", "block 2"))
    setattr(handler, where, None)
    ask(client)


def test_failure_after_a_query_that_was_read_leaves_the_connection_to_the_next(start, handler):
    client = start()
    tensors = {"x": np.zeros(1, np.float32)}
    (chunk,) = iterate_tensor_chunks(tensors, LIMITS)
    query = encode_query_event(QueryHeader(9, describe_tensors(tensors), first=chunk), LIMITS)
    with raw_connection(client) as connection:
        for error, kind in ((InputError("no"), QueryFailure), (None, ResultHeader), (KeyError(), QueryFailure)):
            handler.error = error
            connection.send(*query)
            assert isinstance(decode_result_event(*connection.receive(), LIMITS), kind)
        connection.end_output()
        assert hear(connection) == []


def test_failure_in_the_middle_of_an_upload_is_heard(start, handler):
    client = start()
    handler.refusal = InputError("too many samples")
    with raises_soon(QueryFailedError, match="too many samples"):
        ask(client, 50_000_000)


def test_failure_in_the_middle_of_an_upload_ends_the_connection(start, handler):
    handler.refusal = InputError("too many samples")
    with raw_connection(start()) as connection:
        connection.send(*encode_query_event(QueryHeader(1, (TensorSpec("x", "uint8", (4000,)),)), LIMITS))
        assert hear(connection) == [QueryFailure(QueryFailureCode.INPUT, "too many samples")]


def test_failure_in_the_middle_of_an_answer_is_heard(start, handler, monkeypatch):
    def answer(header, tensors, gone):
        yield ResultHeader(header.request_id, describe_tensors(tensors))
        raise IntegrityError("block 1")

    monkeypatch.setattr(handler, "answer", answer)
    with raises_soon(QueryFailedError, match="block 1"):
        ask(start())


def test_answer_that_cannot_be_sent_is_a_failure(start, handler, monkeypatch):
    def answer(header, tensors, gone):
        yield ResultHeader(header.request_id, tuple(TensorSpec(f"{i:0900}", "bool", (1,)) for i in range(9)))

    monkeypatch.setattr(handler, "answer", answer)
    with raises_soon(QueryFailedError, match="4000") as caught:
        ask(start())
    assert caught.value.code is QueryFailureCode.FAILED


FRAMES = {
    "empty": framed(0, 0),
    "noise": framed(50, 0, b"\xff" * 50),
    "chunk first": framed(4, 9, b"\x12\x02\x08\x00" + bytes(9)),
    "payload beside a question": framed(2, 1, b"\x1a\x00x"),
    "envelope too long": framed(4001, 0, bytes(4001)),
    "payload too long": framed(0, 2001, bytes(2001)),
    "enormous": b"\xff" * 8,
    "cut": framed(50, 0, bytes(20)),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_malformed_query_is_the_clients_fault(start, handler, frame):
    client = start()
    with raw_connection(client) as connection:
        connection._write(frame, b"")
        connection.end_output()
        (failure,) = hear(connection)
    assert failure.code is QueryFailureCode.INPUT
    assert not handler.answered
    ask(client)


def test_query_that_breaks_off_is_the_clients_fault(start):
    with raw_connection(start()) as connection:
        connection.send(*encode_query_event(QueryHeader(1, (TensorSpec("x", "uint8", (4000,)),)), LIMITS))
        connection.end_output()
        assert [event.code for event in hear(connection)] == [QueryFailureCode.INPUT]


@pytest.mark.parametrize(
    ("header", "chunks", "found"),
    [
        (QueryHeader(1, (TensorSpec("x", "uint8", (5000,)),)), [TensorChunk(0, 0, bytes(5000))], "2000 are allowed"),
        (QueryHeader(1, tuple(TensorSpec(f"{i:0900}", "bool", (1,)) for i in range(9))), [], "at most 4000"),
        (QueryHeader(1, (TensorSpec("x", "uint8", (2**60,)),)), [], "exceeds"),
    ],
    ids=["payload", "envelope", "announced"],
)
def test_query_beyond_the_limits_is_our_own_error_and_not_sent(start, handler, header, chunks, found):
    client = start()
    with raises_soon(LocalProtocolError, match=found):
        client.ask(header, chunks)
    assert not handler.answered
    ask(client)


def test_reason_is_cut_to_what_a_message_may_hold():
    assert len(query_failure(InputError("x" * 10_000)).message) == 4096


# --- connections ---------------------------------------------------------------------------------------------------


def test_idle_connection_that_the_node_closed_is_replaced(start, handler):
    client = start()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: ask(client, 100, number), range(16)))
    client.server.stop(0)
    again = start(address=client.server.address)
    ask(client, 3000)
    assert handler.answered == 17
    assert len(again.server._serving) == 1


def test_query_whose_node_goes_away_fails_and_is_not_sent_again(start, handler):
    client = start()
    handler.go.clear()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, client)
        assert handler.started.wait(TIMEOUT_S)
        client.server.stop(0)
        with raises_soon(RemoteProtocolError):
            asked.result()
    assert handler.answered == 1


def test_node_that_is_not_there_is_a_remote_error(start):
    client = start()
    client.server.stop(0)
    for question in (client.describe, lambda: ask(client)):
        with raises_soon(RemoteProtocolError, match=f"no connection to {client.server.address}"):
            question()


def test_node_that_does_not_describe_itself_is_given_up(monkeypatch):
    monkeypatch.setattr(query_client, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = QueryClient(Address(*silent.getsockname()), LIMITS)
        with raises_soon(RemoteProtocolError, match=r"within 0\.3 s"):
            client.describe()


def test_close_wakes_a_query_and_ends_the_client(start, handler):
    client = start()
    handler.go.clear()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, client)
        assert handler.started.wait(TIMEOUT_S)
        client.close()
        with raises_soon(RemoteProtocolError, match="was closed"):
            asked.result()
    with raises_soon(RemoteProtocolError, match="was closed"):
        ask(client)


def test_interrupted_query_closes_its_connection(start, handler):
    client = start(workers=1)

    def chunks():
        yield TensorChunk(0, 0, bytes(2000))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.ask(QueryHeader(1, (TensorSpec("x", "uint8", (4000,)),)), chunks())
    gc.disable()  # the place is given back by the node, not by the collector
    try:
        assert soon(lambda: client.server.connections().failed == 1)  # accepted, and ended
        ask(client)
    finally:
        gc.enable()
    assert handler.answered == 1


def test_query_for_a_server_of_sessions_is_refused(caplog):
    server = serve_sessions(LOOPBACK, lambda events: iter(()), LIMITS, 1)
    client = QueryClient(server.address, LIMITS)
    for question in (client.describe, lambda: ask(client)):
        with raises_soon(RemoteProtocolError, match=r"closed|gone"):
            question()
    assert soon(lambda: caplog.text.count("not our protocol") == 2)
    client.close()
    server.stop(0)


def test_session_for_a_node_is_refused(start, caplog):
    client = start()
    link = ServerLink(client.server.address, PLAN, (BlockShape(1, 1, 64),), LIMITS)
    with raises_soon(RemoteProtocolError, match="before it said anything"):
        link.acquire()
    with socket.create_connection(client.server.address.endpoint, timeout=SOON_S) as raw:
        raw.sendall(SESSION_MAGIC)
        with contextlib.suppress(ConnectionError):
            assert raw.recv(100) == b""
    assert soon(lambda: caplog.text.count("not our protocol") == 2)
    ask(client)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_second_node_on_a_port_fails(start, host):
    first = start(address=Address(host, 0)).server
    assert first.address.port > 0
    with pytest.raises(TransportError, match="in use"):
        start(address=Address("localhost", first.address.port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_plain_text_beyond_this_machine_is_refused(handler, host):
    with pytest.raises(TransportError, match="give certificates for TLS"):
        serve_queries(Address(host, 0), handler, LIMITS, 1)
    with pytest.raises(TransportError, match="SSH tunnel"):
        QueryClient(Address(host, 1), LIMITS)


@pytest.mark.parametrize(("workers", "connections"), [(0, 1), (1, 0)])
def test_node_without_workers_or_connections_is_refused(handler, workers, connections):
    with pytest.raises(ParameterError):
        serve_queries(LOOPBACK, handler, LIMITS, workers, connections)
