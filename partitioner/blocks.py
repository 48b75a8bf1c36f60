"""Turn a group of server operators into a block: program, integer weights, biases, norms.

requires  the groups of `partitioner.grouping`
ensures   one `BuiltBlock` a group; its constant part block(0) is the node's bias
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.operators import Program, ScaleConflictError, evaluate_plain
from heinfer.plan import Block, OutputTerms, PreparedInfo, TensorSpec
from heinfer.ring import RingParameters
from partitioner.grouping import Group
from partitioner.lowering import Builder, Lowered
from partitioner.misfits import blamed
from partitioner.placement import Side
from partitioner.precision import quantise_to
from partitioner.preparing import choose_form
from partitioner.scaling import Quantised
from partitioner.shapes import Shape


class MoveToNode(Exception):  # noqa: N818 - a signal between passes, not an error
    """An operator adds values whose scales can't agree; it belongs on the node."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        super().__init__(f"{node.name} belongs on the node")


@dataclass(frozen=True, slots=True)
class BuiltBlock:
    """A block with all its arrays.

    Attributes:
        block: its part of the plan.
        full: program with biases and output scales.
        real: arrays of the full program.
        integers: arrays of the server's program.
        terms: biases and norms, one for every digit of every output.
    """

    block: Block
    full: Program
    real: Mapping[str, NDArray[Any]]
    integers: Mapping[str, NDArray[Any]]
    terms: tuple[OutputTerms, ...]


def build_block(
    index: int,
    group: Group,
    lowered: Mapping[ir.Node, Lowered],
    sides: Mapping[ir.Node, Side],
    shapes: Mapping[str, Shape],
    parameters: RingParameters,
    reasons: Mapping[ir.Node, str],
    precision: float | None = None,
) -> BuiltBlock:
    """Build one block, as precise as it can be where no form has the precision asked for (`partitioner.precision`).

    Raises:
        MoveToNode: scales conflict.
    """
    inputs = _inputs(group, lowered, sides)
    builder = Builder(str(index), [shapes[str(v.name)] for v in inputs])
    numbers = {value: number for number, value in enumerate(inputs)}
    made_by: list[ir.Node] = []
    for node in group.nodes:
        emit = lowered[node].emit
        assert emit is not None  # only operators that can run on the server are placed there
        with blamed(node):
            numbers[node.outputs[0]] = emit(builder, [numbers[v] for v in lowered[node].sources])
        made_by += [node] * (len(builder.steps) - len(made_by))
    outputs = [n.outputs[0] for n in group.nodes if _is_read_on_node(n.outputs[0], set(group.nodes), sides)]
    full = Program(tuple(builder.inputs), tuple(builder.steps), tuple(numbers[v] for v in outputs))
    full.check_arrays(builder.arrays)
    try:
        quantised = quantise_to(full, builder.arrays, parameters, precision)
    except ScaleConflictError as conflict:
        raise MoveToNode(made_by[conflict.step]) from conflict
    biases = evaluate_plain(full, builder.arrays, [np.zeros((1, *shape)) for shape in builder.inputs])
    program = full.for_server(quantised.digits)
    form = choose_form(program, quantised.arrays, parameters.degree)
    block = Block(
        inputs=tuple(TensorSpec(str(v.name), shapes[str(v.name)]) for v in inputs),
        outputs=tuple(TensorSpec(str(v.name), shapes[str(v.name)]) for v in outputs),
        program=program,
        row_sum=quantised.row_sum,
        final=any(_reaches_result(v, sides) for v in outputs),
        operators=tuple(f"{n.name} ({n.op_type})" for n in group.nodes),
        reasons=tuple(reasons[n] for n in group.nodes),
        unit_bound=quantised.unit_bound(parameters),
        relative_bound=quantised.relative_bound(parameters),
        digits=quantised.digits,
        digit_bits=quantised.bits,
        prepared=None if form is None else PreparedInfo.of(form),
    )
    real = {name: _narrowed(array) for name, array in builder.arrays.items()}
    return BuiltBlock(block, full, real, quantised.arrays, _terms(biases, quantised))


def _terms(biases: Sequence[NDArray[np.float64]], quantised: Quantised) -> tuple[OutputTerms, ...]:
    """Return what the node knows of every output and digit; a bias is added once, with the first digit.

    It is made small at once: for planes, norms of every element are several times what the weights take.
    """
    return tuple(
        OutputTerms(bias[0] if digit == 0 else np.zeros_like(bias[0]), norms).compact()
        for bias, digits in zip(biases, quantised.norms, strict=True)
        for digit, norms in enumerate(digits)
    )


def _narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """Return float64 as float32 where that loses nothing, which holds for a model's own weights: half the memory."""
    if array.dtype != np.float64:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    return narrow if np.array_equal(narrow, array) else array


def _inputs(group: Group, lowered: Mapping[ir.Node, Lowered], sides: Mapping[ir.Node, Side]) -> list[ir.Value]:
    inside = {node.outputs[0] for node in group.nodes}
    found: dict[ir.Value, None] = {}
    for node in group.nodes:
        found.update(dict.fromkeys(v for v in lowered[node].sources if v not in inside))
    return list(found)


def _is_read_on_node(value: ir.Value, inside: set[ir.Node], sides: Mapping[ir.Node, Side]) -> bool:
    """Whether a block's value must come back: a result, read on the node, or by another block."""
    if sides[_producer(value)] is Side.BEFORE_WEIGHTS:
        return False
    return value.is_graph_output() or any(use.node not in inside for use in value.uses())


def _reaches_result(value: ir.Value, sides: Mapping[ir.Node, Side]) -> bool:
    """Whether a value leads to a result of the model without another block."""
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            return True
        for use in current.uses():
            if not sides[use.node].on_server:
                fresh = [v for v in use.node.outputs if v not in seen]
                seen.update(fresh)
                pending += fresh
    return False


def _producer(value: ir.Value) -> ir.Node:
    producer = value.producer()
    assert producer is not None  # values of a block are made in it
    return producer
