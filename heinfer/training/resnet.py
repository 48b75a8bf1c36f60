"""ResNet-20 with group normalisation, which unlike batch normalisation keeps records apart.

The layout is that of He et al., "Deep residual learning for image recognition" (2016), section 4.2, for CIFAR-10: a
convolution, three stages of three blocks with 16, 32 and 64 channels, the mean over all pixels, a linear layer;
shortcuts without weights (option A). Weights are named as in the usual ports to torch, with gn in the place of bn:

    conv1, gn1, layer1.0.conv1, layer1.0.gn1, layer1.0.conv2, layer1.0.gn2, ... layer3.2.gn2, linear

so that convolutions that were trained on public data elsewhere can be loaded by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from heinfer.errors import InputError

_WIDTHS = (16, 32, 64)
_BLOCKS = 3


class ResNet20(nn.Module):
    """ResNet-20: about 0.27 million weights."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        groups: int = 16,
        mean: float = 0.5,
        deviation: float = 0.25,
    ) -> None:
        """Make the layers, untrained.

        Args:
            input_shape: channels, height and width; any, from 8 pixels each way.
            classes: number of logits.
            groups: of the normalisation; has to divide 16. With 16, as De et al. 2022 use, every channel of the first
                stage is a group of its own.
            mean: subtracted from every pixel.
            deviation: divides every pixel after that; public constants, as all that is not measured.

        Raises:
            InputError: these are no images or smaller ones, or the groups don't divide the channels.
        """
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < 8:
            raise InputError(f"resnet20_gn takes images of at least 8x8 pixels, the data have shape {input_shape}")
        if groups < 1 or _WIDTHS[0] % groups:
            raise InputError(f"groups = {groups} does not divide the {_WIDTHS[0]} channels of resnet20_gn")
        self.mean = mean
        self.deviation = deviation
        self.conv1 = nn.Conv2d(input_shape[0], _WIDTHS[0], 3, padding=1, bias=False)
        self.gn1 = nn.GroupNorm(groups, _WIDTHS[0])
        self.layer1 = _make_stage(_WIDTHS[0], _WIDTHS[0], 1, groups)
        self.layer2 = _make_stage(_WIDTHS[0], _WIDTHS[1], 2, groups)
        self.layer3 = _make_stage(_WIDTHS[1], _WIDTHS[2], 2, groups)
        self.linear = nn.Linear(_WIDTHS[2], classes)

    def forward(self, image: Tensor) -> Tensor:
        """Classify images: float32 in [0, 1], shape (batch, *input_shape), to logits (batch, classes)."""
        x = torch.relu(self.gn1(self.conv1((image - self.mean) / self.deviation)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


class Residual(nn.Module):
    """Two 3x3 convolutions, and a shortcut that skips pixels and pads with channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.gn1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.gn2 = nn.GroupNorm(groups, outputs)
        self.stride = stride
        self.missing = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        y = self.gn2(self.conv2(torch.relu(self.gn1(self.conv1(x)))))
        if self.missing:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.missing, self.missing))
        return torch.relu(x + y)


def _make_stage(inputs: int, outputs: int, stride: int, groups: int) -> nn.Sequential:
    blocks = [Residual(inputs, outputs, stride, groups)]
    blocks += [Residual(outputs, outputs, 1, groups) for _ in range(_BLOCKS - 1)]
    return nn.Sequential(*blocks)
