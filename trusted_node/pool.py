"""The pool of prepared queries: filled in the background, between queries.

    idle node --> prepare one sample, until there are enough --> a query takes what is there, prepares what is missing

A burst larger than the pool costs time and never fails. Entries that wait here expire within minutes, are wiped when
the pool closes, and are dropped in a forked child. A group of samples holds what it took until its last round, for
`groups.MASK_LIFETIME_S` at most.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from heinfer.plan.forecast import POOL_BYTES, POOL_ENTRIES
from trusted_node.preparation import PreparedQuery, Preparer

logger = logging.getLogger(__name__)
#: Seconds after which an entry is thrown away: what is in memory for long is there to be stolen.
LIFETIME_S: Final = 240.0
#: Seconds without a query before refilling begins: queries in a row take from the pool and are not disturbed.
IDLE_S: Final = 0.01
_CHECK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Taken:
    """Prepared samples for one group.

    Attributes:
        queries: together as many samples as were asked for.
        pooled: samples that were there.
        seconds: what preparing the others took.
    """

    queries: list[PreparedQuery]
    pooled: int
    seconds: float

    @property
    def made_at(self) -> float:
        """When the first of their secrets was drawn (`time.monotonic`)."""
        return min(query.made_at for query in self.queries)

    def wipe(self) -> None:
        """Wipe all."""
        for query in self.queries:
            query.wipe()


class PreparedPool:
    """A pool of prepared samples; a context manager, safe to use from several threads.

    Args:
        preparer: makes entries.
        size: entries to keep ready; None: 16, or as many as 2 GiB hold where entries are large, one at least.
        lifetime_s: seconds after which an entry is thrown away.
    """

    def __init__(self, preparer: Preparer, size: int | None, lifetime_s: float = LIFETIME_S) -> None:
        self.preparer = preparer
        self.size = max(1, min(POOL_ENTRIES, POOL_BYTES // max(1, preparer.query_bytes))) if size is None else size
        self._lifetime_s = lifetime_s
        self._ready: deque[PreparedQuery] = deque()
        self._changed = threading.Condition()
        self._online = 0
        self._idle_since = 0.0
        self._closed = False
        self._times: deque[float] = deque(maxlen=16)
        self._thread = threading.Thread(target=self._refill, name="heinfer-prepare", daemon=True)
        _pools.add(self)
        self._thread.start()

    def __enter__(self) -> PreparedPool:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    @property
    def ready(self) -> int:
        """Entries that are ready."""
        return len(self._ready)

    @property
    def preparation_s(self) -> float | None:
        """Seconds of preparing one sample in the background, median of the last few; None before the first."""
        with self._changed:
            return statistics.median(self._times) if self._times else None

    def take(self, samples: int) -> Taken:
        """Take prepared samples, each for the last time; what the pool lacks is prepared now.

        Args:
            samples: how many.
        """
        queries: list[PreparedQuery] = []
        with self._changed:
            self._drop_expired()
            while self._ready and len(queries) < samples:
                queries.append(self._ready.popleft())
            self._changed.notify_all()
        started = time.perf_counter()
        pooled = len(queries)
        try:
            if pooled < samples:
                queries.append(self.preparer.prepare(samples - pooled))
        except BaseException:
            Taken(queries, pooled, 0.0).wipe()
            raise
        return Taken(queries, pooled, time.perf_counter() - started if pooled < samples else 0.0)

    @contextmanager
    def online(self) -> Iterator[None]:
        """Hold the refilling back while a query is under way: it needs the cores."""
        with self._changed:
            self._online += 1
        try:
            yield
        finally:
            with self._changed:
                self._online -= 1
                self._idle_since = time.monotonic()
                self._changed.notify_all()

    def wait_full(self, timeout_s: float) -> bool:
        """Wait until the pool is full; False where it was not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._ready) >= self.size or self._closed, timeout_s)

    def close(self) -> None:
        """Stop refilling and wipe what is left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.empty()

    def empty(self) -> None:
        """Wipe all entries."""
        while self._ready:
            self._ready.popleft().wipe()

    def _refill(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, _CHECK_S)
                while not self._closed and (pause := self._idle_since + IDLE_S - time.monotonic()) > 0:
                    self._changed.wait(pause)
                if self._closed:
                    return
                self._drop_expired()
                if not self._has_work():
                    continue
            started = time.perf_counter()
            try:
                query = self.preparer.prepare(1)
            except Exception:  # memory, most likely; queries prepare for themselves and report what is wrong
                logger.exception("preparing ahead failed")
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _CHECK_S)
                continue
            with self._changed:
                self._times.append(time.perf_counter() - started)
                self._ready.append(query)
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._closed or (self._online == 0 and len(self._ready) < self.size)

    def _drop_expired(self) -> None:
        while self._ready and time.monotonic() - self._ready[0].made_at > self._lifetime_s:
            self._ready.popleft().wipe()

    def _forget(self) -> None:
        """In a forked child: entries are the parent's, and their memory is zero here; locks may be held for ever."""
        self._ready = deque()
        self._changed = threading.Condition()
        self._closed = True
        self.preparer.forget()


_pools: weakref.WeakSet[PreparedPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._forget()


os.register_at_fork(after_in_child=_after_fork)
