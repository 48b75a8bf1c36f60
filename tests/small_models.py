"""Small ONNX models for tests, written to files, and the data that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save_model(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int]],
    outputs: dict[str, Sequence[int]],
    constants: dict[str, np.ndarray],
    opset: int = 21,
) -> Path:
    """Write a float32 model with a symbolic batch axis; shapes exclude that axis."""

    def values(shapes: dict[str, Sequence[int]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", *s]) for n, s in shapes.items()]

    graph = helper.make_graph(
        list(nodes),
        path.stem,
        values(inputs),
        values(outputs),
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def _gemm(name: str, source: str, target: str) -> onnx.NodeProto:
    return helper.make_node("Gemm", [source, f"{name}.w", f"{name}.b"], [target], name=name, transB=1)


def _weights(name: str, weights: np.ndarray, bias: np.ndarray | None = None) -> dict[str, np.ndarray]:
    bias = np.zeros(len(weights)) if bias is None else bias
    return {f"{name}.w": weights.astype(np.float32), f"{name}.b": bias.astype(np.float32)}


def dense_model(path: Path, seed: int = 1) -> Path:
    """x (3) -> Gemm (4, the last row zero) -> Relu -> Gemm (2) -> y."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(4, 3))
    first[3] = 0
    return save_model(
        path,
        [_gemm("first", "x", "h"), helper.make_node("Relu", ["h"], ["r"], name="relu"), _gemm("second", "r", "y")],
        {"x": [3]},
        {"y": [2]},
        _weights("first", first, rng.normal(size=4)) | _weights("second", rng.normal(size=(2, 4)), rng.normal(size=2)),
    )


def product_model(path: Path, weights: np.ndarray, opset: int = 21) -> Path:
    """x (inputs) -> Gemm -> y (outputs), weights of shape (outputs, inputs)."""
    shapes = {"x": [weights.shape[1]]}, {"y": [weights.shape[0]]}
    return save_model(path, [_gemm("only", "x", "y")], *shapes, _weights("only", weights), opset)


def tanh_model(path: Path, activations: int = 2, seed: int = 1, soft: bool = False) -> Path:
    """x (6) -> Gemm -> Tanh -> ... -> Gemm -> y (3), with five values between; soft: the first Tanh is a Softmax."""
    rng = np.random.default_rng(seed)
    sizes = [6, *[5] * activations, 3]
    nodes, constants = [], {}
    for number, (before, after) in enumerate(pairwise(sizes)):
        name, last = f"layer{number}", number == activations
        nodes.append(_gemm(name, f"a{number}" if number else "x", "y" if last else f"h{number}"))
        if not last:
            kind = "Softmax" if soft and not number else "Tanh"
            nodes.append(helper.make_node(kind, [f"h{number}"], [f"a{number + 1}"], name=f"{kind.lower()}{number}"))
        constants |= _weights(name, rng.normal(size=(after, before)) / np.sqrt(before), rng.normal(size=after) / 4)
    return save_model(path, nodes, {"x": [6]}, {"y": [3]}, constants)


def convolution_model(path: Path) -> Path:
    """x (2, 6, 6) -> Conv (3 filters, one of them zero) -> Relu -> Flatten -> Gemm (5, one row zero) -> y."""
    rng = np.random.default_rng(2)
    kernel, dense = rng.normal(size=(3, 2, 3, 3)), rng.normal(size=(5, 48))
    kernel[1], dense[4] = 0, 0
    return save_model(
        path,
        [
            helper.make_node("Conv", ["x", "conv.w", "conv.b"], ["c"], name="conv", kernel_shape=[3, 3]),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Flatten", ["r"], ["f"], name="flatten"),
            _gemm("dense", "f", "y"),
        ],
        {"x": [2, 6, 6]},
        {"y": [5]},
        _weights("conv", kernel, rng.normal(size=3)) | _weights("dense", dense, rng.normal(size=5)),
    )


def logarithm_model(path: Path) -> Path:
    """x (3) -> Gemm, positive for positive x -> Log -> Gemm -> Relu -> Gemm -> y: NaN for negative x."""
    rng = np.random.default_rng(3)
    return save_model(
        path,
        [
            _gemm("first", "x", "h"),
            helper.make_node("Log", ["h"], ["l"], name="log"),
            _gemm("second", "l", "s"),
            helper.make_node("Relu", ["s"], ["r"], name="relu"),
            _gemm("third", "r", "y"),
        ],
        {"x": [3]},
        {"y": [2]},
        _weights("first", rng.uniform(0.5, 1, size=(4, 3)), np.full(4, 0.1))
        | _weights("second", rng.normal(size=(4, 4)))
        | _weights("third", rng.normal(size=(2, 4))),
    )


def lookup_model(path: Path) -> Path:
    """x (3) -> Gemm -> index into one of four rows -> Gemm -> y: onnxruntime raises for an index out of range."""
    return save_model(
        path,
        [
            _gemm("first", "x", "h"),
            helper.make_node("Relu", ["h"], ["p"], name="relu"),
            helper.make_node("Cast", ["p"], ["i"], name="cast", to=TensorProto.INT64),
            helper.make_node("Cast", ["i"], ["f"], name="back", to=TensorProto.FLOAT),
            helper.make_node("OneHot", ["i", "depth", "levels"], ["o"], name="one_hot", axis=-1),
            helper.make_node("ReduceSum", ["o", "axes"], ["s"], name="sum", keepdims=0),
            helper.make_node("GatherElements", ["s", "i"], ["g"], name="gather", axis=1),
            helper.make_node("Add", ["g", "f"], ["a"], name="add"),
            _gemm("second", "a", "y"),
        ],
        {"x": [3]},
        {"y": [2]},
        _weights("first", np.ones((4, 3))) | _weights("second", np.ones((2, 4)))
        | {"depth": np.array(4, np.int64), "levels": np.array([0, 1], np.float32), "axes": np.array([1], np.int64)},
    )  # fmt: skip


def two_sided_model(path: Path) -> Path:
    """u (3), v (2) -> two Gemm, added -> Relu -> p, and Gemm of it -> q: two inputs and two outputs."""
    rng = np.random.default_rng(4)
    return save_model(
        path,
        [
            _gemm("left", "u", "a"),
            _gemm("right", "v", "b"),
            helper.make_node("Add", ["a", "b"], ["s"], name="add"),
            helper.make_node("Relu", ["s"], ["p"], name="relu"),
            _gemm("last", "p", "q"),
        ],
        {"u": [3], "v": [2]},
        {"p": [4], "q": [2]},
        _weights("left", rng.normal(size=(4, 3)), rng.normal(size=4))
        | _weights("right", rng.normal(size=(4, 2)))
        | _weights("last", rng.normal(size=(2, 4)), rng.normal(size=2)),
    )


def padded_model(path: Path, seed: int, deviation: float) -> Path:
    """x (2, 6, 6) -> Conv (3 filters, padding 1) -> Relu -> Flatten -> Gemm (5) -> y, no row of weights zero."""
    rng = np.random.default_rng(seed)
    constants = {"k": (3, 2, 3, 3), "c": (3,), "w": (5, 108), "b": (5,)}
    return save_model(
        path,
        [
            helper.make_node("Conv", ["x", "k", "c"], ["h"], name="conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("Flatten", ["r"], ["f"], name="flatten"),
            helper.make_node("Gemm", ["f", "w", "b"], ["y"], name="dense", transB=1),
        ],
        {"x": [2, 6, 6]},
        {"y": [5]},
        {name: (deviation * rng.normal(size=shape)).astype(np.float32) for name, shape in constants.items()},
    )
