"""One upload of a batch in prepared mode: up to N samples of one query under one secret, laid along the coefficients.

    values --(scale, round; e - a s)--> b, one row a value --> server --> W(b) --(check; + W(a) s, scale back)--> values

As in standard mode a ciphertext holds one value of all samples; but a is fixed by the seed, so b alone travels, and the
hint W(a), one polynomial a value that comes back, gives the correction. A LeNet-5 batch of 2048 costs 6,800 products
with the secret: a tenth of what preparing its samples one by one does. Hints take 12.8 KB a value, so a bundle has them
on request only (`heinfer partition --batch-hints`).

The secret is drawn when the upload is sent and wiped when it ends; every a_i meets it once. It never covers two
queries.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.plan import NodeBundle, batch_polynomials
from heinfer.ring import LANES, RingParameters, Transform, pack, packed_bytes, run_tiles, scratch_array, unpack
from heinfer.wire import BlockAnswer, Chunk, Limits, Mode
from trusted_node.delivery import Delivery
from trusted_node.integrity import BlockCheck, RowSums, forged_answer
from trusted_node.masking import decrypt_rows, encrypt_rows, fill_lanes, tables_of, to_residues
from trusted_node.results import BlockResult, finish_outputs, row_terms
from trusted_node.sampling import draw_noise, draw_ternary, wipe
from trusted_node.scaling import scale_samples
from trusted_node.statistics import QueryStatistics

Floats = NDArray[np.float64]
#: Rows that are encrypted before they are sent, and decrypted together: some MB.
_STEP_ROWS: Final = 32 * LANES


class BatchMaterial:
    """Public polynomials and batch hints of one block, transformed. Immutable."""

    def __init__(self, bundle: NodeBundle, block: int, packed: NDArray[np.uint8]) -> None:
        self.ring: RingParameters = bundle.plan.ring.parameters
        transform = Transform.of(self.ring)
        self.transform = transform
        self.tables = tables_of(transform)
        assert bundle.hints is not None  # the caller has looked
        self.public = transform.forward(batch_polynomials(bundle.plan, bundle.plan_hash, bundle.hints.seed, block))
        self.hints = transform.forward(unpack(packed, self.ring.degree, self.ring.modulus))
        self.scale, self.bias = row_terms(bundle, block)


class BatchMaterials:
    """The materials of all blocks, made when a batch first needs them: they take 16 KB a value."""

    def __init__(self, bundle: NodeBundle) -> None:
        self._bundle = bundle
        self._made: dict[int, BatchMaterial] = {}
        self._lock = threading.Lock()

    def of(self, block: int) -> BatchMaterial:
        """Return a block's material.

        Raises:
            PlanError: somebody has written to the file of hints.
        """
        hints = self._bundle.hints
        assert hints is not None  # the caller has looked
        assert hints.batch is not None
        with self._lock:
            if block not in self._made:
                made = BatchMaterial(self._bundle, block, hints.batch[block])
                hints.file.check_unchanged()  # after they were read, so that what is kept is what was verified
                self._made[block] = made
            return self._made[block]


class BatchUpload:
    """One upload of one block. `send` once, then `receive` once, and `wipe` in any case.

    Args:
        bundle: the node's folder.
        block: index of the block.
        delivery: carries it; nothing else uses it.
        materials: of the plan.
        statistics: takes costs and bounds.
        limits: chunk size.
        check: finds answers that are not honest; None: whatever comes is taken for honest.
    """

    def __init__(
        self,
        bundle: NodeBundle,
        block: int,
        delivery: Delivery,
        materials: BatchMaterials,
        statistics: QueryStatistics,
        limits: Limits,
        check: BlockCheck | None,
    ) -> None:
        self._bundle = bundle
        self._index = block
        self._delivery = delivery
        self._material = materials.of(block)
        self._statistics = statistics
        self._limits = limits
        self._check = check
        self._owner = os.getpid()
        self._sent = False
        self._committed: RowSums | None = None
        self._lanes = np.zeros((self._material.ring.degree, LANES))
        self._sent_at = 0.0
        self.waited_s = 0.0

    def send(self, values: list[NDArray[np.float32]], peaks: list[NDArray[np.float64]]) -> None:
        """Encrypt and send the block's inputs, finite and of shape (samples, *shape), with their `sample_peaks`."""
        if self._sent or os.getpid() != self._owner:
            raise LocalProtocolError("an upload is encrypted once, by the process that made it; make a new one")
        self._sent = True
        started = time.perf_counter()
        plan, material = self._bundle.plan, self._material
        samples = self._samples = len(values[0])
        self._scales = scale_samples(values, plan.blocks[self._index].row_sum, material.ring, peaks)
        rows = np.concatenate([x.reshape(samples, -1).T for x in values]).astype(np.float32, copy=False)
        secret = draw_ternary(1, material.ring.degree)
        evaluations = material.transform.forward(secret)
        fill_lanes(evaluations[0], 0, self._lanes)
        to_residues(self._lanes, material.tables.modulus)
        wipe(secret, evaluations)
        size = packed_bytes(samples)
        self._delivery.open_request(self._index, samples, Mode.BATCH)
        encrypt_s = 0.0
        committed = None if self._check is None else RowSums(self._check.rows_up, samples, material.ring.modulus)
        for first in range(0, len(rows), _STEP_ROWS):
            begun = time.perf_counter()
            encrypted = self._encrypt(first, rows[first : first + _STEP_ROWS])
            if committed is not None:
                committed.add(first, encrypted)
            packed = pack(encrypted)
            encrypt_s += time.perf_counter() - begun
            step = max(1, self._limits.chunk_bytes // size)
            for row in range(0, len(packed), step):
                part = packed[row : row + step]
                self._delivery.send_rows(first + row, len(part), part.tobytes())
        self._committed = committed
        self._statistics.add(self._index, encrypt_s=encrypt_s, ciphertexts_up=len(rows), bytes_up=len(rows) * size)
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
            values = self._decrypt_answer()
        finally:
            self.wipe()
        self.waited_s += time.perf_counter() - started
        return finish_outputs(
            self._bundle, self._index, self._scales, np.ascontiguousarray(values.T), bounded, self._statistics
        )

    def wipe(self) -> None:
        """Overwrite the secret."""
        self._sent = True  # nothing can be sent any more
        wipe(self._lanes)

    def _encrypt(self, first: int, x: NDArray[np.float32]) -> NDArray[np.int64]:
        """Encrypt some rows; the first is a multiple of LANES."""
        material = self._material
        out = np.empty(x.shape, np.int64)
        contiguous = np.ascontiguousarray(x)

        def run(group: int) -> None:
            part = slice(group * LANES, min((group + 1) * LANES, len(x)))
            noise = draw_noise((part.stop - part.start) * self._samples).reshape(-1, self._samples)
            products = scratch_array("products", material.ring.degree, LANES)
            evaluations = material.public[first // LANES + group]
            encrypt_rows(
                evaluations, self._lanes, material.tables, noise, contiguous[part], self._scales.scale, products,
                out[part],
            )  # fmt: skip
            wipe(noise, products)

        run_tiles(run, range(-(-len(x) // LANES)))
        return out

    def _check_answer(self, announcement: BlockAnswer, chunks: Iterator[Chunk]) -> list[NDArray[np.uint8]]:
        """Return the answer's rows, packed, in groups of LANES but for the last, all of it received and checked."""
        wire_s = max(0.0, time.perf_counter() - self._sent_at - announcement.compute_s)
        self._statistics.add(self._index, server_s=announcement.compute_s, wire_s=wire_s)
        modulus, expected = self._material.ring.modulus, len(self._material.scale)
        size = packed_bytes(self._samples)
        groups: list[NDArray[np.uint8]] = []
        answered = None if self._check is None else RowSums(self._check.down, self._samples, modulus)
        check_s, found = 0.0, 0
        for data in self._row_groups(chunks, size):
            begun = time.perf_counter()
            packed = np.frombuffer(data, np.uint8).reshape(-1, size)
            if found + len(packed) > expected:
                raise RemoteProtocolError(f"expected {expected} rows, found more")
            residues = unpack(packed, self._samples, modulus)  # without a check too: they must be below q
            if answered is not None:
                answered.add(found, residues)
            groups.append(packed)
            found += len(packed)
            check_s += time.perf_counter() - begun
        if found != expected:
            raise RemoteProtocolError(f"expected {expected} rows, found {found}")
        if answered is not None and not answered.equals(self._committed):
            raise forged_answer(self._index)
        self._statistics.add(self._index, check_s=check_s, decrypt_s=check_s)
        return groups

    def _decrypt_answer(self) -> NDArray[np.float32]:
        groups = self._delivery.accept(self._check_answer)
        begun = time.perf_counter()
        modulus = self._material.ring.modulus
        values = np.empty((len(self._material.scale), self._samples), np.float32)
        first = 0
        for packed in groups:
            self._decrypt(first, unpack(packed, self._samples, modulus), values[first : first + len(packed)])
            first += len(packed)
        self._statistics.add(self._index, decrypt_s=time.perf_counter() - begun)
        return values

    def _row_groups(self, chunks: Iterator[Chunk], size: int) -> Iterator[bytes]:
        """Yield the answer's rows, a whole number of groups of LANES at a time."""
        pending = bytearray()
        for chunk in chunks:
            pending += chunk.data
            self._statistics.add(self._index, ciphertexts_down=chunk.rows, bytes_down=len(chunk.data))
            whole = len(pending) // (size * _STEP_ROWS) * size * _STEP_ROWS
            if whole:
                yield bytes(pending[:whole])
                del pending[:whole]
        if pending:
            yield bytes(pending)

    def _decrypt(self, first: int, y: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Decrypt some rows; the first is a multiple of LANES."""
        material = self._material

        def run(group: int) -> None:
            part = slice(group * LANES, min((group + 1) * LANES, len(y)))
            own = slice(first + part.start, first + part.stop)
            products = scratch_array("products", material.ring.degree, LANES)
            evaluations = material.hints[first // LANES + group]
            decrypt_rows(
                evaluations, self._lanes, material.tables, y[part], self._scales.scale, material.scale[own],
                material.bias[own], products, out[part],
            )  # fmt: skip
            wipe(products)

        run_tiles(run, range(-(-len(y) // LANES)))
