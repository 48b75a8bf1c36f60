"""Memory for all requests of a process together.

    budget of 4 GiB:  request of 3 GiB is let in | one of 2 GiB waits | ... and one of 10 KB behind it, in its turn

Who waits does not read from its connection, so TCP makes the peer wait: nothing piles up. Waits end after a while, and
the peer is told that we are busy.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from heinfer.errors import InputError, ParameterError
from heinfer.units import size as readable
from heinfer.wire.messages import FailureCode, RefusedError

#: What a process gives to requests where nothing is said: this part of the machine's memory, or of its control group's.
DEFAULT_SHARE: Final = 0.5
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class MemoryBudget:
    """Room for requests, first come, first served; safe to use from several threads.

    Args:
        total: bytes; None: half of the machine's memory.
        wait_s: seconds that a request waits for room.
        option: what the operator may raise, for messages.

    Raises:
        ParameterError: total is not positive.
    """

    def __init__(self, total: int | None = None, wait_s: float = 30.0, option: str = "--memory") -> None:
        self.total = int(DEFAULT_SHARE * machine_memory()) if total is None else total
        if self.total < 1:
            raise ParameterError(f"a memory budget must be positive, got {self.total}")
        self._wait_s = wait_s
        self._option = option
        self._used = 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def take(self, amount: int) -> None:
        """Wait for room, and take it.

        Raises:
            InputError: the request would not fit alone.
            RefusedError: there was no room in time.
        """
        if amount > self.total:
            raise InputError(
                f"a request needs {readable(amount)} of memory, and {readable(self.total)} are there for all: send "
                f"fewer samples at a time, or raise {self._option}"
            )
        with self._changed:
            if not self._queue and self._used + amount <= self.total:
                self._used += amount
                return
            ticket = object()
            self._queue.append(ticket)
            try:
                in_time = self._changed.wait_for(
                    lambda: self._queue[0] is ticket and self._used + amount <= self.total, self._wait_s
                )
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
            if not in_time:
                raise RefusedError(FailureCode.BUSY, f"no room in memory within {self._wait_s:g} s: try again later")
            self._used += amount

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._queue)

    def try_take(self, amount: int) -> bool:
        """Take room if there is some now; return whether."""
        with self._changed:
            if self._queue or self._used + amount > self.total:
                return False
            self._used += amount
            return True

    def give(self, amount: int) -> None:
        """Give room back."""
        with self._changed:
            self._used -= amount
            if self._queue:
                self._changed.notify_all()

    @contextmanager
    def room(self, amount: int) -> Iterator[None]:
        """Take room for a block of code. Raises as `take`."""
        self.take(amount)
        try:
            yield
        finally:
            self.give(amount)


def machine_memory() -> int:
    """Return the bytes of memory that this process may use, its control group's limit included."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no control groups, or no limit
        return installed


def parse_size(text: str) -> int:
    """Read a size: 4GiB, 500MB.

    Raises:
        InputError: anything else.
    """
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            try:
                amount = float(text[: -len(unit)])
            except ValueError:
                break
            if 0 < amount * factor < 2**63:
                return int(amount * factor)
    raise InputError(f"expected a size such as 4GiB or 500MB, got {text!r}")
