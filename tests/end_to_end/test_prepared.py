"""Queries in prepared mode through both parties: answers, the pool, failures, several queries and nodes at once."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from heinfer.client import connect, local
from heinfer.errors import HeinferError, RemoteProtocolError
from heinfer.plan import load_node, load_reference, load_server, read_plan
from heinfer.processes import core_count
from heinfer.ring import packed_bytes, unpack
from heinfer.server.service import EvaluatorService
from heinfer.wire import Limits, QueryFailedError, QueryFailureCode, block_shapes
from partitioner import partition, rotate
from tests.parties import Parties, WatchedPool, parties
from tests.small_models import (
    convolution_model,
    dense_model,
    logarithm_model,
    lookup_model,
    padded_model,
    two_sided_model,
)
from trusted_node.engine import DataError, Engine
from trusted_node.link import ServerLink
from trusted_node.modes import ModeChoice
from trusted_node.pool import PreparedPool
from trusted_node.preparation import Preparer
from trusted_node.simulation import estimate_error

READY_S = 30.0
Inputs = dict[str, np.ndarray]


@dataclass
class Model:
    """A small model, its bundle, and how its inputs are drawn."""

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    low: float = -1.0
    high: float = 1.0

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def inputs(self, samples: int, seed: int = 0) -> Inputs:
        generator = np.random.default_rng(seed)
        return {
            name: generator.uniform(self.low, self.high, (samples, *shape)).astype(np.float32)
            for name, shape in self.shapes.items()
        }

    def plain(self, inputs: Inputs) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(self.folder / "model.onnx", providers=["CPUExecutionProvider"])
        return session.run(None, inputs)

    def estimate(self, inputs: Inputs) -> float:
        """The error estimate, and float32 rounding, where errors of the cryptography are below it."""
        plan, _ = read_plan(self.bundle)
        node, server = load_node(self.bundle / "node"), load_server(self.bundle / "server")
        rounding = 1e-6 * max(float(np.abs(y).max()) for y in self.plain(inputs))
        return estimate_error(node, server, load_reference(self.bundle, plan), inputs) + rounding


#: Residues of a sample of `padded_model`, block by block: up (planes of 8 x 8), down.
UP, DOWN = (2 * 64, 108), (108, 5)
BUILDERS = {
    "dense": (dense_model, {"x": (3,)}, -1, 1),
    "convolution": (partial(padded_model, seed=8, deviation=0.25), {"x": (2, 6, 6)}, -1, 1),
    "zero_rows": (convolution_model, {"x": (2, 6, 6)}, -1, 1),  # a filter and a row of the last layer are zero
    "logarithm": (logarithm_model, {"x": (3,)}, 0.1, 1),
    "lookup": (lookup_model, {"x": (3,)}, 0.1, 0.3),  # far from integers, where an index would change
    "two_sided": (two_sided_model, {"u": (3,), "v": (2,)}, -1, 1),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    made = {}
    for name, (build, shapes, low, high) in BUILDERS.items():
        folder = tmp_path_factory.mktemp(name)
        partition(build(folder / "model.onnx"), folder / "bundle")
        made[name] = Model(folder, shapes, low, high)
    return made


@dataclass
class Uploads:
    """What the server gets in prepared mode: (block, packed b) of every request, in order."""

    requests: list[tuple[int, np.ndarray]] = field(default_factory=list)
    fail_at: int | None = None

    @property
    def shapes(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(block, packed.shape) for block, packed in self.requests]


@contextmanager
def prepared(bundle: Path, pool: WatchedPool, ready: int = 0) -> Iterator[tuple[Parties, Uploads]]:
    """Both parties in prepared mode, the pool full, the server watched; `fail_at` names a block that fails."""
    with parties(bundle, pool, mode=ModeChoice.PREPARED, ready=ready) as both:
        assert both.engine.prepared is not None
        assert both.engine.prepared.wait_full(READY_S)
        blocks = both.evaluator.prepared
        assert blocks is not None
        uploads, honest = Uploads(), blocks.evaluate

        def evaluate(block: int, packed: np.ndarray) -> np.ndarray:
            uploads.requests.append((block, packed.copy()))
            if uploads.fail_at == block:
                raise RuntimeError("asked to fail")
            return honest(block, packed)

        blocks.evaluate = evaluate  # type: ignore[method-assign]
        yield both, uploads
        assert both.evaluator.requests == []  # nothing ran in standard mode


def both_modes(bundle: Path, pool: WatchedPool, inputs: Inputs) -> list[list[np.ndarray]]:
    """Answers in standard and in prepared mode."""
    answers = []
    with parties(bundle, pool) as both:
        answers.append(list(both.engine.infer(inputs).outputs.values()))
    with prepared(bundle, pool) as (both, uploads):
        answers.append(list(both.engine.infer(inputs).outputs.values()))
        assert uploads.requests
    return answers


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILDERS)
def test_modes_agree_with_each_other_and_with_onnxruntime_within_the_estimate(
    models: dict[str, Model], pool: WatchedPool, name: str
) -> None:
    model = models[name]
    inputs = model.inputs(12)
    plan, _ = read_plan(model.bundle)
    limit = model.estimate(inputs)
    standard, in_prepared = both_modes(model.bundle, pool, inputs)
    assert len(plan.outputs) == len(standard) == len(in_prepared)
    order = [t.name for t in plan.outputs]
    session = onnxruntime.InferenceSession(model.folder / "model.onnx", providers=["CPUExecutionProvider"])
    plain = dict(zip([o.name for o in session.get_outputs()], model.plain(inputs), strict=True))
    for output, one, two in zip(order, standard, in_prepared, strict=True):
        assert np.abs(two - plain[output]).max() <= limit
        # Each mode's error has the estimate's distribution, so their difference has sqrt(2) times its deviation.
        assert np.abs(one - two).max() <= sqrt(2) * limit
    assert limit < 0.05 * max(float(np.abs(y).max()) for y in plain.values())  # it says something


def test_modes_agree_on_lenet_and_digits(
    lenet_bundle: Path, lenet_samples: dict[str, np.ndarray], pool: WatchedPool
) -> None:
    x = lenet_samples["x"][:64]
    plan, _ = read_plan(lenet_bundle)
    inputs = {plan.inputs[0].name: x}
    reference = load_reference(lenet_bundle, plan)
    estimate = estimate_error(load_node(lenet_bundle / "node"), load_server(lenet_bundle / "server"), reference, inputs)
    (standard,), (found,) = both_modes(lenet_bundle, pool, inputs)
    want = onnxruntime.InferenceSession(
        lenet_bundle / "reference" / "model.onnx", providers=["CPUExecutionProvider"]
    ).run(None, inputs)[0]
    assert np.abs(found - want).max() <= estimate
    assert np.abs(found - standard).max() <= sqrt(2) * estimate
    assert np.array_equal(found.argmax(axis=1), want.argmax(axis=1))
    assert estimate <= 5e-3  # what the project promises for this model


@pytest.mark.parametrize("samples", [1, 5, 11])
def test_answers_come_from_masks_that_were_there_and_statistics_say_so(
    models: dict[str, Model], pool: WatchedPool, samples: int
) -> None:
    model, ready = models["convolution"], 8
    inputs = model.inputs(samples)
    with prepared(model.bundle, pool, ready) as (both, uploads):
        made_before = {id(query) for query in both.engine.prepared._ready}  # type: ignore[union-attr]
        taken: list[int] = []
        take = both.engine.prepared.take  # type: ignore[union-attr]

        def watch(count: int) -> object:
            given = take(count)
            taken.extend(id(query) for query in given.queries)
            return given

        both.engine.prepared.take = watch  # type: ignore[union-attr, method-assign, assignment]
        result = both.engine.infer(inputs)
        statistics = result.statistics
        assert statistics.mode == "prepared"
        assert statistics.pooled == min(samples, ready) == len(made_before & set(taken))
        assert (statistics.preparation_s > 0) == (samples > ready)
        assert statistics.background_s is not None
        assert statistics.background_s > 0
        assert uploads.shapes == [(block, (samples, packed_bytes(UP[block]))) for block in (0, 1)]
    assert np.abs(result.outputs["y"] - model.plain(inputs)[0]).max() <= model.estimate(inputs)
    assert [cost.bytes_up for cost in statistics.blocks] == [samples * packed_bytes(up) for up in UP]
    assert [cost.bytes_down for cost in statistics.blocks] == [samples * packed_bytes(down) for down in DOWN]


def test_pool_fills_again_between_queries(models: dict[str, Model], pool: WatchedPool) -> None:
    model = models["dense"]
    with prepared(model.bundle, pool, 3) as (both, _):
        assert both.engine.prepared is not None
        for _ in range(4):
            assert both.engine.prepared.wait_full(READY_S)
            assert both.engine.infer(model.inputs(3)).statistics.pooled == 3


def test_query_of_several_groups_is_answered_in_order(
    models: dict[str, Model], pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trusted_node.engine.PREPARED_SAMPLES", 7)
    model = models["convolution"]
    inputs = model.inputs(24)
    with prepared(model.bundle, pool, 4) as (both, uploads):
        result = both.engine.infer(inputs)
    assert result.statistics.groups == 4
    assert sorted(len(packed) for block, packed in uploads.requests if block == 0) == [3, 7, 7, 7]
    assert np.abs(result.outputs["y"] - model.plain(inputs)[0]).max() <= model.estimate(inputs)


KINDS = ["zero", "constant", "sparse", "huge", "tiny", "mixed"]


def query(kind: str, model: Model, samples: int = 6) -> Inputs:
    inputs = model.inputs(samples, KINDS.index(kind))
    for x in inputs.values():
        match kind:
            case "zero":
                x[...] = 0
            case "constant":
                x[...] = 0.37
            case "sparse":
                x *= np.random.default_rng(7).random(x.shape) < 0.1
            case "huge":
                x *= np.float32(1e6)
            case "tiny":
                x *= np.float32(1e-9)
            case "mixed":
                x *= np.logspace(-9, 6, samples, dtype=np.float32).reshape(-1, *[1] * (x.ndim - 1))
    return inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["convolution", "two_sided"])
def test_inputs_of_every_kind_are_answered_within_the_bound_of_every_block(
    models: dict[str, Model], pool: WatchedPool, name: str, kind: str
) -> None:
    model = models[name]
    inputs = query(kind, model)
    samples = len(next(iter(inputs.values())))
    plan, _ = read_plan(model.bundle)
    reference = load_reference(model.bundle, plan)
    with prepared(model.bundle, pool) as (both, _):
        trace = both.engine.infer(inputs, samples).trace
    for index, block in enumerate(plan.blocks):
        values = [trace[f"trace/{index}/input/{i}"].astype(np.float64) for i in range(len(block.inputs))]
        for position, want in enumerate(reference.evaluate_block(index, values)):
            found = trace[f"trace/{index}/output/{position}"]
            # The node states bounds in float64, the trace carries them in float32.
            bound = trace[f"trace/{index}/bound/{position}"].astype(np.float64) * (1 + 2.0**-23)
            assert found.shape == want.shape == bound.shape
            assert (np.abs(found - want) <= bound).all(), (index, position)


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bad"), [("logarithm", -5.0), ("lookup", 1e3)], ids=["NaN", "operator raises"])
def test_failure_of_the_data_is_told_to_the_client_alone(
    models: dict[str, Model], pool: WatchedPool, name: str, bad: float
) -> None:
    model = models[name]
    good = model.inputs(2)
    broken = {"x": good["x"].copy()}
    broken["x"][1] = bad
    with prepared(model.bundle, pool, 4) as (both, uploads), connect(both.node.address) as client:
        want = both.engine.infer(good)
        usual = uploads.shapes
        assert len(usual) == len(read_plan(model.bundle)[0].blocks)
        uploads.requests.clear()
        with pytest.raises(DataError):
            both.engine.infer(broken)
        assert uploads.shapes == usual
        uploads.requests.clear()
        with pytest.raises(QueryFailedError) as caught:
            client.predict(broken["x"])
        assert caught.value.code is QueryFailureCode.INPUT
        assert uploads.shapes == usual
        again = both.engine.infer(good)
    limit = model.estimate(good)
    assert np.abs(want.outputs["y"] - model.plain(good)[0]).max() <= limit
    assert np.abs(again.outputs["y"] - model.plain(good)[0]).max() <= limit


def test_failure_of_the_data_in_one_sample_leaves_masks_of_all_in_use(
    models: dict[str, Model], pool: WatchedPool
) -> None:
    """What is sent instead of values that are not finite is encrypted like any other: under fresh masks, uniform."""
    model = models["logarithm"]
    q = read_plan(model.bundle)[0].ring.modulus
    bad = {"x": np.full((100, 3), -5.0, np.float32)}
    with prepared(model.bundle, pool) as (both, uploads), pytest.raises(DataError):
        both.engine.infer(bad)
    for block, width in enumerate((3, 4, 4)):
        residues = unpack(uploads.requests[block][1], width, q)
        assert len(np.unique(residues)) == residues.size
        assert abs(float(residues.mean()) / q - 0.5) < 6 / sqrt(12 * residues.size)


def distinct(uploads: Uploads, modulus: int, widths: tuple[int, ...]) -> bool:
    """Whether no residue of any upload occurs in another one: with masks sent once it does not, in 2**50."""
    residues = np.concatenate([unpack(packed, widths[block], modulus).ravel() for block, packed in uploads.requests])
    return len(np.unique(residues)) == len(residues)


def test_no_mask_is_sent_twice_whatever_happens(models: dict[str, Model], pool: WatchedPool) -> None:
    """The same values again and again: a mask that came twice would show as equal residues."""
    model = models["convolution"]
    inputs = {"x": np.ones((3, 2, 6, 6), np.float32)}
    q = read_plan(model.bundle)[0].ring.modulus
    with prepared(model.bundle, pool, 5) as (both, uploads):
        for fail_at in (None, 0, 1, None, 1, 0, None):
            uploads.fail_at = fail_at
            if fail_at is None:
                assert both.engine.infer(inputs).outputs["y"].shape == (3, 5)
            else:
                with pytest.raises(RemoteProtocolError, match="FAILED"):
                    both.engine.infer(inputs)
        counts = [block for block, _ in uploads.requests]
        assert (counts.count(0), counts.count(1)) == (7, 5)
        assert distinct(uploads, q, UP)
        twice = Uploads([*uploads.requests, uploads.requests[0]])
        assert not distinct(twice, q, UP)  # the test can fail


def test_masks_of_a_query_that_failed_are_wiped(models: dict[str, Model], pool: WatchedPool) -> None:
    model = models["convolution"]
    with prepared(model.bundle, pool, 2) as (both, uploads):
        assert both.engine.prepared is not None
        memories = [query._memory for query in both.engine.prepared._ready]
        assert all(memory.any() for memory in memories)
        uploads.fail_at = 1
        with pytest.raises(RemoteProtocolError):
            both.engine.infer(model.inputs(2))
        first = 2 * 8 * 8  # b of the first block, which the server has seen; a query of one sample each
        assert not any(memory[first : first + 108].any() for memory in memories)  # its corrections, used
        assert not any(memory[first + 108 + 108 :].any() for memory in memories)  # and those of the second, not used


def test_server_that_goes_away_in_mid_query_is_an_error_and_the_next_query_is_encrypted_anew(
    models: dict[str, Model], pool: WatchedPool
) -> None:
    model = models["convolution"]
    inputs = {"x": np.ones((2, 2, 6, 6), np.float32)}
    q = read_plan(model.bundle)[0].ring.modulus
    with prepared(model.bundle, pool, 3) as (both, uploads):
        blocks, arrived, gone = both.evaluator.prepared, threading.Event(), threading.Event()
        assert blocks is not None
        honest = blocks.evaluate

        def stall(block: int, packed: np.ndarray) -> np.ndarray:
            answer = honest(block, packed)
            if block == 1:
                arrived.set()
                assert gone.wait(20)
            return answer

        blocks.evaluate = stall  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(both.engine.infer, inputs)
            assert arrived.wait(20)
            both.server._server.stop(0)  # every stream breaks at once
            with pytest.raises(HeinferError):
                asked.result(20)
            gone.set()
        with pytest.raises(HeinferError):
            both.engine.infer(inputs)
        both.server.stop(0)
        blocks.evaluate = honest  # type: ignore[method-assign]
        again = EvaluatorService(both.evaluator, both.server.address, Limits())
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    found = both.engine.infer(inputs).outputs["y"]
                    break
                except HeinferError:
                    assert time.monotonic() < deadline, "the node does not find the server again"
                    time.sleep(0.1)
        finally:
            again.stop(0)
        assert np.abs(found - model.plain(inputs)[0]).max() <= model.estimate(inputs)
        sent = [block for block, _ in uploads.requests]
        assert sent[:2] == [0, 1]
        assert sent[-2:] == [0, 1]
        assert len(sent) >= 4
        assert distinct(uploads, q, UP)


# --- several at once -----------------------------------------------------------------------------------------------


def test_queries_at_once_are_merged_in_one_product_and_each_gets_its_answer(
    models: dict[str, Model], pool: WatchedPool
) -> None:
    model, count = models["convolution"], 12
    queries = [model.inputs(1 + number % 3, number) for number in range(count)]
    limit = max(model.estimate(inputs) for inputs in queries[:3])
    with prepared(model.bundle, pool, 24) as (both, uploads):
        merger = both.evaluator.prepared._merger  # type: ignore[union-attr]
        run, products = merger._run, []

        def slowly(block: int, residues: np.ndarray) -> np.ndarray:
            products.append((block, len(residues)))
            time.sleep(0.05)
            return run(block, residues)

        merger._run = slowly
        with ThreadPoolExecutor(count) as threads:
            results = list(threads.map(both.engine.infer, queries))
    for inputs, result in zip(queries, results, strict=True):
        assert np.abs(result.outputs["y"] - model.plain(inputs)[0]).max() <= 1.5 * limit
    assert sum(rows for _, rows in products) == 2 * sum(len(inputs["x"]) for inputs in queries)
    assert len(uploads.requests) == 2 * count
    assert len(products) < 2 * count
    if core_count() < count // 2:
        assert max(rows for _, rows in products) > 3  # more than any query has


@contextmanager
def another_node(bundle: Path, server: EvaluatorService, pool: WatchedPool, mode: ModeChoice) -> Iterator[Engine]:
    """A second node on a server that runs."""
    node, limits = load_node(bundle / "node"), Limits()
    link = ServerLink(server.address, node.plan_hash, block_shapes(node.plan), limits)
    ready = None if mode is ModeChoice.STANDARD else PreparedPool(Preparer(node), 2)
    engine = Engine(node, link, pool, limits, ready, mode)
    try:
        yield engine
    finally:
        engine.close()
        if ready is not None:
            ready.close()
        link.close()


def test_one_server_serves_both_modes_at_the_same_time(models: dict[str, Model], pool: WatchedPool) -> None:
    model = models["convolution"]
    queries = [model.inputs(2, seed) for seed in range(8)]
    limit = 1.5 * max(model.estimate(inputs) for inputs in queries[:2])
    with (
        parties(model.bundle, pool, mode=ModeChoice.PREPARED, ready=4) as both,
        another_node(model.bundle, both.server, pool, ModeChoice.STANDARD) as other,
        ThreadPoolExecutor(6) as threads,
    ):
        engines = [both.engine, other]
        futures = [(x, threads.submit(engines[i % 2].infer, x)) for i, x in enumerate(queries)]
        for number, (inputs, future) in enumerate(futures):
            result = future.result()
            assert result.statistics.mode == ("prepared", "standard")[number % 2]
            assert np.abs(result.outputs["y"] - model.plain(inputs)[0]).max() <= limit
        assert len(both.evaluator.requests) == 2 * len(queries) // 2


def test_nodes_with_seeds_of_their_own_share_a_server(
    models: dict[str, Model], pool: WatchedPool, tmp_path: Path
) -> None:
    model = models["convolution"]
    copy = Path(shutil.copytree(model.bundle, tmp_path / "bundle"))
    rotate(copy)
    seeds = {hints.seed for hints in (load_node(b / "node").hints for b in (model.bundle, copy)) if hints is not None}
    assert len(seeds) == 2
    queries = [model.inputs(1, seed) for seed in range(12)]
    limit = 1.5 * max(model.estimate(model.inputs(8, seed)) for seed in range(2))
    with (
        prepared(model.bundle, pool, 4) as (both, uploads),
        another_node(copy, both.server, pool, ModeChoice.PREPARED) as other,
        ThreadPoolExecutor(6) as threads,
    ):
        engines = [both.engine, other]
        futures = [(x, threads.submit(engines[i % 2].infer, x)) for i, x in enumerate(queries)]
        for inputs, future in futures:
            assert np.abs(future.result().outputs["y"] - model.plain(inputs)[0]).max() <= limit
        assert len(uploads.requests) == 2 * len(queries)
        assert distinct(uploads, both.evaluator.bundle.plan.ring.modulus, UP)


# --- as processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prepared", "standard"])
def test_local_runs_the_mode_that_is_asked_for(models: dict[str, Model], mode: str) -> None:
    model = models["dense"]
    inputs = model.inputs(5)
    with local(model.bundle, mode=mode, prepared=8) as client:
        found = client.predict(inputs["x"])
        answer = client.query(inputs["x"], statistics=True)
    limit = model.estimate(inputs)
    for y in (found, answer.outputs["y"]):
        assert np.abs(y - model.plain(inputs)[0]).max() <= limit
    statistics = answer.statistics
    assert statistics["mode"] == mode
    assert statistics["rounds"] == 2
    if mode == "prepared":
        assert [block["bytes_up"] for block in statistics["blocks"]] == [5 * 200, 5 * 200]
        assert statistics["background_s"] > 0
    else:
        assert (statistics["pooled"], statistics["background_s"]) == (0, None)
        assert statistics["blocks"][0]["bytes_up"] > 3 * 12_800
