"""The node's connections to one untrusted server: sessions that carry one upload after the other.

A session is one TCP connection. Sessions are kept and reused; one that broke is thrown away. The thread that has
something to say or to hear uses the connection itself, and the connection ends a wait that takes too long: handing
messages over to other threads would cost more than anything else here. What comes down waits in the connection until
it is asked for, so that a slow peer costs time and not memory.

Between the chunks of an upload a session looks whether the server has said something: one that fails in the middle is
heard at once. It also looks at the clock, so that no server draws an upload out beyond its time, however much of
something it says.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from heinfer.errors import ProtocolError, RemoteProtocolError
from heinfer.wire import (
    Address,
    AnswerComplete,
    BlockAnswer,
    BlockShape,
    Chunk,
    End,
    Lender,
    Limits,
    Mode,
    NodeEvent,
    NodeSession,
    Ready,
    ServerEvent,
    UploadComplete,
    connect,
    session_framing,
)
from heinfer.wire.codec import decode_server_event, encode_node_event
from heinfer.wire.security import PlainText, Security, check_connecting
from trusted_node.integrity import Conduct

Received = NodeEvent | ServerEvent | End | UploadComplete | AnswerComplete


#: Sessions that are kept for the next upload; a burst needs more, and a server has other nodes to serve.
_IDLE_SESSIONS = 8


class ServerLink:
    """Connections to one server; safe to use from several threads.

    Args:
        address: where the server listens.
        plan_hash: hash of our plan, 32 bytes.
        blocks: shapes of the plan's blocks.
        limits: sizes and times.
        security: TLS, or where plain text is allowed.

    Attributes:
        conduct: how often its answers were not honest.

    Raises:
        TransportError: this is no way to connect there.
    """

    def __init__(
        self,
        address: Address,
        plan_hash: bytes,
        blocks: Sequence[BlockShape],
        limits: Limits,
        security: Security = PlainText.ON_LOOPBACK,
    ) -> None:
        check_connecting(address, security)
        self.conduct = Conduct(str(address))
        shapes = tuple(blocks)
        self._lender = Lender(
            lambda: LinkSession(address, plan_hash, shapes, limits, security), _IDLE_SESSIONS, LinkSession.greet
        )

    def acquire(self) -> LinkSession:
        """Lend a session to one thread, which gives it back by `release`, or closes it where something went wrong.

        Raises:
            RemoteProtocolError: the server can't be reached, or refuses us; or the link was closed.
            IntegrityError: it is in quarantine.
        """
        self.conduct.check()
        return self._lender.acquire()

    def release(self, session: LinkSession) -> None:
        """Take a session back whose answers have all been read."""
        session.ends_at = math.inf
        self._lender.release(session)

    def session(self) -> AbstractContextManager[LinkSession]:
        """Lend a session for a block of code; an error closes it. Raises as `acquire`."""
        self.conduct.check()
        return self._lender.lend()

    def close(self) -> None:
        """End all sessions, idle or not; whoever waits in one gets an error."""
        self._lender.close()


class LinkSession:
    """One connection to the server. Use from one thread at a time, for one upload after the other; close from any.

    An answer waits in the connection until it is read. So a second upload before the first answer is read may wait for
    ever: uploads that are under way together take a session each.

    Args:
        address: where the server listens.
        plan_hash: hash of our plan, 32 bytes.
        blocks: shapes of the plan's blocks.
        limits: sizes and times.
        security: TLS, or where plain text is allowed.

    Attributes:
        ends_at: moment (`time.monotonic`) after which no further message is sent or waited for.

    Raises:
        TransportError: the server's certificate is refused.
        RemoteProtocolError: the server can't be reached.
    """

    def __init__(
        self,
        address: Address,
        plan_hash: bytes,
        blocks: Sequence[BlockShape],
        limits: Limits,
        security: Security = PlainText.ON_LOOPBACK,
    ) -> None:
        self._protocol = NodeSession(os.urandom(16), plan_hash, blocks, limits)
        self.ends_at = math.inf
        self._long = False
        self._incoming: deque[Received] = deque()
        self._connection = connect(address, limits, session_framing(limits), security)

    def greet(self) -> None:
        """Open the session; before anything else.

        Raises:
            RemoteProtocolError: the server refuses us, or does not answer.
        """
        self._put(self._protocol.hello())
        if not isinstance(self._get(), Ready):
            self.close()
            raise RemoteProtocolError("the server did not greet back")

    @property
    def usable(self) -> bool:
        """Whether the connection is open, and nothing comes out of it that nobody has asked for."""
        return not self._connection.has_news

    def exchange(
        self, block: int, samples: int, mode: Mode, rows: bytes | memoryview, attempt: int = 0, trace: bytes = b""
    ) -> tuple[BlockAnswer, Iterator[Chunk]]:
        """Send a whole upload and wait for its answer: one message each way where they fit into a chunk.

        Args:
            block: index into the plan's blocks.
            samples: inputs that the upload carries.
            mode: how it was made.
            rows: all rows, packed, C-contiguous.
            attempt: how often the same bytes were sent before.
            trace: names our span, where the server may know.

        Returns:
            The answer's announcement, and its chunks as they arrive, to be read to the end.

        Raises:
            RemoteProtocolError: the server sent something else, or went away; the iterator raises it too.
            LocalProtocolError: these are not the rows of such an upload.
        """
        return self.receive(self.send(block, samples, mode, rows, attempt, trace))

    def send(
        self, block: int, samples: int, mode: Mode, rows: bytes | memoryview, attempt: int = 0, trace: bytes = b""
    ) -> int:
        """The first half of `exchange`; returns the request id."""
        request_id, self._long = self._protocol.next_id, mode is Mode.DEEP
        for event in self._protocol.upload(block, samples, mode, rows, attempt, trace):
            self._put(event)
        return request_id

    def receive(self, request_id: int) -> tuple[BlockAnswer, Iterator[Chunk]]:
        """The second half of `exchange`; for the answer of a deep block it waits until `ends_at`."""
        announcement = self._get(self._long)
        while isinstance(announcement, AnswerComplete):  # of an answer whose reader stopped at its last chunk
            announcement = self._get()
        if not isinstance(announcement, BlockAnswer) or announcement.request_id != request_id:
            raise self._unexpected(announcement, request_id)
        return announcement, self._chunks(request_id)

    def open_request(
        self, block: int, samples: int, mode: Mode = Mode.STANDARD, attempt: int = 0, trace: bytes = b""
    ) -> int:
        """Announce an upload whose rows follow by `send_rows`; return its request id."""
        self._long = mode is Mode.DEEP
        request = self._protocol.open_request(block, samples, mode, attempt, trace=trace)
        self._put(request)
        return request.request_id

    def send_rows(self, request_id: int, first_row: int, rows: int, data: bytes) -> None:
        """Send rows of an upload, in order."""
        self._put(self._protocol.send(Chunk(request_id, first_row, rows, data)))

    def answer(self, request_id: int) -> Iterator[BlockAnswer | Chunk]:
        """Yield the answer's announcement and its chunks.

        Raises:
            RemoteProtocolError: the server sent something else, or went away.
        """
        announcement, chunks = self.receive(request_id)
        yield announcement
        yield from chunks

    def close(self) -> None:
        """Give the session up; whoever waits in it gets an error."""
        self._connection.close()

    def _chunks(self, request_id: int) -> Iterator[Chunk]:
        while not isinstance(event := self._get(), AnswerComplete):
            if not isinstance(event, Chunk) or event.request_id != request_id:
                raise self._unexpected(event, request_id)
            yield event

    @staticmethod
    def _unexpected(event: Received, request_id: int) -> RemoteProtocolError:
        return RemoteProtocolError(f"expected the answer to request {request_id}, got {type(event).__name__}")

    def _check_time(self) -> None:
        if time.monotonic() >= self.ends_at:
            self.close()
            raise RemoteProtocolError("the time for this upload is over: its query, or what was prepared, is too old")

    def _put(self, event: NodeEvent) -> None:
        self._check_time()
        if isinstance(event, Chunk):
            self._hear()
        try:
            self._connection.send(*encode_node_event(event))
        except RemoteProtocolError:
            self._hear()  # why the server does not listen any more, if it said so
            self.close()
            raise

    def _hear(self) -> None:
        """Take what the server says unasked, without waiting; raise if that ends the session."""
        while self._connection.has_news:
            self._incoming.extend(self._read())

    def _get(self, long: bool = False) -> Received:
        if not self._incoming:
            self._incoming.extend(self._read(long))
        return self._incoming.popleft()

    def _read(self, long: bool = False) -> tuple[Received, ...]:
        self._check_time()
        try:
            message = self._connection.receive(long, self.ends_at)
            if message is None:
                raise RemoteProtocolError("the server ended the session")
            return self._protocol.receive(decode_server_event(*message))
        except ProtocolError:
            self.close()
            raise
