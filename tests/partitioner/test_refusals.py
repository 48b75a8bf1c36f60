from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from heinfer.errors import HeinferError, PlanError, UnsupportedModelError
from partitioner import partition
from tests.partitioner.examples import graph, weights


def small() -> onnx.ModelProto:
    return graph(
        "g (float[n,6] x) => (float y) { a = Gemm (x, w, c) y = Relu (a) }", {"w": weights(6, 5), "c": weights(5)}
    )


def refusal(model: onnx.ModelProto | bytes, tmp_path: Path, name: str = "example.onnx") -> UnsupportedModelError:
    """Partition, expect a refusal, and check that nothing was written."""
    path = tmp_path / name
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    with pytest.raises(UnsupportedModelError) as caught:
        partition(path, tmp_path / "bundle")
    assert [p.name for p in tmp_path.iterdir()] == [name]
    return caught.value


def test_partition_of_weighted_operators_that_the_server_lacks_lists_them_all(tmp_path: Path) -> None:
    constants = {
        "t": weights(4, 3, 2, 2),
        "lw": weights(1, 16, 6),
        "lr": weights(1, 16, 4),
        "gw": weights(1, 12, 6),
        "gr": weights(1, 12, 4),
    }
    model = graph(
        "g (float[n,3,6,6] x, float[n,8,5,5] o, float[n,2,6] s, int32[n] k) => (float a, float l, float r) {"
        " a = DeformConv (x, t, o) l = LSTM <hidden_size = 4, layout = 1> (s, lw, lr, , k)"
        " r = GRU <hidden_size = 4, layout = 1> (s, gw, gr, , k) }",
        constants,
        opset=19,
    )
    for node, name in zip(model.graph.node, ["bent", "memory", "gates"], strict=True):
        node.name = name
    error = refusal(model, tmp_path)
    assert {o.node: o.operator for o in error.offences} == {"bent": "DeformConv", "memory": "LSTM", "gates": "GRU"}
    assert all(name in str(error) for name in ("bent", "memory", "gates"))


def test_partition_of_unnamed_offender_names_its_output(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,6,6] x, float[n,8,5,5] o) => (float bent) { bent = DeformConv (x, t, o) }",
        {"t": weights(4, 3, 2, 2)},
        opset=19,
    )
    assert [o.node for o in refusal(model, tmp_path).offences] == ["bent"]


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("kernel", [(3, 3), (3,)])
def test_partition_of_convolution_whose_kernel_is_none_of_the_stated_shape_names_both(
    operator: str, kernel: tuple[int, ...], tmp_path: Path
) -> None:
    model = graph(
        f"g (float[n,2,5,5] x) => (float y) {{ y = {operator} <kernel_shape = [2, 2]> (x, w) }}",
        {"w": weights(2, 2, *kernel)},
    )
    for axis in ("n", "c", "h", "w"):  # of onnx's inference, which the file would else lack
        model.graph.output[0].type.tensor_type.shape.dim.add(dim_param=axis)
    del model.graph.output[0].type.tensor_type.shape.dim[:-4]
    (offence,) = refusal(model, tmp_path).offences
    assert offence.operator == operator
    assert str(kernel) in offence.reason
    assert "(2, 2)" in offence.reason


def test_partition_of_transposed_convolution_that_shrinks_its_input_says_so(tmp_path: Path) -> None:
    """onnx's inference leaves out axes from the first on that gets smaller."""
    model = graph(
        "g (float[n,2,5,5] x) => (float y) { y = ConvTranspose <output_shape = [4, 4]> (x, w) }",
        {"w": weights(2, 2, 3, 3)},
    )
    (offence,) = refusal(model, tmp_path).offences
    assert offence.operator == "ConvTranspose"
    assert "output_shape" in offence.reason


def conditional() -> onnx.NodeProto:
    branch = onnx.parser.parse_graph("b () => (float[n,5] o) { o = Relu (a) }")
    return helper.make_node("If", ["flag"], ["y"], name="choice", then_branch=branch, else_branch=branch)


def test_partition_of_control_flow_lists_every_node(tmp_path: Path) -> None:
    model = small()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "flag"))
    model.graph.node[1].CopyFrom(conditional())
    body = onnx.parser.parse_graph(
        "b (int64 i, bool c, float[n,5] v) => (bool k, float[n,5] o) { k = Identity (c) o = Relu (v) }"
    )
    model.graph.node.append(helper.make_node("Loop", ["", "", "y"], ["z"], name="again", body=body))
    assert [o.node for o in refusal(model, tmp_path).offences] == ["choice", "again"]


def test_partition_of_control_flow_inside_a_function_is_refused(tmp_path: Path) -> None:
    model = small()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "flag"))
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.append(
        helper.make_function("local", "Choice", ["a", "flag"], ["y"], [conditional()], [helper.make_opsetid("", 17)])
    )
    model.graph.node[1].CopyFrom(helper.make_node("Choice", ["a", "flag"], ["y"], domain="local"))
    assert [o.operator for o in refusal(model, tmp_path).offences] == ["If"]


def test_partition_of_custom_operators_is_refused_by_domain(tmp_path: Path) -> None:
    model = small()
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    model.graph.node[1].CopyFrom(helper.make_node("Magic", ["a"], ["y"], name="wand", domain="com.example"))
    assert [str(o).split(":")[0] for o in refusal(model, tmp_path).offences] == ["wand (com.example.Magic)"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("[n,k]", "dynamic"),
        ("[n,3,h,w]", "dynamic"),
        ("[4,6]", "batch size fixed at 4"),
    ],
)
def test_partition_of_input_without_usable_batch_axis_names_the_input(shape: str, reason: str, tmp_path: Path) -> None:
    model = graph(
        f"g (float{shape} x, float[n,6] z) => (float y) {{ a = Relu (x) y = Gemm (z, w) }}", {"w": weights(6, 5)}
    )
    error = refusal(model, tmp_path)
    assert [o.node for o in error.offences] == ["x"]
    assert reason in str(error)


MIXING = {
    "softmax over the batch": "y = Softmax <axis = 0> (a)",
    "mean over the batch": "b = ReduceMean <axes = [0], keepdims = 1> (a) y = Sub (a, b)",
    "reversed batch": "y = Slice (a, minus, least, zero, minus)",
    "first sample": "b = Slice (a, zero, plus, zero) y = Sub (a, b)",
    "correlation": "t = Transpose <perm = [1, 0]> (a) b = MatMul (t, a) y = MatMul (a, b)",
    "concatenation": "y = Concat <axis = 0> (a, a)",
}


@pytest.mark.parametrize("case", MIXING)
def test_partition_of_model_that_mixes_samples_is_refused(case: str, tmp_path: Path) -> None:
    constants = {"zero": np.array([0]), "plus": np.array([1]), "minus": np.array([-1]), "least": np.array([-(2**31)])}
    model = graph(
        f"g (float[n,6] x) => (float y) {{ a = Gemm (x, w) {MIXING[case]} }}",
        {"w": weights(6, 5)} | {n: c for n, c in constants.items() if n in MIXING[case]},
    )
    refusal(model, tmp_path)


@pytest.mark.parametrize("call", ["MatMul (x, w)", "Gemm (x, w)"])
def test_partition_of_float64_weights_names_the_type(call: str, tmp_path: Path) -> None:
    model = graph(f"g (double[n,6] x) => (double y) {{ y = {call} }}", {"w": weights(6, 5).astype(np.float64)})
    assert "float64" in str(refusal(model, tmp_path))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("call", ["Conv (x, w, c)", "Conv (x, c, w)"])
def test_partition_of_weights_that_are_not_finite_says_so(call: str, bad: float, tmp_path: Path) -> None:
    kernel, bias = weights(5, 3, 2, 2), weights(5)
    (kernel if call == "Conv (x, w, c)" else bias)[0] = bad
    names = {"w": kernel, "c": bias} if call == "Conv (x, w, c)" else {"c": kernel, "w": bias}
    model = graph(f"g (float[n,3,6,6] x) => (float y) {{ y = {call} }}", names)
    assert "NaN or infinity" in str(refusal(model, tmp_path))


@pytest.mark.parametrize("parameter", ["gain", "beta", "mean", "var"])
def test_partition_of_batch_normalization_that_is_not_finite_is_refused(parameter: str, tmp_path: Path) -> None:
    constants = {name: np.ones(3, np.float32) for name in ("gain", "beta", "mean", "var")}
    constants[parameter][1] = np.nan
    model = graph(
        "g (float[n,3,4,4] x) => (float y) { a = BatchNormalization (x, gain, beta, mean, var) y = Relu (a) }",
        constants,
    )
    assert "NaN or infinity" in str(refusal(model, tmp_path))


@pytest.mark.parametrize("call", ["Mul (x, c)", "Div (x, c)", "Add (x, c)"])
def test_partition_of_constant_tensor_that_is_not_finite_is_refused(call: str, tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,5] x) => (float y) {{ a = {call} b = Relu (a) y = Gemm (b, w) }}",
        {"c": np.array([1, 2, np.nan, 4, 5], np.float32), "w": weights(5, 3)},
    )
    assert "NaN or infinity" in str(refusal(model, tmp_path))


def test_partition_of_model_without_weights_is_refused(tmp_path: Path) -> None:
    assert "learned weights" in str(refusal(graph("g (float[n,6] x) => (float y) { y = Relu (x) }"), tmp_path))


def test_partition_of_model_with_constant_result_is_refused(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,6] x) => (float y, float z) { y = Gemm (x, w) z = Relu (c) }",
        {"w": weights(6, 5), "c": weights(1, 5)},
    )
    assert [o.node for o in refusal(model, tmp_path).offences] == ["z"]


def test_partition_of_batch_normalization_in_training_mode_is_refused(tmp_path: Path) -> None:
    constants = {name: np.ones(3, np.float32) for name in ("gain", "beta", "mean", "var")}
    model = graph(
        "g (float[n,3,4,4] x) => (float y, float m, float v) "
        "{ y, m, v = BatchNormalization <training_mode = 1> (x, gain, beta, mean, var) }",
        constants,
    )
    assert "training mode" in str(refusal(model, tmp_path))


@pytest.mark.parametrize("name", ["example.onnx", "example.json", "example.txt", "example.onnxtxt", "example"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 64, b"\xff" * 64, b"not a model\n", b"\x89PNG\r\n\x1a\n" + bytes(range(256))],
    ids=["empty", "zeros", "ones", "text", "picture"],
)
def test_partition_of_something_that_is_not_onnx_is_refused(content: bytes, name: str, tmp_path: Path) -> None:
    refusal(content, tmp_path, name)


def test_partition_of_scalar_input_says_that_it_has_no_batch_axis(tmp_path: Path) -> None:
    model = small()
    model.graph.input.append(helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, []))
    error = refusal(model, tmp_path)
    assert [o.node for o in error.offences] == ["s"]
    assert "no batch axis" in str(error)


def test_partition_of_every_sampled_prefix_of_a_model_is_refused(tmp_path: Path) -> None:
    content = small().SerializeToString()
    path = tmp_path / "example.onnx"
    for length in range(0, len(content), 3):
        path.write_bytes(content[:length])
        with pytest.raises(UnsupportedModelError):
            partition(path, tmp_path / "bundle")
    assert [p.name for p in tmp_path.iterdir()] == ["example.onnx"]


def test_partition_of_model_with_flipped_bytes_never_fails_without_an_error_of_ours(tmp_path: Path) -> None:
    content = bytearray(small().SerializeToString())
    generator = np.random.default_rng(0)
    path = tmp_path / "example.onnx"
    for position in generator.choice(len(content), 40, replace=False):
        flipped = bytearray(content)
        flipped[position] ^= int(generator.integers(1, 256))
        path.write_bytes(flipped)
        with suppress(HeinferError):
            partition(path, tmp_path / "bundle")


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()], ids=["missing", "folder"])
def test_partition_of_missing_file_or_folder_names_it(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    make(path)
    with pytest.raises(UnsupportedModelError, match=r"model\.onnx"):
        partition(path, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_partition_of_model_without_its_external_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(small(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(UnsupportedModelError, match=r"w\.bin"):
        partition(path, tmp_path / "bundle")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_partition_of_model_with_external_data_keeps_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(small(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    partition(path, tmp_path / "bundle")
    (tmp_path / "w.bin").unlink()
    onnx.checker.check_model(onnx.load_model(tmp_path / "bundle" / "reference" / "model.onnx"), full_check=True)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_partition_into_something_that_is_no_bundle_leaves_it_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "example.onnx"
    path.write_bytes(small().SerializeToString())
    target = tmp_path / "precious"
    precious = target
    if kind == "folder":
        target.mkdir()
        precious = target / "notes.txt"
    precious.write_text("mine")
    with pytest.raises(PlanError, match="no bundle"):
        partition(path, target)
    assert precious.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["example.onnx", "precious"]


def test_partition_over_a_bundle_replaces_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "example.onnx"
    path.write_bytes(small().SerializeToString())
    partition(path, tmp_path / "bundle")
    partition(path, tmp_path / "bundle", reference=False)
    assert not (tmp_path / "bundle" / "reference").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "example.onnx"]


def test_partition_that_is_refused_leaves_the_earlier_bundle_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "example.onnx"
    path.write_bytes(small().SerializeToString())
    partition(path, tmp_path / "bundle")
    before = (tmp_path / "bundle" / "plan.json").read_bytes()
    path.write_bytes(b"")
    with pytest.raises(UnsupportedModelError):
        partition(path, tmp_path / "bundle")
    assert (tmp_path / "bundle" / "plan.json").read_bytes() == before


def test_partition_of_conv_with_computed_bias_says_so(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,2,5,5] x) => (float y) { b = ReduceMean <axes = [0, 2, 3], keepdims = 0> (x) y = Conv (x, w, b) }",
        {"w": weights(2, 2, 3, 3)},
    )
    assert "bias is not constant" in str(refusal(model, tmp_path))
