"""One upload of a deep block: keys and inputs out, outputs back.

    inputs --(divide by range, encrypt: workers)--> keys, rows --> server
    outputs, bounds <--(calibrate; decrypt: workers)------ rows <-- server

An upload has a secret of its own, and the relinearisation keys of that secret travel with it. A row is one polynomial
modulo one prime. Answers are not checked: what catches a server that computes something else elsewhere is linear, and
this is not (docs/threat-model.md).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.plan import NodeBundle
from heinfer.ring import packed_bytes
from heinfer.wire import BlockAnswer, Chunk, Limits, Mode
from trusted_node.deep_workers import DeepPool, Opened, Packed
from trusted_node.delivery import Delivery
from trusted_node.results import BlockResult, finish_deep
from trusted_node.statistics import QueryStatistics

#: Elements that one task of a worker takes, and tasks that wait for workers at most.
TASK_ELEMENTS: Final = 4
TASKS_IN_FLIGHT: Final = 8


class DeepUpload:
    """One upload of one deep block. `send` once, then `receive` once.

    Args:
        bundle: the node's folder.
        block: index of the deep block.
        delivery: carries it; nothing else uses it.
        pool: makes the secret and the keys, encrypts and decrypts.
        statistics: takes costs, and values outside of what was calibrated.
        limits: chunk size.
    """

    def __init__(
        self,
        bundle: NodeBundle,
        block: int,
        delivery: Delivery,
        pool: DeepPool,
        statistics: QueryStatistics,
        limits: Limits,
    ) -> None:
        self._bundle = bundle
        self._deep = block
        self._block = bundle.plan.deep[block]
        self._terms = bundle.deep[block]
        self._index = len(bundle.plan.blocks) + block  # as the wire counts
        self._chain = self._block.chain.parameters
        self._delivery = delivery
        self._pool = pool
        self._statistics = statistics
        self._limits = limits
        self._secret = pool.generate_secret(self._chain)
        self._size = packed_bytes(self._chain.degree)
        self._sent = False
        self._row = 0
        self._samples = 0
        self._outside = np.zeros(0, np.int64)
        self.waited_s = 0.0

    def send(self, values: list[NDArray[Any]]) -> None:
        """Encrypt and send the block's inputs, finite and of shape (samples, *shape)."""
        if self._sent:
            raise LocalProtocolError("an upload is encrypted once; make a new one")
        self._sent = True
        started = time.perf_counter()
        scaled = self._terms.scale(values)
        self._outside = self._terms.outside(scaled)
        self._samples = len(values[0])
        elements = np.concatenate([x.reshape(self._samples, -1).T for x in scaled])
        self._delivery.open_request(self._index, self._samples, Mode.DEEP)
        pending: deque[Future[Packed]] = deque([self._pool.make_keys(self._chain, bytes(self._secret))])
        try:
            for first in range(0, len(elements), TASK_ELEMENTS):
                if len(pending) == TASKS_IN_FLIGHT:
                    self._send_rows(pending.popleft().result())
                part = np.ascontiguousarray(elements[first : first + TASK_ELEMENTS])
                pending.append(self._pool.encrypt(self._chain, bytes(self._secret), part, self._block.input_scale))
            while pending:
                self._send_rows(pending.popleft().result())
        finally:
            _cancel(pending)
        self._statistics.add(self._index, ciphertexts_up=len(elements), bytes_up=self._row * self._size)
        self.waited_s += time.perf_counter() - started

    def receive(self, bounded: int) -> BlockResult:
        """Receive and decrypt the answer, then wipe the secret.

        Args:
            bounded: leading samples whose error bounds are wanted; NaN outside of the calibrated ranges.
        """
        started = time.perf_counter()
        try:
            values = self._delivery.accept(self._decrypt)
        finally:
            self.wipe()
        outputs, first = [], 0
        for spec in self._block.outputs:
            size = prod(spec.shape)
            outputs.append(values[first : first + size].T.reshape(self._samples, *spec.shape))
            first += size
        result = finish_deep(self._bundle, self._deep, self._outside, outputs, bounded, self._statistics)
        self.waited_s += time.perf_counter() - started
        return result

    def wipe(self) -> None:
        """Overwrite the secret."""
        self._secret[:] = bytes(len(self._secret))

    def _send_rows(self, packed: Packed) -> None:
        """Send what a worker made, in chunks."""
        self._statistics.add(self._index, encrypt_s=packed.seconds)
        step = max(1, self._limits.chunk_bytes // self._size)
        for first in range(0, len(packed.rows), step * self._size):
            data = packed.rows[first : first + step * self._size]
            count = len(data) // self._size
            self._delivery.send_rows(self._row, count, data)
            self._row += count

    def _decrypt(self, announcement: BlockAnswer, chunks: Iterator[Chunk]) -> NDArray[np.float64]:
        """Return the answer's values, shape (elements, samples), in the units of the plan."""
        began = time.perf_counter()
        primes = self._block.result_primes
        scales = [self._block.result_scale(n) for n, t in enumerate(self._block.outputs) for _ in range(prod(t.shape))]
        count = 2 * primes * self._size
        pending: deque[Future[Opened]] = deque()
        opened: list[Opened] = []
        buffer, received = bytearray(), 0
        try:
            for chunk in chunks:
                buffer += chunk.data
                received += len(chunk.data)
                while len(buffer) >= count and len(opened) + len(pending) < len(scales):
                    if len(pending) == TASKS_IN_FLIGHT:
                        opened.append(pending.popleft().result())
                    rows, scale = bytes(buffer[:count]), scales[len(opened) + len(pending)]
                    del buffer[:count]
                    secret = bytes(self._secret)
                    pending.append(self._pool.decrypt(self._chain, secret, rows, primes, scale, self._samples))
            if buffer or len(opened) + len(pending) != len(scales):
                raise RemoteProtocolError(f"expected {len(scales) * count} bytes, found {received}")
            opened += [future.result() for future in pending]
        finally:
            _cancel(pending)
        self._statistics.add(
            self._index,
            server_s=announcement.compute_s,
            wire_s=max(0.0, time.perf_counter() - began - announcement.compute_s),
            decrypt_s=sum(o.seconds for o in opened),
            ciphertexts_down=len(opened),
            bytes_down=received,
        )
        return np.concatenate([o.values for o in opened])


def _cancel(pending: Iterable[Future[Any]]) -> None:
    """Drop tasks that have not started: each holds a copy of the secret."""
    for future in pending:
        future.cancel()
