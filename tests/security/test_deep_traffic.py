"""Deep blocks: what a server sees is the same for every query of a size, and a NaN is nobody's business but the node's.

The model takes a logarithm in front of a deep block, so a negative query makes NaN on the way to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heinfer.server.polynomial import processes
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.wire import Limits
from partitioner import partition
from partitioner.deep.building import FitOptions
from partitioner.deep.deepening import DeepOptions
from tests.captured_traffic import Proxy
from tests.parties import WatchedPool, parties
from tests.partitioner.deep_examples import partition_square
from tests.partitioner.examples import graph, weights
from tests.security.test_equal_traffic import Seen, Watch
from trusted_node.deep_workers import DeepPool
from trusted_node.engine import DataError

SAMPLES = 6
REPLY_S = 2.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x (3) -> Gemm -> Log, Softmax -> Gemm -> square -> Gemm -> y: a round, a step of the node, a deep block."""
    folder = tmp_path_factory.mktemp("deep")
    model = graph(
        """g (float[n,3] x) => (float y) {
            h = Gemm (x, w, b) l = Log (h) p = Softmax <axis = -1> (l) d = Gemm (l, u, b) q = Mul (d, d)
            s = Add (q, p) y = Gemm (s, v, c) }""",
        {"w": np.abs(weights(3, 4)) + 0.1, "b": np.full(4, 0.1, np.float32), "u": weights(4, 4),
         "v": weights(4, 2), "c": weights(2)},
    )  # fmt: skip
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    data = {"x": np.random.default_rng(0).uniform(0.1, 1, (200, 3)).astype(np.float32)}
    made = partition(folder / "model.onnx", folder / "bundle", deep=DeepOptions(1, data, FitOptions()))
    assert [step.kind for step in made.plan.steps] == ["round", "node", "deep"]
    return folder / "bundle"


@pytest.fixture(scope="module")
def watch(bundle: Path, pool: WatchedPool) -> Iterator[Watch]:
    proxies: list[Proxy] = []

    def through(address: object) -> object:
        proxies.append(Proxy(address))  # type: ignore[arg-type]
        return proxies[0].address

    with pytest.MonkeyPatch.context() as patch, DeepPool(1) as deep:
        patch.setattr(
            processes, "core_count", lambda: 0
        )  # no processes on the server's side: they take seconds to start
        with parties(bundle, pool, through, deep=deep) as both, proxies[0] as proxy:
            yield Watch(both, proxy)


def test_messages_are_equal_whatever_the_data_are(watch: Watch) -> None:
    x = np.random.default_rng(0).uniform(0.1, 1, (SAMPLES, 3)).astype(np.float32)
    one = x.copy()
    one[4] = -x[4] - 1
    queries = {"usual": (x, True), "equal": (np.full_like(x, 0.5), True), "far": (1e6 * x, True),
               "NaN in one": (one, False), "NaN in all": (-x - 1, False)}  # fmt: skip
    seen: dict[str, Seen] = {name: watch.seen_by_server(*query) for name, query in queries.items()}
    kinds = [description[0] for description in seen["usual"]]
    assert kinds.count("request") == kinds.count("answer") == 2
    for name, found in seen.items():
        assert found == seen["usual"], name


def test_nan_of_one_request_fails_that_one_alone(watch: Watch) -> None:
    x = np.random.default_rng(1).uniform(0.1, 1, (SAMPLES, 3)).astype(np.float32)
    parts = [x[:2], -x[2:4] - 1, x[4:]]
    results, _ = watch.seen_of_joined(parts)
    assert [isinstance(result, DataError) for result in results] == [False, True, False]


def test_a_deep_block_may_take_longer_than_any_other_reply(
    bundle: Path, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = DeepEvaluator.evaluate_stored

    def late(*arguments: Any) -> Any:
        time.sleep(2.5 * REPLY_S)
        return evaluate(*arguments)

    monkeypatch.setattr(processes, "core_count", lambda: 0)
    monkeypatch.setattr(DeepEvaluator, "evaluate_stored", late)
    x = np.full((2, 3), 0.5, np.float32)
    with DeepPool(1) as deep, parties(bundle, pool, limits=Limits(reply_s=REPLY_S, retry_s=0), deep=deep) as both:
        assert np.isfinite(both.engine.infer({"x": x}).outputs["y"]).all()


def test_inputs_beyond_all_range_show_neither_outside_nor_in_other_samples(pool: WatchedPool, tmp_path: Path) -> None:
    """Huge inputs that go straight into a deep block are cut: SEAL's encoder refuses what no prime can hold."""
    bundle, data = partition_square(tmp_path)
    x = data[:SAMPLES]
    far = x.copy()
    far[3] = [3e38, -3e38, 1e30]
    with DeepPool(1) as deep, parties(bundle, pool, deep=deep) as both:
        usual, cut = both.engine.infer({"x": x}), both.engine.infer({"x": far})
    others = [0, 1, 2, 4, 5]
    assert np.allclose(usual.outputs["y"][others], cut.outputs["y"][others], atol=1e-4)
    assert (usual.statistics.inputs_outside, cut.statistics.inputs_outside) == (0, 3)
