"""The one way into a model's engine: a bounded queue, and what waits together runs as one query.

    nothing runs:     a query starts at once
    something runs:   queries wait, 2 ms at most or until there are 64 samples; then all of them start as one
    two run:          they wait until one of these has ended, and are joined by whoever comes meanwhile

A run costs the node and the server a round trip a block, however many samples it has, so a hundred clients of LeNet-5
that ask at once are answered several times as fast as one after the other (docs/performance.md). Two runs at a time:
one computes while the other waits for the server. With three, runs are smaller and cost a fifth more of the cores; with
one, a core waits. A query that is larger than such a run has places of its own, so small ones need not wait for it.

Why joining is safe. Towards the server a run of five queries is one query of five samples: it learns how many samples
travel, as ever, and not whose they are. In prepared mode every sample has a secret of its own; in standard mode and in
batches an upload has one secret for all of its samples, each in coefficients of its own, which is as secure for samples
of five clients as for five samples of one: secrets never leave the node, and no client sees a ciphertext. Scales and
rounding are by sample, so an answer is the same in whatever company it was computed. What the data of one query make
fail fails it alone (`Engine.infer_joined`).

A query that is given up while it waits is dropped; what has started runs to its end unheard, so nobody who gives up
shows outside.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final

from heinfer.errors import HeinferError, InputError, IntegrityError, RemoteProtocolError
from heinfer.spans import NO_TRACER, Tracer
from heinfer.units import size as readable
from heinfer.wire import FailureCode, RefusedError
from trusted_node.engine import DataError, Engine, QueryResult, check_inputs, default_share
from trusted_node.serving.interface import (
    Channel,
    DeadlineError,
    FinishedQuery,
    ModelNotReadyError,
    Observer,
    Outcome,
    Query,
    QueueFullError,
)
from trusted_node.serving.query_log import log_query
from trusted_node.serving.tracing import QueryTrace, QueryTracer
from trusted_node.statistics import QueryStatistics

logger = logging.getLogger(__name__)
#: Samples of one query: bounds what a query makes the node hold.
MAX_SAMPLES: Final = 65_536
#: Samples that run as one in prepared mode.
JOINED_SAMPLES: Final = 64
#: Runs at a time, of queries that may be joined, and of larger ones beside them.
RUNS: Final = 2
LARGE_RUNS: Final = 2
#: Latencies that are kept.
_LATENCIES: Final = 256
_MANY_QUERIES: Final = 1024
#: Moments that a clock keeps before it looks which ones still matter.
_SWEEP: Final = 1024


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait and run; a query that is larger than what may wait is let in when nothing else does.

    Attributes:
        queries: that wait at most.
        samples: that wait at most.
        values_bytes: of inputs that wait, at most; None: a sixth of the machine's memory.
        max_delay_s: that a query waits for company at most, where something runs and there is a place to run.
        joined: samples of one run in prepared mode.
        runs: at a time, of queries that may be joined.
        large_runs: at a time, of queries that have more samples than one run.
    """

    queries: int = _MANY_QUERIES
    samples: int = 2 * MAX_SAMPLES
    values_bytes: int | None = None
    max_delay_s: float = 0.002
    joined: int = JOINED_SAMPLES
    runs: int = RUNS
    large_runs: int = LARGE_RUNS

    def __post_init__(self) -> None:
        """Refuse limits under which nothing would run.

        Raises:
            InputError: one is not positive, or the delay is negative.
        """
        if min(self.queries, self.samples, self.joined, self.runs, self.large_runs) < 1 or self.max_delay_s < 0:
            raise InputError(f"a queue needs positive limits and a delay that is not negative, got {self}")


@dataclass(frozen=True, slots=True)
class Load:
    """What a scheduler is doing: counts, and latencies of the last queries, oldest first."""

    queued_queries: int
    queued_samples: int
    running_queries: int
    latencies_ms: tuple[float, ...]


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Ticket:
    """A query from `submit` to its end."""

    query: Query
    samples: int
    size: int
    alone: bool
    large: bool
    queued_at: float
    trace: QueryTrace
    future: Future[QueryResult] = field(default_factory=Future)
    started_at: float = 0.0
    over: bool = False  # the client has its result, or its error; then there is no `future` any more


class Scheduler:
    """Queues a model's queries and runs them; safe to use from several threads.

    Args:
        engine: runs them; stays the caller's to close, after the scheduler.
        name: of the model, for messages, metrics and traces; None: the plan's.
        limits: of the queue.
        observer: is told of queries that end.
        tracer: is told of their spans.
    """

    def __init__(
        self,
        engine: Engine,
        name: str | None = None,
        limits: QueueLimits | None = None,
        observer: Observer | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        limits = limits or QueueLimits()
        self.engine = engine
        self._name = name or engine.bundle.plan.model.name
        self._tracer = QueryTracer(self._name, tracer)
        self._limits = limits if limits.values_bytes else replace(limits, values_bytes=default_share())
        self._observer = observer
        self._most = engine.most_joined(limits.joined)
        self._changed = threading.Condition()
        self._waiting: deque[_Ticket] = deque()
        self._queued_samples = self._queued_bytes = 0
        self._running: set[_Ticket] = set()
        self._busy = self._busy_large = 0
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._closing = False
        self._clock = _Clock(self._expire)
        self._threads = [
            threading.Thread(target=self._work, name="heinfer-run", daemon=True)
            for _ in range(limits.runs + limits.large_runs)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, query: Query) -> Future[QueryResult]:
        """Queue a query; see `trusted_node.serving.interface.ServedModel`."""
        try:
            ticket, future = self._admit(query)
        except HeinferError as error:
            self._tell(query, 0, 0, 0.0, 0.0, outcome_of(error))
            raise
        future.add_done_callback(lambda done: self._forget(ticket) if done.cancelled() else None)
        if query.deadline < float("inf"):
            self._clock.watch(query.deadline, ticket)
        return future

    def check_queue(self, channel: Channel, request_id: str) -> None:
        """Refuse a query before it is read; see `trusted_node.serving.interface.ServedModel`."""
        try:
            with self._changed:
                self._check_open()
                self._check_room(1, 1)
        except HeinferError as error:
            self._tell(Query({}, channel, request_id), 0, 0, 0.0, 0.0, outcome_of(error))
            raise

    def load(self) -> Load:
        """Return what it is doing."""
        with self._changed:
            latencies = tuple(1e3 * seconds for seconds in self._latencies)
            return Load(len(self._waiting), self._queued_samples, len(self._running), latencies)

    def close(self, grace_s: float | None = None) -> None:
        """Take no more queries, let what waits and runs end, then stop.

        Args:
            grace_s: seconds that it may take; what still waits then fails with ModelNotReadyError. None: no end.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = None if grace_s is None else time.monotonic() + grace_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        with self._changed:
            left = [ticket for ticket in self._waiting if ticket.future.set_running_or_notify_cancel()]
            self._drop(list(self._waiting))
        for ticket in left:
            self._end(ticket, ModelNotReadyError(f"model {self._name!r} was stopped before this query began"))
        self._clock.close()

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _admit(self, query: Query) -> tuple[_Ticket, Future[QueryResult]]:
        """Check a query and let it into the queue, from where it may end at any moment."""
        samples = check_inputs(self.engine.bundle.plan, query.inputs)
        if samples > MAX_SAMPLES:
            raise InputError(f"a query may have {MAX_SAMPLES} samples, found {samples}; send several queries")
        size = sum(x.nbytes for x in query.inputs.values())
        # Samples of a deep block share its polynomials: one that explodes must spoil nobody else's.
        alone = query.alone or bool(self.engine.bundle.plan.deep) or query.watch is not None or query.trace_samples > 0
        with self._changed:
            self._check_open()
            self._check_room(samples, size)
            trace = self._tracer.submitted(query, samples)
            ticket = _Ticket(query, samples, size, alone, samples > self._most, time.monotonic(), trace)
            future = ticket.future
            self._waiting.append(ticket)
            self._queued_samples += samples
            self._queued_bytes += size
            self._changed.notify()
        return ticket, future

    def _check_open(self) -> None:
        if self._closing:
            raise ModelNotReadyError(f"model {self._name!r} is being unloaded: ask again when it is loaded")

    def _check_room(self, samples: int, size: int) -> None:
        limits, most = self._limits, self._limits.values_bytes
        assert most is not None  # set by the constructor
        full = (
            len(self._waiting) >= limits.queries
            or self._queued_samples + samples > limits.samples
            or self._queued_bytes + size > most
        )
        if full and self._waiting:
            raise QueueFullError(
                f"{len(self._waiting)} queries of {self._queued_samples} samples ({readable(self._queued_bytes)}) wait "
                f"for model {self._name!r}, which is as many as may: ask again later"
            )

    def _drop(self, tickets: list[_Ticket]) -> None:
        """Take tickets out of the queue; under the lock."""
        for ticket in tickets:
            self._waiting.remove(ticket)
            self._queued_samples -= ticket.samples
            self._queued_bytes -= ticket.size

    def _forget(self, ticket: _Ticket) -> None:
        """A query was cancelled while it waited."""
        with self._changed:
            if ticket in self._waiting:
                self._drop([ticket])
            ticket.over = True
            del ticket.future
            self._changed.notify_all()
        waited = time.monotonic() - ticket.queued_at
        ticket.trace.end(Outcome.CANCELLED)
        self._tell(ticket.query, ticket.samples, 0, waited, waited, Outcome.CANCELLED)

    def _expire(self, ticket: _Ticket) -> None:
        """A query's time is over: it is dropped where it waits, and goes on unheard where it runs."""
        with self._changed:
            if ticket in self._waiting and ticket.future.set_running_or_notify_cancel():
                self._drop([ticket])
                self._changed.notify_all()
        self._end(ticket, DeadlineError("the time for this query was over before its result was there"))

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (group := self._next_group()) is not None:
            try:
                self._run(group)
            except Exception:  # a bug of ours; other queries are to be answered all the same
                logger.exception("a run failed")
                for ticket in group:
                    self._end(ticket, HeinferError("internal error, see the node's log"))
            with self._changed:
                self._busy -= 1
                self._busy_large -= group[0].large
                self._running.difference_update(group)
                self._changed.notify_all()
            del group  # queries and results are not to be kept until the next ones come

    def _next_group(self) -> list[_Ticket] | None:
        """Wait for queries that are to start now and take them; None when there will be no more."""
        with self._changed:
            while True:
                group, pause = self._due()
                if group:
                    self._drop(group)
                    if self._waiting:
                        self._changed.notify()  # of the threads that are left, one is to look at the rest
                    started = [ticket for ticket in group if ticket.future.set_running_or_notify_cancel()]
                    if not started:
                        continue
                    now = time.monotonic()
                    for ticket in started:
                        ticket.started_at = now
                    self._running.update(started)
                    self._busy += 1
                    self._busy_large += started[0].large
                    return started
                if self._closing and not self._waiting:
                    return None
                self._changed.wait(pause)

    def _due(self) -> tuple[list[_Ticket], float | None]:
        """Return the queries that start now, or in how many seconds to look again; under the lock.

        Of those for which there is a place, the oldest goes first.
        """
        small = self._busy - self._busy_large < self._limits.runs
        large = self._busy_large < self._limits.large_runs
        first = next((ticket for ticket in self._waiting if (large if ticket.large else small)), None)
        if first is None:
            return [], None
        if first.alone or first.large:
            return [first], None
        group, samples, full = [], 0, False
        for ticket in self._waiting:
            if not ticket.alone and not ticket.large:
                if samples + ticket.samples > self._most:
                    full = True
                    break
                group.append(ticket)
                samples += ticket.samples
        waits = first.queued_at + self._limits.max_delay_s - time.monotonic()
        if full or samples == self._most or not self._busy or waits <= 0 or self._closing:
            return group, None
        return [], waits

    def _run(self, group: list[_Ticket]) -> None:
        try:
            self._answer(group)
        except HeinferError as error:
            apart = isinstance(error, InputError) and len(group) > 1
            for ticket in group:
                if apart:  # together they don't fit into memory; nothing was sent
                    self._run([ticket])
                else:
                    self._end(ticket, error)

    def _answer(self, group: list[_Ticket]) -> None:
        first = group[0].query
        requests = [ticket.query.inputs for ticket in group]
        samples = sum(ticket.samples for ticket in group)
        with self._tracer.started([ticket.trace for ticket in group], samples) as span:
            joined = self.engine.infer_joined(requests, first.trace_samples, first.watch, span)
        for ticket, result in zip(group, joined.results, strict=True):
            self._end(ticket, result, samples, joined.statistics)

    def _end(
        self,
        ticket: _Ticket,
        result: QueryResult | Exception,
        joined: int = 0,
        statistics: QueryStatistics | None = None,
    ) -> None:
        """Give a query its result, if it has none yet."""
        now = time.monotonic()
        seconds = now - ticket.queued_at
        with self._changed:
            if ticket.over or ticket.future.cancelled():  # then `_forget` is about to run
                return
            ticket.over = True
            future = ticket.future
            del ticket.future  # which holds the ticket: values and results would stay until a cycle is looked for
            if isinstance(result, QueryResult):
                self._latencies.append(seconds)
        queued = (ticket.started_at or now) - ticket.queued_at
        if isinstance(result, QueryResult):
            future.set_result(result)
            outcome = Outcome.OK
        else:
            future.set_exception(result)
            outcome = outcome_of(result)
        ticket.trace.end(outcome)
        self._tell(ticket.query, ticket.samples, joined, queued, seconds, outcome, statistics)

    def _tell(
        self,
        query: Query,
        samples: int,
        joined: int,
        queued_s: float,
        seconds: float,
        outcome: Outcome,
        statistics: QueryStatistics | None = None,
    ) -> None:
        finished = FinishedQuery(
            self._name, query.channel, query.request_id, samples, joined, queued_s, seconds, outcome, statistics
        )
        log_query(finished)
        if self._observer is not None:
            self._observer.finished(finished)


def outcome_of(error: BaseException) -> Outcome:
    """Return what an error of a query counts as."""
    match error:
        case DataError():
            return Outcome.DATA
        case InputError():
            return Outcome.INPUT
        case IntegrityError():
            return Outcome.INTEGRITY
        case QueueFullError() | RefusedError(code=FailureCode.BUSY | FailureCode.STOPPING):
            return Outcome.BUSY
        case RemoteProtocolError():
            return Outcome.SERVER
        case DeadlineError():
            return Outcome.DEADLINE
        case _:
            return Outcome.FAILED


class _Clock:
    """Calls `ring` with tickets whose moment has come; its thread starts with the first one."""

    def __init__(self, ring: Callable[[_Ticket], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        # Tickets hold queries and results, which are not to be kept until a moment that does not matter any more.
        self._moments: list[tuple[float, int, weakref.ref[_Ticket]]] = []
        self._count = 0
        self._sweep_at = _SWEEP
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, moment: float, ticket: _Ticket) -> None:
        """Ring for a ticket at a moment (`time.monotonic`), unless it is over by then."""
        with self._changed:
            self._count += 1
            heapq.heappush(self._moments, (moment, self._count, weakref.ref(ticket)))
            if len(self._moments) >= self._sweep_at:
                self._sweep()
            if self._thread is None:
                self._thread = threading.Thread(target=self._tick, name="heinfer-clock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _tick(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._moments or self._moments[0][0] > time.monotonic()):
                    self._changed.wait(self._moments[0][0] - time.monotonic() if self._moments else None)
                if self._closed:
                    return
                ticket = heapq.heappop(self._moments)[2]()
            if ticket is not None and not ticket.over:
                try:
                    self._ring(ticket)
                except Exception:  # a bug of ours; other moments come all the same
                    logger.exception("a query's deadline failed")
            del ticket

    def _sweep(self) -> None:
        """Forget who has ended; under the lock."""
        self._moments = [entry for entry in self._moments if (ticket := entry[2]()) is not None and not ticket.over]
        heapq.heapify(self._moments)
        self._sweep_at = max(_SWEEP, 2 * len(self._moments))
