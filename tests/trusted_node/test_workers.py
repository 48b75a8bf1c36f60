"""The pool of processes that encrypt and decrypt."""

from __future__ import annotations

import numpy as np
import pytest

from heinfer.errors import CiphertextError
from heinfer.ring.parameters import NOISE_LIMIT
from heinfer.wire import row_bytes
from tests.parties import WatchedPool
from trusted_node.workers import RowTerms


@pytest.mark.parametrize("samples", [1, 5, 2048])
def test_crypto_pool_round_trip_undoes_scales_and_adds_biases(pool: WatchedPool, samples: int) -> None:
    generator = np.random.default_rng(samples)
    values = generator.normal(size=(3, samples)).astype(np.float32)
    scale = generator.uniform(2**20, 2**30, samples)
    terms = RowTerms(np.array([1.0, -2.0, 0.5]), np.array([0.0, 3.0, -1e3]))
    secret = bytes(pool.generate_secret())
    rows = pool.encrypt(secret, values, scale).result().rows
    assert len(rows) == 3 * row_bytes(samples, 2048)
    found = pool.decrypt(secret, rows, samples, scale, terms).result().values
    expected = values / terms.scale[:, None] + terms.bias[:, None]
    bound = (NOISE_LIMIT + 1) / (scale * np.abs(terms.scale[:, None])) + 2.0**-24 * np.abs(expected)
    assert found.dtype == np.float32
    assert (np.abs(found - expected) <= bound).all()


def test_crypto_pool_decrypt_refuses_residues_beyond_the_modulus(pool: WatchedPool) -> None:
    one = np.ones(1)
    with pytest.raises(CiphertextError):
        pool.decrypt(bytes(pool.generate_secret()), b"\xff" * row_bytes(1, 2048), 1, one, RowTerms(one, one)).result()


def test_crypto_pool_generate_secret_never_repeats(pool: WatchedPool) -> None:
    assert len({bytes(pool.generate_secret()) for _ in range(50)}) == 50
