"""Valid models to begin with, and edits that make them invalid, hostile or merely odd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

T = TypeVar("T")
#: Chooses one of several; hypothesis's choice, so that examples shrink.
Choose = Callable[[Sequence[T]], T]

_GRAPHS: Mapping[str, tuple[int, str, Mapping[str, tuple[int, ...]]]] = {
    "convolutions": (
        17,
        "g (float[n,2,8,8] x) => (float[n,5] y) {"
        " a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, k, c) b = BatchNormalization (a, s, t, m, v) d = Relu (b)"
        " e = MaxPool <kernel_shape = [2,2], strides = [2,2]> (d) f = Flatten (e) y = Gemm <transB = 1> (f, w, u) }",
        {"k": (4, 2, 3, 3), "c": (4,), "s": (4,), "t": (4,), "m": (4,), "v": (4,), "w": (5, 16), "u": (5,)},
    ),
    "attention": (
        18,
        "g (float[n,4,6] x) => (float[n,4,6] y) {"
        " q = MatMul (x, wq) k = MatMul (x, wk) kt = Transpose <perm = [0,2,1]> (k) s = MatMul (q, kt)"
        " p = Softmax <axis = -1> (s) v = MatMul (x, wv) z = MatMul (p, v) r = Add (z, x)"
        " h = LayerNormalization <axis = -1> (r, g, b) l = MatMul (h, wo) y = Add (l, bo) }",
        {"wq": (6, 6), "wk": (6, 6), "wv": (6, 6), "wo": (6, 6), "g": (6,), "b": (6,), "bo": (6,)},
    ),
    "movements": (
        13,
        "g (float[n,3,4,4] x) => (float[n,2] y) {"
        " shape = Constant <value = int64[3] {0, 6, 8}> () a = Reshape (x, shape) b, c = Split <axis = 1> (a, parts)"
        " d = Concat <axis = 2> (b, c) starts = Constant <value = int64[1] {1}> ()"
        " ends = Constant <value = int64[1] {9}> () axes = Constant <value = int64[1] {2}> ()"
        " e = Slice (d, starts, ends, axes) f = ReduceMean <axes = [1], keepdims = 0> (e)"
        " h = MatMul (f, w) i = Mul (h, half) y = Sub (i, u) }",
        {"w": (8, 2), "half": (2,), "u": (2,)},
    ),
    "old pictures": (
        9,
        "g (float[1,1,4,4] x) => (float[1,3] y) {"
        " a = Upsample <mode = \"nearest\"> (x, scales) b = AveragePool <kernel_shape = [2,2]> (a)"
        " c = Conv <dilations = [2,2]> (b, k) d = GlobalAveragePool (c) e = Flatten (d) y = Dropout (e) }",
        {"k": (3, 1, 2, 2), "scales": (4,)},
    ),
    "recurrent": (
        14,
        "g (float[n,3,4] x) => (float[n,2] y) {"
        " t = Transpose <perm = [1,0,2]> (x) a, h, c = LSTM <hidden_size = 3> (t, w, r, b)"
        " axis = Constant <value = int64[1] {0}> () s = Squeeze (h, axis) y = MatMul (s, o) }",
        {"w": (1, 12, 4), "r": (1, 12, 3), "b": (1, 24), "o": (3, 2)},
    ),
}  # fmt: skip


def seed_models() -> dict[str, onnx.ModelProto]:
    """Return the valid models, by name."""
    return {name: _model(name, *graph) for name, graph in _GRAPHS.items()}


def _model(name: str, opset: int, text: str, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    generator = np.random.default_rng(len(name))
    model = helper.make_model(onnx.parser.parse_graph(text), opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    for constant, shape in shapes.items():
        values = np.abs(generator.normal(size=shape)) + 0.1
        if constant == "scales":
            values = np.array([1, 1, 2, 2])
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), constant))
    if name == "movements":
        model.graph.initializer.append(numpy_helper.from_array(np.array([3, 3], np.int64), "parts"))
    onnx.checker.check_model(model)
    return model


#: Numbers that break assumptions: bounds of types, products that overflow, zero, negative ones.
NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    5,
    7,
    64,
    1000,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**40,
    2**62,
    2**63 - 1,
    -2,
    -(2**31),
    -(2**63),
)
_OPERATORS = (
    "Abs", "Add", "ArgMax", "AveragePool", "BatchNormalization", "Cast", "Ceil", "Clip", "Concat", "Constant",
    "ConstantOfShape", "Conv", "ConvTranspose", "CumSum", "DepthToSpace", "DequantizeLinear", "Div", "Dropout",
    "Einsum", "Expand", "EyeLike", "Flatten", "GRU", "Gather", "GatherND", "Gemm", "GlobalAveragePool", "GridSample",
    "GroupNormalization", "Identity", "If", "InstanceNormalization", "LSTM", "LayerNormalization", "Loop", "MatMul",
    "MaxPool", "Mul", "NonZero", "OneHot", "Pad", "QuantizeLinear", "RNN", "Range", "ReduceMean", "ReduceSum", "Relu",
    "Reshape", "Resize", "ScatterND", "Shape", "Size", "Slice", "Softmax", "SpaceToDepth", "Split", "Squeeze", "Sub",
    "Sum", "Tile", "TopK", "Transpose", "Unsqueeze", "Upsample", "Where",
)  # fmt: skip
_LOCATIONS = ("../secret", "/etc/passwd", "example", "", "a\0b", "x" * 300, "..", ".")


def _names(model: onnx.ModelProto) -> list[str]:
    graph = model.graph
    return [
        *(value.name for value in graph.input),
        *(tensor.name for tensor in graph.initializer),
        *(name for node in graph.node for name in node.output),
        "",
        "absent",
    ]


def _rewire(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    node = choose(model.graph.node)
    if node.input:
        node.input[choose(range(len(node.input)))] = choose(_names(model))


def _resize_inputs(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    node = choose(model.graph.node)
    if choose([True, False]) or not node.input:
        node.input.append(choose(_names(model)))
    else:
        del node.input[choose(range(len(node.input)))]


def _rename_output(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    node = choose(model.graph.node)
    if node.output:
        node.output[choose(range(len(node.output)))] = choose(_names(model))


def _change_operator(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    node = choose(model.graph.node)
    node.op_type = choose(_OPERATORS)
    node.domain = choose(["", "", "", "ai.onnx", "com.microsoft", "ai.onnx.ml"])


def _edit_attribute(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return
    node = choose(nodes)
    attribute = choose(node.attribute)
    match choose(["number", "drop", "kind", "double", "rename"]):
        case "number" if attribute.type == AttributeProto.INTS and attribute.ints:
            attribute.ints[choose(range(len(attribute.ints)))] = choose(NUMBERS)
        case "number" if attribute.type == AttributeProto.INTS:
            attribute.ints.append(choose(NUMBERS))
        case "number":
            attribute.i = choose(NUMBERS)
        case "drop":
            node.attribute.remove(attribute)
        case "kind":
            attribute.type = choose([0, 1, 2, 3, 4, 5, 6, 7, 8, 11])
        case "double":
            attribute.ints.extend(list(attribute.ints) or [choose(NUMBERS)])
        case "rename":
            attribute.name = choose(["axis", "axes", "group", "pads", "value", "to", "perm", ""])


def _add_attribute(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    name = choose(["axis", "group", "pads", "strides", "dilations", "perm", "keepdims", "auto_pad", "to", "value",
                   "hidden_size", "direction", "training_mode", "epsilon", "allowzero", "mode"])  # fmt: skip
    value = choose([choose(NUMBERS), [choose(NUMBERS), choose(NUMBERS)], "SAME_UPPER", "bidirectional", float("nan")])
    choose(model.graph.node).attribute.append(helper.make_attribute(name, value))


def _edit_dims(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    tensor = choose(model.graph.initializer)
    match choose(["change", "add", "drop"]):
        case "change" if tensor.dims:
            tensor.dims[choose(range(len(tensor.dims)))] = choose(NUMBERS)
        case "drop" if tensor.dims:
            del tensor.dims[choose(range(len(tensor.dims)))]
        case _:
            tensor.dims.append(choose(NUMBERS))


def _edit_values(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    tensors = [*model.graph.initializer, *(a.t for n in model.graph.node for a in n.attribute if a.HasField("t"))]
    tensor = choose(tensors)
    if tensor.data_type == TensorProto.INT64:
        size = max(1, len(tensor.raw_data) // 8 or len(tensor.int64_data))
        tensor.raw_data = b"".join(int(choose(NUMBERS)).to_bytes(8, "little", signed=True) for _ in range(min(size, 8)))
        del tensor.int64_data[:]
    else:
        value = choose([0.0, float("nan"), float("inf"), 1e38, 1e-45, -1.0])
        tensor.raw_data = np.full(len(tensor.raw_data) // 4, value, "<f4").tobytes()


def _change_type(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    choose(model.graph.initializer).data_type = choose([0, 1, 2, 6, 7, 8, 9, 10, 11, 14, 16, 17, 21, 23, 25, 99])


def _drop(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    graph = model.graph
    what = choose([graph.node, graph.initializer, graph.input, graph.output])
    if what:
        del what[choose(range(len(what)))]


def _double(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    graph = model.graph
    what = choose([graph.node, graph.initializer, graph.input, graph.output])
    if what:
        what.add().CopyFrom(choose(what))


def _edit_input(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    value = choose([*model.graph.input, *model.graph.output])
    dims = value.type.tensor_type.shape.dim
    match choose(["size", "name", "add", "drop", "type", "no shape", "sequence"]):
        case "size" if dims:
            choose(dims).dim_value = choose(NUMBERS)
        case "name" if dims:
            choose(dims).dim_param = choose(["n", "batch", "", "m" * 300])
        case "drop" if dims:
            del dims[choose(range(len(dims)))]
        case "type":
            value.type.tensor_type.elem_type = choose([0, 1, 7, 8, 9, 10, 11, 14, 16, 99])
        case "no shape":
            value.type.tensor_type.ClearField("shape")
        case "sequence":
            value.type.sequence_type.elem_type.tensor_type.elem_type = 1
        case _:
            dims.add().dim_value = choose(NUMBERS)


def _claim_shape(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    """Say something about a value inside that may be wrong."""
    shape = [choose(NUMBERS) for _ in range(choose([0, 1, 2, 4]))]
    model.graph.value_info.append(helper.make_tensor_value_info(choose(_names(model)), choose([1, 7, 11]), shape))


def _change_version(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    version = choose([*range(-1, 30), *NUMBERS])
    if choose([True, False]):
        model.opset_import[0].version = version
    else:
        model.ir_version = version


def _put_outside(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    tensor = choose(model.graph.initializer)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (
        ("location", choose(_LOCATIONS)),
        ("offset", str(choose(NUMBERS))),
        ("length", str(choose(NUMBERS))),
    ):
        if choose([True, True, False]):
            tensor.external_data.add(key=key, value=value)


def _add_metadata(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    value = choose(["", "{", "[]", "null", '{"epsilon": 1e999}', "[" * 5000, "\0", "x" * 10**5])
    model.metadata_props.add(key=choose(["heinfer.card", ""]), value=value)


def _wrap_in_function(model: onnx.ModelProto, choose: Choose[Any]) -> None:
    """Move a node into a function, which perhaps calls itself."""
    node = choose(model.graph.node)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    function = model.functions.add(name="f", domain="local")
    function.input.extend(dict.fromkeys(name for name in node.input if name))
    function.output.extend(node.output)
    function.opset_import.add(version=model.opset_import[0].version)
    function.node.add().CopyFrom(inner)
    if choose([True, False]):
        recursive = function.node.add(op_type="f", domain="local")
        recursive.input.extend(function.input)
        recursive.output.extend(f"{name}.again" for name in node.output)
    inputs = list(function.input)
    node.Clear()
    node.op_type, node.domain = "f", "local"
    node.input.extend(inputs)
    node.output.extend(inner.output)
    model.opset_import.add(domain="local", version=1)


EDITS: tuple[Callable[[onnx.ModelProto, Choose[Any]], None], ...] = (
    _rewire, _resize_inputs, _rename_output, _change_operator, _edit_attribute, _add_attribute, _edit_dims,
    _edit_values, _change_type, _drop, _double, _edit_input, _claim_shape, _change_version, _put_outside, _add_metadata,
    _wrap_in_function,
)  # fmt: skip
