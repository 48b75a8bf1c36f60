"""Frames over a pair of sockets: what is read is what was written, or an error, whatever the bytes and their pace."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire import Connection, FailureCode, Limits
from heinfer.wire.frames import (
    HEADER_BYTES,
    DamagedError,
    Framing,
    checksum,
    decode_header,
    encode_header,
    query_framing,
    session_framing,
)
from heinfer.wire.limits import ENVELOPE_BYTES
from tests.captured_traffic import framed

LIMITS = Limits(chunk_bytes=100_000, reply_s=10.0)
IMPATIENT = replace(LIMITS, reply_s=0.3)
FRAMING = session_framing(LIMITS)
MAGIC = FRAMING.magic
messages = st.tuples(st.binary(max_size=ENVELOPE_BYTES), st.binary(max_size=3000))


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@contextmanager
def raw_and_connection(limits=LIMITS, framing=FRAMING):
    raw, sock = tcp_pair()
    connection = Connection(sock, limits, framing)
    with raw:
        yield raw, connection
    connection.close()


@contextmanager
def connected(limits=LIMITS):
    near, far = (Connection(sock, limits, FRAMING) for sock in tcp_pair())
    yield near, far
    near.close()
    far.close()


def frame(envelope, payload=b""):
    """Written by hand, from the format's description."""
    return framed(len(envelope), len(payload), envelope + payload)


@settings(deadline=None)
@given(st.lists(messages, max_size=5))
def test_what_is_sent_is_what_is_received(sent):
    with connected() as (near, far):
        for message in sent:
            near.send(*message)
        near.end_output()
        assert [far.receive() for _ in sent] == sent
        assert far.receive() is None


@settings(deadline=None)
@given(st.lists(messages, max_size=3))
def test_bytes_on_the_wire_are_those_of_the_description(sent):
    with raw_and_connection() as (raw, connection):
        connection.send_magic()
        for message in sent:
            connection.send(*message)
        connection.close()
        with raw.makefile("rb") as stream:
            assert stream.read() == b"heinfer\x03" + b"".join(frame(*message) for message in sent)


@pytest.mark.parametrize("size", [0, 1, 2**14 - 1, 2**14, 2**14 + 3, 100_000])
def test_every_damaged_byte_is_noticed_and_nothing_after_it_is_waited_for(size):
    payload = bytes(k * k % 251 for k in range(size))
    whole = frame(b"envelope", payload)
    for place in {*range(24), len(whole) // 2, len(whole) - 1}:
        damaged = bytearray(whole)
        damaged[min(place, len(whole) - 1)] ^= 0x10
        with raw_and_connection(Limits(), session_framing(Limits())) as (raw, connection):
            raw.sendall(damaged)
            with pytest.raises(DamagedError) as caught:
                connection.receive()
            assert caught.value.code is FailureCode.DAMAGED


def test_checksum_notices_segments_that_change_places():
    data = bytes(k * k * k % 251 for k in range(2**17))
    for size in (1448, 2008, 4096, 2**16 - 8):
        swapped = data[size : 2 * size] + data[:size] + data[2 * size :]
        if swapped != data:
            assert checksum(b"", swapped) != checksum(b"", data)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", frame(b"abc", b"d"), frame(b"", b"xyz")]))
def test_any_bytes_are_messages_or_a_remote_error(data, before):
    with raw_and_connection() as (raw, connection):
        raw.sendall(before + data)
        raw.shutdown(socket.SHUT_WR)
        read = bytearray()
        try:
            while (message := connection.receive()) is not None:
                read += frame(*message)
        except RemoteProtocolError:
            assert (before + data).startswith(read)
        else:
            assert read == before + data


def test_every_truncation_is_an_error_and_none_an_end():
    whole = frame(b"abc", b"defg")
    for size in range(len(whole) + 1):
        with raw_and_connection() as (raw, connection):
            raw.sendall(whole[:size])
            raw.shutdown(socket.SHUT_WR)
            if size == 0:
                assert connection.receive() is None
            elif size < len(whole):
                with pytest.raises(RemoteProtocolError, match="in the middle of a message"):
                    connection.receive()
            else:
                assert connection.receive() == (b"abc", b"defg")


def test_message_in_single_bytes_arrives():
    with raw_and_connection() as (raw, connection):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = []
        thread = threading.Thread(target=lambda: received.extend([connection.receive(), connection.receive()]))
        thread.start()
        for byte in frame(b"abc", b"defg") * 2:
            raw.sendall(bytes([byte]))
            time.sleep(0.002)
        thread.join()
        assert received == [(b"abc", b"defg")] * 2


@pytest.mark.parametrize(
    "lengths", [(ENVELOPE_BYTES + 1, 0), (0, LIMITS.chunk_bytes + 1), (2**32 - 1, 0), (0, 2**32 - 1), (2**31, 2**31)]
)
def test_lengths_beyond_the_limits_are_refused_before_anything_is_allocated(lengths):
    with raw_and_connection() as (raw, connection):
        raw.sendall(framed(*lengths, bytes(100)))
        tracemalloc.start()
        with pytest.raises(RemoteProtocolError, match="are allowed"):
            connection.receive()
        assert tracemalloc.get_traced_memory()[1] < 50_000
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("framing", "most"),
    [
        (session_framing(LIMITS), (ENVELOPE_BYTES, LIMITS.chunk_bytes)),
        (query_framing(LIMITS), (LIMITS.message_bytes, LIMITS.chunk_bytes)),
    ],
)
def test_lengths_at_the_limits_pass_both_ways_and_beyond_them_neither(framing, most):
    assert decode_header(encode_header(*most, framing, 77), framing) == (*most, 77)
    for change in ((1, 0), (0, 1)):
        more = tuple(a + b for a, b in zip(most, change, strict=True))
        with pytest.raises(LocalProtocolError, match="are allowed"):
            encode_header(*more, framing)
        with pytest.raises(RemoteProtocolError, match="are allowed"):
            decode_header(framed(*more), framing)
    assert HEADER_BYTES == 16


def test_message_too_long_to_send_leaves_nothing_on_the_wire():
    with connected() as (near, far):
        with pytest.raises(LocalProtocolError):
            near.send(b"", bytes(LIMITS.chunk_bytes + 1))
        near.send(b"a", b"b")
        assert far.receive() == (b"a", b"b")


@pytest.mark.parametrize("pieces", [[MAGIC], [MAGIC[:3], MAGIC[3:]], [bytes([byte]) for byte in MAGIC]])
def test_magic_is_taken_in_whatever_pieces(pieces):
    with raw_and_connection() as (raw, connection):
        for piece in pieces:
            raw.sendall(piece)
        raw.sendall(frame(b"a"))
        connection.expect_magic()
        assert connection.receive() == (b"a", b"")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"G",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        MAGIC[:7] + b"\x01",
        MAGIC[:5],
        query_framing(LIMITS).magic,
    ],
    ids=["nothing", "zero", "one letter", "HTTP/2", "TLS", "version 1", "cut", "queries"],
)
def test_other_beginnings_are_refused_at_once(data):
    with raw_and_connection() as (raw, connection):
        raw.sendall(data)
        if MAGIC.startswith(data):
            raw.shutdown(socket.SHUT_WR)
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="does not speak this protocol"):
            connection.expect_magic()
        assert time.monotonic() - started < 1


def test_peer_that_begins_with_silence_is_given_up():
    with raw_and_connection(IMPATIENT) as (_, connection), pytest.raises(RemoteProtocolError, match="did not say"):
        connection.expect_magic()


@pytest.mark.parametrize(
    ("read", "said", "pause_s"),
    [
        (lambda c: c.expect_magic(), MAGIC, 0.1),
        (lambda c: c.expect_magic(), MAGIC[:2], 0.35),
        (lambda c: c.receive_first(), frame(b"abc")[:12], 0.1),
        (lambda c: c.receive_first(), frame(b"a" * 100, b"b" * 100), 0.1),
    ],
    ids=["magic", "two bytes", "header", "message"],
)
def test_stranger_who_dribbles_is_given_up_as_soon_as_a_silent_one(monkeypatch, read, said, pause_s):
    monkeypatch.setattr("heinfer.wire.connection.CONNECT_S", 0.4)
    with raw_and_connection() as (raw, connection):

        def dribble():
            with suppress(OSError):
                for byte in said:
                    raw.sendall(bytes([byte]))
                    time.sleep(pause_s)

        thread = threading.Thread(target=dribble)
        thread.start()
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match=r"did not say within 0\.4 s"):
            read(connection)
        assert 0.3 < time.monotonic() - started < 0.7
        connection.close()
        thread.join(5)


def test_first_message_over_a_slow_line_has_the_time_that_it_takes(monkeypatch):
    monkeypatch.setattr("heinfer.wire.connection.CONNECT_S", 0.3)
    with raw_and_connection(replace(LIMITS, slowest_bytes_s=1000.0)) as (raw, connection):

        def speak():
            whole = frame(b"a", b"b" * 800)
            for start in range(0, len(whole), 100):
                raw.sendall(whole[start : start + 100])
                time.sleep(0.08)
            time.sleep(0.4)
            raw.sendall(frame(b"second"))

        thread = threading.Thread(target=speak)
        thread.start()
        started = time.monotonic()
        assert connection.receive_first() == (b"a", b"b" * 800)
        assert time.monotonic() - started > 0.5
        assert connection.receive() == (b"second", b"")  # who is known has more time
        thread.join(5)


@pytest.mark.parametrize("size", [1, 8, 9, 12])
@pytest.mark.parametrize("idle", [True, False])
def test_message_that_stops_in_the_middle_is_given_up(size, idle):
    with raw_and_connection(IMPATIENT) as (raw, connection):
        raw.sendall(frame(b"abc", b"def")[:size])
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match=r"no progress for 0\.3 s"):
            connection.receive(idle)
        assert 0.2 < time.monotonic() - started < 2


def test_message_that_trickles_is_given_up():
    """Every byte is progress of a kind, but a message that takes for ever holds a thread for ever."""
    with raw_and_connection(IMPATIENT) as (raw, connection):
        stop = threading.Event()

        def trickle():
            for byte in frame(b"", bytes(100)):
                if stop.wait(0.02):
                    return
                raw.sendall(bytes([byte]))

        thread = threading.Thread(target=trickle)
        thread.start()
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="no progress"):
            connection.receive()
        assert time.monotonic() - started < 1.5
        stop.set()
        thread.join()


def test_silence_between_messages_is_given_up_only_where_an_answer_is_due():
    with raw_and_connection(IMPATIENT) as (raw, connection):
        with pytest.raises(RemoteProtocolError, match="no progress"):
            connection.receive()
        threading.Timer(0.8, raw.sendall, [frame(b"a", b"b")]).start()
        assert connection.receive(idle=True) == (b"a", b"b")


def test_peer_that_does_not_read_is_given_up():
    def fill(connection):
        for _ in range(1000):
            connection.send(b"", bytes(100_000))

    with raw_and_connection(IMPATIENT) as (_, connection), pytest.raises(RemoteProtocolError, match="no progress"):
        fill(connection)


def test_large_messages_both_ways_at_the_same_time_arrive_whole():
    data = bytes(range(250)) * 400
    with connected() as (near, far):
        thread = threading.Thread(target=lambda: [far.send(*far.receive()) for _ in range(20)])
        thread.start()
        for _ in range(20):
            near.send(b"x", memoryview(data))
            assert near.receive() == (b"x", data)
        thread.join()


@pytest.mark.parametrize(
    "wait",
    [
        lambda c: c.receive(),
        lambda c: c.receive(idle=True),
        lambda c: c.expect_magic(),
        lambda c: c.receive_first(),
        lambda c: c.await_news(10),
    ],
)
def test_close_from_another_thread_wakes_a_wait(wait):
    with connected() as (near, far):
        threading.Timer(0.2, near.close).start()
        with pytest.raises(RemoteProtocolError, match="was closed"):
            wait(near)
        assert near.closed
        assert near.has_news
        assert far.receive() is None
        with pytest.raises(RemoteProtocolError, match="was closed"):
            near.send(b"", b"")


def test_descriptor_is_given_back_once_nobody_uses_it():
    near, far = tcp_pair()
    connection = Connection(near, LIMITS, FRAMING)

    def wait():
        with pytest.raises(RemoteProtocolError):
            connection.receive()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    connection.close()
    thread.join(5)
    assert near.fileno() == -1
    connection.close()
    far.close()


def test_news_are_a_message_or_an_end():
    with raw_and_connection() as (raw, connection):
        assert not connection.has_news
        raw.sendall(b"x")
        time.sleep(0.05)
        assert connection.has_news
    with raw_and_connection() as (raw, connection):
        raw.shutdown(socket.SHUT_WR)
        time.sleep(0.05)
        assert connection.has_news


def test_news_are_awaited_no_longer_than_asked():
    with raw_and_connection() as (raw, connection):
        started = time.monotonic()
        assert not connection.await_news(0.2)
        assert 0.15 < time.monotonic() - started < 2
        threading.Timer(0.1, raw.sendall, [b"x"]).start()
        assert connection.await_news(5)


def test_magics_tell_the_kinds_of_connections_apart():
    assert session_framing(LIMITS) == Framing(b"heinfer\x03", ENVELOPE_BYTES, LIMITS.chunk_bytes)
    assert query_framing(LIMITS) == Framing(b"heinode\x02", LIMITS.message_bytes, LIMITS.chunk_bytes)
    with raw_and_connection(framing=query_framing(LIMITS)) as (raw, connection):
        raw.sendall(MAGIC)
        with pytest.raises(RemoteProtocolError, match="does not speak this protocol"):
            connection.expect_magic()


def test_last_message_reaches_a_peer_that_is_still_sending():
    with connected() as (near, far):

        def end():
            far.receive()
            far.send(b"last", b"")
            far.finish()

        thread = threading.Thread(target=end)
        thread.start()
        for _ in range(10_000):
            near.send(b"", bytes(100_000))
            if near.has_news:
                break
        assert near.receive() == (b"last", b"")
        assert near.receive() is None
        near.close()
        thread.join(5)
        assert far.closed


@pytest.mark.parametrize("half", ["end_input", "end_output"])
def test_half_a_connection_can_be_closed(half):
    with connected() as (near, far):
        far.send(b"before", b"")
        time.sleep(0.05)
        getattr(near, half)()
        assert near.receive() == (b"before", b"")
        if half == "end_input":
            assert near.receive() is None
            near.send(b"still", b"")
            assert far.receive() == (b"still", b"")
        else:
            assert far.receive() is None
            far.send(b"still", b"")
            assert near.receive() == (b"still", b"")
