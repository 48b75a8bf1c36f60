"""Per-record gradients of one layer, from its input activations x and its output gradients g.

After one forward and one backward pass, x and g of a layer hold every record's gradient of its parameters: for a
linear layer the sum over positions t of g_t x_t^T ("book-keeping", Bu et al. 2023, "Differentially private
optimization on large model at small cost"). Three forms are kept, whichever is cheapest:

- `Dense`: each record's gradient as it is. The clipped sum is then factors times the very numbers whose norm was
  taken, so that rounding in them cannot break the guarantee.
- `Outer`: one position a record. Norm |g| |x|, sum (factors g)^T x; nothing of the parameter's size is made.
- `Tokens`: few positions and a large parameter. Norms from the Gram matrices ("ghost norm", Li et al. 2022, section
  4), in float64 since positions may cancel, and enlarged by what the float32 rounding of the sum may add.

Sizes below: m rows = n records times k copies (augmentation), T positions a record, copies included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Squares that are summed in float32 before float64 takes over; see clipping.ROUNDING_MARGIN.
_BLOCK = 4096

#: Rows of norms between this and its inverse are measured in float32, whose squares then keep their digits.
_SMALLEST_NORM = 1e-12

#: Windows of a convolution that are copied at a time on a CPU.
_WINDOW_BYTES = 1 << 20

#: Unit roundoff of float32.
_ROUNDOFF = 2.0**-24


class RecordGradients(Protocol):
    """The gradients of one parameter for n records."""

    def squared_norms(self) -> Tensor:
        """Squared L2 norm of each record's gradient (or more, by rounding): float64, shape (n,)."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Sum over the records of factor times gradient; factors float32, shape (n,); shape of the parameter."""

    def erase(self, records: Tensor) -> None:
        """Set the gradients of some records to zero; indices, int64."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a sum is turned into the parameter: reshaped, axes permuted, reshaped to the parameter's own shape."""

    parameter: torch.Size
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def restore(self, total: Tensor) -> Tensor:
        """The sum in the parameter's shape."""
        if self.order:
            total = total.reshape(self.shape).permute(self.order)
        return total.reshape(self.parameter)


@dataclass(frozen=True, slots=True)
class Dense:
    """Gradients as they are: float32, shape (n, ...)."""

    values: Tensor
    layout: Layout

    def squared_norms(self) -> Tensor:
        """See `RecordGradients.squared_norms`."""
        return _squared_norms(self.values)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See `RecordGradients.weighted_sum`."""
        return self.layout.restore(torch.mv(self.values.flatten(1).t(), factors))

    def erase(self, records: Tensor) -> None:
        """See `RecordGradients.erase`."""
        self.values.index_fill_(0, records, 0.0)


@dataclass(frozen=True, slots=True)
class Outer:
    """Gradients g x^T of one position: gradients (n, outputs), activations (n, inputs), float32."""

    gradients: Tensor
    activations: Tensor
    layout: Layout

    def squared_norms(self) -> Tensor:
        """See `RecordGradients.squared_norms`; in float64, where neither factor over- or underflows."""
        return _row_norms(self.gradients).square() * _row_norms(self.activations).square()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See `RecordGradients.weighted_sum`."""
        return self.layout.restore((self.gradients * factors[:, None]).t() @ self.activations)

    def erase(self, records: Tensor) -> None:
        """See `RecordGradients.erase`."""
        self.gradients.index_fill_(0, records, 0.0)
        self.activations.index_fill_(0, records, 0.0)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Gradients sum_t g_t x_t^T: gradients (n, T, outputs), activations (n, T, inputs), float32."""

    gradients: Tensor
    activations: Tensor
    layout: Layout

    def squared_norms(self) -> Tensor:
        """See `RecordGradients.squared_norms`.

        Each of the T products that the float32 sum adds up may be rounded by T u |g_t| |x_t| (Higham, section 3.1),
        twice that with the factor's rounding; the norm is enlarged by their sum.
        """
        gradients, activations = self.gradients.double(), self.activations.double()
        gram = torch.bmm(gradients, gradients.mT) * torch.bmm(activations, activations.mT)
        norms = gram.sum(dim=(1, 2)).clamp_min(0.0).sqrt()
        lengths = torch.linalg.vector_norm(gradients, dim=2) * torch.linalg.vector_norm(activations, dim=2)
        enlarged: Tensor = norms + 2 * gradients.shape[1] * _ROUNDOFF * lengths.sum(dim=1)
        return enlarged.square()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See `RecordGradients.weighted_sum`."""
        scaled = self.gradients * factors[:, None, None]
        return self.layout.restore(scaled.flatten(0, 1).t() @ self.activations.flatten(0, 1))

    def erase(self, records: Tensor) -> None:
        """See `RecordGradients.erase`."""
        self.gradients.index_fill_(0, records, 0.0)
        self.activations.index_fill_(0, records, 0.0)


@dataclass(frozen=True, slots=True)
class Rows:
    """Gradients of an embedding: row `indices[i, t]` gets `values[i, t]`; a record's equal indices are merged."""

    indices: Tensor
    values: Tensor
    layout: Layout

    def squared_norms(self) -> Tensor:
        """See `RecordGradients.squared_norms`."""
        return _squared_norms(self.values)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See `RecordGradients.weighted_sum`."""
        total = self.values.new_zeros(self.layout.parameter)
        return total.index_add_(0, self.indices.flatten(), (self.values * factors[:, None, None]).flatten(0, 1))

    def erase(self, records: Tensor) -> None:
        """See `RecordGradients.erase`."""
        self.values.index_fill_(0, records, 0.0)


def _row_norms(rows: Tensor) -> Tensor:
    """Norms of rows in float64; squares in float32 where these neither over- nor underflow: 14 times as fast."""
    norms = _squared_norms(rows).sqrt()
    extreme = ~((norms > _SMALLEST_NORM) & (norms < 1 / _SMALLEST_NORM))  # NaN too
    if extreme.any():
        norms[extreme] = torch.linalg.vector_norm(rows[extreme].double(), dim=1)
    return norms


def _squared_norms(values: Tensor) -> Tensor:
    """Squared norms in float64 of (n, ...) values: blocks in float32, blocks summed in float64."""
    flat = values.flatten(1)
    whole = flat.shape[1] // _BLOCK * _BLOCK
    total: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    if whole:
        blocks = torch.linalg.vector_norm(flat[:, :whole].reshape(len(flat), -1, _BLOCK), dim=2)
        total += blocks.double().square().sum(dim=1)
    return total


def _gram_is_cheaper(positions: int, outputs: int, inputs: int) -> bool:
    """Whether Gram matrices in float64 cost clearly less than the gradient itself."""
    return 4 * positions * (outputs + inputs) < outputs * inputs


def _product(gradients: Tensor, activations: Tensor, layout: Layout) -> RecordGradients:
    """The cheapest form of sum_t g_t x_t^T: gradients (n, T, outputs), activations (n, T, inputs)."""
    positions, outputs, inputs = gradients.shape[1], gradients.shape[2], activations.shape[2]
    if positions == 1:
        return Outer(gradients.squeeze(1), activations.squeeze(1), layout)
    if _gram_is_cheaper(positions, outputs, inputs):
        return Tokens(gradients, activations, layout)
    return Dense(torch.bmm(gradients.mT, activations), layout)


def _linear(layer: nn.Linear, x: Tensor, g: Tensor, copies: int) -> dict[str, RecordGradients]:
    records = len(g) // copies
    x, g = x.reshape(records, -1, x.shape[-1]), g.reshape(records, -1, g.shape[-1])
    found: dict[str, RecordGradients] = {"weight": _product(g, x, Layout(layer.weight.shape))}
    if layer.bias is not None:
        found["bias"] = Dense(g.sum(dim=1), Layout(layer.bias.shape))
    return found


def _windows(layer: nn.Conv2d | nn.Conv1d, x: Tensor, g: Tensor, copies: int) -> Tensor:
    """What each output position sees: (n, groups, k, height, width, kernel height, kernel width, channels / groups).

    A strided copy of the input with channels last; several times as fast as torch's unfold on a CPU, which reads
    channels first.
    """
    padding = layer._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padding = [*padding, 0, 0] if isinstance(layer, nn.Conv1d) else padding
        x = functional.pad(x, padding, mode=mode)
    x = x.permute(0, 2, 3, 1).contiguous()  # free where the network runs with channels last
    kernel, stride, dilation = (
        (1,) * (2 - len(sizes)) + sizes for sizes in (layer.kernel_size, layer.stride, layer.dilation)
    )
    rows, row, column, channel = x.stride()
    channels = layer.in_channels // layer.groups
    return x.as_strided(
        (len(g) // copies, layer.groups, copies, *g.shape[2:], *kernel, channels),
        (
            rows * copies,
            channel * channels,
            rows,
            row * stride[0],
            column * stride[1],
            row * dilation[0],
            column * dilation[1],
            channel,
        ),
    )


def _convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, copies: int) -> dict[str, RecordGradients]:
    """Convolution as a matrix product over windows; a Conv1d is a Conv2d of height one."""
    if isinstance(layer, nn.Conv1d):
        x, g = x.unsqueeze(2), g.unsqueeze(2)
    records, groups, outputs = len(g) // copies, layer.groups, layer.out_channels // layer.groups
    windows = _windows(layer, x, g, copies)
    kernel, channels = windows.shape[5:7], windows.shape[7]
    positions, inputs = windows.shape[2:5].numel(), kernel.numel() * channels
    layout = Layout(layer.weight.shape, (groups * outputs, *kernel, channels), (0, 3, 1, 2))
    by_group = g.permute(0, 2, 3, 1).reshape(records, positions, groups, outputs)
    weight: RecordGradients
    if groups == 1 and _gram_is_cheaper(positions, outputs, inputs):
        weight = Tokens(by_group.squeeze(2), windows.reshape(records, positions, inputs), layout)
    else:
        weight = Dense(_multiply_windows(by_group.transpose(1, 2), windows), layout)
    found: dict[str, RecordGradients] = {"weight": weight}
    if layer.bias is not None:
        found["bias"] = Dense(by_group.flatten(2).sum(dim=1), Layout(layer.bias.shape))
    return found


def _multiply_windows(gradients: Tensor, windows: Tensor) -> Tensor:
    """sum_t g_t w_t^T, shape (n, groups, outputs, inputs).

    On a CPU a few records at a time: their windows then stay in the second cache, in memory that is used again.

    Args:
        gradients: g, shape (n, groups, T, outputs).
        windows: as `_windows` gives them.
    """
    records, groups, _, outputs = gradients.shape
    shape = (groups, gradients.shape[2], windows.shape[5:].numel())
    result = gradients.new_empty(records, groups, outputs, shape[2])
    size = records if gradients.is_cuda else max(1, _WINDOW_BYTES // (4 * math.prod(shape)))
    buffer = gradients.new_empty(min(size, records), *windows.shape[1:])
    for start in range(0, records, size):
        piece = slice(start, min(start + size, records))
        count = piece.stop - start
        buffer[:count].copy_(windows[piece])
        torch.bmm(
            gradients[piece].flatten(0, 1).mT,
            buffer[:count].view(count * groups, *shape[1:]),
            out=result[piece].flatten(0, 1),
        )
    return result


def _group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor, copies: int) -> dict[str, RecordGradients]:
    normal = functional.group_norm(x, layer.num_groups, eps=layer.eps)

    def per_channel(values: Tensor) -> Dense:
        return Dense(values.reshape(len(g) // copies, copies, g.shape[1], -1).sum(dim=(1, 3)), layout)

    layout = Layout(layer.weight.shape)
    return {"weight": per_channel(normal * g), "bias": per_channel(g)}


def _layer_norm(layer: nn.LayerNorm, x: Tensor, g: Tensor, copies: int) -> dict[str, RecordGradients]:
    normal = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    layout = Layout(layer.weight.shape)

    def per_element(values: Tensor) -> Dense:
        return Dense(values.reshape(len(g) // copies, -1, layer.weight.numel()).sum(dim=1), layout)

    return {"weight": per_element(normal * g), "bias": per_element(g)}


def _embedding(layer: nn.Embedding, x: Tensor, g: Tensor, copies: int) -> dict[str, RecordGradients]:
    """Merge the gradients of equal indices of a record into the first of them, so that norms are of what is summed."""
    records = len(g) // copies
    indices, g = x.reshape(records, -1), g.reshape(records, -1, g.shape[-1])
    if layer.padding_idx is not None:
        g = g.masked_fill((indices == layer.padding_idx)[..., None], 0.0)
    first = (indices[:, :, None] == indices[:, None, :]).int().argmax(dim=2)
    merged = torch.zeros_like(g).scatter_add_(1, first[..., None].expand_as(g), g)
    return {"weight": Rows(indices, merged, Layout(layer.weight.shape))}


Rule = Callable[..., dict[str, RecordGradients]]

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}


def find_rule(layer: nn.Module) -> Rule | None:
    """The rule of a layer's per-record gradients: called with layer, x (m, ...), g (m, ...) and copies.

    Only for the type itself: a subclass may compute something else. None where there is no rule.
    """
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return None
    return _RULES.get(type(layer)) if names <= {"weight", "bias"} else None
