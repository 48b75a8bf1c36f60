"""Unroll LSTM, GRU and RNN over time.

    requires  constant weights, a known number of time steps, all sequences of full length
    ensures   one MatMul by W' for all time steps of all directions, and for every time step and direction one MatMul by
              R' (two for a GRU without linear_before_reset); the rest are sums, products of activations, and functions

The batch is in front of all values in between: they have the shape (batch, 1, size). `partitioner.rewriting.cells` has
the formulas, the ONNX specification of LSTM, GRU and RNN is their source. A step whose state is zero needs no product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from partitioner.lowering import constant
from partitioner.rewriting.activations import Activation, read_activations
from partitioner.rewriting.cells import GATES, Cell, State
from partitioner.rewriting.emitter import Emitter, is_read

#: Each becomes tens of operators.
_MOST_STEPS = 2**12
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_DEFAULT_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_WEIGHTS, _RECURRENCE, _BIAS, _LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = range(1, 8)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A recurrent operator.

    Attributes:
        steps: time steps.
        batch_first: layout 1, where the batch is the first axis of all that goes in and out.
        weights: W' of all directions side by side, shape (input size, directions * gates * hidden size).
        bias: what is added to the product with them, shape (directions * gates * hidden size,).
        cells: one for each direction.
        backwards: for each direction, whether it goes from the last step to the first.
    """

    steps: int
    batch_first: bool
    weights: NDArray[np.float32]
    bias: NDArray[np.float32]
    cells: tuple[Cell, ...]
    backwards: tuple[bool, ...]


def obstacle(node: ir.Node) -> str | None:
    """Return why a recurrent operator can't be unrolled, None if it can."""
    positions = (_WEIGHTS, _RECURRENCE, _BIAS, *((_PEEPHOLES,) if node.op_type == "LSTM" else ()))
    given = [value for value in (_input(node, p) for p in positions) if value is not None]
    arrays = [array for array in map(constant, given) if array is not None]
    if len(arrays) != len(given):
        return "its weights are computed from other values; export it with constant weights"
    if any(array.dtype != np.float32 for array in arrays):
        return f"weights are {arrays[0].dtype}; export the model in float32"
    steps = _time_steps(node)
    if steps is None:
        return "the number of time steps is unknown; export with a fixed sequence length"
    lengths = _input(node, _LENGTHS)
    if lengths is not None:
        array = constant(lengths)
        if array is None or np.any(array != steps):
            return f"sequence_lens may differ from the {steps} time steps, so that what is computed depends on the data"
    if steps > _MOST_STEPS:
        return f"it has {steps} time steps: expected {_MOST_STEPS} at most, since each becomes operators of its own"
    if _directions(node) is None:
        return f"direction is {node.attributes.get_string('direction')!r}, which ONNX does not know"
    misfit = _misfit(node)
    if misfit is not None:
        return misfit
    activations = _activations(node)
    return activations if isinstance(activations, str) else None


def _misfit(node: ir.Node) -> str | None:
    """Return which weights don't have the shape that the operator defines, None if all do."""
    directions, gates = _directions(node), GATES[node.op_type]
    recurrence, source = constant(_input(node, _RECURRENCE)), node.inputs[0]
    if directions is None or recurrence is None or recurrence.ndim != 3 or source is None or source.shape is None:
        return "its recurrence weights need three axes"
    count, hidden_size = len(directions), recurrence.shape[2]
    expected: dict[int, tuple[object, ...]] = {
        _WEIGHTS: (count, gates * hidden_size, source.shape[2]),
        _RECURRENCE: (count, gates * hidden_size, hidden_size),
        _BIAS: (count, 2 * gates * hidden_size),
        _PEEPHOLES: (count, 3 * hidden_size),
    }
    for position, shape in expected.items():
        array = constant(_input(node, position)) if position != _PEEPHOLES or node.op_type == "LSTM" else None
        if array is not None and array.shape != shape:
            return f"input {position} has shape {array.shape}: expected {shape}"
    return None


def unroll(node: ir.Node) -> None:
    """Replace a recurrent operator that `obstacle` has no objection to."""
    emitter = Emitter(node)
    layer = _read(node, emitter)
    source = node.inputs[0]
    if not layer.batch_first:
        source = emitter.emit("Transpose", source, perm=(1, 0, 2))
    projected = emitter.emit("MatMul", source, emitter.constant(layer.weights))
    if np.any(layer.bias):
        projected = emitter.emit("Add", projected, emitter.constant(layer.bias))
    hidden_states, last = [], []
    for direction, (cell, backwards) in enumerate(zip(layer.cells, layer.backwards, strict=True)):
        state = State(*(_initial(emitter, node, layer, position, direction) for position in (_HIDDEN, _CELL)))
        states = _run(emitter, cell, projected, direction, state, range(layer.steps)[:: -1 if backwards else 1])
        hidden_states.append(emitter.join([s.hidden for s in states[:: -1 if backwards else 1]], axis=1))
        last.append(states[-1])
    emitter.replace(*_outputs(emitter, node, layer, hidden_states, last))


def _run(emitter: Emitter, cell: Cell, projected: ir.Value, direction: int, state: State, times: range) -> list[State]:
    """Append all time steps of one direction; return the state after each, in the order in which they are computed."""
    width, states = GATES[cell.operator] * cell.hidden_size, []
    for time in times:
        share = emitter.slice(projected, (1, time, time + 1), (2, direction * width, (direction + 1) * width))
        state = cell.step(emitter, share, state)
        states.append(state)
    return states


def _outputs(
    emitter: Emitter, node: ir.Node, layer: _Layer, hidden_states: list[ir.Value | None], last: list[State]
) -> list[ir.Value | None]:
    """Append Y, Y_h and Y_c, those that are read, in the operator's layout."""
    found: list[ir.Value | None] = [None] * len(node.outputs)
    for position, output in enumerate(node.outputs):
        if not is_read(output):
            continue
        if position == 0:
            apart = [emitter.emit("Unsqueeze", value, emitter.integers(2)) for value in hidden_states]
            joined, layout = emitter.join(apart, axis=2), [1, 2, 0, 3]
        else:
            joined, layout = emitter.join([s.hidden if position == 1 else s.cell for s in last], axis=1), [1, 0, 2]
        found[position] = joined if layer.batch_first else emitter.emit("Transpose", joined, perm=layout)
    return found


def _initial(emitter: Emitter, node: ir.Node, layer: _Layer, position: int, direction: int) -> ir.Value | None:
    """Append one direction's initial state, shape (batch, 1, hidden size); None for zero."""
    value = _input(node, position) if position != _CELL or node.op_type == "LSTM" else None
    if value is None:
        return None
    array = constant(value)
    if array is None:
        turned = value if layer.batch_first else emitter.emit("Transpose", value, perm=(1, 0, 2))
        return emitter.slice(turned, (1, direction, direction + 1))
    turned_array = array if layer.batch_first else array.swapaxes(0, 1)
    own = turned_array[:, direction : direction + 1]
    return emitter.constant(own) if np.any(own) else None


def _read(node: ir.Node, emitter: Emitter) -> _Layer:
    steps, backwards, activations = _time_steps(node), _directions(node), _activations(node)
    weights, recurrence = constant(node.inputs[_WEIGHTS]), constant(node.inputs[_RECURRENCE])
    assert steps is not None  # `obstacle` has verified all of these
    assert backwards is not None
    assert not isinstance(activations, str)
    assert weights is not None
    assert recurrence is not None
    hidden_size = recurrence.shape[2]
    reset_after = node.op_type == "GRU" and bool(node.attributes.get_int("linear_before_reset", 0))
    bias, own_bias = _biases(node, len(backwards), hidden_size, reset_after)
    peepholes = constant(_input(node, _PEEPHOLES)) if node.op_type == "LSTM" else None
    clip = node.attributes.get("clip")
    each = len(activations) // len(backwards)
    in_two = node.op_type == "GRU" and not reset_after
    cells = tuple(
        Cell(
            operator=node.op_type,
            hidden_size=hidden_size,
            recurrence=_columns(emitter, recurrence[d].T, [2 * hidden_size] if in_two else []),
            recurrence_bias=None if own_bias is None else emitter.constant(own_bias[d]),
            peepholes=() if peepholes is None else tuple(map(emitter.constant, np.split(peepholes[d], 3))),
            activations=tuple(activations[d * each : (d + 1) * each]),
            clip=None if clip is None else clip.as_float(),
            coupled=bool(node.attributes.get_int("input_forget", 0)),
        )
        for d in range(len(backwards))
    )
    batch_first = bool(node.attributes.get_int("layout", 0))
    return _Layer(steps, batch_first, np.concatenate(weights).T, bias, cells, backwards)


def _biases(
    node: ir.Node, directions: int, hidden_size: int, reset_after: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Return the bias of the input's product, and what is added to each direction's third product with the state."""
    gates, bias = GATES[node.op_type], constant(_input(node, _BIAS))
    if bias is None:
        bias = np.zeros((directions, 2 * gates * hidden_size), np.float32)
    of_input, of_state = bias.reshape(directions, 2, gates, hidden_size).swapaxes(0, 1)
    added = of_input + of_state
    if not reset_after:
        return added.ravel(), None
    added[:, 2] = of_input[:, 2]
    return added.ravel(), of_state[:, 2]


def _columns(emitter: Emitter, matrix: NDArray[np.float32], limits: list[int]) -> tuple[ir.Value, ...]:
    """Return a matrix, cut in front of the given columns, as constants."""
    return tuple(map(emitter.constant, np.split(matrix, limits, axis=1)))


def _input(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def _time_steps(node: ir.Node) -> int | None:
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    steps = value.shape[1 if node.attributes.get_int("layout", 0) else 0]
    return steps if isinstance(steps, int) and steps > 0 else None


def _directions(node: ir.Node) -> tuple[bool, ...] | None:
    return _DIRECTIONS.get(str(node.attributes.get_string("direction", "forward")).lower())


def _activations(node: ir.Node) -> list[Activation] | str:
    """Return the functions of all directions one after another, or what is wrong with them."""
    default = _DEFAULT_ACTIVATIONS[node.op_type]
    expected = len(default) * len(_directions(node) or ())
    names = list(node.attributes.get_strings("activations", ())) or [*default * len(_directions(node) or ())]
    if len(names) != expected:
        return f"has {len(names)} activations, expected {expected}"
    alphas = node.attributes.get_floats("activation_alpha", ())
    return read_activations(names, alphas, node.attributes.get_floats("activation_beta", ()))
