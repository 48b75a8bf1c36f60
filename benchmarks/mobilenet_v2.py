"""MobileNetV2 at 224x224 as torch exports it, weights as before training: depthwise convolutions between 1x1 ones.

Normalisation has the statistics of random images, as training would leave them: with those of a new layer, 0 and 1,
values shrink by a factor of channels in every depthwise layer, and the outputs would be the last layer's bias.

    image (batch, 3, 224, 224) --(convolution, 17 inverted residuals, 1x1 convolution, mean)--> (batch, 1000)

Sandler et al., CVPR 2018, table 2: an inverted residual expands its channels by 1x1, convolves each on its own by 3x3,
and projects back by 1x1; ReLU6 after the first two. 3.5 million weights, 300 million multiply-adds an image.
"""

from __future__ import annotations

import logging
import warnings

import onnx
import torch
from torch import Tensor, nn

SIZE, CLASSES = 224, 1000
#: Random ones, whose statistics normalisation has.
IMAGES = 8
#: Expansion, channels, blocks, stride of the first: table 2 of the paper.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
FIRST, LAST = 32, 1280


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the plane's size, and its normalisation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class InvertedResidual(nn.Module):
    """Expand, convolve each channel, project; with a sum where shapes allow it."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        expand = [convolution(inputs, width, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [convolution(width, width, 3, stride, width), nn.ReLU6()]
        self.layers = nn.Sequential(*expand, *depthwise, convolution(width, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV2(nn.Module):
    """The network."""

    def __init__(self) -> None:
        super().__init__()
        channels, layers = FIRST, [convolution(3, FIRST, 3, 2), nn.ReLU6()]
        for expansion, outputs, blocks, first_stride in STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, outputs, first_stride if block == 0 else 1, expansion))
                channels = outputs
        layers += [convolution(channels, LAST, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Linear(LAST, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def with_statistics(network: nn.Module, images: Tensor) -> nn.Module:
    """Set the statistics of all normalisation to those of a batch, and leave training; the network itself."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.inference_mode():
        network.train()(images)
    return network.eval()


def mobilenet_v2(seed: int = 0) -> onnx.ModelProto:
    """Export the network with seeded weights; its input is `image`, float32 (1, 3, 224, 224)."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = with_statistics(MobileNetV2(), torch.randn(IMAGES, 3, SIZE, SIZE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its exporter
        example = torch.zeros(1, 3, SIZE, SIZE)
        exported = torch.onnx.export(
            network, (example,), input_names=["image"], dynamo=True, external_data=False, verbose=False
        )
    assert exported is not None
    return exported.model_proto
