"""How much noise a run needs, and what it costs, before anything private is read.

    plan = plan_training(samples=60_000, batch=2_048, epochs=40, target_epsilon=3.0, shape="steps:0.6,0.9,1.1")
    plan.levels         # the noise multiplier of every step
    plan.epsilon_pld    # at most 3, and less than 0.001 below it

A plan has the noise of every step, so the trainer needs no privacy decision of its own. The number of records N and
the expected batch are public; N is not protected by a guarantee with add-or-remove-one adjacency.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from heinfer.errors import InputError, ParameterError
from heinfer.training.privacy import mechanisms
from heinfer.training.privacy.accounting import (
    ACCOUNTANT_VERSION,
    ADJACENCY,
    Accountant,
    check_delta,
    compute_epsilon,
    default_delta,
)
from heinfer.training.privacy.calibration import calibrate
from heinfer.training.privacy.mechanisms import Mechanism, SampledGaussian
from heinfer.training.privacy.schedules import parse_shape


@dataclass(frozen=True, slots=True)
class Level:
    """Consecutive steps with the same noise.

    Attributes:
        noise_multiplier: sigma / C.
        steps: how many.
    """

    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        SampledGaussian(self.noise_multiplier, 1.0, self.steps)  # has the same bounds


@dataclass(frozen=True, slots=True)
class PrivacyPlan:
    """The noise of a run and its cost.

    Attributes:
        samples: number of records N.
        expected_batch: N times the sampling probability; also what noisy sums are divided by.
        steps: length of the run.
        delta: below 1 / N.
        target_epsilon: what the noise was calibrated for; None where the noise was given.
        levels: the noise, in the order of training.
        reserve: what is taken for other purposes than training and is paid from the same budget.
        epsilon_pld: cost of levels and reserve, the number to report.
        epsilon_rdp: the same by Rényi accounting, for comparison.
    """

    samples: int
    expected_batch: int
    steps: int
    delta: float
    target_epsilon: float | None
    levels: tuple[Level, ...]
    reserve: tuple[Mechanism, ...]
    epsilon_pld: float
    epsilon_rdp: float

    def __post_init__(self) -> None:
        _check_public(self.samples, self.expected_batch, self.delta)
        if sum(level.steps for level in self.levels) != self.steps or self.steps < 1:
            raise ParameterError(f"the levels of a plan of {self.steps} steps have other numbers of steps")
        for epsilon in (self.epsilon_pld, self.epsilon_rdp):
            if not isinstance(epsilon, float) or math.isnan(epsilon) or epsilon < 0:
                raise ParameterError(f"expected an epsilon of at least 0, found {epsilon!r}")
        if self.target_epsilon is not None:
            _check_target(self.target_epsilon)
            if self.epsilon_pld > self.target_epsilon:
                raise ParameterError(f"a plan for epsilon {self.target_epsilon} costs {self.epsilon_pld}")

    @property
    def sampling_probability(self) -> float:
        """Probability with which each record joins each batch."""
        return self.expected_batch / self.samples

    def mechanism(self, step: int) -> SampledGaussian:
        """Return what one step takes.

        Args:
            step: number of the step, from 0.

        Raises:
            ParameterError: the plan has no such step.
        """
        if not 0 <= step < self.steps:
            raise ParameterError(f"expected a step in [0, {self.steps}), found {step}")
        ends = list(accumulate(level.steps for level in self.levels))
        level = self.levels[bisect_right(ends, step)]
        return SampledGaussian(level.noise_multiplier, self.sampling_probability)

    def taken(self, steps: int) -> tuple[Level, ...]:
        """Return the noise of the first `steps` steps."""
        found = []
        for level in self.levels:
            count = min(steps, level.steps)
            if count > 0:
                found.append(Level(level.noise_multiplier, count))
            steps -= count
        return tuple(found)

    def first(self, steps: int) -> tuple[Mechanism, ...]:
        """Return what the first `steps` steps take, and the reserve."""
        return (*_training(self.taken(steps), self.sampling_probability), *self.reserve)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Return all that is taken: the steps and the reserve."""
        return self.first(self.steps)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values; `from_json` gives it back."""
        return {
            "samples": self.samples,
            "batch": self.expected_batch,
            "sampling_probability": self.sampling_probability,
            "sampler": "poisson",
            "steps": self.steps,
            "noise_multipliers": [level.noise_multiplier for level in self.levels],
            "level_steps": [level.steps for level in self.levels],
            "reserve": [mechanisms.to_json(mechanism) for mechanism in self.reserve],
            "epsilon_pld": self.epsilon_pld,
            "epsilon_rdp": self.epsilon_rdp,
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "adjacency": ADJACENCY,
            "accountant": ACCOUNTANT_VERSION,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PrivacyPlan:
        """Return the plan that `to_json` described; its epsilon is taken over, not computed again.

        Raises:
            InputError: something is missing.
            ParameterError: something is out of range.
        """
        try:
            levels = zip(content["noise_multipliers"], content["level_steps"], strict=True)
            if content["adjacency"] != ADJACENCY or content["sampler"] != "poisson":
                raise ValueError(f"adjacency {content['adjacency']}, sampler {content['sampler']}")
            return cls(
                samples=content["samples"],
                expected_batch=content["batch"],
                steps=content["steps"],
                delta=content["delta"],
                target_epsilon=content["target_epsilon"],
                levels=tuple(Level(multiplier, steps) for multiplier, steps in levels),
                reserve=tuple(mechanisms.from_json(entry) for entry in content["reserve"]),
                epsilon_pld=content["epsilon_pld"],
                epsilon_rdp=content["epsilon_rdp"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is no privacy plan: {type(error).__name__} {error}") from error


def count_steps(samples: int, batch: int, epochs: float) -> int:
    """Return floor(epochs * N / B), the number of steps whose samples add up to the epochs in expectation.

    Raises:
        ParameterError: epochs is no positive number, or gives no step at all.
    """
    if isinstance(epochs, bool) or not math.isfinite(epochs) or epochs <= 0:
        raise ParameterError(f"expected a positive number of epochs, found {epochs!r}")
    steps = math.floor(Fraction(repr(epochs)) * samples / batch)  # as written: 0.1 is a tenth
    if steps < 1:
        raise ParameterError(
            f"{epochs:g} epochs over {samples} records in batches of {batch} are not one step; take more epochs"
        )
    return steps


def plan_training(
    *,
    samples: int,
    batch: int,
    epochs: float | None = None,
    steps: int | None = None,
    delta: float | None = None,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    shape: str = "constant",
    reserve: Sequence[Mechanism] = (),
) -> PrivacyPlan:
    """Plan the noise of a run.

    Args:
        samples: number of records N.
        batch: expected batch B; each record joins each batch with probability B / N.
        epochs: length of the run, as floor(epochs * N / B) steps; or give `steps`.
        steps: length of the run.
        delta: min(1e-5, 1 / (10 N)) where not given.
        target_epsilon: scale the shape to cost this, from below, within 1e-3; or give `noise_multiplier`.
        noise_multiplier: multiply the shape by this.
        shape: how noise moves over the run, see `schedules`.
        reserve: what else is paid from the same budget, a private evaluation for example.

    Raises:
        ParameterError: a value is out of range, or one of a pair is missing or superfluous.
        PrivacyBudgetError: no noise meets the target, mostly because the reserve alone costs more.
    """
    delta = default_delta(_whole("records", samples)) if delta is None else delta
    _check_public(samples, batch, delta)
    if (epochs is None) == (steps is None):
        raise ParameterError("expected either epochs or steps")
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ParameterError("expected either a target epsilon or a noise multiplier")
    length = count_steps(samples, batch, epochs) if epochs is not None else _whole("steps", steps)
    relative = parse_shape(shape).levels(length)
    if target_epsilon is not None:
        _check_target(target_epsilon)
        factor = calibrate(relative, batch / samples, tuple(reserve), delta, target_epsilon)
    else:
        assert noise_multiplier is not None
        factor = noise_multiplier
    levels = tuple(Level(factor * value, count) for value, count in relative)
    total = (*_training(levels, batch / samples), *reserve)
    return PrivacyPlan(
        samples=samples,
        expected_batch=batch,
        steps=length,
        delta=delta,
        target_epsilon=target_epsilon,
        levels=levels,
        reserve=tuple(reserve),
        epsilon_pld=compute_epsilon(total, delta),
        epsilon_rdp=compute_epsilon(total, delta, Accountant.RDP),
    )


def _training(levels: Sequence[Level], probability: float) -> tuple[Mechanism, ...]:
    return tuple(SampledGaussian(level.noise_multiplier, probability, level.steps) for level in levels)


def _check_public(samples: int, batch: int, delta: float) -> None:
    if _whole("the expected batch", batch) > _whole("records", samples):
        raise ParameterError(f"expected a batch of at most all {samples} records, found {batch}")
    check_delta(delta)
    if delta >= 1 / samples:
        raise ParameterError(
            f"expected delta below 1 / N = {1 / samples:.3g}, found {delta:g}: publishing a record in full would pass; "
            f"{default_delta(samples):.3g} is the default"
        )


def _check_target(target_epsilon: float) -> None:
    if isinstance(target_epsilon, bool) or not math.isfinite(target_epsilon) or target_epsilon <= 0:
        raise ParameterError(f"expected a positive target epsilon, found {target_epsilon!r}")


def _whole(name: str, value: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ParameterError(f"expected {name} to be an integer of at least 1, found {value!r}")
    return value
