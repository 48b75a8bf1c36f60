from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.partitioner.examples import check, graph, weights

CONV = "Conv <pads = [1, 1, 1, 1]>"
SQUARE = {"w": weights(4, 4, 3, 3), "v": weights(4, 4, 3, 3, seed=1) * 5}


def test_global_average_pooling_after_relu_runs_on_node(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) b = Relu (a) c = GlobalAveragePool (b) "
        "d = Flatten (c) y = Gemm (d, m) }",
        SQUARE | {"m": weights(4, 3)},
    )
    found = check(model, tmp_path)
    assert [block.input_rows for block in found.plan.blocks] == [144, 4]
    assert "GlobalAveragePool" in found.node_operators


@pytest.mark.parametrize("pool", ["AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (a)", "GlobalAveragePool (a)"])
def test_average_pooling_after_conv_runs_on_server(pool: str, tmp_path: Path) -> None:
    model = graph(f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) b = {pool} y = Relu (b) }}", SQUARE)
    found = check(model, tmp_path)
    assert found.on_server == [["Conv", pool.split()[0]]]


def test_sum_of_two_branches_answers_once(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) b = {CONV} (x, v) c = Add (a, b) y = Relu (c) }}",
        SQUARE,
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Conv", "Conv", "Add"]]
    assert len(found.plan.blocks[0].inputs) == len(found.plan.blocks[0].outputs) == 1


def test_residual_block_with_projection_is_one_block_per_sum(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) b = Relu (a) c = {CONV} (b, v) "
        "s = Conv (x, p) d = Add (c, s) y = Relu (d) }",
        SQUARE | {"p": weights(4, 4, 1, 1)},
    )
    found = check(model, tmp_path)
    assert len(found.rounds) == 2
    joined = next(block for block in found.plan.blocks if "Add" in block.operators[-1])
    assert len(joined.outputs) == 1


def test_residual_block_with_identity_adds_on_node(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) b = Relu (a) c = {CONV} (b, v) d = Add (c, "
        f"b) y = Relu (d) }}",
        SQUARE,
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Conv"], ["Conv"]]


def test_preactivation_residual_is_no_cyclic_block(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] i) => (float y) {{ x = {CONV} (i, w) a = Relu (x) b = {CONV} (a, v) y = Add (x, b) }}",
        SQUARE,
    )
    found = check(model, tmp_path)
    assert len(found.plan.blocks) == len(found.rounds) == 2


def test_chain_of_preactivation_residuals_is_no_cyclic_block(tmp_path: Path) -> None:
    body = "".join(f"a{i} = Relu (x{i}) b{i} = {CONV} (a{i}, v) x{i + 1} = Add (x{i}, b{i}) " for i in range(3))
    model = graph(f"g (float[n,4,6,6] i) => (float x3) {{ x0 = {CONV} (i, w) {body} }}", SQUARE)
    assert len(check(model, tmp_path).rounds) == 4


def test_two_weighted_operators_in_a_row_are_two_rounds(tmp_path: Path) -> None:
    model = graph(f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) y = {CONV} (a, v) }}", SQUARE)
    found = check(model, tmp_path)
    assert found.rounds == [(0,), (1,)]
    assert found.on_node == []


def test_two_convs_of_one_value_share_an_upload(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float y, float z) {{ a = {CONV} (x, w) b = {CONV} (x, v) y = Relu (a) z = "
        f"Tanh (b) }}",
        SQUARE,
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Conv", "Conv"]]
    assert len(found.plan.blocks[0].inputs) == 1


def test_independent_branches_share_a_round(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x, float[n,4,6,6] z) => (float y) {{ a = {CONV} (x, w) b = {CONV} (z, v) "
        "c = Relu (a) d = Tanh (b) y = Mul (c, d) }",
        SQUARE,
    )
    assert check(model, tmp_path).rounds == [(0, 1)]


def test_branches_whose_scales_never_agree_are_added_on_node(tmp_path: Path) -> None:
    pool = "AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) b = {pool} (a) c = {CONV} (x, v) d = Add (b, "
        f"c) y = Relu (d) }}",
        SQUARE,
    )
    found = check(model, tmp_path)
    assert "Add" in found.node_operators


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_branches_of_different_magnitude_keep_their_bound(size: float, tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) b = {CONV} (x, v) y = Add (a, b) }}",
        {"w": SQUARE["w"], "v": SQUARE["v"] * np.float32(size)},
    )
    check(model, tmp_path)


def test_small_weights_that_are_scaled_up_before_a_sum_are_not_lost(tmp_path: Path) -> None:
    pool = "AveragePool <kernel_shape = [1, 1]>"
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ a = {CONV} (x, w) q = {pool} (a) b = Mul (q, k) "
        f"c = {CONV} (x, v) y = Add (b, c) }}",
        {"w": SQUARE["w"] * np.float32(1e-7), "v": SQUARE["v"], "k": np.float32(1e7)},
    )
    found = check(model, tmp_path)
    # A weight of 1 that rounds to 0 would show as a bound of at least 0.5.
    assert all(block.unit_bound < 0.5 for block in found.plan.blocks)


def test_chained_averages_stay_in_one_block(tmp_path: Path) -> None:
    pool = "AveragePool <kernel_shape = [2, 2], strides = [2, 2]>"
    model = graph(f"g (float[n,4,8,8] x) => (float y) {{ a = {CONV} (x, w) b = {pool} (a) y = {pool} (b) }}", SQUARE)
    assert check(model, tmp_path).on_server == [["Conv", "AveragePool", "AveragePool"]]


def test_results_that_are_also_read_inside_come_back(tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float a, float b, float y) {{ a = {CONV} (x, w) b = Relu (a) c = {CONV} (b, v) "
        "y = Add (c, a) }",
        SQUARE,
    )
    check(model, tmp_path)


def test_input_that_is_a_result_matches_onnxruntime(tmp_path: Path) -> None:
    model = graph(f"g (float[n,4,6,6] x) => (float y, float z) {{ y = {CONV} (x, w) z = Identity (x) }}", SQUARE)
    check(model, tmp_path)


NODE_OPERATORS = {
    "softmax": "y = Softmax <axis = 1> (a)",
    "layer_normalization": "y = LayerNormalization (a, gain)",
    "sigmoid": "y = Sigmoid (a)",
    "gelu": "h = Mul (a, half) i = Div (a, root) j = Erf (i) k = Add (j, one) y = Mul (h, k)",
    "clip": "y = Clip (a, zero, six)",
    "leaky": "y = LeakyRelu <alpha = 0.1> (a)",
    "product": "y = Mul (a, a)",
    "reduce": "y = ReduceMax <axes = [1], keepdims = 0> (a)",
    "argmax": "y = ArgMax <axis = 1, keepdims = 0> (a)",
    "topk": "y, z = TopK <axis = 1> (a, two)",
    "normalization": "y = LpNormalization <axis = 1> (a)",
    "cast": "c = Cast <to = 11> (a) d = Abs (c) e = Sqrt (d) y = Cast <to = 1> (e)",
    "where": "c = Greater (a, zero) y = Where (c, a, zero)",
}


@pytest.mark.parametrize("case", NODE_OPERATORS)
def test_operator_without_weights_runs_on_node(case: str, tmp_path: Path) -> None:
    constants = {
        "half": np.float32(0.5),
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "zero": np.float32(0),
        "six": np.float32(0.6),
        "gain": weights(6),
        "two": np.array([2]),
    }
    body = NODE_OPERATORS[case]
    used = {
        n: c for n, c in constants.items() if n in body.replace("(", " ").replace(",", " ").replace(")", " ").split()
    }
    model = graph(
        f"g (float[n,7] x) => ({'int64' if case == 'argmax' else 'float'} y) {{ a = Gemm (x, w) {body} }}",
        {"w": weights(7, 6)} | used,
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Gemm"]]
    assert found.on_node


def test_layer_normalization_with_gain_between_matmuls_matches_onnxruntime(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,8] x) => (float y) { a = MatMul (x, w) b = LayerNormalization (a, g1, g2) c = MatMul (b, v) "
        "d = Softmax (c) y = MatMul (d, w) }",
        {"w": weights(8, 8), "v": weights(8, 8, seed=2), "g1": weights(8), "g2": weights(8, seed=1)},
    )
    assert len(check(model, tmp_path).rounds) == 3


def test_attention_matches_onnxruntime(tmp_path: Path) -> None:
    text = "g (float[n,3,8] x) => (float y) { " + " ".join(
        [
            *(f"{p} = MatMul (x, w{p}) {p}r = Reshape ({p}, r) {p}h = Transpose <perm = [0, 2, {o}]> ({p}r)"
              for p, o in (("q", "1, 3"), ("v", "1, 3"))),
            "k = MatMul (x, wk) kr = Reshape (k, r) kh = Transpose <perm = [0, 2, 3, 1]> (kr)",
            "e = MatMul (qh, kh) f = Mul (e, root) p = Softmax (f) o = MatMul (p, vh)",
            "t = Transpose <perm = [0, 2, 1, 3]> (o) u = Reshape (t, m) y = MatMul (u, wo) }",
        ]
    )  # fmt: skip
    model = graph(
        text,
        {f"w{p}": weights(8, 8, seed=i) for i, p in enumerate("qkvo")}
        | {"r": np.array([0, 3, 2, 4]), "m": np.array([0, 3, 8]), "root": np.float32(0.5)},
    )
    found = check(model, tmp_path)
    assert len(found.rounds) == 2
    assert len(found.plan.blocks[0].inputs) == 1


@pytest.mark.parametrize("opset", [7, 11, 13, 17, 21, 22, 23, onnx.defs.onnx_opset_version()])
def test_opset_versions_match_onnxruntime(opset: int, tmp_path: Path) -> None:
    pad = "Pad <pads = [0, 0, 1, 1, 0, 0, 1, 1]> (x)" if opset < 11 else "Pad (x, p)"
    drop = "Dropout <ratio = 0.5> (f)" if opset < 12 else "Dropout (f)"
    model = graph(
        f"g (float[n,3,6,6] x) => (float y) {{ q = {pad} a = Conv (q, w, b) c = BatchNormalization (a, g, h, m, s) "
        f"d = Relu (c) e = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d) "
        f"f = Flatten (e) k = {drop} y = Gemm (k, v, u) }}",
        {"w": weights(4, 3, 3, 3), "b": weights(4), "v": weights(36, 5), "u": weights(5)}
        | {"g": weights(4), "h": weights(4), "m": weights(4), "s": np.abs(weights(4)) + 1}
        | ({} if opset < 11 else {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
        opset=opset,
        ir=3 if opset == 7 else {28: 14}.get(opset, 8 if opset < 21 else 10),
    )
    assert check(model, tmp_path).on_server[-1][-1:] == ["Gemm"]


@pytest.mark.parametrize("target", [[1, 54], [1, -1], [0, -1], [-1, 54]])
def test_batch_fixed_at_one_with_reshape_constants_matches_onnxruntime(target: list[int], tmp_path: Path) -> None:
    model = graph(
        "g (float[1,3,6,6] x) => (float y) { a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w) b = Relu (a) "
        "c = Reshape (b, s) d = MatMul (c, v) y = Add (d, u) }",
        {"w": weights(6, 3, 3, 3), "s": np.array(target), "v": weights(54, 5), "u": weights(1, 5)},
    )
    check(model, tmp_path)


def test_reshape_to_a_computed_shape_matches_onnxruntime(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,4,4] x) => (float y) { a = Conv (x, w) s = Shape (a) n0 = Gather (s, zero) "
        "n1 = Unsqueeze (n0, axes) t = Concat <axis = 0> (n1, rest) b = Reshape (a, t) y = MatMul (b, v) }",
        {
            "w": weights(6, 3, 3, 3),
            "zero": np.array(0),
            "axes": np.array([0]),
            "rest": np.array([-1]),
            "v": weights(24, 5),
        },
    )
    check(model, tmp_path)


def test_several_inputs_of_different_types_match_onnxruntime(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,6] x, float[n,3,6] z, int64[n,1] i) => (float y) { a = Gemm (x, w) b = MatMul (z, w) "
        "c = ReduceSum <keepdims = 0> (b, axes) d = Cast <to = 1> (i) e = Mul (c, d) y = Add (a, e) }",
        {"w": weights(6, 5), "axes": np.array([1])},
    )
    check(model, tmp_path)


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    model = graph("g (float[n,6] x) => (float y) { a = Gemm (x, w) y = Relu (a) }", {"w": weights(6, 5)})
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    model.functions.append(
        onnx.helper.make_function(
            "local", "Twice", ["p"], ["q"], [onnx.helper.make_node("Add", ["p", "p"], ["q"])],
            [onnx.helper.make_opsetid("", 17)],
        )
    )  # fmt: skip
    model.graph.node[1].CopyFrom(onnx.helper.make_node("Twice", ["a"], ["y"], domain="local"))
    check(model, tmp_path)


def test_movement_that_makes_a_result_stays_off_the_server_in_front_of_weights(tmp_path: Path) -> None:
    """An upload would be smaller without the padding; but nobody would make the result then."""
    model = graph(
        "g (float[n,1,2,2] x) => (float p, float y) { p = Pad (x, pads) y = Conv (p, w) }",
        {"pads": np.array([0, 0, 3, 3, 0, 0, 3, 3], np.int64), "w": weights(2, 1, 3, 3)},
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Conv"]]
    assert "Pad" in found.node_operators
