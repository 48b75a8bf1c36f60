from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.partitioner.examples import check, evaluate_residues, graph, partitioned, weights

CONV = "Conv <pads = [1, 1, 1, 1]>"
ints = np.int64

#: Operator on `a` (n, 4, 6, 5), with its constants.
MOVEMENTS: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "flatten": ("Flatten (a)", {}),
    "flatten_axis_2": ("Reshape (a, s)", {"s": np.array([0, 4, -1])}),
    "reshape_minus_one": ("Reshape (a, s)", {"s": np.array([-1, 12, 10])}),
    "reshape_zeros": ("Reshape (a, s)", {"s": np.array([0, 0, -1])}),
    "transpose": ("Transpose <perm = [0, 2, 3, 1]> (a)", {}),
    "pad": ("Pad (a, p)", {"p": np.array([0, 0, 1, 2, 0, 1, 0, 3])}),
    "pad_value": ("Pad (a, p, v)", {"p": np.array([0, 0, 1, 2, 0, 1, 0, 3]), "v": np.float32(0.5)}),
    "pad_negative": ("Pad (a, p)", {"p": np.array([0, 0, -1, 2, 0, 1, 0, -2])}),
    "pad_reflect": ('Pad <mode = "reflect"> (a, p)', {"p": np.array([0, 0, 1, 2, 0, 0, 3, 1])}),
    "pad_edge": ('Pad <mode = "edge"> (a, p)', {"p": np.array([0, 0, 1, 2, 0, 0, 3, 1])}),
    "slice": (
        "Slice (a, b, e, x1, t)",
        {"b": np.array([1, 4]), "e": np.array([4, 0]), "x1": np.array([1, 2]), "t": np.array([2, -1])},
    ),
    "slice_end": ("Slice (a, b, e, x1)", {"b": np.array([-2]), "e": np.array([2**31 - 1]), "x1": np.array([-1])}),
    "concat_itself": ("Concat <axis = 1> (a, a)", {}),
    "identity": ("Identity (a)", {}),
    "dropout": ("Dropout (a)", {}),
    "average_pool": ("AveragePool <kernel_shape = [2, 3]> (a)", {}),
    "average_pool_strides": ("AveragePool <kernel_shape = [2, 2], strides = [2, 3]> (a)", {}),
    "average_pool_pads": ("AveragePool <kernel_shape = [3, 3], pads = [1, 2, 0, 1], strides = [2, 2]> (a)", {}),
    "average_pool_counts_pads": (
        "AveragePool <kernel_shape = [3, 3], pads = [1, 2, 0, 1], strides = [2, 2], count_include_pad = 1> (a)",
        {},
    ),
    "average_pool_ceil": ("AveragePool <kernel_shape = [3, 3], strides = [2, 3], ceil_mode = 1> (a)", {}),
    "average_pool_ceil_counts": (
        "AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1, "
        "count_include_pad = 1> (a)",
        {},
    ),
    "average_pool_same_upper": (
        'AveragePool <kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER"> (a)',
        {},
    ),
    "average_pool_same_lower": (
        'AveragePool <kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_LOWER"> (a)',
        {},
    ),
    "global_average_pool": ("GlobalAveragePool (a)", {}),
    "unsqueeze": ("Unsqueeze (a, o)", {"o": np.array([2, 5])}),
    "expand_to_the_same": ("Expand (a, s)", {"s": np.array([1, 6, 1])}),
    "tile": ("Tile (a, s)", {"s": np.array([1, 2, 1, 3])}),
    "gather": ("Gather <axis = 2> (a, i)", {"i": np.array([3, 0, -1])}),
    "gather_matrix": ("Gather <axis = 1> (a, i)", {"i": np.array([[3, 0], [1, 1]])}),
    "gather_one": ("Gather <axis = 3> (a, i)", {"i": np.array(2)}),
    "depth_to_space": ("DepthToSpace <blocksize = 2> (a)", {}),
    "depth_to_space_crd": ('DepthToSpace <blocksize = 2, mode = "CRD"> (a)', {}),
    "space_to_depth": ("SpaceToDepth <blocksize = 1> (a)", {}),
    "resize_nearest": ("Resize (a, , f)", {"f": np.array([1, 1, 2, 3], np.float32)}),
    "resize_nearest_down": (
        'Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (a, , , z)',
        {"z": np.array([1, 4, 3, 2])},
    ),
    "resize_linear": ('Resize <mode = "linear"> (a, , f)', {"f": np.array([1, 1, 2, 2], np.float32)}),
    "trilu": ("Trilu <upper = 0> (a, o)", {"o": np.array(1)}),
    "reduce_mean": ("ReduceMean <axes = [2, 3]> (a)", {}),
    "reduce_mean_channels": ("ReduceMean <axes = [1], keepdims = 0> (a)", {}),
    "reduce_mean_last": ("ReduceMean <axes = [-1]> (a)", {}),
    "reduce_sum": ("ReduceSum (a, o)", {"o": np.array([1, 3])}),
    "reduce_sum_flat": ("ReduceSum <keepdims = 0> (a, o)", {"o": np.array([3, 2])}),
    "reduce_sum_nothing": ("ReduceSum <noop_with_empty_axes = 1> (a)", {}),
    "cumulative_sum": ("CumSum (a, o)", {"o": np.array(3)}),
    "cumulative_sum_exclusive": ("CumSum <exclusive = 1> (a, o)", {"o": np.array(2)}),
    "cumulative_sum_reverse": ("CumSum <reverse = 1> (a, o)", {"o": np.array(-1)}),
    "cumulative_sum_reverse_exclusive": ("CumSum <reverse = 1, exclusive = 1> (a, o)", {"o": np.array(1)}),
    "negation": ("Neg (a)", {}),
    "mean_of_itself": ("Mean (a, a, a)", {}),
    "sum_with_constant": ("Sum (a, k, a)", {"k": np.linspace(-1, 1, 120, dtype=np.float32).reshape(4, 6, 5)}),
    "where": (
        "Where (m, a, k)",
        {"m": np.arange(30).reshape(6, 5) % 3 == 0, "k": np.linspace(-1, 1, 5, dtype=np.float32)},
    ),
    "where_of_itself": ("Where (m, k, a)", {"m": np.arange(5) % 2 == 0, "k": np.zeros(1, np.float32)}),
    "sum_itself": ("Add (a, a)", {}),
    "difference_itself": ("Sub (a, a)", {}),
}


@pytest.mark.parametrize("case", MOVEMENTS)
def test_free_operator_after_conv_matches_onnxruntime(case: str, tmp_path: Path) -> None:
    call, constants = MOVEMENTS[case]
    model = graph(
        f"g (float[n,3,6,5] x) => (float y) {{ a = {CONV} (x, w, c) y = {call} }}",
        {"w": weights(4, 3, 3, 3), "c": weights(4)} | constants,
    )
    check(model, tmp_path)


@pytest.mark.parametrize("case", MOVEMENTS)
def test_free_operator_between_activation_and_weights_matches_onnxruntime(case: str, tmp_path: Path) -> None:
    call, constants = MOVEMENTS[case]
    sizes = {"flatten": 120, "reshape_minus_one": 10, "reshape_zeros": 30, "flatten_axis_2": 30}
    model = graph(f"g (float[n,4,6,5] x) => (float y) {{ a = Relu (x) y = {call} }}", constants)
    shape = [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim]
    width = sizes.get(case, shape[-1])
    model = graph(
        f"g (float[n,4,6,5] x) => (float y) {{ a = Relu (x) q = {call} y = MatMul (q, w) }}",
        {"w": weights(width, 3)} | constants,
    )
    check(model, tmp_path)


@pytest.mark.parametrize("case", ["transpose", "pad", "pad_reflect", "pad_edge", "slice", "concat_itself"])
def test_movement_in_front_of_conv_matches_onnxruntime(case: str, tmp_path: Path) -> None:
    call, constants = MOVEMENTS[case]
    model = graph(f"g (float[n,4,6,5] a) => (float y) {{ y = {call} }}", constants)
    channels = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    model = graph(
        f"g (float[n,4,6,5] a) => (float y) {{ q = {call} y = Conv (q, w) }}",
        {"w": weights(2, channels, 2, 2)} | constants,
    )
    check(model, tmp_path)


SUMS = {
    "same": ("[n,4,6,5]", "Add (p, q)"),
    "difference": ("[n,4,6,5]", "Sub (p, q)"),
    "sum": ("[n,4,6,5]", "Sum (p, q, p)"),
    "concat": ("[n,2,6,5]", "Concat <axis = 1> (p, q)"),
    "concat_negative_axis": ("[n,4,6,2]", "Concat <axis = -1> (q, p, q)"),
    "broadcast_plane": ("[n,4,1,1]", "Add (p, q)"),
    "broadcast_channel": ("[n,1,6,5]", "Sub (q, p)"),
    "broadcast_both": ("[n,4,1,5]", "Add (p, q)"),
}


@pytest.mark.parametrize("place", ["server", "node", "mixed"])
@pytest.mark.parametrize("case", SUMS)
def test_join_of_two_activations_matches_onnxruntime(case: str, place: str, tmp_path: Path) -> None:
    shape, call = SUMS[case]
    second = [int(d) for d in shape[3:-1].split(",")]
    body = {
        "server": f"p = {CONV} (x, w) q = {CONV} (z, v) r = {call} y = Relu (r)",
        "node": f"a = {CONV} (x, w) b = {CONV} (z, v) p = Relu (a) q = Tanh (b) y = {call}",
        "mixed": f"p = {CONV} (x, w) b = {CONV} (z, v) q = Tanh (b) y = {call}",
    }[place]
    model = graph(
        f"g (float[n,3,6,5] x, float{shape} z) => (float y) {{ {body} }}",
        {"w": weights(4, 3, 3, 3), "v": weights(second[0], second[0], 3, 3, seed=1)},
    )
    found = check(model, tmp_path)
    if case in ("same", "difference", "sum") and place == "server":
        assert len(found.plan.blocks) == 1
        assert len(found.plan.blocks[0].outputs) == 1


@pytest.mark.parametrize("fill", [np.inf, -np.inf])
def test_pad_with_infinity_after_conv_is_left_to_the_node(fill: float, tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,3,6,5] x) => (float y) {{ a = {CONV} (x, w) b = Pad (a, p, v) "
        "c = Pad (b, m) y = MaxPool <kernel_shape = [2, 2]> (c) }",
        {
            "w": weights(4, 3, 3, 3),
            "p": np.array([0, 0, 1, 0, 0, 0, 0, 0]),
            "v": np.float32(fill),
            "m": np.array([0, 0, -2, -2, 0, 0, -1, 0]),
        },
    )
    check(model, tmp_path)


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_copies_of_one_input_in_front_of_weights_keep_the_bound(mode: str, tmp_path: Path) -> None:
    kernel = np.full((1, 1, 3, 3), 100.49 / 32767, np.float32)  # rounds badly at the scale that the centre sets
    kernel[0, 0, 1, 1] = 1
    model = graph(
        f'g (float[n,1,5,5] x) => (float y) {{ q = Pad <mode = "{mode}"> (x, p) y = Conv (q, w) }}',
        {"w": kernel, "p": np.array([0, 0, 1, 1, 0, 0, 1, 1])},
    )
    found = partitioned(model, tmp_path)
    x = np.zeros((25, 1, 5, 5))
    x.reshape(25, 25)[:] = np.eye(25)
    shape = found.plan.blocks[0].inputs[0].shape
    sent = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode=mode) if shape == (1, 7, 7) else x
    (exact,) = found.reference.evaluate_block(0, [sent])
    (got,), (bound,) = evaluate_residues(found, 0, [sent], np.random.default_rng(0))
    assert np.all(np.abs(got - exact) <= bound)


@pytest.mark.parametrize(
    ("call", "constants"),
    [
        ("Squeeze (a, s)", {"s": np.array([1, -1])}),
    ],
)
def test_movement_of_axes_of_one_matches_onnxruntime(
    call: str, constants: dict[str, np.ndarray], tmp_path: Path
) -> None:
    model = graph(
        f"g (float[n,3,6,5] x) => (float y) {{ a = Conv (x, w, c) y = {call} }}",
        {"w": weights(1, 3, 3, 5), "c": weights(1)} | constants,
    )
    check(model, tmp_path)


POOLS = {
    "line": ("[n,4,12]", "AveragePool <kernel_shape = [3], strides = [2], pads = [1, 0]> (a)"),
    "line_ceil": ("[n,4,12]", "AveragePool <kernel_shape = [3], strides = [2], ceil_mode = 1> (a)"),
    "volume": ("[n,2,4,5,6]", "AveragePool <kernel_shape = [2, 3, 2], strides = [1, 2, 3]> (a)"),
    "volume_pads": (
        "[n,2,4,5,6]",
        "AveragePool <kernel_shape = [2, 3, 2], pads = [1, 1, 0, 0, 1, 1], strides = [2, 1, 1]> (a)",
    ),
    "volume_counts": (
        "[n,2,4,5,6]",
        "AveragePool <kernel_shape = [3, 3, 3], pads = [1, 1, 1, 1, 1, 1], count_include_pad = 1> (a)",
    ),
    "volume_global": ("[n,2,4,5,6]", "GlobalAveragePool (a)"),
    "line_global": ("[n,2,7]", "GlobalAveragePool (a)"),
}


@pytest.mark.parametrize("case", POOLS)
def test_pool_over_lines_and_volumes_matches_onnxruntime(case: str, tmp_path: Path) -> None:
    shape, call = POOLS[case]
    sizes = [int(d) for d in shape[3:-1].split(",")]
    rank = len(sizes) - 1
    model = graph(
        f"g (float{shape} x) => (float y) {{ a = Conv <pads = {[0] * rank + [1] * rank}> (x, w) y = {call} }}",
        {"w": weights(sizes[0], sizes[0], *([2] * rank))},
    )
    found = check(model, tmp_path)
    assert "AveragePool" in call
    assert found.on_node == [], "pools after weights cross as fewer values"


def test_interpolating_resize_runs_on_node(tmp_path: Path) -> None:
    model = graph(
        'g (float[n,3,4,4] x) => (float y) { a = Conv (x, w) y = Resize <mode = "linear"> (a, , f) }',
        {"w": weights(2, 3, 3, 3), "f": np.array([1, 1, 2, 2], np.float32)},
    )
    found = check(model, tmp_path)
    assert found.node_operators == ["Resize"]


def test_embedding_of_token_ids_runs_on_node(tmp_path: Path) -> None:
    model = graph(
        "g (int64[n,5] ids) => (float y) { a = Gather (table, ids) y = MatMul (a, w) }",
        {"table": weights(11, 6), "w": weights(6, 3)},
    )
    path = tmp_path / "example.onnx"
    path.write_bytes(model.SerializeToString())
    found = partitioned(model, tmp_path)
    assert found.on_node == [["Gather"]]
    assert found.on_server == [["MatMul"]]
