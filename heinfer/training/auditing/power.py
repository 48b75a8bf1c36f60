"""What an audit would notice: simulated audits of trainers with less noise than they claim.

A simulated canary goes through the same steps as a real one, without a network: sampled with probability q, a
contribution of the whole sensitivity, Gaussian noise. The auditor's scores and guesses are the real ones and assume the
noise that is claimed, while the true noise is a part of it. The true epsilon of that noise is the accountant's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heinfer.training.auditing.bound import best, bound_epsilon
from heinfer.training.privacy.accounting import compute_epsilon
from heinfer.training.privacy.mechanisms import LEAST_MULTIPLIER, SampledGaussian
from heinfer.training.privacy.planning import Level

#: True epsilon over the claim, for the table.
MULTIPLES = (1.0, 2.0, 4.0, 8.0)
#: Part of the simulated audits that must find a violation for it to count as noticed.
_NOTICED = 0.9
#: Grid of the accountant here: a hundredth of epsilon is exact enough for a forecast, and fast.
_INTERVAL = 1e-2
_SEARCH_STEPS = 7
_MOST_AUDITS, _FEWEST_AUDITS = 10, 4
#: Canary steps (canaries times steps) that all simulations may take together: ten to thirty seconds.
_WORK = 2e8
#: Canary steps at a time; bounds memory.
_PIECE = 1 << 20
#: Log-likelihoods of one step end here in a simulation, where float32 ends.
_LARGEST_LIKELIHOOD = 80.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is audited.

    Attributes:
        levels: noise on the gradients, in the order of training.
        probability: with which a record joins a step.
        canaries: m.
        delta: of the claim.
        confidence: of the bound.
        claim: epsilon of levels and probability.
    """

    levels: tuple[Level, ...]
    probability: float
    canaries: int
    delta: float
    confidence: float
    claim: float

    def epsilon(self, part: float) -> float:
        """Return what the levels cost with only a part of their noise."""
        steps = (SampledGaussian(part * level.noise_multiplier, self.probability, level.steps) for level in self.levels)
        return compute_epsilon(steps, self.delta, interval=_INTERVAL)

    @property
    def least_part(self) -> float:
        """The smallest part that the accountant takes."""
        return min(1.0, (1 + 1e-9) * LEAST_MULTIPLIER / min(level.noise_multiplier for level in self.levels))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Simulated audits of one true epsilon.

    Attributes:
        true_epsilon: of the simulated trainer.
        noise: its noise as a part of what it claims.
        bound: mean of the lower bounds.
        noticed: part of the audits whose bound exceeded the claim.
    """

    true_epsilon: float
    noise: float
    bound: float
    noticed: float


@dataclass(frozen=True, slots=True)
class Power:
    """What an audit would notice.

    Attributes:
        forecasts: for true epsilons that are multiples of the claim, as far as the accountant goes.
        noticed_above: the smallest true epsilon that nine of ten simulated audits noticed; None where not even
            the smallest noise that is accounted for shows.
        audits: simulated audits a forecast.
    """

    forecasts: tuple[Forecast, ...]
    noticed_above: float | None
    audits: int


def forecast_power(setting: Setting, generator: np.random.Generator) -> Power:
    """Simulate audits of trainers whose true epsilon is the claim and more.

    Args:
        setting: what is audited.
        generator: for the simulations.
    """
    steps = sum(level.steps for level in setting.levels)
    affordable = _WORK / (setting.canaries * steps * (len(MULTIPLES) + _SEARCH_STEPS))
    audits = int(min(max(affordable, _FEWEST_AUDITS), _MOST_AUDITS))
    forecasts = []
    for multiple in MULTIPLES:
        part = 1.0 if multiple == 1 else _find_part(setting, multiple * setting.claim)
        if part is not None:
            forecasts.append(_simulate(setting, part, audits, generator))
    return Power(tuple(forecasts), _notice(setting, audits, generator), audits)


def simulate_scores(
    setting: Setting, part: float, included: NDArray[np.bool_], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return the scores of simulated canaries.

    Args:
        setting: what is audited.
        part: true noise as a part of what is claimed.
        included: coins, shape (canaries,).
        generator: of sampling and noise.
    """
    scores = np.zeros(setting.canaries)
    inside = included[:, None]
    for level in setting.levels:
        size = max(1, _PIECE // setting.canaries)
        for start in range(0, level.steps, size):
            shape = (setting.canaries, min(size, level.steps - start))
            sampled = (generator.random(shape, dtype=np.float32) < setting.probability) & inside
            noise = np.float32(part * level.noise_multiplier) * generator.standard_normal(shape, dtype=np.float32)
            likelihood = (sampled + noise - np.float32(0.5)) / np.float32(level.noise_multiplier**2)
            mixed = np.expm1(np.minimum(likelihood, np.float32(_LARGEST_LIKELIHOOD)))
            scores += np.log1p(np.float32(setting.probability * (1 - 1e-7)) * mixed).sum(axis=1, dtype=np.float64)
    return scores


def _simulate(setting: Setting, part: float, audits: int, generator: np.random.Generator) -> Forecast:
    bounds = []
    for _ in range(audits):
        included = generator.random(setting.canaries) < 0.5
        scores = simulate_scores(setting, part, included, generator)
        bounds.append(best(bound_epsilon(scores, included, setting.delta, setting.confidence, generator)).epsilon)
    noticed = float(np.mean([bound > setting.claim for bound in bounds]))
    return Forecast(setting.epsilon(part), part, float(np.mean(bounds)), noticed)


def _find_part(setting: Setting, epsilon: float) -> float | None:
    """Return the part of the noise that costs an epsilon above the claim, None where it is too little to account."""
    low, high = math.log(setting.least_part), 0.0
    if setting.epsilon(math.exp(low)) < epsilon:
        return None
    for _ in range(2 * _SEARCH_STEPS):
        middle = (low + high) / 2
        if setting.epsilon(math.exp(middle)) < epsilon:
            high = middle
        else:
            low = middle
    return math.exp(high)


def _notice(setting: Setting, audits: int, generator: np.random.Generator) -> float | None:
    """Return the smallest true epsilon that is noticed."""
    low, high = math.log(setting.least_part), 0.0
    if low == high or _simulate(setting, math.exp(low), audits, generator).noticed < _NOTICED:
        return None
    for _ in range(_SEARCH_STEPS - 1):
        middle = (low + high) / 2
        if _simulate(setting, math.exp(middle), audits, generator).noticed < _NOTICED:
            high = middle
        else:
            low = middle
    return setting.epsilon(math.exp(low))
