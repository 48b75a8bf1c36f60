"""One upload in standard mode: the inputs of one block for one group of samples, out and back.

    values --(scale, round, encrypt: workers)--> rows --> server --> rows --(decrypt, scale back: workers)--> values

An upload has a secret of its own, made when it starts and wiped when it ends, and is encrypted once. In standard mode a
row is one value of the tensor, its N coefficients are samples; each sample has its own scale.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import LocalProtocolError
from heinfer.plan import NodeBundle
from heinfer.wire import BlockAnswer, Limits, row_bytes
from trusted_node.link import LinkSession
from trusted_node.results import BlockResult, finish_outputs, row_terms
from trusted_node.scaling import scale_samples
from trusted_node.statistics import QueryStatistics
from trusted_node.workers import CryptoPool, Decrypted, Encrypted, RowTerms

#: Rows that one task of a worker takes: about 10 ms.
TASK_ROWS = 32
#: Tasks that wait for workers at most, per upload.
TASKS_IN_FLIGHT = 32


class Upload:
    """One upload of one block. `send` once, then `receive` once.

    Args:
        bundle: the node's folder.
        block: index of the block.
        session: where it goes; nothing else uses it until `receive` has ended.
        pool: makes the secret, encrypts and decrypts.
        statistics: takes costs and bounds.
        limits: chunk size.
    """

    def __init__(
        self,
        bundle: NodeBundle,
        block: int,
        session: LinkSession,
        pool: CryptoPool,
        statistics: QueryStatistics,
        limits: Limits,
    ) -> None:
        self._bundle = bundle
        self._index = block
        self._block = bundle.plan.blocks[block]
        self._session = session
        self._pool = pool
        self._statistics = statistics
        self._limits = limits
        self._secret = pool.generate_secret()
        self._sent = False
        self._request_id = 0
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
        self._request_id = self._session.open_request(self._index, samples)
        size = row_bytes(samples, self._bundle.plan.ring.degree)
        step = max(1, min(TASK_ROWS, self._limits.chunk_bytes // size))
        pending: deque[tuple[int, Future[Encrypted]]] = deque()
        for first in range(0, len(rows), step):
            if len(pending) == TASKS_IN_FLIGHT:
                self._send_next(pending, size)
            part = np.ascontiguousarray(rows[first : first + step])
            pending.append((first, self._pool.encrypt(bytes(self._secret), part, self._scales.scale)))
        while pending:
            self._send_next(pending, size)
        self._statistics.add(self._index, ciphertexts_up=len(rows), bytes_up=len(rows) * size)
        self._sent_at = time.perf_counter()
        self.waited_s += self._sent_at - started

    def receive(self, bounded: int) -> BlockResult:
        """Receive and decrypt the answer, then wipe the secret.

        Args:
            bounded: leading samples whose error bounds are wanted.
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
        self._session.send_rows(self._request_id, first, len(encrypted.rows) // size, encrypted.rows)
        self._statistics.add(self._index, encrypt_s=encrypted.seconds)

    def _decrypt_answer(self) -> NDArray[np.float32]:
        scale, bias = row_terms(self._bundle, self._index)
        values = np.empty((len(scale), self._samples), np.float32)
        pending: deque[tuple[int, Future[Decrypted]]] = deque()
        for event in self._session.answer(self._request_id):
            if isinstance(event, BlockAnswer):
                wire_s = max(0.0, time.perf_counter() - self._sent_at - event.compute_s)
                self._statistics.add(self._index, server_s=event.compute_s, wire_s=wire_s)
                continue
            if len(pending) == TASKS_IN_FLIGHT:
                self._take_next(pending, values)
            part = slice(event.first_row, event.first_row + event.rows)
            terms = RowTerms(scale[part], bias[part])
            future = self._pool.decrypt(bytes(self._secret), event.data, self._samples, self._scales.scale, terms)
            pending.append((event.first_row, future))
            self._statistics.add(self._index, ciphertexts_down=event.rows, bytes_down=len(event.data))
        while pending:
            self._take_next(pending, values)
        return values

    def _take_next(self, pending: deque[tuple[int, Future[Decrypted]]], values: NDArray[np.float32]) -> None:
        first, future = pending.popleft()
        decrypted = future.result()
        values[first : first + len(decrypted.values)] = decrypted.values
        self._statistics.add(self._index, decrypt_s=decrypted.seconds)
