"""Lowering of products of an activation with a constant tensor: MatMul, Gemm, Einsum.

Axes are told apart by their letters, as in Einsum: those of both operands that stay (groups), those of both that are
summed over (inputs), those of the activation that stay (rows) and those of the weights that stay (outputs). The
activation is brought into the form (groups, rows, inputs); one group is a MatMul, several are a grouped convolution of
one point.

Formulas are those of the ONNX operator specification, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.operators.steps import LARGEST_EXTENT, Conv, MatMul, Shape, Window
from partitioner.lowering import (
    NOT_LEADING,
    ON_NODE,
    Builder,
    Context,
    Lowered,
    Placement,
    constant,
    numbered,
    operand,
    real_values,
    reshape,
    shift,
    take,
    transpose,
)
from partitioner.pooling import sum_axes


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product of tensors by letters, one letter an axis, none twice in an operand.

    Attributes:
        activation: letters of the activation's axes, batch axis excluded.
        weights: letters of the constant's axes.
        result: letters of the result's axes, batch axis excluded.
    """

    activation: str
    weights: str
    result: str

    def letters(self) -> tuple[str, str, str, str]:
        """Return letters of groups, rows, inputs and outputs."""
        groups = "".join(c for c in self.activation if c in self.weights and c in self.result)
        rows = "".join(c for c in self.activation if c not in self.weights)
        inputs = "".join(c for c in self.activation if c in self.weights and c not in self.result)
        outputs = "".join(c for c in self.weights if c not in self.activation)
        return groups, rows, inputs, outputs


def contract(builder: Builder, value: int, weights: NDArray[Any], form: Contraction) -> int:
    """Append the product of a value with weights; return the number of the result."""
    groups, rows, inputs, outputs = form.letters()
    sizes = dict(zip(form.activation, builder.shapes[value], strict=True))
    sizes.update(zip(form.weights, weights.shape, strict=True))

    def size(letters: str) -> int:
        return prod(sizes[c] for c in letters)

    ordered = transpose(builder, value, [form.activation.index(c) for c in groups + rows + inputs])
    matrices = weights.transpose([form.weights.index(c) for c in groups + inputs + outputs])
    matrices = np.ascontiguousarray(matrices).reshape(size(groups), size(inputs), size(outputs))
    if size(groups) == 1:
        flat = reshape(builder, ordered, (*(sizes[c] for c in rows), size(inputs)))
        shape = (*builder.shapes[flat][:-1], size(outputs))
        made = builder.add(MatMul(flat, builder.array(matrices[0]), shape))
    else:
        flat = reshape(builder, ordered, (size(groups), size(rows), size(inputs)))
        made = _grouped(builder, flat, matrices)
    made_letters = groups + rows + outputs
    made = reshape(builder, made, tuple(sizes[c] for c in made_letters))
    return transpose(builder, made, [made_letters.index(c) for c in form.result])


def _grouped(builder: Builder, value: int, matrices: NDArray[Any]) -> int:
    """(groups, rows, inputs) times (groups, inputs, outputs), as a grouped convolution whose channels are inputs."""
    groups, rows, inputs = builder.shapes[value]
    outputs = matrices.shape[2]
    turned = transpose(builder, value, (0, 2, 1))
    plane = reshape(builder, turned, (groups * inputs, rows, 1))
    kernel = np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(groups * outputs, inputs, 1, 1)
    window = Window((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (rows, 1))
    made = builder.add(Conv(plane, builder.array(kernel), window, groups, (groups * outputs, rows, 1)))
    return transpose(builder, reshape(builder, made, (groups, outputs, rows)), (0, 2, 1))


def lower_matmul(node: ir.Node, context: Context) -> Lowered:
    """MatMul with a constant on either side, of any rank."""
    left, right = constant(node.inputs[0]), constant(node.inputs[1])
    if left is None and right is None:
        return ON_NODE
    weights, position = (right, 0) if right is not None else (left, 1)
    assert weights is not None  # one of the two is constant
    source, target = context.shape(node.inputs[position]), context.shape(node.outputs[0])
    if source is None or target is None:
        return context.refuse(node, NOT_LEADING)
    form = _matmul_form(source, weights.shape, position)
    if form is None:
        return context.refuse(node, f"a constant of shape {weights.shape} has weights of its own for every sample")
    contraction, matrix_shape, value_shape = form
    matrix = real_values(weights.reshape(matrix_shape))

    def emit(builder: Builder, values: Sequence[int]) -> int:
        value = reshape(builder, values[0], value_shape)
        made = contract(builder, value, matrix, contraction)
        return reshape(builder, made, target)

    return Lowered(Placement.WEIGHTED, (operand(node, position),), emit)


def _matmul_form(source: Shape, weights: Shape, position: int) -> tuple[Contraction, Shape, Shape] | None:
    """Return the letters of a MatMul, and the shapes of weights and activation without axes of one that broadcast.

    None if the weights differ from sample to sample, or the batch is an axis of the matrices.
    """
    vector = len(weights) == 1
    if position == 0 and not source:  # the batch is the last axis: it would be summed over
        return None
    if position == 1 and len(source) < 2:
        return None
    letters = ascii_letters[: len(source)]
    own = {"in": letters[-1] if position == 0 else letters[-2], "out": "Z"}
    stacked = letters[:-2] if len(source) > 1 else ""
    batch_axes = weights[:-2] if len(weights) > 2 else ()
    if any(size != 1 for size in batch_axes[: max(0, len(batch_axes) - len(stacked))]):
        return None
    batch_axes = batch_axes[max(0, len(batch_axes) - len(stacked)) :]
    kept_value, kept_weights, weight_letters = [], [], ""
    result = list(letters)
    offset = len(stacked) - len(batch_axes)
    for place, size in enumerate(source):
        axis = place - offset
        matched = 0 <= axis < len(batch_axes) and place < len(stacked)
        if matched and batch_axes[axis] != 1:
            weight_letters += letters[place]
            kept_weights.append(batch_axes[axis])
            if size == 1:  # the value broadcasts: its axis is the weights' alone
                continue
        kept_value.append(place)
    value_letters = "".join(letters[place] for place in kept_value)
    if vector:
        weight_letters += own["in"]
        result.remove(own["in"])
        kept_weights.append(weights[0])
    else:
        weight_letters += own["in"] + own["out"] if position == 0 else own["out"] + own["in"]
        result[result.index(own["in"])] = own["out"]
        kept_weights += weights[-2:]
    form = Contraction(value_letters, weight_letters, "".join(result))
    return form, tuple(kept_weights), tuple(source[place] for place in kept_value)


def lower_gemm(node: ir.Node, context: Context) -> Lowered:
    """Gemm with constant B; transposes of activations were taken out by `partitioner.folding`."""
    weights = constant(node.inputs[1])
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if weights is None:
        return ON_NODE
    if source is None or target is None or len(source) != 1 or node.attributes.get_int("transA"):
        return context.refuse(node, NOT_LEADING)
    matrix = real_values(weights.T if node.attributes.get_int("transB") else weights)
    alpha = node.attributes.get_float("alpha", 1.0)
    added = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(added)
    if added is not None and bias is None:
        return context.refuse(node, "C is not constant; use MatMul and Add")
    if bias is not None and bias.ndim == 2 and bias.shape[0] != 1:
        return context.refuse(node, f"C has a row for every sample (shape {bias.shape})")
    beta = node.attributes.get_float("beta", 1.0)

    def emit(builder: Builder, values: Sequence[int]) -> int:
        result = builder.add(
            MatMul(values[0], builder.array(matrix if alpha == 1 else alpha * matrix.astype(np.float64)), target)
        )
        return shift(builder, result, None if bias is None else beta * bias.astype(np.float64).reshape(-1))

    return Lowered(Placement.WEIGHTED, (operand(node, 0),), emit)


def lower_einsum(node: ir.Node, context: Context) -> Lowered:
    """Einsum of one activation and one constant, or of one activation alone."""
    constants = [constant(value) for value in node.inputs]
    given = [array for array in constants if array is not None]
    if not given:
        return _lower_single_einsum(node, context) if len(node.inputs) == 1 else ON_NODE
    if len(given) != 1 or len(node.inputs) != 2:
        return context.refuse(node, "the server takes one activation and one constant; split it into two Einsum")
    position = 0 if constants[0] is None else 1
    source, target = context.shape(node.inputs[position]), context.shape(node.outputs[0])
    if source is None or target is None:
        return context.refuse(node, NOT_LEADING)
    ranks = [given[0].ndim, given[0].ndim]
    ranks[position] = len(source) + 1
    terms, result = _spell(node.attributes["equation"].as_string(), ranks)
    value_term, weight_term = terms[position], terms[1 - position]
    batch = value_term[0]
    if result[:1] != batch or batch in weight_term or batch in value_term[1:]:
        return context.refuse(node, "it sums over samples, or has weights for every sample")
    sizes = dict(zip(value_term, (0, *source), strict=True))
    if any(sizes.get(c, size) != size for c, size in zip(weight_term, given[0].shape, strict=True)):
        return context.refuse(node, "axes of one letter differ in size")
    # Axes of the weights that nothing else has are summed here, and a letter twice is a diagonal.
    used = "".join(c for c in dict.fromkeys(weight_term) if c in value_term or c in result)
    weights = np.einsum(f"{weight_term}->{used}", given[0].astype(np.float64))
    alone = "".join(c for c in dict.fromkeys(value_term) if c not in used and c not in result)
    weights = np.broadcast_to(weights[(...,) + (None,) * len(alone)], (*weights.shape, *(sizes[c] for c in alone)))
    letters = "".join(dict.fromkeys(value_term[1:]))
    form = Contraction(letters, used + alone, result[1:])

    def emit(builder: Builder, values: Sequence[int]) -> int:
        value = _diagonal(builder, values[0], value_term[1:], letters)
        return contract(builder, value, weights, form)

    return Lowered(Placement.WEIGHTED, (operand(node, position),), emit)


def _lower_single_einsum(node: ir.Node, context: Context) -> Lowered:
    """Einsum of an activation alone: diagonals, sums over axes, a transpose."""
    source, target = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    if source is None or target is None or not prod(source):
        return ON_NODE
    (term,), result = _spell(node.attributes["equation"].as_string(), [len(source) + 1])
    letters = "".join(dict.fromkeys(term[1:]))
    if result[:1] != term[0] or term[0] in letters:
        return ON_NODE
    summed = [place for place, c in enumerate(letters) if c not in result]
    sizes = dict(zip(term[1:], source, strict=True))
    if prod(sizes[letters[place]] for place in summed) > LARGEST_EXTENT:
        return ON_NODE
    kept = "".join(c for c in letters if c in result)

    def emit(builder: Builder, values: Sequence[int]) -> int:
        total = sum_axes(builder, _diagonal(builder, values[0], term[1:], letters), summed)
        return transpose(builder, total, [kept.index(c) for c in result[1:]])

    return Lowered(Placement.LINEAR if summed else Placement.MOVEMENT, (operand(node, 0),), emit)


def _diagonal(builder: Builder, value: int, term: str, letters: str) -> int:
    """Keep the elements whose indices agree where a letter is there twice."""
    if term == letters:
        return value
    return take(builder, value, np.einsum(f"{term}->{letters}", numbered(builder, value)))


def _spell(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of every operand and of the result, ellipsis and implicit result spelled out."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    free = [c for c in reversed(ascii_letters) if c not in equation]
    widest = max((r - len(t) + 3 for r, t in zip(ranks, terms, strict=True) if "..." in t), default=0)
    names = "".join(free[:widest])

    def spelled(term: str, rank: int) -> str:
        dots = rank - len(term) + 3
        return term.replace("...", names[len(names) - dots :] if dots else "")

    made = [spelled(t, r) for t, r in zip(terms, ranks, strict=True)]
    if not arrow:
        counts: Mapping[str, int] = {c: "".join(made).count(c) for c in "".join(made)}
        return made, names + "".join(sorted(c for c, n in counts.items() if n == 1 and c not in names))
    return made, result.replace("...", names)
