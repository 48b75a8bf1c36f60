"""The node's connection to one untrusted server: sessions that carry one upload after the other.

A session is one gRPC stream. Sessions are kept and reused; one that broke is thrown away. What goes up waits in a short
queue, what comes down waits in the stream until it is asked for, so that a slow peer costs time and not memory.

A thread that waits for an answer reads the stream itself: handing messages over from a thread that reads costs more
than anything else here (0.3 ms of a round trip). gRPC has no time limit for one read, so one thread watches all
sessions of a link and ends those that wait for too long. While an upload of several chunks is being sent, a thread
reads ahead by one message: a server that fails in the middle is heard at once.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from heinfer.errors import ProtocolError, RemoteProtocolError
from heinfer.wire import (
    Address,
    AnswerComplete,
    BlockAnswer,
    BlockShape,
    Chunk,
    End,
    EventStream,
    Failure,
    Limits,
    Mode,
    NodeEvent,
    NodeSession,
    Ready,
    ServerEvent,
    UploadComplete,
    call_session,
    open_channel,
)

#: Messages of a session that wait to be sent.
_QUEUE_MESSAGES = 16

Received = NodeEvent | ServerEvent | End | UploadComplete | AnswerComplete


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
        self._watch = _Watch(limits.reply_s)

    def acquire(self) -> LinkSession:
        """Lend a session to one thread, which gives it back by `release`, or closes it where something went wrong.

        Raises:
            RemoteProtocolError: the server can't be reached, or refuses us.
        """
        with self._lock:
            session = self._idle.pop() if self._idle else None
        if session is None or not session.usable:
            session = LinkSession(self._channel, self._plan_hash, self._blocks, self._limits, self._watch)
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
        self._watch.close()


class LinkSession:
    """One stream to the server. Use from one thread at a time, for one upload after the other; close from any.

    An answer waits in the stream until it is read. So a second upload before the first answer is read may wait for
    ever: uploads that are under way together take a session each.
    """

    def __init__(
        self, channel: object, plan_hash: bytes, blocks: Sequence[BlockShape], limits: Limits, watch: _Watch
    ) -> None:
        self._limits = limits
        self._protocol = NodeSession(os.urandom(16), plan_hash, blocks, limits)
        self._outgoing: queue.SimpleQueue[NodeEvent | End] = queue.SimpleQueue()
        self._room = threading.Semaphore(_QUEUE_MESSAGES)
        self._incoming: deque[Received] = deque()
        self._ahead: queue.SimpleQueue[ServerEvent | Exception] | None = None
        self._done = threading.Event()
        self._stalled = False
        self._wait_ends = math.inf
        self._stream: EventStream[ServerEvent] = call_session(channel, self._events(), limits)
        self._stream.notify(self._end)
        watch.add(self)
        self._put(self._protocol.hello())
        if not isinstance(self._get(), Ready):
            self.close()
            raise RemoteProtocolError("the server did not greet back")

    @property
    def usable(self) -> bool:
        """Whether the stream is open."""
        return not self._done.is_set()

    def exchange(
        self, block: int, samples: int, mode: Mode, rows: bytes | memoryview, attempt: int = 0
    ) -> tuple[BlockAnswer, Iterator[Chunk]]:
        """Send a whole upload and wait for its answer: one message each way where they fit into a chunk.

        Args:
            block: index into the plan's blocks.
            samples: inputs that the upload carries.
            mode: how it was made.
            rows: all rows, packed, C-contiguous.
            attempt: how often the same bytes were sent before.

        Returns:
            The answer's announcement, and its chunks as they arrive, to be read to the end.

        Raises:
            RemoteProtocolError: the server sent something else, or went away; the iterator raises it too.
            LocalProtocolError: these are not the rows of such an upload.
        """
        return self.receive(self.send(block, samples, mode, rows, attempt))

    def send(self, block: int, samples: int, mode: Mode, rows: bytes | memoryview, attempt: int = 0) -> int:
        """The first half of `exchange`; returns the request id."""
        request_id = self._protocol.next_id
        for event in self._protocol.upload(block, samples, mode, rows, attempt):
            self._put(event)
        return request_id

    def receive(self, request_id: int) -> tuple[BlockAnswer, Iterator[Chunk]]:
        """The second half of `exchange`."""
        announcement = self._get()
        while isinstance(announcement, AnswerComplete):  # of an answer whose reader stopped at its last chunk
            announcement = self._get()
        if not isinstance(announcement, BlockAnswer) or announcement.request_id != request_id:
            raise self._unexpected(announcement, request_id)
        return announcement, self._chunks(request_id)

    def open_request(self, block: int, samples: int) -> int:
        """Announce an upload in standard mode, whose rows follow by `send_rows`; return its request id."""
        request = self._protocol.open_request(block, samples)
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
        """Give the stream up; whoever waits for it gets an error."""
        self._end()
        self._stream.cancel()

    def stop_if_late(self, now: float) -> None:
        """Give the stream up if the server should have answered by now, in seconds of `time.monotonic`."""
        if now >= self._wait_ends:
            self._stalled = True
            self.close()

    @property
    def wait_ends(self) -> float:
        """When the wait for the server that is under way ends, in seconds of `time.monotonic`; infinity for none."""
        return self._wait_ends

    def _chunks(self, request_id: int) -> Iterator[Chunk]:
        while not isinstance(event := self._get(), AnswerComplete):
            if not isinstance(event, Chunk) or event.request_id != request_id:
                raise self._unexpected(event, request_id)
            yield event

    @staticmethod
    def _unexpected(event: Received, request_id: int) -> RemoteProtocolError:
        return RemoteProtocolError(f"expected the answer to request {request_id}, got {type(event).__name__}")

    def _put(self, event: NodeEvent) -> None:
        """Queue an event for the thread of gRPC's that sends."""
        if not self._done.is_set() and not self._room.acquire(timeout=self._limits.reply_s):
            self._stalled = True
            self.close()
        if self._done.is_set():
            raise self._failure()
        if self._ahead is None and isinstance(event, Chunk) and event.first_row:
            self._ahead = queue.SimpleQueue()
            threading.Thread(target=self._read_ahead, args=(self._ahead,), name="heinfer-link", daemon=True).start()
        self._outgoing.put(event)

    def _get(self) -> Received:
        if not self._incoming:
            self._incoming.extend(self._read())
        return self._incoming.popleft()

    def _read(self) -> tuple[Received, ...]:
        self._wait_ends = time.monotonic() + self._limits.reply_s
        try:
            return self._protocol.receive(self._next())
        except StopIteration:
            self.close()
            raise RemoteProtocolError("the server ended the session") from None
        except ProtocolError:
            self.close()
            if self._stalled:
                raise self._stall() from None
            raise
        finally:
            self._wait_ends = math.inf

    def _next(self) -> ServerEvent:
        if self._ahead is None:
            return next(self._stream)
        outcome = self._ahead.get()
        self._ahead = None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _read_ahead(self, ahead: queue.SimpleQueue[ServerEvent | Exception]) -> None:
        """Read one message in a thread of its own; one that ends the session ends the upload."""
        try:
            outcome: ServerEvent | Exception = next(self._stream)
        except Exception as error:
            outcome = error
        ahead.put(outcome)
        if isinstance(outcome, Failure | Exception):
            self._end()

    def _failure(self) -> ProtocolError:
        """Why the stream is over: what the server said last, or what became of the connection."""
        if self._stalled:
            return self._stall()
        try:
            while True:
                self._read()
        except ProtocolError as error:
            return error

    def _stall(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"the server made no progress for {self._limits.reply_s:g} s")

    def _events(self) -> Iterator[NodeEvent]:
        while not isinstance(event := self._outgoing.get(), End):
            self._room.release()
            yield event

    def _end(self) -> None:
        """Note that the stream is over, and wake up who waits to send: we, and the thread of gRPC's."""
        self._done.set()
        self._room.release()
        self._outgoing.put(End())


class _Watch:
    """Stops sessions whose server does not answer in time.

    Waits all have the same length, so one that begins later does not end before the next look.
    """

    def __init__(self, reply_s: float) -> None:
        self._reply_s = reply_s
        self._sessions: weakref.WeakSet[LinkSession] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="heinfer-link-watch", daemon=True).start()

    def add(self, session: LinkSession) -> None:
        """Watch a session for as long as anybody uses it."""
        with self._lock:
            self._sessions.add(session)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _run(self) -> None:
        pause = self._reply_s
        while not self._closed.wait(min(pause, threading.TIMEOUT_MAX)):
            now = time.monotonic()
            with self._lock:
                sessions = list(self._sessions)
            for session in sessions:
                session.stop_if_late(now)
            pause = min([self._reply_s, *(max(0.0, session.wait_ends - now) for session in sessions)])
            del sessions
