"""Element-by-element operators that amount to a polynomial are found to be one, with coefficients by element."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from partitioner.deep.functions import Function, dissect

SHAPE = (3, 2)
BY_CHANNEL = np.array([[2.0], [-1.0], [0.5]], np.float32)


def make_function(nodes: list[onnx.NodeProto], **constants: NDArray[np.float32]) -> Function:
    graph = helper.make_graph(
        nodes,
        "step",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", *SHAPE])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    part = dissect(model.SerializeToString()).parts["y"]
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
    ],
    ids=["scaled", "divided", "cubic", "power"],
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
        make_function([helper.make_node("Pow", ["x", "n"], ["y"])], n=np.array([8.0], np.float32)),
        make_function([helper.make_node("Pow", ["x", "n"], ["y"])], n=np.array([0.5], np.float32)),
    ],
    ids=["relu", "reciprocal", "eighth power", "root"],
)
def test_what_is_no_polynomial_of_degree_7_is_not_taken_for_one(function: Function) -> None:
    assert function.polynomial(SHAPE) is None
