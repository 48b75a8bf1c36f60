"""Verdicts follow from the numbers: intervals are Welch's, and each verdict has its place between them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("dp_accounting")

from scipy import stats

from heinfer.training.studies.arms import RATES, at_rate
from heinfer.training.studies.claims import Claim, Ladder
from heinfer.training.studies.verdicts import (
    Contrast,
    Estimate,
    Verdict,
    better,
    estimate,
    judge,
    judge_all,
    judge_best,
)


def test_estimate_of_two_arms_is_welch_s_interval() -> None:
    first, second = [0.91, 0.925, 0.919], [0.88, 0.9, 0.85, 0.87]
    found = estimate(better("a", "b"), {"a": first, "b": second})
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((100 * expected.low, 100 * expected.high))
    assert found.difference == pytest.approx(100 * (np.mean(first) - np.mean(second)))


def test_estimate_of_weighted_arms_scales_as_the_weights_do() -> None:
    values = {"a": [0.9, 0.92, 0.93], "b": [0.8, 0.85, 0.81]}
    one = estimate(better("a", "b"), values)
    two = estimate(Contrast("", {"a": 2.0, "b": -2.0}), values)
    assert one is not None
    assert two is not None
    assert (two.difference, two.error, two.low) == pytest.approx((2 * one.difference, 2 * one.error, 2 * one.low))


def test_estimate_needs_two_seeds_of_every_arm() -> None:
    assert estimate(better("a", "b"), {"a": [0.9, 0.8], "b": [0.8]}) is None
    assert estimate(better("a", "b"), {"a": [0.9, 0.8]}) is None


def test_estimate_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        values = {"a": generator.normal(0.9, 0.01, 3).tolist(), "b": generator.normal(0.88, 0.01, 3).tolist()}
        found = estimate(better("a", "b"), values)
        assert found is not None
        hits += found.low <= 2.0 <= found.high
    assert 0.93 <= hits / 600 <= 0.985  # Welch's interval is a little wide for three and three


@pytest.mark.parametrize(
    ("difference", "half", "claimed", "nothing", "verdict"),
    [
        (3.0, 1.0, 2.0, 0.0, Verdict.HOLDS),
        (2.0, 1.0, 2.0, 0.0, Verdict.HOLDS),
        (1.5, 1.0, 2.0, 0.0, Verdict.IN_PART),
        (0.5, 1.0, 2.0, 0.0, Verdict.FAILS),
        (-3.0, 1.0, 2.0, 0.0, Verdict.FAILS),
        (1.0, 1.5, 2.0, 0.0, Verdict.UNDECIDED),
        (0.5, 1.0, 0.0, 0.0, Verdict.UNDECIDED),
        (2.0, 1.0, 0.0, 0.0, Verdict.HOLDS),
        (-2.0, 1.0, 0.0, 0.0, Verdict.FAILS),
        (-1.0, 1.0, -3.0, -3.0, Verdict.HOLDS),
        (-5.0, 1.0, -3.0, -3.0, Verdict.FAILS),
        (-3.5, 1.0, -3.0, -3.0, Verdict.UNDECIDED),
        (0.0, 0.0, 0.0, 0.0, Verdict.FAILS),  # every seed the same: no difference, and no doubt
    ],
)
def test_judge(difference: float, half: float, claimed: float, nothing: float, verdict: Verdict) -> None:
    found = Estimate(difference, half / 3, difference - half, difference + half)
    assert judge(Contrast("", {}, claimed, nothing), found) is verdict


def test_judge_without_an_estimate_is_undecided() -> None:
    assert judge(Contrast("", {}), None) is Verdict.UNDECIDED


def test_judge_all_and_best_combine_verdicts() -> None:
    holds, part, fails, open_ = Verdict.HOLDS, Verdict.IN_PART, Verdict.FAILS, Verdict.UNDECIDED
    for found, together, best in (
        ([holds, holds], holds, holds),
        ([fails, fails], fails, fails),
        ([holds, fails], part, fails),
        ([holds, part], part, open_),
        ([holds, fails, open_], part, fails),
        ([holds, open_], open_, open_),
        ([fails, open_], open_, fails),
        ([], open_, open_),
    ):
        assert judge_all(found) is together
        assert judge_best(found) is best


@pytest.mark.parametrize(
    ("best_without", "best_with", "verdict"),
    [(0.004, 0.002, Verdict.HOLDS), (0.004, 0.004, Verdict.FAILS), (0.0005, 0.0005, Verdict.UNDECIDED)],
)
def test_ladder_half_of_the_best_rate_has_to_win(best_without: float, best_with: float, verdict: Verdict) -> None:
    def values(best: float, rate: float) -> list[float]:
        middle = 0.9 - 0.05 * abs(np.log2(rate / best))
        return [middle - 0.001, middle, middle + 0.001]

    accuracies = {
        at_rate(rate, private): values(best_with if private else best_without, rate)
        for rate, private in itertools.product(RATES, (True, False))
    }
    claim = Claim("rates", "", ladder=Ladder(RATES, 0.3, 0.7))
    assert claim.judge(accuracies) is verdict
    del accuracies[at_rate(RATES[-1], private=False)]
    assert claim.judge(accuracies) is Verdict.UNDECIDED
