"""Split as Slices, Concat with constants as Pad and Add, and operators that change nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from partitioner.rewriting import why_left
from tests.partitioner.examples import graph, weights
from tests.partitioner.rewritten_models import compare, operators, rewritten, run

BATCH = 3
INT64 = np.int64
CONSTANTS = {
    "same": np.array([1, 5, 4], INT64),
    "copy": np.array([0, 5, -1], INT64),
    "ones_": np.array([1, 1, 1], INT64),
    "none": np.array([0, 0], INT64),
    "far": np.array([np.iinfo(INT64).max, 5], INT64),
    "axes": np.array([0, 1], INT64),
    "pads": np.zeros(6, INT64),
    "one": np.float32(1),
    "one_each": np.ones((1, 5, 1), np.float32),
    "zero": np.float32(0),
    "zero_each": np.zeros((5, 4), np.float32),
}


def model_of(text: str, constants: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    return graph(text, constants, opset=21, ir=10)


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        ("Split<axis=1, num_outputs=3>(x)", (3, 3, 3)),
        ("Split<axis=-2, num_outputs=2>(x)", (5, 4)),
        ("Split<axis=1>(x, sizes)", (2, 6, 1)),
        ("Split<axis=1>(x, sizes)", (4, 0, 5)),
    ],
)
def test_split_is_slices(split: str, sizes: tuple[int, ...]) -> None:
    names = "abc"[: len(sizes)]
    outputs = ", ".join(f"float[batch,n{name},4] {name}" for name in names)
    model = model_of(
        f"g (float[batch,9,4] x) => ({outputs}) {{ {', '.join(names)} = {split} }}", {"sizes": np.array(sizes, INT64)}
    )
    changed = rewritten(model)
    assert operators(changed) == {"Slice": len(sizes)}
    compare(model, changed, {"x": weights(BATCH, 9, 4)}, tolerance=0)


def test_part_that_nothing_reads_is_not_cut() -> None:
    model = model_of(
        "g (float[batch,8] x) => (float[batch,4] y) { a, b = Split<axis=1, num_outputs=2>(x) y = Relu(b) }"
    )
    changed = rewritten(model)
    assert operators(changed) == {"Slice": 1, "Relu": 1}
    compare(model, changed, {"x": weights(BATCH, 8)}, tolerance=0)


def test_split_into_computed_sizes_stays_without_reason() -> None:
    model = model_of(
        "g (float[batch,8] x, int64[2] s) => (float[batch,n] a, float[batch,m] b) { a, b = Split<axis=1>(x, s) }"
    )
    (node,) = rewritten(model).graph
    assert node.op_type == "Split"
    assert why_left(node) is None


@pytest.mark.parametrize(
    ("concat", "found"),
    [
        ("Concat<axis=1>(c, x)", {"Pad": 1, "Add": 1}),
        ("Concat<axis=-2>(x, c)", {"Pad": 1, "Add": 1}),
        ("Concat<axis=1>(c, d, x, d)", {"Pad": 1, "Add": 1}),
        ("Concat<axis=1>(c, x, d, y, y, c)", {"Pad": 2, "Concat": 1, "Add": 1}),
        ("Concat<axis=1>(x, y, c)", {"Pad": 1, "Concat": 1, "Add": 1}),
        ("Concat<axis=1>(x, zeros)", {"Pad": 1}),
        ("Concat<axis=1>(x, y)", {"Concat": 1}),
    ],
)
def test_concat_with_constants_broadcasts_over_the_batch(concat: str, found: Mapping[str, int]) -> None:
    constants = {"c": weights(1, 2, 4), "d": weights(1, 1, 4), "zeros": np.zeros((1, 3, 4), np.float32)}
    model = model_of(
        f"g (float[batch,5,4] x, float[batch,3,4] y) => (float[batch,n,4] z) {{ z = {concat} }}", constants
    )
    changed = rewritten(model)
    assert operators(changed) == found
    x, y = weights(BATCH, 5, 4), weights(BATCH, 3, 4)
    one_by_one = [run(model, {"x": a[None], "y": b[None]})[0] for a, b in zip(x, y, strict=True)]
    np.testing.assert_array_equal(run(changed, {"x": x, "y": y})[0], np.concatenate(one_by_one))


def test_concat_with_constant_along_the_first_axis_of_a_sequence() -> None:
    model = model_of(
        "g (float[5,batch,4] x) => (float[7,batch,4] y) { y = Concat<axis=0>(c, x) }", {"c": weights(2, 1, 4)}
    )
    changed = rewritten(model)
    assert operators(changed) == {"Pad": 1, "Add": 1}
    x = weights(5, BATCH, 4)
    one_by_one = [run(model, {"x": x[:, i : i + 1]})[0] for i in range(BATCH)]
    np.testing.assert_array_equal(run(changed, {"x": x})[0], np.concatenate(one_by_one, axis=1))


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("g (float[batch,4] x) => (float[n,4] y) { y = Concat<axis=0>(x, c) }", weights(2, 4)),
        ("g (int64[batch,4] x) => (int64[batch,6] y) { y = Concat<axis=1>(x, c) }", np.ones((1, 2), INT64)),
        (
            "g (float[batch,4] x) => (float[batch,6] y) { y = Concat<axis=1>(x, c) }",
            np.full((1, 2), -np.inf, np.float32),
        ),
    ],
    ids=["along the batch", "integers", "infinite"],
)
def test_concat_that_stays(text: str, constant: np.ndarray) -> None:
    assert operators(rewritten(model_of(text, {"c": constant}))) == {"Concat": 1}


@pytest.mark.parametrize(
    "operator",
    [
        "Sum(x)",
        "Max(x)",
        "Min(x)",
        "Mean(x)",
        "Concat<axis=1>(x)",
        "Identity(x)",
        "Cast<to=1>(x)",
        "Expand(x, same)",
        "Expand(x, ones_)",
        "Tile(x, ones_)",
        "Reshape(x, same)",
        "Reshape(x, copy)",
        "Slice(x, none, far, axes)",
        "Pad(x, pads)",
        "Transpose<perm=[0,1,2]>(x)",
        "Mul(x, one)",
        "Mul(one_each, x)",
        "Div(x, one_each)",
        "Add(zero, x)",
        "Add(x, zero_each)",
        "Sub(x, zero)",
        "Split<axis=0, num_outputs=1>(x)",
    ],
)
def test_operator_that_changes_nothing_goes(operator: str) -> None:
    model = model_of(
        f"g (float[batch,5,4] input) => (float[batch,5,4] y) {{ x = Relu(input) z = {operator} y = Neg(z) }}", CONSTANTS
    )
    changed = rewritten(model)
    assert operators(changed) == {"Relu": 1, "Neg": 1}
    values = weights(BATCH, 5, 4)
    np.testing.assert_array_equal(run(changed, {"input": values})[0], -np.maximum(values, 0))


@pytest.mark.parametrize(
    ("operator", "constant"),
    [
        ("Mul(x, c)", np.ones((2, 1, 5, 4), np.float32)),
        ("Add(x, c)", np.zeros((1, 1, 5, 4), np.float32)),
        ("Sub(c, x)", np.float32(0)),
        ("Div(c, x)", np.float32(1)),
        ("Mul(x, c)", np.float32(2)),
        ("Slice(x, zero, one, zero)", np.float32(0)),
        ("Slice(x, last, far, zero)", np.float32(0)),
        ("Slice(x, last, least, axis, step)", np.float32(0)),
        ("Transpose<perm=[1,0,2]>(x)", np.float32(0)),
        ("Cast<to=7>(x)", np.float32(0)),
        ("Pad(x, pads)", np.float32(0)),
    ],
)
def test_operator_that_changes_something_stays(operator: str, constant: np.ndarray) -> None:
    model = model_of(
        f"g (float[batch,5,4] x) => (float[n] y) {{ y = {operator} }}",
        {
            "c": constant,
            "zero": np.array([0], INT64),
            "one": np.array([1], INT64),
            "last": np.array([-1], INT64),
            "far": np.array([np.iinfo(INT64).max], INT64),
            "least": np.array([np.iinfo(INT64).min], INT64),
            "axis": np.array([2], INT64),
            "step": np.array([-1], INT64),
            "pads": np.array([0, 0, 0, 0, 0, 1], INT64),
        },
    )
    assert operators(rewritten(model)) == {operator.partition("(")[0].partition("<")[0]: 1}


def test_result_that_is_an_input_keeps_its_operator() -> None:
    model = model_of("g (float[batch,4] x) => (float[batch,4] y) { y = Mul(x, one) }", {"one": np.float32(1)})
    changed = rewritten(model)
    assert operators(changed) == {"Identity": 1}
    compare(model, changed, {"x": weights(BATCH, 4)}, tolerance=0)
