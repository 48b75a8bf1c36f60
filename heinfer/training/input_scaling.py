"""A table's columns, brought to one size by declared ranges inside the network.

So whoever runs the exported model gives it the values as they were measured, and needs to know no ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class DeclaredRanges(nn.Module):
    """Clips every feature to its range and maps the range to [-1, 1]."""

    def __init__(self, ranges: Sequence[tuple[float, float]]) -> None:
        """Keep the ranges.

        Args:
            ranges: smallest and largest value of each feature, smaller first.
        """
        super().__init__()
        low, high = torch.tensor(ranges, dtype=torch.float64).T
        for name, values in (("low", low), ("high", high), ("slopes", 2 / (high - low))):
            self.register_buffer(name, values.float(), persistent=False)
        self.low: Tensor
        self.high: Tensor
        self.slopes: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Shape (batch, features), and the same again, in [-1, 1].

        This is 2 (x - low) / (high - low) - 1. The product is written as a PReLU of low - x, which is never positive:
        a product with constants would be taken for a layer of the model and be placed on the server, where features of
        very different size would share one scale and the small ones would drown in its rounding.
        """
        below = self.low - torch.minimum(torch.maximum(features, self.low), self.high)
        return -1 - functional.prelu(below, self.slopes)
