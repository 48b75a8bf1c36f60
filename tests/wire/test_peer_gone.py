"""Whether a peer is gone is known without reading what it has said."""

from __future__ import annotations

import socket
import time

import pytest

from heinfer.wire import Connection, Limits
from heinfer.wire.frames import session_framing

LIMITS = Limits(reply_s=10.0)


def pair() -> tuple[socket.socket, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, Connection(far, LIMITS, session_framing(LIMITS))


def becomes_gone(connection: Connection) -> bool:
    ends_at = time.monotonic() + 5
    while time.monotonic() < ends_at:
        if connection.peer_gone:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("said", [b"", b"something that nobody has read yet"])
def test_a_peer_that_closes_is_gone_and_one_that_speaks_is_not(said: bytes) -> None:
    raw, connection = pair()
    with raw:
        assert not connection.peer_gone
        raw.sendall(said)
        time.sleep(0.05)
        assert not connection.peer_gone
    assert becomes_gone(connection)
    connection.close()


def test_what_we_do_not_want_to_hear_is_not_a_peer_that_is_gone() -> None:
    raw, connection = pair()
    with raw:
        connection.end_input()
        time.sleep(0.05)
        assert not connection.peer_gone
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends a reset
    assert becomes_gone(connection)
    connection.close()


def test_a_connection_that_we_closed_has_no_peer() -> None:
    raw, connection = pair()
    with raw:
        connection.close()
        assert connection.peer_gone
