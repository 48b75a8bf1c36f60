"""What a step of the node does, operator by operator: functions of single values, linear maps, or something else.

    node_1.onnx:  conv1 --Relu--> a --AveragePool--> p      a is a function of conv1, p is linear in a
    node_2.onnx:  x --Sigmoid--> s --Mul(x, s)--> y         y is a function of x, and so is s

requires  the sub-model of a `NodeStep`
ensures   for every tensor that it makes: a `Function` of another tensor, element by element, as ONNX nodes that
          onnxruntime can run on any grid of values; or an operator that is linear; or a reason why it is neither
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from math import prod
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from heinfer.operators.polynomials import MAX_DEGREE
from heinfer.plan.execution import open_session

Floats = NDArray[np.float64]
#: Functions of single values.
UNARY: Final = frozenset(
    [
        "Abs",
        "Atan",
        "Celu",
        "Clip",
        "Cos",
        "Elu",
        "Erf",
        "Exp",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Mish",
        "PRelu",
        "Relu",
        "Selu",
        "Sigmoid",
        "Sin",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Swish",
        "Tanh",
        "ThresholdedRelu",
    ]
)
#: Element by element, functions of a value where all operands are functions of the same one or constants.
ELEMENTWISE: Final = frozenset(["Add", "Div", "Identity", "Max", "Mean", "Min", "Mul", "Neg", "Pow", "Sub", "Sum"])
#: Linear, whatever their operands are.
LINEAR: Final = frozenset(
    [
        "AveragePool",
        "Concat",
        "DepthToSpace",
        "Flatten",
        "Gather",
        "GlobalAveragePool",
        "Identity",
        "Neg",
        "Pad",
        "ReduceMean",
        "ReduceSum",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    ]
)
#: Sums over windows or axes, divided by their number.
POOLING: Final = frozenset(("AveragePool", "GlobalAveragePool", "ReduceMean"))
_ADDITIVE: Final = frozenset(("Add", "Sub", "Sum"))


@dataclass(frozen=True, slots=True)
class Function:
    """A tensor that is a function of another one, element by element.

    Attributes:
        source: the other tensor.
        nodes: that compute it, in order.
        constants: by name, that they read.
        opsets: of the sub-model.
    """

    source: str
    nodes: tuple[onnx.NodeProto, ...]
    constants: Mapping[str, NDArray[Any]]
    opsets: tuple[onnx.OperatorSetIdProto, ...]

    @property
    def label(self) -> str:
        """Its operators, for people."""
        return " ".join(node.op_type for node in self.nodes)

    def evaluate(self, grid: Floats, shape: Sequence[int]) -> Floats:
        """Evaluate it on values for every element.

        Args:
            grid: shape (points, elements) or (points, 1) for the same at every element.
            shape: of the tensor, batch aside.

        Returns:
            Shape (points, elements), in float64, computed in float32.
        """
        target = self.nodes[-1].output[0]
        values = np.broadcast_to(grid, (len(grid), prod(shape))).reshape(len(grid), *shape).astype(np.float32)
        graph = onnx.helper.make_graph(
            list(self.nodes),
            "function",
            [onnx.helper.make_tensor_value_info(self.source, onnx.TensorProto.FLOAT, ["points", *shape])],
            [onnx.helper.make_tensor_value_info(target, onnx.TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        model = onnx.helper.make_model(graph, opset_imports=list(self.opsets), ir_version=10)
        result = open_session(model.SerializeToString()).run([target], {self.source: values})[0]
        return np.asarray(result, np.float64).reshape(len(grid), prod(shape))

    def polynomial(self, shape: Sequence[int]) -> Floats | None:
        """Return its coefficients where it is a polynomial of degree 7 at most, as in x * x; None otherwise.

        Args:
            shape: of the tensor, batch aside; constants may differ along it.

        Returns:
            Shape (elements, degree + 1), from the constant up.
        """
        known = {self.source: [np.zeros(()), np.ones(())]}
        for name, array in self.constants.items():
            own = () if array.size == 1 else array.shape[max(0, array.ndim - len(shape)) :]
            if array.dtype.kind in "fiu" and prod(own) == array.size:
                known[name] = [np.asarray(array, np.float64).reshape(own)]
        for node in self.nodes:
            operands = [known.get(name) for name in node.input]
            if any(operand is None for operand in operands):
                return None
            result = _combine(node.op_type, [x for x in operands if x is not None])
            if result is None or len(result) > MAX_DEGREE + 1:
                return None
            known[node.output[0]] = result
        powers = known[self.nodes[-1].output[0]]
        return np.stack([np.broadcast_to(c, shape).reshape(prod(shape)) for c in powers], axis=1)


#: Coefficients from the constant up, each one number or an array along the tensor's shape.
_Powers = list[Floats]


def _combine(kind: str, operands: list[_Powers]) -> _Powers | None:
    """Apply an operator to polynomials."""
    match kind:
        case "Identity":
            return operands[0]
        case "Neg":
            return [np.asarray(-c) for c in operands[0]]
        case "Add" | "Sum":
            return [np.asarray(sum(terms)) for terms in zip_longest(*operands, fillvalue=np.zeros(()))]
        case "Sub":
            return [np.asarray(a - b) for a, b in zip_longest(*operands, fillvalue=np.zeros(()))]
        case "Mul":
            return _multiply(operands[0], operands[1])
        case "Div" if len(operands[1]) == 1 and np.all(operands[1][0] != 0):
            return [np.asarray(c / operands[1][0]) for c in operands[0]]
        case "Pow" if len(operands[1]) == 1 and operands[1][0].size == 1:
            exponent = float(operands[1][0].reshape(()))
            if exponent not in range(1, MAX_DEGREE + 1):
                return None
            return reduce(_multiply, [operands[0]] * int(exponent))
        case _:
            return None


def _multiply(a: _Powers, b: _Powers) -> _Powers:
    product = [np.zeros(())] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] = product[i + j] + x * y
    return product


@dataclass(frozen=True, slots=True)
class LinearNode:
    """An operator that is linear in the tensors that it reads."""

    node: onnx.NodeProto
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """An operator that can't be in a block, and why."""

    node: onnx.NodeProto
    reason: str


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A step of the node, taken apart.

    Attributes:
        parts: what makes each tensor, in order.
        constants: of the sub-model.
        opsets: likewise.
        ir_version: likewise.
    """

    parts: Mapping[str, Function | LinearNode | Opaque]
    constants: Mapping[str, NDArray[Any]]
    opsets: tuple[onnx.OperatorSetIdProto, ...]

    @property
    def opaque(self) -> list[Opaque]:
        """What can't be in a block."""
        return [part for part in self.parts.values() if isinstance(part, Opaque)]

    def run_linear(self, part: LinearNode, operands: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Run a linear operator on arrays, shape (batch, *shape)."""
        graph = onnx.helper.make_graph(
            [part.node],
            "linear",
            [
                onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch", *operands[n].shape[1:]])
                for n in part.sources
            ],
            [onnx.helper.make_tensor_value_info(part.node.output[0], onnx.TensorProto.FLOAT, None)],
            [numpy_helper.from_array(a, n) for n, a in self.constants.items() if n in part.node.input],
        )
        model = onnx.helper.make_model(graph, opset_imports=list(self.opsets), ir_version=10)
        feeds = {name: operands[name].astype(np.float32) for name in part.sources}
        return np.asarray(open_session(model.SerializeToString()).run(None, feeds)[0])


def dissect(submodel: bytes) -> Anatomy:
    """Take a step's sub-model apart."""
    model = onnx.load_model_from_string(submodel)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    opsets = tuple(model.opset_import)
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim[1:]) for v in model.graph.input}
    parts: dict[str, Function | LinearNode | Opaque] = {}
    for node in model.graph.node:
        part = _part(node, parts, constants, opsets, shapes)
        for name in node.output:
            parts[name] = part
    return Anatomy(parts, constants, opsets)


def _part(
    node: onnx.NodeProto,
    parts: Mapping[str, Function | LinearNode | Opaque],
    constants: Mapping[str, NDArray[Any]],
    opsets: tuple[onnx.OperatorSetIdProto, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> Function | LinearNode | Opaque:
    read = [name for name in node.input if name and name not in constants]
    bases = {_base(name, parts) for name in read}
    if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or not read:
        return Opaque(node, "is no operator that a block can hold")
    if (node.op_type in UNARY and len(read) == 1) or (node.op_type in ELEMENTWISE and len(bases) == 1):
        source = bases.pop()
        held = {n: constants[n] for n in node.input if n in constants}
        nodes: dict[str, onnx.NodeProto] = {}
        for name in read:
            inner = parts.get(name)
            if isinstance(inner, Function):
                nodes.update({n.output[0]: n for n in inner.nodes})
                held.update(inner.constants)
        if all(_fits(a.shape, shapes.get(source)) for a in held.values()):
            return Function(source, (*nodes.values(), node), held, opsets)
    if node.op_type in LINEAR or node.op_type in _ADDITIVE:
        return LinearNode(node, tuple(dict.fromkeys(read)))
    if node.op_type in ("Mul", "Div") and len(read) == 1 and node.input[0] == read[0]:
        return LinearNode(node, tuple(read))
    if node.op_type in ("MaxPool", "GlobalMaxPool", "ReduceMax"):
        return Opaque(node, "takes the largest value, which no polynomial does: end the block in front of it")
    return Opaque(node, "is no function of single values, and not linear")


def _base(name: str, parts: Mapping[str, Function | LinearNode | Opaque]) -> str:
    part = parts.get(name)
    return part.source if isinstance(part, Function) else name


def _fits(constant: tuple[int, ...], shape: tuple[int, ...] | None) -> bool:
    """Whether a constant acts on elements without making more of them."""
    if prod(constant) == 1:
        return True
    return (
        shape is not None
        and len(constant) <= len(shape) + 1
        and all(c in (1, s) for c, s in zip(reversed(constant), reversed(shape), strict=False))
    )
