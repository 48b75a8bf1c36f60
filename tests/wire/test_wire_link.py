"""The node's connection to a server: one message each way, and servers that stall, fail or go away."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire import (
    Address,
    BlockAnswer,
    BlockRequest,
    BlockShape,
    Chunk,
    End,
    FailureCode,
    Hello,
    Limits,
    Mode,
    Ready,
    RefusedError,
    ServerSession,
    TransportError,
    UploadComplete,
    iterate_row_chunks,
    serve_sessions,
)
from trusted_node.link import ServerLink

LIMITS = Limits(chunk_bytes=2000, message_bytes=4000, reply_s=20.0)
IMPATIENT = replace(LIMITS, reply_s=0.5)
LOOPBACK = Address("127.0.0.1", 0)
PLAN = b"p" * 32
BLOCKS = (BlockShape(5, 3, 64), BlockShape(100_000, 3, 64), BlockShape(4, 2, 64, 40, 70))
PREPARED_BLOCK = 2
SOON_S = 3.0


class Echo:
    """Answers with the leading rows of what it was sent; notes what came and fails or stalls when asked to."""

    def __init__(self):
        self.seen = []
        self.fail_at = self.stall_at = None  # a type of event
        self.release = threading.Event()

    def __call__(self, events):
        session = ServerSession(PLAN, BLOCKS, LIMITS)
        data = {}
        for event in events:
            self.seen.append(event)
            if isinstance(event, self.fail_at or ()):
                raise ValueError("asked to fail")
            if isinstance(event, self.stall_at or ()):
                self.release.wait(60)
            for item in session.receive(event):
                match item:
                    case Hello():
                        yield session.send(Ready())
                    case Chunk():
                        data.setdefault(item.request_id, bytearray()).extend(item.data)
                    case UploadComplete():
                        request = item.request
                        rows = BLOCKS[request.block].rows_down(request.mode, request.samples)
                        row = session.row_bytes(request.request_id)
                        answer = (bytes(data.pop(request.request_id)) * 2)[: rows * row]
                        chunks = iterate_row_chunks(request.request_id, answer, row, 2000)
                        yield from session.answer(request.request_id, rows, 0.1, chunks)
        session.receive(End())


@contextmanager
def linked(limits=LIMITS):
    """Yield the handler, the link to it, and the server."""
    echo = Echo()
    server = serve_sessions(LOOPBACK, echo, LIMITS, 8)
    link = ServerLink(server.address, PLAN, BLOCKS, limits)
    try:
        yield echo, link, server
    finally:
        echo.release.set()
        link.close()
        server.stop(0)


@contextmanager
def raises_soon(kind, **arguments):
    started = time.monotonic()
    with pytest.raises(kind, **arguments) as caught:
        yield caught
    assert time.monotonic() - started < SOON_S


def test_exchange_of_a_small_block_is_one_message_each_way():
    data = bytes(range(200)) * 6
    with linked() as (echo, link, _), link.session() as session:
        for attempt in range(3):
            answer, chunks = session.exchange(PREPARED_BLOCK, 3, Mode.PREPARED, data, attempt)
            assert (answer.rows, answer.compute_s, answer.first) == (9, 0.1, None)
            assert b"".join(chunk.data for chunk in chunks) == (data * 2)[:1800]
        assert [type(event) for event in echo.seen] == [Hello] + 3 * [BlockRequest]
        assert [event.attempt for event in echo.seen[1:]] == [0, 1, 2]


def test_exchange_of_a_large_block_arrives_whole():
    data = bytes(k % 251 for k in range(200 * 2 * 200))
    with linked() as (echo, link, _), link.session() as session:
        answer, chunks = session.exchange(PREPARED_BLOCK, 200, Mode.PREPARED, memoryview(data))
        assert answer.rows == 600
        assert b"".join(chunk.data for chunk in chunks) == (data * 2)[: 600 * 200]
        assert [type(event) for event in echo.seen] == [Hello, BlockRequest] + 39 * [Chunk]


def test_rows_sent_one_by_one_are_answered_as_ever():
    with linked() as (_, link, _), link.session() as session:
        request_id = session.open_request(0, 33)
        for row in range(5):
            session.send_rows(request_id, row, 1, bytes([row]) * 800)
        announcement, *chunks = session.answer(request_id)
        assert announcement == BlockAnswer(request_id, 3, 0.1)
        assert [chunk.rows for chunk in chunks] == [2, 1]


def test_reader_that_stops_at_the_last_chunk_leaves_nothing_to_the_next():
    data = bytes(1200)
    with linked() as (_, link, _), link.session() as session:
        for _ in range(3):
            _, chunks = session.exchange(PREPARED_BLOCK, 3, Mode.PREPARED, data)
            assert next(chunks).rows == 9


def test_sessions_are_reused_and_upload_of_a_wrong_size_says_so():
    with linked() as (echo, link, _):
        for _ in range(2):
            with link.session() as session:
                list(session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))[1])
        with link.session() as session, pytest.raises(LocalProtocolError, match="2 rows of 200 bytes"):
            session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(401))
        assert sum(isinstance(event, Hello) for event in echo.seen) == 1


def test_server_that_does_not_answer_is_given_up_after_the_limit():
    with linked(IMPATIENT) as (echo, link, _):
        echo.stall_at = BlockRequest
        with raises_soon(RemoteProtocolError, match=r"no progress for 0\.5 s"), link.session() as session:
            session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))
        assert not session.usable
        with raises_soon(RemoteProtocolError):
            session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))


def test_server_that_does_not_greet_is_given_up_after_the_limit():
    with linked(IMPATIENT) as (echo, link, _):
        echo.stall_at = Hello
        with raises_soon(RemoteProtocolError, match="no progress"):
            link.acquire()


def test_server_that_does_not_read_costs_time_and_not_memory():
    with linked(IMPATIENT) as (echo, link, _):
        echo.stall_at = BlockRequest
        session = link.acquire()
        request_id = session.open_request(1, 1)
        sent = 0
        with raises_soon(RemoteProtocolError, match="no progress"):
            for row in range(0, 99_999, 3):
                session.send_rows(request_id, row, 3, bytes(1800))
                sent += 1
        assert sent < 10_000  # 60 MB would be 33,333; what TCP holds is on its way


def test_waits_below_the_limit_are_no_stalls():
    with linked(IMPATIENT) as (_, link, _), link.session() as session:
        for _ in range(5):
            list(session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))[1])
            time.sleep(0.3)


@pytest.mark.parametrize("event", [BlockRequest, Chunk])
def test_server_that_fails_in_the_middle_is_an_error_soon(event):
    with linked() as (echo, link, _):
        echo.fail_at = event
        with raises_soon(RefusedError) as caught, link.session() as session:
            session.exchange(1, 1, Mode.STANDARD, bytes(100_000 * 600))
        assert caught.value.code is FailureCode.FAILED
        assert len(echo.seen) < 10


def test_failure_of_the_server_arrives_with_its_code():
    with linked() as (echo, link, _):
        echo.fail_at = BlockRequest
        with raises_soon(RefusedError) as caught, link.session() as session:
            session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))
        assert caught.value.code is FailureCode.FAILED
        echo.fail_at = None
        with link.session() as session:
            list(session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))[1])


def test_server_that_goes_away_ends_a_wait_and_idle_sessions():
    with linked() as (echo, link, server):
        idle, busy = link.acquire(), link.acquire()
        echo.stall_at = BlockRequest
        request_id = busy.send(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))
        threading.Timer(0.3, lambda: server.stop(0)).start()
        with raises_soon(RemoteProtocolError):
            busy.receive(request_id)
        deadline = time.monotonic() + SOON_S
        while idle.usable and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not idle.usable
        assert not busy.usable


@pytest.mark.parametrize("end", ["session", "link"])
def test_close_from_another_thread_ends_a_wait(end):
    with linked() as (echo, link, _):
        session = link.acquire()
        echo.stall_at = BlockRequest
        request_id = session.send(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))
        threading.Timer(0.3, {"session": session, "link": link}[end].close).start()
        with raises_soon(RemoteProtocolError):
            session.receive(request_id)


def test_close_from_another_thread_ends_an_upload_that_waits():
    with linked() as (echo, link, _):
        session = link.acquire()
        echo.stall_at = BlockRequest
        threading.Timer(0.5, session.close).start()
        with raises_soon(RemoteProtocolError):
            session.send(1, 1, Mode.STANDARD, bytes(100_000 * 600))


def test_link_makes_no_threads_and_closed_link_lends_nothing():
    with linked() as (_, link, _):
        before = set(threading.enumerate())
        session = link.acquire()
        list(session.exchange(PREPARED_BLOCK, 200, Mode.PREPARED, bytes(200 * 2 * 200))[1])
        assert {t.name for t in set(threading.enumerate()) - before} <= {"heinfer-session"}  # the server's
        link.close()
        assert not session.usable
        link.release(session)
        with pytest.raises(RemoteProtocolError, match="closed"):
            link.acquire()


def test_close_from_another_thread_ends_a_greeting():
    with linked() as (echo, link, _):
        echo.stall_at = Hello
        threading.Timer(0.3, link.close).start()
        with raises_soon(RemoteProtocolError, match="closed"):
            link.acquire()


def test_restarted_server_is_found_without_an_error():
    with linked() as (_, link, server):
        for session in [link.acquire(), link.acquire()]:
            link.release(session)
        server.stop()
        again = serve_sessions(server.address, Echo(), LIMITS, 8)
        with link.session() as session:
            assert len(list(session.exchange(PREPARED_BLOCK, 1, Mode.PREPARED, bytes(400))[1])) == 1
        again.stop(0)


def test_idle_session_that_was_told_a_failure_is_not_lent_again():
    def leave(events):
        next(events)
        yield Ready()
        raise ValueError

    server = serve_sessions(LOOPBACK, leave, LIMITS, 8)
    link = ServerLink(server.address, PLAN, BLOCKS, LIMITS)
    first = link.acquire()
    link.release(first)
    deadline = time.monotonic() + SOON_S
    while first.usable and time.monotonic() < deadline:
        time.sleep(0.01)
    second = link.acquire()
    assert second is not first
    link.close()
    server.stop(0)


def test_server_that_is_not_there_is_a_remote_error():
    server = serve_sessions(LOOPBACK, Echo(), LIMITS, 1)
    server.stop(0)
    link = ServerLink(server.address, PLAN, BLOCKS, LIMITS)
    with raises_soon(RemoteProtocolError, match=f"no connection to {server.address}"):
        link.acquire()


def test_plain_text_beyond_this_machine_is_refused():
    with pytest.raises(TransportError, match="SSH tunnel"):
        ServerLink(Address("192.0.2.1", 1), PLAN, BLOCKS, LIMITS)
