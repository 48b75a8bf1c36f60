"""Runs from a seed, for sweeps and studies. They write no release, pay into no ledger, and are not private.

A seed makes a run repeatable, and its noise computable by anybody: what comes out of it (weights, and an accuracy on
private test records) must not be handed on as if it were protected. The accuracies say what an unseeded run of the same
recipe can be expected to reach. Choosing among recipes by results on private records is not covered by any run's
epsilon (Papernot and Steinke 2022): sweep on public data, or see the results as the operator's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from heinfer.errors import InputError, ParameterError
from heinfer.training.assembly import Networks, make_networks, make_records, make_run, plan_run, pretrain
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.evaluation import measure_accuracy
from heinfer.training.losses import cross_entropy
from heinfer.training.optimisers import WeightAverage, make_optimiser, make_schedule
from heinfer.training.pretraining import choose_trainable
from heinfer.training.privacy.clipping import Flat
from heinfer.training.privacy.mechanisms import Mechanism
from heinfer.training.privacy.planning import PrivacyPlan
from heinfer.training.privacy.randomness import KeyedRandomness
from heinfer.training.private_trainer import Records
from heinfer.training.recipe import Augmentation, ClippingMethod, Recipe
from heinfer.training.records import FeatureCache
from heinfer.training.trials import Setup, Trial, TrialFile

#: Called with (steps done, steps in all).
Tell = Callable[[int, int], None]
#: Called with a phase, what is done of it, and of how much.
Progress = Callable[[str, int, int], None]


class SeededRuns:
    """Seeded runs on one data set; computes once what they share.

    Args:
        data: training and test records.
        public: data of the recipes' table [pretraining], if any of them has one.
        results: trials that are there already are not run again; new ones are appended. None keeps nothing.
    """

    def __init__(self, data: Dataset, public: Dataset | None = None, results: TrialFile | None = None) -> None:
        self._data = data
        self._public = public
        self._results = results
        self._cache = FeatureCache()
        self._plans: dict[str, PrivacyPlan] = {}
        self._fingerprint = data.fingerprint() + (public.fingerprint() if public is not None else "")

    def key(self, setup: Setup) -> str:
        """Return the key of a setup's trials."""
        return setup.key(self._fingerprint)

    def find(self, setup: Setup, seed: int) -> Trial | None:
        """Return a trial that is there already."""
        return None if self._results is None else self._results.find(self.key(setup), seed)

    def plan(self, setup: Setup) -> PrivacyPlan:
        """Find the noise of a setup, once: a ramp takes the accountant a minute."""
        key = self.key(setup)
        if key not in self._plans:
            known = None if self._results is None else self._results.plan(key)
            self._plans[key] = (
                plan_run(setup.recipe, len(self._data.train)) if known is None else PrivacyPlan.from_json(known)
            )
        return self._plans[key]

    def run(self, setup: Setup, seed: int, tell: Tell = lambda done, total: None) -> Trial:
        """Train from a seed and measure the accuracy on the test records; or return the trial that is there.

        Raises:
            InputError: recipe and data don't fit together.
            ParameterError: a number in the recipe does not fit the data or the network.
            PrivacyBudgetError: no noise meets the target.
        """
        found = self.find(setup, seed)
        if found is not None:
            return found
        plan = self.plan(setup) if setup.recipe.privacy is not None else None
        start = time.monotonic()
        accuracy, steps = self._train(setup, plan, KeyedRandomness.from_seed(seed), tell)
        trial = Trial(
            key=self.key(setup),
            seed=seed,
            accuracy=accuracy,
            epsilon=None if plan is None else plan.epsilon_pld,
            steps=steps,
            seconds=time.monotonic() - start,
            plan=None if plan is None else plan.to_json(),
        )
        if self._results is not None:
            self._results.append(trial)
        return trial

    def _train(
        self, setup: Setup, plan: PrivacyPlan | None, randomness: KeyedRandomness, tell: Tell
    ) -> tuple[float, int]:
        recipe = setup.recipe
        networks = make_networks(recipe, self._data, randomness)
        if recipe.pretraining is not None:
            if self._public is None:
                raise InputError(f"the recipe {recipe.name} pretrains on public data, and there are none")
            pretrain(recipe, self._public, networks, randomness, lambda phase, done, total: None, self._cache)
        if plan is None:
            if recipe.pretraining is not None:
                choose_trainable(networks.trained, recipe.pretraining)
            records = make_records(recipe, self._data.train, networks, self._cache)
            weights, steps = fit_plainly(networks.trained, records, recipe, randomness, tell)
        else:
            declining = make_declining(setup, plan.steps)
            run = make_run(recipe, self._data, plan, networks, randomness, self._cache, declining)
            while not run.finished:
                if declining is not None:
                    declining.step = run.step
                run.advance(_NoAccount())
                tell(run.step, plan.steps)
            weights, steps = run.released_weights(), run.step
        return self._measure(recipe, networks, weights), steps

    def _measure(self, recipe: Recipe, networks: Networks, weights: dict[str, Tensor]) -> float:
        plain = make_records(replace(recipe, augmentation=Augmentation()), self._data.test, networks, self._cache)
        network = networks.trained
        network.load_state_dict(weights)
        network.eval()
        return measure_accuracy(network, plain)


def tell_percent(progress: Progress) -> Tell:
    """Show how far the present run is; runs of several lengths share one phase."""
    return lambda done, total: progress("this run, %", 100 * done // max(1, total), 100)


class _NoAccount:
    """Takes no note: a seeded run is not private, so there is nothing to pay."""

    def charge(self, step: int, mechanism: Mechanism) -> None:
        """See `heinfer.training.private_trainer.Account`."""


class Declining:
    """Flat clipping at a threshold that falls, or rises, on a straight line from the first step to the last.

    The line is declared in advance, so every step's sensitivity is public, and with noise of deviation sigma C_t a step
    costs what it costs at a fixed threshold.

    Attributes:
        step: number of the step that comes next; set by whoever takes the steps.
    """

    def __init__(self, first: float, last: float, steps: int) -> None:
        self._line = Flat(first).clip_norm, Flat(last).clip_norm
        self._steps = steps
        self.step = 0

    @property
    def sensitivity(self) -> float:
        """The threshold of the step."""
        first, last = self._line
        return first + (last - first) * self.step / max(1, self._steps - 1)

    def factors(self, norms: Tensor) -> Tensor:
        """See `heinfer.training.privacy.clipping.Clipping.factors`."""
        return Flat(self.sensitivity).factors(norms)

    def within(self, norms: Tensor) -> Tensor:
        """See `heinfer.training.privacy.clipping.Clipping.within`."""
        return Flat(self.sensitivity).within(norms)


def make_declining(setup: Setup, steps: int) -> Declining | None:
    """Return the clipping of a setup whose threshold moves, None for the recipe's own.

    Raises:
        ParameterError: the recipe does not clip flatly.
    """
    if setup.last_clip_norm is None:
        return None
    privacy = setup.recipe.privacy
    if privacy is None or privacy.clipping is not ClippingMethod.FLAT:
        raise ParameterError("a threshold that moves by declaration belongs to flat clipping")
    return Declining(privacy.clip_norm, setup.last_clip_norm, steps)


def fit_plainly(
    network: nn.Module, records: Records, recipe: Recipe, randomness: KeyedRandomness, tell: Tell
) -> tuple[dict[str, Tensor], int]:
    """Train with the recipe's optimiser and without privacy: shuffled batches, mean gradients, no clipping, no noise.

    Returns:
        The weights, and the number of steps.
    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    steps = recipe.epochs * math.ceil(len(records) / recipe.batch_size)
    optimiser = make_optimiser(parameters, recipe.optimiser)
    schedule = make_schedule(optimiser, recipe.optimiser, steps)
    average = WeightAverage(network, recipe.optimiser.ema)
    generator = torch.Generator().manual_seed(int.from_bytes(randomness.key[:7], "big"))
    network.train()
    step = 0
    for _ in range(recipe.epochs):
        for indices in torch.split(torch.randperm(len(records), generator=generator), recipe.batch_size):
            inputs, labels = records.select(indices, step)
            optimiser.zero_grad()
            cross_entropy(network(inputs), labels).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            average.update(step)
            step += 1
            tell(step, steps)
    return {name: tensor.detach().clone() for name, tensor in average.weights().items()}, steps
