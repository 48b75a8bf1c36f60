"""The steps that a linear program is made of.

A program works on numbered values: its inputs come first, every step adds one. A value is a tensor of one sample
(shapes here never include the batch axis). Arrays (weights, index maps) are named; the caller supplies them.

Eight kinds suffice. All movement of data (Reshape, Transpose, Pad, Slice, Concat, broadcasting ...) is one kind,
`Take`: an index map. `Shift` and `Rescale` are known to the node alone: a server's program has neither, since the node
applies biases and output scales after decryption (`Program.for_server`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Shape = tuple[Annotated[int, Field(ge=0)], ...]
#: Elements of a value of one sample. An upload of so many would take 400 MB, and a table of their indices as much.
LARGEST_VALUE = 1 << 26
#: Largest extent of a window that makes sense; keeps the kernels' indices within 64 bits.
LARGEST_EXTENT = 1 << 20
_Length = Annotated[int, Field(ge=1, le=LARGEST_EXTENT)]
_Pad = Annotated[int, Field(ge=-LARGEST_EXTENT, le=LARGEST_EXTENT)]
Pair = tuple[_Length, _Length]
Pads = tuple[_Pad, _Pad, _Pad, _Pad]

CONFIG = ConfigDict(extra="forbid", strict=False, arbitrary_types_allowed=False)


@dataclass(frozen=True, slots=True, config=CONFIG)
class Window:
    """Geometry of a sliding window over (C, H, W).

    Attributes:
        kernel: height and width.
        strides: down and across.
        pads: top, left, bottom, right (zeros); a negative one crops.
        dilations: down and across.
        output: height and width of the result.
    """

    kernel: Pair
    strides: Pair
    pads: Pads
    dilations: Pair
    output: Pair


@dataclass(frozen=True, slots=True, config=CONFIG)
class Conv:
    """Grouped 2-D convolution; weights (O, C / group, kh, kw)."""

    source: int
    weights: str
    window: Window
    group: Annotated[int, Field(ge=1)]
    shape: Shape
    kind: Literal["conv"] = "conv"


@dataclass(frozen=True, slots=True, config=CONFIG)
class MatMul:
    """Last axis times a matrix; weights (inputs, outputs)."""

    source: int
    weights: str
    shape: Shape
    kind: Literal["matmul"] = "matmul"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Scale:
    """Elementwise product with weights of the value's own shape."""

    source: int
    weights: str
    shape: Shape
    kind: Literal["scale"] = "scale"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Take:
    """Element i of the result is element indices[i] of the sources, flattened and joined; -1 is zero.

    Without indices the elements stay in order and only the shape changes.
    """

    sources: tuple[int, ...]
    indices: str | None
    shape: Shape
    kind: Literal["take"] = "take"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Sum:
    """Sum of values of one shape, each with sign +1 or -1."""

    sources: tuple[int, ...]
    signs: tuple[Literal[-1, 1], ...]
    shape: Shape
    kind: Literal["sum"] = "sum"


@dataclass(frozen=True, slots=True, config=CONFIG)
class WindowSum:
    """Sum over a sliding window, channel by channel."""

    source: int
    window: Window
    shape: Shape
    kind: Literal["window_sum"] = "window_sum"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Shift:
    """Node only: add constants of the value's own shape."""

    source: int
    values: str
    shape: Shape
    kind: Literal["shift"] = "shift"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Rescale:
    """Node only: multiply with nonzero constants of the value's own shape."""

    source: int
    values: str
    shape: Shape
    kind: Literal["rescale"] = "rescale"


Step = Annotated[Conv | MatMul | Scale | Take | Sum | WindowSum | Shift | Rescale, Field(discriminator="kind")]
WEIGHTED = (Conv, MatMul, Scale)


def sources_of(step: Step) -> tuple[int, ...]:
    """Return the numbers of the values that a step reads."""
    return step.sources if isinstance(step, Take | Sum) else (step.source,)


def array_of(step: Step) -> str | None:
    """Return the name of the array that a step needs, None where it needs none."""
    match step:
        case Conv() | MatMul() | Scale():
            return step.weights
        case Take():
            return step.indices
        case Shift() | Rescale():
            return step.values
        case _:
            return None
