"""Models whose activations are squares: under encryption their outputs are the model's own, within the stated bound.

Server and node are in this process where ciphertexts are looked at, and processes of their own for `infer`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper

from heinfer.client.report import INNER_VALUES
from heinfer.plan import NodeBundle, ServerBundle, load_node, load_server
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.server.polynomial.resources import DeepResources
from tests.parties import output_of
from tests.small_models import save_model
from trusted_node.deep import DeepContext
from trusted_node.results import BlockResult, finish_deep
from trusted_node.statistics import QueryStatistics

SAMPLES = 40
#: Largest bound, as a part of what the outputs span, and largest error, as a part of the bound, that are of use.
USEFUL, VACUOUS = 1e-2, 1e-3


def square(source: str, target: str) -> object:
    return helper.make_node("Mul", [source, source], [target], name=f"square_{source}")


def one_square(path: Path) -> Path:
    """x (1, 6, 6) -> Conv (2 filters) -> square -> Flatten -> Gemm -> y (4)."""
    rng = np.random.default_rng(5)
    nodes = [
        helper.make_node("Conv", ["x", "k", "b"], ["c"], name="conv", kernel_shape=[3, 3]),
        square("c", "q"),
        helper.make_node("Flatten", ["q"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w", "d"], ["y"], name="dense"),
    ]
    constants = {"k": rng.normal(size=(2, 1, 3, 3)), "b": rng.normal(size=2), "w": rng.normal(size=(32, 4)) / 4}
    return save(path, nodes, [1, 6, 6], {**constants, "d": rng.normal(size=4)})


def two_squares(path: Path) -> Path:
    """x (1, 6, 6) -> Conv (2 filters) -> square -> AveragePool -> Flatten -> Gemm (6) -> square -> Gemm -> y (4)."""
    rng = np.random.default_rng(6)
    nodes = [
        helper.make_node("Conv", ["x", "k", "b"], ["c"], name="conv", kernel_shape=[3, 3]),
        square("c", "q"),
        helper.make_node("AveragePool", ["q"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w", "d"], ["h"], name="first"),
        square("h", "s"),
        helper.make_node("Gemm", ["s", "v", "e"], ["y"], name="second"),
    ]
    constants = {"k": rng.normal(size=(2, 1, 3, 3)), "b": rng.normal(size=2), "w": rng.normal(size=(8, 6)) / 3}
    return save(path, nodes, [1, 6, 6], {**constants, "d": rng.normal(size=6), "v": rng.normal(size=(6, 4)),
                                         "e": rng.normal(size=4)})  # fmt: skip


def save(path: Path, nodes: list[object], shape: Sequence[int], constants: dict[str, NDArray[np.float64]]) -> Path:
    arrays = {name: array.astype(np.float32) for name, array in constants.items()}
    return save_model(path, nodes, {"x": shape}, {"y": [4]}, arrays)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A model, its bundle at d = all, and samples with what onnxruntime makes of them."""

    folder: Path
    node: NodeBundle
    server: ServerBundle
    x: NDArray[np.float32]
    y: NDArray[np.float64]

    def encrypted(self, disturbed: float = 0.0) -> tuple[BlockResult, QueryStatistics]:
        """Encrypt, evaluate, decrypt.

        Args:
            disturbed: added to the first input on its way to the server, in ranges.
        """
        (block,), (terms,) = self.node.plan.deep, self.node.deep
        context = DeepContext(block.chain.parameters)
        secret = context.open(context.generate_secret())
        scaled = terms.scale([self.x])
        residues = secret.encrypt(scaled[0].reshape(SAMPLES, -1).T, block.input_scale)
        for row, prime in enumerate(block.chain.primes):  # a constant polynomial is the same number at every point
            residues[0, 0, row] = (residues[0, 0, row] + int(disturbed * block.input_scale)) % prime
        evaluator = DeepEvaluator(block, self.server.arrays, DeepResources(workers=0))
        answer = evaluator.evaluate(residues, secret.make_keys())
        values = secret.decrypt(answer, block.result_scale(0), SAMPLES).T
        statistics = QueryStatistics.empty(1, 1)
        return finish_deep(self.node, 0, terms.outside(scaled), [values], SAMPLES, statistics), statistics


@pytest.fixture(scope="module", params=[one_square, two_squares], ids=["one square", "two squares and pooling"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("squares")
    model = request.param(folder / "model.onnx")
    rng = np.random.default_rng(7)
    np.savez(folder / "train.npz", x=rng.uniform(-1, 1, (2000, 1, 6, 6)).astype(np.float32))
    x = rng.uniform(-1, 1, (SAMPLES, 1, 6, 6)).astype(np.float32)
    np.savez(folder / "test.npz", x=x)
    said = output_of(
        "partition", model, "-o", folder / "bundle", "--block-depth", "all", "--calibration", folder / "train.npz"
    )
    assert "exact" in said
    node, server = load_node(folder / "bundle/node"), load_server(folder / "bundle/server")
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return Case(folder, node, server, x, session.run(None, {"x": x})[0].astype(np.float64))


def test_outputs_are_the_models_within_a_useful_bound(case: Case) -> None:
    result, statistics = case.encrypted()
    (bound,), error = result.bounds, np.abs(result.outputs[0] - case.y)
    assert np.all(error < bound)
    assert error.max() > VACUOUS * bound.max()
    assert bound.max() < USEFUL * np.ptp(case.y)
    assert statistics.error_bound == bound.max()
    assert (statistics.unbounded, statistics.fitted) == (0, False)


def test_a_disturbed_ciphertext_breaks_the_bound(case: Case) -> None:
    """The comparison can fail: what one input of 36 is off by shows."""
    result, _ = case.encrypted(disturbed=0.1)
    assert np.mean(np.abs(result.outputs[0] - case.y) > result.bounds[0]) > 0.5


@pytest.mark.long
def test_infer_states_the_bound_of_the_model_itself(case: Case) -> None:
    folder, bundle = case.folder, case.folder / "bundle"
    far = case.x[:3].copy()
    far[1] *= 9
    np.save(folder / "query.npy", far)
    said = output_of("infer", folder / "query.npy", "--bundle", bundle, "--json", folder / "answer.json")
    answer = json.loads((folder / "answer.json").read_text())
    error = np.abs(np.array(answer["output"]) - case.y[:3])[[0, 2]]
    assert 0 < error.max() < answer["error_bound"] < USEFUL * np.ptp(case.y)
    assert (answer["unbounded"], answer["fitted"]) == (1, False)
    assert answer["error_bound_condition"] == INNER_VALUES  # one astray is in the upload
    assert "at most" not in said
    stated = f"error bound of the last block {answer['error_bound']:.1e} (if {INNER_VALUES}; 1 of 3 samples have none"
    assert stated in " ".join(said.split())


def test_evaluate_states_the_bound_of_the_model_itself(case: Case) -> None:
    folder, bundle = case.folder, case.folder / "bundle"
    said = output_of("evaluate", bundle, "--data", folder / "test.npz", "--simulate", "--json", folder / "report.json")
    report = json.loads((folder / "report.json").read_text())
    (block,) = report["blocks"]
    assert 0 < report["max_abs_error"] < report["error_bound"] < USEFUL * np.ptp(case.y)
    assert block["measured_error"] < block["error_bound"] == pytest.approx(report["error_bound"], rel=0.1)
    assert block["deep"]["exact"]
    condition = None if case.node.deep[0].always else INNER_VALUES
    assert report["error_bound_condition"] == block["error_bound_condition"] == condition
    words = " ".join(said.split())
    assert "bound: distance from the model" in words
    assert (f"distance from the model, if {INNER_VALUES}" in words) == (condition is not None)


def test_a_sample_outside_of_the_calibrated_ranges_has_no_bound(case: Case) -> None:
    x = case.x[:3].copy()
    x[1] *= 9
    np.savez(case.folder / "far.npz", x=x)
    figures, page = case.folder / "far.json", case.folder / "far.html"
    options = ("--simulate", "--json", figures, "--html", page)
    said = output_of("evaluate", case.folder / "bundle", "--data", case.folder / "far.npz", *options)
    report = json.loads(figures.read_text())
    assert report["unbounded"] == report["blocks"][0]["unbounded"] == 1
    assert report["error_bound_condition"] == report["blocks"][0]["error_bound_condition"] == INNER_VALUES
    assert 0 < report["error_bound"] < USEFUL * np.ptp(case.y) < report["max_abs_error"]
    for text in (said, page.read_text()):
        assert "1 of 3 samples have none: outside of the calibrated ranges" in " ".join(text.split())
