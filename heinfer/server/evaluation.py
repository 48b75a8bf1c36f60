"""Evaluate blocks on ciphertexts: integer weights times residues, no keys.

    packed rows (b | a) --> residues (rows, samples + N) --> program --> residues --> packed rows

b and a are acted on alike, so they lie side by side as more samples of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import CiphertextError
from heinfer.operators import ResidueProgram
from heinfer.plan import ServerBundle
from heinfer.ring import pack, packed_bytes, self_test, unpack


class BlockEvaluator:
    """All blocks of a plan, ready to run; safe to use from several threads.

    Args:
        bundle: the server's folder.

    Raises:
        ParameterError: this machine's arithmetic is not exact.
    """

    def __init__(self, bundle: ServerBundle) -> None:
        self.bundle = bundle
        self._parameters = bundle.plan.ring.parameters
        self_test(self._parameters)
        self._programs = [ResidueProgram(b.program, bundle.arrays, self._parameters) for b in bundle.plan.blocks]

    def warm_up(self) -> None:
        """Run every block once on zeros, so that kernels are compiled before the first request."""
        for index, block in enumerate(self.bundle.plan.blocks):
            self.evaluate(index, np.zeros((block.input_rows, 32), np.int64))

    def evaluate(self, block: int, residues: NDArray[np.int64]) -> NDArray[np.int64]:
        """Evaluate a block.

        Args:
            block: index into the plan's blocks.
            residues: int64 in [0, q), shape (input rows, columns).

        Returns:
            int64 in [0, q), shape (output rows, columns).
        """
        program = self._programs[block]
        columns = residues.shape[1]
        inputs, first = [], 0
        for shape in program.program.inputs:
            rows = residues[first : first + prod(shape)]
            inputs.append(np.moveaxis(rows.reshape(*shape, columns), -1, 0))
            first += prod(shape)
        outputs = program.evaluate(inputs)
        parts = [np.moveaxis(y, 0, -1).reshape(-1, columns) for y in outputs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
