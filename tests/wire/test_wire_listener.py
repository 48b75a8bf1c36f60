"""The server of sessions over real connections, on 127.0.0.1 only."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import pytest

from heinfer.errors import ParameterError, RemoteProtocolError
from heinfer.wire import (
    Address,
    AnswerComplete,
    BlockAnswer,
    BlockShape,
    Chunk,
    End,
    Failure,
    FailureCode,
    Hello,
    Limits,
    NodeSession,
    Ready,
    ServerSession,
    TransportError,
    UploadComplete,
    codec,
    connect,
    iterate_row_chunks,
    serve_sessions,
)
from heinfer.wire.frames import QUERY_MAGIC, SESSION_MAGIC, session_framing
from tests.captured_traffic import framed
from tests.waiting import soon

LOOPBACK = Address("127.0.0.1", 0)
LIMITS = Limits(chunk_bytes=2000, reply_s=10.0)
PLAN, SESSION = b"p" * 32, b"s" * 16
BLOCKS = (BlockShape(5, 3, 64),)
SOON_S = 5.0


@pytest.fixture
def start():
    """Start a server with a handler."""
    servers = []

    def start_server(handler, workers=4, limits=LIMITS):
        servers.append(serve_sessions(LOOPBACK, handler, limits, workers))
        return servers[-1]

    yield start_server
    for server in servers:
        server.stop(0)
    assert not [t for t in threading.enumerate() if t.name in ("heinfer-session", "heinfer-accept")]


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


@contextlib.contextmanager
def connection_to(server, limits=LIMITS):
    connection = connect(server.address, limits, session_framing(limits))
    try:
        yield connection
    finally:
        connection.close()


def hear(connection):
    """All that a server says until it closes its half."""
    events = []
    while (message := connection.receive()) is not None:
        events.append(codec.decode_server_event(*message))
    return events


def say(server, *events):
    with connection_to(server) as connection:
        for event in events:
            connection.send(*codec.encode_node_event(event))
        connection.end_output()
        return hear(connection)


def test_session_over_a_connection(start):
    node = NodeSession(SESSION, PLAN, BLOCKS, LIMITS)
    uploads, answers, complete = {}, {}, []
    with connection_to(start(echo)) as connection:

        def put(event):
            connection.send(*codec.encode_node_event(event))

        put(node.hello())
        node.receive(codec.decode_server_event(*connection.receive()))
        for samples in (1, 40):
            put(event := node.open_request(0, samples))
            row = node.row_bytes(event.request_id)
            uploads[event.request_id] = bytes(k % 251 for k in range(5 * row))
            for chunk in iterate_row_chunks(event.request_id, uploads[event.request_id], row, 2000):
                put(node.send(chunk))
        node.send(End())
        connection.end_output()
        for event in hear(connection):
            for item in node.receive(event):
                if isinstance(item, Chunk):
                    answers[item.request_id] = answers.get(item.request_id, b"") + item.data
                complete += [item] if isinstance(item, AnswerComplete) else []
        node.receive(End())
    assert len(complete) == 2
    assert answers == {key: data[: len(data) * 3 // 5] for key, data in uploads.items()}


def test_wrong_plan_gets_one_code(start):
    assert say(start(echo), Hello(b"x" * 32, SESSION)) == [Failure(FailureCode.PLAN)]


def test_error_of_a_handler_says_nothing_to_the_node(start, caplog):
    def broken(events):
        next(events)
        raise ValueError("secret")
        yield

    server = start(broken)
    with caplog.at_level(logging.DEBUG):
        assert say(server, Hello(PLAN, SESSION)) == [Failure(FailureCode.FAILED)]
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


HELLO = codec.encode_node_event(Hello(PLAN, SESSION))[0]


@pytest.mark.parametrize(
    ("envelope", "payload"),
    [(b"", b""), (b"\xff" * 30, b""), (b"\x0a\x00", b""), (HELLO, b"x"), (HELLO[:-1], b""), (bytes(1024), bytes(2000))],
)
def test_garbage_ends_the_session_with_one_code(start, envelope, payload):
    with connection_to(start(echo)) as connection:
        connection.send(envelope, payload)
        assert hear(connection) == [Failure(FailureCode.FAILED)]


@pytest.mark.parametrize("lengths", [(1025, 0), (0, 2001)])
def test_oversized_message_never_reaches_the_handler(start, lengths):
    seen = []

    def handler(events):
        for event in events:
            seen.append(event)
            yield Ready()

    server = start(handler)
    with connection_to(server, Limits()) as connection:
        connection.send(*codec.encode_node_event(Chunk(1, 0, 1, bytes(2000))))
        assert connection.receive() is not None
        if lengths[1]:
            connection.send(b"", bytes(lengths[1]))
        else:
            connection._write(framed(1025, 0), bytes(1025))
        assert hear(connection) == [Failure(FailureCode.FAILED)]
    assert len(seen) == 1


def test_node_that_goes_away_ends_the_handler(start):
    caught = []

    def handler(events):
        try:
            for _ in events:
                yield Ready()
        except Exception as error:
            caught.append(type(error))
            raise
        caught.append(None)

    server = start(handler)
    hello = codec.encode_node_event(Hello(PLAN, SESSION))
    for half, expected in ((False, None), (True, RemoteProtocolError)):
        with connection_to(server) as connection:
            connection.send(*hello)
            assert connection.receive() is not None
            if half:
                connection._write(framed(5, 0), b"ab")
        assert soon(lambda: caught)
        assert caught == [expected]
        caught.clear()


def test_server_without_a_free_worker_is_busy_and_leaving_frees_it(start):
    def wait(events):
        for _ in events:
            yield Ready()

    server = start(wait, workers=1)
    with connection_to(server) as connection:
        connection.send(*codec.encode_node_event(Hello(PLAN, SESSION)))
        assert connection.receive() is not None
        for _ in range(3):
            assert say(server, Hello(PLAN, SESSION)) == [Failure(FailureCode.BUSY)]
    assert soon(lambda: say(server, Hello(PLAN, SESSION)) == [Ready()])


def is_open(sock):
    sock.settimeout(0.05)
    try:
        return sock.recv(100, socket.MSG_PEEK) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_peers_that_say_the_magic_only_make_room_the_first_to_come_first(start):
    server = start(echo, workers=3)
    with contextlib.ExitStack() as stack:
        strangers = []
        for said in (b"", framed(len(HELLO), 0), framed(len(HELLO), 0, HELLO[:-1])):
            strangers.append(stack.enter_context(socket.create_connection(server.address.endpoint)))
            strangers[-1].sendall(SESSION_MAGIC + said)
        time.sleep(0.1)  # all that they say has been heard
        for left in (2, 1, 0):
            assert [is_open(sock) for sock in strangers] == [False] * (2 - left) + [True] * (left + 1)
            session = stack.enter_context(connection_to(server))
            session.send(HELLO, b"")
            assert codec.decode_server_event(*session.receive()) == Ready()
        assert not any(map(is_open, strangers))
        assert say(server, Hello(PLAN, SESSION)) == [Failure(FailureCode.BUSY)]  # who is known stays


def test_peer_that_was_refused_and_does_not_leave_makes_room(start):
    server = start(echo, workers=1)
    with connection_to(server) as stranger:
        stranger.send(*codec.encode_node_event(Hello(b"x" * 32, SESSION)))
        assert codec.decode_server_event(*stranger.receive()) == Failure(FailureCode.PLAN)
        assert say(server, Hello(PLAN, SESSION)) == [Ready()]


@pytest.mark.parametrize("said", [b"", framed(len(HELLO), 0, HELLO[:-1])], ids=["nothing", "half a greeting"])
def test_peer_that_does_not_greet_is_closed_long_before_one_that_is_known(start, monkeypatch, said):
    monkeypatch.setattr("heinfer.wire.connection.CONNECT_S", 0.4)
    server = start(echo)
    with connection_to(server) as known, socket.create_connection(server.address.endpoint) as stranger:
        known.send(HELLO, b"")
        assert known.receive() is not None
        stranger.sendall(SESSION_MAGIC + said)
        started = time.monotonic()
        stranger.settimeout(SOON_S)
        while stranger.recv(100):
            pass
        assert 0.3 < time.monotonic() - started < 2
        assert not known.await_news(0.3)


def test_flood_of_connections_that_say_nothing_leaves_the_first_session_alone(start):
    server = start(echo, workers=1)
    with connection_to(server) as connection, contextlib.ExitStack() as stack:
        connection.send(*codec.encode_node_event(Hello(PLAN, SESSION)))
        assert connection.receive() is not None
        for _ in range(100):
            stack.enter_context(socket.create_connection(server.address.endpoint))
        assert soon(lambda: len(server._refusing) == 16)
        connection.end_output()
        assert hear(connection) == []


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"\0", QUERY_MAGIC]
)
def test_other_protocols_are_closed_at_once_without_a_word(start, caplog, data):
    called = []
    server = start(lambda events: called.append(events) or iter(()))
    with socket.create_connection(server.address.endpoint, timeout=SOON_S) as raw:
        raw.sendall(data)
        with contextlib.suppress(ConnectionError):
            assert raw.recv(100) == b""
    assert soon(lambda: ("protocol, but TLS" if data[0] == 0x16 else "not our protocol") in caplog.text)
    assert not called


def test_stop_ends_idle_sessions_at_once_and_lets_a_running_answer_end(start):
    working, go = threading.Event(), threading.Event()

    def handler(events):
        for event in events:
            if isinstance(event, Hello):
                yield Ready()
                continue
            working.set()
            go.wait(SOON_S)
            yield Chunk(1, 0, 1, b"answer")

    server = start(handler)
    with connection_to(server) as idle, connection_to(server) as busy:
        for connection in (idle, busy):
            connection.send(*codec.encode_node_event(Hello(PLAN, SESSION)))
            assert connection.receive() is not None
        busy.send(*codec.encode_node_event(Chunk(1, 0, 1, b"x")))
        assert working.wait(SOON_S)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert idle.receive() is None
        assert stopping.is_alive()
        go.set()
        assert hear(busy) == [Chunk(1, 0, 1, b"answer")]
        stopping.join(SOON_S)
        assert not stopping.is_alive()
    with pytest.raises(RemoteProtocolError, match="no connection"):
        connect(server.address, LIMITS, session_framing(LIMITS))


def test_stop_closes_what_does_not_end_within_the_grace(start):
    def handler(events):
        while True:
            yield Chunk(1, 0, 1, bytes(2000))

    server = start(handler)
    with connection_to(server) as connection:
        assert connection.receive() is not None
        started = time.monotonic()
        server.stop(0.2)
        assert time.monotonic() - started < 2
        with contextlib.suppress(RemoteProtocolError):
            hear(connection)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_second_server_on_a_port_fails_and_a_later_one_does_not(start, host):
    first = serve_sessions(Address(host, 0), echo, LIMITS, 1)
    assert first.address.host == host
    assert first.address.port > 0
    with pytest.raises(TransportError, match="in use"):
        serve_sessions(Address("localhost", first.address.port), echo, LIMITS, 1)
    with connection_to(first) as connection:
        connection.send(*codec.encode_node_event(Hello(PLAN, SESSION)))
        connection.receive()
        first.stop(0)
    again = serve_sessions(first.address, echo, LIMITS, 1)
    assert say(again, Hello(PLAN, SESSION)) == [Ready()]
    again.stop(0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_plain_text_beyond_this_machine_is_refused(host):
    with pytest.raises(TransportError, match="give certificates for TLS"):
        serve_sessions(Address(host, 0), echo, LIMITS, 1)
    with pytest.raises(TransportError, match="SSH tunnel"):
        connect(Address(host, 1), LIMITS, session_framing(LIMITS))


def test_server_without_workers_is_refused():
    with pytest.raises(ParameterError):
        serve_sessions(LOOPBACK, echo, LIMITS, 0)
