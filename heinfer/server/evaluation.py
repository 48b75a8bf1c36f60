"""Evaluate blocks on ciphertexts: integer weights times residues, no keys.

    packed rows (b | a) --> residues (rows, samples + N) --> program --> residues --> packed rows

b and a are acted on alike, so they lie side by side as more samples of one tensor. Programs want samples first, so
residues are transposed on the way in and out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import CiphertextError
from heinfer.operators.backends import Backend, LoadedProgram, NativeBackend
from heinfer.plan import ServerBundle
from heinfer.ring import even_slices, pack, packed_bytes, run_tiles, self_test, transpose_into, unpack
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.server.polynomial.resources import DeepResources
from heinfer.server.prepared import PreparedBlocks, SharedMerger

#: Residues per tile of a transposition.
_TILE_RESIDUES = 1 << 17


class BlockEvaluator:
    """All blocks of a plan, ready to run; safe to use from several threads.

    Args:
        bundle: the server's folder.
        merger: runs requests in prepared mode, of other plans too; None: of this one alone.
        resources: of deep blocks, shared with other plans; None: of this one alone.
        backend: where products are made, those of deep blocks aside; None: natively.

    Raises:
        ParameterError: this machine's arithmetic is not exact.
        InputError: weights do not fit into the backend's memory.
    """

    def __init__(
        self,
        bundle: ServerBundle,
        merger: SharedMerger | None = None,
        resources: DeepResources | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.bundle = bundle
        self._parameters = bundle.plan.ring.parameters
        self_test(self._parameters)
        self._backend = backend or NativeBackend()
        self._programs: dict[int, LoadedProgram] = {}
        self.prepared = PreparedBlocks(bundle, merger, self._backend) if bundle.plan.has_prepared_mode else None
        self._resources = resources or DeepResources()
        self._deep: dict[int, DeepEvaluator] = {}
        self._deep_lock = threading.Lock()

    def deep(self, index: int) -> DeepEvaluator:
        """Return what evaluates a deep block, made when it is first needed."""
        with self._deep_lock:
            if index not in self._deep:
                self._deep[index] = DeepEvaluator(self.bundle.plan.deep[index], self.bundle.arrays, self._resources)
            return self._deep[index]

    def check_room(self) -> None:
        """Check that a request for each deep block fits on the disk if it is alone.

        Raises:
            InputError: one does not, which no node can change.
        """
        for index in range(len(self.bundle.plan.deep)):
            self._resources.space.check(self.deep(index).scratch_bytes)

    def stop(self) -> None:
        """End what runs for deep blocks, which may take hours; blocks of one layer end by themselves."""
        self._resources.stop()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Run blocks once on zeros, so that kernels are compiled before the first request.

        In a plan with prepared mode these are the blocks as prepared mode has them; their kernels are the same.

        Args:
            progress: called with (blocks done, blocks).
        """
        blocks = self.bundle.plan.blocks
        for index, block in enumerate(blocks):
            if self.prepared is not None:
                self.prepared.warm_up(index)
            else:
                self.evaluate(index, np.zeros((block.input_rows, 32), np.int64))
            if progress is not None:
                progress(index + 1, len(blocks))

    def evaluate(self, block: int, residues: NDArray[np.int64]) -> NDArray[np.int64]:
        """Evaluate a block on rows of ciphertexts, as standard mode and batches have them.

        Args:
            block: index into the plan's blocks.
            residues: int64 in [0, q), shape (input rows, columns).

        Returns:
            int64 in [0, q), shape (output rows, columns).

        Raises:
            PlanError: somebody has written to the file of weights.
        """
        self.bundle.check_unchanged()
        return _transposed(self._program(block).evaluate_joined(_transposed(residues)))

    def _program(self, block: int) -> LoadedProgram:
        """Return a block's program, made when it is first needed: a server in prepared mode holds weights once."""
        found = self._programs.get(block)
        if found is None:
            program = self.bundle.plan.blocks[block].program
            found = self._backend.load(program, self.bundle.arrays, self._parameters)
            self._programs[block] = found
        return found


def _transposed(source: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the transpose, C-contiguous, made on all cores."""
    rows = np.ascontiguousarray(source)
    out = np.empty(rows.shape[::-1], np.int64)
    tiles = even_slices(rows.shape[1], rows.size // _TILE_RESIDUES)
    run_tiles(lambda span: transpose_into(rows, span.start, span.stop, out), tiles)
    return out


class Upload:
    """Rows of one request as they arrive, unpacked and checked at once.

    Args:
        rows: how many will come.
        samples: coefficients of b that carry values.
        degree: N.
        modulus: q.
    """

    def __init__(self, rows: int, samples: int, degree: int, modulus: int) -> None:
        self._samples, self._degree, self._modulus = samples, degree, modulus
        self._head = packed_bytes(samples)
        self.residues = np.empty((rows, samples + degree), np.int64)

    def add(self, first_row: int, rows: int, data: bytes) -> None:
        """Take packed rows.

        Raises:
            CiphertextError: a residue is not below q, or the size is wrong.
        """
        if len(data) != rows * (self._head + packed_bytes(self._degree)):
            raise CiphertextError(f"{rows} rows announced, {len(data)} bytes found")
        packed = np.frombuffer(data, np.uint8).reshape(rows, -1)
        target = self.residues[first_row : first_row + rows]
        target[:, : self._samples] = unpack(packed[:, : self._head], self._samples, self._modulus)
        target[:, self._samples :] = unpack(packed[:, self._head :], self._degree, self._modulus)


def pack_rows(residues: NDArray[np.int64], samples: int, step: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (first row, rows, bytes) for an answer, `step` rows at a time."""
    for first in range(0, len(residues), step):
        part = residues[first : first + step]
        packed = np.concatenate([pack(part[:, :samples]), pack(part[:, samples:])], axis=1)
        yield first, len(part), packed.tobytes()
