"""One upload in prepared mode: the inputs of one block for one group of samples, out and back.

    values --(scale, round, add masks)--> b --> server --> y --(check; add corrections, scale back)--> values

All cryptography has been done: what is left is an addition each way, and a check of the answer. Every sample has its
own secret.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.plan import NodeBundle
from heinfer.ring import pack, packed_bytes, unpack
from heinfer.wire import BlockAnswer, Chunk, Mode
from trusted_node.delivery import Delivery
from trusted_node.integrity import BlockCheck, forged_answer
from trusted_node.preparation import PreparedQuery
from trusted_node.results import BlockResult, finish_outputs
from trusted_node.scaling import prepared_values, scale_samples
from trusted_node.statistics import QueryStatistics


class PreparedUpload:
    """One upload of one block. `send` once, then `receive` once.

    Args:
        bundle: the node's folder.
        block: index of the block.
        delivery: carries it; nothing else uses it.
        queries: masks and corrections, together for as many samples as there are values.
        statistics: takes costs and bounds.
        check: finds answers that are not honest; None: whatever comes is taken for honest.
    """

    def __init__(
        self,
        bundle: NodeBundle,
        block: int,
        delivery: Delivery,
        queries: list[PreparedQuery],
        statistics: QueryStatistics,
        check: BlockCheck | None,
    ) -> None:
        assert bundle.hints is not None  # the mode was chosen for a plan that has hints
        self._bundle = bundle
        self._index = block
        self._delivery = delivery
        self._queries = queries
        self._statistics = statistics
        self._check = check
        self._hints = bundle.hints.blocks[block]
        self._sent = False
        self._sent_at = 0.0
        self._check_s = 0.0
        self.waited_s = 0.0

    def send(self, values: list[NDArray[np.float32]], peaks: list[NDArray[np.float64]]) -> None:
        """Encrypt and send the block's inputs, finite and of shape (samples, *shape), with their `sample_peaks`."""
        if self._sent:
            raise LocalProtocolError("an upload is encrypted once; make a new one")
        self._sent = True
        started = time.perf_counter()
        plan, form = self._bundle.plan, self._hints.form
        samples = len(values[0])
        self._scales = scale_samples(values, plan.blocks[self._index].row_sum, plan.ring.parameters, peaks)
        x, scale = prepared_values(form, self._hints.maps, self._scales)
        uploads, first = [], 0
        for query in self._queries:
            last = first + query.samples
            uploads.append(query.encrypt(self._index, x[first:last], scale[first:last]))
            first = last
        parts = [pack(upload) for upload in uploads]
        packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
        encrypted = time.perf_counter()
        self._delivery.send(self._index, samples, Mode.PREPARED, packed.data.cast("B"))
        self._sent_at = time.perf_counter()
        if self._check is not None:  # while the server is at work
            self._committed = self._check.commit(uploads)
        self._check_s = time.perf_counter() - self._sent_at
        self._statistics.add(
            self._index,
            encrypt_s=encrypted - started,
            check_s=self._check_s,
            bytes_up=packed.size,
            ciphertexts_up=samples * form.ciphertexts,
        )
        self.waited_s += time.perf_counter() - started

    def receive(self, bounded: int) -> BlockResult:
        """Receive, check and decrypt the answer.

        Args:
            bounded: leading samples whose error bounds are wanted.

        Raises:
            IntegrityError: the answer is not what the block computes; it was not decrypted.
        """
        started = time.perf_counter()
        y = self._delivery.accept(self._check_answer)
        checked = time.perf_counter()
        decrypted, first = [], 0
        for query in self._queries:
            last = first + query.samples
            decrypted.append(query.decrypt(self._index, y[first:last], self._scales.scale[first:last]))
            first = last
        values = decrypted[0] if len(decrypted) == 1 else np.concatenate(decrypted)
        ended = time.perf_counter()
        self._statistics.add(self._index, decrypt_s=ended - checked)
        self.waited_s += ended - started
        return finish_outputs(self._bundle, self._index, self._scales, values, bounded, self._statistics)

    def _check_answer(self, announcement: BlockAnswer, chunks: Iterator[Chunk]) -> NDArray[np.int64]:
        """Return the answer's residues, shape (samples, values down), all of it received and checked."""
        parts = [chunk.data for chunk in chunks]
        arrived = time.perf_counter()
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        samples, down = len(self._scales.scale), self._hints.form.values_down
        if len(data) != samples * packed_bytes(down):
            raise RemoteProtocolError(f"expected {samples * packed_bytes(down)} bytes, found {len(data)}")
        packed = np.frombuffer(data, np.uint8).reshape(samples, -1)
        y = unpack(packed, down, self._bundle.plan.ring.modulus)
        unpacked = time.perf_counter()
        if self._check is not None and not self._check.holds(self._committed, y):
            raise forged_answer(self._index)
        checked = time.perf_counter()
        self._statistics.add(
            self._index,
            server_s=announcement.compute_s,
            wire_s=max(0.0, arrived - self._sent_at - max(announcement.compute_s, self._check_s)),
            decrypt_s=checked - arrived,
            check_s=checked - unpacked,
            bytes_down=len(data),
        )
        return y

    def wipe(self) -> None:
        """Nothing: masks and corrections are wiped by their use, or with the query that owns them."""
