"""Networks that mix records are refused by name, others pass; noise that protects nothing is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heinfer.errors import InputError, ParameterError
from heinfer.training.privacy.checks import check_noise_multiplier, check_private_network


class Centre(nn.Module):
    """Subtracts the batch's mean: a batch norm that has no name."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.01 * x.mean(dim=0, keepdim=True)


class Neighbour(nn.Module):
    """Adds the record before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * x.roll(1, 0)


class Between(nn.Module):
    """Mixes records in its own forward, where no layer sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.layer(x), dim=0)


class Counting(nn.Module):
    """Keeps a statistic of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + x.detach().mean(dim=0)
        return x


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient * (1 + x.abs().mean())


class MixedBackward(nn.Module):
    """Mixes records on the way back only."""

    def forward(self, x: Tensor) -> Tensor:
        return _Share.apply(x)


class OwnGenerator(nn.Module):
    """Noise from numpy, which torch's seed does not fix."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.default_rng().normal())


def after_linear(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 3))


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Flatten(), nn.LazyLinear(3))


OFFENDERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "batch norm": (lambda: after_linear(nn.BatchNorm1d(6)), (6,), r"1 \(BatchNorm1d\).*GroupNorm"),
    "batch norm without statistics": (
        lambda: after_linear(nn.BatchNorm1d(6, affine=False, track_running_stats=False)),
        (6,),
        r"1 \(BatchNorm1d\)",
    ),
    "synchronised batch norm": (lambda: after_linear(nn.SyncBatchNorm(6)), (6,), r"1 \(SyncBatchNorm\)"),
    "instance norm with statistics": (
        lambda: images(nn.InstanceNorm2d(4, track_running_stats=True)),
        (2, 6, 6),
        r"1 \(InstanceNorm2d\).*track_running_stats=False",
    ),
    "frequencies": (
        lambda: nn.Sequential(nn.Embedding(9, 5, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(20, 3)),
        (4,),
        r"0 \(Embedding\).*scale_grad_by_freq=False",
    ),
    "renormalised embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 5, max_norm=1.0), nn.Flatten(), nn.Linear(20, 3)),
        (4,),
        r"0 \(Embedding\).*max_norm=None",
    ),
    "mean of the batch": (lambda: after_linear(Centre()), (6,), r"1 \(Centre\): mixes records"),
    "neighbour": (lambda: after_linear(nn.Tanh(), Neighbour()), (6,), r"2 \(Neighbour\): mixes records"),
    "between layers": (Between, (6,), r"the network: mixes records in a step between"),
    "statistic": (lambda: after_linear(Counting()), (6,), r"buffer 1\.seen"),
    "backward": (lambda: after_linear(MixedBackward()), (6,), r"parameter 0\.weight: a record's gradient"),
    "own generator": (lambda: after_linear(OwnGenerator()), (6,), r"another generator"),
}

SOUND: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense with dropout": (lambda: after_linear(nn.Dropout(0.5), nn.ReLU(inplace=True)), (6,)),
    "images": (lambda: images(nn.GroupNorm(2, 4), nn.Dropout2d(0.3), nn.MaxPool2d(2, 1)), (2, 6, 6)),
    "instance norm": (lambda: images(nn.InstanceNorm2d(4, affine=True)), (2, 6, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True), (4, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(20, 3)), (4,)),
    "spectral norm, a buffer that only weights change": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))),
        (6,),
    ),
}


def build(factory: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    network = factory()
    if any(isinstance(layer, nn.LazyLinear) for layer in network.modules()):
        network(torch.zeros(2, *shape))
    return network


@pytest.mark.parametrize("name", OFFENDERS)
def test_an_offending_layer_is_named(name: str) -> None:
    factory, shape, message = OFFENDERS[name]
    with pytest.raises(ParameterError, match=message):
        check_private_network(build(factory, shape), shape)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_network_passes_unchanged(name: str, training: bool) -> None:
    factory, shape = SOUND[name]
    network = build(factory, shape).train(training)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    state = torch.get_rng_state()
    check_private_network(network, shape)
    assert torch.equal(torch.get_rng_state(), state)
    assert network.training == training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert not any(layer._forward_hooks for layer in network.modules())


def test_every_offending_layer_is_named_not_just_the_first() -> None:
    with pytest.raises(ParameterError) as refusal:
        check_private_network(after_linear(nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6)), (6,))
    assert "1 (BatchNorm1d)" in str(refusal.value)
    assert "3 (BatchNorm1d)" in str(refusal.value)
    with pytest.raises(ParameterError) as refusal:
        check_private_network(after_linear(Centre(), nn.Tanh(), Neighbour()), (6,))
    assert "1 (Centre)" in str(refusal.value)
    assert "Tanh" not in str(refusal.value)


def test_a_network_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ParameterError, match="no trainable parameters"):
        check_private_network(nn.Linear(6, 3).requires_grad_(False), (6,))
    with pytest.raises(ParameterError, match="no trainable parameters"):
        check_private_network(nn.ReLU(), (6,))


def test_a_network_that_does_not_take_the_records_is_refused() -> None:
    with pytest.raises(InputError, match=r"records of shape \(7,\)"):
        check_private_network(nn.Linear(6, 3), (7,))
    with pytest.raises(InputError, match="first axis"):
        check_private_network(nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)), (6,))


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_noise_that_protects_nothing_is_refused(value: float) -> None:
    with pytest.raises(ParameterError, match="finite and above 0"):
        check_noise_multiplier(value)


def test_positive_noise_is_accepted() -> None:
    check_noise_multiplier(1e-3)
    check_noise_multiplier(20)
