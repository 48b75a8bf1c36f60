"""Rewrite Split as Slices, and Concat with constants as Pad and Add.

    requires  shapes of the values, and a batch of 1
    ensures   no Split into known sizes; no Concat of float32 activations with finite constants, but along the batch

    Split       part k = Slice(x) from the sum of the sizes in front of it
    Concat      Concat(c1, x, c2, y) = Concat(Pad(x), y) + Concat(c1, 0, c2, 0), where Pad makes room for the constants

Source: the ONNX specification of Split, Concat and Pad. A constant has size 1 where the activations have the batch; so
the sum broadcasts, where Concat would want as many copies as there are samples. A first axis of size 1 is taken for the
batch's: along it nothing is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from partitioner.lowering import constant
from partitioner.rewriting.emitter import Emitter, is_read


def rewrite_split(node: ir.Node) -> None:
    """Replace a Split whose sizes are known."""
    source = node.inputs[0]
    if source is None or source.shape is None:
        return
    axis = node.attributes.get_int("axis", 0) % source.shape.rank()
    sizes = _part_sizes(node, _size(source, axis))
    if sizes is None:
        return
    emitter = Emitter(node)
    if len(sizes) == 1:
        emitter.replace(emitter.emit("Identity", source))  # whatever the size, should the axis be the batch's
        return
    parts = [
        emitter.slice(source, (axis, end - size, end)) if is_read(output) else None
        for output, size, end in zip(node.outputs, sizes, accumulate(sizes), strict=True)
    ]
    emitter.replace(*parts)


def rewrite_concat(node: ir.Node) -> None:
    """Replace a Concat of activations with constants."""
    arrays = [constant(value) for value in node.inputs]
    given = [array for array in arrays if array is not None]
    if not given or len(given) == len(arrays):
        return
    axis = node.attributes["axis"].as_int() % given[0].ndim
    known = [_size(value, axis) for value in node.inputs]
    sizes = [size for size in known if size is not None]
    if len(sizes) != len(known) or (axis == 0 and 1 in _of_activations(sizes, arrays)):
        return  # of unknown size, or perhaps along the batch
    if any(array.dtype != np.float32 or not np.all(np.isfinite(array)) for array in given):
        return
    emitter = Emitter(node)
    result = emitter.join(_make_room(emitter, node.inputs, arrays, sizes, axis), axis)
    parts = [_or_zeros(array, size, given[0].shape, axis) for array, size in zip(arrays, sizes, strict=True)]
    emitter.replace(emitter.emit("Add", result, emitter.constant(np.concatenate(parts, axis))))


def _part_sizes(node: ir.Node, total: int | None) -> list[int] | None:
    """Return the lengths of a Split's parts: given, or equal but for a shorter last one."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        given = constant(node.inputs[1])
        return None if given is None else [int(size) for size in given]
    if total is None:
        return None
    parts = len(node.outputs)
    each = -(-total // parts)
    return [*([each] * (parts - 1)), total - each * (parts - 1)]


def _make_room(
    emitter: Emitter,
    values: Sequence[ir.Value | None],
    arrays: Sequence[NDArray[Any] | None],
    sizes: Sequence[int],
    axis: int,
) -> list[ir.Value | None]:
    """Pad the activations among a Concat's operands with zeros up to the next activation, the first in front too."""
    ends = list(accumulate(sizes))
    moved = [i for i, array in enumerate(arrays) if array is None]
    starts = [ends[i] - sizes[i] for i in moved]
    limits = [*starts[1:], ends[-1]]
    rank = next(array.ndim for array in arrays if array is not None)
    padded = []
    for order, i in enumerate(moved):
        pads = [0] * (2 * rank)
        pads[axis], pads[rank + axis] = 0 if order else starts[0], limits[order] - ends[i]
        padded.append(emitter.emit("Pad", values[i], emitter.integers(*pads)) if any(pads) else values[i])
    return padded


def _or_zeros(array: NDArray[Any] | None, size: int, shape: tuple[int, ...], axis: int) -> NDArray[Any]:
    """Return a constant operand as it is, and zeros in the place of an activation."""
    return np.zeros((*shape[:axis], size, *shape[axis + 1 :]), np.float32) if array is None else array


def _of_activations(sizes: Sequence[int], arrays: Sequence[NDArray[Any] | None]) -> list[int]:
    return [size for size, array in zip(sizes, arrays, strict=True) if array is None]


def _size(value: ir.Value | None, axis: int) -> int | None:
    """Return a value's size along an axis, None if it is unknown."""
    if value is None or value.shape is None:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None
