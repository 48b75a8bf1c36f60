"""Queries that wait together are evaluated together: several uploads of one block in one product.

    request --> waiting, by block --> (a slot is free) --> one evaluation of all that wait for the block --> answers

A server of several plans has one merger: slots are for all of them, and a block is one of a certain plan.

A slot that gets free goes to the request that has waited longest, which takes the others for its block along; a request
that was taken along is done when it is answered, and needs no slot.

Merging happens only where requests wait anyway, so it costs a single query nothing. Uploads share a product, never a
ciphertext: each keeps its own rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Residues = NDArray[np.int64]
Block = TypeVar("Block", bound=Hashable)
#: Residues that one evaluation takes together (256 MB); a single larger request runs alone.
MOST_RESIDUES: Final = 1 << 25


@dataclass(eq=False, slots=True)
class _Waiting:
    residues: Residues
    number: int
    ready: threading.Event = field(default_factory=threading.Event)  # it is answered, or has a slot
    has_slot: bool = False
    result: Residues | None = None
    error: BaseException | None = None


class Merger(Generic[Block]):
    """Runs requests, at most `slots` evaluations at a time.

    Args:
        run: evaluates a block, whatever stands for it, on residues of shape (samples, values).
        slots: evaluations at a time.
    """

    def __init__(self, run: Callable[[Block, Residues], Residues], slots: int) -> None:
        self._run = run
        self._free = slots
        self._lock = threading.Lock()
        self._waiting: dict[Block, list[_Waiting]] = {}  # oldest first
        self._requests = 0

    def evaluate(self, block: Block, residues: Residues) -> Residues:
        """Evaluate a block, together with requests for the same block that wait at the same time.

        Args:
            block: which one.
            residues: int64 in [0, q), shape (samples, values up).

        Returns:
            int64 in [0, q), shape (samples, values down).
        """
        own = self._enter(block, residues)
        if not own.has_slot:
            own.ready.wait()
        if own.has_slot:
            try:
                self._evaluate(block, self._take(block, own))
            finally:
                self._pass_on()
        if own.error is not None:
            raise own.error
        assert own.result is not None  # ready without an error
        return own.result

    def _enter(self, block: Block, residues: Residues) -> _Waiting:
        """Take a free slot, or a place among those that wait."""
        with self._lock:
            self._requests += 1
            own = _Waiting(residues, self._requests)
            if self._free:
                self._free -= 1
                own.has_slot = True
            else:
                self._waiting.setdefault(block, []).append(own)
            return own

    def _pass_on(self) -> None:
        """Give a slot to who has waited longest."""
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            block, items = min(self._waiting.items(), key=lambda entry: entry[1][0].number)
            oldest = items.pop(0)
            if not items:
                del self._waiting[block]
            oldest.has_slot = True
            oldest.ready.set()

    def _take(self, block: Block, own: _Waiting) -> list[_Waiting]:
        """Return own request and those that wait for the same block and fit beside it."""
        with self._lock:
            batch, left, size = [own], [], own.residues.size
            for other in self._waiting.pop(block, []):
                if size + other.residues.size <= MOST_RESIDUES:
                    batch.append(other)
                    size += other.residues.size
                else:
                    left.append(other)
            if left:
                self._waiting[block] = left
            return batch

    def _evaluate(self, block: Block, batch: list[_Waiting]) -> None:
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
                item.ready.set()
