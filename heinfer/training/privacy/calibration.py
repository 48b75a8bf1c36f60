"""The factor by which a shape of noise is multiplied so that a run costs a target epsilon.

Epsilon falls as noise grows, nearly as a power of it, so interpolation between logarithms needs few evaluations. They
are done on a coarse grid of the accountant first; the target then holds on its default grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from heinfer.errors import ParameterError, PrivacyBudgetError
from heinfer.training.privacy.accounting import INTERVAL, INTERVALS, compute_epsilon
from heinfer.training.privacy.mechanisms import LARGEST_MULTIPLIER, LEAST_MULTIPLIER, Mechanism, SampledGaussian

#: The result costs at most this much less than the target, or a hundredth of the target where that is less.
TOLERANCE = 1e-3
#: A grid is of use where its width is at most this part of epsilon: it adds about its width times sqrt(steps) / 10.
_GRID_PART = 1e-2
_MOST_EVALUATIONS = 100


@dataclass(frozen=True, slots=True)
class _Point:
    factor: float
    epsilon: float


@dataclass(frozen=True, slots=True)
class _Band:
    """What to find: a factor in [least, most] whose epsilon is in [low, high]."""

    least: float
    most: float
    low: float
    high: float

    @property
    def aim(self) -> float:
        return (self.low + self.high) / 2

    def clamp(self, factor: float) -> float:
        return min(max(factor, self.least), self.most)


def calibrate(
    relative: Sequence[tuple[float, int]],
    probability: float,
    reserve: Sequence[Mechanism],
    delta: float,
    target_epsilon: float,
) -> float:
    """Return the factor by which to multiply relative noise multipliers.

    Args:
        relative: (relative noise multiplier, number of steps) of each level.
        probability: with which a record joins a step.
        reserve: further mechanisms, which are not scaled.
        delta: at which epsilon is meant.
        target_epsilon: for levels and reserve together.

    Returns:
        A factor whose epsilon, on the accountant's default grid, is at most the target and within 1e-3 of it.

    Raises:
        PrivacyBudgetError: no noise multiplier up to 1e6 meets the target.
        ParameterError: the least noise that is accounted for, 0.2, costs less than the target.
    """

    def cost(factor: float, interval: float) -> float:
        steps = (SampledGaussian(_within(factor * value), probability, count) for value, count in relative)
        return compute_epsilon([*steps, *reserve], delta, interval=interval)

    paid = compute_epsilon(reserve, delta)
    if paid >= target_epsilon:
        raise PrivacyBudgetError(
            f"what is reserved for other purposes costs epsilon {paid:.4g} at delta {delta:g} by itself; nothing is "
            f"left for training of a target of {target_epsilon:g}"
        )
    values = [value for value, _ in relative]
    least, most = LEAST_MULTIPLIER / min(values), LARGEST_MULTIPLIER / max(values)
    if least >= most:
        raise ParameterError(f"noise multipliers from {min(values):g} to {max(values):g} are too far apart")
    factor = _guess(relative, probability, delta, target_epsilon)
    tolerance = min(TOLERANCE, target_epsilon / 100)
    for interval in INTERVALS[:-1]:
        if interval <= (target_epsilon - paid) * _GRID_PART:
            room = tolerance * interval / INTERVALS[-2]  # the next grid corrects
            near = _Band(least, most, target_epsilon - room / 2, target_epsilon)  # and costs a little less
            found = _search(partial(cost, interval=interval), factor, near)
            _refuse_loose_target(found, near)
            factor = found.factor
    band = _Band(least, most, target_epsilon - tolerance, target_epsilon)
    found = _search(partial(cost, interval=INTERVAL), factor, band)
    if found.epsilon > target_epsilon:
        raise PrivacyBudgetError(
            f"no noise meets a target of epsilon {target_epsilon:g} at delta {delta:g}: a noise multiplier of "
            f"{LARGEST_MULTIPLIER:g} still costs {found.epsilon:.4g}"
        )
    _refuse_loose_target(found, band)
    return found.factor


def _refuse_loose_target(found: _Point, band: _Band) -> None:
    if found.factor == band.least and found.epsilon < band.low:
        raise ParameterError(
            f"a target of epsilon {band.high:g} protects nobody: the least noise multiplier, {LEAST_MULTIPLIER:g}, "
            f"costs {found.epsilon:.4g}; choose a target below that"
        )


def _within(multiplier: float) -> float:
    """Undo rounding at either end of the range."""
    return min(max(multiplier, LEAST_MULTIPLIER), LARGEST_MULTIPLIER)


def _guess(relative: Sequence[tuple[float, int]], probability: float, delta: float, target_epsilon: float) -> float:
    """Return where to start: the central limit of many steps (Dong, Roth and Su 2022, corollary 5.4), roughly.

    Only the number of evaluations depends on it.
    """
    precision = math.fsum(count / value**2 for value, count in relative)
    return (1 + probability * math.sqrt(2 * precision * math.log(1 / delta)) / target_epsilon) / 1.5


def _search(cost: Callable[[float], float], start: float, band: _Band) -> _Point:
    """Find a factor whose cost lies in the band; the cost falls as the factor grows.

    Returns:
        A point in the band; or at the end of the range if the band lies beyond it; or, where the cost jumps across the
        band, the last point below it.
    """
    above: _Point | None = None
    below: _Point | None = None
    factor = band.clamp(start)
    for attempt in range(_MOST_EVALUATIONS):
        point = _Point(factor, cost(factor))
        if band.low <= point.epsilon <= band.high:
            return point
        if point.epsilon > band.high:
            above = point
        else:
            below = point
        if point.factor == (band.most if point is above else band.least):
            return point
        if above is not None and below is not None:
            if below.factor <= above.factor * (1 + 1e-12):
                break
            factor = _between(above, below, band.aim, halve=attempt % 3 == 2)
        else:
            factor = band.clamp(_beyond(point, band.aim, attempt))
    assert below is not None
    return below


def _between(above: _Point, below: _Point, aim: float, *, halve: bool) -> float:
    """Return a factor between two points: on the line through their logarithms, or halfway so as to never get stuck."""
    if halve or not math.isfinite(above.epsilon) or below.epsilon <= 0:
        return math.sqrt(above.factor * below.factor)
    part = math.log(above.epsilon / aim) / math.log(above.epsilon / below.epsilon)
    return above.factor * math.pow(below.factor / above.factor, part)


def _beyond(point: _Point, aim: float, attempt: int) -> float:
    """Return a factor on the other side of the aim, with steps that grow as long as they fall short."""
    ratio = min(max(point.epsilon / aim, 1e-6), 1e6)
    exponent = 0.7 * (1 << min(attempt, 4))
    return point.factor * min(max(math.pow(ratio, exponent), 1 / 8), 8.0)
