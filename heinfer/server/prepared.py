"""Prepared mode: the ordinary operator on a tensor of residues of the input's own shape.

    packed b (samples, values up) --> residues --> program --> residues (samples, values down) --> packed

Only b travels: a is fixed, and what becomes of it is the node's business. Several uploads of a block that wait together
are evaluated in one product.
"""

from __future__ import annotations

import threading
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import CiphertextError
from heinfer.operators.backends import Backend, NativeBackend
from heinfer.plan import ServerBundle
from heinfer.ring import pack, packed_bytes, unpack
from heinfer.server.merging import Merger

Residues = NDArray[np.int64]
#: Samples that `warm_up` tries: kernels compile once for all, and BLAS gets its buffers.
_WARM_UP_SAMPLES = (1, 2)


SharedMerger: TypeAlias = "Merger[tuple[PreparedBlocks, int]]"


def shared_merger(slots: int | None = None) -> SharedMerger:
    """Return a merger for the blocks of several plans.

    Args:
        slots: evaluations at a time; None: what native products are worth.
    """
    slots = NativeBackend().slots if slots is None else slots
    return Merger(lambda block, residues: block[0].run(block[1], residues), slots)


class PreparedBlocks:
    """All blocks of a plan with prepared mode, ready to run; safe to use from several threads.

    Args:
        bundle: the server's folder.
        merger: runs requests of other plans too; None: of this one alone.
        backend: where products are made; None: natively.
    """

    def __init__(
        self, bundle: ServerBundle, merger: SharedMerger | None = None, backend: Backend | None = None
    ) -> None:
        self._ring = bundle.plan.ring.parameters
        self._bundle = bundle
        backend = backend or NativeBackend()
        forms = [form for form in bundle.forms if form is not None]
        self._programs = [backend.load(f.program, {**bundle.arrays, **f.arrays}, self._ring) for f in forms]
        programs = [form.program for form in forms]
        self._values = [(sum(map(prod, p.inputs)), sum(map(prod, p.output_shapes))) for p in programs]
        self._merger = merger or shared_merger(backend.slots)
        self._counting = threading.Lock()
        self._products = 0

    def warm_up(self, block: int) -> None:
        """Run a block on zeros, so that the first query finds everything compiled."""
        for samples in _WARM_UP_SAMPLES:
            self._run(block, np.zeros((samples, self.values(block)[0]), np.int64))

    @property
    def products(self) -> int:
        """Products so far; requests that waited together shared one."""
        return self._products

    def values(self, block: int) -> tuple[int, int]:
        """Return the residues of one sample, up and down."""
        return self._values[block]

    def evaluate(self, block: int, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Evaluate a block.

        Args:
            block: index.
            packed: b of every sample, shape (samples, packed bytes of the values up).

        Returns:
            Packed answers, shape (samples, packed bytes of the values down).

        Raises:
            CiphertextError: a residue is not below q.
            PlanError: somebody has written to the file of weights.
        """
        self._bundle.check_unchanged()
        up, _ = self.values(block)
        return pack(self._merger.evaluate((self, block), unpack(packed, up, self._ring.modulus)))

    def run(self, block: int, residues: Residues) -> Residues:
        """Evaluate a block on residues of shape (samples, values up), for the merger."""
        with self._counting:
            self._products += 1
        return self._run(block, residues)

    def _run(self, block: int, residues: Residues) -> Residues:
        return self._programs[block].evaluate_joined(residues)


class Collector:
    """The bytes of one request as they arrive, in order; what comes in one piece is not copied.

    Args:
        size: bytes that will come.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[bytes] = []
        self._found = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            CiphertextError: more than announced.
        """
        self._found += len(data)
        if self._found > self._size:
            raise CiphertextError(f"{self._size} bytes announced, {self._found} found")
        self._parts.append(data)

    def rows(self, samples: int, values: int) -> NDArray[np.uint8]:
        """Return all bytes, one row a sample.

        Raises:
            CiphertextError: fewer than announced.
        """
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if len(data) != samples * packed_bytes(values):
            raise CiphertextError(f"{samples * packed_bytes(values)} bytes expected, {len(data)} found")
        return np.frombuffer(data, np.uint8).reshape(samples, -1)
