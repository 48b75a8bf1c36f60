"""Requests for deep blocks: keys and ciphertexts into files, one evaluation at a time, the answer out of a file.

    rows: keys | b and a of every input, prime by prime --> files --> `heinfer.server.polynomial` --> rows

A request has hundreds of megabytes, so its rows go to disk as they come; they are ciphertexts, and removed at the end.
Room for them is taken when the request is announced, so a full disk fails it then, and nothing else. All cores work on
one evaluation, so the next one waits. SEAL is loaded with the first one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from heinfer.plan import DeepBlock
from heinfer.ring import pack, packed_bytes, unpack
from heinfer.wire import BlockRequest, Chunk, FailureCode, Limits, RefusedError

if TYPE_CHECKING:
    from heinfer.server.polynomial import DeepEvaluator, Store

#: Requests that are held at a time, one under way and one that waits: each may take gigabytes of disk.
MOST_REQUESTS: Final = 2
_places = threading.BoundedSemaphore(MOST_REQUESTS)
#: Held for every evaluation.
_turn = threading.Lock()


class DeepRequest:
    """A request for a deep block.

    Args:
        evaluator: of the block.
        request: how it was announced.
        limits: chunk size.
    """

    def __init__(self, evaluator: DeepEvaluator, request: BlockRequest, limits: Limits) -> None:
        from heinfer.server.polynomial import Store, scratch_folder

        self._evaluator = evaluator
        self._block: DeepBlock = evaluator.block
        self._request = request
        self._size = packed_bytes(self._block.chain.degree)
        self._step = max(1, limits.chunk_bytes // self._size)
        self._held = ExitStack()
        if not _places.acquire(blocking=False):
            raise RefusedError(FailureCode.BUSY, f"{MOST_REQUESTS} requests for deep blocks are held already")
        self._held.callback(_places.release)
        self._folder = self._held.enter_context(scratch_folder(evaluator.scratch))
        try:
            self._make_room(Store)
        except BaseException:
            self.close()
            raise

    def _make_room(self, store: type[Store]) -> None:
        primes, degree = len(self._block.chain.primes), self._block.chain.degree
        self._keys = store(self._folder / "keys", (primes, 2, primes + 1, degree))
        self._inputs = [
            store(self._folder / f"input-{n}", (prod(t.shape), 2, primes, degree))
            for n, t in enumerate(self._block.inputs)
        ]
        parts = [x.create().reshape(-1, degree) for x in (self._keys, *self._inputs)]
        moduli = self._block.chain.primes
        self._parts = [
            (part, (*moduli, self._block.chain.special) if not n else moduli) for n, part in enumerate(parts)
        ]

    def add(self, chunk: Chunk) -> None:
        """Take the next rows."""
        packed = np.frombuffer(chunk.data, np.uint8).reshape(chunk.rows, self._size)
        first = 0
        for part, moduli in self._parts:
            for row in range(max(chunk.first_row, first), min(chunk.first_row + chunk.rows, first + len(part))):
                modulus = moduli[(row - first) % len(moduli)]
                part[row - first] = unpack(packed[row - chunk.first_row][None], part.shape[1], modulus)[0]
            first += len(part)

    def evaluate(self) -> tuple[int, Iterator[Chunk]]:
        """Evaluate the block when it is our turn; the answer is read and packed chunk by chunk."""
        self._parts = []
        with _turn:
            results = self._evaluator.evaluate_stored(self._folder, self._inputs, self._keys)
        return self._block.rows_down, self._chunks(results)

    def close(self) -> None:
        """Remove the files."""
        self._parts = []
        self._held.close()

    def _chunks(self, results: Sequence[Store]) -> Iterator[Chunk]:
        primes, sent = self._block.result_primes, 0
        for store in results:
            for element in store.open():
                rows = np.ascontiguousarray(element[:, :primes]).reshape(-1, element.shape[2])
                for first in range(0, len(rows), self._step):
                    part = rows[first : first + self._step]
                    yield Chunk(self._request.request_id, sent, len(part), pack(part).tobytes())
                    sent += len(part)
        self.close()
