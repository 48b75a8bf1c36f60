"""The peers' scripts read and cut a model as it is: with exact layers, the parts give what onnxruntime gives."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks/peers"))

from networks import (  # noqa: E402
    Convolution,
    Linear,
    NotExpressibleError,
    evaluate_clear,
    evaluate_hybrid,
    evaluate_prefix,
    read_network,
    unroll,
    with_squares,
)
from orion_modules import undo_gap  # noqa: E402

LENET5 = REPOSITORY / "models/released/mnist_lenet5/model.onnx"


def in_the_clear(layer: Linear | Convolution, x: np.ndarray) -> np.ndarray:
    """Evaluate a layer with weights in float64; a convolution as a product with its windows."""
    if isinstance(layer, Linear):
        return x @ layer.weight.T + layer.bias
    outputs = unroll(x, layer) @ layer.weight.reshape(len(layer.weight), -1).T + layer.bias
    height, width = (
        (x.shape[axis] + 2 * layer.padding - layer.weight.shape[axis]) // layer.stride + 1 for axis in (2, 3)
    )
    return outputs.transpose(0, 2, 1).reshape(len(x), -1, height, width)


def branched_model(groups: int = 1) -> onnx.ModelProto:
    """A convolution with padding and stride beside a shortcut of every second pixel, padded with channels of zeros."""
    random = np.random.default_rng(5)
    constants = {
        "mean": random.standard_normal((1, 2, 1, 1)).astype(np.float32),
        "kernel": random.standard_normal((4, 2 // groups, 3, 3)).astype(np.float32),
        "starts": np.array([0, 0]),
        "ends": np.array([2**31, 2**31]),
        "axes": np.array([2, 3]),
        "steps": np.array([2, 2]),
        "pads": np.array([0, 1, 0, 0, 0, 1, 0, 0]),
        "middle": np.array([2, 3]),
        "matrix": random.standard_normal((4, 3)).astype(np.float32),
        "bias": random.standard_normal(3).astype(np.float32),
    }
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Conv", ["centred", "kernel"], ["conv"], strides=[2, 2], pads=[1, 1, 1, 1], group=groups),
        helper.make_node("Slice", ["centred", "starts", "ends", "axes", "steps"], ["every"]),
        helper.make_node("Pad", ["every", "pads"], ["shortcut"]),
        helper.make_node("Add", ["conv", "shortcut"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["relu"]),
        helper.make_node("ReduceMean", ["relu", "middle"], ["features"], keepdims=0),
        helper.make_node("Gemm", ["features", "matrix", "bias"], ["y"], alpha=0.5, beta=2.0),
    ]
    graph = helper.make_graph(
        nodes,
        "branched",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_evaluate_hybrid_branches_give_what_onnxruntime_gives(tmp_path: Path) -> None:
    path = tmp_path / "branched.onnx"
    onnx.save(branched_model(), path)
    x = np.random.default_rng(0).standard_normal((3, 2, 8, 8)).astype(np.float32)
    network = read_network(path)
    assert [type(layer) for layer in network.linear_layers()] == [Convolution, Linear]
    assert network.shape == (2, 8, 8)
    np.testing.assert_allclose(evaluate_hybrid(network, x, in_the_clear), evaluate_clear(path, x), atol=1e-5)


def test_evaluate_hybrid_pooling_gives_what_onnxruntime_gives() -> None:
    x = np.random.default_rng(0).random((2, 1, 28, 28), dtype=np.float32)
    outputs = evaluate_hybrid(read_network(LENET5), x, in_the_clear)
    np.testing.assert_allclose(outputs, evaluate_clear(LENET5, x), atol=1e-4)


def test_evaluate_prefix_is_the_first_layer_s_input() -> None:
    x = np.random.default_rng(0).random((2, 1, 28, 28), dtype=np.float32)
    network, seen = read_network(LENET5), []

    def watch(layer: Linear | Convolution, values: np.ndarray) -> np.ndarray:
        seen.append(values)
        return in_the_clear(layer, values)

    evaluate_hybrid(network, x, watch)
    assert network.first_linear() == 2
    np.testing.assert_array_equal(evaluate_prefix(network, x), seen[0])


def test_with_squares_puts_them_in_place_of_relu(tmp_path: Path) -> None:
    path = tmp_path / "branched.onnx"
    onnx.save(branched_model(), path)
    squared = with_squares(path)
    assert "Relu" not in {node.op_type for node in squared.graph.node}
    onnx.save(squared, tmp_path / "squared.onnx")
    x = np.random.default_rng(0).standard_normal((3, 2, 8, 8)).astype(np.float32)
    outputs = evaluate_hybrid(read_network(tmp_path / "squared.onnx"), x, in_the_clear)
    np.testing.assert_allclose(outputs, evaluate_clear(squared, x), atol=1e-4)
    assert np.abs(outputs - evaluate_clear(path, x)).max() > 0.1


def test_read_network_groups_are_refused_by_name(tmp_path: Path) -> None:
    onnx.save(branched_model(groups=2), tmp_path / "grouped.onnx")
    with pytest.raises(NotExpressibleError, match="'conv' has groups"):
        read_network(tmp_path / "grouped.onnx")


def test_undo_gap_finds_each_channel_in_its_rows_and_columns() -> None:
    channels, side, gap = 6, 3, 2
    clear = np.arange(1.0, channels * side * side + 1).reshape(1, channels, side, side)
    slots = np.zeros(
        (1, 2, 8, 8)
    )  # 6 channels in groups of 2 x 2; rows and columns of an 8 x 8 input, 6 x 6 of them used
    for channel in range(channels):
        row, column = divmod(channel % gap**2, gap)
        slots[0, channel // gap**2, row : side * gap : gap, column : side * gap : gap] = clear[0, channel]
    padded = np.concatenate([slots.ravel(), np.full(100, 7.0)])
    np.testing.assert_array_equal(undo_gap(padded, slots.shape, clear.shape, gap), clear)
