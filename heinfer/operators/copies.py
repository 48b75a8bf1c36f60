"""Copies of weights and hints that save time, as many as a budget of memory holds.

    mapped integers of a block --(make: float64, transforms)--> copy --(use)--> copy, kept while there is room

Worked example: a model of 50 blocks whose copies take 10 MB each, and a budget of 200 MB. Blocks run in turn, so the
copy that was used last is the one that is needed last. Dropping the one that was used least recently, as caches do,
would drop every copy just before its turn: none of 50 would ever be found. Here the most recently used one goes first:
some 19 of the 50 are found in every turn, and the others are made again.

Several models share a budget, each the owner of its copies. The model that runs may run again; who has not run for long
may not: so room is made among the copies of other owners first, there the least recently used one, and only then as
above. An owner that has gone takes its copies along (`Copies.discard`): nothing of a model that was unloaded, or whose
loading failed, stays. Owners and keys are numbers, which keep nothing alive.

What is in use is never dropped: beyond the budget there may be the copies that threads are working with.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NewType, TypeAlias, TypeVar

T = TypeVar("T")
#: Whose copies they are; see `Copies.new_owner`.
Owner = NewType("Owner", int)
#: An owner, and its own numbers for what it has copies of.
_Key: TypeAlias = tuple[Owner, tuple[int, ...]]
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
        self._entries: dict[_Key, _Entry] = {}  # the most recently used last
        self._numbers = itertools.count()
        self._owners: set[Owner] = set()
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

    def new_owner(self) -> Owner:
        """Return what names a new owner, such as a model."""
        with self._changed:
            owner = Owner(next(self._numbers))
            self._owners.add(owner)
            return owner

    def discard(self, owner: Owner) -> None:
        """Drop an owner's copies for good; those in use when they are given back. Once more is no harm."""
        with self._changed:
            self._owners.discard(owner)
            for key in [key for key, entry in self._entries.items() if key[0] == owner and entry.users == 0]:
                self._remove(key)

    @contextmanager
    def use(self, owner: Owner, number: tuple[int, ...], size: int, make: Callable[[], T]) -> Iterator[T]:
        """Lend a copy; of several threads that want one that is not there, one makes it.

        Args:
            owner: whose it is; for one that was discarded nothing is kept.
            number: what it is a copy of, as its owner counts.
            size: bytes that it takes.
            make: makes it.
        """
        key = owner, number
        entry = self._find(key, size)
        try:
            if not entry.is_made:
                self._fill(key, entry, make)
            yield entry.value
        finally:
            with self._changed:
                entry.users -= 1
                if entry.users == 0 and owner not in self._owners and self._entries.get(key) is entry:
                    self._remove(key)
                self._drop(owner, 0)

    def forget(self) -> None:
        """In a forked child: the parent's lock may be held for ever."""
        self._changed = threading.Condition()
        self._entries, self._bytes = {}, 0

    def _find(self, key: _Key, size: int) -> _Entry:
        """Return an entry that is made, or a new one that the caller has to make."""
        with self._changed:
            while key in self._entries:
                entry = self._entries[key]
                if entry.is_made:
                    entry.users += 1
                    self._entries[key] = self._entries.pop(key)
                    return entry
                self._changed.wait()
            self._drop(key[0], size)
            entry = self._entries[key] = _Entry(size)
            self._bytes += size
            return entry

    def _fill(self, key: _Key, entry: _Entry, make: Callable[[], Any]) -> None:
        try:
            value = make()
        except BaseException:
            with self._changed:
                if self._entries.get(key) is entry:
                    self._remove(key)
                self._changed.notify_all()
            raise
        with self._changed:
            entry.value, entry.is_made = value, True
            self._made += 1
            self._changed.notify_all()

    def _drop(self, owner: Owner, room: int) -> None:
        """Drop copies that nobody uses until `room` more bytes fit: other owners' first, the least recently used one.

        Args:
            owner: who needs the room; of its own copies the most recently used goes first.
            room: bytes.
        """
        if self._bytes + room <= self.budget:
            return
        others = [key for key in self._entries if key[0] != owner]
        own = [key for key in self._entries if key[0] == owner]
        for key in (*others, *reversed(own)):
            if self._bytes + room <= self.budget:
                return
            if self._entries[key].users == 0:
                self._remove(key)

    def _remove(self, key: _Key) -> None:
        self._bytes -= self._entries.pop(key).size
