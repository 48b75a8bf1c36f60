"""Put the batch in front of what operators with weights read.

    requires  layouts of all values in front of an operator
    ensures   MatMul, Gemm, Einsum, Conv, ConvTranspose, BatchNormalization, and products with constant tensors read and
              make values that the batch leads, where the model has it on one axis elsewhere

A value of another layout is turned: a Reshape gives the batch an axis of its own, a Transpose puts it in front. The
operator's result is turned back. A turned value is kept, so that several readers share it, and an operator that reads
the result of a turned one reads it before it was turned back.

    MatMul, Gemm, Einsum   contractions by letters, as in Einsum; a MatMul where the weights have no axis but the one
                           summed over and the result's
    Conv and others        (samples * k, C, ...) becomes (samples, C, k, ...): one axis more, where the kernel has 1
    Mul, Div               the constant's axes turn as the value's do; those of Add and Sub behind a turned operator too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from partitioner.batch_axes import BatchAxis, BatchTracker, Layout
from partitioner.lowering import constant
from partitioner.shapes import Shape

#: Attributes of convolutions with a number for each spatial axis, and that number where the kernel is 1.
_SPATIAL: Mapping[str, int] = {"dilations": 1, "kernel_shape": 1, "output_padding": 0, "strides": 1}


@dataclass(frozen=True, slots=True)
class Turn:
    """How a value is brought into a form that the batch leads.

    Attributes:
        batch: the axis that is split into outer, samples and inner; a part of one element is left out.
        order: transpose of the split value.
    """

    batch: BatchAxis
    order: tuple[int, ...]

    def split(self, sizes: Sequence[int], samples: int) -> list[int]:
        """Replace the size of the batch axis by the sizes of its parts."""
        return self.replace(sizes, [self.batch.outer, samples, self.batch.inner])

    def replace(self, sizes: Sequence[int], parts: Sequence[int]) -> list[int]:
        """Replace the size of the batch axis by a size for each of outer, samples and inner."""
        there = (self.batch.outer > 1, True, self.batch.inner > 1)
        kept = [size for size, present in zip(parts, there, strict=True) if present]
        return [*sizes[: self.batch.axis], *kept, *sizes[self.batch.axis + 1 :]]

    def merge(self, turned: Sequence[int]) -> list[int]:
        """Return the sizes of a value before it was turned, -1 for the batch axis."""
        sizes = [turned[place] for place in np.argsort(self.order)]
        behind = self.batch.axis + 1 + (self.batch.outer > 1) + (self.batch.inner > 1)
        return [*sizes[: self.batch.axis], -1, *sizes[behind:]]


@dataclass(frozen=True, slots=True)
class _Product:
    """A contraction of an activation and weights: letters of their axes and of the result's."""

    activation: str
    weights: str
    result: str


class Turner:
    """Turns operators with weights, one after the other in the order of the graph.

    Args:
        tracker: where values have their batch.
    """

    def __init__(self, tracker: BatchTracker) -> None:
        self._tracker = tracker
        self._turned: dict[ir.Value, dict[Turn, ir.Value]] = {}

    def turn(self, node: ir.Node) -> None:
        """Turn an operator if it has weights and the batch does not lead what it reads."""
        handler = _HANDLERS.get(node.op_type)
        if handler is None or node.domain not in ("", "ai.onnx"):
            return
        positions = [place for place, value in enumerate(node.inputs[:2]) if constant(value) is None]
        layout = self._tracker.layout(node.inputs[positions[0]]) if len(positions) == 1 else None
        if layout is not None and layout.batch is not None and not layout.batch.leads:
            handler(self, node, positions[0], layout, layout.batch)

    def matmul(self, node: ir.Node, position: int, layout: Layout, batch: BatchAxis) -> None:
        """Turn a MatMul."""
        weights = _weights(node, position)
        form = _matmul_form(layout, weights.shape, position)
        if form is not None:
            product, shape = form
            self._contract(node, position, batch, product, weights.reshape(shape))

    def gemm(self, node: ir.Node, position: int, layout: Layout, batch: BatchAxis) -> None:
        """Turn a Gemm of rows of all samples: a contraction, then the addition of C."""
        if batch.merged == 1:
            return  # `partitioner.folding` takes transposes out
        terms = [
            "km" if node.attributes.get_int("transA", 0) else "mk",
            "nk" if node.attributes.get_int("transB", 0) else "kn",
        ]
        added = node.inputs[2] if len(node.inputs) > 2 else None
        bias = constant(added)
        if added is not None and bias is None:
            return
        product = _Product(terms[position], terms[1 - position], "mn")
        weights = _scaled(_weights(node, position), node.attributes.get_float("alpha", 1.0))
        if bias is not None:
            bias = _scaled(bias, node.attributes.get_float("beta", 1.0))
        self._contract(node, position, batch, product, weights, bias)

    def einsum(self, node: ir.Node, position: int, layout: Layout, batch: BatchAxis) -> None:
        """Turn an Einsum that has no ellipsis and names its result."""
        terms, arrow, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
        letters = terms.split(",")
        if arrow and "." not in terms and len(letters) == 2:
            product = _Product(letters[position], letters[1 - position], result)
            self._contract(node, position, batch, product, _weights(node, position))

    def convolution(self, node: ir.Node, position: int, layout: Layout, batch: BatchAxis) -> None:
        """Turn Conv, ConvTranspose or BatchNormalization: what is merged with the batch becomes a spatial axis."""
        if position != 0 or batch.axis != 0:
            return
        before = int(batch.outer > 1)
        added = before + (batch.inner > 1)
        rank = len(layout.shape) + added
        merged = [place for place in range(added + 1) if place != before]
        turn = Turn(batch, (before, added + 1, *merged, *range(added + 2, rank)))
        operands = [self._forward(node, node.inputs[0], layout, turn), *node.inputs[1:]]
        attributes = dict(node.attributes)
        if node.op_type != "BatchNormalization":
            kernel = _weights(node, 0)
            shape = (*kernel.shape[:2], *([1] * added), *kernel.shape[2:])
            operands[1] = self._tracker.add_constant(node, kernel.reshape(shape))
            attributes = _with_axes(node, added, [size for size in (batch.outer, batch.inner) if size > 1])
        self._finish(node, self._tracker.insert(node, node.op_type, operands, attributes, node.name), turn)

    def elementwise(self, node: ir.Node, position: int, layout: Layout, batch: BatchAxis) -> None:
        """Turn a product with a constant tensor, and any sum or product behind a turned operator."""
        array = _weights(node, position)
        value = node.inputs[position]
        assert value is not None  # an operand
        known = self._turned.get(value, {})
        if array.dtype.kind != "f" or not (known or (node.op_type in ("Div", "Mul") and array.size > 1)):
            return
        turn = next(iter(known), None) or Turn(batch, _batch_first(batch, len(layout.shape)))
        factor = _turn_constant(array, layout, turn)
        if factor is None:
            return
        operands: list[ir.Value | None] = [self._forward(node, value, layout, turn)]
        operands.insert(1 - position, self._tracker.add_constant(node, factor))
        self._finish(node, self._tracker.insert(node, node.op_type, operands, name=node.name), turn)

    def _contract(
        self,
        node: ir.Node,
        position: int,
        batch: BatchAxis,
        product: _Product,
        weights: NDArray[Any],
        bias: NDArray[Any] | None = None,
    ) -> None:
        """Put a contraction with the batch in front in an operator's place.

        Args:
            node: the operator.
            position: which of its operands is the activation.
            batch: the activation's batch axis.
            product: the letters.
            weights: the constant operand.
            bias: what is added to the result.
        """
        value, layout = node.inputs[position], self._tracker.layout(node.inputs[position])
        assert layout is not None  # its batch axis is known
        if len(product.activation) != len(layout.shape) or len(product.weights) != weights.ndim:
            return
        letter = product.activation[batch.axis]
        kept = product.activation.count(letter) == product.result.count(letter) == 1
        if letter in product.weights or not kept:
            return
        outer, inner = [c for c in ascii_letters if c not in product.activation + product.weights + product.result][:2]
        parts = outer * (batch.outer > 1) + letter + inner * (batch.inner > 1)
        activation, order = _lead(product.activation.replace(letter, parts), letter, product.weights)
        result, order_back = _lead(product.result.replace(letter, parts), letter, product.weights)
        turned = self._forward(node, value, layout, Turn(batch, order))
        turn = Turn(BatchAxis(product.result.index(letter), batch.outer, batch.inner), order_back)
        made = self._multiply(node, turned, weights, _Product(activation, product.weights, result))
        made_layout = Layout((1,) * len(product.result), turn.batch)
        offset = None if bias is None else _turn_constant(bias, made_layout, turn)
        if offset is not None:
            made = self._tracker.insert(node, "Add", [made, self._tracker.add_constant(node, offset)])
        if bias is None or offset is not None:
            self._finish(node, made, turn)

    def _multiply(self, node: ir.Node, turned: ir.Value, weights: NDArray[Any], product: _Product) -> ir.Value:
        """Insert a MatMul if the weights are a matrix or vector on the right of it, else an Einsum."""
        rows, summed = product.activation[:-1], product.activation[-1]
        made = product.result.removeprefix(rows)
        if rows + made == product.result and len(made) <= 1 and sorted(summed + made) == sorted(product.weights):
            matrix = np.einsum(f"{product.weights}->{summed}{made}", weights)
            operands = [turned, self._tracker.add_constant(node, matrix)]
            return self._tracker.insert(node, "MatMul", operands, name=node.name)
        equation = ir.AttrString("equation", f"{product.activation},{product.weights}->{product.result}")
        operands = [turned, self._tracker.add_constant(node, weights)]
        return self._tracker.insert(node, "Einsum", operands, [equation], node.name)

    def _forward(self, node: ir.Node, value: ir.Value | None, layout: Layout, turn: Turn) -> ir.Value:
        """Return a value in turned form; insert what makes it in front of a node that reads it, if it is not there."""
        assert value is not None  # an operand whose layout is known
        forms = self._turned.setdefault(value, {})
        if turn not in forms:
            split = value
            if turn.batch.merged > 1:
                target = np.array(turn.split(layout.shape, -1), np.int64)
                split = self._tracker.insert(node, "Reshape", [value, self._tracker.add_constant(node, target)])
            forms[turn] = self._transpose(node, split, turn.order)
        return forms[turn]

    def _finish(self, node: ir.Node, made: ir.Value, turn: Turn) -> None:
        """Turn a result back and put it in an operator's place; leave the operator if its result is not known."""
        layout = self._tracker.layout(made)
        if layout is None or layout.batch is None or not layout.batch.leads:
            return
        back = self._transpose(node, made, tuple(int(place) for place in np.argsort(turn.order)))
        if turn.batch.merged > 1:
            target = np.array(turn.merge(layout.shape), np.int64)
            back = self._tracker.insert(node, "Reshape", [back, self._tracker.add_constant(node, target)])
        self._turned[back] = {turn: made}
        old = node.outputs[0]
        name, is_result = old.name, old.is_graph_output()
        old.replace_all_uses_with(back, replace_graph_outputs=True)
        if is_result:
            old.name, back.name = f"{name}.turned", name
        self._tracker.graph.remove(node, safe=True)

    def _transpose(self, node: ir.Node, value: ir.Value, order: tuple[int, ...]) -> ir.Value:
        if order == tuple(range(len(order))):
            return value
        return self._tracker.insert(node, "Transpose", [value], [ir.AttrInt64s("perm", order)])


def _matmul_form(layout: Layout, weights: Shape, position: int) -> tuple[_Product, Shape] | None:
    """Return the letters of a MatMul, and the shape of its weights without axes of one that broadcast.

    None if a stack of weights has more axes than the activation, or the activation is a vector.
    """
    rank = len(layout.shape)
    letters, fresh = ascii_letters[:rank], iter(ascii_letters[rank:])
    stack, matrix = weights[:-2] if len(weights) > 1 else (), weights[-2:]
    if rank < 2 or len(stack) > rank - 2:
        return None
    result, stacked, sizes = list(letters), "", []
    for place, size in zip(range(rank - 2 - len(stack), rank - 2), stack, strict=True):
        if size > 1:
            # An axis of one in the activation broadcasts: it is summed over, and the weights' axis stays.
            letter = letters[place] if layout.shape[place] == size else next(fresh)
            result[place] = letter
            stacked += letter
            sizes.append(size)
    summed = rank - 1 if position == 0 else rank - 2
    if len(matrix) == 1:
        own = letters[summed]
        del result[summed]
    else:
        result[summed] = next(fresh)
        own = letters[summed] + result[summed] if position == 0 else result[summed] + letters[summed]
    return _Product(letters, stacked + own, "".join(result)), (*sizes, *matrix)


def _lead(term: str, letter: str, weights: str) -> tuple[str, tuple[int, ...]]:
    """Put a letter in front of a term and those that the weights have last; return the term and its transpose."""
    order = sorted(range(len(term)), key=lambda place: (term[place] != letter, term[place] in weights, place))
    return "".join(term[place] for place in order), tuple(order)


def _batch_first(batch: BatchAxis, rank: int) -> tuple[int, ...]:
    """Return the transpose that puts the batch in front of a split value whose rank was `rank`."""
    place = batch.axis + (batch.outer > 1)
    split_rank = rank + (batch.outer > 1) + (batch.inner > 1)
    return (place, *(axis for axis in range(split_rank) if axis != place))


def _turn_constant(array: NDArray[Any], layout: Layout, turn: Turn) -> NDArray[Any] | None:
    """Turn a constant that broadcasts to a value; None if it has more axes, or other values for every sample."""
    rank = len(layout.shape)
    if array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    size = shape[turn.batch.axis]
    if size not in (1, turn.batch.merged):
        return None
    parts = [1, 1, 1] if size == 1 else [turn.batch.outer, 1, turn.batch.inner]
    return array.reshape(turn.replace(shape, parts)).transpose(turn.order)


def _with_axes(node: ir.Node, added: int, sizes: Sequence[int]) -> dict[str, ir.Attr]:
    """Return a convolution's attributes for spatial axes more in front, of given sizes, where the kernel is 1."""
    attributes = dict(node.attributes)
    for name, fill in _SPATIAL.items():
        if name in attributes:
            attributes[name] = ir.AttrInt64s(name, [fill] * added + list(attributes[name].as_ints()))
    if "output_shape" in attributes:
        attributes["output_shape"] = ir.AttrInt64s("output_shape", [*sizes, *attributes["output_shape"].as_ints()])
    if "pads" in attributes:
        pads = list(attributes["pads"].as_ints())
        half = len(pads) // 2
        attributes["pads"] = ir.AttrInt64s("pads", [0] * added + pads[:half] + [0] * added + pads[half:])
    return attributes


def _scaled(array: NDArray[Any], factor: float) -> NDArray[Any]:
    return (factor * array.astype(np.float64)).astype(array.dtype)


def _weights(node: ir.Node, position: int) -> NDArray[Any]:
    """Return the constant operand of an operator, given the position of the other one."""
    array = constant(node.inputs[1 - position])
    assert array is not None  # exactly one of the two is constant
    return array


_Handler = Callable[[Turner, ir.Node, int, Layout, BatchAxis], None]
_HANDLERS: Mapping[str, _Handler] = {
    "Add": Turner.elementwise,
    "BatchNormalization": Turner.convolution,
    "Conv": Turner.convolution,
    "ConvTranspose": Turner.convolution,
    "Div": Turner.elementwise,
    "Einsum": Turner.einsum,
    "Gemm": Turner.gemm,
    "MatMul": Turner.matmul,
    "Mul": Turner.elementwise,
    "Sub": Turner.elementwise,
}
