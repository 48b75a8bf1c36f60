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
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from heinfer.training.architectures import find_architecture
from heinfer.training.data import PIXEL_MAXIMUM, ImageData
from heinfer.training.recipe import Augmentation, Recipe, Schedule

_logger = logging.getLogger(__name__)

#: Images per forward pass when accuracy is measured; bounds memory, does not change the result.
EVALUATION_BATCH = 1000


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What a training run yields.

    Attributes:
        network: the trained network, on the CPU, in evaluation mode.
        test_accuracy: fraction of the test images classified correctly.
        held_out_accuracy: the same for the held-out training images; None where the recipe sets none aside.
    """

    network: nn.Module
    test_accuracy: float
    held_out_accuracy: float | None


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Images and labels on the training device: uint8 (images, 1, height, width) and int64 (images,)."""

    images: Tensor
    labels: Tensor

    @classmethod
    def from_arrays(cls, images: NDArray[np.uint8], labels: NDArray[np.uint8], device: torch.device) -> _Labelled:
        return cls(
            torch.tensor(images, device=device).unsqueeze(1),
            torch.tensor(labels.astype(np.int64), device=device),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> _Labelled:
        return _Labelled(self.images[indices], self.labels[indices])


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


def train(recipe: Recipe, data: ImageData, progress: Progress | None = None) -> TrainedModel:
    """Train a network as the recipe says.

    Args:
        recipe: the settings.
        data: images that fit the recipe's architecture.
        progress: a bar made by `training_progress` and already started; None trains in silence.

    Raises:
        InputError: the architecture is unknown, or the data do not fit it or the number of held-out images.
    """
    architecture = find_architecture(recipe.architecture)
    data.require(architecture.image_shape, architecture.classes, recipe.held_out_images)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network = architecture.build().to(device)
    generator = torch.Generator().manual_seed(recipe.seed)

    everything = _Labelled.from_arrays(data.train_images, data.train_labels, device)
    order = torch.randperm(len(everything), generator=generator)
    held_out = everything.select(order[: recipe.held_out_images])
    kept = everything.select(order[recipe.held_out_images :])
    _fit(network, recipe, kept, held_out, generator, progress)

    test = _Labelled.from_arrays(data.test_images, data.test_labels, device)
    test_accuracy = _accuracy(network, test)
    _logger.info("trained %s: test accuracy %.4f", recipe.name, test_accuracy)
    return TrainedModel(
        network=network.cpu().eval(),
        test_accuracy=test_accuracy,
        held_out_accuracy=_accuracy(network, held_out) if len(held_out) else None,
    )


def _fit(
    network: nn.Module,
    recipe: Recipe,
    kept: _Labelled,
    held_out: _Labelled,
    generator: torch.Generator,
    progress: Progress | None,
) -> None:
    """Take all steps of the recipe."""
    steps = recipe.epochs * math.ceil(len(kept) / recipe.batch_size)
    optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = _make_schedule(optimiser, recipe, steps)
    task = None if progress is None else progress.add_task(recipe.name, total=steps, loss="-", accuracy="-")
    for epoch in range(1, recipe.epochs + 1):
        network.train()
        total_loss = 0.0
        for batch in _batches(kept, recipe.batch_size, generator):
            images = augment(_unit_range(batch.images), recipe.augmentation, generator)
            loss = functional.cross_entropy(network(images), batch.labels)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
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


def _make_schedule(optimiser: torch.optim.Optimizer, recipe: Recipe, steps: int) -> LRScheduler:
    if recipe.schedule is Schedule.ONE_CYCLE:
        return OneCycleLR(optimiser, max_lr=recipe.learning_rate, total_steps=steps + 1)
    return CosineAnnealingLR(optimiser, T_max=steps)


def _batches(labelled: _Labelled, batch_size: int, generator: torch.Generator) -> Iterator[_Labelled]:
    """Every image once, in random order."""
    order = torch.randperm(len(labelled), generator=generator)
    for start in range(0, len(labelled), batch_size):
        yield labelled.select(order[start : start + batch_size])


def _unit_range(images: Tensor) -> Tensor:
    """What `heinfer.training.data.as_unit_range` does, on the training device."""
    return images.float() / PIXEL_MAXIMUM


def augment(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Shift and rotate every image at random; pixels from outside are zero, values between pixels bilinear.

    Args:
        images: float32, shape (batch, channels, height, width).
        augmentation: largest shift and rotation; both 0 returns the images as they are.
        generator: source of the draws, on the CPU.

    Returns:
        float32, the shape of `images`.
    """
    if augmentation == Augmentation():
        return images
    batch, _, height, width = images.shape
    draws = 2 * torch.rand(batch, 3, generator=generator) - 1
    angles = torch.deg2rad(draws[:, 0] * augmentation.rotation_degrees)
    # affine_grid's coordinates run from -1 to 1 across the image: a pixel is 2/width or 2/height of that.
    shift_x = draws[:, 1] * augmentation.shift_pixels * 2 / width
    shift_y = draws[:, 2] * augmentation.shift_pixels * 2 / height
    # The rotation's off-diagonal terms carry the aspect ratio, so that images that are not square are not sheared.
    transforms = torch.stack(
        [
            torch.stack([angles.cos(), -angles.sin() * height / width, shift_x], dim=1),
            torch.stack([angles.sin() * width / height, angles.cos(), shift_y], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(transforms, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid.to(images.device), padding_mode="zeros", align_corners=False)


@torch.no_grad()
def _accuracy(network: nn.Module, labelled: _Labelled) -> float:
    """Fraction of the images that the network classifies correctly."""
    network.eval()
    correct = 0
    for start in range(0, len(labelled), EVALUATION_BATCH):
        stop = start + EVALUATION_BATCH
        predicted = network(_unit_range(labelled.images[start:stop])).argmax(dim=1)
        correct += int((predicted == labelled.labels[start:stop]).sum())
    return correct / len(labelled)
