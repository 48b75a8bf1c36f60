"""The study of block depth: depths, calibration data, a depth that is refused, its page, its figures of cost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import evaluate
from heinfer.client.data import CALIBRATION_SAMPLES, load_calibration
from heinfer.client.depth_page import render_curve, render_depth_page
from heinfer.client.depth_study import (
    DepthStudy,
    PartitionAt,
    batch_bytes,
    make_task,
    parse_depths,
    study_depths,
    summarise,
)
from heinfer.client.report import BlockCosts, Costs, Report
from heinfer.errors import InputError
from heinfer.plan import Plan, TensorSpec, read_bundle_plan
from heinfer.wire import row_bytes
from partitioner import partition
from partitioner.deep.building import FitOptions
from partitioner.deep.deepening import DeepOptions
from tests.small_models import tanh_model

RNG = np.random.default_rng(5)
X = RNG.normal(size=(50, 6)).astype(np.float32)
CALIBRATION = {"x": RNG.normal(size=(400, 6)).astype(np.float32)}
LABELS = np.arange(50) % 3


def partitioner_of(model: Path) -> PartitionAt:
    def partition_at(depth: str, bundle: Path) -> None:
        number = None if depth == "0" else "all" if depth == "all" else int(depth)
        deep = None if number is None else DeepOptions(number, CALIBRATION, FitOptions(3))  # type: ignore[arg-type]
        partition(model, bundle, deep=deep)

    return partition_at


def run_study(folder: Path, depths: tuple[str, ...], model: Path, at: PartitionAt | None = None) -> DepthStudy:
    task = make_task("0" * 64, X, CALIBRATION, 3, "least-squares", encrypted=False)
    return study_depths(folder, depths, task, at or partitioner_of(model), X, LABELS)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> DepthStudy:
    """Of a model whose first activation is a Softmax: fully encrypted it is refused."""
    folder = tmp_path_factory.mktemp("study")
    return run_study(folder / "study", ("0", "1", "all"), tanh_model(folder / "soft.onnx", soft=True))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Plan]:
    folder = tmp_path_factory.mktemp("deep")
    model = tanh_model(folder / "model.onnx", soft=True)
    partitioner_of(model)("1", folder / "bundle")
    return evaluate(folder / "bundle", X, LABELS, simulate=True), read_bundle_plan(folder / "bundle")


@pytest.mark.parametrize("text", ["", "0,,1", "-1", "01", "1,1", "most", "1.5"])
def test_depths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--depths"):
        parse_depths(text)


def test_depths_are_read_in_their_order() -> None:
    assert parse_depths("2, 0,all") == ("2", "0", "all")


def test_calibration_takes_samples_from_all_of_the_file(tmp_path: Path) -> None:
    count = 5 * CALIBRATION_SAMPLES // 2
    np.savez(tmp_path / "train.npz", x=np.arange(count, dtype=np.float32)[:, None])
    found, notes = load_calibration(tmp_path / "train.npz", [TensorSpec("image", (1,))])
    numbers = found["image"][:, 0]
    assert len(numbers) == CALIBRATION_SAMPLES
    assert set(np.diff(numbers)) == {2.0, 3.0}
    assert numbers[-1] >= count - 3
    assert notes == ("calibration: 2,000 of 5,000 samples, evenly taken",)


def test_calibration_of_several_inputs_goes_by_their_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", a=np.zeros((5, 2), np.float32), b=np.ones((5, 3), np.float32))
    found, _ = load_calibration(tmp_path / "train.npz", [TensorSpec("a", (2,)), TensorSpec("b", (3,))])
    assert {name: x.shape for name, x in found.items()} == {"a": (5, 2), "b": (5, 3)}
    np.savez(tmp_path / "short.npz", a=np.zeros((5, 2), np.float32), b=np.ones((4, 3), np.float32))
    with pytest.raises(InputError, match="as many samples for every input"):
        load_calibration(tmp_path / "short.npz", [TensorSpec("a", (2,)), TensorSpec("b", (3,))])


def test_refused_depth_is_a_row_with_its_reason(refused: DepthStudy) -> None:
    exact, one, everything = refused.rows
    assert exact.refusal is one.refusal is None
    assert everything.refusal is not None
    assert "softmax0" in everything.refusal
    assert (exact.rounds, one.rounds) == (3, 2)
    assert one.polynomials == (3,)
    assert exact.max_error is not None
    assert one.max_error is not None
    assert exact.max_error < one.max_error


def test_study_of_refused_depths_alone_is_refused(tmp_path: Path) -> None:
    model = tanh_model(tmp_path / "soft.onnx", soft=True)
    with pytest.raises(InputError, match="none of these depths"):
        run_study(tmp_path / "study", ("all",), model)


def test_page_shows_every_depth_and_needs_nothing_else(refused: DepthStudy) -> None:
    page = render_depth_page(refused)
    assert not re.search(r"<script|<img|<link|://|@import|url\((?!#arrow\))", page)
    assert page.count("<svg") == 3
    assert "d = all" in page
    assert "refused" in page
    assert "Simulated" in page
    assert "softmax0" in page
    row = refused.rows[1]
    assert row.accuracy is not None
    assert f"{row.accuracy:.2%}" in page
    assert "<i>x" not in render_depth_page(replace(refused, model="<i>x"))


def test_curve_alone_has_its_own_style(refused: DepthStudy) -> None:
    curve = render_curve(refused)
    assert curve.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert curve.count("<style>") == 1
    assert curve.count("<circle") == 2  # the refused depth is a gap


def test_finished_depth_is_read_again(tmp_path: Path) -> None:
    model = tanh_model(tmp_path / "model.onnx")
    first = run_study(tmp_path / "study", ("0", "2"), model)

    def never(depth: str, bundle: Path) -> None:
        raise AssertionError("partitioned again")

    assert run_study(tmp_path / "study", ("0", "2"), model, never) == first


def test_result_that_was_not_written_whole_is_made_again(tmp_path: Path) -> None:
    model = tanh_model(tmp_path / "model.onnx")
    first = run_study(tmp_path / "study", ("1",), model)
    result = tmp_path / "study" / "depth-1" / "result.json"
    result.write_text(result.read_text()[:100])
    assert run_study(tmp_path / "study", ("1",), model).rows[0].rounds == first.rows[0].rounds
    assert json.loads(result.read_text())["row"]["depth"] == "1"


def test_bytes_of_a_batch_are_one_deep_upload_and_as_many_others_as_hold_its_samples(deep: tuple[Report, Plan]) -> None:
    _, plan = deep
    (block,) = plan.deep
    slots, degree = block.chain.parameters.slots, plan.ring.degree
    up, down = batch_bytes(plan, slots)
    row = 200 * block.chain.degree // 32
    groups = slots // degree
    linear = [(b.input_rows, b.output_rows) for b in plan.blocks]
    assert groups > 1
    assert up == row * block.rows_up + groups * row_bytes(degree, degree) * sum(i for i, _ in linear)
    assert down == row * block.rows_down + groups * row_bytes(degree, degree) * sum(o for _, o in linear)


def with_costs(report: Report, seconds: float, deep_s: float) -> Report:
    """Return a report as an encrypted run has it, in which deep blocks took so long on the server."""
    blocks = [
        replace(b, costs=BlockCosts(0.0, deep_s if b.deep is not None else 0.0, 0.0, 1, 1, 1, 1)) for b in report.blocks
    ]
    costs = Costs(seconds, 1.0, 2.0, "standard", None, None, 1.0, 1, 1, 0.0, {"server": 5, "node": 7, "client": 9})
    return replace(report, simulated=False, costs=costs, blocks=blocks)


def test_time_per_image_of_a_full_batch_lets_the_rest_of_the_run_grow(deep: tuple[Report, Plan]) -> None:
    report, plan = deep
    slots = plan.deep[0].chain.parameters.slots
    row = summarise("1", plan, with_costs(report, seconds=12.0, deep_s=10.0))
    assert row.batch_s == 12
    assert row.image_s == pytest.approx(12 / 50)
    assert row.full_image_s == pytest.approx(10 / slots + 2 / 50)
    assert row.latency_s == 2
    assert row.memory_bytes == {"server": 5, "node": 7}


def test_simulated_study_states_no_times(deep: tuple[Report, Plan]) -> None:
    report, plan = deep
    row = summarise("1", plan, report)
    assert row.batch_s is row.image_s is row.full_image_s is row.latency_s is row.memory_bytes is None
    assert row.batch_bytes_up > row.batch_bytes_down > 0
