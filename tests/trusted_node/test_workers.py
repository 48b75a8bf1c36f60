"""The pool of processes that encrypt and decrypt."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import psutil
import pytest

from heinfer.errors import CiphertextError
from heinfer.processes import child_environment
from heinfer.ring import RingParameters
from heinfer.ring.parameters import NOISE_LIMIT
from heinfer.wire import row_bytes
from tests.parties import REPOSITORY, WatchedPool
from trusted_node.workers import CryptoPool, RowTerms


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


def test_crypto_pool_after_a_worker_died_fails_its_task_and_starts_anew() -> None:
    one = np.ones(1)
    with CryptoPool(RingParameters.default(), workers=1) as pool:
        secret = bytes(pool.generate_secret())
        pool.start()
        (worker,) = pool._executor._processes.values()
        worker.kill()
        worker.join()
        with pytest.raises(BrokenProcessPool):
            ask_until_it_breaks(pool)
        assert len(pool.encrypt(secret, np.ones((2, 1), np.float32), one).result().rows) == 2 * row_bytes(1, 2048)


def ask_until_it_breaks(pool: CryptoPool) -> None:
    """Give the pool work that goes on until it has noticed that a worker is gone."""
    while True:
        pool._executor.submit(int).result()


ORPHANS = """
import os, sys
from heinfer.ring import RingParameters
from trusted_node.workers import CryptoPool
if __name__ == "__main__":
    pool = CryptoPool(RingParameters.default(), workers=1)
    pool.start()
    print(*pool._executor._processes, flush=True)
    sys.stdin.read()
"""


def test_worker_of_a_killed_node_ends_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "node.py"
    script.write_text(ORPHANS)
    environment = {**child_environment(), "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as node:
        assert node.stdout is not None
        (worker,) = map(psutil.Process, map(int, node.stdout.readline().split()))
        node.kill()
        assert psutil.wait_procs([worker], timeout=20)[0] == [worker]
