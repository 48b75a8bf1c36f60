"""Exact products of integer matrices with residues, on float64 BLAS.

Worked example: 512 outputs, 4608 inputs, 784 columns take about twice as long as the same product in the clear. Every
residue r = h * 2**25 + l is split into two limbs below 2**25, one float64 product covers the limbs of all columns, and
one pass joins the two results modulo q.

Formal guarantee. `ModularMatrix` cuts its inputs into chunks in which every row's sum of |weight| is at most 2**28 - 1.
Every partial sum of a limb product is then an integer below 2**53 in magnitude, hence exact in float64 whatever the
order of summation, with or without FMA; `heinfer.ring.packing.join_limbs` proves the rest. BLAS must be a classical one
(no Strassen, no emulated float64) and kernels never use fastmath; `self_test` checks the machine at the extremes.
"""

from __future__ import annotations

import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.processes import core_count
from heinfer.ring.packing import check_array, join_into, scratch_array, split_into
from heinfer.ring.parameters import ROW_SUM_LIMIT, WEIGHT_LIMIT, RingParameters, checked_weights, cut_inputs

Tile = TypeVar("Tile")
Floats: TypeAlias = NDArray[np.float64]

_ITEM_BYTES: Final = 8

#: Multiply-adds of limbs below which handing work to another thread costs more than it saves (about 0.2 ms).
THREADED_WORK: Final = 8_000_000

#: OpenBLAS multiplies without repacking its operands up to this many multiply-adds (interface/gemm.c, small matrix
#: optimisation); above, repacking the weights is a cost per call, so tiles should be wide.
_SMALL_PRODUCT: Final = 1_000_000

# Sizes of tiles, measured with benchmarks/modular_product.py: fewest and most columns (more where the weights are many
# and repacking them counts), fewest rows, and most bytes of limbs, which every thread keeps.
_NARROW, _WIDE, _WIDEST = 64, 512, 1024
_MANY_WEIGHTS, _TILE_ROWS, _TILE_BYTES = 2**20, 64, 64 * 2**20


_pool: list[ThreadPoolExecutor] = []
if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.clear)


def run_tiles(
    function: Callable[[Tile], object], tiles: Sequence[Tile], *, work: float | None = None, threads: int | None = None
) -> None:
    """Call a function on every tile, on all cores where that pays; returns when all are done.

    The calling thread takes tiles too and never waits for a helper that has not started, so nested and concurrent
    calls cannot deadlock. Threads run at the same time only while the function is outside the GIL (BLAS, kernels).

    Args:
        function: called once per tile, in any order, from any thread.
        tiles: what it is called with.
        work: multiply-adds of all tiles; below `THREADED_WORK` the calling thread does everything. None: large.
        threads: most threads to use; None: the cores of this process.

    Raises:
        Exception: the first one of the function that was noticed; tiles that have not started are dropped, and none is
            being worked on any more.
    """
    helpers = min(core_count() if threads is None else threads, len(tiles)) - 1
    if helpers < 1 or (work is not None and work < THREADED_WORK):
        for tile in tiles:
            function(tile)
        return
    pending = deque(tiles)
    changed = threading.Condition()
    active = 0

    def drain() -> None:
        nonlocal active
        while True:
            with changed:
                if not pending:
                    return
                tile = pending.popleft()
                active += 1
            try:
                function(tile)
            except BaseException:
                with changed:
                    pending.clear()
                raise
            finally:
                with changed:
                    active -= 1
                    changed.notify_all()

    if not _pool:
        _pool.append(ThreadPoolExecutor(core_count(), thread_name_prefix="heinfer-tile"))
    futures: list[Future[None]] = []
    try:
        for _ in range(helpers):
            futures.append(_pool[0].submit(drain))
        drain()
    except BaseException:
        with changed:
            pending.clear()
        raise
    finally:
        for future in futures:
            future.cancel()
        _wait_whatever_comes(changed, lambda: active == 0)
    for future in futures:
        if not future.cancelled():
            future.result()


def _wait_whatever_comes(condition: threading.Condition, reached: Callable[[], bool]) -> None:
    """Wait, and raise an interruption only when what was waited for is reached: callers wipe and reuse memory then."""
    interruption: BaseException | None = None
    while True:
        try:
            with condition:
                condition.wait_for(reached)
            break
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption


class ModularMatrix:
    """An integer matrix that multiplies residues modulo q, exactly. Immutable and safe to share between threads.

    Attributes:
        parameters: ring whose modulus is used.
        outputs: number of rows.
        inputs: number of columns.
        row_sum: largest sum of |weight| over a whole row.
        chunks: slices that cut the inputs: no row of a chunk sums to more than `ROW_SUM_LIMIT`.
    """

    __slots__ = ("_weights", "chunks", "inputs", "outputs", "parameters", "row_sum")

    parameters: RingParameters
    outputs: int
    inputs: int
    row_sum: int
    chunks: tuple[slice, ...]
    _weights: NDArray[np.float64]

    def __init__(self, weights: NDArray[Any], parameters: RingParameters) -> None:
        """Check and copy the weights: integers as float64 or any integer type, shape (outputs, inputs).

        Raises:
            ParameterError: wrong shape or type, or a weight that is not an integer or is above `WEIGHT_LIMIT`.
        """
        checked = checked_weights(weights)
        magnitudes = np.abs(checked)
        row_sum = int(magnitudes.sum(axis=1).max(initial=0.0))
        sizes = {"outputs": checked.shape[0], "inputs": checked.shape[1], "row_sum": row_sum}
        values = {"parameters": parameters, "chunks": cut_inputs(magnitudes), "_weights": checked, **sizes}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: the checks of the constructor would no longer hold."""
        raise AttributeError(f"ModularMatrix is immutable; cannot set {name}")

    @property
    def weights(self) -> NDArray[np.float64]:
        """The integers, shape (outputs, inputs), read-only: for operators that multiply in another orientation."""
        return self._weights

    def multiply(
        self, residues: NDArray[np.int64], out: NDArray[np.int64] | None = None, *, threads: int | None = None
    ) -> NDArray[np.int64]:
        """Multiply residues by the matrix, modulo q.

        The range of the residues is not checked here: data from outside are checked where they are unpacked
        (`heinfer.ring.packing.unpack`). Residues outside [0, 2**50) give wrong results.

        Args:
            residues: int64 in [0, q), shape (inputs, columns), any strides.
            out: int64, shape (outputs, columns), unit last stride, not overlapping; made here where None.
            threads: most threads to use; None: the cores of this process.

        Returns:
            Residues in [0, q), shape (outputs, columns): `out` where it was given.

        Raises:
            ParameterError: wrong shape, type or strides.
        """
        check_array("residues", residues, np.int64, (self.inputs, None))
        columns = residues.shape[1]
        result = np.empty((self.outputs, columns), np.int64) if out is None else out
        check_array("out", result, np.int64, (self.outputs, columns), unit_stride=True)
        source = np.ascontiguousarray(residues)

        def run(tile: tuple[slice, slice]) -> None:
            rows, span = tile
            width = 2 * (span.stop - span.start)
            scratch = scratch_array("product", rows.stop - rows.start, width)
            for chunk in self.chunks:
                limbs = scratch_array("limbs", chunk.stop - chunk.start, width)
                split_into(source[chunk], span.start, limbs)
                self._multiply_chunk(chunk, limbs, result[rows, span], scratch, rows)

        if self.inputs == 0:
            result[...] = 0
        else:
            run_tiles(run, self._tiles(columns, threads), work=self._work(columns), threads=threads)
        return result

    def multiply_limbs(
        self, limbs: NDArray[np.float64], out: NDArray[np.int64], scratch: NDArray[np.float64] | None = None
    ) -> None:
        """Multiply residues that are split already, on the calling thread: for operators that gather and split at once.

        Layout: `limbs[k, c]` is the upper limb of residue (k, c) and `limbs[k, columns + c]` its lower limb, as
        `split_into`, `high_limb` and `low_limb` make them; rows are contiguous.

        Args:
            limbs: float64 integers in [0, 2**25), shape (inputs, 2 * columns), unit last stride. Not checked for range.
            out: int64, shape (outputs, columns), unit last stride; rows may be apart. Overwritten.
            scratch: float64, shape (outputs, 2 * columns), unit last stride; lent by this thread where None.

        Raises:
            ParameterError: wrong shape, type or strides.
        """
        check_array("out", out, np.int64, (self.outputs, None), unit_stride=True)
        width = 2 * out.shape[1]
        check_array("limbs", limbs, np.float64, (self.inputs, width), unit_stride=True)
        if scratch is None:
            scratch = scratch_array("product", self.outputs, width)
        check_array("scratch", scratch, np.float64, (self.outputs, width), unit_stride=True)
        if self.inputs == 0:
            out[...] = 0
        for chunk in self.chunks:
            self._multiply_chunk(chunk, limbs[chunk], out, scratch, slice(0, self.outputs))

    def column_tiles(self, columns: int, threads: int | None = None) -> list[slice]:
        """Cut columns into tiles that suit the cache, BLAS and the number of threads (None: cores of this process).

        Returns:
            Slices that cover all columns in order, none empty; as a rule a multiple of `threads` where work is plenty.
        """
        longest = max((chunk.stop - chunk.start for chunk in self.chunks), default=1)
        small = _SMALL_PRODUCT // (2 * max(1, self.outputs) * longest)
        width = _WIDEST if self._weights.size >= _MANY_WEIGHTS else _WIDE
        if small >= 2 * _NARROW:
            width = min(width, small)
        fitting = max(_NARROW, _TILE_BYTES // (2 * _ITEM_BYTES * longest))
        count = -(-columns // min(width, fitting))
        workers = core_count() if threads is None else threads
        if self._work(columns) >= THREADED_WORK:
            count = max(min(-(-count // workers) * workers, columns // _NARROW), 1)
        return even_slices(columns, count)

    def _tiles(self, columns: int, threads: int | None) -> list[tuple[slice, slice]]:
        """Tiles of (rows, columns): rows are cut only where there are too few columns for all threads."""
        spans = self.column_tiles(columns, threads)
        workers = core_count() if threads is None else threads
        cuts = 1
        if len(spans) < workers and self._work(columns) >= THREADED_WORK:
            cuts = max(min(-(-workers // max(1, len(spans))), self.outputs // _TILE_ROWS), 1)
        return [(rows, span) for rows in even_slices(self.outputs, cuts) for span in spans]

    def _work(self, columns: int) -> int:
        """Multiply-adds of limbs."""
        return 2 * self.outputs * self.inputs * columns

    def _multiply_chunk(
        self, chunk: slice, limbs: Floats, out: NDArray[np.int64], scratch: Floats, rows: slice
    ) -> None:
        """Multiply one chunk of inputs, for some rows: the first chunk overwrites `out`, the others add to it."""
        weights = self._weights[rows, chunk]
        if limbs.shape[1] == 2:  # BLAS multiplies by two vectors faster than by a matrix of two columns
            scratch[:, 0] = weights @ limbs[:, 0]
            scratch[:, 1] = weights @ limbs[:, 1]
        else:
            np.matmul(weights, limbs, out=scratch)
        join_into(scratch, out, self.parameters.modulus, chunk.start > 0)


def even_slices(length: int, count: int) -> list[slice]:
    """Cut [0, length) into at most `count` slices, of equal length up to rounding to cache lines of 8 elements."""
    step = max(8, -(-length // (8 * max(1, count))) * 8)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def multiply_mod_reference(weights: NDArray[Any], residues: NDArray[np.int64], modulus: int) -> NDArray[np.int64]:
    """Multiply with Python integers: the oracle of tests and of `self_test`, slow and obviously right.

    Args:
        weights: integers of any numeric type, shape (outputs, inputs).
        residues: int64, shape (inputs, columns).
        modulus: any positive integer below 2**63.

    Returns:
        int64 residues in [0, modulus), shape (outputs, columns).
    """
    left = [[int(weight) for weight in row] for row in weights.tolist()]
    columns = [[int(residue) for residue in column] for column in residues.T.tolist()]
    products = [[sum(map(operator.mul, row, column)) % modulus for column in columns] for row in left]
    return np.array(products, dtype=np.int64).reshape(weights.shape[0], residues.shape[1])


def self_test(parameters: RingParameters) -> None:
    """Check this machine's arithmetic at the extremes against Python integers; takes some 20 ms once compiled.

    Rows sum to exactly `ROW_SUM_LIMIT` in each of two chunks, with one sign, the other, and both; residues are q - 1,
    both limbs full, and arbitrary ones.

    Args:
        parameters: ring to test.

    Raises:
        ParameterError: a product is wrong.
    """
    modulus = parameters.modulus
    full, rest = divmod(ROW_SUM_LIMIT, WEIGHT_LIMIT)
    row = np.full(2 * (full + 1), WEIGHT_LIMIT)
    row[[full, -1]] = rest
    signs = np.where(np.arange(row.size) % 2 == 0, 1, -1)
    matrix = ModularMatrix(np.stack([row, -row, signs * row]), parameters)
    scattered = np.arange(row.size) * 0x9E3779B97F4A7 % modulus  # Fibonacci hashing: spread over the whole range
    columns = np.stack([np.full(row.size, modulus - 1), np.full(row.size, modulus // 2), scattered], axis=1)
    expected = multiply_mod_reference(matrix._weights, columns, modulus)
    for copies in (1, 4):
        if not np.array_equal(matrix.multiply(np.tile(columns, copies)), np.tile(expected, copies)):
            raise ParameterError(
                f"self-test: expected exact products modulo {modulus}, found wrong ones: the BLAS that numpy uses here "
                "is not a classical IEEE float64 one; install numpy from its official wheels"
            )
