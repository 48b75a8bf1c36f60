"""A small ONNX graph that grows node by node, drawn by hypothesis and valid by construction.

`tests.coverage.random_operators` draws the nodes. A sketch knows the shape of every value, from onnx's inference, and
about how large it is, so that what follows a large or small weight can be brought back to about 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, shape_inference

Shape = tuple[int, ...]
T = TypeVar("T")
#: A batch size that no other axis has.
BATCH = 997
_IR_VERSION = 10
#: Inputs of operators that are sensitive to errors are brought into this range.
_NORMAL = (0.3, 3.0)


@dataclass(frozen=True)
class Value:
    """A tensor of the graph.

    Attributes:
        name: its name.
        full: shape with `BATCH` samples.
        magnitude: about how large its elements are.
        element: element type of onnx.
    """

    name: str
    full: Shape
    magnitude: float = 1.0
    element: int = TensorProto.FLOAT

    @property
    def leads(self) -> bool:
        """Whether the batch is the first axis."""
        return self.full[:1] == (BATCH,)

    @property
    def shape(self) -> Shape:
        """Shape per sample of a value that the batch leads."""
        assert self.leads
        return self.full[1:]

    @property
    def rank(self) -> int:
        """Axes, batch excluded."""
        return len(self.full) - 1


@dataclass
class Sketch:
    """A graph that grows.

    Attributes:
        draw: hypothesis' source of choices.
        opset: version of the operators.
        symbolic: whether the batch is symbolic; else it is 1.
        generator: of weights.
    """

    draw: st.DrawFn
    opset: int
    symbolic: bool
    generator: np.random.Generator
    inputs: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    results: list[Value] = field(default_factory=list)
    step: float = 0.0

    # -- choices ------------------------------------------------------------------------------------------------------

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from low to high, both included; high if low is larger."""
        return self.draw(st.integers(min(low, high), high))

    def boolean(self) -> bool:
        """Draw true or false."""
        return self.draw(st.booleans())

    def one_of(self, *options: T) -> T:
        """Draw one of several options."""
        return options[self.integer(0, len(options) - 1)]

    def some_of(self, options: Sequence[T], least: int = 1) -> list[T]:
        """Draw distinct options, in any order."""
        return self.draw(st.permutations(options))[: self.integer(least, len(options))] if options else []

    def rarely(self) -> bool:
        """Draw true once in eight."""
        return self.integer(0, 7) == 7

    # -- values -------------------------------------------------------------------------------------------------------

    def add_input(self, shape: Shape, element: int = TensorProto.FLOAT) -> Value:
        """Add an input of the model."""
        value = Value(f"x{len(self.inputs)}", (BATCH, *shape), element=element)
        self.inputs.append(value)
        if element == TensorProto.FLOAT:
            self.values.append(value)
        return value

    def node(
        self,
        operator: str,
        inputs: Sequence[Value | np.ndarray | None],
        magnitude: float | None = None,
        outputs: int = 1,
        output: int = 0,
        **attributes: Any,
    ) -> Value:
        """Append a node.

        Args:
            operator: its type.
            inputs: values, constants, or None for one that is left out.
            magnitude: of its results, about; None: that of the first input.
            outputs: how many it has.
            output: which is returned.
            attributes: those that are given.
        """
        names, types, data = [], {}, {}
        for operand in inputs:
            if operand is None:
                names.append("")
                continue
            names.append(operand.name if isinstance(operand, Value) else self.add_constant(operand))
            if isinstance(operand, Value):
                types[names[-1]] = helper.make_tensor_type_proto(operand.element, operand.full)
            else:
                data[names[-1]] = numpy_helper.from_array(operand, names[-1])
                types[names[-1]] = helper.make_tensor_type_proto(data[names[-1]].data_type, operand.shape)
        made = [f"v{len(self.nodes)}"] + [f"v{len(self.nodes)}_{i}" for i in range(1, outputs)]
        node = helper.make_node(operator, names, made, name=f"n{len(self.nodes)}", **attributes)
        schema = onnx.defs.get_schema(operator, self.opset, "")
        found = shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[helper.make_opsetid("", self.opset)]
        )[made[output]].tensor_type
        shape = tuple(dim.dim_value for dim in found.shape.dim)
        self.nodes.append(node)
        first = next((operand.magnitude for operand in inputs if isinstance(operand, Value)), 1.0)
        return Value(made[output], shape, first if magnitude is None else magnitude, found.elem_type)

    def add_constant(self, array: np.ndarray) -> str:
        """Add an initialiser; return its name."""
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def weights(self, *shape: int, fan_in: int = 1) -> tuple[np.ndarray, float]:
        """Draw weights: rows of zeros, very large and very small ones among them; return them and their magnitude."""
        size = self.one_of(1.0, 1.0, 1.0, 1e-3, 30.0)
        array = self.generator.normal(size=shape) * size / np.sqrt(max(1, fan_in))
        kind = self.integer(0, 6)
        if shape and kind == 6:
            array[self.integer(0, shape[0] - 1)] = 0
        if shape and kind == 5 and shape[-1] > 1:
            array[..., self.integer(0, shape[-1] - 1)] *= 1e-5
        if shape and kind == 4 and shape[0] > 1:
            array[self.integer(0, shape[0] - 1)] *= 1e3
            size *= 1e3
        return array.astype(np.float32), size

    def normal(self, value: Value) -> Value:
        """Bring a value to a magnitude of about 1, for operators that would magnify errors."""
        if _NORMAL[0] <= value.magnitude <= _NORMAL[1]:
            return value
        factor = np.array(1 / value.magnitude, np.float32)
        return self.node("Mul", [value, factor.reshape((1,) * self.integer(0, 1))], magnitude=1.0)

    # -- result -------------------------------------------------------------------------------------------------------

    def model(self) -> onnx.ModelProto:
        """Return the model; its outputs are the values that nothing reads, and `results`."""
        read = {name for node in self.nodes for name in node.input}
        unread = [value for value in self.values if value.name not in read and value not in self.inputs]
        outputs = list(dict.fromkeys([*self.results, *unread]))
        batch = "samples" if self.symbolic else 1
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info(v.name, v.element, [batch, *v.shape]) for v in self.inputs],
            [helper.make_tensor_value_info(v.name, v.element, [batch, *v.shape]) for v in outputs],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=_IR_VERSION)


@dataclass(frozen=True)
class Drawing:
    """How nodes of one operator are drawn.

    Attributes:
        draw: appends nodes that read a value; returns the result.
        least, most: axes per sample of values that it can read.
        weighted: whether it has weights.
        since: first opset that has it in the form that is drawn.
    """

    draw: Callable[[Sketch, Value], Value]
    least: int = 0
    most: int = 4
    weighted: bool = False
    since: int = 13

    def takes(self, sketch: Sketch, value: Value) -> bool:
        """Whether a value can be read."""
        return self.least <= value.rank <= self.most and sketch.opset >= self.since


def integers(*values: int) -> np.ndarray:
    """Return an int64 constant."""
    return np.array(values, np.int64)


def any_axis(sketch: Sketch, value: Value, least: int = 1) -> int:
    """Draw an axis behind the batch, counted from either end."""
    axis = sketch.integer(least, value.rank)
    return axis - value.rank - 1 if sketch.boolean() else axis
