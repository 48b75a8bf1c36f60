"""What the protocol's statistics ask for: how many queries came by an interface, and how long they took.

    {"name": "digits", "version": "1", "inference_count": 40, "last_inference": 1735689600000,
     "inference_stats": {"success": {"count": 5, "ns": 61000000}, "fail": {"count": 0, "ns": 0}}}

An inference is a sample. Each interface counts its own; metrics say more, and of all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Count:
    samples: int = 0
    last_ms: int = 0
    good: int = 0
    good_ns: int = 0
    bad: int = 0
    bad_ns: int = 0


class Counters:
    """Counts queries by model; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], _Count] = {}

    @contextmanager
    def counting(self, name: str, version: str, samples: int) -> Iterator[None]:
        """Count the query that the block runs; it failed where the block raises."""
        started, good = time.perf_counter_ns(), False
        try:
            yield
            good = True
        finally:
            self._add(name, version, samples, good, time.perf_counter_ns() - started)

    def of(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's counts as the protocol has them."""
        with self._lock:
            count = self._counts.get((name, version), _Count())
            return {
                "name": name,
                "version": version,
                "last_inference": count.last_ms,
                "inference_count": count.samples,
                "inference_stats": {
                    "success": {"count": count.good, "ns": count.good_ns},
                    "fail": {"count": count.bad, "ns": count.bad_ns},
                },
            }

    def _add(self, name: str, version: str, samples: int, good: bool, nanoseconds: int) -> None:
        with self._lock:
            count = self._counts.setdefault((name, version), _Count())
            if good:
                count.samples += samples
                count.good += 1
                count.good_ns += nanoseconds
                count.last_ms = time.time_ns() // 1_000_000
            else:
                count.bad += 1
                count.bad_ns += nanoseconds
