"""The gate decides as accounting for every step would, and asks the accountant rarely."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("dp_accounting")

from heinfer.errors import ParameterError, PrivacyBudgetError
from heinfer.training.privacy import budget
from heinfer.training.privacy.accounting import compute_epsilon
from heinfer.training.privacy.budget import BudgetGate
from heinfer.training.privacy.mechanisms import GaussianRelease, Mechanism, SampledGaussian
from heinfer.training.privacy.planning import plan_training

DELTA = 1e-5
STEP = SampledGaussian(4.0, 0.05)


def spend_all(gate: BudgetGate, mechanism: Mechanism, most: int = 10_000) -> int:
    """Spend until refused; return how often it went well."""
    for count in range(most):
        try:
            gate.spend(mechanism)
        except PrivacyBudgetError:
            return count
    raise AssertionError("never refused")


@pytest.mark.parametrize("count", [1, 16, 17, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 15, 33, 100))])
def test_spend_target_that_is_exactly_some_steps_allows_exactly_those(count: int) -> None:
    target = compute_epsilon([STEP.times(count)], DELTA)
    assert spend_all(BudgetGate(target, DELTA), STEP) == count
    assert spend_all(BudgetGate(target - 1e-6, DELTA), STEP) == count - 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 10))])
def test_spend_random_mechanisms_decides_as_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    kinds: list[Mechanism] = [
        SampledGaussian(draw.uniform(4, 8), draw.uniform(0.05, 0.2)),
        SampledGaussian(draw.uniform(4, 8), draw.uniform(0.05, 0.2), draw.randint(2, 5)),
        GaussianRelease(draw.uniform(10, 30)),
    ]
    spent: list[Mechanism] = [draw.choice(kinds) for _ in range(draw.randint(0, 3))]
    planned = [kind.times(draw.randint(1, 4)) for kind in kinds[: draw.randint(0, 3)]]
    target = compute_epsilon(spent, DELTA) + draw.uniform(0.05, 0.2)
    gate = BudgetGate(target, DELTA, spent, planned)
    refusals = 0
    while refusals < 3:
        mechanism = draw.choice(kinds)
        allowed = compute_epsilon([*spent, mechanism], DELTA) <= target
        try:
            gate.spend(mechanism)
        except PrivacyBudgetError:
            assert not allowed
            refusals += 1
        else:
            assert allowed
            spent.append(mechanism)
    assert gate.epsilon == compute_epsilon(spent, DELTA) <= target


def test_check_counts_nothing() -> None:
    gate = BudgetGate(compute_epsilon([STEP], DELTA), DELTA)
    for _ in range(3):
        gate.check(STEP)
    assert gate.epsilon == 0
    gate.spend(STEP)
    with pytest.raises(PrivacyBudgetError):
        gate.check(STEP)
    assert gate.spent == (STEP,)


def test_spend_a_whole_plan_fits_and_one_step_more_does_not() -> None:
    plan = plan_training(samples=10_000, batch=500, steps=40, target_epsilon=0.3, shape="steps:1.0,0.7", delta=DELTA)
    for planned in ((), plan.mechanisms()):
        gate = BudgetGate(plan.epsilon_pld, DELTA, planned=planned)
        for step in range(plan.steps):
            gate.spend(plan.mechanism(step))
        assert gate.epsilon == plan.epsilon_pld
        with pytest.raises(PrivacyBudgetError, match=r"target is .* is spent"):
            gate.spend(plan.mechanism(0))


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Targets that the gate has asked the accountant about."""
    asked: list[float] = []
    ask = budget.fits

    def counted(mechanisms: Any, delta: float, target: float) -> bool:
        asked.append(target)
        return ask(mechanisms, delta, target)

    monkeypatch.setattr(budget, "fits", counted)
    return asked


def test_spend_planned_steps_ask_the_accountant_once(questions: list[float]) -> None:
    planned: Iterable[Mechanism] = [STEP.times(300), GaussianRelease(40.0, 5)]
    gate = BudgetGate(5.0, DELTA, planned=planned)
    for _ in range(300):
        gate.spend(STEP)
    gate.spend(GaussianRelease(40.0, 5))
    assert len(questions) == 1


def test_spend_unplanned_steps_ask_the_accountant_rarely(questions: list[float]) -> None:
    target = compute_epsilon([STEP.times(1000)], DELTA)
    assert spend_all(BudgetGate(target, DELTA), STEP) == 1000
    assert len(questions) <= 25


def test_spend_what_was_spent_before_counts() -> None:
    target = compute_epsilon([STEP.times(20)], DELTA)
    assert spend_all(BudgetGate(target, DELTA, spent=[STEP.times(13)]), STEP) == 7
    assert spend_all(BudgetGate(target, DELTA, spent=[STEP.times(25)]), STEP) == 0


def test_spend_plan_that_does_not_fit_is_taken_as_far_as_it_does() -> None:
    target = compute_epsilon([STEP.times(20)], DELTA)
    assert spend_all(BudgetGate(target, DELTA, planned=[STEP.times(50)]), STEP) == 20


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan"), float("inf")])
def test_gate_impossible_target_is_refused(target: float) -> None:
    with pytest.raises(ParameterError, match="target"):
        BudgetGate(target, DELTA)


def test_gate_impossible_delta_is_refused() -> None:
    with pytest.raises(ParameterError, match="delta"):
        BudgetGate(1.0, float("nan"))
