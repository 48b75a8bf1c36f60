"""Published architectures in plain torch, small, with random weights: what people export and want to partition.

`ARCHITECTURES` names them; each knows its inputs and how many weighted operators its export must put on the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

Shape = tuple[int, ...]


# --- attention -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention over (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        split = self.projections(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        if bias is not None:
            scores = scores + bias
        mixed = scores.softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))


class EncoderLayer(nn.Module):
    """Attention and a GELU perceptron, each normalised before and added (Xiong et al. 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(x)


class Transformer(nn.Module):
    """Two encoder layers over embedded tokens (batch, tokens, width)."""

    def __init__(self, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, tokens, width) / 10)
        self.layers = nn.Sequential(EncoderLayer(width, heads), EncoderLayer(width, heads), nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.positions)


class SequenceFirstTransformer(nn.Module):
    """torch's own encoder, whose layers normalise afterwards and see (tokens, batch, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2021): patches by a strided convolution, a class token, learned positions."""

    def __init__(self, size: int, patch: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) / 10)
        self.layers = nn.Sequential(EncoderLayer(width, heads), EncoderLayer(width, heads), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], 1)
        return self.head(self.layers(tokens + self.positions)[:, 0])


class WindowAttention(nn.Module):
    """Swin's shifted window block (Liu et al. 2021): attention within windows, which join the batch axis."""

    def __init__(self, size: int, window: int, width: int, heads: int) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, window // 2
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.relative_positions = nn.Parameter(torch.randn(1, heads, window**2, window**2) / 10)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, _, _, width = x.shape
        count, window = self.size // self.window, self.window
        shifted = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        split = shifted.view(batch, count, window, count, window, width).transpose(2, 3)
        windows = self.attention(split.reshape(-1, window**2, width), self.relative_positions)
        joined = windows.view(batch, count, count, window, window, width).transpose(2, 3)
        x = x + torch.roll(joined.reshape(batch, self.size, self.size, width), (self.shift, self.shift), (1, 2))
        return x + self.perceptron(x)


class TextClassifier(nn.Module):
    """Token ids (batch, tokens) to classes: embedding, positions, one encoder layer, mean over tokens."""

    def __init__(self, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKEN_IDS, width)
        self.register_buffer("ids", torch.arange(tokens).unsqueeze(0))
        self.positions = nn.Embedding(tokens, width)
        self.layer = EncoderLayer(width, heads)
        self.head = nn.Linear(width, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids) + self.positions(self.ids)).mean(1))


TOKEN_IDS = 50


# --- images --------------------------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, padded to keep the size, and batch normalisation."""
    padding = kernel // 2
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False), normalisation(outputs)]


def normalisation(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation as after training: statistics differ from 0 and 1."""
    layer = nn.BatchNorm2d(channels)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    nn.init.normal_(layer.running_mean, std=0.1)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.normal_(layer.bias, std=0.1)
    return layer


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project (Sandler et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        expand = [*convolution(inputs, width, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*convolution(width, width, 3, stride, width), nn.ReLU6()]
        self.layers = nn.Sequential(*expand, *depthwise, *convolution(width, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV2(nn.Module):
    """All 17 blocks of MobileNetV2, a sixteenth of its channels."""

    #: expansion, channels, blocks, stride of the first: table 2 of the paper.
    STAGES = ((1, 1, 1, 1), (6, 2, 2, 2), (6, 2, 3, 2), (6, 4, 4, 2), (6, 6, 3, 1), (6, 10, 3, 2), (6, 20, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        channels = 2
        layers: list[nn.Module] = [*convolution(3, channels, 3, 2), nn.ReLU6()]
        for expansion, outputs, blocks, first_stride in self.STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, outputs, first_stride if block == 0 else 1, expansion))
                channels = outputs
        layers += [*convolution(channels, 80, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(80, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SqueezeExcite(nn.Module):
    """Channel weights from the mean over the plane (Hu et al. 2018); MobileNetV3's form has a hard sigmoid."""

    def __init__(self, channels: int, reduced: int, gate: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, reduced, 1), nn.ReLU(), nn.Conv2d(reduced, channels, 1), gate
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.layers(x)


class MobileNetV3Block(nn.Module):
    """Stem and one block with hard-swish and squeeze-excite (Howard et al. 2019)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        width = 3 * channels
        self.stem = nn.Sequential(*convolution(3, channels, 3, 2), nn.Hardswish())
        self.block = nn.Sequential(
            *convolution(channels, width, 1), nn.Hardswish(),
            *convolution(width, width, 5, 1, width), nn.Hardswish(),
            SqueezeExcite(width, channels, nn.Hardsigmoid()),
            *convolution(width, channels, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + self.block(x)


class SqueezeExciteNetwork(nn.Module):
    """A residual block with squeeze-excite by linear layers, and AdaptiveAvgPool to 2 x 2 before the classifier."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*convolution(3, channels, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(*convolution(channels, channels, 3), nn.ReLU(), *convolution(channels, channels, 3))
        self.gate = nn.Sequential(
            nn.Linear(channels, channels // 2), nn.ReLU(), nn.Linear(channels // 2, channels), nn.Sigmoid()
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(4 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.block(x)
        gate = self.gate(functional.adaptive_avg_pool2d(y, 1).view(x.size(0), -1))
        x = functional.relu(x + y * gate.view(x.size(0), -1, 1, 1))
        return self.head(self.pool(x).view(x.size(0), -1))


class GroupNormResNet(nn.Module):
    """Two residual blocks with group normalisation, the second with stride and projection (He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.first = self._branch(channels, channels, 1)
        self.second = self._branch(channels, 2 * channels, 2)
        self.projection = nn.Conv2d(channels, 2 * channels, 1, 2, bias=False)
        self.head = nn.Linear(2 * channels, 10)

    @staticmethod
    def _branch(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.GroupNorm(2, inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(2, outputs), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.first(x)
        x = self.projection(x) + self.second(x)
        return self.head(x.mean((2, 3)))


class GroupedNetwork(nn.Module):
    """ResNeXt's block: convolutions in groups (Xie et al. 2017), channels shuffled as in ShuffleNet."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.stem = nn.Sequential(*convolution(3, channels, 3, 2), nn.ReLU())
        self.reduce = nn.Sequential(*convolution(channels, channels, 1, groups=groups), nn.ReLU())
        self.grouped = nn.Sequential(
            *convolution(channels, channels, 3, groups=groups), nn.ReLU(), *convolution(channels, channels, 1)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.reduce(x)
        batch, channels, height, width = y.shape
        y = y.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2)
        x = functional.relu(x + self.grouped(y.reshape(batch, channels, height, width)))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Two levels down and up again, with transposed convolutions and skip connections (Ronneberger et al. 2015)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.outer = self._stage(1, channels)
        self.inner = self._stage(channels, 2 * channels)
        self.bottom = self._stage(2 * channels, 2 * channels)
        self.up_inner = nn.ConvTranspose2d(2 * channels, 2 * channels, 2, 2)
        self.after_inner = self._stage(4 * channels, channels)
        self.up_outer = nn.ConvTranspose2d(channels, channels, 3, 2, 1, output_padding=1)
        self.after_outer = self._stage(2 * channels, channels)
        self.head = nn.Conv2d(channels, 2, 1)

    @staticmethod
    def _stage(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(*convolution(inputs, outputs, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        inner = self.inner(functional.max_pool2d(outer, 2))
        bottom = self.bottom(functional.max_pool2d(inner, 2))
        x = self.after_inner(torch.cat([inner, self.up_inner(bottom)], 1))
        return self.head(self.after_outer(torch.cat([outer, self.up_outer(x)], 1)))


class SeparableSegmenter(nn.Module):
    """Separable convolutions down, then nearest and bilinear upsampling back to the input's size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Sequential(*self._separable(3, channels, 2), *self._separable(channels, 2 * channels, 2))
        self.nearest = nn.Sequential(nn.Upsample(scale_factor=2), *self._separable(2 * channels, channels, 1))
        self.bilinear = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.head = nn.Conv2d(channels, 2, 1)

    @staticmethod
    def _separable(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs)
        return [depthwise, nn.ReLU(), *convolution(inputs, outputs, 1), nn.ReLU()]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bilinear(self.nearest(self.down(x))))


def super_resolution(channels: int) -> nn.Module:
    """Sub-pixel convolution (Shi et al. 2016)."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 5, padding=2), nn.Tanh(), nn.Conv2d(channels, 4, 3, padding=1), nn.PixelShuffle(2)
    )


class SmallCnn(nn.Module):
    """Two convolutions and two linear layers, of which one becomes Gemm and one MatMul: to be quantised."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolution(3, channels, 3), nn.ReLU(), nn.MaxPool2d(2),
            *convolution(channels, 2 * channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(8 * channels, 16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).unsqueeze(1)).flatten(1)


# --- sequences, volumes, several inputs ----------------------------------------------------------------------------


def signal_cnn(channels: int) -> nn.Module:
    """1-D convolutions over (batch, channels, samples), as for an electrocardiogram."""
    return nn.Sequential(
        nn.Conv1d(2, channels, 7, 2, 3), nn.BatchNorm1d(channels), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(channels, 2 * channels, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(2 * channels, 5),
    )  # fmt: skip


def volume_cnn(channels: int) -> nn.Module:
    """3-D convolutions over (batch, channels, depth, height, width), as for a CT scan."""
    return nn.Sequential(
        nn.Conv3d(1, channels, 3, padding=1), nn.BatchNorm3d(channels), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(channels, 2 * channels, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        nn.Linear(2 * channels, 3),
    )  # fmt: skip


class TemporalBlock(nn.Module):
    """Two causal dilated convolutions and a residual connection (Bai et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        self.first = nn.Conv1d(inputs, outputs, 3, padding=self.padding, dilation=dilation)
        self.second = nn.Conv1d(outputs, outputs, 3, padding=self.padding, dilation=dilation)
        self.projection = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first(x)[..., : -self.padding])
        y = functional.relu(self.second(y)[..., : -self.padding])
        return functional.relu(self.projection(x) + y)


class TemporalNetwork(nn.Module):
    """Three temporal blocks with dilations 1, 2, 4; the answer is read at the last instant."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            TemporalBlock(2, channels, 1), TemporalBlock(channels, channels, 2), TemporalBlock(channels, channels, 4)
        )
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, :, -1])


class Recurrent(nn.Module):
    """A recurrent layer over (batch, steps, features) and a classifier on its last output."""

    def __init__(self, layer: nn.LSTM | nn.GRU, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(outputs, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class TwoSided(nn.Module):
    """An image and a table in, classes and a regression out."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.image = nn.Sequential(*convolution(1, channels, 3, 2), nn.ReLU(), nn.Flatten())
        self.table = nn.Sequential(nn.Linear(features, channels), nn.LeakyReLU(0.1))
        width = 17 * channels
        self.classes = nn.Linear(width, 4)
        self.regression = nn.Sequential(nn.Linear(width, channels), nn.ELU(), nn.Linear(channels, 1))

    def forward(self, image: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.image(image), self.table(table)], 1)
        return self.classes(joined).softmax(-1), self.regression(joined)


# --- registry ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture, with what its tests need.

    Attributes:
        build: makes the network from torch's current random state.
        inputs: shape per sample of every input.
        weighted: operators with weights that must be on the server.
        standard: whether standard mode, which makes a ciphertext of every value, is quick enough at this size.
        token_ids: whether the inputs are token ids.
        quantised: whether the export is quantised, and in which form.
        tolerance: largest error, relative to the largest output.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[Shape, ...]
    weighted: int
    standard: bool = True
    token_ids: bool = False
    quantised: Literal["QDQ", "QOperator"] | None = None
    tolerance: float = 5e-4

    def network(self) -> nn.Module:
        """Return the network in evaluation mode, its weights from a fixed seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = self.build().eval()
            for module in network.modules():
                # So that queries still differ behind many layers, and no softmax is saturated.
                if isinstance(module, nn.modules.conv._ConvNd):
                    nn.init.kaiming_normal_(module.weight)
                elif isinstance(module, nn.Linear):
                    nn.init.xavier_normal_(module.weight)
            return network

    def examples(self, batch: int = 1) -> tuple[Tensor, ...]:
        """Return inputs to trace the network with."""
        if self.token_ids:
            return tuple(torch.zeros(batch, *shape, dtype=torch.int64) for shape in self.inputs)
        return tuple(torch.zeros(batch, *shape) for shape in self.inputs)


#: Operators of two encoder layers: projections, output, and two of the perceptron each.
_TWO_LAYERS = 8
#: Time steps of the recurrent layers; all but the first, whose state is zero, multiply the state by weights.
_STEPS = 5

ARCHITECTURES = {
    # Its result is a sum over all layers: the outputs of each are rounded to their error bounds, which are wide.
    "transformer": Architecture(
        lambda: Transformer(64, 128, 4), ((64, 128),), _TWO_LAYERS, standard=False, tolerance=2e-3
    ),
    "transformer_small": Architecture(lambda: Transformer(4, 24, 4), ((4, 24),), _TWO_LAYERS),
    "transformer_sequence_first": Architecture(
        lambda: SequenceFirstTransformer(24, 4), ((6, 24),), _TWO_LAYERS + 1
    ),
    "vit": Architecture(lambda: VisionTransformer(8, 4, 16, 2), ((3, 8, 8),), _TWO_LAYERS + 2),
    "swin_block": Architecture(lambda: WindowAttention(4, 2, 16, 2), ((4, 4, 16),), 4),
    "text_classifier": Architecture(lambda: TextClassifier(8, 16, 2), ((8,),), 5, token_ids=True),
    "mobilenet_v2": Architecture(MobileNetV2, ((3, 16, 16),), 53),
    "mobilenet_v3_block": Architecture(lambda: MobileNetV3Block(4), ((3, 12, 12),), 6),
    "squeeze_excite": Architecture(lambda: SqueezeExciteNetwork(6), ((3, 8, 8),), 6),
    "resnet_group_norm": Architecture(lambda: GroupNormResNet(4), ((3, 8, 8),), 7),
    "grouped_convolutions": Architecture(lambda: GroupedNetwork(12, 3), ((3, 8, 8),), 5),
    "unet": Architecture(lambda: UNet(4), ((1, 8, 8),), 8),
    "separable_upsample": Architecture(lambda: SeparableSegmenter(4), ((3, 8, 8),), 7),
    "pixel_shuffle": Architecture(lambda: super_resolution(8), ((1, 8, 8),), 2),
    "signal_cnn": Architecture(lambda: signal_cnn(8), ((2, 64),), 3),
    "temporal_dilated": Architecture(lambda: TemporalNetwork(8), ((2, 24),), 8),
    "volume_cnn": Architecture(lambda: volume_cnn(3), ((1, 6, 8, 8),), 3),
    "lstm": Architecture(lambda: Recurrent(nn.LSTM(6, 12, batch_first=True), 12), ((_STEPS, 6),), _STEPS + 1),
    "lstm_bidirectional": Architecture(
        lambda: Recurrent(nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True), 16),
        ((_STEPS, 6),),
        2 * (1 + 2 * (_STEPS - 1)) + 1,
    ),
    "gru": Architecture(lambda: Recurrent(nn.GRU(6, 12, batch_first=True), 12), ((_STEPS, 6),), _STEPS + 1),
    "two_inputs_two_outputs": Architecture(lambda: TwoSided(4, 6), ((1, 8, 8), (6,)), 5),
    "quantised_qdq": Architecture(lambda: SmallCnn(6), ((3, 8, 8),), 4, quantised="QDQ"),
    "quantised_operators": Architecture(lambda: SmallCnn(6), ((3, 8, 8),), 4, quantised="QOperator"),
}  # fmt: skip
