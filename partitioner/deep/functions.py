"""What a step of the node does, operator by operator: functions of single values, linear maps, or something else.

    node_1.onnx:  conv1 --Relu--> a --AveragePool--> p      a is a function of conv1, p is linear in a
    node_2.onnx:  x --Sigmoid--> s --Mul(x, s)--> y         y is a function of x, and so is s

requires  the sub-model of a `NodeStep`
ensures   for every tensor that it makes: a `Function` of another tensor, element by element, as ONNX nodes that
          onnxruntime can run on any grid of values; or an operator that is linear; or a reason why it is neither

A polynomial is never fitted: it is taken as it is. One of a degree above 7 becomes several functions, one of the other:

    Pow(x, 8)        Pow(4), then Pow(2)                    Pow(x, 11)       refused: 11 is prime
    q = x**4, q * q  q is a function of x, q * q one of q   p = x**7, p * x  refused: no single value is on the way
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

    @property
    def degree(self) -> int | None:
        """Degree of the polynomial that its operators spell out, however large; None where one of them is no such."""
        degrees = dict.fromkeys(self.constants, 0) | {self.source: 1}
        for node in self.nodes:
            found = _degree(node, [degrees[name] for name in node.input if name], self.constants)
            if found is None:
                return None
            degrees[node.output[0]] = found
        return degrees[self.nodes[-1].output[0]]

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
        while len(powers) > 1 and not np.any(powers[-1]):  # as in x * x - x * x
            powers = powers[:-1]
        return np.stack([np.broadcast_to(c, shape).reshape(prod(shape)) for c in powers], axis=1)


def _degree(node: onnx.NodeProto, degrees: Sequence[int], constants: Mapping[str, NDArray[Any]]) -> int | None:
    """Return the degree of an operator's result, given those of its operands; None where it is no polynomial."""
    match node.op_type:
        case "Identity" | "Neg" | "Add" | "Sub" | "Sum" | "Mean":
            return max(degrees)
        case "Mul":
            return sum(degrees)
        case "Div" if degrees[1] == 0 and _usable_divisor(node, constants):
            return degrees[0]
        case "Pow":
            exponent = _exponent(node, constants)
            return None if exponent is None else degrees[0] * exponent
        case _:
            return None


def _usable_divisor(node: onnx.NodeProto, constants: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a divisor is nowhere 0, as far as it is known here."""
    return node.input[1] not in constants or bool(np.all(constants[node.input[1]] != 0))


def _exponent(node: onnx.NodeProto, constants: Mapping[str, NDArray[Any]]) -> int | None:
    """Return the exponent of Pow where it is one whole number, 0 or more; None otherwise."""
    found = constants.get(node.input[1])
    if found is None or found.size != 1 or found.dtype.kind not in "fiu":
        return None
    value = float(found.reshape(()))
    return int(value) if value >= 0 and value.is_integer() else None


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
        case "Mean":
            total = [np.asarray(sum(terms)) for terms in zip_longest(*operands, fillvalue=np.zeros(()))]
            return [np.asarray(c / len(operands)) for c in total]
        case "Sub":
            return [np.asarray(a - b) for a, b in zip_longest(*operands, fillvalue=np.zeros(()))]
        case "Mul":
            return _multiply(operands[0], operands[1])
        case "Div" if len(operands[1]) == 1 and np.all(operands[1][0] != 0):
            return [np.asarray(c / operands[1][0]) for c in operands[0]]
        case "Pow" if len(operands[1]) == 1 and operands[1][0].size == 1:
            exponent = float(operands[1][0].reshape(()))
            if exponent not in range(MAX_DEGREE + 1):
                return None
            return reduce(_multiply, [operands[0]] * int(exponent), [np.ones(())])
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
    nodes = [part for node in model.graph.node for part in _split_power(node, constants)]
    opsets = tuple(model.opset_import)
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim[1:]) for v in model.graph.input}
    parts: dict[str, Function | LinearNode | Opaque] = {}
    for node in nodes:
        part = _part(node, parts, constants, opsets, shapes)
        for name in node.output:
            parts[name] = part
    return Anatomy(parts, constants, opsets)


def _split_power(node: onnx.NodeProto, constants: dict[str, NDArray[Any]]) -> list[onnx.NodeProto]:
    """Return Pow as several where its exponent is above `MAX_DEGREE` and has factors below; constants take them."""
    exponent = _exponent(node, constants) if node.op_type == "Pow" and node.domain in ("", "ai.onnx") else None
    factors = _factors(exponent) if exponent is not None and exponent > MAX_DEGREE else []
    if not factors:
        return [node]
    made: list[onnx.NodeProto] = []
    for number, factor in enumerate(factors):
        part = onnx.NodeProto()
        part.CopyFrom(node)
        name = f"{node.output[0]}/exponent_{number}"
        constants[name] = np.array(factor, constants[node.input[1]].dtype)
        part.input[1] = name
        if number:
            part.input[0] = made[-1].output[0]
        if number < len(factors) - 1:
            part.output[0] = f"{node.output[0]}/power_{number}"
        made.append(part)
    return made


def _factors(number: int) -> list[int]:
    """Return factors from 2 to `MAX_DEGREE`, as large as can be; none where there are no such."""
    found = []
    for factor in range(MAX_DEGREE, 1, -1):
        while number % factor == 0:
            found.append(factor)
            number //= factor
    return found if number == 1 else []


def _part(
    node: onnx.NodeProto,
    parts: Mapping[str, Function | LinearNode | Opaque],
    constants: Mapping[str, NDArray[Any]],
    opsets: tuple[onnx.OperatorSetIdProto, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> Function | LinearNode | Opaque:
    read = [name for name in node.input if name and name not in constants]
    roots = {_root(name, parts) for name in read}
    if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or not read:
        return Opaque(node, "is no operator that a block can hold")
    if len(roots) == 1 and (node.op_type in ELEMENTWISE or (node.op_type in UNARY and len(read) == 1)):
        base = roots.pop()
        functions = _functions(node, base, parts, constants, opsets)
        if all(_fits(a.shape, shapes.get(base)) for a in functions[0].constants.values()):
            for function in functions:
                if (function.degree or 0) <= MAX_DEGREE:
                    return function
            return Opaque(node, f"is a polynomial of degree {functions[0].degree}, and {MAX_DEGREE} is the most: write "
                          "it as powers of powers, as q = x**4, q * q, or end the block in front of it")  # fmt: skip
    if node.op_type in LINEAR or node.op_type in _ADDITIVE:
        return LinearNode(node, tuple(dict.fromkeys(read)))
    if node.op_type in ("Mul", "Div") and len(read) == 1 and node.input[0] == read[0]:
        return LinearNode(node, tuple(read))
    if node.op_type in ("MaxPool", "GlobalMaxPool", "ReduceMax"):
        return Opaque(node, "takes the largest value, which no polynomial does: end the block in front of it")
    if node.op_type in ("Mul", "Div"):
        return Opaque(node, "multiplies or divides two values that are no functions of one: end the block before it")
    return Opaque(node, "is no function of single values, and not linear")


def _functions(
    node: onnx.NodeProto,
    base: str,
    parts: Mapping[str, Function | LinearNode | Opaque],
    constants: Mapping[str, NDArray[Any]],
    opsets: tuple[onnx.OperatorSetIdProto, ...],
) -> list[Function]:
    """Return an operator as a function of its operands' root, then of each value on the way through which all go."""
    inner: dict[str, onnx.NodeProto] = {}
    for name in node.input:
        inner.update(_leading_to(name, parts))
    found = []
    for start in (base, *inner):
        nodes = _between(start, node, inner)
        read = {name for n in nodes for name in n.input}
        if start == base or base not in read:
            found.append(Function(start, nodes, {n: a for n, a in constants.items() if n in read}, opsets))
    return found


def _leading_to(name: str, parts: Mapping[str, Function | LinearNode | Opaque]) -> dict[str, onnx.NodeProto]:
    """Return the nodes that lead from a value's root to it, in order, by what they make."""
    part = parts.get(name)
    if not isinstance(part, Function):
        return {}
    return _leading_to(part.source, parts) | {n.output[0]: n for n in part.nodes}


def _between(start: str, node: onnx.NodeProto, inner: Mapping[str, onnx.NodeProto]) -> tuple[onnx.NodeProto, ...]:
    """Return an operator and what leads to it from a value on, in order."""
    needed, waiting = set[str](), list(node.input)
    while waiting:
        name = waiting.pop()
        if name in inner and name != start and name not in needed:
            needed.add(name)
            waiting.extend(inner[name].input)
    return (*(n for name, n in inner.items() if name in needed), node)


def _root(name: str, parts: Mapping[str, Function | LinearNode | Opaque]) -> str:
    """Return what a value is a function of in the end."""
    while isinstance(part := parts.get(name), Function):
        name = part.source
    return name


def _fits(constant: tuple[int, ...], shape: tuple[int, ...] | None) -> bool:
    """Whether a constant acts on elements without making more of them."""
    if prod(constant) == 1:
        return True
    return (
        shape is not None
        and len(constant) <= len(shape) + 1
        and all(c in (1, s) for c, s in zip(reversed(constant), reversed(shape), strict=False))
    )
