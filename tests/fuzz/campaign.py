"""How fuzz tests run: for a given time, every example within bounds of processor time and memory.

`make fuzz MINUTES=10` sets HEINFER_FUZZ_S, and examples are drawn anew until that time is over. `make test` takes the
same few examples every time, so that it fails for what was changed and not by chance. What a search finds becomes an
ordinary test beside the code that was mended.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, settings

#: Whether to search until the time is over, and how long: codec, bundles and importer each.
SEARCHING = "HEINFER_FUZZ_S" in os.environ
SECONDS = float(os.environ.get("HEINFER_FUZZ_S", "0"))
#: Turns' worth of examples that an ordinary run takes.
_ORDINARY_TURNS = 2
#: Processor seconds of one example, in our own code and below it.
EXAMPLE_S = 10.0
#: Address space that one example may take beyond what the process has already.
EXAMPLE_BYTES = 2**30
_PAGE = os.sysconf("SC_PAGE_SIZE")


class TooLongError(Exception):
    """An example took more processor time than it may."""


def campaign(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a property to be run by `run_for`: so many random examples a turn of a search."""
    return settings(
        max_examples=examples if SEARCHING else _ORDINARY_TURNS * examples,
        derandomize=not SEARCHING,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def run_for(seconds: float, check: Callable[[], None]) -> int:
    """Run a property again and again until the time is over, once at least; return how often."""
    deadline, turns = time.monotonic() + seconds, 0
    while turns == 0 or time.monotonic() < deadline:
        check()
        turns += 1
    return turns


@contextmanager
def bounded(seconds: float = EXAMPLE_S, extra_bytes: int = EXAMPLE_BYTES) -> Iterator[None]:
    """Run a block within bounds: beyond them `TooLongError` or MemoryError is raised in it.

    Not SIGALRM, which pytest-timeout uses. Time is the processor's, so that other processes don't count.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + extra_bytes, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def address_space() -> int:
    """Return the bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
