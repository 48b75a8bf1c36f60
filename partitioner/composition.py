"""Compose a transposed convolution with the convolution behind it: two linear layers in a row are one.

    requires  a simplified, folded model
    ensures   no convolution reads a transposed one, alone or joined with other channels, where one transposed
              convolution does the same exactly, with fewer values and in less time by the forecast

    b --> ConvTranspose --> Concat --> Conv       becomes       b --> ConvTranspose' --> Add
    a -----------------------^                                  a --> Conv' --------------^

Nothing between the two layers is nonlinear, so that the node would only decrypt and encrypt. A U-Net goes up that way
(Ronneberger et al. 2015, figure 1), once a level: each saves a round, one value down and one up for every element of
what the transposed convolution makes.

With u[t] = sum of b[i] w[j] over i * stride + j = t, and y[o] = sum of u[o + m - pad] v[m] over m,

    y[o] = sum of b[i] (w * v)[n] over i * stride + n - P = o,   P = kernel of v - 1 - pad

where (w * v)[n] is the sum of w[j] v[m] over j - m + kernel of v - 1 = n. The convolution's padding is zero, as is u
beyond its ends, as long as the transposed convolution crops nothing. Its bias reaches fewer points at the border: what
it adds to y is a constant tensor.

Worked example: 2x2 with stride 2, then 3x3 with padding 1, are one of 4x4 with stride 2 and padding 1: four of its
points meet in every output, where the convolution alone has nine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from partitioner.costs import DOWN_NS, ROUND_NS, UP_NS, products_ns
from partitioner.folding import take_over
from partitioner.homogeneous import NOTE
from partitioner.lowering import add_initialiser, constant, operand
from partitioner.misfits import blamed
from partitioner.shapes import Shape, infer_shapes
from partitioner.single_operator import run_node

Floats = NDArray[np.float64]
_COMPOSED: Final = "composed of a transposed convolution and the convolution behind it"
_UNIT: Final = ("strides", "dilations")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A transposed convolution and the convolution behind it.

    Attributes:
        inner: the transposed one.
        outer: the convolution.
        join: the Concat between them; None where `outer` reads `inner`.
        position: of `inner` among the operands of `join`.
        channels: first and last but one of what `outer` reads from `inner`.
    """

    inner: ir.Node
    outer: ir.Node
    join: ir.Node | None
    position: int
    channels: slice

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All of them."""
        return (self.inner, self.outer) if self.join is None else (self.inner, self.join, self.outer)


def compose_convolutions(model: ir.Model, pinned: Collection[ir.Node] = ()) -> None:
    """Compose in place.

    Args:
        model: the graph.
        pinned: operators that the user has pinned; nothing about them changes.
    """
    shapes = infer_shapes(model)
    for node in list(model.graph):
        with blamed(node):
            pair = _find_pair(node, shapes) if node.op_type == "ConvTranspose" and node.graph is not None else None
            if pair is not None and not any(n in pinned for n in pair.nodes) and _saves(pair, shapes):
                _compose(model, pair, shapes)
                common_passes.RemoveUnusedNodesPass()(model)  # an old join would still read the next one
                common_passes.NameFixPass()(model)
                shapes = infer_shapes(model)
    common_passes.TopologicalSortPass()(model)


def _find_pair(inner: ir.Node, shapes: Mapping[str, Shape]) -> _Pair | None:
    """Return the convolution that alone reads a transposed one, if composing them is exact."""
    join, position, value, first = None, 0, inner.outputs[0], 0
    reader = _only_reader(value)
    if reader is not None and reader.op_type == "Concat":
        join, value = reader, reader.outputs[0]
        parts = [shapes.get(str(v.name)) for v in join.inputs if v is not None]
        if any(part is None for part in parts) or join.attributes["axis"].as_int() not in (1, -len(parts[0] or ())):
            return None
        position = next(i for i, v in enumerate(join.inputs) if v is inner.outputs[0])
        first = sum(part[0] for part in parts[:position] if part is not None)
        reader = _only_reader(value)
    if reader is None or reader.op_type != "Conv" or reader.inputs[0] is not value:
        return None
    if any(str(v.name) not in shapes for v in (operand(inner, 0), inner.outputs[0], reader.outputs[0])):
        return None
    last = first + shapes[str(inner.outputs[0].name)][0]
    exact = _is_plain(inner, pads=False) and _is_plain(reader, pads=True)
    return _Pair(inner, reader, join, position, slice(first, last)) if exact else None


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _is_plain(node: ir.Node, *, pads: bool) -> bool:
    """Whether a convolution has float32 constants, one group, no dilation, and no stride or no padding.

    Args:
        node: Conv or ConvTranspose.
        pads: whether it may have padding, less than its kernel, and no stride; else it is the other way round.
    """
    constants = [constant(value) for value in node.inputs[1:] if value is not None]
    if any(c is None or c.dtype != np.float32 or not np.all(np.isfinite(c)) for c in constants):
        return False
    kernel = np.asarray(constants[0]).shape[2:]
    steps = ("dilations",) if not pads else ("strides", "dilations")
    if node.attributes.get_int("group", 1) != 1 or any(s != 1 for n in steps for s in node.attributes.get_ints(n, ())):
        return False
    padding = node.attributes.get_ints("pads", (0,) * (2 * len(kernel)))
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return False
    if pads:
        return all(p < k for p, k in zip(padding, (*kernel, *kernel), strict=True))
    return not (
        any(padding) or any(node.attributes.get_ints("output_padding", ())) or "output_shape" in node.attributes
    )


def _saves(pair: _Pair, shapes: Mapping[str, Shape]) -> bool:
    """Whether one block takes fewer values than two, and less time by the forecast."""
    source, made = operand(pair.inner, 0), shapes[str(pair.inner.outputs[0].name)]
    small, result = shapes[str(source.name)], shapes[str(pair.outer.outputs[0].name)]
    inner, outer = (constant(node.inputs[1]) for node in (pair.inner, pair.outer))
    assert inner is not None  # `_is_plain` has looked
    assert outer is not None
    kernel = [a + b - 1 for a, b in zip(inner.shape[2:], outer.shape[2:], strict=True)]
    strides = pair.inner.attributes.get_ints("strides", (1,) * len(kernel))
    # A larger kernel reaches further beyond the ends, at most by its points of one phase.
    reached = small[0] * prod(size - (-k // s) for size, k, s in zip(small[1:], kernel, strides, strict=True))
    again = reached - (prod(small) if len(list(source.uses())) == 1 else 0)  # others may read it a round before
    before = prod(small) * prod(inner.shape[1:]) + prod(result) * made[0] * prod(outer.shape[2:])
    after = prod(small) * result[0] * prod(kernel)
    saved_ns = ROUND_NS + prod(made) * (UP_NS + DOWN_NS) - again * UP_NS
    return bool(2 * prod(made) > again and saved_ns > products_ns(after) - products_ns(before))


def _compose(model: ir.Model, pair: _Pair, shapes: Mapping[str, Shape]) -> None:
    outer, graph = pair.outer, model.graph
    weights = np.asarray(constant(outer.inputs[1]), np.float64)
    composed = _transposed(model, pair, weights[:, pair.channels])
    addends = [_border(model, pair, shapes), _rest(model, pair, weights)]
    if addends[1] is None and len(outer.inputs) > 2:
        composed.resize_inputs(3)
        composed.replace_input_with(2, outer.inputs[2])
    graph.insert_before(outer, composed)
    value = composed.outputs[0]
    for addend in addends:
        if addend is not None:
            total = ir.Node("", "Add", [value, addend], name=f"{outer.name}.sum")
            graph.insert_before(outer, total)
            value = total.outputs[0]
    value.type = outer.outputs[0].type
    take_over(outer.outputs[0], value)
    graph.remove(outer, safe=True)


def _transposed(model: ir.Model, pair: _Pair, weights: Floats) -> ir.Node:
    """Return the one transposed convolution, without bias."""
    inner = np.asarray(constant(pair.inner.inputs[1]), np.float64)
    rank = inner.ndim - 2
    kernel = weights.shape[2:]
    joint = np.zeros(
        (inner.shape[0], weights.shape[0], *(a + b - 1 for a, b in zip(inner.shape[2:], kernel, strict=True)))
    )
    for point in np.ndindex(*inner.shape[2:]):
        for other in np.ndindex(*kernel):
            place = tuple(j - m + k - 1 for j, m, k in zip(point, other, kernel, strict=True))
            joint[:, :, *place] += inner[:, :, *point] @ weights[:, :, *other].T
    pads = pair.outer.attributes.get_ints("pads", (0,) * (2 * rank))
    attributes = [
        ir.AttrInt64s("strides", pair.inner.attributes.get_ints("strides", (1,) * rank)),
        ir.AttrInt64s("pads", [k - 1 - p for k, p in zip((*kernel, *kernel), pads, strict=True)]),
        ir.AttrInt64s("kernel_shape", joint.shape[2:]),
    ]
    value = add_initialiser(model, f"{pair.inner.name}.composed", joint.astype(np.float32))
    made = ir.Node("", "ConvTranspose", [operand(pair.inner, 0), value], attributes, name=f"{pair.inner.name}.composed")
    made.meta[NOTE] = _COMPOSED
    return made


def _border(model: ir.Model, pair: _Pair, shapes: Mapping[str, Shape]) -> ir.Value | None:
    """Return what the transposed convolution's bias adds to the result, shape (1, channels, *spatial), if anything."""
    bias = constant(pair.inner.inputs[2]) if len(pair.inner.inputs) > 2 else None
    if bias is None or not np.any(bias):
        return None
    read = operand(pair.outer, 0)
    plane = np.zeros((1, *shapes[str(read.name)]), np.float32)
    plane[:, pair.channels] = bias.reshape(-1, *([1] * (plane.ndim - 2)))
    added = run_node(pair.outer, {str(read.name): plane}, left_out=(2,))
    return add_initialiser(model, f"{pair.inner.name}.border", added)


def _rest(model: ir.Model, pair: _Pair, weights: Floats) -> ir.Value | None:
    """Insert the convolution of the other channels, with the bias; return its result, None where there are none."""
    if pair.join is None:
        return None
    others = [value for position, value in enumerate(pair.join.inputs) if position != pair.position]
    if not others:
        return None
    graph, value = model.graph, others[0]
    if len(others) > 1:
        joined = ir.Node("", "Concat", others, [ir.AttrInt64("axis", 1)], name=f"{pair.join.name}.rest")
        graph.insert_before(pair.outer, joined)
        value = joined.outputs[0]
    kept = np.delete(weights, np.arange(weights.shape[1])[pair.channels], axis=1)
    kernel = add_initialiser(model, f"{pair.outer.name}.rest", kept.astype(np.float32))
    operands = [value, kernel, *pair.outer.inputs[2:]]
    attributes = list(pair.outer.attributes.values())
    rest = ir.Node("", "Conv", operands, attributes, name=f"{pair.outer.name}.rest")
    graph.insert_before(pair.outer, rest)
    return rest.outputs[0]
