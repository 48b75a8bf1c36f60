"""Models of every opset from 7 to the newest, whose operators changed their form on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from heinfer.errors import UnsupportedModelError
from partitioner import partition
from tests.partitioner.examples import check, graph, weights

NEWEST = onnx.defs.onnx_opset_version()
CONSTANTS = {
    "w": weights(4, 3, 3, 3),
    "v": weights(4, 5),
    "c": weights(5),
    "gain": np.array([1.5, 0.5, 2.0, 1.0], np.float32),
    "shift": np.array([0.1, -0.2, 0.3, 0.0], np.float32),
    "mean": np.array([0.1, 0.2, -0.3, 0.0], np.float32),
    "variance": np.array([0.5, 1.0, 2.0, 1.5], np.float32),
}
START = "a = Conv <pads = [1, 1, 1, 1]> (x, w) b = BatchNormalization (a, gain, shift, mean, variance)"
NETWORKS = {
    7: f"{START} d = Dropout <ratio = 0.5> (b) e = Clip <min = 0.0, max = 6.0> (d)"
    ' f = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 2.0]> (e)'
    " h = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (f)"
    " p = Pad <pads = [0, 0, 1, 1, 0, 0, 1, 1], value = 0.5> (h)"
    " s = Slice <axes = [2, 3], starts = [1, 1], ends = [5, 5]> (p) r = ReduceMean <axes = [2, 3], keepdims = 0> (s)"
    " q = Gemm (r, v, c) y = Softmax <axis = 1> (q)",
    9: f'{START} f = Upsample <mode = "linear"> (b, scales) h = Relu (f)'
    " r = ReduceSum <axes = [2, 3], keepdims = 0> (h) q = Gemm (r, v, c) y = Softmax (q)",
    11: f"{START} e = Clip (b, zero, six) r = ReduceMean <axes = [2, 3]> (e) s = Squeeze <axes = [2, 3]> (r)"
    " q = Gemm (s, v, c) u = Unsqueeze <axes = [1]> (q) t = Softmax <axis = 1> (u) y = Squeeze <axes = [1]> (t)",
    13: f"{START} e = Relu (b) r = ReduceSum <keepdims = 0> (e, axes) q = Gemm (r, v, c) u = Unsqueeze (q, one)"
    " t = Softmax <axis = -1> (u) y = Squeeze (t, one)",
    17: f"{START} e = HardSwish (b) s, t = Split <axis = 1> (e) f = Concat <axis = 1> (t, s)"
    " r = ReduceMean <axes = [2, 3], keepdims = 0> (f) m = LayerNormalization (r, gain) y = Gemm (m, v, c)",
    NEWEST: f"{START} e = Gelu (b) i = GroupNormalization <num_groups = 2> (e, gain, shift)"
    " s, t = Split <axis = 1, num_outputs = 2> (i) f = Concat <axis = 1> (t, s) r = ReduceMean <keepdims = 0> (f, axes)"
    " q = Cast <to = 1> (r) k = Gemm (q, v, c) y = Softmax (k)",
}
MORE = {
    "scales": np.array([1, 1, 1.5, 2], np.float32),
    "zero": np.float32(0),
    "six": np.float32(0.6),
    "axes": np.array([2, 3]),
    "one": np.array([1]),
}


def network(opset: int, batch: str = "n", ir: int = 8) -> onnx.ModelProto:
    body = NETWORKS[opset]
    used = {name: array for name, array in (CONSTANTS | MORE).items() if f", {name}" in body}
    return graph(f"g (float[{batch},3,4,4] x) => (float y) {{ {body} }}", used, opset, ir)


@pytest.mark.parametrize("batch", ["n", "1"])
@pytest.mark.parametrize("opset", NETWORKS)
def test_network_of_an_opset_gives_what_onnxruntime_gives(opset: int, batch: str, tmp_path: Path) -> None:
    found = check(network(opset, batch, ir=11 if opset == NEWEST else 8), tmp_path)
    assert {"Conv", "Gemm"} <= set(found.server_operators)
    assert "BatchNormalization" not in found.server_operators  # folded


def test_network_whose_weights_are_inputs_with_defaults_is_partitioned(tmp_path: Path) -> None:
    found = check(network(7, ir=3), tmp_path)
    assert [t.name for t in found.plan.inputs] == ["x"]


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("operator", "scale"), [("Upsample", 1.5), ("Resize", 1.5), ("Resize", 0.6)])
def test_resizing_of_opset_9_or_10_keeps_its_mapping(operator: str, scale: float, mode: str, tmp_path: Path) -> None:
    model = graph(
        f'g (float[n,3,5,5] x) => (float y) {{ a = {operator} <mode = "{mode}"> (x, scales)'
        " y = Conv <pads = [1, 1, 1, 1]> (a, w) }",
        {"scales": np.array([1, 1, scale, scale], np.float32), "w": weights(4, 3, 3, 3)},
        9 if operator == "Upsample" else 10,
    )
    check(model, tmp_path)


def test_partition_of_opset_below_7_says_so(tmp_path: Path) -> None:
    path = tmp_path / "old.onnx"
    path.write_bytes(network(7).SerializeToString())
    model = onnx.load_model(path)
    model.opset_import[0].version = 6
    del model.graph.node[1:]  # Conv has been the same since opset 1
    model.graph.output[0].name = model.graph.node[0].output[0]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="opset 6 is too old"):
        partition(path, tmp_path / "bundle")


def test_partition_of_opset_that_is_not_there_yet_says_so(tmp_path: Path) -> None:
    model = graph("g (float[n,6] x) => (float y) { y = MatMul (x, w) }", {"w": weights(6, 5)})
    model.opset_import[0].version = NEWEST + 1
    path = tmp_path / "new.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModelError, match=f"opset {NEWEST + 1} is newer than {NEWEST}"):
        partition(path, tmp_path / "bundle")


def test_opset_imported_by_the_longer_name_of_its_domain_is_partitioned(tmp_path: Path) -> None:
    model = network(13)
    model.opset_import[0].domain = "ai.onnx"
    check(model, tmp_path)
