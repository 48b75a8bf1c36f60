"""One audit: the recipe is trained again with canaries, nothing is released, and epsilon is bounded from below.

    claim          epsilon that the accountant gives for the audited steps
    lower bound    epsilon exceeds it with the stated confidence, or else the training is not what the claim is about
    verdict        VIOLATED where the bound exceeds the claim; otherwise consistent with it, which proves nothing

An audit reads private records and its bound depends on them, a little: the number is for the operator. Keys, coins and
canaries come from the operating system, never from a seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from heinfer.errors import ParameterError
from heinfer.training.assembly import Progress, make_networks, make_parts, plan_run, pretrain
from heinfer.training.auditing.bound import RULES, Guesses, best, bound_epsilon, ceiling
from heinfer.training.auditing.canaries import AuditedRun, Canaries, system_generator
from heinfer.training.auditing.controls import CONTROLS
from heinfer.training.auditing.power import Power, Setting, forecast_power
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.privacy.accounting import (
    ACCOUNTANT_VERSION,
    ADJACENCY,
    Accountant,
    compute_epsilon,
    split_adaptive,
)
from heinfer.training.privacy.mechanisms import Mechanism
from heinfer.training.privacy.planning import Level, PrivacyPlan
from heinfer.training.privacy.randomness import KeyedRandomness
from heinfer.training.private_trainer import take_steps
from heinfer.training.recipe import Recipe
from heinfer.training.records import FeatureCache
from heinfer.training.settings import ClippingMethod

CONFIDENCE = 0.95
METHOD = "one run with canaries (Steinke, Nasr and Jagielski 2023, theorem 5.2), white box, every step"
#: What every statement of an audit says with its verdict.
LIMITS = (
    "Passing is evidence, not proof: canaries of this kind bound epsilon from below, and the true epsilon may be "
    "larger. The number comes from private records; it is for the operator, not for release."
)


class Verdict(StrEnum):
    """What an audit concludes."""

    CONSISTENT = "consistent with the claim"
    VIOLATED = "VIOLATED"


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What is decided outside the recipe.

    Attributes:
        canaries: m, at most one a trainable weight.
        steps: length of the audited training, None for the whole recipe; the claim is that of these steps.
        confidence: of the lower bound.
    """

    canaries: int = 1000
    steps: int | None = None
    confidence: float = CONFIDENCE


@dataclass(frozen=True, slots=True)
class Finding:
    """What one training with canaries gave.

    Attributes:
        claim: epsilon by the accountant.
        guesses: of every declared rule.
    """

    claim: float
    guesses: tuple[Guesses, ...]

    @property
    def best(self) -> Guesses:
        """Those with the largest bound."""
        return best(self.guesses)

    @property
    def lower_bound(self) -> float:
        """Of epsilon."""
        return self.best.epsilon

    @property
    def verdict(self) -> Verdict:
        """Whether the bound exceeds the claim."""
        return Verdict.VIOLATED if self.lower_bound > self.claim else Verdict.CONSISTENT

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "lower_bound": self.lower_bound,
            "guesses": self.best.made,
            "correct": self.best.correct,
            "rules": [asdict(guess) for guess in self.guesses],
            "verdict": self.verdict.value,
        }


class Audit:
    """The audit of a recipe.

    Args:
        recipe: with a table [privacy].
        data: its private records.
        options: size and length.
        public: data of the recipe's table [pretraining].

    Attributes:
        plan: of the audited steps, without what is reserved for other purposes.
        ceiling: the largest bound that this many canaries can give.

    Raises:
        InputError: recipe or data are unusable.
        ParameterError: too few canaries to refute the claim, even if every guess were right.
    """

    def __init__(
        self, recipe: Recipe, data: Dataset, options: AuditOptions = AuditOptions(), public: Dataset | None = None
    ) -> None:
        if (public is None) != (recipe.pretraining is None):
            raise ParameterError("public data belong to a recipe with a table [pretraining], which needs them")
        self._recipe, self._data, self._options, self._public = recipe, data, options, public
        self.plan = cut_plan(plan_run(recipe, len(data.train)), options.steps)
        if not 0 < options.confidence < 1 or options.canaries < 1:
            raise ParameterError(f"expected canaries and a confidence between 0 and 1, found {options}")
        self._cache = FeatureCache()
        self.ceiling = ceiling(options.canaries, self.plan.delta, options.confidence)
        if self.ceiling <= self.claim:
            raise ParameterError(
                f"{options.canaries:,} canaries bound epsilon by {self.ceiling:.2f} at most, which cannot refute the "
                f"claim of {self.claim:.2f}: take more canaries, or fewer steps, whose claim is smaller"
            )

    @property
    def claim(self) -> float:
        """Epsilon of the audited steps by the accountant."""
        return self.plan.epsilon_pld

    def run(self, progress: Progress, phase: str = "auditing", kind: type[AuditedRun] = AuditedRun) -> Finding:
        """Train with canaries and bound epsilon.

        Args:
            progress: called with the phase, what is done of it, and of how much.
            phase: its name.
            kind: the real trainer, or a control.

        Raises:
            ParameterError: more canaries than trainable weights.
        """
        randomness = KeyedRandomness.from_system()
        networks = make_networks(self._recipe, self._data, randomness)
        if self._public is not None:
            pretrain(self._recipe, self._public, networks, randomness, progress)
        records, mechanics = make_parts(self._recipe, self._data, networks, self._cache)
        weights = sum(weight.numel() for weight in networks.trained.parameters() if weight.requires_grad)
        canaries = Canaries.draw(self._options.canaries, weights)
        run = kind(networks.trained, records, self.plan, mechanics, randomness, canaries)
        progress(phase, 0, self.plan.steps)
        for report in take_steps(run, _NothingToPay(), lambda: None, self.plan.steps):
            progress(phase, report.step + 1, self.plan.steps)
        guesses = bound_epsilon(
            run.scores, canaries.included, self.plan.delta, self._options.confidence, system_generator()
        )
        return Finding(self.claim, guesses)

    def run_controls(self, progress: Progress) -> dict[str, Finding]:
        """Audit the broken trainers of `controls`, each of which must be found out."""
        return {name: self.run(progress, f"control: {name}", kind) for name, kind in CONTROLS.items()}

    def forecast(self) -> Power:
        """Simulate what an audit like this one would notice."""
        options, plan = self._options, self.plan
        levels = tuple(Level(self._on_gradients(level.noise_multiplier), level.steps) for level in plan.levels)
        setting = Setting(
            levels, plan.sampling_probability, options.canaries, plan.delta, options.confidence, self.claim
        )
        return forecast_power(setting, system_generator())

    def to_json(self, finding: Finding, power: Power, controls: dict[str, Finding]) -> dict[str, Any]:
        """Return the statement of an audit as JSON values."""
        plan, options = self.plan, self._options
        return {
            "name": self._recipe.name,
            "method": METHOD,
            "claim": self.claim,
            "delta": plan.delta,
            "adjacency": ADJACENCY,
            "accountant": ACCOUNTANT_VERSION,
            "steps": plan.steps,
            "sampling_probability": plan.sampling_probability,
            "confidence": options.confidence,
            "canaries": options.canaries,
            "guessing_rules": [asdict(rule) for rule in RULES],
            **finding.to_json(),
            "largest_possible_bound": self.ceiling,
            "power": asdict(power),
            "controls": {name: control.to_json() for name, control in controls.items()},
            "released": "nothing",
            "limits": LIMITS,
        }

    def _on_gradients(self, noise_multiplier: float) -> float:
        """Return the noise on the gradients, which is more where a noisy count is released beside them."""
        privacy = self._recipe.privacy
        if privacy is None or privacy.clipping is not ClippingMethod.ADAPTIVE or privacy.count_deviation is None:
            return noise_multiplier
        return split_adaptive(noise_multiplier, privacy.count_deviation)


class _NothingToPay:
    """The account of a training that releases nothing."""

    def charge(self, step: int, mechanism: Mechanism) -> None:
        """Take no note."""


def cut_plan(plan: PrivacyPlan, steps: int | None) -> PrivacyPlan:
    """Return the first steps of a plan, with what they alone cost; what it reserves for other purposes is left out.

    Args:
        plan: of the whole run.
        steps: how many; None for all of them.

    Raises:
        ParameterError: the plan has fewer.
    """
    steps = plan.steps if steps is None else steps
    if not 1 <= steps <= plan.steps:
        raise ParameterError(f"expected 1 to {plan.steps:,} steps, as the recipe has, found {steps:,}")
    levels = tuple(_first(plan.levels, steps))
    whole = replace(plan, steps=steps, levels=levels, reserve=(), target_epsilon=None)
    return replace(
        whole,
        epsilon_pld=compute_epsilon(whole.mechanisms(), plan.delta),
        epsilon_rdp=compute_epsilon(whole.mechanisms(), plan.delta, Accountant.RDP),
    )


def _first(levels: Iterable[Level], steps: int) -> Iterable[Level]:
    for level in levels:
        if steps > 0:
            yield Level(level.noise_multiplier, min(steps, level.steps))
        steps -= level.steps
