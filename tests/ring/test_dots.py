from __future__ import annotations

import numpy as np
import pytest

from heinfer.ring import RingParameters, add_weighted_rows, dot_rows, sums_to_residues

SMALLEST = 562949953548289  # the smallest prime above 2**49 that is 1 modulo 4096
MODULI = (RingParameters.default().modulus, RingParameters(2048, SMALLEST).modulus)


def extreme(generator: np.random.Generator, modulus: int, shape: tuple[int, ...]) -> np.ndarray:
    """Residues of which a third is q - 1, a third around q / 2, a third anything."""
    choice = generator.integers(0, 3, shape)
    middle = modulus // 2 + generator.integers(-1, 2, shape)
    return np.where(choice == 0, modulus - 1, np.where(choice == 1, middle, generator.integers(0, modulus, shape)))


@pytest.mark.parametrize("modulus", MODULI)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 4097])
def test_rows(modulus: int, count: int) -> None:
    generator = np.random.default_rng(count)
    x, weights = extreme(generator, modulus, (3, count)), extreme(generator, modulus, (count,))
    x[0], out = modulus - 1, np.empty(3, np.int64)
    dot_rows(x, weights.astype(np.float64), modulus, out)
    expected = [sum(int(a) * int(b) for a, b in zip(row, weights, strict=True)) % modulus for row in x]
    assert out.tolist() == expected


@pytest.mark.parametrize("modulus", MODULI)
def test_columns(modulus: int) -> None:
    generator = np.random.default_rng(9)
    x, weights = extreme(generator, modulus, (700, 33)), extreme(generator, modulus, (700,))
    x[:, 0] = weights[:] = modulus - 1
    sums = np.zeros(33)
    for part in (slice(0, 1), slice(1, 500), slice(500, 700)):
        add_weighted_rows(x[part], weights[part].astype(np.float64), modulus, sums)
    expected = [sum(int(a) * int(b) for a, b in zip(column, weights, strict=True)) % modulus for column in x.T]
    assert sums_to_residues(sums, modulus).tolist() == expected
