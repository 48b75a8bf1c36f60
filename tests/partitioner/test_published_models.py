from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.partitioner.examples import check


@pytest.mark.parametrize(("name", "rounds"), [("heman_lenet5", 5), ("heman_cryptonets", 3)])
def test_partition_of_published_model_with_fixed_batch_matches_onnxruntime(
    name: str, rounds: int, shared: Path, tmp_path: Path
) -> None:
    model = onnx.load(shared / "models" / f"{name}.onnx")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    found = check(model, tmp_path)
    assert found.plan.rounds == rounds
    assert all({"Conv", "Gemm", "MatMul"} & set(operators) for operators in found.on_server)
