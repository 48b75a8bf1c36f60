"""Chains of moduli: checked, and multiplied by integer matrices exactly."""

from __future__ import annotations

import numpy as np
import pytest

from heinfer.errors import ParameterError
from heinfer.ring.chain import CHAIN_WEIGHT_LIMIT, ChainMatrix, ChainParameters, choose_chain, join_limbs_of


@pytest.mark.parametrize(
    ("bits", "degree"),
    [((50,), 4096), ((50, 24, 34, 34), 8192), ((50, 24, 50, 50), 16384), ((50,) * 16, 32768)],
)
def test_the_smallest_degree_that_the_table_allows(bits: tuple[int, ...], degree: int) -> None:
    chain = choose_chain(bits)
    assert chain.degree == degree
    assert [p.bit_length() for p in chain.primes] == list(bits)
    assert all(p % (2 * degree) == 1 for p in (*chain.primes, chain.special))


def test_chains_above_the_table_are_refused() -> None:
    with pytest.raises(ParameterError, match="allowed at most"):
        choose_chain((50,) * 17)
    good = choose_chain((50, 24, 34, 34))
    too_long = choose_chain((50,) * 6)
    with pytest.raises(ParameterError, match="at most 214 bits"):
        ChainParameters(8192, too_long.primes[:4], too_long.special)
    for primes in ((), (good.primes[0],) * 2, (good.primes[0] + 2,), (97,)):
        with pytest.raises(ParameterError):
            ChainParameters(8192, primes, good.special)
    with pytest.raises(ParameterError, match="largest"):
        ChainParameters(8192, good.primes[:1], good.primes[1])


@pytest.mark.parametrize("bits", [20, 24, 34, 37, 49, 50])
def test_joining_is_exact_at_the_extremes(bits: int) -> None:
    modulus = choose_chain((bits,)).primes[0]
    largest = 2**53 - 1
    rng = np.random.default_rng(bits)
    values = [0, 1, -1, largest, -largest, modulus, -modulus, modulus // 2, 2**52 + 1]
    values += [int(v) for v in rng.integers(-largest, largest, 50)]
    for high in values:
        for low in values:
            got = join_limbs_of(float(high), float(low), modulus, 1.0 / modulus)
            assert got == ((high << 25) + low) % modulus


@pytest.mark.parametrize("bits", [20, 34, 50])
def test_products_equal_those_of_python_integers(bits: int) -> None:
    modulus = choose_chain((bits,)).primes[0]
    rng = np.random.default_rng(bits)
    weights = rng.integers(-(2**20), 2**20, (5, 700)).astype(np.float64)
    weights[0] = CHAIN_WEIGHT_LIMIT
    residues = rng.integers(0, modulus, (700, 2500))
    residues[:, 0] = modulus - 1
    out = np.empty((5, 2500), np.int64)
    ChainMatrix(weights).multiply(residues, modulus, out)
    for column in (0, 1, 2047, 2048, 2499):
        expected = [
            sum(int(w) * int(r) for w, r in zip(row, residues[:, column], strict=True)) % modulus for row in weights
        ]
        assert out[:, column].tolist() == expected
