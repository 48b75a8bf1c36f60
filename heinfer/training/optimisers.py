"""Optimisers, schedules of the learning rate, and the moving average of the weights.

A private run's optimiser sees the noisy gradient and nothing else, so all of this is post-processing and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from heinfer.training.recipe import Decay, Optimiser, OptimiserName


def make_optimiser(parameters: Iterable[nn.Parameter], settings: Optimiser) -> torch.optim.Optimizer:
    """Return an optimiser for these parameters."""
    match settings.name:
        case OptimiserName.SGD:
            return torch.optim.SGD(
                parameters,
                lr=settings.learning_rate,
                momentum=settings.momentum,
                nesterov=settings.nesterov,
                weight_decay=settings.weight_decay,
            )
        case OptimiserName.ADAM:
            return torch.optim.Adam(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        case OptimiserName.ADAMW:
            return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def make_schedule(optimiser: torch.optim.Optimizer, settings: Optimiser, steps: int) -> LRScheduler:
    """Return a schedule of the learning rate over `steps` steps, to be stepped after each."""
    if settings.decay is Decay.ONE_CYCLE:
        return OneCycleLR(optimiser, max_lr=settings.learning_rate, total_steps=steps + 1)
    return LambdaLR(optimiser, learning_rate_factors(settings, steps))


def learning_rate_factors(settings: Optimiser, steps: int) -> Callable[[int], float]:
    """Return step -> factor of the peak learning rate: a linear warm-up, then the decay.

    The first of w warm-up steps takes 1/w of the peak; the decay begins after the last and ends at 0 after `steps`.
    """
    warmup = settings.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        match settings.decay:
            case Decay.COSINE:
                return 0.5 * (1 + math.cos(math.pi * done))
            case Decay.LINEAR:
                return 1 - done
            case _:
                return 1.0

    return factor


class WeightAverage:
    """Exponential moving average of a network's weights.

    Args:
        network: whose weights are averaged; the average begins at its present ones.
        decay: weight of the past in [0, 1); 0 switches the average off. In the first steps it is less, (1 + t) / (10 +
            t), so that the untrained weights are forgotten quickly.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._network = network
        self._decay = decay
        self._average = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}

    @property
    def enabled(self) -> bool:
        """Whether the average differs from the weights."""
        return self._decay > 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after step number `step`, from 0, into the average."""
        if not self.enabled:
            return
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, tensor in self._network.state_dict().items():
            average = self._average[name]
            if average.is_floating_point():
                average.lerp_(tensor, 1 - decay)
            else:
                average.copy_(tensor)

    def weights(self) -> dict[str, Tensor]:
        """Return the averaged weights; the network's own where the average is off."""
        return self._average if self.enabled else self._network.state_dict()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps, by name."""
        return {f"average.{name}": tensor for name, tensor in self._average.items()} if self.enabled else {}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Undo `tensors`."""
        if self.enabled:
            for name, average in self._average.items():
                average.copy_(tensors[f"average.{name}"])
