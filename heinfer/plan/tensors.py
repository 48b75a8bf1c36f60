"""Named tensors of a plan."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from heinfer.operators.steps import CONFIG, Shape


@dataclass(frozen=True, slots=True, config=CONFIG)
class TensorSpec:
    """A named tensor: shape without the batch axis, element type as numpy names it."""

    name: str
    shape: Shape
    dtype: str = "float32"
