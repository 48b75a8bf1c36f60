"""Layers as modules of Orion, the first or the second: both have `nn.Module`, `Linear`, `Conv2d`, `Quad` and `Flatten`.

    Layer -> as_module(on, layer) -> chain(on, [module, ...]) -> Orion's fit, compile -> slots -> undo_gap() -> values

Values lie in the slots as the image does, channel after channel. A convolution of stride s leaves s x s channels
interleaved, one in every s-th row and column: Orion's "gap", which `undo_gap` sorts out once they are decrypted.
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import torch
from networks import Convolution, Layer, Linear, NotExpressibleError


def as_module(on: ModuleType, layer: Layer) -> torch.nn.Module:
    """Return Orion's module for a layer, a square for a ReLU.

    Args:
        on: `orion.nn` or `orion_compiler.nn`.
        layer: With or without weights.

    Raises:
        NotExpressibleError: Orion has no counterpart, or none that these scripts know.
    """
    if isinstance(layer, Linear):
        module = on.Linear(layer.weight.shape[1], layer.weight.shape[0])
    elif isinstance(layer, Convolution):
        outputs, inputs, *kernel = layer.weight.shape
        module = on.Conv2d(inputs, outputs, tuple(kernel), layer.stride, layer.padding)
    elif layer.kind == "Relu":
        return on.Quad()
    elif layer.kind in ("Reshape", "Flatten"):
        return on.Flatten()
    else:
        raise NotExpressibleError(f"{layer.kind} '{layer.name}' is not compiled by these scripts")
    module.load_state_dict({"weight": torch.from_numpy(layer.weight), "bias": torch.from_numpy(layer.bias)})
    return module


def chain(on: ModuleType, parts: list[torch.nn.Module]) -> torch.nn.Module:
    """Return a network of modules one after the other, as Orion traces it."""

    class Chain(on.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, part in enumerate(parts):
                setattr(self, f"part{number}", part)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(len(parts)):
                x = getattr(self, f"part{number}")(x)
            return x

    return Chain()


def undo_gap(
    slots: np.ndarray, encrypted_shape: tuple[int, ...], output_shape: tuple[int, ...], gap: int
) -> np.ndarray:
    """Return decrypted values in the shape that the layer has in the clear.

    Args:
        slots: At least as many as `encrypted_shape` has entries.
        encrypted_shape: (1, channels, height, width) with gaps, or (1, outputs).
        output_shape: The same without gaps.
        gap: Channels interleaved in each direction; 1 for none.
    """
    values = slots[: math.prod(encrypted_shape)].reshape(encrypted_shape)
    if len(output_shape) == 4:
        _, channels, height, width = output_shape
        used = np.ascontiguousarray(values[:, :, : height * gap, : width * gap])
        values = torch.pixel_unshuffle(torch.from_numpy(used), gap).numpy()[:, :channels]
    return values.reshape(output_shape)
