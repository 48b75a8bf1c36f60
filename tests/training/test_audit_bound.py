"""The audit's bound against exact probabilities, the paper's example, and mechanisms whose epsilon is known."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("dp_accounting")

from scipy.optimize import brentq
from scipy.stats import binom, norm

from heinfer.training.auditing.bound import RULES, best, bound_epsilon, ceiling, lower_bound, probability_of
from heinfer.training.auditing.power import Setting, simulate_scores
from heinfer.training.privacy.planning import Level


def test_bound_of_the_papers_example():
    assert lower_bound(1000, 100, 75, 1e-4, 0.05) == pytest.approx(0.673, abs=5e-4)  # appendix D


def exact_probability(canaries, made, correct, accuracy, delta):
    """Theorem 5.2 word for word, in rational numbers."""
    mass = [math.comb(made, k) * accuracy**k * (1 - accuracy) ** (made - k) for k in range(made + 1)]
    steepest = max(2 * sum(mass[max(0, correct - i) : correct]) / Fraction(i) for i in range(1, canaries + 1))
    return min(Fraction(1), sum(mass[correct:]) + canaries * delta * steepest)


@pytest.mark.parametrize("odds", [1, 3, 20])
@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 1000), Fraction(1, 20)])
def test_probability_is_that_of_rational_arithmetic(odds, delta):
    for made, canaries in ((1, 1), (5, 5), (5, 9), (12, 40)):
        for correct in range(made + 1):
            expected = exact_probability(canaries, made, correct, Fraction(odds, odds + 1), delta)
            found = probability_of(canaries, made, correct, math.log(odds), float(delta))
            assert found == pytest.approx(float(expected), rel=1e-9)


def test_bound_of_guesses_that_are_all_right_has_a_closed_form():
    for made in (3, 10, 100, 500):
        chance = 0.05 ** (1 / made)
        expected = max(0.0, math.log(chance / (1 - chance)))
        assert lower_bound(1000, made, made, 0.0, 0.05) == pytest.approx(expected, abs=1e-6)


def test_bound_of_a_coin_or_of_no_guess_is_zero():
    assert lower_bound(1000, 500, 250, 1e-5, 0.05) == 0
    assert lower_bound(1000, 1, 1, 0.0, 0.05) == 0
    assert lower_bound(1000, 0, 0, 0.0, 0.05) == 0


def test_bound_rises_with_right_guesses_and_falls_with_delta_and_certainty():
    rising = [lower_bound(1000, 100, correct, 1e-5, 0.05) for correct in range(40, 101)]
    assert rising == sorted(rising)
    assert rising[0] == 0 < rising[-1]
    falling = [lower_bound(1000, 100, 90, delta, 0.05) for delta in (0, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > falling[-1]
    assert lower_bound(1000, 100, 90, 1e-5, 0.01) < lower_bound(1000, 100, 90, 1e-5, 0.05)
    assert lower_bound(5000, 100, 90, 1e-4, 0.05) < lower_bound(1000, 100, 90, 1e-4, 0.05)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.01), (2.0, 1e-3), (4.0, 1e-4)])
def test_probability_holds_for_randomised_responses_that_sometimes_tell_all(epsilon, delta):
    accuracy = 1 / (1 + math.exp(-epsilon))
    for canaries, correct in itertools.product((10, 50), range(1, 11)):
        share = canaries * correct // 10
        one_by_one = binom.sf(share - 1, canaries, delta + (1 - delta) * accuracy)
        all_at_once = delta + (1 - delta) * binom.sf(share - 1, canaries, accuracy)
        assert max(one_by_one, all_at_once) <= probability_of(canaries, canaries, share, epsilon, delta) + 1e-12


def test_bound_of_a_randomised_response_exceeds_its_epsilon_as_often_as_stated():
    random, epsilon = np.random.default_rng(7), 1.3
    correct = random.binomial(300, 1 / (1 + math.exp(-epsilon)), 4000)
    exceeded = np.mean([lower_bound(300, 300, int(right), 0.0, 0.05) > epsilon for right in correct])
    assert 0.03 < exceeded <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)  # the binomial is discrete: a little less


def gaussian_epsilon(multiplier, delta):
    """Balle and Wang 2018, theorem 8."""

    def excess(epsilon):
        above, below = 0.5 / multiplier - epsilon * multiplier, -0.5 / multiplier - epsilon * multiplier
        return norm.cdf(above) - math.exp(epsilon) * norm.cdf(below) - delta

    return brentq(excess, 0, 200)


def test_bound_of_a_gaussian_mechanism_stays_below_its_epsilon():
    random, delta, multiplier = np.random.default_rng(3), 1e-5, 0.5
    truth = gaussian_epsilon(multiplier, delta)
    setting = Setting((Level(multiplier, 1),), 1.0, 1000, delta, 0.95, truth)
    bounds = []
    for _ in range(200):
        included = random.random(1000) < 0.5
        scores = simulate_scores(setting, 1.0, included, random)
        bounds.append(best(bound_epsilon(scores, included, delta, 0.95, random)).epsilon)
    assert np.mean(np.array(bounds) > truth) <= 0.05
    assert np.mean(bounds) > 0.15 * truth


def test_guesses_are_the_extreme_scores_and_ties_are_broken_by_chance():
    included = np.arange(1000) >= 500
    sure = bound_epsilon(np.arange(1000.0), included, 1e-5, 0.95, np.random.default_rng(0))
    assert [guess.correct for guess in sure] == [guess.made for guess in sure]
    assert best(sure).epsilon == ceiling(1000, 1e-5, 0.95)
    tied = bound_epsilon(np.zeros(1000), included, 1e-5, 0.95, np.random.default_rng(0))
    assert all(abs(guess.correct - guess.made / 2) < 4 * math.sqrt(guess.made) / 2 for guess in tied)
    assert len(tied) == len(RULES)
