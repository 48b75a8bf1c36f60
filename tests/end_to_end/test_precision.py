"""Weights in several digits under encryption, in every mode: errors within bounds that one digit could not keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from typer.testing import CliRunner

from heinfer.cli.main import app
from heinfer.client import evaluate
from heinfer.errors import HeinferError
from heinfer.plan import Plan, load_node, load_reference, load_server, read_plan
from heinfer.plan.forecast import forecast
from heinfer.plan.machine import SHIPPED
from partitioner import partition
from tests.parties import WatchedPool, parties
from tests.partitioner.examples import graph, weights
from trusted_node.engine import QueryResult
from trusted_node.modes import ModeChoice
from trusted_node.simulation import Simulator, estimate_error

SAMPLES = 6
#: Digits of every block, by the precision that asks for them.
PRECISIONS = {2: 1e-5, 3: 2e-8}
MODES = ["standard", "prepared", "batch", "simulated standard", "simulated prepared"]


def write_model(path: Path) -> Path:
    """x (2, 8, 8) -> two Conv, added -> AveragePool -> Relu -> Gemm -> y, with biases."""
    text = (
        "g (float[b,2,8,8] x) => (float y) { c = Conv <pads = [1, 1, 1, 1]> (x, u, e)"
        " d = Conv <pads = [1, 1, 1, 1]> (x, v) s = Add (c, d)"
        " p = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (s) r = Relu (p) f = Flatten (r)"
        " y = Gemm <transB = 1> (f, w, h) }"
    )
    constants = {
        "u": weights(3, 2, 3, 3), "v": 2 * weights(3, 2, 3, 3, seed=1), "e": weights(3), "w": weights(4, 48),
        "h": weights(4),
    }  # fmt: skip
    path.write_bytes(graph(text, constants).SerializeToString())
    return path


@dataclass(frozen=True)
class Made:
    """A bundle of every number of digits."""

    bundles: dict[int, Path]
    plans: dict[int, Plan]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("precision")
    model = write_model(folder / "model.onnx")
    for digits, precision in {1: None, **PRECISIONS}.items():
        partition(model, folder / f"{digits}", on_server=["AveragePool"], precision=precision, batch_hints=True)
    bundles = {digits: folder / f"{digits}" for digits in (1, *PRECISIONS)}
    plans = {digits: read_plan(bundle)[0] for digits, bundle in bundles.items()}
    for digits, plan in plans.items():
        assert [block.digits for block in plan.blocks] == [digits, digits]
    return Made(bundles, plans)


def inputs() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).uniform(-1, 1, (SAMPLES, 2, 8, 8))
    x[1] = 0
    x[2, :, 1:] = 0
    x[3] *= 1e4
    x[4] = 0.37
    return {"x": x.astype(np.float32)}


def run(bundle: Path, mode: str, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch) -> QueryResult:
    kind, _, simulated = mode.partition(" ")
    if simulated:
        node, server = load_node(bundle / "node"), load_server(bundle / "server")
        return Simulator(node, server, ModeChoice(simulated)).run(inputs(), SAMPLES)
    batch = 0.0 if kind == "batch" else float("inf")
    monkeypatch.setattr("trusted_node.modes.forecast_batch", lambda plan, samples: batch)
    choice = ModeChoice.STANDARD if kind == "standard" else ModeChoice.PREPARED
    with parties(bundle, pool, mode=choice) as both:
        result = both.engine.infer(inputs(), SAMPLES)
    assert result.statistics.mode == kind
    return result


def errors(bundle: Path, trace: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return errors and bounds of every block, (samples, *shape) each."""
    plan, reference = read_plan(bundle)[0], load_reference(bundle, read_plan(bundle)[0])
    found = []
    for index, block in enumerate(plan.blocks):
        values = [trace[f"trace/{index}/input/{i}"].astype(np.float64) for i in range(len(block.inputs))]
        for position, want in enumerate(reference.evaluate_block(index, values)):
            # The node states bounds in float64, the trace carries them in float32.
            bound = trace[f"trace/{index}/bound/{position}"].astype(np.float64) * (1 + 2.0**-23)
            found.append((np.abs(trace[f"trace/{index}/output/{position}"] - want), bound))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("digits", PRECISIONS)
def test_error_with_digits_is_within_bounds_that_one_digit_does_not_keep(
    digits: int, mode: str, made: Made, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = errors(made.bundles[digits], run(made.bundles[digits], mode, pool, monkeypatch).trace)
    coarse = errors(made.bundles[1], run(made.bundles[1], mode, pool, monkeypatch).trace)
    assert len(found) == len(coarse) == 2
    for (error, bound), (before, _) in zip(found, coarse, strict=True):
        assert error.shape == bound.shape
        assert np.all(error <= bound)
        assert before[0].max() > 20 * bound[0].max()  # the first sample is of magnitude 1
        assert before[0].max() > 100 * error[0].max()


def test_simulated_and_encrypted_bounds_of_a_block_are_one(
    made: Made, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, simulated = (
        run(made.bundles[2], mode, pool, monkeypatch).trace for mode in ("prepared", "simulated prepared")
    )
    np.testing.assert_allclose(real["trace/0/bound/0"], simulated["trace/0/bound/0"], rtol=1e-3)


def test_digits_cost_answers_and_leave_the_upload_as_it_was(
    made: Made, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: tuple[Literal["standard", "batch", "prepared"], ...] = ("standard", "batch", "prepared")
    for mode in modes:
        one, two = (run(made.bundles[d], mode, pool, monkeypatch).statistics.blocks for d in (1, 2))
        told = forecast(made.plans[2], mode, SAMPLES, SHIPPED).blocks
        for before, after, expected in zip(one, two, told, strict=True):
            assert after.bytes_up == before.bytes_up == expected.bytes_up
            assert after.bytes_down == expected.bytes_down
            if mode == "prepared":  # in groups of residues
                assert before.bytes_down <= after.bytes_down <= 2 * before.bytes_down
            else:
                assert after.bytes_down == 2 * before.bytes_down


def test_estimate_of_the_error_at_the_end_knows_the_digits(made: Made) -> None:
    estimates = {}
    x = {"x": inputs()["x"][:1]}
    for digits, bundle in made.bundles.items():
        node, server = load_node(bundle / "node"), load_server(bundle / "server")
        estimates[digits] = estimate_error(node, server, load_reference(bundle, node.plan), x)
    assert estimates[1] > 100 * estimates[2] > 0
    assert estimates[2] >= estimates[3] / 2  # both are casts to float32, for the most part


def test_simulated_evaluation_of_digits_stays_within_the_estimate(made: Made) -> None:
    x = np.random.default_rng(1).uniform(-1, 1, (40, 2, 8, 8)).astype(np.float32)
    report = evaluate(made.bundles[2], x, simulate=True)
    assert 0 < report.max_abs_error < 3 * report.error_estimate < 1e-4
    assert all(0 < block.measured_error <= block.error_bound for block in report.blocks)


def said(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it said, in one line."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if isinstance(done.exception, HeinferError):
        return 1, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def test_partition_command_says_which_blocks_have_digits_and_inspect_how_many(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx")
    code, text = said("partition", model, "-o", tmp_path / "bundle", "--precision", "1e-5")
    assert code == 0
    assert "More than one digit of weights" in text
    assert "block 0 (2 of 15 bits), 1 (2 of 15 bits)" in text
    code, text = said("inspect", tmp_path / "bundle", "--json", tmp_path / "figures.json")
    assert code == 0
    assert text.count("2 of 15 bits") == 2
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [(b["digits"], b["digit_bits"]) for b in figures["blocks"]] == [(2, 15)] * 2
    assert all(0 < b["unit_bound"] <= 1e-5 for b in figures["blocks"])


def test_partition_command_names_blocks_whose_bound_is_coarse_unless_a_precision_is_asked_for(tmp_path: Path) -> None:
    values = np.random.default_rng(3).uniform(-1.5e-5, 1.5e-5, (1500, 1)).astype(np.float32)
    values[7] = 1
    path = tmp_path / "hidden.onnx"
    path.write_bytes(graph("g (float[b,1500] x) => (float y) { y = MatMul (x, w) }", {"w": values}).SerializeToString())
    code, text = said("partition", path, "-o", tmp_path / "bundle")
    assert code == 0
    assert "which --precision would lower: block 0 (1%)" in text
    code, text = said("partition", path, "-o", tmp_path / "bundle", "--precision", "1")
    assert code == 0
    assert "would lower" not in text


@pytest.mark.parametrize("precision", ["0", "-1e-5", "nan", "inf", "small"])
def test_partition_command_with_a_precision_that_is_no_bound_is_a_usage_error(precision: str, tmp_path: Path) -> None:
    code, text = said("partition", "model.onnx", "-o", tmp_path / "bundle", "--precision", precision)
    assert code == 2
    assert "--precision" in text
    assert not list(tmp_path.iterdir())


def test_partition_command_to_a_precision_out_of_reach_is_refused_with_the_best_there_is(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx")
    code, text = said("partition", model, "-o", tmp_path / "bundle", "--precision", "1e-12")
    assert code == 1
    for words in ("at most 1.0e-12", "block 0 (", "block 1 (", "at best, with 4 digits of"):
        assert words in text
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
