"""Models to measure with, as ONNX files: ResNet-20 with published weights, small ones with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

from heinfer.training.export import export_network

#: Normalisation that ResNet-20's weights were trained with.
CIFAR_MEAN, CIFAR_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut that pads with channels of zeros (He et al. 2016, option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.missing = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.missing:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.missing, self.missing))
        return torch.relu(x + y)


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR-10, for images in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        for stage, (inputs, outputs, stride) in enumerate(widths, 1):
            blocks = [Residual(inputs, outputs, stride), *(Residual(outputs, outputs, 1) for _ in range(2))]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)
        self.register_buffer("mean", torch.tensor(CIFAR_MEAN).reshape(1, 3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(CIFAR_DEVIATION).reshape(1, 3, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1((image - self.mean) / self.deviation)))
        for stage in (self.layer1, self.layer2, self.layer3):
            x = stage(x)
        return self.linear(x.mean((2, 3)))


def write_resnet20(shared: Path, path: Path) -> Path:
    """Write ResNet-20 with the weights of shared/models; input (batch, 3, 32, 32) in [0, 1]."""
    with np.load(shared / "models/resnet20_cifar10.npz") as archive:
        weights = {name: torch.from_numpy(archive[name]) for name in archive.files}
    network = ResNet20()
    network.load_state_dict(weights, strict=False)
    missing = [name for name in network.state_dict() if name not in weights and "num_batches" not in name]
    assert not missing, missing
    onnx.save(export_network(network, (3, 32, 32)), path)
    return path


def read_cifar(shared: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return 2,000 test images, float32 in [0, 1] of shape (2000, 3, 32, 32), and their labels."""
    with np.load(shared / "data/cifar10_test_2000.npz") as archive:
        images = np.ascontiguousarray(archive["test_images"].transpose(0, 3, 1, 2))
        return images.astype(np.float32) / 255, archive["test_labels"].astype(np.int64).ravel()


def write_tutorial_cnn(path: Path) -> Path:
    """Write the CNN of TenSEAL's tutorial 4 with ReLU in place of squares; random weights, input (batch, 1, 28, 28)."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    onnx.save(export_network(network, (1, 28, 28)), path)
    return path


def write_mlp(path: Path) -> Path:
    """Write 784-64-10 with ReLU; random weights, input (batch, 784)."""
    torch.manual_seed(0)
    onnx.save(export_network(nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)), (784,)), path)
    return path


def write_matrix(path: Path, inputs: int = 512, outputs: int = 512) -> Path:
    """Write one matrix without a bias; random weights, input (batch, inputs)."""
    torch.manual_seed(0)
    onnx.save(export_network(nn.Linear(inputs, outputs, bias=False), (inputs,)), path)
    return path
