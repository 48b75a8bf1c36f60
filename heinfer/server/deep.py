"""Requests for deep blocks: keys and ciphertexts into files, one evaluation at a time, the answer out of a file.

    rows: keys | b and a of every input, prime by prime --> files --> `heinfer.server.polynomial` --> rows

A request has hundreds of megabytes, so its rows go to disk as they come; they are ciphertexts, and removed at the end.
Room for all that it will take, in `--scratch-bytes` and of what is free on the disk, is taken when the request is
announced, and its first files are made then. Where there is too little it fails then; where other programs fill the
disk later it fails when its next file is made, and nothing else does. No node can check the answer of a deep block, so
whether the file of weights is what was verified is looked at when a request is announced and again before its answer.
All cores work on one evaluation, so the next one waits; either ends when its node is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from heinfer.plan import DeepBlock
from heinfer.ring import pack, packed_bytes, unpack
from heinfer.server.polynomial.evaluator import DeepEvaluator, nobody_goes
from heinfer.server.polynomial.files import Store
from heinfer.server.polynomial.processes import Gone
from heinfer.wire import BlockRequest, Chunk, Limits


class DeepRequest:
    """A request for a deep block.

    Args:
        evaluator: of the block.
        request: how it was announced.
        limits: chunk size.
        check_unchanged: raises PlanError where somebody has written to the file of weights.

    Raises:
        PlanError: somebody has.
    """

    def __init__(
        self, evaluator: DeepEvaluator, request: BlockRequest, limits: Limits, check_unchanged: Callable[[], None]
    ) -> None:
        check_unchanged()
        self._check_unchanged = check_unchanged
        self._block: DeepBlock = evaluator.block
        self._evaluator = evaluator
        self._request = request
        self._size = packed_bytes(self._block.chain.degree)
        self._step = max(1, limits.chunk_bytes // self._size)
        with ExitStack() as held:
            held.enter_context(evaluator.resources.place())
            self._folder = held.enter_context(evaluator.resources.space.folder(evaluator.scratch_bytes))
            self._make_files()
            self._held = held.pop_all()

    def _make_files(self) -> None:
        chain = self._block.chain
        self._keys, self._inputs = self._evaluator.stores(self._folder)
        files = [(self._keys, (*chain.primes, chain.special)), *((store, chain.primes) for store in self._inputs)]
        self._parts = [(store.create().reshape(-1, chain.degree), moduli) for store, moduli in files]

    def add(self, chunk: Chunk) -> None:
        """Take the next rows."""
        packed = np.frombuffer(chunk.data, np.uint8).reshape(chunk.rows, self._size)
        first = 0
        for part, moduli in self._parts:
            for row in range(max(chunk.first_row, first), min(chunk.first_row + chunk.rows, first + len(part))):
                modulus = moduli[(row - first) % len(moduli)]
                part[row - first] = unpack(packed[row - chunk.first_row][None], part.shape[1], modulus)[0]
            first += len(part)

    def evaluate(self, gone: Gone = nobody_goes) -> tuple[int, Iterator[Chunk]]:
        """Evaluate the block when it is our turn; the answer is read and packed chunk by chunk.

        Raises:
            PlanError: somebody has written to the file of weights in the meantime.
        """
        self._parts = []
        results = self._evaluator.evaluate_stored(self._folder, self._inputs, self._keys, gone)
        self._check_unchanged()
        return self._block.rows_down, self._chunks(results)

    def close(self) -> None:
        """Remove the files and give all room back; once more is no harm."""
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
