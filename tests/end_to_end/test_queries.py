"""Queries through both parties: agreement with onnxruntime, groups, several tensors, failures of the data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from heinfer.client import LocalModel, connect, evaluate
from heinfer.errors import InputError
from heinfer.plan import read_plan
from heinfer.wire import QueryFailedError, QueryFailureCode
from partitioner import partition
from tests.parties import WatchedPool, parties
from tests.small_models import logarithm_model, lookup_model, two_sided_model

DEGREE = 2048


def plain(model: Path, **inputs: np.ndarray) -> list[np.ndarray]:
    """Ask onnxruntime."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def tolerance(bundle: Path, peak: float, gain: float = 100.0) -> float:
    """The blocks' bounds at unit inputs, carried through a small network of gain at most `gain`, rounding included."""
    plan, _ = read_plan(bundle)
    return 2 * gain * max(peak, 1.0) * sum(block.unit_bound for block in plan.blocks)


def test_lenet_classifies_digits_as_onnxruntime_does(
    lenet: LocalModel, lenet_bundle: Path, lenet_samples: dict[str, np.ndarray]
) -> None:
    x = lenet_samples["x"][:64]
    want = plain(lenet_bundle / "reference" / "model.onnx", **{lenet.description.inputs[0].name: x})[0]
    found = lenet.predict(x)
    assert np.array_equal(found.argmax(axis=1), want.argmax(axis=1))
    assert np.abs(found - want).max() <= 5e-3  # what the project promises for this model


def test_predict_one_sample_gives_what_the_same_sample_gives_in_a_batch(dense: LocalModel, dense_bundle: Path) -> None:
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    together = dense.predict(x)
    alone = np.concatenate([dense.predict(x[i : i + 1]) for i in range(2)])
    assert np.abs(alone - together[:2]).max() <= 2 * tolerance(dense_bundle, float(np.abs(x).max()))


def test_predict_float64_is_converted(dense: LocalModel, dense_bundle: Path) -> None:
    x = np.random.default_rng(1).normal(size=(2, 3))
    want = plain(dense_bundle.parent / "dense.onnx", x=x.astype(np.float32))[0]
    assert np.abs(dense.predict(x) - want).max() <= tolerance(dense_bundle, float(np.abs(x).max()))


def test_query_more_samples_than_coefficients_is_cut_into_groups(dense: LocalModel, dense_bundle: Path) -> None:
    x = np.random.default_rng(2).normal(size=(2 * DEGREE + 3, 3)).astype(np.float32)
    answer = dense.query(x, statistics=True)
    want = plain(dense_bundle.parent / "dense.onnx", x=x)[0]
    assert answer.statistics["groups"] == (3 if answer.statistics["mode"] == "standard" else -(-len(x) // 256))
    assert np.abs(answer.outputs["y"] - want).max() <= tolerance(dense_bundle, float(np.abs(x).max()))


def test_query_statistics_count_ciphertexts_and_bytes_exactly(dense: LocalModel) -> None:
    answer = dense.query(np.ones((5, 3), np.float32), statistics=True)
    first, second = answer.statistics["blocks"]
    assert answer.statistics["rounds"] == 2
    if answer.statistics["mode"] == "prepared":  # five samples of b alone, each in packs of 32; one a each, not sent
        assert (first["ciphertexts_up"], second["ciphertexts_up"]) == (5, 5)
        assert {first["bytes_up"], second["bytes_up"], first["bytes_down"], second["bytes_down"]} == {5 * 200}
        return
    row = 50 * 2048 // 8 + 200  # a in full; five residues of b, in packs of 32
    assert (first["ciphertexts_up"], first["ciphertexts_down"]) == (3, 4)
    assert (second["ciphertexts_up"], second["ciphertexts_down"]) == (4, 2)
    assert (first["bytes_up"], second["bytes_down"]) == (3 * row, 2 * row)


def test_query_from_four_threads_answers_each_with_its_own(dense: LocalModel, dense_bundle: Path) -> None:
    queries = [np.random.default_rng(i).normal(size=(3, 3)).astype(np.float32) * 10 for i in range(12)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(dense.predict, queries))
    for x, y in zip(queries, found, strict=True):
        want = plain(dense_bundle.parent / "dense.onnx", x=x)[0]
        assert np.abs(y - want).max() <= tolerance(dense_bundle, float(np.abs(x).max()))


def test_query_trace_is_refused_by_a_node_that_does_not_allow_it(dense: LocalModel) -> None:
    with pytest.raises(QueryFailedError, match="--allow-trace"):
        dense.query(np.ones((1, 3), np.float32), trace_samples=1)


@pytest.mark.parametrize(
    "x", [np.ones((2, 4), np.float32), np.ones(3, np.float32), np.ones((2, 3), np.int64), {"z": np.ones((2, 3))}]
)
def test_query_that_does_not_fit_is_refused_before_it_is_sent(dense: LocalModel, x: np.ndarray) -> None:
    with pytest.raises(InputError, match="input 'x'"):
        dense.query(x)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_query_that_is_not_finite_never_reaches_the_server(dense_bundle: Path, pool: WatchedPool, value: float) -> None:
    x = np.ones((3, 3), np.float32)
    x[1, 2] = value
    with parties(dense_bundle, pool) as both, connect(both.node.address) as model:
        with pytest.raises(QueryFailedError, match="NaN or infinity") as caught:
            model.predict(x)
        assert caught.value.code is QueryFailureCode.INPUT
        assert both.evaluator.requests == []
        assert not pool.secrets


def test_query_without_samples_is_refused(dense: LocalModel) -> None:
    with pytest.raises(QueryFailedError, match="at least one sample"):
        dense.query(np.ones((0, 3), np.float32))


def test_model_with_two_inputs_and_two_outputs_answers_by_name(tmp_path: Path, pool: WatchedPool) -> None:
    model_path = two_sided_model(tmp_path / "two.onnx")
    partition(model_path, tmp_path / "bundle")
    generator = np.random.default_rng(5)
    u, v = (generator.normal(size=(6, n)).astype(np.float32) for n in (3, 2))
    with parties(tmp_path / "bundle", pool) as both, connect(both.node.address) as model:
        found = model.predict({"u": u, "v": v})
        with pytest.raises(InputError, match="pass a dict"):
            model.predict(u)
        with pytest.raises(InputError, match="'v' is missing"):
            model.predict({"u": u})
        with pytest.raises(QueryFailedError, match="as many in every input"):
            model.predict({"u": u, "v": v[:2]})
    want = dict(zip(("p", "q"), plain(model_path, u=u, v=v), strict=True))
    limit = tolerance(tmp_path / "bundle", float(max(np.abs(u).max(), np.abs(v).max())))
    assert set(found) == {"p", "q"}
    for name, y in want.items():
        assert np.abs(found[name] - y).max() <= limit


@pytest.mark.parametrize(
    ("build", "bad"), [(logarithm_model, -5.0), (lookup_model, 1e3)], ids=["operator gives NaN", "operator raises"]
)
def test_failure_of_the_data_is_told_to_the_client_alone(
    tmp_path: Path, pool: WatchedPool, build: object, bad: float
) -> None:
    model_path = build(tmp_path / "model.onnx")  # type: ignore[operator]
    partition(model_path, tmp_path / "bundle")
    good = np.full((2, 3), 0.3, np.float32)
    broken = good.copy()
    broken[1] = bad
    with parties(tmp_path / "bundle", pool) as both, connect(both.node.address) as model:
        want = model.predict(good)
        usual = list(both.evaluator.requests)
        both.evaluator.requests.clear()
        with pytest.raises(QueryFailedError) as caught:
            model.predict(broken)
        assert caught.value.code is QueryFailureCode.INPUT
        assert both.evaluator.requests == usual
        assert len(usual) == len(read_plan(tmp_path / "bundle")[0].blocks)
        found = model.predict(good)
    assert np.abs(found - plain(model_path, x=good)[0]).max() <= tolerance(tmp_path / "bundle", 1.0)
    assert np.abs(found - want).max() <= 2 * tolerance(tmp_path / "bundle", 1.0)


def test_failure_of_the_data_in_one_group_does_not_keep_the_others_from_the_server(
    tmp_path: Path, pool: WatchedPool
) -> None:
    partition(logarithm_model(tmp_path / "model.onnx"), tmp_path / "bundle")
    x = np.full((5 * DEGREE, 3), 0.3, np.float32)
    x[0] = -5
    with parties(tmp_path / "bundle", pool) as both, connect(both.node.address) as model:
        with pytest.raises(QueryFailedError, match="NaN or infinity"):
            model.predict(x)
        assert sorted(both.evaluator.requests) == sorted((block, 2 * DEGREE) for block in (0, 1, 2) for _ in range(5))


def test_evaluate_reports_every_figure(dense_bundle: Path) -> None:
    x = np.random.default_rng(3).normal(size=(300, 3)).astype(np.float32)
    want = plain(dense_bundle.parent / "dense.onnx", x=x)[0]
    labels = want.argmax(axis=1)
    labels[:30] = 1 - labels[:30]
    phases: set[str] = set()
    report = evaluate(dense_bundle, x, labels, progress=lambda phase, done, total: phases.add(phase)).to_dict()
    assert phases == {"plain", "estimate", "encrypted", "latency"}
    assert report["samples"] == 300
    assert report["accuracy_plain"] == pytest.approx(0.9)
    assert abs(report["accuracy_encrypted"] - report["accuracy_plain"]) <= 1 - report["agreement"] + 1e-12
    assert report["agreement"] == 1 - len(report["disagreements"]) / 300
    assert 0 < report["mean_abs_error"] < report["max_abs_error"] <= tolerance(dense_bundle, float(np.abs(x).max()))
    assert report["max_abs_error"] < 3 * report["error_estimate"] < 300 * report["max_abs_error"]
    assert report["error_bound"] > 0
    for disagreement in report["disagreements"]:
        assert disagreement["gap"] < 2 * report["error_estimate"]
    assert report["images_per_s"] == pytest.approx(300 / report["seconds"])
    assert 0 < report["latency_s"] < 10
    row = 50 * 2048 // 8 + 2000  # ten packs of 32 residues
    assert (report["bytes_up"], report["bytes_down"], report["rounds"]) == (7 * row, 6 * row, 2)
    assert [b["ciphertexts_up"] for b in report["blocks"]] == [3, 4]
    for block in report["blocks"]:
        assert min(block["node_s"], block["server_s"]) > 0
        assert block["wire_s"] >= 0
        assert 0 < block["measured_error"] <= block["error_bound"]
        assert 0 < block["error_to_bound"] <= 1
    assert report["parameters"] == {"N": 2048, "log2_q": 50, "security_bits": 128}
    assert report["mode"] == "standard"
    assert {"heinfer", "python", "tenseal", "onnxruntime"} <= set(report["versions"])
    assert report["cores"] >= 1
    assert set(report["peak_memory_bytes"]) == {"server", "node", "client"}


@pytest.mark.parametrize("labels", [np.zeros(4, int), np.zeros((5, 1), int)])
def test_evaluate_labels_that_do_not_fit_are_refused(dense_bundle: Path, labels: np.ndarray) -> None:
    with pytest.raises(InputError, match="expected 5 labels"):
        evaluate(dense_bundle, np.ones((5, 3), np.float32), labels)
