"""Networks on scattering features, which are fixed: only the head is trained.

Every network has two parts, `features` and `head`, so that a training run can compute the features of all records once
and train the head by itself. The heads follow Tramer and Boneh, "Differentially private learning needs better features
(or much more data)" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from heinfer.errors import InputError
from heinfer.training.scattering import ANGLES, FEATURES_PER_CHANNEL, OCTAVES, ScatteringFeatures

Normalisation = Literal["group", "fixed", "none"]

#: What brings the features of order 0, 1 and 2 to one size: inverse root mean squares over Fashion-MNIST's training
#: images, which are public, rounded.
ORDER_SCALES = (2.5, 28.0, 190.0)


class ScatteringNetwork(nn.Module):
    """Features and head.

    Attributes:
        features: scattering transform and normalisation; have no weights.
        head: is trained; takes what `features` gives.
    """

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, image: Tensor) -> Tensor:
        """Classify images: float32 in [0, 1], shape (batch, *input_shape), to logits (batch, classes)."""
        logits: Tensor = self.head(self.features(image))
        return logits


class OrderScale(nn.Module):
    """Multiplies the features of each order by a public constant."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first = OCTAVES * ANGLES
        counts = torch.tensor([1, first, FEATURES_PER_CHANNEL - 1 - first])
        scales = torch.tensor(ORDER_SCALES).repeat_interleave(counts).repeat(channels // FEATURES_PER_CHANNEL)
        self.register_buffer("scales", scales.reshape(-1, 1, 1), persistent=False)
        self.scales: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Shape (batch, channels, height, width), and the same again."""
        return features * self.scales


def make_scattering_cnn(
    input_shape: tuple[int, ...],
    classes: int,
    normalisation: Normalisation = "group",
    groups: int = 27,
    widths: Sequence[int] = (16, 32),
    strides: Sequence[int] = (2, 1),
    hidden: int = 32,
) -> ScatteringNetwork:
    """Make a small convolutional network with tanh on scattering features; 19,546 weights in the head for MNIST.

    Args:
        input_shape: channels, height and width; both divisible by 4.
        classes: number of logits.
        normalisation: "group" normalises each record's features in groups, "fixed" multiplies by public constants.
        groups: of the normalisation; has to divide the features, 81 for each channel.
        widths: channels of each 3x3 convolution.
        strides: of each convolution.
        hidden: outputs of the linear layer before the last; 0 leaves it out.

    Raises:
        InputError: the images don't have scattering features, or the options don't fit together.
    """
    transform = _make_features(input_shape)
    if len(strides) != len(widths):
        raise InputError(f"expected one stride for each of {len(widths)} widths, found {len(strides)}")
    channels, *size = transform.output_shape
    fixed = [transform, *_make_normalisation(normalisation, groups, channels)]
    layers: list[nn.Module] = []
    for (inputs, outputs), stride in zip(pairwise([channels, *widths]), strides, strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.Tanh()]
        size = [(pixels - 1) // stride + 1 for pixels in size]
    flat = prod(size) * (widths[-1] if widths else channels)
    (layers if widths else fixed).append(nn.Flatten())  # what has no weights is computed once
    if hidden:
        layers += [nn.Linear(flat, hidden), nn.Tanh()]
    head = nn.Sequential(*layers, nn.Linear(hidden or flat, classes))
    return ScatteringNetwork(nn.Sequential(*fixed), head)


def make_scattering_linear(
    input_shape: tuple[int, ...], classes: int, normalisation: Normalisation = "group", groups: int = 27
) -> ScatteringNetwork:
    """Make a linear classifier on scattering features; arguments as in `make_scattering_cnn`."""
    return make_scattering_cnn(input_shape, classes, normalisation, groups, widths=(), strides=(), hidden=0)


def _make_features(input_shape: tuple[int, ...]) -> ScatteringFeatures:
    if len(input_shape) != 3:
        raise InputError(f"scattering features are those of images, the data have shape {input_shape}")
    channels, height, width = input_shape
    return ScatteringFeatures((channels, height, width))


def _make_normalisation(normalisation: str, groups: int, channels: int) -> list[nn.Module]:
    match normalisation:
        case "group":
            if groups < 1 or channels % groups:
                raise InputError(f"groups = {groups} does not divide the {channels} features")
            return [nn.GroupNorm(groups, channels, affine=False)]
        case "fixed":
            return [OrderScale(channels)]
        case "none":
            return []
    raise InputError(f'expected normalisation "group", "fixed" or "none", found {normalisation!r}')
