"""Deep blocks of a query with several groups, at a server that has room for one request: they take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import RemoteProtocolError
from heinfer.plan import load_node, load_server
from heinfer.server.evaluation import BlockEvaluator
from heinfer.server.polynomial.resources import DeepResources
from heinfer.server.service import EvaluatorService
from heinfer.wire import Limits, RefusedError, block_shapes
from tests.parties import LOOPBACK, WatchedPool
from tests.partitioner.deep_examples import partition_square
from trusted_node import delivery as deliveries
from trusted_node.deep_workers import DeepPool
from trusted_node.engine import Engine
from trusted_node.link import ServerLink

LIMITS = Limits(retry_s=0.05)
GROUP = 2


class Both:
    """A server whose disk takes one request, and a node."""

    def __init__(self, bundle: Path, folder: Path, pool: WatchedPool, deep: DeepPool) -> None:
        server, node = load_server(bundle / "server"), load_node(bundle / "node")
        scratch = folder / "scratch"
        scratch.mkdir()
        needs = BlockEvaluator(server, None, DeepResources(scratch, workers=0)).deep(0).scratch_bytes
        self.resources = DeepResources(scratch, needs, workers=0)
        self.service = EvaluatorService(BlockEvaluator(server, None, self.resources), LOOPBACK, LIMITS)
        self.link = ServerLink(self.service.address, node.plan_hash, block_shapes(node.plan), LIMITS)
        self.engine = Engine(node, self.link, pool, LIMITS, deep=deep)

    def close(self) -> None:
        self.engine.close()
        self.link.close()
        self.service.stop(0)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, pool: WatchedPool) -> Iterator[Both]:
    """x (3) -> Gemm -> square -> Gemm -> y (2), one deep block; groups of two samples."""
    folder = tmp_path_factory.mktemp("turns")
    bundle, _ = partition_square(folder)
    with pytest.MonkeyPatch.context() as patch, DeepPool(1) as deep:
        patch.setattr(Engine, "_group_size", lambda *_: GROUP)
        made = Both(bundle, folder, pool, deep)
        yield made
        made.close()


def test_groups_take_turns_and_the_server_is_never_busy(both: Both) -> None:
    x = np.random.default_rng(1).uniform(-1, 1, (3 * GROUP, 3)).astype(np.float32)
    together = both.engine.infer({"x": x}).outputs["y"]
    assert both.engine.replicas.repetitions(both.link) == 0
    apart = [both.engine.infer({"x": x[first : first + GROUP]}).outputs["y"] for first in range(0, len(x), GROUP)]
    assert np.allclose(together, np.concatenate(apart), atol=1e-4)


def test_a_query_outlasts_others_that_have_the_room(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have it for much longer than a failure would be put up with."""
    monkeypatch.setattr(deliveries, "_DEEP_BUSY_S", (0.05, 0.1))
    replicas, space = both.engine.replicas, both.resources.space
    outputs: list[np.ndarray] = []
    with ExitStack() as stack:
        ends_at = time.monotonic() + 20
        while True:  # the server may still be removing what the last request left
            try:
                stack.enter_context(space.folder(1))
                break
            except RefusedError:
                assert time.monotonic() < ends_at
                time.sleep(0.02)
        thread = threading.Thread(
            target=lambda: outputs.append(both.engine.infer({"x": np.full((1, 3), 0.5, np.float32)}).outputs["y"])
        )
        thread.start()
        ends_at = time.monotonic() + 20
        began = time.monotonic() + 10 * LIMITS.retry_s
        while replicas.repetitions(both.link) < 3 or time.monotonic() < began:
            assert time.monotonic() < ends_at
            assert thread.is_alive()
            time.sleep(0.02)
        assert replicas.failures(both.link) == 0
    thread.join(20)
    assert len(outputs) == 1
    assert np.isfinite(outputs[0]).all()


def test_who_gets_no_turn_gives_up_at_the_last_moment(both: Both) -> None:
    with (
        both.engine.deep_turn(time.monotonic()),
        pytest.raises(RemoteProtocolError, match="time"),
        both.engine.deep_turn(time.monotonic() + 0.05),
    ):
        pass
    with both.engine.deep_turn(time.monotonic()):  # it is given back
        pass
