"""Models that are wrong in a way that onnx's checker lets pass; all were found by tests/fuzz, or might have been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from heinfer.errors import UnsupportedModelError
from heinfer.ring import RingParameters
from partitioner.importing import import_model
from partitioner.misfits import blamed
from partitioner.pipeline import prepare
from partitioner.single_operator import run_node
from partitioner.tensors import check_tensors
from tests.partitioner.examples import graph, weights

Edit = Callable[[onnx.ModelProto], object]


def convolution(opset: int = 17) -> onnx.ModelProto:
    return graph(
        "g (float[n,4,6,6] x) => (float y) { a = Conv <pads = [1,1,1,1]> (x, w, b) y = Relu (a) }",
        {"w": weights(4, 4, 3, 3), "b": weights(4)},
        opset=opset,
    )


def recurrent() -> onnx.ModelProto:
    return graph(
        "g (float[n,5,4] x) => (float y) { y, h = RNN <hidden_size = 3, layout = 1> (x, w, r, b) }",
        {"w": weights(1, 3, 4), "r": weights(1, 3, 3), "b": weights(1, 6)},
    )


def refusal(model: onnx.ModelProto, folder: Path) -> str:
    """Place a model's operators, expect a refusal; return its text."""
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModelError) as caught:
        prepare(folder / "model.onnx", RingParameters.default())
    return str(caught.value)


def put_outside(model: onnx.ModelProto, **extent: object) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in extent.items():
        tensor.external_data.add(key=key, value=str(value))


@pytest.mark.parametrize(
    "extent",
    [
        {"location": "../secret"},
        {"location": "/etc/hostname"},
        {"location": "x" * 300},
        {"location": "model.onnx", "offset": -2},
        {"location": "model.onnx", "length": -1},
        {"location": "model.onnx", "offset": 2**40},
        {"location": "model.onnx", "length": 2**62},
    ],
)
def test_constant_in_another_file_that_cant_be_read_is_refused(extent: dict[str, object], tmp_path: Path) -> None:
    model = convolution()
    put_outside(model, **extent)
    assert "is not an ONNX model, or it is truncated" in refusal(model, tmp_path)


def test_constant_is_never_read_from_outside_the_models_folder(tmp_path: Path) -> None:
    """Weights go to the server: a model must not be able to name somebody's file as its weights."""
    size = 4 * 4 * 3 * 3 * 4
    (tmp_path / "secret").write_bytes(bytes(size))
    folder = tmp_path / "model"
    folder.mkdir()
    for location in ("../secret", str(tmp_path / "secret")):
        model = convolution()
        put_outside(model, location=location, offset=0, length=size)
        refusal(model, folder)
    (folder / "link").symlink_to(tmp_path / "secret")
    model = convolution()
    put_outside(model, location="link", offset=0, length=size)
    refusal(model, folder)


CONSTANTS: dict[str, tuple[Edit, str]] = {
    "too little data": (lambda t: t.dims.append(2), "takes 1152 bytes, found 576"),
    "too much data": (lambda t: t.dims.pop(), "takes 192 bytes, found 576"),
    "half an element": (lambda t: setattr(t, "raw_data", t.raw_data[:-2]), "found 574"),
    "a declared size that nobody has": (lambda t: t.dims.append(2**62), "takes"),
    "a negative size": (lambda t: t.dims.append(-1), "negative size"),
    "no type": (lambda t: setattr(t, "data_type", 0), "element type is not given"),
    "a type that does not exist": (lambda t: setattr(t, "data_type", 99), "element type 99 does not exist"),
    "raw strings": (lambda t: setattr(t, "data_type", TensorProto.STRING), "strings can't be raw data"),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_constant_that_can_be_no_array_is_refused_by_name(case: str, tmp_path: Path) -> None:
    model = convolution()
    edit, reason = CONSTANTS[case]
    edit(model.graph.initializer[0])
    said = refusal(model, tmp_path)
    assert reason in said
    assert "  - w (constant)" in said


def test_all_malformed_constants_are_listed_those_of_attributes_and_functions_too() -> None:
    model = convolution()
    bad = helper.make_tensor("", TensorProto.FLOAT, [1], [1.0])
    bad.dims[0] = 3
    model.graph.node.append(helper.make_node("Constant", [], ["k"], name="inside", value=bad))
    function = model.functions.add(name="f", domain="local")
    function.node.append(helper.make_node("Constant", [], ["k"], name="deeper", value=bad))
    model.graph.initializer[1].dims[0] = 5
    assert [offence.node for offence in check_tensors(model)] == ["b", "inside.value", "deeper.value"]


def test_constants_of_every_type_that_are_well_formed_pass() -> None:
    model = convolution()
    for kind in ("float16", "float64", "int8", "uint16", "int64", "bool"):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), kind), kind))
    for kind in (TensorProto.INT4, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.STRING):
        values = [b"a", b"b", b"c"] if kind == TensorProto.STRING else [1, 2, 3]
        model.graph.initializer.append(helper.make_tensor(f"kind {kind}", kind, [3], values))
    raw = ir.serde.serialize_tensor(ir.tensor(np.ones(3), dtype=ir.DataType.DOUBLE, name="raw"))
    model.graph.initializer.extend([raw, TensorProto(name="empty", data_type=1, dims=[0], raw_data=b"")])
    packed = TensorProto(name="packed", data_type=TensorProto.INT4, dims=[3], raw_data=b"\1\2")
    model.graph.initializer.append(packed)
    assert check_tensors(model) == []


def edited(model: onnx.ModelProto, edit: Edit) -> onnx.ModelProto:
    edit(model)
    return model


def _cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def _claim(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = 99


def _replace(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def _input_size(model: onnx.ModelProto, axis: int, size: int) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = size


GRAPHS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "a cycle": (lambda: edited(convolution(), _cycle), ""),
    "a claimed type that does not exist": (lambda: edited(convolution(13), _claim), ""),
    "bias of another size": (lambda: edited(convolution(), lambda m: _replace(m, "b", weights(3))), ""),
    "groups that don't divide": (
        lambda: edited(convolution(), lambda m: m.graph.node[0].attribute.append(helper.make_attribute("group", 3))),
        "",
    ),
    "an integer where floats are needed": (
        lambda: edited(convolution(), lambda m: _replace(m, "w", np.ones((4, 4, 3, 3), np.int64))),
        "",
    ),
    "an enormous input": (lambda: edited(convolution(), lambda m: _input_size(m, 2, 2**40)), "elements"),
    "a value that becomes enormous": (
        lambda: graph(
            "g (float[n,2,4] x) => (float y) { p = Constant <value = int64[6] {0,0,0,0,0,1099511627776}> ()"
            " a = Pad (x, p) b = MatMul (x, w) s = ReduceSum <keepdims = 0> (a) y = Add (b, s) }",
            {"w": weights(4, 3)},
        ),
        "too large",
    ),
    "recurrence without axes": (lambda: edited(recurrent(), lambda m: _replace(m, "r", weights(3, 3))), "three axes"),
    "recurrence of another size": (lambda: edited(recurrent(), lambda m: _replace(m, "r", weights(1, 4, 3))), "shape"),
    "recurrent bias of another size": (lambda: edited(recurrent(), lambda m: _replace(m, "b", weights(1, 5))), "shape"),
    "a million time steps": (lambda: edited(recurrent(), lambda m: _input_size(m, 1, 10**6)), ""),
    "parts that overflow": (
        lambda: graph(
            "g (float[n,4] x) => (float y) { s = Constant <value = int64[2] {9223372036854775807, 2}> ()"
            " a, b = Split <axis = 1> (x, s) y = MatMul (a, w) }",
            {"w": weights(2, 3)},
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_graph_that_does_not_fit_together_is_refused(case: str, tmp_path: Path) -> None:
    make, reason = GRAPHS[case]
    try:
        model = make()
    except onnx.shape_inference.InferenceError:
        pytest.fail("the example has to be one that onnx builds")
    assert reason in refusal(model, tmp_path)


def test_valid_models_of_these_kinds_are_placed(tmp_path: Path) -> None:
    """What the cases above are edited from."""
    for model in (convolution(), convolution(13)):
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        assert prepare(tmp_path / "model.onnx", RingParameters.default()).blocks
        assert import_model(tmp_path / "model.onnx").results == ("y",)


def test_blame_names_the_node_and_lets_other_errors_pass() -> None:
    node = ir.Node("", "Conv", [], name="first")
    for kind in (ValueError, IndexError, OverflowError, TypeError, KeyError):
        with (
            pytest.raises(UnsupportedModelError, match=r"first \(Conv\): its inputs and attributes don't") as caught,
            blamed(node),
        ):
            raise kind("a")
        assert isinstance(caught.value.__cause__, kind)
    for kind in (AssertionError, MemoryError):
        with pytest.raises(kind), blamed(node):
            raise kind


def test_single_operator_that_onnxruntime_refuses_is_named() -> None:
    x = ir.Value(name="x")
    attributes = [ir.AttrInt64s("kernel_shape", [5, 5])]
    node = ir.Node("", "AveragePool", [x], attributes, name="pool", outputs=[ir.Value(name="y")])
    ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21})
    with pytest.raises(UnsupportedModelError, match=r"pool \(AveragePool\): onnxruntime refuses it"):
        run_node(node, {"x": np.ones((1, 1, 2, 2), np.float32)})


@pytest.mark.parametrize("inputs", [["x", "x"], ["x", "x", "x"]])
def test_call_of_a_local_function_with_too_many_inputs_is_refused(inputs: list[str], tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18, "local" : 1]>
        g (float[n,4] x) => (float[n,4] y) { y = local.f (x) }
        <domain: "local", opset_import: ["" : 18]> f (a) => (b) { b = Relu (a) }"""
    )
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert import_model(tmp_path / "model.onnx").results == ("y",)
    model.graph.node[0].input[:] = inputs
    assert "local functions" in refusal(model, tmp_path)
