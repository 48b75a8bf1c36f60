"""Connections to one peer that are kept, and lent to one thread at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Lendable(Protocol):
    """A connection that may be lent."""

    @property
    def usable(self) -> bool:
        """Whether it is open, and nothing comes out of it that nobody has asked for."""

    def close(self) -> None:
        """Close it, from any thread; whoever waits in it gets an error."""


Lent = TypeVar("Lent", bound=Lendable)


class Lender(Generic[Lent]):
    """Lends connections; safe to use from several threads.

    Args:
        connect: makes one, already connected.
        idle: how many are kept for later; a burst may need more.
        greet: what a new one begins with. Closing the lender ends a wait in it.
    """

    def __init__(self, connect: Callable[[], Lent], idle: int, greet: Callable[[Lent], None] | None = None) -> None:
        self._connect = connect
        self._greet = greet
        self._room = idle
        self._idle: list[Lent] = []
        self._all: weakref.WeakSet[Lent] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.Lock()

    def acquire(self) -> Lent:
        """Lend a connection to one thread, which gives it back by `release`, or closes it where something went wrong.

        Raises:
            RemoteProtocolError: the peer can't be reached, or refuses us; or the lender was closed.
        """
        while (kept := self._take_idle()) is not None:
            if kept.usable:
                return kept
            kept.close()
        made = self._connect()
        with self._lock:
            closed = self._closed
            self._all.add(made)
        if closed:
            made.close()
        if self._greet is not None:
            try:
                self._greet(made)
            except BaseException:
                made.close()
                raise
        return made

    def release(self, connection: Lent) -> None:
        """Take a connection back whose answers have all been read."""
        with self._lock:
            closed = self._closed or len(self._idle) >= self._room
            if not closed:
                self._idle.append(connection)
        if closed:
            connection.close()

    @contextmanager
    def lend(self) -> Iterator[Lent]:
        """Lend a connection for a block of code; an error closes it. Raises as `acquire`."""
        connection = self.acquire()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self.release(connection)

    def close(self) -> None:
        """Close all connections, idle or not; whoever waits in one gets an error."""
        with self._lock:
            self._closed = True
            connections = list(self._all)
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _take_idle(self) -> Lent | None:
        with self._lock:
            return self._idle.pop() if self._idle else None
