"""The node's connection to one untrusted server: sessions that carry one upload after the other.

A session is one gRPC stream with a thread that reads it. Sessions are kept and reused; one that broke is thrown away.
What goes up waits in a short queue, what comes down in another, so that a slow peer costs time and not memory.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from heinfer.errors import HeinferError, ProtocolError, RemoteProtocolError
from heinfer.wire import (
    Address,
    AnswerComplete,
    BlockAnswer,
    BlockShape,
    Chunk,
    End,
    EventStream,
    Limits,
    NodeEvent,
    NodeSession,
    Ready,
    ServerEvent,
    call_session,
    open_channel,
)

#: Chunks that wait on either side of a session.
_QUEUE_CHUNKS = 16
_POLL_S = 0.5


class ServerLink:
    """Connection to one server; safe to use from several threads.

    Args:
        address: where the server listens.
        plan_hash: hash of our plan, 32 bytes.
        blocks: shapes of the plan's blocks.
        limits: sizes and times.
    """

    def __init__(self, address: Address, plan_hash: bytes, blocks: Sequence[BlockShape], limits: Limits) -> None:
        self._plan_hash = plan_hash
        self._blocks = tuple(blocks)
        self._limits = limits
        self._channel = open_channel(address, limits)
        self._idle: list[LinkSession] = []
        self._lock = threading.Lock()

    def acquire(self) -> LinkSession:
        """Lend a session to one thread, which gives it back by `release`, or closes it where something went wrong.

        Raises:
            RemoteProtocolError: the server can't be reached, or refuses us.
        """
        with self._lock:
            session = self._idle.pop() if self._idle else None
        if session is None or not session.usable:
            session = LinkSession(self._channel, self._plan_hash, self._blocks, self._limits)
        return session

    def release(self, session: LinkSession) -> None:
        """Take a session back whose answers have all been read."""
        with self._lock:
            self._idle.append(session)

    @contextmanager
    def session(self) -> Iterator[LinkSession]:
        """Lend a session for a block of code; an error closes it.

        Raises:
            RemoteProtocolError: the server can't be reached, or refuses us.
        """
        session = self.acquire()
        try:
            yield session
        except BaseException:
            session.close()
            raise
        self.release(session)

    def close(self) -> None:
        """End all idle sessions and the connection."""
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()
        self._channel.close()


class LinkSession:
    """One stream to the server. Use from one thread at a time, for one upload after the other.

    An answer waits in a short queue until it is read. So a second upload before the first answer is read may wait for
    ever: uploads that are under way together take a session each.
    """

    def __init__(self, channel: object, plan_hash: bytes, blocks: Sequence[BlockShape], limits: Limits) -> None:
        self._limits = limits
        self._protocol = NodeSession(os.urandom(16), plan_hash, blocks, limits)
        self._lock = threading.Lock()
        self._outgoing: queue.Queue[NodeEvent | End] = queue.Queue(_QUEUE_CHUNKS)
        self._incoming: queue.Queue[ServerEvent | AnswerComplete] = queue.Queue(_QUEUE_CHUNKS)
        self._error: HeinferError | None = None
        self._done = threading.Event()
        self._stream: EventStream[ServerEvent] = call_session(channel, self._events(), limits)
        threading.Thread(target=self._read, name="heinfer-link", daemon=True).start()
        self._put(self._protocol.hello())
        if not isinstance(self._get(), Ready):
            self.close()
            raise RemoteProtocolError("the server did not greet back")

    @property
    def usable(self) -> bool:
        """Whether the stream is open."""
        return not self._done.is_set()

    def open_request(self, block: int, samples: int) -> int:
        """Announce an upload; return its request id."""
        with self._lock:
            request = self._protocol.open_request(block, samples)
        self._put(request)
        return request.request_id

    def send_rows(self, request_id: int, first_row: int, rows: int, data: bytes) -> None:
        """Send rows of an upload, in order."""
        with self._lock:
            chunk = self._protocol.send(Chunk(request_id, first_row, rows, data))
        self._put(chunk)

    def answer(self, request_id: int) -> Iterator[BlockAnswer | Chunk]:
        """Yield the answer's announcement and its chunks.

        Raises:
            RemoteProtocolError: the server sent something else, or went away.
        """
        while True:
            event = self._get()
            if isinstance(event, AnswerComplete):
                return
            if not isinstance(event, BlockAnswer | Chunk) or event.request_id != request_id:
                raise RemoteProtocolError(f"expected the answer to request {request_id}, got {type(event).__name__}")
            yield event

    def close(self) -> None:
        """Give the stream up."""
        self._done.set()
        self._stream.cancel()

    def _put(self, event: NodeEvent | End) -> None:
        """Queue an event; never with the lock held, which the reading thread needs to make progress."""
        deadline = time.monotonic() + self._limits.reply_s
        while True:
            if self._done.is_set():
                raise self._failure()
            try:
                return self._outgoing.put(event, timeout=_POLL_S)
            except queue.Full:
                self._check_deadline(deadline)

    def _check_deadline(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            self.close()
            raise RemoteProtocolError(f"the server made no progress for {self._limits.reply_s:g} s")

    def _get(self) -> ServerEvent | AnswerComplete:
        deadline = time.monotonic() + self._limits.reply_s
        while True:
            try:
                return self._incoming.get(timeout=_POLL_S if not self._done.is_set() else 0.001)
            except queue.Empty:
                if self._done.is_set() and self._incoming.empty():
                    raise self._failure() from None
                self._check_deadline(deadline)

    def _failure(self) -> HeinferError:
        return self._error or RemoteProtocolError("the session with the server has ended")

    def _events(self) -> Iterator[NodeEvent | End]:
        while True:
            try:
                event = self._outgoing.get(timeout=_POLL_S)
            except queue.Empty:
                if self._done.is_set():
                    return
                continue
            yield event
            if isinstance(event, End):
                return

    def _read(self) -> None:
        """Read the stream until it ends, in a thread of its own."""
        try:
            for event in self._stream:
                with self._lock:
                    received = self._protocol.receive(event)
                for item in received:
                    self._deliver(item)
        except ProtocolError as error:
            self._error = error
        except Exception as error:  # a bug of ours must not leave the other thread waiting
            self._error = RemoteProtocolError(f"reading from the server failed: {error}")
        finally:
            self._done.set()

    def _deliver(self, item: object) -> None:
        while not self._done.is_set():
            try:
                self._incoming.put(item, timeout=_POLL_S)  # type: ignore[arg-type]
            except queue.Full:
                continue
            return
