"""The private training loop: DP-SGD (Abadi et al. 2016), from the plan to the trained weights.

One step, in this order:

    gate       a step that would pass the target epsilon is not taken
    ledger     the step is written down, and on the disk, before anything private is read
    sample     every record takes part with probability q, by itself (Poisson)
    sum        gradients per record, averaged over its augmented copies, clipped to C, summed
    noise      sigma C on the sum, which is then divided by the public expected batch size
    update     optimiser, learning rate, average of the weights: post-processing
    checkpoint every so many steps (the caller's)

Records and noise of a step come from a key and the step's number. A run that was killed goes on from its last
checkpoint and takes the steps after it again with the same records and the same noise: it ends with the weights it
would have had without the interruption, and the ledger counts every step once.

Formal guarantees: with a key from the operating system the weights after any number of steps are (epsilon, delta)
differentially private under adding or removing one record, with the epsilon of the plan's mechanisms. The plan, N, the
expected batch and everything else in the recipe are public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from heinfer.errors import InputError, ParameterError, PrivacyBudgetError
from heinfer.training.checkpoint import Checkpoint, gather_tensors, restore_tensors
from heinfer.training.optimisers import WeightAverage, make_optimiser, make_schedule
from heinfer.training.privacy.accounting import split_adaptive
from heinfer.training.privacy.clipping import Adaptive, Clipping, PerLayer
from heinfer.training.privacy.gradients import ClippedGradients, LossFunction
from heinfer.training.privacy.mechanisms import Mechanism
from heinfer.training.privacy.planning import PrivacyPlan
from heinfer.training.privacy.randomness import KeyedRandomness, Purpose
from heinfer.training.settings import Optimiser


class Records(Protocol):
    """Private training records."""

    def __len__(self) -> int:
        """Return how many there are."""

    @property
    def augmented(self) -> bool:
        """Whether `select` returns several copies of a record."""

    def select(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return some records on the training device.

        Args:
            indices: int64, on the CPU.
            seed: decides the augmentation; the same seed gives the same inputs.

        Returns:
            Inputs (records, *input_shape), or (records, copies, *input_shape) where `augmented`; int64 labels
            (records,).
        """


class Account(Protocol):
    """Where a step is paid for, before it is taken."""

    def charge(self, step: int, mechanism: Mechanism) -> None:
        """Write a step down.

        Raises:
            PrivacyBudgetError: it would pass the target; nothing is written.
        """


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. The last four fields are private values: for the operator, never to be released.

    Attributes:
        step: its number, from 0.
        noise_multiplier: sigma of this step.
        clip_norm: L2 sensitivity of the sum, C or the threshold in use.
        learning_rate: of this step.
        records: how many took part.
        loss: mean over them, 0 where there were none.
        within: fraction of them that was not clipped.
        norm: median L2 norm of their gradients.
    """

    step: int
    noise_multiplier: float
    clip_norm: float
    learning_rate: float
    records: int
    loss: float
    within: float
    norm: float


@dataclass(frozen=True, slots=True)
class Mechanics:
    """How a private run is set up, beside its plan.

    Attributes:
        clipping: bounds every record's gradient; an adaptive one is changed by the run.
        layer_noise: relative noise of every layer, for clipping per layer; empty for equal noise on every weight.
        optimiser: how weights follow gradients.
        loss: per-record losses of logits and labels.
        physical_batch: records in one pass, None to choose.
    """

    clipping: Clipping
    optimiser: Optimiser
    loss: LossFunction
    layer_noise: tuple[float, ...] = ()
    physical_batch: int | None = None


class PrivateRun:
    """A private run between its first and its last step.

    Args:
        network: on the training device, checked by `privacy.checks.check_private_network`.
        records: what it is trained on.
        plan: noise of every step.
        mechanics: everything else that decides the run.
        randomness: records, noise and augmentation of every step.

    Attributes:
        step: number of the next step.

    Raises:
        ParameterError: the plan is for another number of records, or the noise does not fit the layers.
    """

    def __init__(
        self,
        network: nn.Module,
        records: Records,
        plan: PrivacyPlan,
        mechanics: Mechanics,
        randomness: KeyedRandomness,
    ) -> None:
        if plan.samples != len(records):
            raise ParameterError(f"the plan is for {plan.samples} records, the data have {len(records)}")
        self.network = network
        self.step = 0
        self._records = records
        self._plan = plan
        self._clipping = mechanics.clipping
        self._randomness = randomness
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._gradients = ClippedGradients(
            network, mechanics.loss, mechanics.physical_batch, mixed_precision=torch.cuda.is_available()
        )
        self._optimiser = make_optimiser(self._parameters, mechanics.optimiser)
        self._schedule = make_schedule(self._optimiser, mechanics.optimiser, plan.steps)
        self._average = WeightAverage(network, mechanics.optimiser.ema)
        self._shares = spread_noise(mechanics.layer_noise, mechanics.clipping)
        if isinstance(mechanics.clipping, Adaptive):  # what has no solution is refused before anything is spent
            for level in plan.levels:
                split_adaptive(level.noise_multiplier, mechanics.clipping.count_deviation)
        if self._shares is not None and len(self._shares) != len(self._gradients.layers):
            raise ParameterError(
                f"layer_noise has {len(self._shares)} numbers, the network {len(self._gradients.layers)} layers with "
                f"trainable weights: {', '.join(self._gradients.layers)}"
            )

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan are taken."""
        return self.step >= self._plan.steps

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the next step's sum."""
        return self._clipping.sensitivity

    def advance(self, account: Account) -> StepReport:
        """Take one step.

        Raises:
            PrivacyBudgetError: it would pass the target; it is not taken.
        """
        mechanism = self._plan.mechanism(self.step)
        account.charge(self.step, mechanism)
        found, records = self._sum_gradients()
        sensitivity, rate = self._clipping.sensitivity, float(self._optimiser.param_groups[0]["lr"])
        self._set_gradients(found.sums, mechanism.noise_multiplier)
        self._optimiser.step()
        self._schedule.step()
        self._average.update(self.step)
        if isinstance(self._clipping, Adaptive):
            self._move_threshold(self._clipping, found.below, records)
        report = StepReport(
            step=self.step,
            noise_multiplier=mechanism.noise_multiplier,
            clip_norm=sensitivity,
            learning_rate=rate,
            records=records,
            loss=found.loss,
            within=found.below / max(1, records),
            norm=float(found.norms.median()) if records else 0.0,
        )
        self.step += 1
        return report

    def checkpoint(self) -> Checkpoint:
        """Return the state between two steps; it holds the key."""
        tensors, numbers = gather_tensors(self.network, self._optimiser)
        state = {
            "step": self.step,
            "key": self._randomness.key.hex(),
            "seeded": self._randomness.seeded,
            "plan": self._plan.to_json(),
            "optimiser": numbers,
            "schedule": {k: v for k, v in self._schedule.state_dict().items() if isinstance(v, int | float | list)},
            "threshold": self._clipping.threshold if isinstance(self._clipping, Adaptive) else None,
        }
        return Checkpoint(state, {**tensors, **self._average.tensors()})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run; the randomness must have been made from its key.

        Raises:
            InputError: the checkpoint is that of another plan, key or network.
        """
        state = checkpoint.state
        if state["key"] != self._randomness.key.hex() or PrivacyPlan.from_json(state["plan"]) != self._plan:
            raise InputError("the checkpoint is that of another run: its key or its plan differs")
        average = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("average.")}
        restore_tensors(self.network, self._optimiser, checkpoint.tensors, state["optimiser"])
        self._schedule.load_state_dict(state["schedule"])
        self._average.restore(average)
        if isinstance(self._clipping, Adaptive):
            self._clipping.threshold = float(state["threshold"])
        self.step = int(state["step"])

    def released_weights(self) -> dict[str, Tensor]:
        """Return the weights to release: the average's where it is on."""
        return {name: tensor.detach().clone() for name, tensor in self._average.weights().items()}

    def _sum_gradients(self) -> tuple[Any, int]:
        mask = self._randomness.sample_mask(self.step, len(self._records), self._plan.sampling_probability)
        indices = torch.from_numpy(mask.nonzero()[0])
        inputs, labels = self._records.select(indices, self._randomness.seed(Purpose.AUGMENTATION, self.step))
        with torch.random.fork_rng():  # a layer that draws numbers draws the same ones when a step is taken again
            torch.manual_seed(self._randomness.seed(Purpose.LAYERS, self.step))
            found = self._gradients.sum(inputs, labels, self._clipping, augmented=self._records.augmented)
        return found, len(indices)

    def _set_gradients(self, sums: Sequence[Tensor], noise_multiplier: float) -> None:
        """Give the optimiser (sum + noise) / expected batch."""
        deviations = self._deviations(noise_multiplier)
        normal = self._randomness.normal(Purpose.NOISE, self.step, sum(total.numel() for total in sums))
        parts = torch.split(torch.from_numpy(normal), [total.numel() for total in sums])
        for parameter, total, part, deviation in zip(self._parameters, sums, parts, deviations, strict=True):
            noise = (part * deviation).to(total).view_as(total)
            parameter.grad = (total + noise) / self._plan.expected_batch

    def _deviations(self, noise_multiplier: float) -> list[float]:
        """Standard deviation of the noise on the sum, for every trainable parameter."""
        if self._shares is not None:
            return [noise_multiplier * self._shares[layer] for layer in self._gradients.layer_of]
        if isinstance(self._clipping, Adaptive):
            noise_multiplier = split_adaptive(noise_multiplier, self._clipping.count_deviation)
        return [noise_multiplier * self._clipping.sensitivity] * len(self._parameters)

    def _move_threshold(self, clipping: Adaptive, within: int, records: int) -> None:
        (normal,) = self._randomness.normal(Purpose.COUNT, self.step, 1)
        clipping.update(clipping.noisy_fraction(within, records, self._plan.expected_batch, float(normal)))


def take_steps(run: PrivateRun, account: Account, save: Callable[[], None], every: int) -> Iterator[StepReport]:
    """Take the steps that are left, and save after every `every` of them and after the last.

    Raises:
        PrivacyBudgetError: a step would pass the target; what was trained so far is saved.
    """
    while not run.finished:
        try:
            report = run.advance(account)
        except PrivacyBudgetError:  # raised before anything moved; after another error the state may be half a step's
            save()
            raise
        if run.step % every == 0 or run.finished:
            save()
        yield report


def spread_noise(relative: Sequence[float], clipping: Clipping) -> tuple[float, ...] | None:
    """Return the noise deviation of every layer for a joint noise multiplier of 1, None for equal noise everywhere.

    The layers' noise is one Gaussian: with thresholds C_l and deviations s_l its effective multiplier is
    (sum C_l^2 / s_l^2)^(-1/2). With s_l = r_l C_l (sum r_l^-2)^(1/2) that is 1, whatever the relative noise r_l.

    Raises:
        ParameterError: relative noise without clipping per layer, or not one positive number for each layer.
    """
    if not relative:
        return None
    if not isinstance(clipping, PerLayer) or len(relative) != len(clipping.clip_norms):
        raise ParameterError("noise that differs between layers needs a clip norm for each of them")
    if not all(math.isfinite(share) and share > 0 for share in relative):
        raise ParameterError(f"relative noise of the layers must be positive, found {list(relative)}")
    norm = math.sqrt(sum(share**-2 for share in relative))
    return tuple(norm * share * clip for share, clip in zip(relative, clipping.clip_norms, strict=True))
