"""The training loop: AdamW on the cross entropy, without differential privacy.

The test images are read once, after the last step. What the progress bar shows meanwhile is the accuracy on training
images that the recipe sets aside (`held_out_images`), so that nothing about the run can be tuned on the test set.

A recipe's seed decides initial weights, held-out images, order and augmentation. The same seed gives the same weights
on the same machine with the same number of threads and version of torch; sums are ordered differently elsewhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

from heinfer.errors import InputError
from heinfer.training.architectures import build_network
from heinfer.training.augmentation import augment
from heinfer.training.datasets.dataset import PIXEL_MAXIMUM, Dataset, Examples
from heinfer.training.optimisers import make_optimiser, make_schedule
from heinfer.training.polynomials import (
    MEASURED_RECORDS,
    Replacement,
    check_replaced,
    excess,
    fraction_outside,
    freeze,
    load_start,
    replace_activations,
)
from heinfer.training.recipe import Polynomials, Recipe

_logger = logging.getLogger(__name__)

#: Images per forward pass when accuracy is measured; bounds memory, does not change the result.
EVALUATION_BATCH = 1000
#: Largest length of a gradient while polynomials are trained: where a value leaves its range, gradients explode.
POLYNOMIAL_CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Adaptation:
    """How a network came to have polynomials.

    Attributes:
        start_hash: SHA-256 of the model whose weights it started from.
        start_accuracy: fraction of the test images that model classifies correctly.
        replaced_accuracy: the same with polynomials, before they were trained.
        replacements: what became what.
        test_outside: fraction of the test images that make some value leave its range after training; None before.
    """

    start_hash: str
    start_accuracy: float
    replaced_accuracy: float
    replacements: tuple[Replacement, ...]
    test_outside: float | None = None


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What a training run yields.

    Attributes:
        network: the trained network, on the CPU, in evaluation mode.
        test_accuracy: fraction of the test images classified correctly.
        held_out_accuracy: the same for the held-out training images; None where the recipe sets none aside.
        adaptation: where the recipe asks for polynomials; they are constants in the network then.
    """

    network: nn.Module
    test_accuracy: float
    held_out_accuracy: float | None
    adaptation: Adaptation | None = None


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Records and labels on the training device, as in `Examples`."""

    inputs: Tensor
    labels: Tensor

    @classmethod
    def from_examples(cls, examples: Examples, device: torch.device) -> _Labelled:
        return cls(torch.tensor(examples.inputs, device=device), torch.tensor(examples.labels, device=device))

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self) -> Iterator[Tensor]:
        """The records in order, as the network takes them."""
        for inputs in torch.split(self.inputs, EVALUATION_BATCH):
            yield _model_inputs(inputs)

    def select(self, indices: Tensor) -> _Labelled:
        return _Labelled(self.inputs[indices], self.labels[indices])


def training_progress(console: Console | None = None) -> Progress:
    """A progress bar for `train`: steps done, loss, held-out accuracy, time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  held-out accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
        console=console,
    )


def train(recipe: Recipe, data: Dataset, progress: Progress | None = None) -> TrainedModel:
    """Train a network as the recipe says.

    Args:
        recipe: the settings.
        data: records that fit the recipe's architecture.
        progress: a bar made by `training_progress` and already started; None trains in silence.

    Raises:
        InputError: the architecture is unknown, the data do not fit it or the number of held-out images, or the recipe
            asks for what this loop does not do.
    """
    seed = _check(recipe, data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_network(recipe.architecture, data.input_shape, data.classes, data.ranges, recipe.network).to(
            device
        )
    generator = torch.Generator().manual_seed(seed)

    everything = _Labelled.from_examples(data.train, device)
    order = torch.randperm(len(everything), generator=generator)
    held_out = everything.select(order[: recipe.held_out_images])
    kept = everything.select(order[recipe.held_out_images :])
    test = _Labelled.from_examples(data.test, device)
    adaptation = None
    if recipe.polynomials is not None:
        adaptation = _replace(network, recipe.polynomials, kept, test, data.input_shape)
    _fit(network, recipe, kept, held_out, generator, progress)

    test_accuracy = _accuracy(network, test)
    if adaptation is not None:
        adaptation = replace(adaptation, test_outside=fraction_outside(network, test.batches()))
    _logger.info("trained %s: test accuracy %.4f", recipe.name, test_accuracy)
    return TrainedModel(
        network=network.cpu().eval() if adaptation is None else freeze(network).cpu(),
        test_accuracy=test_accuracy,
        held_out_accuracy=_accuracy(network, held_out) if len(held_out) else None,
        adaptation=adaptation,
    )


def _replace(
    network: nn.Module, settings: Polynomials, kept: _Labelled, test: _Labelled, input_shape: tuple[int, ...]
) -> Adaptation:
    """Take trained weights in, and polynomials in the place of activations."""
    start_hash = load_start(network, Path(settings.start))
    before = _accuracy(network, test)
    made = replace_activations(network, _model_inputs(kept.inputs[:MEASURED_RECORDS]), settings)
    check_replaced(network, input_shape)
    after = _accuracy(network, test)
    _logger.info("%d activations became polynomials: test accuracy %.4f, was %.4f", len(made), after, before)
    return Adaptation(start_hash, before, after, tuple(made))


def _fit(
    network: nn.Module,
    recipe: Recipe,
    kept: _Labelled,
    held_out: _Labelled,
    generator: torch.Generator,
    progress: Progress | None,
) -> None:
    """Take all steps of the recipe."""
    settings = recipe.polynomials
    steps = recipe.epochs * math.ceil(len(kept) / recipe.batch_size)
    optimiser = make_optimiser(network.parameters(), recipe.optimiser)
    schedule = make_schedule(optimiser, recipe.optimiser, steps)
    task = None if progress is None else progress.add_task(recipe.name, total=steps, loss="-", accuracy="-")
    for epoch in range(1, recipe.epochs + 1):
        network.train()
        total_loss = 0.0
        for batch in _batches(kept, recipe.batch_size, generator):
            images = augment(_model_inputs(batch.inputs), recipe.augmentation, generator)
            loss = functional.cross_entropy(network(images), batch.labels)
            if settings is not None:
                loss = loss + settings.range_penalty * excess(network)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if settings is not None:
                nn.utils.clip_grad_norm_(network.parameters(), POLYNOMIAL_CLIP_NORM)
            optimiser.step()
            schedule.step()
            total_loss += loss.item() * len(batch)
            if progress is not None and task is not None:
                progress.update(task, advance=1, loss=f"{loss.item():.4f}")
        accuracy = f"{_accuracy(network, held_out):.4f}" if len(held_out) else "-"
        if progress is not None and task is not None:
            progress.update(task, accuracy=accuracy)
        _logger.info(
            "epoch %d of %d: loss %.4f, held-out accuracy %s", epoch, recipe.epochs, total_loss / len(kept), accuracy
        )


def _check(recipe: Recipe, data: Dataset) -> int:
    """Refuse what this loop does not do, rather than leaving it out in silence; return the seed."""
    asked = [name for name in ("privacy", "pretraining", "distillation") if getattr(recipe, name) is not None]
    asked += ["optimiser.ema"] if recipe.optimiser.ema else []
    if asked or recipe.seed is None:
        raise InputError(
            f"the recipe asks for {', '.join(asked) or 'training without a seed'}; this loop trains without privacy, "
            "from a seed, on one data set"
        )
    if data.is_table and recipe.augmentation.changes_images:
        raise InputError("augmentation changes images, the data are a table; leave the table [augmentation] out")
    if recipe.held_out_images >= len(data.train):
        raise InputError(
            f"held_out_images = {recipe.held_out_images} leaves none of the {len(data.train)} training images; "
            "lower it in the recipe"
        )
    return recipe.seed


def _batches(labelled: _Labelled, batch_size: int, generator: torch.Generator) -> Iterator[_Labelled]:
    """Every image once, in random order."""
    order = torch.randperm(len(labelled), generator=generator)
    for start in range(0, len(labelled), batch_size):
        yield labelled.select(order[start : start + batch_size])


def _model_inputs(inputs: Tensor) -> Tensor:
    """What `heinfer.training.datasets.dataset.model_inputs` does, on the training device."""
    return inputs.float() / PIXEL_MAXIMUM if inputs.dtype == torch.uint8 else inputs


@torch.no_grad()
def _accuracy(network: nn.Module, labelled: _Labelled) -> float:
    """Fraction of the images that the network classifies correctly."""
    network.eval()
    correct = 0
    for start in range(0, len(labelled), EVALUATION_BATCH):
        stop = start + EVALUATION_BATCH
        predicted = network(_model_inputs(labelled.inputs[start:stop])).argmax(dim=1)
        correct += int((predicted == labelled.labels[start:stop]).sum())
    return correct / len(labelled)
