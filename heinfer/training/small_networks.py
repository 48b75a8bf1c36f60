"""Small networks: two convolutional ones for images, and a perceptron for tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor, nn

from heinfer.errors import InputError
from heinfer.training.settings import suggest

#: Mean and standard deviation of the pixels of the 60,000 MNIST training images, scaled to [0, 1].
MNIST_MEAN = 0.1307
MNIST_DEVIATION = 0.3081


#: How images shrink, by the name that a recipe gives it. Only averages can be taken under encryption.
POOLINGS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType({"average": nn.AvgPool2d, "max": nn.MaxPool2d})


def find_pooling(name: str) -> Callable[..., nn.Module]:
    """Look a pooling up.

    Raises:
        InputError: there is none of that name.
    """
    if name not in POOLINGS:
        raise InputError(f"unknown pooling {name!r}{suggest(name, POOLINGS)}; choose one of: {', '.join(POOLINGS)}")
    return POOLINGS[name]


class LeNet5(nn.Module):
    """LeNet-5 with ReLU: 44,426 weights for ten classes.

    The layers are those of LeCun et al., "Gradient-based learning applied to document recognition" (1998), for 28x28
    images without padding; ReLU, max pooling by default and the linear output are the usual modern substitutes.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...] = (1, 28, 28),
        classes: int = 10,
        mean: float = MNIST_MEAN,
        deviation: float = MNIST_DEVIATION,
        pooling: str = "max",
    ) -> None:
        """Make the layers, untrained.

        Args:
            input_shape: grey images of 28x28 pixels.
            classes: number of logits.
            mean: subtracted from every pixel.
            deviation: divides every pixel after that.
            pooling: a name in `POOLINGS`.

        Raises:
            InputError: the images have another shape, or there is no such pooling.
        """
        super().__init__()
        if tuple(input_shape) != (1, 28, 28):
            raise InputError(f"the architecture takes images of shape (1, 28, 28), the data have {tuple(input_shape)}")
        pool = find_pooling(pooling)
        self.mean = mean
        self.deviation = deviation
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5),
            nn.ReLU(),
            pool(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            pool(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(256, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Classify images.

        Args:
            image: float32 in [0, 1], shape (batch, 1, 28, 28).

        Returns:
            float32 logits, shape (batch, classes).
        """
        normalised = (image - self.mean) / self.deviation
        logits: Tensor = self.classifier(torch.flatten(self.features(normalised), start_dim=1))
        return logits


class TanhCnn(nn.Module):
    """Two convolutions and two linear layers with tanh: 26,010 weights for MNIST.

    The network of Papernot et al., "Tempered sigmoid activations for deep learning with differential privacy" (2021),
    table 1: bounded activations keep gradients small, so that clipping takes less from them.
    """

    def __init__(
        self, input_shape: tuple[int, ...], classes: int, width: int = 16, hidden: int = 32, pooling: str = "max"
    ) -> None:
        """Make the layers, untrained.

        Args:
            input_shape: channels, height and width; at least 14 pixels each way.
            classes: number of logits.
            width: channels of the first convolution; the second has twice as many.
            hidden: outputs of the first linear layer.
            pooling: a name in `POOLINGS`.

        Raises:
            InputError: these are no images, or smaller, or there is no such pooling.
        """
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < 14:
            raise InputError(f"tanh_cnn takes images of at least 14x14 pixels, the data have shape {input_shape}")
        pool = find_pooling(pooling)
        self.features = nn.Sequential(
            nn.Conv2d(input_shape[0], width, kernel_size=8, stride=2, padding=3),
            nn.Tanh(),
            pool(2, stride=1),
            nn.Conv2d(width, 2 * width, kernel_size=4, stride=2),
            nn.Tanh(),
            pool(2, stride=1),
        )
        height, width_left = (((size - 2) // 2 - 4) // 2 for size in input_shape[1:])
        self.classifier = nn.Sequential(
            nn.Linear(2 * width * height * width_left, hidden),
            nn.Tanh(),
            nn.Linear(hidden, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Classify images: float32 in [0, 1], shape (batch, *input_shape), to logits (batch, classes)."""
        logits: Tensor = self.classifier(torch.flatten(self.features(image), start_dim=1))
        return logits


class Mlp(nn.Sequential):
    """Linear layers with tanh between them, for tables and small images."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (64, 64)) -> None:
        """Make the layers, untrained.

        Args:
            input_shape: (features,), or the shape of an image, which is flattened.
            classes: number of logits.
            hidden: outputs of each hidden layer.
        """
        sizes = [torch.Size(input_shape).numel(), *hidden]
        layers: list[nn.Module] = [nn.Flatten()] if len(input_shape) > 1 else []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        super().__init__(*layers, nn.Linear(sizes[-1], classes))
