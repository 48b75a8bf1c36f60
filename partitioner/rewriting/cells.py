"""One time step of LSTM, GRU and RNN.

Notation of the ONNX specification: X_t input, H_t hidden state, C_t cell, W and R weights, Wb and Rb biases, P
peepholes, (.) the product of elements. The input's share X_t W' + b of all gates is there already.

    RNN     H_t = f(X_t W' + H_t-1 R' + b)

    LSTM    i = f(X_t Wi' + H_t-1 Ri' + Pi (.) C_t-1 + bi)
            f = f(X_t Wf' + H_t-1 Rf' + Pf (.) C_t-1 + bf), or 1 - i if the two gates are coupled (input_forget)
            C_t = f (.) C_t-1 + i (.) g(X_t Wc' + H_t-1 Rc' + bc)
            o = f(X_t Wo' + H_t-1 Ro' + Po (.) C_t + bo)
            H_t = o (.) h(C_t)

    GRU     z = f(X_t Wz' + H_t-1 Rz' + bz)
            r = f(X_t Wr' + H_t-1 Rr' + br)
            n = g(X_t Wh' + (r (.) H_t-1) Rh' + bh),
                g(X_t Wh' + r (.) (H_t-1 Rh' + Rbh) + Wbh) with linear_before_reset
            H_t = (1 - z) (.) n + z (.) H_t-1

`clip` bounds what the functions of the gates are applied to, not the cell in h(C_t), as in onnxruntime. A state that is
zero is None, and what it would be multiplied with is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from partitioner.lowering import constant
from partitioner.rewriting.activations import Activation
from partitioner.rewriting.emitter import Emitter

#: Gates of each operator, in the order in which they are stacked in its weights.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True, slots=True)
class State:
    """What a step hands to the next.

    Attributes:
        hidden: H_t, shape (batch, 1, hidden size); None for zero.
        cell: C_t of an LSTM, of the same shape; None for zero and for other operators.
    """

    hidden: ir.Value | None = None
    cell: ir.Value | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One direction of a recurrent layer, without the input's weights.

    Attributes:
        operator: LSTM, GRU or RNN.
        hidden_size: width of the hidden state.
        recurrence: R', shape (hidden size, gates * hidden size); a GRU without linear_before_reset has two parts, for
            H_t-1 and r (.) H_t-1: the first two gates' columns and the third's.
        recurrence_bias: Rbh of a GRU with linear_before_reset, shape (hidden size,); None otherwise.
        peepholes: P of an LSTM in the order i, o, f, each of shape (hidden size,); empty without.
        activations: f for RNN, f and g for GRU, f, g and h for LSTM.
        clip: bound of what the gates' functions are applied to; None without.
        coupled: whether the forget gate of an LSTM is 1 - i.
    """

    operator: str
    hidden_size: int
    recurrence: tuple[ir.Value, ...]
    recurrence_bias: ir.Value | None
    peepholes: tuple[ir.Value, ...]
    activations: tuple[Activation, ...]
    clip: float | None
    coupled: bool

    def step(self, emitter: Emitter, projected: ir.Value, state: State) -> State:
        """Append one time step.

        Args:
            emitter: receives the nodes.
            projected: X_t W' + b, shape (batch, 1, gates * hidden size).
            state: of the step before.
        """
        if self.operator == "LSTM":
            return self._lstm(emitter, projected, state)
        if self.operator == "GRU":
            return State(self._gru(emitter, projected, state.hidden))
        total = _sum(emitter, projected, _product(emitter, state.hidden, self.recurrence[0]))
        return State(self._activate(emitter, 0, total))

    def _lstm(self, emitter: Emitter, projected: ir.Value, state: State) -> State:
        total = _sum(emitter, projected, _product(emitter, state.hidden, self.recurrence[0]))
        share = [self._gate(emitter, total, gate) for gate in range(4)]
        old = state.cell
        of_input = self._activate(emitter, 0, self._peep(emitter, share[0], 0, old))
        cell = emitter.emit("Mul", of_input, self._activate(emitter, 1, share[3]))
        if old is not None:
            if self.coupled:
                forget = emitter.emit("Sub", emitter.number(1), of_input)
            else:
                forget = self._activate(emitter, 0, self._peep(emitter, share[2], 2, old))
            cell = emitter.emit("Add", emitter.emit("Mul", forget, old), cell)
        output = self._activate(emitter, 0, self._peep(emitter, share[1], 1, cell))
        return State(emitter.emit("Mul", output, self.activations[2].emit(emitter, cell)), cell)

    def _gru(self, emitter: Emitter, projected: ir.Value, hidden: ir.Value | None) -> ir.Value:
        share = [self._gate(emitter, projected, gate) for gate in range(3)]
        if self.recurrence_bias is None:
            update, candidate = self._reset_before_product(emitter, share, hidden)
        else:
            update, candidate = self._reset_after_product(emitter, share, hidden)
        result = emitter.emit("Mul", emitter.emit("Sub", emitter.number(1), update), candidate)
        return result if hidden is None else emitter.emit("Add", result, emitter.emit("Mul", update, hidden))

    def _reset_before_product(
        self, emitter: Emitter, share: list[ir.Value], hidden: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """Return z and n where the reset gate is applied in front of the product, which so is one of its own."""
        if hidden is None:
            return self._activate(emitter, 0, share[0]), self._activate(emitter, 1, share[2])
        product = _product(emitter, hidden, self.recurrence[0])
        update = self._activate(emitter, 0, _sum(emitter, share[0], self._gate(emitter, product, 0)))
        reset = self._activate(emitter, 0, _sum(emitter, share[1], self._gate(emitter, product, 1)))
        product = _product(emitter, emitter.emit("Mul", reset, hidden), self.recurrence[1])
        return update, self._activate(emitter, 1, _sum(emitter, share[2], product))

    def _reset_after_product(
        self, emitter: Emitter, share: list[ir.Value], hidden: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """Return z and n where the reset gate is applied to the product."""
        product = _product(emitter, hidden, self.recurrence[0])
        gates = [None if product is None else self._gate(emitter, product, gate) for gate in range(3)]
        update = self._activate(emitter, 0, _sum(emitter, share[0], gates[0]))
        reset = self._activate(emitter, 0, _sum(emitter, share[1], gates[1]))
        assert self.recurrence_bias is not None  # the caller has checked
        recurrent = _sum(emitter, self.recurrence_bias, gates[2])
        return update, self._activate(emitter, 1, _sum(emitter, share[2], emitter.emit("Mul", reset, recurrent)))

    def _gate(self, emitter: Emitter, gates: ir.Value | None, number: int) -> ir.Value:
        return emitter.slice(gates, (2, number * self.hidden_size, (number + 1) * self.hidden_size))

    def _peep(self, emitter: Emitter, gate: ir.Value, number: int, cell: ir.Value | None) -> ir.Value:
        if not self.peepholes or cell is None:
            return gate
        return emitter.emit("Add", gate, emitter.emit("Mul", cell, self.peepholes[number]))

    def _activate(self, emitter: Emitter, number: int, value: ir.Value) -> ir.Value:
        if self.clip is not None:
            value = emitter.emit("Clip", value, emitter.number(-self.clip), emitter.number(self.clip))
        return self.activations[number].emit(emitter, value)


def _product(emitter: Emitter, state: ir.Value | None, weights: ir.Value) -> ir.Value | None:
    """Multiply a state by a matrix; a constant state gives a constant."""
    if state is None:
        return None
    left, right = constant(state), constant(weights)
    if left is not None and right is not None:
        return emitter.constant(left @ right)
    return emitter.emit("MatMul", state, weights)


def _sum(emitter: Emitter, value: ir.Value, added: ir.Value | None) -> ir.Value:
    return value if added is None else emitter.emit("Add", value, added)
