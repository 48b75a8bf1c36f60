"""How a measured difference is held against a claimed one.

A contrast is a weighted sum of the arms' mean accuracies, in points (hundredths). Its standard error comes from each
arm's own spread over the seeds, with the degrees of freedom of Welch and Satterthwaite, so that arms may scatter
differently; the interval covers 95 %. With `nothing` the value at which the claim has no content (mostly 0) and
`claimed` the value that it promises:

    holds           the interval is above `nothing`, and the difference reaches `claimed`
    holds in part   the interval is above `nothing`, the difference is smaller than `claimed`
    fails           the interval ends below `claimed` and is not above `nothing`
    undecided       anything else: the interval holds both values, or there are fewer than two seeds
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

#: Coverage of the intervals.
COVERAGE = 0.95


class Verdict(StrEnum):
    """What becomes of a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    FAILS = "fails"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Contrast:
    """A difference that a claim is about, in points of accuracy.

    Attributes:
        text: what it is, for the tables.
        weights: of the arms' means.
        claimed: what the claim promises at least.
        nothing: value at which the claim has no content.
    """

    text: str
    weights: Mapping[str, float]
    claimed: float = 0.0
    nothing: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured contrast, in points.

    Attributes:
        difference: measured.
        error: its standard error.
        low: where the interval begins.
        high: where it ends.
    """

    difference: float
    error: float
    low: float
    high: float


def better(arm: str, other: str, claimed: float = 0.0, nothing: float = 0.0) -> Contrast:
    """The contrast of two arms: how much better the first one is."""
    return Contrast(f"{arm} - {other}", {arm: 1.0, other: -1.0}, claimed, nothing)


def estimate(contrast: Contrast, accuracies: Mapping[str, Sequence[float]]) -> Estimate | None:
    """Measure a contrast.

    Args:
        contrast: its arms may be missing from the accuracies.
        accuracies: of every arm, in [0, 1], one for each seed.

    Returns:
        None where an arm has fewer than two seeds, so that nothing is known of its spread.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    difference, parts = 0.0, []
    for arm, weight in contrast.weights.items():
        values = 100 * np.asarray(accuracies.get(arm, ()))
        if len(values) < 2:
            return None
        difference += weight * float(values.mean())
        parts.append((weight**2 * float(values.var(ddof=1)) / len(values), len(values) - 1))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Estimate(difference, 0.0, difference, difference)
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
    half = float(t.ppf(0.5 + COVERAGE / 2, freedom)) * math.sqrt(variance)
    return Estimate(difference, math.sqrt(variance), difference - half, difference + half)


def judge(contrast: Contrast, found: Estimate | None) -> Verdict:
    """Hold a measured contrast against the claimed one."""
    if found is None:
        return Verdict.UNDECIDED
    if found.low > contrast.nothing:
        return Verdict.HOLDS if found.difference >= contrast.claimed else Verdict.IN_PART
    return Verdict.FAILS if found.high < contrast.claimed or found.high <= contrast.nothing else Verdict.UNDECIDED


def judge_all(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim with several contrasts, of which none is more important than another.

    All of a kind decide; some for and some against make it hold in part; what is open keeps it open.
    """
    found = set(verdicts)
    if found in ({Verdict.HOLDS}, {Verdict.FAILS}):
        return found.pop()
    if Verdict.IN_PART in found or found >= {Verdict.HOLDS, Verdict.FAILS}:
        return Verdict.IN_PART
    return Verdict.UNDECIDED


def judge_best(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim that something is the best: one that is better refutes it."""
    found = set(verdicts)
    if Verdict.FAILS in found:
        return Verdict.FAILS
    return Verdict.HOLDS if found == {Verdict.HOLDS} else Verdict.UNDECIDED
