"""From a recipe and data to a private run that can take its first step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

from heinfer.errors import InputError
from heinfer.training.architectures import build_network
from heinfer.training.datasets.dataset import Dataset, Examples, model_inputs
from heinfer.training.datasets.loading import load_dataset
from heinfer.training.export import run_model
from heinfer.training.losses import DistilledRecords, cross_entropy, make_distillation_loss
from heinfer.training.pretraining import choose_trainable, fit_public, transfer_weights
from heinfer.training.privacy.accounting import compute_epsilon, default_delta
from heinfer.training.privacy.checks import check_private_network
from heinfer.training.privacy.clipping import Adaptive, Automatic, Clipping, Flat, PerLayer
from heinfer.training.privacy.gradients import LossFunction
from heinfer.training.privacy.mechanisms import GaussianRelease, Mechanism
from heinfer.training.privacy.planning import PrivacyPlan, plan_training
from heinfer.training.privacy.randomness import KeyedRandomness, Purpose
from heinfer.training.private_trainer import Mechanics, PrivateRun, Records
from heinfer.training.recipe import Recipe
from heinfer.training.records import AugmentedRecords, FeatureCache, FeatureRecords
from heinfer.training.settings import ClippingMethod, Privacy

#: Called with what is done, how much of it, and of how much.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Networks:
    """A network and what of it is trained.

    Attributes:
        whole: takes records as they are; what is released.
        trained: the same, or its head where the features before it are fixed and computed once.
    """

    whole: nn.Module
    trained: nn.Module

    @property
    def features(self) -> nn.Module | None:
        """The fixed features before the head, None where the whole network is trained."""
        found = getattr(self.whole, "features", None)
        return found if self.trained is not self.whole and isinstance(found, nn.Module) else None


def require_privacy(recipe: Recipe) -> Privacy:
    """Return the table [privacy].

    Raises:
        InputError: the recipe has none.
    """
    if recipe.privacy is None:
        raise InputError(f"the recipe {recipe.name} asks for no privacy: add a table [privacy]")
    return recipe.privacy


def plan_run(recipe: Recipe, samples: int) -> PrivacyPlan:
    """Find the noise of a run.

    Args:
        recipe: with a table [privacy].
        samples: number of private records.

    Raises:
        ParameterError: batch or delta don't fit the number of records.
        PrivacyBudgetError: no noise meets the target.
    """
    privacy = require_privacy(recipe)
    return plan_training(
        samples=samples,
        batch=recipe.batch_size,
        epochs=recipe.epochs,
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        noise_multiplier=privacy.noise_multiplier,
        shape=privacy.noise_schedule,
        reserve=reserve_evaluation(privacy, samples),
    )


def reserve_evaluation(privacy: Privacy, samples: int) -> tuple[Mechanism, ...]:
    """Return the release that a private evaluation takes, which alone costs the reserved fraction of the target.

    Raises:
        InputError: there is a fraction to reserve, but no target.
    """
    if not privacy.evaluation_reserve:
        return ()
    if privacy.target_epsilon is None:
        raise InputError("evaluation_reserve is a fraction of target_epsilon: give a target in place of the noise")
    delta = privacy.delta or default_delta(samples)
    goal = privacy.evaluation_reserve * privacy.target_epsilon
    low, high = math.log(0.2), math.log(1e6)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if compute_epsilon([GaussianRelease(math.exp(middle))], delta) > goal:
            low = middle
        else:
            high = middle
    return (GaussianRelease(math.exp(high)),)


def make_networks(recipe: Recipe, data: Dataset, randomness: KeyedRandomness) -> Networks:
    """Make the untrained network, check it, and put it on the training device.

    Raises:
        InputError: the architecture is unknown, does not fit the data, or mixes records.
    """
    whole = build_seeded(recipe, data, randomness).to(training_device()).train()
    head = getattr(whole, "head", None)
    once = recipe.features is not None and recipe.features.computed_once
    if once and not isinstance(head, nn.Module):
        raise InputError(f"{recipe.architecture} has no fixed features; leave the table [features] out")
    networks = Networks(whole, head if once and head is not None else whole)
    check_private_network(whole, data.input_shape)
    return networks


def build_seeded(recipe: Recipe, data: Dataset, randomness: KeyedRandomness) -> nn.Module:
    """Make an untrained network whose weights come from the run's own randomness."""
    with torch.random.fork_rng():
        torch.manual_seed(randomness.seed(Purpose.INITIALISATION, 0))
        return build_network(recipe.architecture, data.input_shape, data.classes, data.ranges, recipe.network)


def make_records(recipe: Recipe, examples: Examples, networks: Networks, cache: FeatureCache | None = None) -> Records:
    """Put records on the training device, as their features where these are computed once."""
    if networks.features is not None:
        return FeatureRecords(examples, networks.features, training_device(), cache)
    return AugmentedRecords(examples, recipe.augmentation, training_device())


def pretrain(
    recipe: Recipe,
    public: Dataset,
    networks: Networks,
    randomness: KeyedRandomness,
    progress: Progress,
    cache: FeatureCache | None = None,
) -> None:
    """Train on public data as the recipe's table [pretraining] says, and freeze what stays."""
    settings = recipe.pretraining
    assert settings is not None  # the caller asks for it
    other = make_networks(recipe, public, randomness)
    records = make_records(recipe, public.train, other, cache)
    seed = randomness.seed(Purpose.INITIALISATION, 1) % 2**62
    fit_public(other.trained, records, settings, seed, lambda done, total: progress("pretraining", done, total))
    transfer_weights(other.trained, networks.trained)


def load_public(recipe: Recipe, path: Path | None) -> Dataset | None:
    """Read the public data of the table [pretraining], None where there is none."""
    return None if recipe.pretraining is None else load_dataset(recipe.pretraining.data, path)


def make_run(
    recipe: Recipe,
    data: Dataset,
    plan: PrivacyPlan,
    networks: Networks,
    randomness: KeyedRandomness,
    cache: FeatureCache | None = None,
    clipping: Clipping | None = None,
) -> PrivateRun:
    """Put a run together.

    Args:
        recipe: with a table [privacy].
        data: private records are its training part.
        plan: noise of every step.
        networks: as `make_networks` gave them.
        randomness: of the run.
        cache: features that several runs share.
        clipping: in place of the recipe's, for studies.

    Raises:
        InputError: the teacher does not fit the data.
        ParameterError: clipping or noise don't fit the network's layers.
    """
    records, mechanics = make_parts(recipe, data, networks, cache, clipping)
    return PrivateRun(networks.trained, records, plan, mechanics, randomness)


def make_parts(
    recipe: Recipe,
    data: Dataset,
    networks: Networks,
    cache: FeatureCache | None = None,
    clipping: Clipping | None = None,
) -> tuple[Records, Mechanics]:
    """Return what a run trains on and how, and freeze what its networks keep from pretraining.

    Args:
        recipe: as in `make_run`.
        data: as in `make_run`.
        networks: as in `make_run`.
        cache: as in `make_run`.
        clipping: as in `make_run`.

    Raises:
        InputError: the teacher does not fit the data.
    """
    privacy = require_privacy(recipe)
    if recipe.pretraining is not None:
        choose_trainable(networks.trained, recipe.pretraining)
    records = make_records(recipe, data.train, networks, cache)
    loss: LossFunction = cross_entropy
    if recipe.distillation is not None:
        loss = make_distillation_loss(recipe.distillation)
        logits = teacher_logits(Path(recipe.distillation.teacher), data)
        records = DistilledRecords(records, logits.to(training_device()))
    mechanics = Mechanics(
        clipping=make_clipping(privacy) if clipping is None else clipping,
        optimiser=recipe.optimiser,
        loss=loss,
        layer_noise=privacy.layer_noise,
        physical_batch=privacy.physical_batch,
    )
    return records, mechanics


def make_clipping(privacy: Privacy) -> Clipping:
    """Return the clipping that a recipe asks for."""
    match privacy.clipping:
        case ClippingMethod.FLAT:
            return Flat(privacy.clip_norm)
        case ClippingMethod.PER_LAYER:
            return PerLayer(privacy.clip_norms)
        case ClippingMethod.AUTOMATIC:
            return Automatic(privacy.clip_norm)
        case ClippingMethod.ADAPTIVE:
            assert privacy.count_deviation is not None  # checked with the recipe
            return Adaptive(
                privacy.clip_norm, privacy.quantile, privacy.threshold_learning_rate, privacy.count_deviation
            )


def teacher_logits(path: Path, data: Dataset) -> torch.Tensor:
    """Run the teacher on every private record.

    Raises:
        InputError: it is missing or does not fit the data.
    """
    try:
        model = onnx.load(path)
        logits = run_model(model, model_inputs(data.train.inputs))
    except Exception as error:  # onnx and onnxruntime have a dozen kinds
        raise InputError(f"the teacher {path} can't be run on these records: {error}") from None
    if logits.shape != (len(data.train), data.classes):
        raise InputError(f"the teacher {path} gives {logits.shape[1:]} logits, expected {data.classes}")
    return torch.from_numpy(np.ascontiguousarray(logits))


def training_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
