"""Network architectures, by name.

Each takes images with values in [0, 1] and normalises them itself, so that whoever runs the exported model needs to
know no statistics of the training data. The layers are plain convolutions, poolings, ReLUs and linear maps with static
shapes: all of them can be placed on the server or the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from heinfer.errors import InputError

#: Mean and standard deviation of the pixels of the 60,000 MNIST training images, scaled to [0, 1].
MNIST_MEAN = 0.1307
MNIST_DEVIATION = 0.3081


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network that the trainer can build.

    Attributes:
        build: makes an untrained network; its weights come from torch's global generator.
        image_shape: channels, height and width of one image.
        classes: number of logits.
    """

    build: Callable[[], nn.Module]
    image_shape: tuple[int, int, int]
    classes: int


class LeNet5(nn.Module):
    """LeNet-5 with ReLU and max pooling: 44,426 weights.

    The layers are those of LeCun et al., "Gradient-based learning applied to document recognition" (1998), for 28x28
    images without padding; ReLU, max pooling and the linear output are the usual modern substitutes.
    """

    def __init__(self, mean: float = MNIST_MEAN, deviation: float = MNIST_DEVIATION) -> None:
        """Make the layers, untrained.

        Args:
            mean: subtracted from every pixel.
            deviation: divides every pixel after that.
        """
        super().__init__()
        self.mean = mean
        self.deviation = deviation
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(256, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Classify images.

        Args:
            image: float32 in [0, 1], shape (batch, 1, 28, 28).

        Returns:
            float32 logits, shape (batch, 10).
        """
        normalised = (image - self.mean) / self.deviation
        logits: Tensor = self.classifier(torch.flatten(self.features(normalised), start_dim=1))
        return logits


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {"lenet5": Architecture(build=LeNet5, image_shape=(1, 28, 28), classes=10)}
)


def find_architecture(name: str) -> Architecture:
    """Look an architecture up.

    Raises:
        InputError: there is none of that name.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise InputError(f"unknown architecture {name!r}; choose one of: {', '.join(sorted(ARCHITECTURES))}") from None
