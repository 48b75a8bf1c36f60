"""onnx's own node tests as models that can be partitioned.

A node test is one operator with the numbers that go in and come out. Here its activations stay inputs, everything else
becomes a constant, and the model takes samples:

    as it is    the operator has a batch axis of its own (Conv: the first, LSTM: the second), which is put in front
    prepended   it has none: it gets one, and axes, pads, shapes and equations are changed accordingly

Operators that are free to run on either side get a product with weights in front, so that they can follow weights.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as node_tests
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase

from heinfer.errors import PlanError
from heinfer.plan.execution import open_session
from partitioner.catalogue import REWRITTEN
from partitioner.classification import LACKING, RULES
from partitioner.movements import lower_movement, lower_resize, lower_where
from partitioner.pooling import lower_cumulative_sum

Array = np.ndarray[Any, Any]

#: What is multiplied in front of an operator; powers of two, so that inputs divided by them are exact.
_FRONT_WEIGHTS = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
#: Lowerings of operators whose meaning does not depend on the element type: their integers may be floats.
_OF_ANY_TYPE = (lower_cumulative_sum, lower_movement, lower_resize, lower_where)
#: Operators whose operands broadcast against one another.
_ELEMENTWISE = ("Add", "Div", "Mean", "Mul", "Sub", "Sum", "Where")
#: Some tests have results of few digits.
_OWN_TOLERANCE = 1e-5
#: The newest opset whose DequantizeLinear onnxruntime has; the operator's attributes have not changed since.
_DEQUANTIZE_OPSET = 25
#: Operators that become free ones: Split becomes Slices, Upsample of opset 9 a Resize.
_OTHER_FREE = ("Split", "Upsample")
_RECURRENT = ("GRU", "LSTM", "RNN")


class NotSampledError(Exception):
    """A node test can't be given a batch axis, or it is about something else than float32 tensors."""


@dataclass
class Operator:
    """The operator of a node test.

    Attributes:
        name: its type.
        attributes: by name, strings decoded.
        inputs: as the test has them; None for one that is left out.
        activations: positions of the inputs that stay inputs.
        outputs: whether each output is there.
    """

    name: str
    attributes: dict[str, Any]
    inputs: list[Array | None]
    activations: tuple[int, ...]
    outputs: tuple[bool, ...]

    @property
    def rank(self) -> int:
        """Axes of the first activation, without the batch."""
        return self.activation(0).ndim

    def activation(self, number: int) -> Array:
        """Return an activation of the node test."""
        return self.input(self.activations[number])

    def input(self, position: int) -> Array:
        """Return an input that is there."""
        array = self.inputs[position] if position < len(self.inputs) else None
        assert array is not None
        return array

    def has_input(self, position: int) -> bool:
        """Whether an input is there."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def set_input(self, position: int, array: Array) -> None:
        """Set an input, whether it was there or not."""
        self.inputs += [None] * (position + 1 - len(self.inputs))
        self.inputs[position] = array


@dataclass(frozen=True)
class Layout:
    """Where the batch is in the node test: the axis of every activation and output; None if it is prepended."""

    activations: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True)
class SampledModel:
    """A node test as a model that takes samples.

    Attributes:
        operator: type of the operator.
        model: the model, at a batch of 1.
        feeds: samples of every input; those of the node test itself first, then as many others twice.
        expected: results of every output for these.
        free: whether the operator has no weights, so that some are in front of it.
    """

    operator: str
    model: onnx.ModelProto
    feeds: Mapping[str, Array]
    expected: Mapping[str, Array]
    free: bool


@dataclass(frozen=True)
class NodeCase:
    """One node test and the positions of the inputs that are activations."""

    test: TestCase
    activations: tuple[int, ...]

    @property
    def name(self) -> str:
        """The test's name in onnx, without its prefix."""
        return str(self.test.name).removeprefix("test_")

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.activations)])

    def sampled(self) -> SampledModel:
        """Return the model with its samples.

        Raises:
            NotSampledError: it can't be given a batch axis.
        """
        operator = _operator(self.test, self.activations)
        layout = _LAYOUTS.get(operator.name, _prepended)(operator)
        given = [operator.activation(number) for number in range(len(self.activations))]
        sets = [given, [_reversed(x) for x in given], [_rolled(x) for x in given]]
        results = [self._evaluate(xs) for xs in sets]
        for expected, found in zip(self.test.data_sets[0][1], results[0], strict=True):
            if not np.allclose(found, expected, self.test.rtol, _OWN_TOLERANCE):
                raise NotSampledError("onnxruntime does not give what onnx expects")
        if operator.name == "DequantizeLinear":
            return _dequantised(operator, self.test, results[0][0])
        rank = _broadcast_rank(operator)
        if layout.activations[0] is None:
            sets = [[x.reshape((1,) * (rank - x.ndim) + x.shape) for x in xs] for xs in sets]
            _PREPEND.get(operator.name, _unchanged)(operator)
        samples = [
            _join([_as_float(operator, xs[n]) for xs in sets], axis) for n, axis in enumerate(layout.activations)
        ]
        outputs = [_join([_as_float(operator, ys[n]) for ys in results], axis) for n, axis in enumerate(layout.outputs)]
        return _model(operator, self.test, layout, samples, outputs)

    def _evaluate(self, activations: Sequence[Array]) -> list[Array]:
        """Run the node test itself on other activations, under onnxruntime or, where that can't, onnx's reference."""
        model = self.test.model
        names = [value.name for value in model.graph.input]
        feeds = dict(zip(names, self.test.data_sets[0][0], strict=True))
        present = [name for name in model.graph.node[0].input if name]
        by_position = {p: name for p, name in enumerate(model.graph.node[0].input) if name in present}
        feeds.update({by_position[p]: x for p, x in zip(self.activations, activations, strict=True)})
        feeds = {n: numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x for n, x in feeds.items()}
        try:
            results = open_session(model.SerializeToString()).run(None, feeds)
        except (PlanError, RuntimeError, ValueError):
            results = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
        return [np.asarray(result) for result in results]


def node_cases() -> list[NodeCase]:
    """Return the node tests of all operators that the server has, lacks, or that are rewritten, one by one."""
    return [
        NodeCase(test, activations)
        for test in _collect(frozenset((*RULES, *LACKING, *REWRITTEN, *_OTHER_FREE)))
        for activations in _choices(test)
    ]


@cache
def _collect(operators: Collection[str]) -> list[TestCase]:
    """Import onnx's modules of these operators alone; the others take long."""
    wanted = {name.lower() for name in operators}
    for module in pkgutil.iter_modules(node_tests.__path__):
        if module.name.replace("_", "") in wanted:
            importlib.import_module(f"{node_tests.__name__}.{module.name}")
    # A function's expanded form is a model of several other operators.
    return [
        test
        for test in node_tests._NodeTestCases
        if len(test.model.graph.node) == 1 and test.model.graph.node[0].op_type in operators
    ]


def _choices(test: TestCase) -> Iterator[tuple[int, ...]]:
    """Return which inputs may be activations, the others being constants."""
    node = test.model.graph.node[0]
    count = len(node.input)
    match node.op_type:
        case "Add" | "Concat" | "Mean" | "Sub" | "Sum":
            yield tuple(range(count))
            if count > 1:
                yield from ((0,), (count - 1,))
        case "MatMul" | "MatMulInteger" | "Mul":
            yield from ((0,), (1,))
        case "Einsum":
            yield from ((position,) for position in range(count))
        case "Gemm":
            shape = np.shape(test.data_sets[0][0][2]) if count > 2 else ()
            for side in (0, 1):  # C too, if it has a value for every sample
                yield (side, 2) if len(shape) > side and shape[side] > 1 else (side,)
        case "QLinearMatMul":
            yield from ((0,), (3,))
        case "Where":
            yield from ((1, 2), (1,), (2,))
        case _:
            yield (0,)


def _operator(test: TestCase, activations: tuple[int, ...]) -> Operator:
    node = test.model.graph.node[0]
    given = iter(test.data_sets[0][0])
    inputs = [next(given) if name else None for name in node.input]
    if any(isinstance(x, list) for x in inputs):
        raise NotSampledError("sequences")
    arrays = [numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x for x in inputs]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    decoded = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    outputs = tuple(bool(name) for name in node.output)
    return Operator(node.op_type, decoded, [None if x is None else np.asarray(x) for x in arrays], activations, outputs)


# --- samples -------------------------------------------------------------------------------------------------------


def _reversed(x: Array) -> Array:
    return x.ravel()[::-1].reshape(x.shape).copy()


def _rolled(x: Array) -> Array:
    return np.roll(x.ravel(), 1).reshape(x.shape)


def _join(arrays: Sequence[Array], axis: int | None) -> Array:
    """Return samples: every array is one, or has them along an axis."""
    if axis is None:
        return np.stack(arrays)
    return np.concatenate([np.moveaxis(array, axis, 0) for array in arrays])


def _as_float(operator: Operator, array: Array) -> Array:
    """Return float32 for other floats, and for the integers of an operator that only moves or sums them."""
    rule = RULES.get(operator.name)
    any_type = rule is not None and rule.lower in _OF_ANY_TYPE
    return array.astype(np.float32) if any_type or array.dtype.kind not in "biu" else array


# --- models --------------------------------------------------------------------------------------------------------


@dataclass
class _Graph:
    """A model under construction."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def constant(self, array: Array) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        name = f"node_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(operator, inputs, outputs, name=name, **attributes))

    def move(self, value: str, source: int, target: int, rank: int) -> str:
        """Move an axis; return the name of the result."""
        if source == target:
            return value
        order = list(range(rank))
        order.insert(target, order.pop(source))
        self.add("Transpose", [value], [f"{value}.turned"], perm=order)
        return f"{value}.turned"


def _model(
    operator: Operator, test: TestCase, layout: Layout, samples: Sequence[Array], expected: Sequence[Array]
) -> SampledModel:
    """Build the model: inputs, weights in front where the operator is free, the operator, outputs."""
    graph, names, feeds = _Graph(), {}, {}
    for position, axis, x in zip(operator.activations, layout.activations, samples, strict=True):
        value = name = f"x{position}"
        feeds[name] = x
        if _needs_front(operator):
            value, feeds[name] = _put_weights_in_front(graph, name, x)
        dtype = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
        graph.inputs.append(onnx.helper.make_tensor_value_info(name, dtype, [1, *feeds[name].shape[1:]]))
        names[position] = value if axis is None else graph.move(value, 0, axis, x.ndim)
    operands = [
        names[p] if p in names else "" if array is None else graph.constant(_as_constant(operator, array))
        for p, array in enumerate(operator.inputs)
    ]
    made = [f"y{n}" if there else "" for n, there in enumerate(operator.outputs)]
    graph.add(operator.name, operands, made, **operator.attributes)
    present = [name for name in made if name]
    results = [
        name if axis is None else graph.move(name, axis, 0, y.ndim)
        for name, axis, y in zip(present, layout.outputs, expected, strict=True)
    ]
    return _finish(operator, test, graph, feeds, dict(zip(results, expected, strict=True)))


def _put_weights_in_front(graph: _Graph, name: str, x: Array) -> tuple[str, Array]:
    """Multiply an input with weights, so that x comes out; return the name of the product and the input's samples."""
    if x.dtype != np.float32:
        raise NotSampledError(f"{x.dtype} is never encrypted")
    weights = np.random.default_rng(0).choice(np.asarray(_FRONT_WEIGHTS, np.float32), x.shape[1:] or 1)
    weights = weights.reshape(x.shape[1:])
    samples = x / weights
    if x.ndim == 1:  # a product with one number would hold no weights
        samples = samples[:, None]
    graph.add("MatMul" if x.ndim == 1 else "Mul", [name, graph.constant(weights[None])], [f"{name}.weighted"])
    return f"{name}.weighted", samples


def _finish(
    operator: Operator,
    test: TestCase,
    graph: _Graph,
    feeds: Mapping[str, Array],
    expected: Mapping[str, Array],
) -> SampledModel:
    outputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(y.dtype), [1, *y.shape[1:]])
        for name, y in expected.items()
    ]
    opset = test.model.opset_import[0].version
    if operator.name == "DequantizeLinear":
        opset = min(opset, _DEQUANTIZE_OPSET)
    built = onnx.helper.make_graph(graph.nodes, "case", graph.inputs, outputs, graph.constants)
    model = onnx.helper.make_model(
        built, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=test.model.ir_version
    )
    return SampledModel(operator.name, model, feeds, expected, _needs_front(operator))


def _needs_front(operator: Operator) -> bool:
    """Whether an operator without weights of its own is under test."""
    if operator.name in ("Mul", "Div"):
        return operator.input(1 - operator.activations[0]).size == 1
    if operator.name == "Einsum":
        return len(operator.inputs) == 1
    return operator.name in (*_OTHER_FREE, *(name for name, rule in RULES.items() if not rule.weighted))


def _as_constant(operator: Operator, array: Array) -> Array:
    """Return a constant operand: floats as the activations are, and the other branch of Where too."""
    branch = operator.name == "Where" and array.dtype != np.bool_
    follows = array.dtype.kind not in "biu" and _as_float(operator, operator.activation(0)).dtype == np.float32
    return array.astype(np.float32) if branch or follows else array


def _dequantised(operator: Operator, test: TestCase, expected: Array) -> SampledModel:
    """Multiply samples with the dequantised constant."""
    graph = _Graph()
    samples = np.random.default_rng(0).normal(size=(3, *expected.shape)).astype(np.float32)
    graph.inputs.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, *expected.shape]))
    names = []
    for number, tensor in enumerate(test.data_sets[0][0]):
        proto = onnx.TensorProto()
        proto.CopyFrom(tensor if isinstance(tensor, onnx.TensorProto) else numpy_helper.from_array(np.asarray(tensor)))
        proto.name = f"quantised_{number}"
        graph.constants.append(proto)
        names.append(proto.name)
    graph.add("DequantizeLinear", names, ["dequantised"], **operator.attributes)
    graph.add("Cast", ["dequantised"], ["weights"], to=onnx.TensorProto.FLOAT)
    graph.add("Mul", ["x", "weights"], ["y0"])
    return _finish(operator, test, graph, {"x": samples}, {"y0": samples * expected.astype(np.float32)})


# --- layouts: where the batch is -----------------------------------------------------------------------------------


def _prepended(operator: Operator) -> Layout:
    return Layout((None,) * len(operator.activations), (None,) * sum(operator.outputs))


def _first_axis(operator: Operator) -> Layout:
    return Layout((0,) * len(operator.activations), (0,) * sum(operator.outputs))


def _gemm_layout(operator: Operator) -> Layout:
    """The batch is rows of A and of the result, or columns of B and of the result."""
    side = operator.activations[0]
    transposed = operator.attributes.get("transA" if side == 0 else "transB", 0)
    return Layout((int(transposed != side), *[side] * (len(operator.activations) - 1)), (side,))


def _recurrent_layout(operator: Operator) -> Layout:
    """The batch is the second axis without `layout`; what holds a value for every sample is cut to one."""
    if operator.attributes.get("layout", 0):
        return Layout((0,), (0,) * sum(operator.outputs))
    if operator.has_input(4):
        operator.set_input(4, operator.input(4)[:1])
    for position in (5, 6):
        if operator.has_input(position):
            operator.set_input(position, operator.input(position)[:, :1])
    axes = [2 if number == 0 else 1 for number, there in enumerate(operator.outputs) if there]
    return Layout((1,), tuple(axes))


_LAYOUTS: Mapping[str, Callable[[Operator], Layout]] = {
    **dict.fromkeys(
        (
            "AveragePool", "BatchNormalization", "CausalConvWithState", "Conv", "ConvInteger", "ConvTranspose",
            "DeformConv", "DepthToSpace", "Flatten", "GlobalAveragePool", "QLinearConv", "Resize", "SpaceToDepth",
            "Upsample",
        ),
        _first_axis,
    ),
    "Gemm": _gemm_layout,
    **dict.fromkeys(_RECURRENT, _recurrent_layout),
}  # fmt: skip


# --- a batch axis in front of the operator's own --------------------------------------------------------------------


def _unchanged(operator: Operator) -> None:
    pass


def _broadcast_rank(operator: Operator) -> int:
    """Return how many axes a sample needs so that the batch stays in front of all that it broadcasts against; or 0."""
    if operator.name == "Expand":
        return len(operator.input(1))
    if operator.name not in _ELEMENTWISE:
        return 0
    return max(array.ndim for array in operator.inputs if array is not None)


def _matmul(operator: Operator) -> None:
    """Nothing changes but for vectors, which the batch would make matrices."""
    side = operator.activations[0]
    other = operator.input(1 - side)
    if operator.rank == 1 and (side == 1 or other.ndim > 2):
        raise NotSampledError("the batch of a vector is none of the axes that MatMul broadcasts")


def _shifted(axes: Array | Sequence[int]) -> Array:
    """Count axes from the batch; those from the end stay."""
    array = np.asarray(axes)
    return np.where(array >= 0, array + 1, array).astype(array.dtype)


def _with_axis(operator: Operator) -> None:
    """Shift the attribute axis (Gather, Split), whose default is 0."""
    operator.attributes["axis"] = int(_shifted([operator.attributes.get("axis", 0)])[0])


def _concat(operator: Operator) -> None:
    """Shift the axis; constants get one of size 1 for the batch."""
    _with_axis(operator)
    constants = [p for p in range(len(operator.inputs)) if p not in operator.activations]
    for position in constants:
        operator.set_input(position, operator.input(position)[None])


def _with_axes_input(position: int) -> Callable[[Operator], None]:
    """Shift axes that are an input (CumSum, Squeeze, Unsqueeze)."""

    def change(operator: Operator) -> None:
        operator.set_input(position, _shifted(operator.input(position)))

    return change


def _reduction(operator: Operator) -> None:
    """Shift the axes; all of them, which is what no axes mean, are the sample's."""
    axes = operator.input(1) if operator.has_input(1) else np.empty(0, np.int64)
    if not axes.size and not operator.attributes.get("noop_with_empty_axes", 0):
        axes = np.arange(operator.rank)
    operator.set_input(1, _shifted(axes))


def _center_crop_pad(operator: Operator) -> None:
    operator.attributes["axes"] = _shifted(operator.attributes.get("axes", range(operator.rank))).tolist()


def _einsum(operator: Operator) -> None:
    """Put a letter in front of the activation's and the result's letters, unless an ellipsis takes the axis."""
    terms, arrow, result = operator.attributes["equation"].replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow:
        result = "".join(sorted(c for c in set(terms) - {","} if terms.count(c) == 1))
    position = operator.activations[0]
    if "..." not in letters[position]:
        letters[position], result = f"Z{letters[position]}", f"Z{result}"
    operator.attributes["equation"] = f"{','.join(letters)}->{result}"


def _target_shape(operator: Operator) -> None:
    """Put a batch of 1 in front of a target shape (Expand, Reshape) or of repeats (Tile)."""
    target = operator.input(1)
    operator.set_input(1, np.concatenate([np.ones(1, target.dtype), target]))


def _pad(operator: Operator) -> None:
    pads = operator.input(1)
    if operator.has_input(3):
        operator.set_input(3, _shifted(operator.input(3)))
        return
    before, after = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    nothing = np.zeros(1, pads.dtype)
    operator.set_input(1, np.concatenate([nothing, before, nothing, after]))


def _slice(operator: Operator) -> None:
    starts = operator.input(1)
    axes = operator.input(3) if operator.has_input(3) else np.arange(len(starts))
    operator.set_input(3, _shifted(axes))


def _transpose(operator: Operator) -> None:
    order = operator.attributes.get("perm", list(range(operator.rank))[::-1])
    operator.attributes["perm"] = [0, *(axis + 1 for axis in order)]


_PREPEND: Mapping[str, Callable[[Operator], None]] = {
    "CenterCropPad": _center_crop_pad,
    "Concat": _concat,
    "CumSum": _with_axes_input(1),
    "Einsum": _einsum,
    "Expand": _target_shape,
    "Gather": _with_axis,
    "MatMul": _matmul,
    "Pad": _pad,
    "ReduceMean": _reduction,
    "ReduceSum": _reduction,
    "Reshape": _target_shape,
    "Slice": _slice,
    "Split": _with_axis,
    "Squeeze": _with_axes_input(1),
    "Tile": _target_shape,
    "Transpose": _transpose,
    "Unsqueeze": _with_axes_input(1),
}
