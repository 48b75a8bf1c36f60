"""One upload on its way: sent, and sent again if it must be; the same bytes, never encrypted again.

    upload --rows--> delivery --session--> server A     cut, late, damaged, busy, stopping:  once more, A or B
                        |  keeps the rows                failed, or a forged answer:          B, or nobody
                        +--session'--> server B --answer--> checked and accepted: the rows are let go

What is kept are rows as they were sent, until the answer has been accepted. All that the node keeps counts against one
budget; an upload that finds no room there is not kept, and so not sent again. A query has four uploads under way at
most, and the node works on a few groups at once, so what can be kept is bounded in any case.

How long: `Limits.retry_s` after the first failure of an upload, and never beyond its last moment, at which an answer
that still comes ends too. Time alone decides, nothing that the data say.

A server that is busy has not failed: this upload leaves it alone for a while, and others don't. One of a deep block,
which may be behind one that takes hours, comes back until its last moment:

    busy, 1 s, busy, 2 s, busy, ..., 30 s, busy, 30 s, its answer         each wait shortened by a random part
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from heinfer.errors import CiphertextError, IntegrityError, LocalProtocolError, RemoteProtocolError
from heinfer.spans import SILENT, Span
from heinfer.wire import BlockAnswer, Chunk, FailureCode, Limits, MemoryBudget, Mode, RefusedError, TransportError
from trusted_node.link import LinkSession, ServerLink
from trusted_node.replicas import Replicas, ServerError

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: Times that one upload is sent at most: more than back-offs allow in `retry_s`, unless many servers fail at once.
MOST_ATTEMPTS: Final = 256
#: Seconds before a server that was busy is asked again, the first time and at most; of deep blocks, each time of which
#: hundreds of megabytes may be on their way before the server is heard.
_BUSY_S: Final = (0.05, 2.0)
_DEEP_BUSY_S: Final = (1.0, 30.0)
_jitter = secrets.SystemRandom()
#: What a server says that would not be different the next time.
_FINAL: Final = (FailureCode.FAILED, FailureCode.VERSION, FailureCode.PLAN)
#: Told (block, packed rows) of an upload as it is made: what the server is to see.
Watch: TypeAlias = Callable[[int, bytes], None]
Failed = RemoteProtocolError | CiphertextError | IntegrityError | TransportError


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows as they were sent: the number of the first, how many, and their bytes."""

    first: int
    count: int
    data: bytes


class Delivery:
    """Carries one upload of one block, and its answer. Use from one thread; `close` ends it in any case.

    Args:
        replicas: servers that may be asked.
        limits: sizes and times.
        kept: memory for all rows that are kept.
        last_moment: after which nothing more of it is sent or waited for (`time.monotonic`).
        watch: told of its rows, once, however often they are sent.
        span: told its bytes, and ended with it.
    """

    def __init__(
        self,
        replicas: Replicas,
        limits: Limits,
        kept: MemoryBudget,
        last_moment: float,
        watch: Watch | None = None,
        span: Span = SILENT,
    ) -> None:
        self._replicas = replicas
        self._limits = limits
        self._budget = kept
        self._last_moment = last_moment
        self._watch = watch
        self._span = span
        self._received_bytes = 0
        self._sent_bytes = 0
        self._server_s = 0.0
        self._announced: tuple[int, int, Mode] | None = None
        self._rows: list[_Rows] = []
        self._whole: bytes | memoryview | None = None
        self._kept_bytes = 0
        self._repeatable = limits.retry_s > 0
        self._session: LinkSession | None = None
        self._link: ServerLink | None = None
        self._request_id = 0
        self._attempts = 0
        self._attempts_before = 0
        self._avoid: set[ServerLink] = set()
        self._give_up_at: float | None = None
        self._failure: Failed | None = None
        self._times_busy = 0
        self._not_before: dict[ServerLink, float] = {}

    # -- the upload's side --------------------------------------------------------------------------------------------

    def open_request(self, block: int, samples: int, mode: Mode = Mode.STANDARD) -> None:
        """Announce an upload whose rows follow by `send_rows`, in order."""
        self._announce(block, samples, mode)
        self._try(self._open)

    def send_rows(self, first_row: int, rows: int, data: bytes) -> None:
        """Send rows; where the connection is gone they are kept, and sent by `accept`.

        Raises:
            RemoteProtocolError: the connection is gone, and nothing more is to be sent.
        """
        self._tell(data)
        self._keep(_Rows(first_row, rows, data))
        if self._session is not None:
            session, request_id = self._session, self._request_id
            self._try(lambda: session.send_rows(request_id, first_row, rows, data))

    def send(self, block: int, samples: int, mode: Mode, rows: bytes | memoryview) -> None:
        """Send a whole upload. Raises as `send_rows`."""
        self._announce(block, samples, mode)
        self._tell(rows)
        self._whole = rows
        self._reserve(memoryview(rows).nbytes)
        self._try(self._transmit)
        if not self._repeatable:
            self._whole = None

    def accept(self, read: Callable[[BlockAnswer, Iterator[Chunk]], T]) -> T:
        """Read the answer; where that fails, send the same rows again and read once more.

        Args:
            read: takes the announcement and all chunks, and checks what it reads; called once an attempt, so it starts
                anew every time. What it raises is a failure of the server.

        Returns:
            What `read` returned.

        Raises:
            RemoteProtocolError: the last failure, where there is no time or no server left.
            IntegrityError: the last answer was forged, and there is no other server.
            CiphertextError: likewise, it held no residues.
        """
        if self._session is None:  # it was lost while rows were made, which may have taken long
            self._give_up_at = None
        while True:
            if self._session is None:
                self._try(self._transmit)
                continue
            try:
                announcement, chunks = self._session.receive(self._request_id)
                self._server_s = announcement.compute_s
                result = read(announcement, self._in_time(chunks, time.monotonic()))
            except (RemoteProtocolError, CiphertextError, IntegrityError) as error:
                self._note(error)
            else:
                self._succeed()
                return result

    def close(self) -> None:
        """Give the session up, if there is one, and let the rows go."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self._span.end(bytes_up=self._sent_bytes, failed=True)  # it has ended by itself where all went well
        self._let_go()

    # -- attempts -----------------------------------------------------------------------------------------------------

    def _announce(self, block: int, samples: int, mode: Mode) -> None:
        if self._announced is not None:
            raise LocalProtocolError("a delivery carries one upload; make a new one")
        self._announced = (block, samples, mode)

    def _tell(self, rows: bytes | memoryview) -> None:
        self._sent_bytes += memoryview(rows).nbytes
        if self._watch is not None and self._announced is not None:
            self._watch(self._announced[0], bytes(rows))

    def _open(self) -> None:
        """Announce the upload to a server."""
        assert self._announced is not None  # uploads announce before they send
        block, samples, mode = self._announced
        session = self._connect()
        self._attempts += 1
        self._request_id = session.open_request(block, samples, mode, self._attempts - 1, self._span.shared)

    def _transmit(self) -> None:
        """Send all that there is to a server."""
        if self._whole is None:
            self._open()
            for part in self._rows:
                assert self._session is not None  # just opened
                self._session.send_rows(self._request_id, part.first, part.count, part.data)
            return
        assert self._announced is not None  # as above
        session = self._connect()
        self._attempts += 1
        self._request_id = session.send(*self._announced, self._whole, self._attempts - 1, self._span.shared)

    def _connect(self) -> LinkSession:
        self._link, self._session = self._replicas.acquire(self._avoid, self._deadline, self._not_before)
        self._session.ends_at = self._last_moment
        return self._session

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ServerError as failed:
            self._link = failed.link
            if not isinstance(failed.error, RemoteProtocolError | TransportError):
                raise failed.error from None
            self._note(failed.error)
        except RemoteProtocolError as error:
            self._note(error)

    def _note(self, error: Failed) -> None:
        """Take a failure into account.

        Raises:
            Failed: the error, where nothing is to be sent again.
        """
        if self._session is not None:
            self._session.close()
            self._session = None
        link, replicas = self._link, self._replicas
        busy = isinstance(error, RefusedError) and error.code is FailureCode.BUSY
        if link is not None and busy:
            self._pause(link)
        elif link is not None and not replicas.closed:
            if isinstance(error, IntegrityError | CiphertextError):
                assert self._announced is not None  # there was an answer
                link.conduct.record_failure(self._announced[0])
            replicas.record_failure(link)
            if self._is_final(error):
                self._avoid.add(link)
        over = self._is_over(busy)
        if over or link is None or not self._repeatable or replicas.closed or not replicas.has_other(self._avoid):
            self.close()
            raise error if link is not None or self._failure is None else self._failure  # what happened, not a wait
        replicas.record_repetition(link)
        # Its frames hold what there was of the answer, and room was taken for one.
        self._link, self._failure = None, error.with_traceback(None)
        logger.info("sending again after %s, attempt %d", type(error).__name__, self._attempts)

    def _pause(self, link: ServerLink) -> None:
        """Leave a busy server alone for a while, longer every time."""
        first, longest = _DEEP_BUSY_S if self._is_deep else _BUSY_S
        pause = min(longest, first * 2 ** min(self._times_busy, 16))
        self._times_busy += 1
        self._not_before[link] = time.monotonic() + pause * _jitter.uniform(0.5, 1.0)

    def _is_over(self, busy: bool) -> bool:
        """Whether there is no time left, or it has been sent often enough."""
        now = time.monotonic()
        if busy and self._is_deep:
            self._give_up_at, self._attempts_before = None, self._attempts  # it is there: a failure is the first again
            return now >= self._last_moment
        if self._give_up_at is None:
            self._give_up_at = min(now + self._limits.retry_s, self._last_moment)
        return now >= self._give_up_at or self._attempts - self._attempts_before >= MOST_ATTEMPTS

    @property
    def _is_deep(self) -> bool:
        return self._announced is not None and self._announced[2] is Mode.DEEP

    @staticmethod
    def _is_final(error: Failed) -> bool:
        """Whether the same bytes would fail there again."""
        if isinstance(error, RefusedError):
            return error.code in _FINAL
        return not isinstance(error, RemoteProtocolError)

    @property
    def _deadline(self) -> float:
        if self._give_up_at is not None:
            return self._give_up_at
        return min(time.monotonic() + self._limits.reply_s, self._last_moment)

    def _in_time(self, chunks: Iterator[Chunk], began: float) -> Iterator[Chunk]:
        """Pass chunks on as long as the answer as a whole keeps up."""
        received = 0
        for chunk in chunks:
            received += len(chunk.data)
            self._received_bytes = received
            if time.monotonic() > self._limits.latest(began, received):
                raise RemoteProtocolError(f"the answer dribbles: {received} bytes in {time.monotonic() - began:.0f} s")
            yield chunk

    def _succeed(self) -> None:
        assert self._session is not None  # the answer came over it
        assert self._link is not None
        self._replicas.record_success(self._link)
        self._link.release(self._session)
        self._session = None
        self._span.end(bytes_up=self._sent_bytes, bytes_down=self._received_bytes, seconds=self._server_s)
        self._let_go()

    # -- what is kept -------------------------------------------------------------------------------------------------

    def _keep(self, rows: _Rows) -> None:
        self._reserve(len(rows.data))
        if self._repeatable:
            self._rows.append(rows)
        elif self._session is None:
            raise RemoteProtocolError("the connection is gone, and the node has no memory to send this upload again")

    def _reserve(self, size: int) -> None:
        """Take room for rows; without, nothing of this upload is kept."""
        if self._repeatable and self._budget.try_take(size):
            self._kept_bytes += size
        elif self._repeatable:
            self._repeatable = False
            if self._rows:
                self._let_go()

    def _let_go(self) -> None:
        self._rows.clear()
        self._whole = None
        self._budget.give(self._kept_bytes)
        self._kept_bytes = 0
