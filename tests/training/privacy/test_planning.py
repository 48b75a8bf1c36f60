"""Plans cost what they say, and at most their target."""

from __future__ import annotations

import json
from typing import Any

import pytest

dp_accounting = pytest.importorskip("dp_accounting")

from dp_accounting.pld import PLDAccountant  # noqa: E402

from heinfer.errors import InputError, ParameterError, PrivacyBudgetError  # noqa: E402
from heinfer.training.privacy.accounting import compute_epsilon  # noqa: E402
from heinfer.training.privacy.calibration import TOLERANCE  # noqa: E402
from heinfer.training.privacy.mechanisms import GaussianRelease, Mechanism, SampledGaussian  # noqa: E402
from heinfer.training.privacy.planning import PrivacyPlan, count_steps, plan_training  # noqa: E402

SMALL: dict[str, Any] = {"samples": 60_000, "batch": 600, "steps": 600}


def library_epsilon(plan: PrivacyPlan) -> float:
    """Cost of a plan by the library's accountant, told step by step level."""
    accountant = PLDAccountant()
    for level in plan.levels:
        event = dp_accounting.GaussianDpEvent(level.noise_multiplier)
        event = dp_accounting.PoissonSampledDpEvent(plan.expected_batch / plan.samples, event)
        accountant.compose(event, level.steps)
    for mechanism in plan.reserve:
        accountant.compose(dp_accounting.GaussianDpEvent(mechanism.noise_multiplier), mechanism.count)
    return float(accountant.get_epsilon(plan.delta))


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ("constant", 0.01),
        ("constant", 0.2),
        ("constant", 1.5),
        ("steps:0.6,0.9,1.1", 0.5),
    ],
)
def test_plan_training_target_is_met_from_below_and_closely(shape: str, target: float) -> None:
    plan = plan_training(**SMALL, target_epsilon=target, shape=shape)
    assert target - min(TOLERANCE, target / 100) <= plan.epsilon_pld <= target
    # The library composes level by level, which rounds differently.
    assert plan.epsilon_pld == pytest.approx(library_epsilon(plan), abs=1e-7)
    assert plan.epsilon_rdp >= plan.epsilon_pld - 1e-3
    assert sum(level.steps for level in plan.levels) == plan.steps == 600


def test_plan_training_agrees_with_the_librarys_calibration() -> None:
    plan = plan_training(**SMALL, target_epsilon=0.5)
    expected = dp_accounting.calibrate_dp_mechanism(
        PLDAccountant,
        lambda sigma: dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(sigma)), 600
        ),
        0.5,
        plan.delta,
        bracket_interval=dp_accounting.ExplicitBracketInterval(1.5, 6.0),
        tol=1e-3,
    )
    (level,) = plan.levels
    assert level.noise_multiplier == pytest.approx(expected, rel=4e-3)
    assert level.noise_multiplier >= expected - 2e-3  # less noise would pass the target


def test_plan_training_shape_is_scaled_as_a_whole() -> None:
    plan = plan_training(**SMALL, target_epsilon=0.4, shape="steps:0.6,0.9,1.1")
    first, second, third = (level.noise_multiplier for level in plan.levels)
    assert (second / first, third / first) == pytest.approx((0.9 / 0.6, 1.1 / 0.6))
    assert [level.steps for level in plan.levels] == [200, 200, 200]


@pytest.mark.slow
def test_plan_training_long_ramp_of_32_levels_meets_the_target() -> None:
    plan = plan_training(samples=60_000, batch=512, steps=1200, target_epsilon=0.1, shape="exponential:1.0,0.3")
    assert len(plan.levels) == 32
    assert 0.1 - TOLERANCE <= plan.epsilon_pld <= 0.1


def test_plan_training_given_noise_is_the_shapes_factor() -> None:
    plan = plan_training(samples=50_000, batch=512, epochs=10, noise_multiplier=1.3, delta=1e-5)
    assert plan.steps == 976
    assert [(level.noise_multiplier, level.steps) for level in plan.levels] == [(1.3, 976)]
    assert plan.target_epsilon is None
    assert (plan.epsilon_pld, plan.epsilon_rdp) == pytest.approx((1.154, 1.279), abs=6e-4)


def test_plan_training_reserve_is_paid_from_the_same_target() -> None:
    reserve = (GaussianRelease(25.0, 2),)
    alone, with_reserve = (plan_training(**SMALL, target_epsilon=0.6, reserve=r) for r in ((), reserve))
    assert with_reserve.epsilon_pld <= 0.6
    assert library_epsilon(with_reserve) == pytest.approx(with_reserve.epsilon_pld, abs=1e-7)
    assert with_reserve.levels[0].noise_multiplier > alone.levels[0].noise_multiplier * 1.01
    assert with_reserve.mechanisms()[-1] == reserve[0]


def test_plan_training_reserve_that_costs_all_is_refused() -> None:
    with pytest.raises(PrivacyBudgetError, match="reserved"):
        plan_training(**SMALL, target_epsilon=0.5, reserve=(GaussianRelease(1.0),))


def test_plan_training_target_that_no_noise_meets_is_refused() -> None:
    with pytest.raises(PrivacyBudgetError, match="no noise meets"):
        plan_training(**SMALL, target_epsilon=1e-9, delta=1e-12)


def test_plan_training_target_that_protects_nobody_is_refused() -> None:
    with pytest.raises(ParameterError, match="protects nobody"):
        plan_training(samples=1_000, batch=10, steps=1, target_epsilon=300.0)


def test_plan_mechanism_gives_the_noise_of_every_step() -> None:
    plan = plan_training(**SMALL, noise_multiplier=2.0, shape="steps:0.6,0.9,1.1")
    taken: list[Mechanism] = [plan.mechanism(step) for step in range(600)]
    assert taken[199] == SampledGaussian(1.2, 0.01)
    assert taken[200] == SampledGaussian(1.8, 0.01)
    assert taken[-1] == SampledGaussian(2.2, 0.01)
    assert compute_epsilon(taken, plan.delta) == plan.epsilon_pld
    for step in (-1, 600):
        with pytest.raises(ParameterError, match="expected a step"):
            plan.mechanism(step)


def test_plan_json_gives_the_same_plan_back() -> None:
    plan = plan_training(**SMALL, target_epsilon=0.5, shape="steps:0.6,1.1", reserve=(GaussianRelease(20.0),))
    content = json.loads(json.dumps(plan.to_json()))
    assert PrivacyPlan.from_json(content) == plan
    assert content["adjacency"] == "add-or-remove-one"
    assert content["accountant"].startswith("dp-accounting 0.")
    for key in ("samples", "level_steps", "delta", "epsilon_pld", "adjacency"):
        with pytest.raises(InputError):
            PrivacyPlan.from_json({name: value for name, value in content.items() if name != key})
    for changed in ({"level_steps": [300, 301]}, {"epsilon_pld": 0.51}, {"delta": 0.1}, {"batch": 60_001}):
        with pytest.raises(ParameterError):
            PrivacyPlan.from_json({**content, **changed})
    for changed in ({"adjacency": "replace-one"}, {"sampler": "shuffled"}):
        with pytest.raises(InputError):
            PrivacyPlan.from_json({**content, **changed})


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "expected"),
    [(50_000, 512, 10, 976), (60_000, 2_048, 40, 1171), (100, 10, 0.3, 3), (100, 100, 1, 1), (1_000, 7, 0.1, 14)],
)
def test_count_steps_rounds_down(samples: int, batch: int, epochs: float, expected: int) -> None:
    assert count_steps(samples, batch, epochs) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": 0},
        {"samples": -5},
        {"samples": 1.5},
        {"batch": 0},
        {"batch": 60_001},
        {"batch": True},
        {"steps": 0},
        {"steps": None},
        {"epochs": 1.0},
        {"steps": None, "epochs": float("nan")},
        {"steps": None, "epochs": -1.0},
        {"steps": None, "epochs": 0.001},
        {"delta": 1 / 60_000},
        {"delta": 0.5},
        {"delta": 0.0},
        {"delta": float("nan")},
        {"target_epsilon": None},
        {"target_epsilon": 0.0},
        {"target_epsilon": -1.0},
        {"target_epsilon": float("nan")},
        {"target_epsilon": float("inf")},
        {"noise_multiplier": 1.0},
        {"target_epsilon": None, "noise_multiplier": float("nan")},
        {"target_epsilon": None, "noise_multiplier": -1.0},
        {"target_epsilon": None, "noise_multiplier": 0.01},
        {"shape": "spiral"},
    ],
)
def test_plan_training_impossible_values_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        plan_training(**{**SMALL, "target_epsilon": 1.0, **changed})


def test_plan_training_delta_of_one_record_names_bound_and_default() -> None:
    with pytest.raises(ParameterError, match=r"below 1 / N = 1\.67e-05, found 0\.001: .* 1\.67e-06 is the default"):
        plan_training(**SMALL, target_epsilon=1.0, delta=1e-3)
