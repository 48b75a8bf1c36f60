from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.partitioner.examples import check, graph, weights

W1 = weights(6, 4, 3, 3)
CONVOLUTIONS = {
    "plain": ("", W1),
    "strides": ("strides = [2, 1]", W1),
    "pads": ("pads = [1, 0, 2, 3]", W1),
    "dilations": ("dilations = [2, 1]", W1),
    "all_at_once": ("strides = [2, 3], pads = [2, 1, 0, 1], dilations = [1, 2]", W1),
    "same_upper": ('auto_pad = "SAME_UPPER", strides = [2, 2]', weights(6, 4, 2, 3)),
    "same_lower": ('auto_pad = "SAME_LOWER", strides = [2, 2]', weights(6, 4, 2, 3)),
    "valid": ('auto_pad = "VALID", strides = [1, 2]', W1),
    "notset": ('auto_pad = "NOTSET", pads = [1, 1, 1, 1]', W1),
    "groups": ("group = 2, pads = [1, 1, 1, 1]", weights(6, 2, 3, 3)),
    "depthwise": ("group = 4", weights(8, 1, 3, 2)),
    "kernel_shape": ("kernel_shape = [3, 3]", W1),
    "whole_plane": ("", weights(3, 4, 8, 7)),
    "pointwise": ("strides = [3, 3]", weights(3, 4, 1, 1)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_conv_with_attributes_matches_onnxruntime(case: str, bias: bool, tmp_path: Path) -> None:
    attributes, kernel = CONVOLUTIONS[case]
    call = f"Conv <{attributes}>" if attributes else "Conv"
    constants = {"w": kernel} | ({"b": weights(len(kernel))} if bias else {})
    model = graph(f"g (float[n,4,8,7] x) => (float y) {{ y = {call} ({', '.join(['x', *constants])}) }}", constants)
    found = check(model, tmp_path)
    assert found.on_server == [["Conv"]]
    assert found.on_node == []


GEMMS = {
    "plain": ("", (7, 5), None),
    "scalar": ("", (7, 5), np.float32(0.25)),
    "one": ("", (7, 5), weights(1)),
    "row": ("", (7, 5), weights(5)),
    "row_2d": ("", (7, 5), weights(1, 5)),
    "alpha": ("alpha = -0.5", (7, 5), weights(5)),
    "beta": ("beta = 3.0", (7, 5), weights(5)),
    "beta_zero": ("beta = 0.0", (7, 5), weights(5)),
    "trans_b": ("transB = 1", (5, 7), weights(5)),
    "everything": ("alpha = 0.25, beta = -2.0, transB = 1", (5, 7), weights(1, 5)),
}


@pytest.mark.parametrize("case", GEMMS)
def test_gemm_with_attributes_matches_onnxruntime(case: str, tmp_path: Path) -> None:
    attributes, shape, bias = GEMMS[case]
    call = f"Gemm <{attributes}>" if attributes else "Gemm"
    constants = {"w": weights(*shape)} | ({} if bias is None else {"c": np.asarray(bias)})
    model = graph(f"g (float[n,7] x) => (float y) {{ y = {call} ({', '.join(['x', *constants])}) }}", constants)
    assert check(model, tmp_path).on_server == [["Gemm"]]


def test_gemm_that_transposes_a_transposed_activation_matches_onnxruntime(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,7] x) => (float y) { t = Transpose <perm = [1, 0]> (x) y = Gemm <transA = 1> (t, w, c) }",
        {"w": weights(7, 5), "c": weights(5)},
    )
    assert "Gemm" in check(model, tmp_path).server_operators


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", ["none", "scalar", "column"])
def test_gemm_with_constant_left_operand_matches_onnxruntime(transposed: int, bias: str, tmp_path: Path) -> None:
    constants = {"w": weights(7, 5) if transposed else weights(5, 7)}
    if bias != "none":
        constants["c"] = weights(5, 1) if bias == "column" else weights(1)
    operands = ", ".join(["w", "x", *list(constants)[1:]])
    attributes = f"alpha = 0.5, beta = 2.0, transA = {transposed}, transB = 1"
    model = graph(
        f"g (float[n,7] x) => (float y) {{ t = Gemm <{attributes}> ({operands}) y = Transpose <perm = [1, 0]> (t) }}",
        constants,
    )
    assert "Gemm" in check(model, tmp_path).server_operators


MATMULS = {
    "right": ("[n,7]", "x, w", (7, 5)),
    "right_vector": ("[n,7]", "x, w", (7,)),
    "right_over_tokens": ("[n,3,7]", "x, w", (7, 5)),
    "right_vector_over_tokens": ("[n,3,7]", "x, w", (7,)),
    "right_over_heads": ("[n,2,3,7]", "x, w", (7, 5)),
    "right_leading_one": ("[n,3,7]", "x, w", (1, 7, 5)),
    "left": ("[n,7,3]", "w, x", (5, 7)),
    "left_vector": ("[n,7,3]", "w, x", (7,)),
    "left_over_heads": ("[n,2,7,3]", "w, x", (5, 7)),
    "left_leading_one": ("[n,7,3]", "w, x", (1, 5, 7)),
}


@pytest.mark.parametrize("case", MATMULS)
def test_matmul_by_constant_matches_onnxruntime(case: str, tmp_path: Path) -> None:
    source, operands, shape = MATMULS[case]
    model = graph(f"g (float{source} x) => (float y) {{ y = MatMul ({operands}) }}", {"w": weights(*shape)})
    assert check(model, tmp_path).on_server == [["MatMul"]]


def test_matmul_of_two_activations_runs_on_node(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,7] x) => (float y) { a = MatMul (x, w) t = Transpose <perm = [0, 2, 1]> (a) y = MatMul (a, t) }",
        {"w": weights(7, 4)},
    )
    found = check(model, tmp_path)
    assert found.on_server == [["MatMul"]]
    assert "MatMul" in found.node_operators


def normalisation(channels: int) -> dict[str, np.ndarray]:
    return {
        "gain": weights(channels, seed=1),
        "beta": weights(channels, seed=2),
        "mean": weights(channels, seed=3),
        "var": np.abs(weights(channels, seed=4)) + 0.1,
    }


BN = "BatchNormalization <epsilon = 0.001>"


@pytest.mark.parametrize("bias", [True, False])
def test_batch_normalization_after_conv_folds_into_one_block(bias: bool, tmp_path: Path) -> None:
    constants = {"w": weights(6, 4, 3, 3)} | ({"b": weights(6)} if bias else {})
    operands = ", ".join(["x", *constants])
    model = graph(
        f"g (float[n,4,8,7] x) => (float y) {{ a = Conv ({operands}) c = {BN} (a, gain, beta, mean, var) y = "
        f"Relu (c) }}",
        constants | normalisation(6),
    )
    assert check(model, tmp_path).on_server == [["Conv"]]


@pytest.mark.parametrize(("transposed", "shape"), [(0, (7, 5)), (1, (5, 7))])
def test_batch_normalization_after_gemm_folds_into_one_block(
    transposed: int, shape: tuple[int, int], tmp_path: Path
) -> None:
    model = graph(
        f"g (float[n,7] x) => (float y) {{ a = Gemm <transB = {transposed}> (x, w, b) "
        f"y = {BN} (a, gain, beta, mean, var) }}",
        {"w": weights(*shape), "b": weights(5)} | normalisation(5),
    )
    assert check(model, tmp_path).on_server == [["Gemm"]]


@pytest.mark.parametrize("shape", ["[n,4,6,5]", "[n,4]", "[n,4,3]"])
def test_batch_normalization_in_front_runs_on_server_alone(shape: str, tmp_path: Path) -> None:
    model = graph(
        f"g (float{shape} x) => (float y) {{ a = {BN} (x, gain, beta, mean, var) y = Relu (a) }}", normalisation(4)
    )
    assert check(model, tmp_path).on_server == [["BatchNormalization"]]


def test_batch_normalization_before_activation_and_conv_is_a_block_of_its_own(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,5] x) => (float y) {{ a = {BN} (x, gain, beta, mean, var) b = Tanh (a) y = Conv (b, w) }}",
        {"w": weights(2, 4, 3, 3)} | normalisation(4),
    )
    assert check(model, tmp_path).on_server == [["BatchNormalization"], ["Conv"]]


def test_batch_normalization_of_conv_that_is_read_twice_keeps_both_values(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,5] x) => (float y, float z) {{ a = Conv (x, w) y = {BN} (a, gain, beta, mean, var) "
        "z = Relu (a) }",
        {"w": weights(4, 4, 3, 3)} | normalisation(4),
    )
    check(model, tmp_path)


CONSTANTS = {
    "scalar": np.float32(0.75),
    "one": np.full((1,), -1.5, np.float32),
    "channels": weights(6, 1, 1),
    "channels_4d": weights(1, 6, 1, 1),
    "columns": weights(5),
    "rows": weights(4, 1),
    "full": weights(6, 4, 5),
}


@pytest.mark.parametrize("where", ["before", "after", "alone"])
@pytest.mark.parametrize(
    "operation", ["Add (a, c)", "Add (c, a)", "Sub (a, c)", "Sub (c, a)", "Mul (a, c)", "Mul (c, a)", "Div (a, c)"]
)
@pytest.mark.parametrize("case", CONSTANTS)
def test_arithmetic_with_constant_matches_onnxruntime(case: str, operation: str, where: str, tmp_path: Path) -> None:
    constant = np.asarray(CONSTANTS[case], np.float32)
    if operation.startswith("Div"):
        constant = np.sign(constant) * (np.float32(0.5) + np.abs(constant))
    body = {
        "before": f"a = Identity (x) b = {operation} y = Conv <pads = [1, 1, 1, 1]> (b, w)",
        "after": f"a = Conv <pads = [1, 1, 1, 1]> (x, w) b = {operation} y = Relu (b)",
        "alone": f"a = Conv <pads = [1, 1, 1, 1]> (x, w) z = Relu (a) y = {operation}",
    }[where]
    outputs = "float y, float z" if where == "alone" else "float y"
    model = graph(
        f"g (float[n,6,4,5] x) => ({outputs}) {{ {body} }}",
        {"w": weights(6, 6, 3, 3), "c": np.asarray(constant, np.float32)},
    )
    found = check(model, tmp_path)
    if constant.size == 1 or operation[:3] in ("Add", "Sub"):
        assert found.server_operators.count("Conv") == len(found.plan.blocks) == 1


def test_constant_divided_by_an_activation_runs_on_node(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,7] x) => (float y) { a = Gemm (x, w) b = Exp (a) y = Div (c, b) }",
        {"w": weights(7, 5), "c": weights(5)},
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Gemm"]]
    assert found.on_node == [["Exp", "Div"]]


def test_product_with_vector_after_matmul_by_vector_of_equal_length_matches_onnxruntime(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,5,5] x) => (float y) { a = MatMul (x, w) y = Mul (a, c) }",
        {"w": weights(5), "c": weights(5, seed=1)},
    )
    check(model, tmp_path)


def test_product_that_adds_an_axis_is_not_folded(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,7] x) => (float y) { a = MatMul (x, w) b = Mul (a, c) y = Squeeze (b, axes) }",
        {"w": weights(7, 5), "c": weights(1, 1, 1), "axes": np.array([0])},
    )
    check(model, tmp_path)


@pytest.mark.parametrize("factor", [np.float32(2.5), weights(4, 1, 1)])
@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_product_that_folds_into_the_last_conv_keeps_the_results_name(
    operator: str, factor: np.ndarray, tmp_path: Path
) -> None:
    model = graph(
        f"g (float[n,3,5,5] x) => (float y) {{ a = Conv (x, w, b) y = {operator} (a, c) }}",
        {"w": weights(4, 3, 3, 3), "b": weights(4), "c": np.asarray(factor)},
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Conv"]]
    assert [t.name for t in found.plan.outputs] == ["y"]


def factors(*shape: int) -> np.ndarray:
    """Return constants whose products and quotients are exact: powers of two of both signs."""
    generator = np.random.default_rng([9, *shape])
    return (generator.choice([-1.0, 1.0], shape) * 2.0 ** generator.integers(-3, 4, shape)).astype(np.float32)


FACTORS_IN_FRONT = {
    "conv": ("[n,4,6,5]", "Conv <pads = [1, 1, 1, 1]> (a, w)", (3, 4, 3, 3), (4, 1, 1)),
    "conv_4d": ("[n,4,6,5]", "Conv (a, w)", (3, 4, 3, 3), (1, 4, 1, 1)),
    "grouped_conv": ("[n,4,6,5]", "Conv <group = 2> (a, w)", (6, 2, 3, 3), (4, 1, 1)),
    "depthwise_conv": ("[n,4,6,5]", "Conv <group = 4> (a, w)", (8, 1, 3, 3), (4, 1, 1)),
    "gemm": ("[n,7]", "Gemm (a, w)", (7, 5), (7,)),
    "gemm_2d": ("[n,7]", "Gemm (a, w)", (7, 5), (1, 7)),
    "gemm_trans_b": ("[n,7]", "Gemm <transB = 1> (a, w)", (5, 7), (7,)),
    "gemm_square": ("[n,7]", "Gemm (a, w)", (7, 7), (7,)),
    "gemm_square_trans_b": ("[n,7]", "Gemm <transB = 1> (a, w)", (7, 7), (7,)),
    "matmul": ("[n,7]", "MatMul (a, w)", (7, 5), (7,)),
    "matmul_over_tokens": ("[n,3,7]", "MatMul (a, w)", (7, 5), (7,)),
    "matmul_over_as_many_tokens": ("[n,7,7]", "MatMul (a, w)", (7, 7), (7,)),
}


@pytest.mark.parametrize("operation", ["Mul (r, c)", "Mul (c, r)", "Div (r, c)"])
@pytest.mark.parametrize("case", FACTORS_IN_FRONT)
def test_factor_per_feature_in_front_of_weights_folds_into_them(case: str, operation: str, tmp_path: Path) -> None:
    source, call, shape, factor = FACTORS_IN_FRONT[case]
    constants = {"w": weights(*shape), "c": factors(*factor)}
    model = graph(f"g (float{source} x) => (float y) {{ r = Relu (x) a = {operation} y = {call} }}", constants)
    found = check(model, tmp_path)
    assert found.on_server == [[call.partition(" ")[0]]]
    assert found.on_node == [["Relu"]]


def test_factor_per_channel_folds_into_every_reader_of_the_product(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,4,6,5] x) => (float y, float z) { a = Div (x, c) b = Conv (a, w) y = Relu (b) "
        "d = Conv <group = 2> (a, v) z = Relu (d) }",
        {"w": weights(3, 4, 3, 3), "v": weights(6, 2, 1, 1), "c": factors(4, 1, 1)},
    )
    assert check(model, tmp_path).server_operators == ["Conv", "Conv"]


def test_input_normalisation_keeps_its_shift_and_folds_its_factor(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,8,8] x) => (float y) { a = Sub (x, mean) b = Div (a, deviation) y = Conv (b, w) }",
        {"w": weights(4, 3, 3, 3), "mean": weights(3, 1, 1), "deviation": np.abs(factors(3, 1, 1))},
    )
    found = check(model, tmp_path)
    assert "Div" not in found.server_operators + found.node_operators
    assert found.server_operators.count("Conv") == len(found.plan.blocks) == 1


NOT_FOLDED = {
    "second_reader": (
        "(float[n,4,6,5] x) => (float y, float z)",
        "r = Relu (x) a = Mul (r, c) y = Conv (a, w) z = Exp (a)",
        (3, 4, 3, 3),
        (4, 1, 1),
    ),
    "result_of_the_model": (
        "(float[n,7] x) => (float y, float a)",
        "r = Relu (x) a = Mul (r, c) y = Gemm (a, w)",
        (7, 5),
        (7,),
    ),
    "rows": ("(float[n,4,6,5] x) => (float y)", "r = Relu (x) a = Mul (r, c) y = Conv (a, w)", (3, 4, 3, 3), (6, 1)),
    "columns": ("(float[n,4,6,5] x) => (float y)", "r = Relu (x) a = Mul (r, c) y = Conv (a, w)", (3, 4, 3, 3), (5,)),
    "columns_as_many_as_channels": (
        "(float[n,4,6,4] x) => (float y)",
        "r = Relu (x) a = Mul (r, c) y = Conv (a, w)",
        (3, 4, 3, 3),
        (4,),
    ),
    "whole_plane": (
        "(float[n,4,6,5] x) => (float y)",
        "r = Relu (x) a = Mul (r, c) y = Conv (a, w)",
        (3, 4, 3, 3),
        (4, 6, 5),
    ),
    "tokens": ("(float[n,7,7] x) => (float y)", "r = Relu (x) a = Mul (r, c) y = MatMul (a, w)", (7, 5), (7, 1)),
    "tokens_and_features": (
        "(float[n,3,7] x) => (float y)",
        "r = Relu (x) a = Mul (r, c) y = MatMul (a, w)",
        (7, 5),
        (3, 7),
    ),
    "rank_of_three": (
        "(float[n,3,7] x) => (float y)",
        "r = Relu (x) a = Mul (r, c) y = MatMul (a, w)",
        (7, 5),
        (1, 1, 7),
    ),
    "left_operand": (
        "(float[n,7,3] x) => (float y)",
        "r = Relu (x) a = Mul (r, c) y = MatMul (w, a)",
        (5, 7),
        (7, 1),
    ),
}


@pytest.mark.parametrize("case", NOT_FOLDED)
def test_factor_that_another_reader_needs_or_that_is_none_of_the_weights_stays(case: str, tmp_path: Path) -> None:
    values, body, shape, factor = NOT_FOLDED[case]
    constants = {"w": weights(*shape), "c": factors(*factor)}
    found = check(graph(f"g {values} {{ {body} }}", constants), tmp_path)
    assert "Mul" in found.server_operators + found.node_operators


BROADCASTS = {
    "channels": ("[n,1,6,5]", "Conv (a, w)", (3, 4, 3, 3), (4, 1, 1)),
    "features": ("[n,1]", "Gemm (a, w)", (7, 5), (7,)),
    "features_of_tokens": ("[n,3,1]", "MatMul (a, w)", (7, 5), (7,)),
}


@pytest.mark.parametrize("case", BROADCASTS)
def test_factor_that_widens_the_activation_stays(case: str, tmp_path: Path) -> None:
    source, call, shape, factor = BROADCASTS[case]
    constants = {"w": weights(*shape), "c": factors(*factor)}
    model = graph(f"g (float{source} x) => (float y) {{ r = Relu (x) a = Mul (r, c) y = {call} }}", constants)
    found = check(model, tmp_path)
    assert "Mul" in found.server_operators + found.node_operators


def test_gemm_that_adds_an_activation_matches_onnxruntime(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,7] x) => (float y) { c = Gemm (x, v) y = Gemm <alpha = 0.5, beta = -2.0> (x, w, c) }",
        {"w": weights(7, 5), "v": weights(7, 5, seed=1)},
    )
    found = check(model, tmp_path)
    assert [sorted(set(block) - {"Mul", "Add"}) for block in found.on_server] == [["Gemm"]]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("following", ["BatchNormalization (a, gain, beta, mean, var)", "Mul (a, f)"])
def test_what_follows_conv_transpose_folds_into_it(group: int, following: str, tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,5,3] x) => (float y) {{ a = ConvTranspose <group = {group}, strides = [2, 1]> (x, w, b) "
        f"y = {following} }}",
        {"w": weights(4, 6 // group, 3, 2), "b": weights(6), "f": weights(6, 1, 1)} | normalisation(6),
    )
    assert check(model, tmp_path).on_server == [["ConvTranspose"]]


@pytest.mark.parametrize("group", [1, 2])
def test_factor_per_channel_in_front_of_conv_transpose_folds_into_it(group: int, tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,5,3] x) => (float y) {{ a = Mul (x, f) y = ConvTranspose <group = {group}> (a, w) }}",
        {"w": weights(4, 6 // group, 3, 2), "f": weights(1, 4, 1, 1)},
    )
    assert check(model, tmp_path).on_server == [["ConvTranspose"]]


def test_scale_and_shift_after_lone_batch_normalization_fold_into_it(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,4,5,3] x) => (float y) { r = Relu (x) a = BatchNormalization (r, gain, beta, mean, var) "
        "m = Mul (a, f) y = Add (m, c) }",
        {"f": weights(4, 1, 1), "c": weights(4, 1, 1)} | normalisation(4),
    )
    found = check(model, tmp_path)
    assert found.on_server == [["BatchNormalization", "Add"]]


NORMALISED = {
    "layer": (
        "[n,6,8]",
        "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) s = Pow (d, two) v = ReduceMean <axes = [-1]> (s) "
        "e = Add (v, epsilon) r = Sqrt (e) q = Div (d, r) g = Mul (q, gain) z = Add (g, shift)",
        (8,),
        "LayerNormalization",
    ),
    "group": (
        "[n,6,4,2]",
        "r = Reshape (x, grouped) i = InstanceNormalization (r, ones, zeros) b = Reshape (i, back) "
        "g = Mul (b, gain) z = Add (g, shift)",
        (6, 1, 1),
        "GroupNormalization",
    ),
}


@pytest.mark.parametrize("case", NORMALISED)
def test_normalisation_that_was_taken_apart_is_one_operator_on_the_node(case: str, tmp_path: Path) -> None:
    shape, body, gain, fused = NORMALISED[case]
    width = 8 if case == "layer" else 2
    model = graph(
        f"g (float{shape} x) => (float y) {{ {body} y = MatMul (z, w) }}",
        {
            "two": np.array(2, np.float32),
            "epsilon": np.array(1e-5, np.float32),
            "gain": weights(*gain),
            "shift": weights(*gain, seed=1),
            "grouped": np.array([0, 3, -1]),
            "back": np.array([-1, 6, 4, 2]),
            "ones": np.ones(3, np.float32),
            "zeros": np.zeros(3, np.float32),
            "w": weights(width, 3),
        },
    )
    found = check(model, tmp_path)
    assert found.node_operators == [fused]
    assert found.on_server == [["MatMul"]]


@pytest.mark.parametrize("call", ["Add (a, b)", "Add (b, a)", "Sub (a, b)"])
def test_factor_folds_through_the_bias_into_weights(call: str, tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,3,7] x) => (float y) {{ a = MatMul (x, w) s = {call} y = Mul (s, f) }}",
        {"w": weights(7, 5), "b": weights(5), "f": weights(5, seed=1)},
    )
    assert [sorted(block) for block in check(model, tmp_path).on_server] == [sorted(["MatMul", call[:3]])]


def test_factor_does_not_fold_through_an_added_activation(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,7] x) => (float y) { a = MatMul (x, w) s = Add (a, x) y = Mul (s, f) }",
        {"w": weights(7, 7), "f": weights(7)},
    )
    assert len(check(model, tmp_path).plan.blocks) == 2


def test_groups_of_half_a_sample_are_left_as_they_are(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,8,4,4] x) => (float y) { r = Reshape (x, halves) i = InstanceNormalization (r, ones, zeros) "
        "b = Reshape (i, back) g = Mul (b, gain) z = Add (g, shift) y = Conv (z, w) }",
        {
            "halves": np.array([-1, 4, 16]),
            "ones": np.ones(4, np.float32),
            "zeros": np.zeros(4, np.float32),
            "back": np.array([-1, 8, 4, 4]),
            "gain": weights(8, 1, 1),
            "shift": weights(8, 1, 1, seed=1),
            "w": weights(2, 8, 3, 3),
        },
    )
    assert "GroupNormalization" not in check(model, tmp_path).node_operators
