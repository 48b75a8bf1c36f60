"""Tensors inside a deep block: affine in atoms, which are what has a ciphertext of its own.

    atoms     the block's inputs, results of activations, sums of these (pooling)
    tensor    sum over atoms of a matrix times the atom's value, and a constant

Matrices are found by running what makes a tensor on unit vectors, so no operator needs to be known here. Units are as
long as it takes for constants to weigh nothing beside them, since some operators run in float32:

    0.003 x + 1e6 at x = 1       1000000 in float32, whose last digit is 0.06: less 1e6, nothing is left of 0.003
    0.003 x + 1e6 at x = 2**50   less 1e6 and divided by 2**50: 0.003 as float32 has it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from math import frexp
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import Offence, UnsupportedModelError

Floats = NDArray[np.float64]
#: Elements of one matrix: 1 GiB in float64.
LARGEST_MATRIX: Final = 1 << 27
#: Unit vectors that run together.
_BATCH_ELEMENTS: Final = 1 << 24
#: Bits that a unit has above the largest constant; float32 has 24. And the longest unit: float32 ends at 2**128.
_UNIT_BITS: Final = 30
_LONGEST_UNIT_BITS: Final = 96


@dataclass(frozen=True, slots=True)
class Affine:
    """A tensor, flattened.

    Attributes:
        shape: of the tensor, batch aside.
        matrices: by atom, shape (elements, elements of the atom).
        constant: shape (elements,).
    """

    shape: tuple[int, ...]
    matrices: Mapping[int, Floats]
    constant: Floats

    @classmethod
    def of_atom(cls, atom: int, shape: tuple[int, ...]) -> Affine:
        """Return an atom itself."""
        size = int(np.prod(shape))
        check_size(f"value {atom}", size, size)
        return cls(shape, {atom: np.eye(size)}, np.zeros(size))

    @property
    def atom(self) -> int | None:
        """The atom that this is, None where it is something else."""
        if len(self.matrices) != 1 or self.constant.any():
            return None
        number, matrix = next(iter(self.matrices.items()))
        same = matrix.shape[0] == matrix.shape[1] and np.array_equal(matrix, np.eye(len(matrix)))
        return number if same else None

    def through(self, matrix: Floats, constant: Floats, shape: tuple[int, ...]) -> Affine:
        """Return a matrix times this tensor, plus a constant."""
        made = {atom: matrix @ inner for atom, inner in self.matrices.items()}
        return Affine(shape, made, matrix @ self.constant + constant)

    def scaled(self, factor: Floats, constant: Floats) -> Affine:
        """Return this tensor times a factor an element, plus a constant."""
        made = {atom: factor[:, None] * inner for atom, inner in self.matrices.items()}
        return Affine(self.shape, made, factor * self.constant + constant)

    def plus(self, other: Affine) -> Affine:
        """Return the sum of two tensors of one size."""
        made = dict(self.matrices)
        for atom, matrix in other.matrices.items():
            made[atom] = made[atom] + matrix if atom in made else matrix
        return Affine(self.shape, made, self.constant + other.constant)


def check_size(name: str, rows: int, columns: int) -> None:
    """Raise UnsupportedModelError where a matrix would be too large."""
    if rows * columns > LARGEST_MATRIX:
        raise UnsupportedModelError(
            "a block of several layers is too large:",
            [Offence(name, "layer", f"{rows} x {columns} elements, and {LARGEST_MATRIX} are possible; use a smaller "
                     "--block-depth")],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearMap:
    """An affine operator: the shape of its result, a matrix for every operand, and a constant, shape (elements,)."""

    shape: tuple[int, ...]
    matrices: Mapping[str, Floats]
    constant: Floats

    def apply(self, operands: Mapping[str, Affine]) -> Affine:
        """Return what it makes of tensors."""
        parts = [operands[key].through(m, np.zeros(len(m)), self.shape) for key, m in self.matrices.items()]
        total = reduce(Affine.plus, parts)
        return Affine(self.shape, total.matrices, total.constant + self.constant)


def find_linear(
    name: str, run: Callable[[dict[str, NDArray[Any]]], NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]
) -> LinearMap:
    """Find the matrices of an affine operator.

    Args:
        name: of the operator, for errors.
        run: runs it: arrays (batch, *shape) by name to (batch, *shape).
        shapes: of what it reads, batch aside; something at least.
    """
    zeros = {key: np.zeros((1, *shape)) for key, shape in shapes.items()}
    constant = run(zeros)
    base = constant.astype(np.float64).reshape(-1)
    unit = _unit(base)
    found = {
        key: _matrix(name, partial(_with_units, run, zeros, key), shape, base, unit) for key, shape in shapes.items()
    }
    return LinearMap(constant.shape[1:], found, base)


def _unit(base: Floats) -> float:
    """Return the length of unit vectors, a power of two: far above the constants, 1 where there are none."""
    largest = float(np.abs(base).max(initial=0.0))
    return 2.0 ** min(_LONGEST_UNIT_BITS, max(0, frexp(largest)[1]) + _UNIT_BITS) if largest else 1.0


def _matrix(
    name: str, run: Callable[[NDArray[Any]], NDArray[Any]], shape: tuple[int, ...], base: Floats, unit: float
) -> Floats:
    """Find one operand's matrix.

    Raises:
        UnsupportedModelError: it would be too large, or the operator gives values that are not finite.
    """
    size = int(np.prod(shape))
    check_size(name, len(base), size)
    matrix = np.empty((len(base), size))
    step = max(1, _BATCH_ELEMENTS // max(size, len(base)))
    for start in range(0, size, step):
        count = min(step, size - start)
        units = np.zeros((count, size), np.float32)
        units[np.arange(count), start + np.arange(count)] = unit
        found = run(units.reshape(count, *shape)).astype(np.float64).reshape(count, -1)
        matrix[:, start : start + count] = (found - base).T / unit
    if not np.isfinite(matrix).all() or not np.isfinite(base).all():
        reason = f"its weights or constants are not finite, or beyond 2**{127 - _LONGEST_UNIT_BITS}"
        raise UnsupportedModelError("a layer of a block can't be told:", [Offence(name, "layer", reason)])
    return matrix


def _with_units(
    run: Callable[[dict[str, NDArray[Any]]], NDArray[Any]],
    zeros: Mapping[str, NDArray[Any]],
    key: str,
    units: NDArray[Any],
) -> NDArray[Any]:
    """Run an operator with unit vectors for one operand, and zeros for the others."""
    return run({**{name: np.repeat(x, len(units), axis=0) for name, x in zeros.items()}, key: units})
