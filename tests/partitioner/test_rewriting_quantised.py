"""Quantised operators, rewritten as float ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

from partitioner.lowering import constant
from partitioner.rewriting import why_left
from tests.partitioner.examples import check, graph, weights
from tests.partitioner.rewritten_models import compare, operators, rewritten, run

BATCH = 3
QUANTISED = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear")


def levels(*shape: int, kind: type = np.uint8, seed: int = 0) -> np.ndarray:
    limits = np.iinfo(kind)
    generator = np.random.default_rng([seed, *shape])
    return generator.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)


def seven_bits(*shape: int, kind: type = np.int8) -> np.ndarray:
    """Return weights small enough for onnxruntime, whose sums of two products are of 16 bits on some processors."""
    generator = np.random.default_rng([1, *shape])
    return (generator.integers(-64, 64, shape) + (64 if kind is np.uint8 else 0)).astype(kind)


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).uniform(0.01, 0.02, shape).astype(np.float32)


def compare_levels(original: onnx.ModelProto, changed: ir.Model, feeds: Mapping[str, np.ndarray]) -> None:
    """Assert that at most one level in a hundred differs, and that by one step: where the exact value is at a tie."""
    for want, got in zip(run(original, feeds), run(changed, feeds), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        difference = np.abs(got.astype(np.int64) - want.astype(np.int64))
        assert difference.max() <= 1
        assert np.mean(difference > 0) <= 0.01


def check_levels(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], expected: str) -> ir.Model:
    changed = rewritten(model)
    assert not set(operators(changed)) & set(QUANTISED)
    (layer,) = [node for node in changed.graph if node.op_type == expected]
    assert any(array is not None and array.dtype == np.float32 for array in map(constant, layer.inputs))
    compare_levels(model, changed, feeds)
    return changed


@pytest.mark.parametrize(
    "attributes", ["", "pads=[1,1,1,1]", "strides=[2,2], pads=[0,1,2,1]", "group=2", "dilations=[2,2]"]
)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_qlinear_conv(kind: type, per_channel: bool, attributes: str) -> None:
    name = np.dtype(kind).name
    model = graph(
        f"g ({name}[batch,4,9,9] x) => ({name}[batch,a,b,c] y) {{"
        f" y = QLinearConv<{attributes}>(x, sx, zx, w, sw, zw, sy, zy, bias) }}".replace("<>", ""),
        {
            "sx": np.float32(0.013),
            "zx": np.array(17, kind),
            "w": seven_bits(6, 2 if "group" in attributes else 4, 3, 3),
            "sw": scales(6) if per_channel else scales(),
            "zw": np.zeros(6 if per_channel else (), np.int8),
            "sy": np.float32(0.3),
            "zy": np.array(3, kind),
            "bias": np.random.default_rng(0).integers(-9000, 9000, 6).astype(np.int32),
        },
        opset=21,
        ir=10,
    )
    check_levels(model, {"x": levels(BATCH, 4, 9, 9, kind=kind)}, "Conv")


def test_qlinear_conv_without_bias_and_with_zero_point_of_weights() -> None:
    model = graph(
        "g (uint8[batch,4,9,9] x) => (uint8[batch,6,7,7] y) { y = QLinearConv(x, sx, zx, w, sw, zw, sy, zy) }",
        {
            "sx": np.array([0.013], np.float32),
            "zx": np.array([17], np.uint8),
            "w": seven_bits(6, 4, 3, 3, kind=np.uint8),
            "sw": np.float32(0.01),
            "zw": np.uint8(60),
            "sy": np.array([0.3], np.float32),
            "zy": np.array([3], np.uint8),
        },
        opset=21,
        ir=10,
    )
    check_levels(model, {"x": levels(BATCH, 4, 9, 9)}, "Conv")


@pytest.mark.parametrize("per_column", [False, True])
def test_qlinear_matmul_with_constant_on_the_right(per_column: bool) -> None:
    columns = (7,) if per_column else ()
    model = graph(
        "g (uint8[batch,5,4] x) => (uint8[batch,5,7] y) { y = QLinearMatMul(x, sx, zx, w, sw, zw, sy, zy) }",
        {
            "sx": np.float32(0.013),
            "zx": np.uint8(140),
            "w": seven_bits(4, 7),
            "sw": scales(*columns),
            "zw": np.zeros(columns, np.int8),
            "sy": np.float32(0.04),
            "zy": np.uint8(60),
        },
        opset=21,
        ir=10,
    )
    check_levels(model, {"x": levels(BATCH, 5, 4)}, "MatMul")


def test_qlinear_matmul_with_constant_on_the_left() -> None:
    model = graph(
        "g (uint8[batch,5,4] x) => (uint8[batch,7,4] y) { y = QLinearMatMul(w, sw, zw, x, sx, zx, sy, zy) }",
        {
            "sx": np.float32(0.013),
            "zx": np.uint8(140),
            "w": seven_bits(7, 5, kind=np.uint8),
            "sw": np.float32(0.02),
            "zw": np.uint8(130),
            "sy": np.float32(0.04),
            "zy": np.uint8(60),
        },
        opset=21,
        ir=10,
    )
    check_levels(model, {"x": levels(BATCH, 5, 4)}, "MatMul")


@pytest.mark.parametrize("operator", ["QLinearMatMul(x, s, z, x, s, z, s, z)", "MatMulInteger(x, x)"])
def test_product_of_two_activations_has_no_weights_and_stays(operator: str) -> None:
    kind = "uint8" if operator.startswith("Q") else "int32"
    model = graph(
        f"g (uint8[batch,4,4] x) => ({kind}[batch,4,4] y) {{ y = {operator} }}",
        {"s": np.float32(0.02), "z": np.uint8(100)},
        opset=21,
        ir=10,
    )
    (node,) = rewritten(model).graph
    assert node.op_type == operator.partition("(")[0]
    assert why_left(node) is None


@pytest.mark.parametrize("operands", ["x, w", "x, w, zx", "x, w, zx, zw"])
def test_conv_integer_is_exact(operands: str) -> None:
    model = graph(
        f"g (uint8[batch,4,9,9] x) => (int32[batch,6,5,5] y) {{"
        f" y = ConvInteger<pads=[1,1,1,1], strides=[2,2]>({operands}) }}",
        {"w": seven_bits(6, 4, 3, 3, kind=np.uint8), "zx": np.uint8(17), "zw": np.uint8(60)},
        opset=21,
        ir=10,
    )
    changed = rewritten(model)
    assert operators(changed)["Conv"] == 1
    compare(model, changed, {"x": levels(BATCH, 4, 9, 9)}, tolerance=0)


@pytest.mark.parametrize("operands", ["x, w", "x, w, zx", "x, w, zx, zw"])
def test_matmul_integer_is_exact(operands: str) -> None:
    model = graph(
        f"g (uint8[batch,5,4] x) => (int32[batch,5,7] y) {{ y = MatMulInteger({operands}) }}",
        {"w": seven_bits(4, 7), "zx": np.uint8(17), "zw": levels(7, kind=np.int8, seed=1)},
        opset=21,
        ir=10,
    )
    changed = rewritten(model)
    assert operators(changed)["MatMul"] == 1
    compare(model, changed, {"x": levels(BATCH, 5, 4)}, tolerance=0)


def test_matmul_integer_with_constant_on_the_left_and_computed_zero_point_is_exact() -> None:
    model = graph(
        "g (uint8[batch,5,4] x, uint8[1] zx) => (int32[batch,7,4] y) { y = MatMulInteger(w, x, zw, zx) }",
        {"w": seven_bits(7, 5, kind=np.uint8), "zw": np.uint8(60)},
        opset=21,
        ir=10,
    )
    changed = rewritten(model)
    assert operators(changed)["MatMul"] == 1
    compare(model, changed, {"x": levels(BATCH, 5, 4), "zx": np.array([99], np.uint8)}, tolerance=0)


def test_dynamic_quantisation_is_each_samples_own() -> None:
    model = graph(
        "g (float[batch,5,4] x) => (float[batch,5,7] y) {"
        " q, s, z = DynamicQuantizeLinear(x)"
        " p = MatMulInteger(q, w, z, zw)"
        " f = Cast<to=1>(p)"
        " t = Mul(s, sw)"
        " y = Mul(f, t) }",
        {"w": seven_bits(4, 7), "zw": np.int8(3), "sw": scales(7)},
        opset=21,
        ir=10,
    )
    changed = rewritten(model)
    assert not set(operators(changed)) & set(QUANTISED)
    x = weights(BATCH, 5, 4) * np.array([1, 100, 0], np.float32).reshape(-1, 1, 1)
    expected = np.concatenate([run(model, {"x": sample[None]})[0] for sample in x])
    np.testing.assert_allclose(run(changed, {"x": x})[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("operator", "constants"),
    [
        ("DequantizeLinear(q, s)", {"q": levels(6, 4), "s": scales()}),
        ("DequantizeLinear(q, s, z)", {"q": levels(6, 4, kind=np.int8), "s": scales(), "z": np.int8(5)}),
        ("DequantizeLinear<axis=1>(q, s, z)", {"q": levels(6, 4), "s": scales(4), "z": levels(4)}),
        (
            "DequantizeLinear<axis=0, block_size=3>(q, s, z)",
            {"q": levels(6, 4, kind=np.int8), "s": scales(2, 4), "z": levels(2, 4, kind=np.int8)},
        ),
        ("DequantizeLinear(q, s)", {"q": levels(6, 4, kind=np.int32), "s": scales()}),
    ],
)
def test_dequantised_constant_is_a_constant(operator: str, constants: Mapping[str, np.ndarray]) -> None:
    model = graph(
        f"g (float[batch,4] x) => (float[batch,6] y) {{ w = {operator} t = Transpose(w) y = MatMul(x, t) }}",
        constants,
        opset=21,
        ir=10,
    )
    changed = rewritten(model)
    assert operators(changed) == {"MatMul": 1}
    compare(model, changed, {"x": weights(BATCH, 4)})


def test_four_bit_constant_in_blocks() -> None:
    levels_ = np.random.default_rng(0).integers(-8, 8, (8, 6))
    packed = helper.make_tensor("q", TensorProto.INT4, (8, 6), levels_.ravel())
    model = graph(
        "g (float[batch,8] x) => (float[batch,6] y) {"
        " w = DequantizeLinear<axis=0, block_size=4>(q, s) y = MatMul(x, w) }",
        {"s": scales(2, 6)},
        opset=21,
        ir=10,
    )
    model.graph.initializer.append(packed)
    changed = rewritten(model)
    assert operators(changed) == {"MatMul": 1}
    compare(model, changed, {"x": weights(BATCH, 8)})


def test_constant_above_every_default_limit_of_the_folding() -> None:
    model = graph(
        "g (float[batch,600] x) => (float[batch,600] y) { w = DequantizeLinear(q, s) y = Gemm(x, w) z = Gemm(x, w) }",
        {"q": levels(600, 600, kind=np.int8), "s": scales()},
        opset=21,
        ir=10,
    )
    assert operators(rewritten(model)) == {"Gemm": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "g (uint8[batch,4,9,9] x, float s) => (uint8[batch,6,7,7] y)"
            " { y = QLinearConv(x, s, zx, w, channels, zw, sy, zx, bias) }",
            "the scale of its activation is computed",
        ),
        (
            "g (uint8[batch,4,9,9] x, uint8 z) => (int32[batch,6,7,7] y) { y = ConvInteger(x, w, zx, z) }",
            "the zero point of its weights is computed",
        ),
        (
            "g (uint8[batch,4,9,9] x, int32[6] b) => (uint8[batch,6,7,7] y)"
            " { y = QLinearConv(x, sy, zx, w, sw, zw, sy, zx, b) }",
            "the bias is computed",
        ),
        (
            "g (uint8[batch,4] x) => (uint8[batch,5] y) { y = QLinearMatMul(x, rows, zx, m, sw, zw, sy, zx) }",
            "a scale for every row",
        ),
        (
            "g (uint8[batch,4] x, uint8[3] z) => (int32[batch,5] y) { y = MatMulInteger(x, m, z) }",
            "a zero point for every row",
        ),
        (
            "g (uint8[batch,4] x) => (uint8[batch,5] y) { y = QLinearMatMul(x, half, zx, m, half, zw, half, zx) }",
            "scales are float16",
        ),
    ],
)
def test_operator_that_stays_has_a_reason(text: str, reason: str) -> None:
    constants: dict[str, Any] = {
        "w": seven_bits(6, 4, 3, 3, kind=np.uint8),
        "m": levels(4, 5),
        "sw": np.float32(0.01),
        "zw": np.uint8(100),
        "sy": np.float32(0.2),
        "zx": np.uint8(3),
        "bias": np.zeros(6, np.int32),
        "rows": scales(3),
        "channels": scales(6),
        "half": np.float16(0.1),
    }
    (node,) = rewritten(graph(text, constants, opset=21, ir=10)).graph
    assert reason in str(why_left(node))


class Samples(CalibrationDataReader):
    """Random images for calibration."""

    def __init__(self) -> None:
        self._samples = iter(weights(4, 1, 3, 12, 12, seed=5))

    def get_next(self) -> dict[str, np.ndarray] | None:
        sample = next(self._samples, None)
        return None if sample is None else {"x": sample}


def small_cnn() -> onnx.ModelProto:
    return graph(
        "g (float[batch,3,12,12] x) => (float[batch,10] y) {"
        " a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w1, b1) b = Relu(a)"
        " c = Conv<pads=[1,1,1,1]>(b, w2, b2) d = Relu(c)"
        " e = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d) f = Flatten(e)"
        " h = MatMul(f, w3) y = Add(h, b3) }",
        {
            "w1": weights(8, 3, 3, 3),
            "b1": weights(8),
            "w2": weights(16, 8, 3, 3),
            "b2": weights(16),
            "w3": weights(144, 10) / 4,
            "b3": weights(10),
        },
        opset=21,
        ir=10,
    )


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator])
def test_statically_quantised_cnn(form: QuantFormat, per_channel: bool, tmp_path: Path) -> None:
    onnx.save(small_cnn(), tmp_path / "float.onnx")
    quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "quantised.onnx",
        Samples(),
        quant_format=form,
        per_channel=per_channel,
        weight_type=QuantType.QInt8,
    )
    model = onnx.load(tmp_path / "quantised.onnx")
    changed = rewritten(model)
    assert operators(changed)["Conv"] == 2
    assert not set(operators(changed)) & set(QUANTISED)
    assert not any(
        node.op_type == "DequantizeLinear" and constant(node.inputs[0]) is not None for node in changed.graph
    )
    x = weights(BATCH, 3, 12, 12, seed=9)
    (want,), (got,) = run(model, {"x": x}), run(changed, {"x": x})
    step = np.min(np.diff(np.unique(want)))
    assert np.max(np.abs(want - got)) <= 1.01 * step  # one level, where a value is at a tie


def test_dynamically_quantised_cnn(tmp_path: Path) -> None:
    onnx.save(small_cnn(), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "quantised.onnx", weight_type=QuantType.QUInt8)
    model = onnx.load(tmp_path / "quantised.onnx")
    assert {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"} <= {node.op_type for node in model.graph.node}
    changed = rewritten(model)
    assert not set(operators(changed)) & set(QUANTISED)
    x = weights(BATCH, 3, 12, 12, seed=9)
    expected = np.concatenate([run(model, {"x": sample[None]})[0] for sample in x])
    np.testing.assert_allclose(run(changed, {"x": x})[0], expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))


def test_partitioned_dynamically_quantised_cnn_has_its_weights_on_the_server(tmp_path: Path) -> None:
    onnx.save(small_cnn(), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "quantised.onnx", weight_type=QuantType.QUInt8)
    found = check(onnx.load(tmp_path / "quantised.onnx"), tmp_path)
    assert found.server_operators == ["Conv", "Conv", "MatMul"]
