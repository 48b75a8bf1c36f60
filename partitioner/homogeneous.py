"""Move the gains of a lone BatchNormalization through ReLU into the weights behind it.

    requires  a simplified, folded model
    ensures   no BatchNormalization with learned gains whose result reaches nothing but weights, and these through
              operators that are positively homogeneous alone: what is left of it are signs, powers of two and biases

    BatchNormalization --> Relu --> Conv     becomes     signs, biases --> Relu --> Conv with scaled weights
    (a round of its own)                                 (on the node)

A function is positively homogeneous where f(c x) = c f(x) for c > 0. With y = g x + b for a channel and |g| = m 2**k,

    f(g x + b) = m f(sign(g) 2**k x + b / m)

and m goes into the next weights, by input channel. The power of two stays, exact in float32, so that m is within
[0.71, 1.42) and the weights of one row differ as little in size as before: they share a scale of 15 bits. What is left
is what the node holds of every other layer: biases and output scales. A channel of gain 0 is the constant b; it stays.

Worked example: g = (3, -0.5, 0), b = (6, 1, 2). m = (0.75, 1, 1), signs and powers (4, -0.5, 0), biases (8, 1, 2): for
x = 1 the ReLU gives (12, 0.5, 2) instead of (9, 0.5, 2), and the first input channel's weights are multiplied by 0.75.

DenseNet-121 normalises in front of the weights (Huang et al. 2017, "Densely connected convolutional networks", section
3), as residual networks with pre-activation do: 62 of its 183 rounds are such normalisations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from partitioner.folding import WEIGHTED, input_factors, scale_input, take_over
from partitioner.lowering import add_initialiser, constant
from partitioner.misfits import blamed
from partitioner.shapes import Shape, infer_shapes

Floats = NDArray[np.float64]
#: Key in a node's `meta`: what `inspect` says of an operator that this pass has changed.
NOTE: Final = "note"
_MOVED: Final = "its gains are in the weights behind it; signs, powers of two and biases are left"
#: What still is a float32 when it is multiplied or divided by 2.
_LARGEST: Final = 2.0**126
_POINTWISE: Final = ("Abs", "Identity", "LeakyRelu", "Neg", "PRelu", "Relu")
_POOLING: Final = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")
_REDUCTIONS: Final = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
_RESHAPING: Final = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


def move_gains(model: ir.Model, pinned: Collection[ir.Node] = ()) -> None:
    """Move gains in place.

    Args:
        model: the graph.
        pinned: operators that the user has pinned; nothing about them changes.
    """
    shapes = infer_shapes(model)
    for node in list(model.graph):
        if node.op_type == "BatchNormalization" and node not in pinned:
            with blamed(node):
                _move(model, node, shapes, pinned)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.NameFixPass()(model)


def _move(model: ir.Model, node: ir.Node, shapes: Mapping[str, Shape], pinned: Collection[ir.Node]) -> None:
    found = _gains_and_biases(node)
    if found is None or str(node.outputs[0].name) not in shapes:
        return
    gains, biases = found
    if shapes[str(node.outputs[0].name)][:1] != gains.shape:
        return  # onnx's inference does not compare them; who places the node refuses it
    scales, rest = _powers(gains)
    added = _shift_behind(node, len(gains), shapes)
    last = node.outputs[0] if added is None else added[0].outputs[0]
    readers = _readers(last, rest, shapes, pinned)
    left = (biases if added is None else biases + added[1]) / rest
    if readers is None or not np.all(np.abs(left) < _LARGEST) or (added is not None and added[0] in pinned):
        return
    if added is not None:
        take_over(last, node.outputs[0])
    _set_normalisation(model, node, scales, left)
    for reader, factor in readers:
        scale_input(model, reader, factor)


def _gains_and_biases(node: ir.Node) -> tuple[Floats, Floats] | None:
    """Return what a normalisation multiplies and adds, by channel; None if that is not constant, or too large."""
    constants = [constant(value) for value in node.inputs[1:5]]
    if any(c is None or c.dtype != np.float32 or not np.all(np.isfinite(c)) for c in constants):
        return None
    scale, beta, mean, variance = (np.asarray(c, np.float64) for c in constants)
    with np.errstate(all="ignore"):
        gains = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        biases = beta - mean * gains
    return (gains, biases) if all(np.all(np.abs(array) < _LARGEST) for array in (gains, biases)) else None


def _powers(gains: Floats) -> tuple[Floats, Floats]:
    """Split gains into signed powers of two, which stay, and factors within [0.71, 1.42), which move; 0 is (0, 1)."""
    sizes = np.where(gains == 0, 1.0, np.abs(gains))
    powers = np.exp2(np.rint(np.log2(sizes)))
    return np.sign(gains) * powers, sizes / powers


def _set_normalisation(model: ir.Model, node: ir.Node, scales: Floats, biases: Floats) -> None:
    """Let a normalisation multiply by `scales` and add `biases`, exactly: mean 0, variance 1, no epsilon."""
    channels = len(scales)
    for position, array in enumerate((scales, biases, np.zeros(channels), np.ones(channels)), 1):
        name = f"{node.name}.moved.{position}"
        node.replace_input_with(position, add_initialiser(model, name, array.astype(np.float32)))
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)
    node.meta[NOTE] = _MOVED


def _shift_behind(node: ir.Node, channels: int, shapes: Mapping[str, Shape]) -> tuple[ir.Node, Floats] | None:
    """Return the Add or Sub of a constant that alone reads a normalisation, and what it adds to every channel."""
    value = node.outputs[0]
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type not in ("Add", "Sub"):
        return None
    reader, position = uses[0].node, uses[0].idx
    array = constant(reader.inputs[1 - position])
    rank = len(shapes[str(value.name)]) + 1
    if array is None or array.dtype != np.float32 or array.ndim > rank or not np.all(np.isfinite(array)):
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    if shape not in ((1, channels, *([1] * (rank - 2))), (1,) * rank) or (reader.op_type == "Sub" and position == 1):
        return None
    sign = -1.0 if reader.op_type == "Sub" else 1.0
    return reader, sign * np.broadcast_to(array.astype(np.float64).reshape(-1), channels)


def _readers(
    value: ir.Value, factor: Floats, shapes: Mapping[str, Shape], pinned: Collection[ir.Node]
) -> list[tuple[ir.Node, NDArray[np.float64]]] | None:
    """Return the weighted operators that a value reaches, and by what their weights are to be multiplied.

    Args:
        value: a value whose channels, its first axis after the batch, are multiplied by less than they were.
        factor: by how much, shape (channels,).
        shapes: shapes per sample.
        pinned: operators that keep their numbers.

    Returns:
        Operators and factors, shaped as their activations are; None if anything reads the value otherwise, or a pinned
        operator does.
    """
    uses = list(value.uses())
    if value.is_graph_output() or not uses or any(use.node in pinned for use in uses):
        return None
    found: list[tuple[ir.Node, Floats]] = []
    for use in uses:
        if use.node.op_type in WEIGHTED:
            shaped = _for_weights(use.node, value, factor, shapes) if use.idx == 0 else None
            behind = None if shaped is None else [(use.node, shaped)]
        else:
            carried = _carried(use.node, use.idx, factor, shapes)
            behind = None if carried is None else _readers(use.node.outputs[0], carried, shapes, pinned)
        if behind is None:
            return None
        found += behind
    return found


def _for_weights(reader: ir.Node, value: ir.Value, factor: Floats, shapes: Mapping[str, Shape]) -> Floats | None:
    """Return a factor a channel as one that the weights of a reader can take in; None if they can't."""
    weights, shape = constant(reader.inputs[1]), shapes.get(str(value.name))
    if weights is None or weights.dtype != np.float32 or not np.all(np.isfinite(weights)) or shape is None:
        return None
    if reader.op_type not in ("Conv", "ConvTranspose") and len(shape) != 1:
        return None  # it sums over the last axis, which are no channels
    shaped = factor.reshape(1, -1, *([1] * (len(shape) - 1)))
    return shaped if input_factors(reader, shaped) is not None else None


def _carried(node: ir.Node, position: int, factor: Floats, shapes: Mapping[str, Shape]) -> Floats | None:
    """Return by what the channels of a result are multiplied where those of an operand are; None if they are not."""
    names = [str(node.inputs[position].name), str(node.outputs[0].name)]  # type: ignore[union-attr]  # a use is a value
    if node.domain not in ("", "ai.onnx") or any(name not in shapes for name in names):
        return None
    source, target = (shapes[name] for name in names)
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None  # positions of maxima
    if node.op_type == "Concat":
        return _concatenated(node, position, factor, shapes)
    if position != 0:
        return None
    if node.op_type in _POINTWISE:
        return factor if len(node.inputs) == 1 or constant(node.inputs[1]) is not None else None
    if node.op_type in _POOLING:
        return factor
    if node.op_type in _RESHAPING:
        if len(target) == 1:
            return np.repeat(factor, target[0] // len(factor))
        return factor if target[:1] == source[:1] else None
    if node.op_type in _REDUCTIONS:
        axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        rank = len(source) + 1
        return factor if axes is not None and axes.size and np.all(axes % rank > 1) else None
    if node.op_type == "Pad":
        return factor if _pads_zeros(node, len(source) + 1) else None
    return None


def _concatenated(node: ir.Node, position: int, factor: Floats, shapes: Mapping[str, Shape]) -> Floats | None:
    """Return the factor of joined channels: 1 for those of the other operands."""
    parts = [shapes.get(str(value.name)) for value in node.inputs if value is not None]
    target = shapes[str(node.outputs[0].name)]
    axis = node.attributes["axis"].as_int() % (len(target) + 1)
    if axis != 1 or len(parts) != len(node.inputs) or any(part is None for part in parts):
        return None
    channels = [0 if part is None else part[0] for part in parts]
    first = sum(channels[:position])
    joined = np.ones(target[0])
    joined[first : first + channels[position]] = factor
    return joined


def _pads_zeros(node: ir.Node, rank: int) -> bool:
    """Whether a Pad leaves batch and channels alone, and puts zeros around the other axes, or what lies there."""
    pads = constant(node.inputs[1])
    if pads is None or (len(node.inputs) > 3 and node.inputs[3] is not None) or len(pads) != 2 * rank:
        return False
    if np.any(pads.reshape(2, rank)[:, :2]):
        return False
    value = node.inputs[2] if len(node.inputs) > 2 else None
    filled = None if value is None else constant(value)
    constant_mode = node.attributes.get_string("mode", "constant") == "constant"
    return not constant_mode or value is None or (filled is not None and not np.any(filled))
