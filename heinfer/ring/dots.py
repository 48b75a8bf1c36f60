"""Dot products of residues with residues, exactly: the arithmetic of the check of a server's answers.

Worked example: 226,000 residues of an upload times as many weights take about 0.2 ms. Every product is reduced by
`multiply_mod`, and `_LANES` sums run side by side, each kept at q / 2 or below, so that nothing is ever rounded.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from heinfer.ring.packing import high_limb, kernel, low_limb
from heinfer.ring.parameters import LIMB_BITS
from heinfer.ring.transform import multiply_mod

Residues = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Sums that run side by side: enough for vectors of any width, and to hide the latency of a multiply-add.
_LANES: Final = 64
_LIMB_BASE: Final = float(2**LIMB_BITS)


@kernel
def _product(residue: int, weight: float, modulus: float, inverse: float) -> float:
    """Return residue * weight modulo q, within [-q, q]."""
    return multiply_mod(high_limb(residue) * _LIMB_BASE + low_limb(residue), weight, modulus, inverse)


@kernel
def dot_rows(x: Residues, weights: Floats, modulus: int, out: Residues) -> None:
    """Write the dot product of every row with the weights.

    Proof of exactness. A product is at most q in magnitude and a reduced sum at most (q + 1) / 2, so sums stay below
    2q < 2**51; the estimate of their quotient is off by at most one rounding, hence rint leaves at most (q + 1) / 2.

    Args:
        x: residues in [0, q), shape (rows, n), unit last stride.
        weights: integers in [0, q), shape (n,).
        modulus: q.
        out: residues in [0, q), shape (rows,).
    """
    whole, inverse = float(modulus), 1.0 / modulus
    sums = np.empty(_LANES)
    count = weights.size
    for row in range(x.shape[0]):
        sums[:] = 0.0
        line = x[row]
        for start in range(0, count - _LANES + 1, _LANES):
            part, factors = line[start : start + _LANES], weights[start : start + _LANES]
            for k in range(_LANES):
                total = sums[k] + _product(part[k], factors[k], whole, inverse)
                sums[k] = total - np.rint(total * inverse) * whole
        for i in range(count - count % _LANES, count):
            total = sums[0] + _product(line[i], weights[i], whole, inverse)
            sums[0] = total - np.rint(total * inverse) * whole
        joined = 0
        for k in range(_LANES):
            joined += int(sums[k])
        out[row] = joined % modulus


@kernel
def add_weighted_rows(x: Residues, weights: Floats, modulus: int, sums: Floats) -> None:
    """Add every row, times its weight, to running sums; exact as in `dot_rows`.

    Args:
        x: residues in [0, q), shape (rows, columns), unit last stride.
        weights: integers in [0, q), shape (rows,).
        modulus: q.
        sums: integers of magnitude (q + 1) / 2 at most, shape (columns,); likewise afterwards.
    """
    whole, inverse = float(modulus), 1.0 / modulus
    for row in range(x.shape[0]):
        line, weight = x[row], weights[row]
        for k in range(sums.size):
            total = sums[k] + _product(line[k], weight, whole, inverse)
            sums[k] = total - np.rint(total * inverse) * whole


def sums_to_residues(sums: Floats, modulus: int) -> Residues:
    """Bring running sums of `add_weighted_rows` into [0, q)."""
    return sums.astype(np.int64) % modulus
