"""A socket seen through TLS: the same calls, with the same waits, as a plain one.

OpenSSL works in memory here (`ssl.MemoryBIO`), and the socket below stays a blocking one whose waits are the system's:

    socket.recv_into -> incoming -> engine.read -> recv()          send(), sendmsg() -> engine.write -> outgoing -> send

That leaves to us what an `ssl.SSLSocket` decides itself. An alert of a handshake that failed, which would tell the peer
why, is not sent. Closing from another thread touches the socket alone, never the engine. And news are bytes to read,
not a record of TLS's own.

A connection that just ends is the same as one that TLS ends (close_notify): lengths stand before all that is said, so
what is cut off is noticed, and an end by itself says nothing.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from heinfer.errors import RemoteProtocolError

#: The most that a record of TLS carries (RFC 8446, section 5.1).
RECORD_BYTES = 2**14
#: Taken from the socket at once.
_PULL_BYTES = 2**16
#: Encrypted ahead of what the socket takes.
_PUSH_BYTES = 2**18

Start = Callable[[ssl.MemoryBIO, ssl.MemoryBIO], ssl.SSLObject]


class Stream(Protocol):
    """What reads and writes: a socket, or TLS over one."""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Return some bytes, b"" at the end."""

    def send(self, data: bytes | memoryview, /) -> int:
        """Send bytes; return how many."""

    def sendmsg(self, parts: tuple[bytes | memoryview, bytes | memoryview], /) -> int:
        """Send parts one after the other; return how many bytes."""


class EncryptedStream:
    """TLS over a connected, blocking socket, which stays its owner's. Use from one thread at a time.

    Args:
        sock: what to read from and write to.
        start: makes the engine between two buffers.
        patience_s: seconds that one call may wait for the peer; also to be set on the socket.
    """

    def __init__(self, sock: socket.socket, start: Start, patience_s: float) -> None:
        self.patience_s = patience_s
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._engine = start(self._incoming, self._outgoing)
        self._pulled = bytearray(_PULL_BYTES)
        self._ahead, self._taken = b"", 0  # decrypted, and how much of it was asked for
        self._ended = False
        self._broken = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLRDHUP)

    def shake_hands(self) -> None:
        """Agree on keys and check the peer's certificate. On the accepting side the peer's is then known to be good.

        Raises:
            OSError: it failed; `heinfer.wire.security.refusal` says why. The peer is not told.
        """
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                self._engine.do_handshake()
            except ssl.SSLWantReadError:
                self._push(deadline)
                self._await(deadline)
                self._pull()
                if self._ended:
                    raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake") from None
            else:
                return self._push(deadline)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return at least one byte, b"" at the end; there are no flags."""
        deadline = time.monotonic() + self.patience_s
        while not self._has_bytes():
            if time.monotonic() >= deadline:  # bytes of a record came all the time, but not all of it
                raise _late()
            self._pull()
        data = self._ahead[self._taken : self._taken + size]
        self._taken += len(data)
        if self._broken and not data:
            raise RemoteProtocolError("what came was not encrypted by the peer: the connection was tampered with")
        return data

    def send(self, data: bytes | memoryview) -> int:
        """Send all of it; return its length."""
        return self.sendmsg((data,))

    def sendmsg(self, parts: Iterable[bytes | memoryview]) -> int:
        """Send parts one after the other, a small message in one record; return their length."""
        deadline = time.monotonic() + self.patience_s
        views = [memoryview(part).cast("B") for part in parts]
        total = sum(map(len, views))
        for view in [memoryview(b"".join(views))] if total <= RECORD_BYTES else views:
            while view:
                view = view[self._engine.write(view) :]
                if self._outgoing.pending >= _PUSH_BYTES:
                    self._push(deadline)
        self._push(deadline)
        return total

    def poll(self, milliseconds: int) -> bool:
        """Wait no longer than that, though bytes may come all the time; return whether `recv` would not wait."""
        left = milliseconds / 1000
        deadline = time.monotonic() + left
        while not self._has_bytes():
            if left < 0 or not self._poll.poll(1000 * left):
                return False
            with suppress(BlockingIOError):
                self._pull()
            left = deadline - time.monotonic()
        return True

    def take_leave(self) -> None:
        """Tell the peer that nothing more will come (close_notify), without waiting; what it says can still be read."""
        self._ahead = self._ahead[self._taken :] + self._decrypt()  # or the engine would trip over it
        self._taken = 0
        with suppress(OSError):
            with suppress(ssl.SSLError):  # it would like to hear the peer's
                self._engine.unwrap()
            self._socket.send(self._outgoing.read(), socket.MSG_DONTWAIT)

    def _has_bytes(self) -> bool:
        """Whether `recv` would not wait for the socket."""
        if self._taken == len(self._ahead):
            self._ahead, self._taken = self._decrypt(), 0
        return bool(self._ahead) or self._ended or self._broken

    def _decrypt(self) -> bytes:
        """Return what has arrived in whole records. One call of the engine takes one: each gives Python's lock away."""
        parts: list[bytes] = []
        try:
            while self._incoming.pending and not (self._ended or self._broken):
                parts.append(self._engine.read(RECORD_BYTES))
                self._ended = not parts[-1]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError:
            self._broken = True
        return b"".join(parts)

    def _pull(self) -> None:
        size = self._socket.recv_into(self._pulled)
        self._incoming.write(memoryview(self._pulled)[:size])
        self._ended = self._ended or not size

    def _push(self, deadline: float) -> None:
        view = memoryview(self._outgoing.read())
        while view:
            view = view[self._socket.send(view) :]
            if view and time.monotonic() >= deadline:
                raise _late()

    def _await(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or not self._poll.poll(1000 * left):
            raise _late()


def _late() -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, "the time is over")
