"""Copies of weights and hints that save time, as many as a budget of memory holds.

    mapped integers of a block --(make: float64, transforms)--> copy --(use)--> copy, kept while there is room

Worked example: a model of 50 blocks whose copies take 10 MB each, and a budget of 200 MB. Blocks run in turn, so the
copy that was used last is the one that is needed last. Dropping the one that was used least recently, as caches do,
would drop every copy just before its turn: none of 50 would ever be found. Here the most recently used one goes first:
some 19 of the 50 are found in every turn, and the others are made again.

What is in use is never dropped: beyond the budget there may be the copies that threads are working with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

T = TypeVar("T")
#: Budget of one process where nothing is said: all of ResNet-50's copies, on either side, take half of it.
DEFAULT_BYTES: Final = 2**30


@dataclass(slots=True)
class _Entry:
    size: int
    users: int = 1
    value: Any = None
    is_made: bool = False


class Copies:
    """Copies within a budget; safe to use from several threads.

    Args:
        budget: bytes of copies to keep; None: `DEFAULT_BYTES`.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = DEFAULT_BYTES if budget is None else budget
        self._changed = threading.Condition()
        self._entries: dict[Hashable, _Entry] = {}  # the most recently used last
        self._bytes = 0
        self._made = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of copies that are there."""
        return self._bytes

    @property
    def made(self) -> int:
        """Copies that were made so far."""
        return self._made

    @contextmanager
    def use(self, key: Hashable, size: int, make: Callable[[], T]) -> Iterator[T]:
        """Lend a copy; of several threads that want one that is not there, one makes it.

        Args:
            key: what it is a copy of.
            size: bytes that it takes.
            make: makes it.
        """
        entry = self._find(key, size)
        try:
            if not entry.is_made:
                self._fill(key, entry, make)
            yield entry.value
        finally:
            with self._changed:
                entry.users -= 1
                self._drop(0)

    def forget(self) -> None:
        """In a forked child: the parent's lock may be held for ever."""
        self._changed = threading.Condition()
        self._entries, self._bytes = {}, 0

    def _find(self, key: Hashable, size: int) -> _Entry:
        """Return an entry that is made, or a new one that the caller has to make."""
        with self._changed:
            while key in self._entries:
                entry = self._entries[key]
                if entry.is_made:
                    entry.users += 1
                    self._entries[key] = self._entries.pop(key)
                    return entry
                self._changed.wait()
            self._drop(size)
            entry = self._entries[key] = _Entry(size)
            self._bytes += size
            return entry

    def _fill(self, key: Hashable, entry: _Entry, make: Callable[[], Any]) -> None:
        try:
            value = make()
        except BaseException:
            with self._changed:
                if self._entries.get(key) is entry:
                    del self._entries[key]
                    self._bytes -= entry.size
                self._changed.notify_all()
            raise
        with self._changed:
            entry.value, entry.is_made = value, True
            self._made += 1
            self._changed.notify_all()

    def _drop(self, room: int) -> None:
        """Drop copies that nobody uses, the most recently used first, until `room` more bytes fit."""
        for key in reversed(list(self._entries)):
            if self._bytes + room <= self.budget:
                return
            if self._entries[key].users == 0:
                self._bytes -= self._entries.pop(key).size
