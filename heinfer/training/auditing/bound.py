"""From guesses about coin flips to a lower bound on epsilon.

Each of m canaries was in the training or not, by a fair coin of its own. An auditor who sees the outcome guesses some
of the coins and abstains on the others. Under (epsilon, delta)-differential privacy no auditor is right much more often
than a coin that shows the truth with probability e^epsilon / (1 + e^epsilon): 75 right ones of 100 guesses about 1,000
coins mean, with 95 % confidence, that epsilon exceeds 0.67 at delta = 1e-4.

Source: Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", theorem 5.2.

Formal guarantee: if the training is (epsilon, delta)-differentially private under adding or removing one record, then
`bound_epsilon` exceeds epsilon with a probability of at most 1 - confidence, whatever the scores are. How many guesses
are made is settled beforehand, as a few fractions of m (`RULES`), each tested at its share of the error (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, gammaln  # type: ignore[import-untyped]

from heinfer.errors import ParameterError

#: How far the search goes: an accuracy of 1 - 1e-13, which no number of canaries supports. It ends within 1e-7.
_LARGEST_EPSILON = 30.0
_SEARCH_STEPS = 28


@dataclass(frozen=True, slots=True)
class Rule:
    """How many coins are guessed.

    Attributes:
        included: part of the canaries, those with the highest scores, that are guessed to be in.
        excluded: part of them, those with the lowest scores, that are guessed to be out.
    """

    included: float
    excluded: float

    def counts(self, canaries: int) -> tuple[int, int]:
        """Return k+ and k-, the numbers of either guess."""
        return max(1, int(self.included * canaries)), int(self.excluded * canaries)


#: The declared grid: few sure guesses refute small epsilons, many refute large ones. A canary that joined a step shows
#: by a high score, while one that never did looks like one that was left out; so one rule guesses one side only.
RULES = (Rule(0.05, 0.05), Rule(0.1, 0.1), Rule(0.2, 0.2), Rule(0.45, 0.45), Rule(0.1, 0.0))


@dataclass(frozen=True, slots=True)
class Guesses:
    """What came of one rule.

    Attributes:
        included: k+, canaries guessed to be in.
        excluded: k-, canaries guessed to be out.
        correct: how many of both are right.
        epsilon: lower bound that follows, at the rule's share of the error.
    """

    included: int
    excluded: int
    correct: int
    epsilon: float

    @property
    def made(self) -> int:
        """Number of guesses."""
        return self.included + self.excluded


def bound_epsilon(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    delta: float,
    confidence: float,
    generator: np.random.Generator,
    rules: Sequence[Rule] = RULES,
) -> tuple[Guesses, ...]:
    """Guess and bound, by every rule; the largest bound holds with the whole confidence.

    Args:
        scores: of every canary, higher where it seems to be in; made without a look at the coins, shape (canaries,).
        included: the coins, shape (canaries,).
        delta: of the guarantee.
        confidence: that all of the bounds hold.
        generator: puts equal scores in a random order.
        rules: declared beforehand.
    """
    order = np.lexsort((generator.random(len(scores)), scores))
    found = []
    for rule in rules:
        most, least = rule.counts(len(scores))
        right = int(included[order[len(order) - most :]].sum()) + int((~included[order[:least]]).sum())
        epsilon = lower_bound(len(scores), most + least, right, delta, (1 - confidence) / len(rules))
        found.append(Guesses(most, least, right, epsilon))
    return tuple(found)


def best(guesses: Sequence[Guesses]) -> Guesses:
    """Return the guesses with the largest bound."""
    return max(guesses, key=lambda guess: guess.epsilon)


def ceiling(canaries: int, delta: float, confidence: float, rules: Sequence[Rule] = RULES) -> float:
    """Return the largest bound that is possible: that of guesses which are all right."""
    counts = [sum(rule.counts(canaries)) for rule in rules]
    return max(lower_bound(canaries, made, made, delta, (1 - confidence) / len(rules)) for made in counts)


@lru_cache(maxsize=65536)
def lower_bound(canaries: int, made: int, correct: int, delta: float, error: float) -> float:
    """Return the largest epsilon that is refuted.

    Args:
        canaries: m, number of coins.
        made: number of guesses, at most m.
        correct: right guesses, at most as many.
        delta: of the guarantee.
        error: probability with which the bound may exceed the truth.

    Returns:
        A lower bound on epsilon; 0 where nothing is refuted.

    Raises:
        ParameterError: a value is out of range.
    """
    if not 0 < error < 1:
        raise ParameterError(f"expected a probability of error between 0 and 1, found {error}")
    low, high = 0.0, _LARGEST_EPSILON
    if probability_of(canaries, made, correct, low, delta) >= error:
        return 0.0
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        if probability_of(canaries, made, correct, middle, delta) < error:
            low = middle
        else:
            high = middle
    return low


def probability_of(canaries: int, made: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the largest probability with which so many guesses are right under (epsilon, delta)-privacy.

    With W binomial of `made` trials and probability e^epsilon / (1 + e^epsilon), v = `correct` and m = `canaries`:
    P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i, for i = 1 to m (theorem 5.2; beyond i = v the maximum falls).

    Args:
        canaries: m, number of coins.
        made: number of guesses.
        correct: right guesses.
        epsilon: of the guarantee that is tested.
        delta: of the guarantee that is tested.

    Raises:
        ParameterError: a value is out of range.
    """
    if not 0 <= correct <= made <= canaries:
        raise ParameterError(f"expected correct <= guesses <= canaries, found {correct}, {made} and {canaries}")
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ParameterError(f"expected epsilon >= 0 and delta in [0, 1], found {epsilon} and {delta}")
    accuracy = 1 / (1 + math.exp(-epsilon))
    if correct == 0:
        return 1.0
    by_chance = float(bdtrc(correct - 1, made, accuracy))
    if delta == 0:
        return by_chance
    just_below = np.cumsum(_binomial(made, accuracy, epsilon)[correct - 1 :: -1])
    steepest = float((just_below / np.arange(1, correct + 1)).max())
    return min(1.0, by_chance + 2 * canaries * delta * steepest)


def _binomial(trials: int, accuracy: float, epsilon: float) -> NDArray[np.float64]:
    """Probabilities of 0 to `trials` successes; the odds of one are e^epsilon."""
    logarithms = _log_choices(trials) + trials * math.log(accuracy) - epsilon * np.arange(trials, -1, -1)
    probabilities: NDArray[np.float64] = np.exp(logarithms)
    return probabilities


@lru_cache(maxsize=64)
def _log_choices(trials: int) -> NDArray[np.float64]:
    taken = np.arange(trials + 1)
    choices: NDArray[np.float64] = gammaln(trials + 1) - gammaln(taken + 1) - gammaln(trials - taken + 1)
    return choices
