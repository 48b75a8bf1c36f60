"""Element-by-element operators that amount to a polynomial are found to be one, with coefficients by element."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from heinfer.plan.execution import open_session
from partitioner.deep.functions import Function, dissect

SHAPE = (3, 2)
BY_CHANNEL = np.array([[2.0], [-1.0], [0.5]], np.float32)


def make_model(nodes: list[onnx.NodeProto], **constants: NDArray[np.float32]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "step",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", *SHAPE])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return model.SerializeToString()


def make_function(nodes: list[onnx.NodeProto], **constants: NDArray[np.float32]) -> Function:
    part = dissect(make_model(nodes, **constants)).parts["y"]
    assert isinstance(part, Function)
    return part


def square_and(*rest: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [helper.make_node("Mul", ["x", "x"], ["xx"]), *rest]


@pytest.mark.parametrize(
    ("function", "degree"),
    [
        (make_function(square_and(helper.make_node("Mul", ["xx", "c"], ["y"])), c=BY_CHANNEL), 2),
        (make_function(square_and(helper.make_node("Div", ["xx", "c"], ["y"])), c=BY_CHANNEL[None]), 2),
        (
            make_function(
                square_and(
                    helper.make_node("Sub", ["xx", "c"], ["a"]),
                    helper.make_node("Neg", ["a"], ["b"]),
                    helper.make_node("Mul", ["b", "x"], ["y"]),
                ),
                c=BY_CHANNEL,
            ),
            3,
        ),
        (make_function([helper.make_node("Pow", ["x", "n"], ["y"])], n=np.array([5.0], np.float32)), 5),
        (make_function([helper.make_node("Pow", ["x", "n"], ["y"])], n=np.array(0.0, np.float32)), 0),
        (make_function(square_and(helper.make_node("Mean", ["xx", "x", "c"], ["y"])), c=BY_CHANNEL), 2),
        (
            make_function(
                square_and(
                    helper.make_node("Mul", ["xx", "x"], ["a"]),
                    helper.make_node("Sub", ["a", "a"], ["b"]),
                    helper.make_node("Add", ["b", "xx"], ["y"]),
                )
            ),
            2,
        ),
    ],
    ids=["scaled", "divided", "cubic", "power", "power of nothing", "mean", "what cancels"],
)
def test_polynomial_equals_what_onnxruntime_computes(function: Function, degree: int) -> None:
    coefficients = function.polynomial(SHAPE)
    assert coefficients is not None
    assert coefficients.shape == (6, degree + 1)
    x = np.linspace(-2, 2, 9)[:, None]
    powers = x[:, :, None] ** np.arange(degree + 1)
    np.testing.assert_allclose(function.evaluate(x, SHAPE), (powers * coefficients).sum(axis=2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        make_function([helper.make_node("Relu", ["x"], ["y"])]),
        make_function(square_and(helper.make_node("Div", ["c", "xx"], ["y"])), c=BY_CHANNEL),
        make_function([helper.make_node("Pow", ["x", "n"], ["y"])], n=np.array([-1.0], np.float32)),
        make_function([helper.make_node("Pow", ["x", "n"], ["y"])], n=np.array([0.5], np.float32)),
    ],
    ids=["relu", "reciprocal", "power below nothing", "root"],
)
def test_what_is_no_polynomial_is_not_taken_for_one(function: Function) -> None:
    assert function.degree is None
    assert function.polynomial(SHAPE) is None


#: x**8 and others above degree 7 in several ways, the functions that they become, and their degrees.
HIGH = {
    "eighth power": ([helper.make_node("Pow", ["x", "eight"], ["y"])], [("x", 4), ("y/power_0", 2)]),
    "ninth power": ([helper.make_node("Pow", ["x", "nine"], ["y"])], [("x", 3), ("y/power_0", 3)]),
    "hundredth power": (
        [helper.make_node("Pow", ["x", "hundred"], ["y"])],
        [("x", 5), ("y/power_0", 5), ("y/power_1", 4)],
    ),
    "squares": (
        square_and(helper.make_node("Mul", ["xx", "xx"], ["x4"]), helper.make_node("Mul", ["x4", "x4"], ["y"])),
        [("x", 2), ("xx", 4)],
    ),
    "twelfth": (
        square_and(
            helper.make_node("Mul", ["xx", "xx"], ["x4"]),
            helper.make_node("Mul", ["x4", "x4"], ["x8"]),
            helper.make_node("Mul", ["x8", "x4"], ["y"]),
        ),
        [("x", 2), ("xx", 6)],
    ),
    "sixteenth, shifted": (
        square_and(
            helper.make_node("Add", ["xx", "half"], ["a"]),
            helper.make_node("Pow", ["a", "eight"], ["y"]),
        ),
        [("y/power_0", 2)],
    ),
}
EXPONENTS = {"eight": 8, "nine": 9, "hundred": 100, "half": 0.5}


@pytest.mark.parametrize("name", HIGH)
def test_polynomials_above_degree_7_are_split_exactly(name: str) -> None:
    """The functions that lead from x to y, one after the other, give what onnxruntime computes of the whole."""
    nodes, expected = HIGH[name]
    used = {n for node in nodes for n in node.input}
    constants = {n: np.array(e, np.float32) for n, e in EXPONENTS.items() if n in used}
    model = make_model(nodes, **constants)
    parts = dissect(model).parts
    chain: list[Function] = []
    target = "y"
    while target != "x":
        part = parts[target]
        assert isinstance(part, Function)
        chain.insert(0, part)
        target = part.source
    found = [(f.source, f.degree) for f in chain]
    assert found[-len(expected) :] == expected
    x = np.linspace(-1.2, 1.2, 9)
    value = np.repeat(x[:, None], 6, axis=1)
    for function in chain:
        coefficients = function.polynomial(SHAPE)
        assert coefficients is not None
        value = (value[:, :, None] ** np.arange(coefficients.shape[1]) * coefficients).sum(axis=2)
    grid = np.repeat(x[:, None], 6, axis=1).reshape(9, *SHAPE).astype(np.float32)
    whole = open_session(model).run(None, {"x": grid})[0].reshape(9, 6)
    np.testing.assert_allclose(value, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "degree"),
    [
        ([helper.make_node("Pow", ["x", "eleven"], ["y"])], 11),
        (
            [
                helper.make_node("Pow", ["x", "seven"], ["a"]),
                helper.make_node("Mul", ["a", "x"], ["b"]),
                helper.make_node("Mul", ["b", "xx"], ["c"]),
            ],
            8,
        ),
    ],
)
def test_polynomials_above_degree_7_that_do_not_split_are_refused_by_name(
    nodes: list[onnx.NodeProto], degree: int
) -> None:
    constants = {n: np.array(e, np.float32) for n, e in {"eleven": 11, "seven": 7}.items()}
    anatomy = dissect(make_model(square_and(*nodes), **constants))
    assert anatomy.opaque[0].reason.startswith(f"is a polynomial of degree {degree}, and 7 is the most")


def test_products_of_unrelated_values_are_refused_by_name() -> None:
    graph = helper.make_graph(
        [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Mul", ["t", "z"], ["y"], name="gate")],
        "step",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch", *SHAPE]) for n in ("x", "z")],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (opaque,) = dissect(model.SerializeToString()).opaque
    assert opaque.node.name == "gate"
    assert "multiplies or divides two values" in opaque.reason


def test_products_of_activations_of_one_value_are_one_function() -> None:
    nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Relu", ["x"], ["r"])]
    function = make_function([*nodes, helper.make_node("Mul", ["t", "r"], ["y"])])
    assert (function.source, function.degree, function.label) == ("x", None, "Tanh Relu Mul")
