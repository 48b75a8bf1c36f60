"""One upload in standard mode: the inputs of one block for one group of samples, out and back.

    values --(scale, round, encrypt: workers)--> rows --> server
    values <--(decrypt, scale back: workers)-- rows <--(check: workers)-- rows <-- server

An upload has a secret of its own, made when it starts and wiped when it ends, and is encrypted once. In standard mode a
row is one value of the tensor, its N coefficients are samples; each sample has its own scale.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import LocalProtocolError
from heinfer.plan import NodeBundle
from heinfer.wire import BlockAnswer, Chunk, Limits, row_bytes
from trusted_node.delivery import Delivery
from trusted_node.integrity import BlockCheck, RowSums, forged_answer
from trusted_node.results import BlockResult, finish_outputs, row_terms
from trusted_node.scaling import scale_samples
from trusted_node.statistics import QueryStatistics
from trusted_node.workers import CryptoPool, Decrypted, Encrypted, RowTerms, Weighed

#: Rows that one task of a worker takes: about 10 ms.
TASK_ROWS = 32
#: Tasks that wait for workers at most, per upload.
TASKS_IN_FLIGHT = 32


class Upload:
    """One upload of one block. `send` once, then `receive` once.

    Args:
        bundle: the node's folder.
        block: index of the block.
        delivery: carries it; nothing else uses it.
        pool: makes the secret, encrypts and decrypts.
        statistics: takes costs and bounds.
        limits: chunk size.
        check: finds answers that are not honest; None: whatever comes is taken for honest.
    """

    def __init__(
        self,
        bundle: NodeBundle,
        block: int,
        delivery: Delivery,
        pool: CryptoPool,
        statistics: QueryStatistics,
        limits: Limits,
        check: BlockCheck | None,
    ) -> None:
        self._bundle = bundle
        self._index = block
        self._block = bundle.plan.blocks[block]
        self._delivery = delivery
        self._pool = pool
        self._statistics = statistics
        self._limits = limits
        self._check = check
        self._committed: RowSums | None = None
        self._secret = pool.generate_secret()
        self._sent = False
        self._sent_at = 0.0
        self.waited_s = 0.0

    def send(self, values: list[NDArray[np.float32]], peaks: list[NDArray[np.float64]]) -> None:
        """Encrypt and send the block's inputs, finite and of shape (samples, *shape), with their `sample_peaks`."""
        if self._sent:
            raise LocalProtocolError("an upload is encrypted once; make a new one")
        self._sent = True
        started = time.perf_counter()
        samples = len(values[0])
        self._scales = scale_samples(values, self._block.row_sum, self._bundle.plan.ring.parameters, peaks)
        rows = np.concatenate([x.reshape(samples, -1).T for x in values]).astype(np.float32, copy=False)
        self._samples = samples
        self._delivery.open_request(self._index, samples)
        size = row_bytes(samples, self._bundle.plan.ring.degree)
        step = max(1, min(TASK_ROWS, self._limits.chunk_bytes // size))
        if self._check is not None:
            self._committed = self._sums(self._check.rows_up)
        pending: deque[tuple[int, Future[Encrypted]]] = deque()
        for first in range(0, len(rows), step):
            if len(pending) == TASKS_IN_FLIGHT:
                self._send_next(pending, size)
            part = np.ascontiguousarray(rows[first : first + step])
            weights = None if self._committed is None else self._committed.weights(first, len(part))
            pending.append((first, self._pool.encrypt(bytes(self._secret), part, self._scales.scale, weights)))
        while pending:
            self._send_next(pending, size)
        self._statistics.add(self._index, ciphertexts_up=len(rows), bytes_up=len(rows) * size)
        self._sent_at = time.perf_counter()
        self.waited_s += self._sent_at - started

    def receive(self, bounded: int) -> BlockResult:
        """Receive, check and decrypt the answer, then wipe the secret.

        Args:
            bounded: leading samples whose error bounds are wanted.

        Raises:
            IntegrityError: the answer is not what the block computes; it was not decrypted.
        """
        started = time.perf_counter()
        try:
            rows = self._decrypt_answer()
        finally:
            self.wipe()
        self.waited_s += time.perf_counter() - started
        values = np.ascontiguousarray(rows.T)
        return finish_outputs(self._bundle, self._index, self._scales, values, bounded, self._statistics)

    def wipe(self) -> None:
        """Overwrite the secret."""
        self._secret[:] = bytes(len(self._secret))

    def _send_next(self, pending: deque[tuple[int, Future[Encrypted]]], size: int) -> None:
        first, future = pending.popleft()
        encrypted = future.result()
        self._delivery.send_rows(first, len(encrypted.rows) // size, encrypted.rows)
        if self._committed is not None and encrypted.sums is not None:
            self._committed.add_sums(encrypted.sums)
        self._statistics.add(self._index, encrypt_s=encrypted.seconds)

    def _sums(self, weights: NDArray[np.float64]) -> RowSums:
        ring = self._bundle.plan.ring
        return RowSums(weights, self._samples + ring.degree, ring.modulus)

    def _check_rows(self, announcement: BlockAnswer, arriving: Iterator[Chunk]) -> list[Chunk]:
        """Receive all rows, and check them: none is decrypted before all have been seen.

        Without a check they must still be residues: what fails at decryption is not asked for again.
        """
        wire_s = max(0.0, time.perf_counter() - self._sent_at - announcement.compute_s)
        self._statistics.add(self._index, server_s=announcement.compute_s, wire_s=wire_s)
        chunks: list[Chunk] = []
        answered = None if self._check is None else self._sums(self._check.down)
        pending: deque[Future[Weighed]] = deque()

        def add_next() -> None:
            weighed = pending.popleft().result()
            if answered is not None and weighed.sums is not None:
                answered.add_sums(weighed.sums)
            self._statistics.add(self._index, check_s=weighed.seconds, decrypt_s=weighed.seconds)

        for chunk in arriving:
            if len(pending) == TASKS_IN_FLIGHT:
                add_next()
            weights = None if answered is None else answered.weights(chunk.first_row, chunk.rows)
            pending.append(self._pool.weigh(chunk.data, self._samples, weights))
            chunks.append(chunk)
            self._statistics.add(self._index, ciphertexts_down=chunk.rows, bytes_down=len(chunk.data))
        while pending:
            add_next()
        if answered is not None and not answered.equals(self._committed):
            raise forged_answer(self._index)
        return chunks

    def _decrypt_answer(self) -> NDArray[np.float32]:
        scale, bias = row_terms(self._bundle, self._index)
        values = np.empty((len(scale), self._samples), np.float32)
        pending: deque[tuple[int, Future[Decrypted]]] = deque()
        for chunk in self._delivery.accept(self._check_rows):
            if len(pending) == TASKS_IN_FLIGHT:
                self._take_next(pending, values)
            part = slice(chunk.first_row, chunk.first_row + chunk.rows)
            terms = RowTerms(scale[part], bias[part])
            future = self._pool.decrypt(bytes(self._secret), chunk.data, self._samples, self._scales.scale, terms)
            pending.append((chunk.first_row, future))
        while pending:
            self._take_next(pending, values)
        return values

    def _take_next(self, pending: deque[tuple[int, Future[Decrypted]]], values: NDArray[np.float32]) -> None:
        first, future = pending.popleft()
        decrypted = future.result()
        values[first : first + len(decrypted.values)] = decrypted.values
        self._statistics.add(self._index, decrypt_s=decrypted.seconds)
