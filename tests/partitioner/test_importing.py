"""Symbolic axes, and what folds away once they are fixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from heinfer.cli.main import app
from heinfer.errors import UnsupportedModelError
from partitioner import partition
from partitioner.importing import given_dimensions, import_model
from partitioner.simplification import simplify
from tests.partitioner.examples import check, graph, weights


def sequence_model() -> onnx.ModelProto:
    """Return a model of two inputs with a sequence axis, which gets its sizes from Shape."""
    return graph(
        "g (float[batch,sequence,6] x, float[batch,sequence] m) => (float y) { a = MatMul (x, w)"
        " s = Shape (x) n = Gather (s, zero) t = Gather (s, first) j = Concat <axis = 0> (n, t, two, three)"
        " h = Reshape (a, j) o = Unsqueeze (m, last) p = Unsqueeze (o, last) q = Mul (h, p)"
        " e = ConstantOfShape (s) r = ReduceSum <keepdims = 0> (e, last) v = Unsqueeze (r, last)"
        " d = Unsqueeze (v, last) f = Add (q, d) l = Flatten (f) k = Range (nought, length, step)"
        " i = Cast <to = 1> (k) y = Add (l, i) }",
        {
            "w": weights(6, 6),
            "zero": np.array([0]),
            "first": np.array([1]),
            "last": np.array([-1]),
            "two": np.array([2]),
            "three": np.array([3]),
            "nought": np.array(0),
            "length": np.array(24),
            "step": np.array(1),
        },
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sequence.onnx"
    path.write_bytes(sequence_model().SerializeToString())
    return path


def test_import_with_dimensions_folds_all_that_follows_from_shapes(path: Path) -> None:
    model = import_model(path, {"sequence": 4}).model
    assert [tuple(value.shape.numpy()) for value in model.graph.inputs] == [(1, 4, 6), (1, 4)]
    left = {node.op_type for node in model.graph}
    assert left == {"MatMul", "Reshape", "Unsqueeze", "Mul", "Add", "Flatten"}
    assert tuple(model.graph.outputs[0].shape.numpy()) == (1, 24)


def test_simplified_model_is_left_as_it_is_by_another_simplification(path: Path) -> None:
    model = import_model(path, {"sequence": 4}).model
    before = [node.name for node in model.graph]
    simplify(model)
    assert [node.name for node in model.graph] == before


def test_partition_with_dimensions_gives_what_onnxruntime_gives(path: Path, tmp_path: Path) -> None:
    result = partition(path, tmp_path / "bundle", dimensions={"sequence": 4})
    assert [t.shape for t in result.plan.inputs] == [(4, 6), (4,)]
    assert [t.shape for t in result.plan.outputs] == [(24,)]
    assert given_dimensions(path, {t.name: t.shape for t in result.plan.inputs}) == {"sequence": 4}


def test_import_without_sizes_names_the_dimension_and_the_option(path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        import_model(path)
    assert [o.node for o in caught.value.offences] == ["x", "m"]
    assert str(caught.value).count("1 (sequence) are dynamic; fix them with --dimension sequence=SIZE") == 2


def test_import_with_unknown_dimension_lists_those_there_are(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no input has a dimension named 'tokens'.*: 'sequence'$"):
        import_model(path, {"tokens": 4})


def test_import_refuses_a_size_for_the_batch(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no input has a dimension named 'batch'"):
        import_model(path, {"batch": 4, "sequence": 4})


def test_import_refuses_a_dimension_without_elements(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="expected a size of 1 at least, found 0"):
        import_model(path, {"sequence": 0})


def test_import_refuses_nameless_axes_whatever_the_dimensions(path: Path) -> None:
    model = sequence_model()
    model.graph.input[1].type.tensor_type.shape.dim[1].ClearField("dim_param")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModelError, match=r"axes 1 are dynamic; export with fixed sizes"):
        import_model(path, {"sequence": 4})


def test_command_fixes_dimensions(path: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    arguments = ["partition", str(path), "-o", str(bundle)]
    done = CliRunner().invoke(app, [*arguments, "--dimension", "sequence=3"])
    assert done.exit_code != 0  # Range of 24 elements fits a sequence of 4
    done = CliRunner().invoke(app, [*arguments, "--dimension", "sequence=4"], catch_exceptions=False)
    assert done.exit_code == 0
    assert (bundle / "plan.json").exists()


@pytest.mark.parametrize("option", ["sequence", "=4", "sequence=", "sequence=four", "sequence=-4"])
def test_command_refuses_a_dimension_that_is_not_name_and_size(option: str, path: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["partition", str(path), "-o", str(tmp_path / "b"), "--dimension", option])
    assert done.exit_code == 2
    assert "NAME=SIZE" in done.output


def test_weights_that_are_computed_from_constants_are_folded(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,64] x) => (float y) { t = Transpose (w) h = Mul (t, half) s = Unsqueeze (c, zero)"
        " f = ConstantOfShape (k) u = Add (h, f) a = MatMul (x, u) y = Add (a, s) }",
        {
            "w": weights(150, 64),  # more than onnxscript folds by default
            "half": np.float32(0.5),
            "c": weights(150),
            "zero": np.array([0]),
            "k": np.array([64, 150]),
        },
    )
    found = check(model, tmp_path)
    assert found.on_server == [["MatMul", "Add"]]
    assert found.node_operators == []


def test_second_input_with_a_first_axis_of_one_is_taken_as_a_batch(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,4,6] x, float[1,4] m) => (float y) { a = Unsqueeze (m, last) b = Mul (x, a) y = MatMul (b, w) }",
        {"last": np.array([-1]), "w": weights(6, 5)},
    )
    found = check(model, tmp_path)
    assert [t.shape for t in found.plan.inputs] == [(4, 6), (4,)]


@pytest.mark.parametrize("same", ["Identity (y)", "Pad (y, none)", "Reshape (y, shape)"])
def test_results_that_are_equal_keep_their_names(same: str, tmp_path: Path) -> None:
    constants = {"w": weights(4, 3), "none": np.zeros(4, np.int64), "shape": np.array([0, 3])}
    found = check(
        graph(f"g (float[n,4] x) => (float y, float z) {{ y = MatMul (x, w) z = {same} }}", constants), tmp_path
    )
    assert [t.name for t in found.plan.outputs] == ["y", "z"]
    assert found.on_server == [["MatMul"]]


def test_weights_may_be_larger_than_values_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix of VGG's first dense layer has 103 million elements, its transpose in the model as many again."""
    monkeypatch.setattr("partitioner.shapes.LARGEST_VALUE", 20)
    weighted = {"w": weights(7, 4), "v": weights(7, 2)}
    text = "t = Transpose (w) a = MatMul (x, t) b = Relu (a) y = MatMul (b, v)"
    assert check(graph(f"g (float[n,4] x) => (float y) {{ {text} }}", weighted), tmp_path).plan.rounds == 2
    tiled = text.replace("y = MatMul (b, v)", "c = Expand (b, rows) y = MatMul (c, v)")
    path = tmp_path / "tiled.onnx"
    model = graph(f"g (float[n,4] x) => (float y) {{ {tiled} }}", weighted | {"rows": np.array([3, 7])})
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModelError, match=r"too large.*\n.*c .value.: it has 21 elements"):
        import_model(path)
