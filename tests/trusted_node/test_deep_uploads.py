"""What the node does for a deep block: one-time secrets, encryption in slots, checks of what comes back."""

from __future__ import annotations

from math import log, sqrt

import numpy as np
import pytest

from heinfer.errors import CiphertextError
from heinfer.ring import pack
from heinfer.ring.chain import ChainParameters, choose_chain
from trusted_node.deep import DeepContext
from trusted_node.deep_workers import unpack_chain

SCALE = 2.0**32


@pytest.fixture(scope="module")
def chain() -> ChainParameters:
    return choose_chain((50, 24))


@pytest.fixture(scope="module")
def context(chain: ChainParameters) -> DeepContext:
    return DeepContext(chain)


def test_values_come_back_up_to_the_noise_of_encryption(context: DeepContext, chain: ChainParameters) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (3, chain.slots))
    secret = context.open(context.generate_secret())
    rows = secret.encrypt(x, SCALE)
    assert rows.shape == (3, 2, 2, chain.degree)
    noise = 3.2 * sqrt(chain.degree / 2) / SCALE  # standard deviation in a slot
    errors = np.abs(secret.decrypt(rows, SCALE, chain.slots) - x)
    assert noise / 2 < errors.std() < noise
    assert errors.max() < noise * sqrt(2 * log(1e9 * errors.size))


def test_every_upload_has_a_secret_of_its_own(context: DeepContext) -> None:
    first, second = context.generate_secret(), context.generate_secret()
    assert first != second
    rows = context.open(first).encrypt(np.ones((1, 1)), SCALE)
    assert abs(context.open(second).decrypt(rows, SCALE, 1)[0, 0] - 1) > 1


def test_nothing_is_encrypted_alike_twice(context: DeepContext) -> None:
    secret = context.open(context.generate_secret())
    first, second = (secret.encrypt(np.zeros((1, 4)), SCALE) for _ in range(2))
    assert np.mean(first == second) < 1e-3
    assert np.count_nonzero(first == 0) < 5  # noise and masks everywhere, unused slots included


def test_ciphertexts_that_hide_nothing_are_refused(context: DeepContext) -> None:
    secret = context.open(context.generate_secret())
    rows = secret.encrypt(np.ones((2, 1)), SCALE)
    rows[1, 1] = 0
    with pytest.raises(CiphertextError, match="hides nothing"):
        secret.decrypt(rows, SCALE, 1)


def test_rows_are_residues_of_their_own_primes(chain: ChainParameters) -> None:
    residues = np.stack([np.full((2, chain.degree), p - 1) for p in chain.primes], axis=1)[None]
    packed = pack(residues.reshape(-1, chain.degree)).tobytes()
    assert np.array_equal(unpack_chain(packed, chain.primes, chain.degree), residues)
    residues[0, 1, 1, 7] += 1
    with pytest.raises(CiphertextError):
        unpack_chain(pack(residues.reshape(-1, chain.degree)).tobytes(), chain.primes, chain.degree)
