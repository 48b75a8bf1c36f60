"""Rounds with several blocks, which have to be sent and received side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from heinfer.client import RemoteModel
from partitioner import partition
from tests.parties import WatchedPool, parties


def branches(path: Path, count: int, width: int) -> Path:
    """Write a model of `count` inputs, each through a dense layer of its own."""
    generator = np.random.default_rng(0)
    nodes, inputs, outputs, constants = [], [], [], []
    for i in range(count):
        nodes.append(onnx.helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"]))
        inputs.append(onnx.helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT, ["n", width]))
        outputs.append(onnx.helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, ["n", width]))
        constants.append(numpy_helper.from_array(generator.normal(size=(width, width)).astype(np.float32), f"w{i}"))
    graph = onnx.helper.make_graph(nodes, "branches", inputs, outputs, constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10), path)
    return path


@pytest.mark.parametrize(("count", "width", "samples"), [(2, 1000, 2048), (12, 3, 2)], ids=["large", "many"])
def test_round_with_several_blocks_ends(
    count: int, width: int, samples: int, pool: WatchedPool, tmp_path: Path
) -> None:
    path = branches(tmp_path / "branches.onnx", count, width)
    plan = partition(path, tmp_path / "bundle").plan
    assert plan.rounds == 1
    assert len(plan.blocks) == count
    x = {f"x{i}": np.random.default_rng(i).normal(size=(samples, width)).astype(np.float32) for i in range(count)}
    with parties(tmp_path / "bundle", pool) as running, RemoteModel(running.node.address) as model:
        answer = model.query(x, statistics=True)
    weights = {i.name: numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer}
    for i in range(count):
        error = np.abs(answer.outputs[f"y{i}"] - x[f"x{i}"].astype(np.float64) @ weights[f"w{i}"])
        assert error.max() <= answer.statistics["error_bound"]
    assert len(set(running.pool.secrets)) == count
