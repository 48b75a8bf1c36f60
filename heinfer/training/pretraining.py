"""Training on public data before anything private is read, and what of it private training then changes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

from heinfer.errors import InputError
from heinfer.training.private_trainer import Records
from heinfer.training.settings import FineTuned, Pretraining

Progress = Callable[[int, int], None]


def fit_public(network: nn.Module, records: Records, settings: Pretraining, seed: int, progress: Progress) -> None:
    """Train on public records: AdamW, one cycle, cross entropy.

    Args:
        network: on the training device; changed.
        records: public.
        settings: epochs, batch and learning rate.
        seed: decides the order of the records and their augmentation.
        progress: called with (steps done, steps in all).
    """
    steps_an_epoch = math.ceil(len(records) / settings.batch_size)
    steps = settings.epochs * steps_an_epoch
    optimiser = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate)
    schedule = OneCycleLR(optimiser, max_lr=settings.learning_rate, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(seed)
    network.train()
    for step in range(steps):
        if step % steps_an_epoch == 0:
            batches = torch.split(torch.randperm(len(records), generator=generator), settings.batch_size)
        inputs, labels = records.select(batches[step % steps_an_epoch], seed + step)
        if records.augmented:
            inputs = inputs[:, 0]
        optimiser.zero_grad()
        functional.cross_entropy(network(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        progress(step + 1, steps)


def transfer_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy weights from one network to another of the same architecture; the last layer may have other classes.

    Raises:
        InputError: more than the last layer differs.
    """
    given, wanted = source.state_dict(), target.state_dict()
    last = _layers(target)[-1]
    different = [
        name
        for name in wanted
        if (name not in given or given[name].shape != wanted[name].shape) and name.rpartition(".")[0] != last
    ]
    if different:
        raise InputError(
            f"the network for the public data has other weights in {', '.join(different)}: the public records must "
            "have the shape of the private ones"
        )
    fitting = {name: tensor for name, tensor in given.items() if name in wanted and tensor.shape == wanted[name].shape}
    target.load_state_dict({**wanted, **fitting})


def choose_trainable(network: nn.Module, settings: Pretraining) -> None:
    """Freeze the layers that private training leaves as they are.

    Raises:
        InputError: a layer to freeze does not exist, or no layer is left.
    """
    layers = _layers(network)
    match settings.layers:
        case FineTuned.ALL:
            trained = layers
        case FineTuned.LAST:
            trained = layers[-2:]
        case FineTuned.HEAD:
            trained = layers[-1:]
    unknown = [name for name in settings.freeze if name not in layers]
    if unknown:
        raise InputError(f"freeze: no layer {', '.join(unknown)}; the layers with weights are {', '.join(layers)}")
    trained = [name for name in trained if name not in settings.freeze]
    if not trained:
        raise InputError("every layer is frozen: nothing is left for private training")
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[0] in trained)


def _layers(network: nn.Module) -> list[str]:
    """Names of the modules that own weights, in the network's order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in network.named_parameters()))
