"""The sparse integer matrix of a layer, and products of some of its rows with residues that lie in files.

rows 3, 4, 7 --(share most of what they read)--> a dense matrix of 3 rows --> times columns read once, prime by prime
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.plan.deep import Layer
from heinfer.ring.chain import ChainMatrix

Residues = NDArray[np.int64]
#: Coefficients of a column that are read at a time, at least: a page of a file.
LEAST_READ: Final = 512
#: Bytes that a coefficient of a column takes meanwhile: as read, as joined with those of other sources, in two limbs.
_COEFFICIENT_BYTES: Final = 32
#: Reading and splitting a residue takes as long as multiplying it by so many weights.
_READ_COST: Final = 24


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a matrix that are multiplied together.

    Attributes:
        positions: of the rows, among those asked for.
        columns: that any of them reads, ascending.
        weights: float64, shape (rows, columns).
    """

    positions: list[int]
    columns: NDArray[np.int64]
    weights: NDArray[np.float64]


class Matrix:
    """The sparse integer matrix of a layer."""

    def __init__(self, layer: Layer, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._pointers = arrays[f"{layer.name}.indptr"]
        self._indices = arrays[f"{layer.name}.indices"]
        self._weights = arrays[f"{layer.name}.weights"]

    def columns(self, row: int) -> NDArray[np.int32]:
        """Return the columns that a row reads."""
        return self._indices[self._pointers[row] : self._pointers[row + 1]]

    @property
    def partition(self) -> bool:
        """Whether every column is in one row at most, with weight 1."""
        return bool(np.all(self._weights == 1)) and len(np.unique(self._indices)) == len(self._indices)

    def group(self, rows: Sequence[int]) -> Iterator[RowGroup]:
        """Yield groups of rows that share most of what they read, as neighbouring windows of a convolution do."""
        alike: dict[bytes, list[int]] = {}
        for position, row in enumerate(rows):
            alike.setdefault(self.columns(row).tobytes(), []).append(position)
        positions: list[int] = []
        columns = np.empty(0, np.int64)
        for more in alike.values():
            own = np.unique(self.columns(rows[more[0]])).astype(np.int64)
            joined = np.union1d(columns, own)
            apart = _cost(len(positions), len(columns)) + _cost(len(more), len(own))
            if positions and _cost(len(positions) + len(more), len(joined)) > apart:
                yield self._dense(rows, positions, columns)
                positions, columns = list(more), own
            else:
                positions, columns = positions + more, joined
        if positions:
            yield self._dense(rows, positions, columns)

    def _dense(self, rows: Sequence[int], positions: list[int], columns: NDArray[np.int64]) -> RowGroup:
        weights = np.zeros((len(positions), len(columns)))
        for place, position in enumerate(positions):
            span = slice(self._pointers[rows[position]], self._pointers[rows[position] + 1])
            np.add.at(weights[place], np.searchsorted(columns, self._indices[span]), self._weights[span])
        return RowGroup(positions, columns, weights)


def _cost(rows: int, columns: int) -> int:
    """Work of a product."""
    return columns * (rows + _READ_COST)


def multiply_group(
    group: RowGroup, sources: Sequence[Residues], primes: Sequence[int], read_bytes: int, out: Residues
) -> None:
    """Multiply the rows of a group.

    Args:
        group: the rows.
        sources: residues of the values that the layer reads, shape (elements, polynomials, primes or more, N).
        primes: of the result.
        read_bytes: that what is read at a time takes, unless `LEAST_READ` coefficients of every column take more.
        out: of all rows asked for, shape (rows, polynomials, primes, N); those of the group are overwritten.
    """
    matrix, columns, degree = ChainMatrix(group.weights), group.columns, out.shape[3]
    bounds = np.cumsum([0, *(len(source) for source in sources)])
    edges = np.searchsorted(columns, bounds)
    own = [columns[a:b] - start for a, b, start in zip(edges, edges[1:], bounds, strict=False)]
    step = min(degree, max(LEAST_READ, read_bytes // (_COEFFICIENT_BYTES * max(1, len(columns)))))
    result = np.empty((len(group.positions), step), np.int64)
    for index, prime in enumerate(primes):
        for polynomial in range(out.shape[1]):
            for start in range(0, degree, step):
                span = slice(start, min(start + step, degree))
                read = [s[c, polynomial, index, span] for s, c in zip(sources, own, strict=True) if len(c)]
                part = result[:, : span.stop - start]
                matrix.multiply(read[0] if len(read) == 1 else np.concatenate(read), prime, part)
                out[group.positions, polynomial, index, span] = part
