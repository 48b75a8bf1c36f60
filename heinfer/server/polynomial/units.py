"""In which order the layers of a deep block run, and cut into which pieces.

    layer 0: 1152 squares | layer 1: sums of four, read alone     one step: layer 1, layer 0 first, 288 sums in 36 units
    layer 2: reads the sums, the inputs                           another step; then the files of both are removed

What a step keeps lies in a file, so the files that are there at any time, and their peak, follow from the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from numpy.typing import NDArray

from heinfer.plan.deep import DeepBlock, Layer
from heinfer.server.polynomial.files import stored_bytes
from heinfer.server.polynomial.matrices import Matrix

#: Ciphertexts that the units of all workers hold at a time.
UNIT_BYTES: Final = 512 * 2**20
#: Units of a layer for every worker, so that all of them have work until the end.
_UNITS_EACH: Final = 2
_POLYNOMIALS: Final = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that run together: of a layer, and of the sum that follows it, none where none does."""

    layer: int
    rows: tuple[int, ...]
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A layer whose result is kept.

    Attributes:
        layer: its number.
        first: of the layer that is computed first: the one before where this one adds up what nothing else reads.
        shape: of its result.
        unneeded: values that nothing reads after it; those of them that are in files are removed.
    """

    layer: int
    first: int
    shape: tuple[int, int, int, int]
    unneeded: frozenset[int]


class Schedule:
    """The steps of a block, for a number of workers.

    Args:
        block: the block.
        arrays: its layers' arrays.
        workers: that share `UNIT_BYTES`.

    Attributes:
        steps: in order.
        peak_bytes: that inputs, keys and values take at most, all in files.
    """

    def __init__(self, block: DeepBlock, arrays: Mapping[str, NDArray[Any]], workers: int) -> None:
        self._block = block
        self._workers = max(1, workers)
        self._matrices = [Matrix(layer, arrays) for layer in block.layers]
        self.steps = tuple(self._make_steps())
        self.peak_bytes = self._find_peak()

    def units(self, step: Step) -> list[Unit]:
        """Cut a step into units."""
        matrix, layer = self._matrices[step.layer], self._block.layers[step.layer]
        if step.first != step.layer:
            return self._summed_units(step)
        order = sorted(range(layer.rows), key=lambda r: matrix.columns(r).tolist())
        most = self._most(layer)
        return [Unit(step.layer, tuple(order[i : i + most])) for i in range(0, len(order), most)]

    def _summed_units(self, step: Step) -> list[Unit]:
        matrix, below = self._matrices[step.layer], self._matrices[step.first]
        most = self._most(self._block.layers[step.first])
        order = sorted(
            range(self._block.layers[step.layer].rows),
            key=lambda r: below.columns(int(matrix.columns(r)[0])).tolist(),
        )
        units, sums, rows = list[Unit](), list[int](), dict[int, None]()
        for row in order:
            needed = [int(c) for c in matrix.columns(row)]
            if rows and len(rows) + len(needed) > most:
                units.append(Unit(step.first, tuple(rows), tuple(sums)))
                sums, rows = [], {}
            sums.append(row)
            rows.update(dict.fromkeys(needed))
        return [*units, Unit(step.first, tuple(rows), tuple(sums))]

    def _most(self, layer: Layer) -> int:
        """Return how many rows of a layer one unit holds."""
        row = stored_bytes((_POLYNOMIALS, layer.primes, self._block.chain.degree))
        fitting = UNIT_BYTES // (self._workers * row)
        return max(1, min(fitting, -(-layer.rows // (_UNITS_EACH * self._workers))))

    def _make_steps(self) -> Iterator[Step]:
        block = self._block
        for number, layer in enumerate(block.layers):
            if self._fused(number):
                continue
            first = number - 1 if number and self._fused(number - 1) else number
            shape = (layer.rows, _POLYNOMIALS, layer.primes_left, block.chain.degree)
            needed = {s for following in block.layers[number + 1 :] for s in following.sources} | set(block.results)
            values = range(len(block.inputs) + number + 1)
            yield Step(number, first, shape, frozenset(values) - needed)

    def _fused(self, number: int) -> bool:
        """Whether the result of a layer is read by the next one alone, which adds it up: then it is not kept."""
        layers = self._block.layers
        own = len(self._block.inputs) + number
        readers = [n for n, layer in enumerate(layers) if own in layer.sources]
        if readers != [number + 1] or own in self._block.results or not layers[number].degree:
            return False
        following = layers[number + 1]
        adds = following.kind == "sum" and following.sources == (own,)
        return adds and following.primes == layers[number].primes_left and self._matrices[number + 1].partition

    def _find_peak(self) -> int:
        shapes = input_shapes(self._block)
        held = {value: stored_bytes(shape) for value, shape in enumerate(shapes)}
        keys = stored_bytes(key_shape(self._block))
        peak = keys + sum(held.values())
        for step in self.steps:
            held[len(self._block.inputs) + step.layer] = stored_bytes(step.shape)
            peak = max(peak, keys + sum(held.values()))
            held = {value: size for value, size in held.items() if value not in step.unneeded}
        return peak


def input_shapes(block: DeepBlock) -> Sequence[tuple[int, int, int, int]]:
    """Return the shapes of the residues of every input."""
    return [(prod(t.shape), _POLYNOMIALS, len(block.chain.primes), block.chain.degree) for t in block.inputs]


def key_shape(block: DeepBlock) -> tuple[int, int, int, int]:
    """Return the shape of the residues of relinearisation keys."""
    primes = len(block.chain.primes)
    return primes, _POLYNOMIALS, primes + 1, block.chain.degree
