"""How much the linear maps of a deep block are, before any of them runs: what forecasts rest on.

    block, its matrices, workers --> the units that would run --> multiply-adds, residues read, files, memory

Cuts and groups are those of an evaluation, so counts are exact; memory is what `heinfer.server.polynomial` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from numpy.typing import NDArray

from heinfer.plan.deep import DeepBlock
from heinfer.plan.deep_work import LinearWork
from heinfer.server.polynomial.files import stored_bytes
from heinfer.server.polynomial.matrices import Matrix
from heinfer.server.polynomial.processes import READ_BYTES
from heinfer.server.polynomial.units import UNIT_BYTES, Schedule, key_shape

_POLYNOMIALS: Final = 2
#: A worker with its programs.
_WORKER_BYTES: Final = 150 * 10**6
#: Times that a worker holds keys: as residues, and as SEAL has them.
_KEYS_HELD: Final = 2


def linear_work(block: DeepBlock, arrays: Mapping[str, NDArray[Any]], workers: int) -> LinearWork:
    """Count the linear maps of a block.

    Args:
        block: the block.
        arrays: its layers' arrays.
        workers: processes that share the units.

    Raises:
        PlanError: arrays don't fit.
    """
    block.check_arrays(arrays)
    schedule = Schedule(block, arrays, workers)
    degree = block.chain.degree
    products = moved = count = 0
    for step in schedule.steps:
        layer = block.layers[step.first]
        matrix, polynomials = Matrix(layer, arrays), degree * _POLYNOMIALS * layer.primes
        moved += prod(step.shape)
        for unit in schedule.units(step):
            count += 1
            for group in matrix.group(unit.rows):
                rows, columns = group.weights.shape
                products += polynomials * rows * columns
                moved += polynomials * (rows + columns)
    weights = sum(array.nbytes for array in block.own_arrays(arrays).values())
    each = _WORKER_BYTES + weights + _KEYS_HELD * stored_bytes(key_shape(block))
    return LinearWork(
        products=products,
        moved=moved,
        units=count,
        scratch_bytes=schedule.peak_bytes,
        memory_bytes=workers * each + UNIT_BYTES + READ_BYTES,
        kept=frozenset(step.layer for step in schedule.steps),
    )
