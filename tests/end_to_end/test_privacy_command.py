"""`heinfer privacy`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("dp_accounting")

from heinfer.training.privacy.accounting import compute_epsilon
from heinfer.training.privacy.ledger import Ledger
from heinfer.training.privacy.mechanisms import GaussianRelease, SampledGaussian
from tests.parties import command, refusal

PLAN = ("privacy", "plan", "--samples", 60_000, "--batch", 600)


def test_plan_with_a_target_prints_noise_and_cost_and_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = command(
        *PLAN, "--steps", 600, "--target-epsilon", 0.5, "--schedule", "steps:0.6,0.9,1.1", "--json", path
    )  # fmt: skip
    assert done.code == 0, done.err
    figures = json.loads(path.read_text())
    assert 0.499 <= figures["epsilon_pld"] <= 0.5 < figures["epsilon_rdp"]
    assert figures["level_steps"] == [200, 200, 200]
    assert figures["noise_multipliers"][2] / figures["noise_multipliers"][0] == pytest.approx(1.1 / 0.6)
    taken = [
        SampledGaussian(multiplier, figures["sampling_probability"], steps)
        for multiplier, steps in zip(figures["noise_multipliers"], figures["level_steps"], strict=True)
    ]
    assert compute_epsilon(taken, figures["delta"]) == figures["epsilon_pld"]
    expected = {"samples": 60_000, "batch": 600, "steps": 600, "adjacency": "add-or-remove-one", "target_epsilon": 0.5}
    assert {key: figures[key] for key in expected} == expected
    assert figures["accountant"].startswith("dp-accounting ")
    assert f"{figures['noise_multipliers'][0]:.4f}" in done.out
    assert "epsilon 0.500 at delta 1.67e-06; target 0.5" in done.out


def test_plan_with_given_noise_prints_a_cost_that_is_not_rounded_down() -> None:
    done = command(
        "privacy", "plan", "--samples", 50_000, "--batch", 512, "--epochs", 10, "--noise-multiplier", 1.3, "--delta",
        1e-5,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "976 steps" in done.out
    assert "epsilon 1.155 at delta 1e-05" in done.out  # 1.1542...
    assert "1.280 by Rényi" in done.out  # 1.2791...


def test_plan_preset_is_a_target_printed_with_its_cost() -> None:
    done = command(*PLAN, "--steps", 20, "--preset", "commerce")
    assert done.code == 0, done.err
    assert "target 9.9 (preset commerce)" in done.out
    assert command(*PLAN, "--steps", 20, "--preset", "medical", "--target-epsilon", 1).code == 2


def test_plan_impossible_values_are_refused_in_one_line() -> None:
    assert "did you mean 'steps'" in refusal(*PLAN, "--steps", 9, "--target-epsilon", 1, "--schedule", "step:1,2")
    assert "either epochs or steps" in refusal(*PLAN, "--target-epsilon", 1)
    assert "below 1 / N" in refusal(*PLAN, "--steps", 9, "--target-epsilon", 1, "--delta", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of a run whose ledger has two runs."""
    ledger = Ledger(tmp_path / "ledger.jsonl", "d" * 64)
    for name in ("first", "second"):
        ledger.open_run(name, delta=1e-5, settings={})
        for step in range(3):
            ledger.spend(name, step, SampledGaussian(3.0, 0.05))
    ledger.spend("second", 0, GaussianRelease(20.0), purpose="evaluation")
    return tmp_path


def test_ledger_says_what_was_spent_on_what_and_what_is_left(run: Path) -> None:
    whole = compute_epsilon([SampledGaussian(3.0, 0.05, 6), GaussianRelease(20.0)], 1e-5)
    done = command("privacy", "ledger", run, "--budget", 2, "--json", run / "figures.json")
    assert done.code == 0, done.err
    assert "9 entries, chain intact" in done.out
    assert "evaluation" in done.out
    assert f"{2 - whole:.3f} of a budget of 2 is left" in done.out
    figures = json.loads((run / "figures.json").read_text())
    assert figures["epsilon"] == whole
    assert [(part["run"], part["purpose"], part["times"]) for part in figures["parts"]] == [
        ("first", "training", 3), ("second", "training", 3), ("second", "evaluation", 1),
    ]  # fmt: skip


def test_ledger_is_found_by_its_name_or_through_run_json(run: Path) -> None:
    elsewhere = run / "runs" / "first"
    elsewhere.mkdir(parents=True)
    (elsewhere / "run.json").write_text('{"ledger": "../../ledger.jsonl"}')
    for named in (run / "ledger.jsonl", elsewhere, elsewhere / "run.json"):
        assert "9 entries, chain intact" in command("privacy", "ledger", named).out
    assert "neither ledger.jsonl nor run.json" in refusal("privacy", "ledger", run / "runs")


def test_ledger_that_was_edited_is_refused(run: Path) -> None:
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"step":1', b'"step":0', 1))
    assert "line 3 of" in refusal("privacy", "ledger", run)


def test_ledger_over_budget_is_shown_and_fails(run: Path) -> None:
    done = command("privacy", "ledger", run, "--budget", 0.1)
    assert done.code == 1
    assert "all together" in done.out
    assert "more than the budget of 0.1" in done.err
