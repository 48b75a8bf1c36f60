"""One TCP connection that carries frames: the only place that knows sockets' calls, options and times.

The socket blocks, and the system does the waiting (SO_RCVTIMEO, SO_SNDTIMEO, MSG_WAITALL): a message is two or three
calls, without polls between. The calls of an exchange of 115 KB up and 100 KB down take 0.08 ms on loopback, with 200
bytes each way 0.04 ms. Buffers keep the system's sizes, which grow with the connection: larger ones made no difference.
Under TLS an `EncryptedStream` stands between these calls and the socket.

A connection is used by one thread at a time, and closed from any: that wakes who waits in it.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ssl import SSLCertVerificationError
from typing import TypeVar, TypeVarTuple

from heinfer.errors import RemoteProtocolError
from heinfer.wire.address import Address, TransportError
from heinfer.wire.encryption import EncryptedStream, Stream
from heinfer.wire.frames import HEADER_BYTES, DamagedError, Framing, checksum, decode_header, encode_header
from heinfer.wire.introduction import Hurried, Receive
from heinfer.wire.limits import Limits
from heinfer.wire.security import HandshakeError, Tls, refusal

#: Seconds for a connection to be made, for a peer to say what it speaks, and who it is, and a node what it serves.
CONNECT_S = 10.0
#: Seconds that a side which has said its last word waits for the other to read it.
LINGER_S = 2.0
#: Probes of a silent peer before it is given up.
_PROBES = 4
_DISCARD_BYTES = 2**16
_CLOSED = "the connection was closed"
_CUT = "the peer went away in the middle of a message"
#: How a connection under TLS begins, where only plain text is expected (RFC 8446, section 5.1: a handshake's record).
_TLS_BEGINNING = b"\x16"

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Connection:
    """Frames over a connected socket, which it owns.

    Args:
        sock: connected.
        limits: times. No part of a message, header or envelope or payload, may take longer than `reply_s`.
        framing: how it begins, and the sizes of its frames.

    Attributes:
        peer: the other side's IP address, for the log.
        unheard: what it means if the peer goes before it has said anything; None where that is nothing special.
    """

    def __init__(self, sock: socket.socket, limits: Limits, framing: Framing) -> None:
        self.peer = _peer(sock)
        self.unheard: str | None = None
        self._socket = sock
        self._stream: Stream = sock
        self._recv: Receive = sock.recv
        self._encrypted: EncryptedStream | None = None
        self._framing = framing
        self._reply_s = limits.reply_s
        self._slowest_bytes_s = limits.slowest_bytes_s
        self._in_use = threading.Lock()
        self._ending = threading.Lock()  # between shutdown and close, which never wait
        self._closed = False
        _configure(sock, limits)
        self._patience(limits.reply_s)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLRDHUP)
        self._wait: Callable[[int], object] = self._poll.poll  # milliseconds; whether there are news
        self._leaving = select.poll()
        self._leaving.register(sock, select.POLLRDHUP)  # and what poll tells unasked: an error, both halves closed
        self._input_ended = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def encrypt(self, tls: Tls, server: Address | None = None) -> None:
        """Speak TLS from here on; before anything else.

        Args:
            tls: who we are and whom we believe.
            server: whom we have connected to; None as the side that accepted.

        Raises:
            TransportError: the server's certificate is refused.
            HandshakeError: the client's is, or the handshake failed otherwise. The peer is not told why.
        """
        self._use(self._shake_hands, tls, server)

    def send_magic(self) -> None:
        """Begin a connection, as the side that made it. Raises as `send`."""
        self._use(self._write, self._framing.magic, b"")

    def expect_magic(self) -> None:
        """Take the beginning of a connection, as the side that accepted it.

        Raises:
            RemoteProtocolError: the peer does not speak our protocol, is gone, or takes longer than `CONNECT_S`.
        """
        self._use(self._hurry, self._read_magic)

    def send(self, envelope: bytes, payload: bytes) -> None:
        """Send a message; the payload may be any C-contiguous view of bytes and is not kept.

        Raises:
            LocalProtocolError: it is longer than the framing allows.
            RemoteProtocolError: the peer is gone, or takes nothing for `reply_s` seconds.
        """
        header = encode_header(len(envelope), len(payload), self._framing, self._checksum(envelope, payload))
        self._use(self._write, header + envelope, payload)

    def receive(self, idle: bool = False, ends_at: float = math.inf) -> tuple[bytes, bytes] | None:
        """Wait for a message.

        Args:
            idle: wait for its first byte for ever, not for `reply_s` seconds.
            ends_at: or until this moment (`time.monotonic`), which is looked at every `reply_s` seconds.

        Returns:
            Envelope and payload; None where the peer has closed its half between two messages.

        Raises:
            RemoteProtocolError: the peer is gone, is too late, or announces more than the framing allows.
        """
        return self._use(self._read_message, idle, ends_at)

    def receive_first(self) -> tuple[bytes, bytes] | None:
        """Wait for a stranger's first message: it has `CONNECT_S` seconds, as `heinfer.wire.introduction` counts them.

        Returns and raises as `receive`.
        """
        return self._use(self._hurry, partial(self._read_message, idle=False))

    @property
    def has_news(self) -> bool:
        """Whether `receive` would not wait: something came, or the peer closed or is gone. True once closed."""
        if self._encrypted is None:
            return self._closed or bool(self._poll.poll(0))
        try:
            return bool(self._use(self._wait, 0))
        except RemoteProtocolError:
            return True

    @property
    def peer_gone(self) -> bool:
        """Whether the peer has closed its half or is gone; nothing is read, and what it said before may still be.

        After `end_input` only an error tells.
        """
        try:
            events = self._use(self._leaving.poll, 0)
        except RemoteProtocolError:
            return True
        found = events[0][1] if events else 0
        return bool(found & ~select.POLLRDHUP if self._input_ended else found)

    def await_news(self, seconds: float) -> bool:
        """Wait for news, but no longer than that; return whether there are any.

        Raises:
            RemoteProtocolError: the connection was closed.
        """
        return bool(self._use(self._wait, round(1000 * seconds)))

    def end_input(self) -> None:
        """Take nothing more from the peer than what has arrived; what we have to say can still be said."""
        self._input_ended = True
        self._shutdown(socket.SHUT_RD)

    def end_output(self) -> None:
        """Close our half; the peer's stays open."""
        self._take_leave()
        self._shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        """Close in a way that lets the peer read our last message, though it may still be sending."""
        self.end_output()
        with suppress(RemoteProtocolError):
            self._use(self._discard)
        self.close()

    def close(self) -> None:
        """Close, from any thread; whoever uses the connection gets a RemoteProtocolError."""
        self._closed = True
        self._take_leave()
        self._shutdown(socket.SHUT_RDWR)
        self._release_socket()

    def _use(self, action: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Do something with the socket, whose descriptor is not given back in the meantime."""
        try:
            with self._in_use:
                if not self._closed:
                    result = action(*arguments)
                    if not self._closed:
                        return result
            raise RemoteProtocolError(_CLOSED)
        except BlockingIOError:  # what a blocking socket raises when its time is over
            raise self._late() from None
        except (OSError, RemoteProtocolError) as error:
            if self._closed:
                raise RemoteProtocolError(_CLOSED) from None
            if isinstance(error, RemoteProtocolError):
                raise
            raise RemoteProtocolError(self.unheard or f"the peer is gone: {error.strerror or error}") from None
        finally:
            if self._closed:
                self._release_socket()

    def _release_socket(self) -> None:
        """Give the descriptor back, unless a thread uses it, which then does so at its end."""
        if self._in_use.acquire(blocking=False):
            with self._ending:
                self._socket.close()
            self._in_use.release()

    def _take_leave(self) -> None:
        """End TLS, unless a thread uses the connection, which then just ends."""
        if self._encrypted is not None and self._in_use.acquire(blocking=False):
            self._encrypted.take_leave()
            self._in_use.release()

    def _shutdown(self, how: int) -> None:
        with self._ending, suppress(OSError):
            self._socket.shutdown(how)

    def _patience(self, seconds: float) -> None:
        """How long one call waits. Python's own timeouts would add a poll to each and do without MSG_WAITALL."""
        self._socket.setblocking(True)
        microseconds = max(1, round(min(seconds, 2.0**31) * 1e6))
        value = struct.pack("@ll", *divmod(microseconds, 1_000_000))  # struct timeval
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)
        if self._encrypted is not None:
            self._encrypted.patience_s = seconds

    def _late(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"the peer made no progress for {self._reply_s:g} s")

    def _shake_hands(self, tls: Tls, server: Address | None) -> None:
        """Agree on keys; there is little time for it, however slowly the peer speaks."""
        seconds = min(CONNECT_S, self._reply_s)
        start = tls.accept if server is None else partial(tls.connect, host=server.host)
        stream = EncryptedStream(self._socket, start, seconds)
        try:
            stream.shake_hands()
        except OSError as error:
            reason = refusal(error)
            if server is not None and isinstance(error, SSLCertVerificationError):
                raise TransportError(f"{server} is not connected to: {reason}") from None
            raise HandshakeError(reason) from None
        self._stream = self._encrypted = stream
        self._recv = stream.recv
        self._wait = stream.poll
        self._patience(self._reply_s)

    def _write(self, head: bytes | memoryview, payload: bytes | memoryview) -> None:
        missing = len(head) + len(payload)
        started = time.monotonic()
        sent = self._stream.sendmsg((head, payload)) if payload else self._stream.send(head)
        while sent < missing:  # a signal came, or the time is over
            if time.monotonic() - started >= self._reply_s:
                raise self._late()
            head, payload = head[sent:], memoryview(payload)[max(0, sent - len(head)) :]
            missing -= sent
            sent = self._stream.sendmsg((head, payload))

    def _read(self, size: int) -> bytes:
        """Return that many bytes, or fewer where the peer has closed its half."""
        started = time.monotonic()
        data = self._recv(size, socket.MSG_WAITALL)
        if len(data) == size:
            return data
        parts = [data]
        while data and (missing := size - sum(map(len, parts))):  # a signal came, the time is over, or the peer ended
            if time.monotonic() - started >= self._reply_s:
                raise self._late()
            data = self._recv(missing, socket.MSG_WAITALL)
            parts.append(data)
        return b"".join(parts)

    def _read_whole(self, size: int) -> bytes:
        data = self._read(size)
        if len(data) < size:
            raise RemoteProtocolError(_CUT)
        return data

    def _read_message(self, idle: bool, ends_at: float = math.inf) -> tuple[bytes, bytes] | None:
        header = self._read_beginning(idle, ends_at)
        if not header:
            if self.unheard is not None:
                raise RemoteProtocolError(self.unheard)
            return None
        self.unheard = None
        if len(header) < HEADER_BYTES:
            header += self._read_whole(HEADER_BYTES - len(header))
        envelope_bytes, payload_bytes, check = decode_header(header, self._framing)
        envelope = self._read_whole(envelope_bytes) if envelope_bytes else b""
        payload = self._read_whole(payload_bytes) if payload_bytes else b""
        if self._checksum(envelope, payload) != check:
            raise DamagedError
        return envelope, payload

    def _checksum(self, envelope: bytes, payload: bytes | memoryview) -> int:
        return checksum(envelope, payload) if self._encrypted is None else 0  # TLS has better ones of its own

    def _read_beginning(self, idle: bool, ends_at: float) -> bytes:
        while True:
            try:
                return self._recv(HEADER_BYTES, socket.MSG_WAITALL)
            except BlockingIOError:  # not one byte came
                if not idle or time.monotonic() >= ends_at:
                    raise

    def _hurry(self, read: Callable[[], T]) -> T:
        """Read what a peer says that may be anybody."""
        patient = self._recv
        seconds = min(CONNECT_S, self._reply_s)
        self._recv = Hurried(patient, self._patience, seconds, self._slowest_bytes_s).receive
        try:
            return read()
        finally:
            self._recv = patient
            self._patience(self._reply_s)

    def _read_magic(self) -> None:
        magic, found = self._framing.magic, b""
        while len(found) < len(magic):
            data = self._recv(len(magic) - len(found), 0)
            found += data
            if found.startswith(_TLS_BEGINNING):
                raise HandshakeError("the peer does not speak this protocol, but TLS; this side has no certificates")
            if not data or not magic.startswith(found):
                raise RemoteProtocolError("the peer does not speak this protocol")

    def _discard(self) -> None:
        self._patience(LINGER_S)
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline and self._socket.recv(_DISCARD_BYTES):
            pass


def _peer(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # the peer is gone already
        return "an unknown address"


def _configure(sock: socket.socket, limits: Limits) -> None:
    """Send at once, and notice a peer that vanished without closing, which TCP alone would in hours."""
    idle_s = min(max(1, round(limits.idle_s)), 32767)  # the most that Linux takes
    options = [
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, idle_s),
        (socket.TCP_KEEPINTVL, max(1, idle_s // _PROBES)),
        (socket.TCP_KEEPCNT, _PROBES),
        # Also how long a peer may leave its window shut, so no less than what it may take for a message.
        (socket.TCP_USER_TIMEOUT, min(round(limits.reply_s * 1000) + 1000, 2**31 - 1)),
    ]
    with suppress(OSError):  # the peer is gone already: whoever uses the connection is told
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
