"""Activation functions of recurrent layers, as ONNX operators.

    Affine(x) = alpha x + beta        ScaledTanh(x) = alpha Tanh(beta x)        the others are operators of that name

Formulas and defaults are those of the ONNX specification of LSTM, GRU and RNN; names are compared without regard to
case, as onnxruntime does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from partitioner.rewriting.emitter import Emitter

#: Defaults of alpha and beta for the functions that take them; None where the specification has no default, or
#: onnxruntime another one (it takes 0 for the alpha of ThresholdedRelu, ONNX 1).
_PARAMETERS: dict[str, tuple[float | None, ...]] = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "Softsign": (),
    "Softplus": (),
    "LeakyRelu": (0.01,),
    "ThresholdedRelu": (None,),
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
    "Affine": (None, None),
    "ScaledTanh": (None, None),
}
_SPELLING = {name.lower(): name for name in _PARAMETERS}


@dataclass(frozen=True, slots=True)
class Activation:
    """A function with its parameters.

    Attributes:
        name: as the ONNX specification spells it.
        parameters: alpha, or alpha and beta, or neither.
    """

    name: str
    parameters: tuple[float, ...]

    def emit(self, emitter: Emitter, value: ir.Value) -> ir.Value:
        """Append the function of a value."""
        if self.name not in ("Affine", "ScaledTanh"):
            named = dict(zip(("alpha", "beta"), self.parameters, strict=False))
            return emitter.emit(self.name, value, **named)
        alpha, beta = map(emitter.number, self.parameters)
        if self.name == "Affine":
            return emitter.emit("Add", emitter.emit("Mul", value, alpha), beta)
        return emitter.emit("Mul", emitter.emit("Tanh", emitter.emit("Mul", value, beta)), alpha)


def read_activations(names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]) -> list[Activation] | str:
    """Return the functions of a layer, or why there are none.

    Args:
        names: of the functions.
        alphas: consumed in order by those functions that take an alpha.
        betas: consumed in order by those functions that take a beta.
    """
    given = (iter(alphas), iter(betas))
    found = []
    for name in names:
        spelling = _SPELLING.get(name.lower())
        if spelling is None:
            return f"{name} is no activation function of the ONNX specification"
        parameters = _consume(given, _PARAMETERS[spelling])
        if parameters is None:
            return f"{name} lacks activation_alpha or activation_beta, which have no agreed default"
        found.append(Activation(spelling, parameters))
    return found


def _consume(given: Sequence[Iterator[float]], defaults: Sequence[float | None]) -> tuple[float, ...] | None:
    values = [next(source, default) for source, default in zip(given, defaults, strict=False)]
    known = [value for value in values if value is not None]
    return tuple(known) if len(known) == len(values) else None
