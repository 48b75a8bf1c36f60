"""Queries that wait together are evaluated together: several uploads of one block in one product.

    request --> waiting, by block --> (a slot is free) --> one evaluation of all that wait for the block --> answers

Merging happens only where requests wait anyway, so it costs a single query nothing. Uploads share a product, never a
ciphertext: each keeps its own rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Residues = NDArray[np.int64]
#: Residues that one evaluation takes together (256 MB); a single larger request runs alone.
MOST_RESIDUES: Final = 1 << 25


@dataclass(eq=False, slots=True)
class _Waiting:
    residues: Residues
    taken: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    result: Residues | None = None
    error: BaseException | None = None


class Merger:
    """Runs requests, at most `slots` evaluations at a time.

    Args:
        run: evaluates a block on residues of shape (samples, values).
        slots: evaluations at a time.
    """

    def __init__(self, run: Callable[[int, Residues], Residues], slots: int) -> None:
        self._run = run
        self._slots = threading.Semaphore(slots)
        self._lock = threading.Lock()
        self._waiting: dict[int, list[_Waiting]] = {}

    def evaluate(self, block: int, residues: Residues) -> Residues:
        """Evaluate a block, together with requests for the same block that wait at the same time.

        Args:
            block: index.
            residues: int64 in [0, q), shape (samples, values up).

        Returns:
            int64 in [0, q), shape (samples, values down).
        """
        own = _Waiting(residues)
        with self._lock:
            self._waiting.setdefault(block, []).append(own)
        with self._slots:
            batch = self._take(block, own)
            if batch:
                self._evaluate(block, batch)
        own.done.wait()  # who took it holds a slot and is working on it
        if own.error is not None:
            raise own.error
        assert own.result is not None  # done without an error
        return own.result

    def _take(self, block: int, own: _Waiting) -> list[_Waiting]:
        """Return own request and those that fit beside it, or nothing if another thread has taken it."""
        with self._lock:
            if own.taken:
                return []
            batch, size = [own], own.residues.size
            for other in self._waiting[block]:
                if other is not own and size + other.residues.size <= MOST_RESIDUES:
                    batch.append(other)
                    size += other.residues.size
            for item in batch:
                item.taken = True
            left = [item for item in self._waiting.pop(block) if not item.taken]
            if left:
                self._waiting[block] = left
            return batch

    def _evaluate(self, block: int, batch: list[_Waiting]) -> None:
        try:
            joined = batch[0].residues if len(batch) == 1 else np.concatenate([item.residues for item in batch])
            result = self._run(block, joined)
            first = 0
            for item in batch:
                item.result = result[first : first + len(item.residues)]
                first += len(item.residues)
        except BaseException as error:
            for item in batch:
                item.error = error
        finally:
            for item in batch:
                item.done.set()
