"""Which mode a query runs in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from heinfer.errors import InputError
from heinfer.plan import Plan, load_node, read_plan
from heinfer.plan.machine import VARIABLE, shipped_machine
from heinfer.wire import Address, Limits, Mode, block_shapes
from partitioner import partition
from tests.parties import WatchedPool
from tests.partitioner.examples import graph, weights
from trusted_node import modes
from trusted_node.engine import Engine
from trusted_node.link import ServerLink
from trusted_node.modes import ModeChoice, choose_mode, forecast_prepared, forecast_standard

COUNTS = [1, 5, 100, 2048, 2049, 60_000]


@pytest.fixture(scope="module")
def plan(dense_bundle: Path) -> Plan:
    return read_plan(dense_bundle)[0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without prepared mode: a row of the convolution is wider than any degree."""
    folder = tmp_path_factory.mktemp("wide")
    text = "wide (float[b,1,3,9000] x) => (float y) { y = Conv<kernel_shape=[3,3]>(x, w) }"
    onnx.save(graph(text, {"w": weights(1, 1, 3, 3)}), folder / "wide.onnx")
    partition(folder / "wide.onnx", folder / "bundle")
    return folder / "bundle"


@pytest.mark.parametrize("samples", COUNTS)
def test_mode_that_is_asked_for_is_taken_for_any_number_of_samples(plan: Plan, samples: int) -> None:
    assert choose_mode(plan, ModeChoice.STANDARD, samples) is Mode.STANDARD
    assert choose_mode(plan, ModeChoice.PREPARED, samples) is Mode.PREPARED


def test_mode_auto_takes_prepared_for_one_sample(plan: Plan, lenet_bundle: Path) -> None:
    assert choose_mode(plan, ModeChoice.AUTO, 1) is Mode.PREPARED
    assert choose_mode(read_plan(lenet_bundle)[0], ModeChoice.AUTO, 1) is Mode.PREPARED


@pytest.mark.parametrize(("standard_s", "wanted"), [(0.9, Mode.STANDARD), (1.1, Mode.PREPARED)])
def test_mode_auto_takes_what_is_forecast_to_be_faster(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, standard_s: float, wanted: Mode
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(modes, "forecast_prepared", lambda plan, samples: asked.append(samples) or 1.0)
    monkeypatch.setattr(modes, "forecast_standard", lambda plan, samples: asked.append(samples) or standard_s)
    assert choose_mode(plan, ModeChoice.AUTO, 77) is wanted
    assert asked == [77, 77]


def test_forecast_prepared_grows_by_the_sample_and_standard_by_the_group(plan: Plan) -> None:
    group = [forecast_prepared(plan, samples) for samples in (8, 16, 24, 32)]  # full lanes
    assert np.diff(group) == pytest.approx([group[1] - group[0]] * 3)
    assert group[1] > group[0] > forecast_prepared(plan, 1) > 0
    degree = plan.ring.degree
    assert forecast_standard(plan, degree) < 2 * forecast_standard(plan, 1)
    assert forecast_standard(plan, degree + 1) - forecast_standard(plan, degree) > 100 * (
        forecast_standard(plan, 2) - forecast_standard(plan, 1)
    )


@pytest.mark.parametrize("samples", COUNTS)
def test_plan_without_prepared_mode_runs_in_standard_mode_and_refuses_prepared(wide: Path, samples: int) -> None:
    plan, _ = read_plan(wide)
    assert not plan.has_prepared_mode
    assert choose_mode(plan, ModeChoice.AUTO, samples) is Mode.STANDARD
    assert choose_mode(plan, ModeChoice.STANDARD, samples) is Mode.STANDARD
    with pytest.raises(InputError, match="no prepared mode"):
        choose_mode(plan, ModeChoice.PREPARED, samples)


def test_plan_with_one_block_that_has_no_prepared_mode_has_none(plan: Plan) -> None:
    first, last = plan.blocks
    partly = replace(plan, blocks=(first, replace(last, prepared=None)))
    assert choose_mode(partly, ModeChoice.AUTO, 1) is Mode.STANDARD
    with pytest.raises(InputError, match="no prepared mode"):
        choose_mode(partly, ModeChoice.PREPARED, 1)


def test_engine_of_a_plan_without_prepared_mode_refuses_the_choice_before_any_query(
    wide: Path, pool: WatchedPool
) -> None:
    bundle = load_node(wide / "node")
    assert bundle.hints is None
    limits = Limits()
    link = ServerLink(Address("127.0.0.1", 9), bundle.plan_hash, block_shapes(bundle.plan), limits)
    try:
        with pytest.raises(InputError, match="no prepared mode"):
            Engine(bundle, link, pool, limits, None, ModeChoice.PREPARED)
        Engine(bundle, link, pool, limits, None, ModeChoice.AUTO).close()
    finally:
        link.close()


@pytest.mark.parametrize("content", ["{}", "not JSON"])
def test_node_chooses_by_the_shipped_constants_where_the_users_own_are_unusable(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "heinfer").mkdir()
    (tmp_path / "heinfer" / "machine.json").write_text(content, encoding="utf-8")
    assert modes._machine.__wrapped__() == shipped_machine()
    assert "shipped constants" in caplog.text
    monkeypatch.setenv(VARIABLE, str(tmp_path / "heinfer" / "machine.json"))
    with pytest.raises(InputError):
        modes._machine.__wrapped__()


def test_user_without_a_home_has_the_shipped_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert modes._machine.__wrapped__() == shipped_machine()
