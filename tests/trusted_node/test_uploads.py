"""One secret an upload: fresh, used once, wiped."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.plan import load_node
from heinfer.wire import Limits
from tests.parties import WatchedPool, parties
from trusted_node.scaling import sample_peaks
from trusted_node.statistics import QueryStatistics
from trusted_node.uploads import Upload

X = np.ones((2, 3), np.float32)


def test_uploads_of_the_same_query_have_secrets_of_their_own(dense_bundle: Path, pool: WatchedPool) -> None:
    with parties(dense_bundle, pool) as both:
        for _ in range(2):
            both.engine.infer({"x": X})
    assert len(pool.secrets) == 4  # two blocks, twice
    assert len(set(pool.secrets)) == 4


def test_upload_secrets_are_wiped_when_the_query_is_done(dense_bundle: Path, pool: WatchedPool) -> None:
    with parties(dense_bundle, pool) as both:
        both.engine.infer({"x": X})
    assert len(pool.live) == 2
    assert not any(any(secret) for secret in pool.live)


def test_upload_secrets_are_wiped_when_the_server_fails(dense_bundle: Path, pool: WatchedPool) -> None:
    with parties(dense_bundle, pool) as both:
        both.evaluator.fail = True
        with pytest.raises(RemoteProtocolError, match="FAILED"):
            both.engine.infer({"x": X})
    assert len(pool.live) == 1
    assert not any(pool.live[0])


def test_upload_second_send_is_refused(dense_bundle: Path, pool: WatchedPool) -> None:
    bundle = load_node(dense_bundle / "node")
    statistics = QueryStatistics.empty(len(bundle.plan.blocks), bundle.plan.rounds)
    with parties(dense_bundle, pool) as both:
        delivery = both.engine.start_delivery(time.monotonic() + 60)
        upload = Upload(bundle, 0, delivery, pool, statistics, Limits(), None)
        upload.send([X], [sample_peaks(X)])
        with pytest.raises(LocalProtocolError, match="once"):
            upload.send([X], [sample_peaks(X)])
        assert upload.receive(0).outputs[0].shape == (2, 4)
    assert not any(pool.live[0])
