"""An ONNX model as a list of layers, so that each peer can say it in its own terms.

    model.onnx -> read_network() -> [Linear | Convolution | Other] -> a peer's own operators

TenSEAL's tutorial network becomes

    Convolution(4x1x7x7, stride 3)   Other(Relu)   Other(Reshape)   Linear(64x256)   Other(Relu)   Linear(10x64)

A layer names the values that it takes and gives, as ONNX does, so that a network may branch (`Add` takes two). Only
what the models of these benchmarks have is read; the rest is refused by name, and is for the peer's result to say.
Needs numpy, onnx and onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper


class NotExpressibleError(Exception):
    """The peer has no operator, or no order of operators, for the model; the message says which."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias.

    Attributes:
        name: The node's output.
        source: The value that it takes.
        weight: float64, shape (outputs, inputs).
        bias: float64, shape (outputs,).
    """

    name: str
    source: str
    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution in two dimensions, one group, no dilation.

    Attributes:
        name: The node's output.
        source: The value that it takes.
        weight: float64, shape (outputs, inputs, height, width).
        bias: float64, shape (outputs,).
        stride: Alike in both directions.
        padding: Zeros, alike on all four sides.
    """

    name: str
    source: str
    weight: np.ndarray
    bias: np.ndarray
    stride: int
    padding: int


@dataclass(frozen=True, slots=True)
class Other:
    """Any other node.

    Attributes:
        name: The node's output.
        kind: ONNX's operator.
        sources: Values that it takes: names of layers, of the input, or of `Network.constants`.
        attributes: ONNX's attributes.
    """

    name: str
    kind: str
    sources: tuple[str, ...]
    attributes: dict[str, Any]


Layer = Linear | Convolution | Other


@dataclass(frozen=True, slots=True)
class Network:
    """Layers in the order of evaluation; `shape` is of one sample."""

    input: str
    output: str
    shape: tuple[int, ...]
    layers: list[Layer]
    constants: dict[str, np.ndarray]

    def first_linear(self) -> int:
        """Return the position of the first layer with weights: what comes before, a client can do in the clear."""
        return next(position for position, layer in enumerate(self.layers) if not isinstance(layer, Other))

    def linear_layers(self) -> list[Linear | Convolution]:
        """Those with weights, in order."""
        return [layer for layer in self.layers if not isinstance(layer, Other)]


def read_network(path: Path) -> Network:
    """Read a model with one input and one output.

    Raises:
        NotExpressibleError: A convolution has groups, dilation, or strides or pads that differ by side.
    """
    graph = onnx.load(path).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    layers: list[Layer] = []
    for node in graph.node:
        attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type == "Constant":
            constants[node.output[0]] = numpy_helper.to_array(attributes["value"])
        elif node.op_type == "Gemm":
            layers.append(_linear(node, attributes, constants))
        elif node.op_type == "Conv":
            layers.append(_convolution(node, attributes, constants))
        else:
            layers.append(Other(node.output[0], node.op_type, tuple(node.input), attributes))
    dimensions = graph.input[0].type.tensor_type.shape.dim
    shape = tuple(dimension.dim_value for dimension in dimensions[1:])
    return Network(graph.input[0].name, graph.output[0].name, shape, layers, constants)


def _linear(node: onnx.NodeProto, attributes: dict[str, Any], constants: dict[str, np.ndarray]) -> Linear:
    weight = constants[node.input[1]].astype(np.float64) * attributes.get("alpha", 1.0)
    if not attributes.get("transB", 0):
        weight = weight.T
    bias = constants[node.input[2]] * attributes.get("beta", 1.0) if len(node.input) > 2 else np.zeros(len(weight))
    return Linear(node.output[0], node.input[0], weight, bias.astype(np.float64))


def _convolution(node: onnx.NodeProto, attributes: dict[str, Any], constants: dict[str, np.ndarray]) -> Convolution:
    weight = constants[node.input[1]].astype(np.float64)
    bias = constants[node.input[2]].astype(np.float64) if len(node.input) > 2 else np.zeros(len(weight))
    strides, pads = set(attributes.get("strides", [1])), set(attributes.get("pads", [0]))
    plain = attributes.get("group", 1) == 1 and set(attributes.get("dilations", [1])) == {1}
    if not plain or len(strides) != 1 or len(pads) != 1 or weight.ndim != 4:
        raise NotExpressibleError(
            f"Conv '{node.output[0]}' has groups, dilation, or strides or pads that differ by side"
        )
    return Convolution(node.output[0], node.input[0], weight, bias, strides.pop(), pads.pop())


def evaluate_other(layer: Other, values: list[np.ndarray]) -> np.ndarray:
    """Evaluate a node without weights in the clear, as a client that holds the activations does.

    Raises:
        NotExpressibleError: The operator is not among those of these benchmarks' models.
    """
    operator = _OPERATORS.get(layer.kind)
    if operator is None:
        raise NotExpressibleError(f"{layer.kind} '{layer.name}' is not known to these scripts")
    return operator(layer.attributes, *values)


def evaluate_prefix(network: Network, x: np.ndarray) -> np.ndarray:
    """Evaluate what comes before the first layer with weights, such as a normalisation of the inputs."""
    values: dict[str, np.ndarray] = {**network.constants, network.input: x}
    for layer in network.layers[: network.first_linear()]:
        values[layer.name] = evaluate_other(layer, [values[source] for source in layer.sources])
    return values[network.layers[network.first_linear()].source]


def evaluate_hybrid(
    network: Network, x: np.ndarray, linear: Callable[[Linear | Convolution, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Evaluate a network with `linear` for the layers with weights, everything else here, exactly."""
    values: dict[str, np.ndarray] = {**network.constants, network.input: x}
    for layer in network.layers:
        if isinstance(layer, Other):
            values[layer.name] = evaluate_other(layer, [values[source] for source in layer.sources])
        else:
            values[layer.name] = linear(layer, values[layer.source])
    return values[network.output]


def unroll(x: np.ndarray, layer: Convolution) -> np.ndarray:
    """Return the windows of images, shape (samples, windows, channels * height * width)."""
    sides = (layer.padding, layer.padding)
    padded = np.pad(x, ((0, 0), (0, 0), sides, sides))
    windows = np.lib.stride_tricks.sliding_window_view(padded, layer.weight.shape[2:], axis=(2, 3))
    windows = windows[:, :, :: layer.stride, :: layer.stride].transpose(0, 2, 3, 1, 4, 5)
    return windows.reshape(len(x), windows.shape[1] * windows.shape[2], -1)


def _max_pool(attributes: dict[str, Any], x: np.ndarray) -> np.ndarray:
    if any(attributes.get("pads", [])) or attributes.get("ceil_mode", 0):
        raise NotExpressibleError("MaxPool with padding is not known to these scripts")
    rows, columns = attributes["strides"]
    windows = np.lib.stride_tricks.sliding_window_view(x, attributes["kernel_shape"], axis=(2, 3))
    return windows[:, :, ::rows, ::columns].max((-2, -1))


def _slice(attributes: dict[str, Any], x: np.ndarray, *arguments: np.ndarray) -> np.ndarray:
    starts, ends, axes, steps = arguments
    parts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        parts[axis] = slice(int(start), int(end), int(step))
    return x[tuple(parts)]


def _pad(attributes: dict[str, Any], x: np.ndarray, pads: np.ndarray) -> np.ndarray:
    return np.pad(x, pads.reshape(2, -1).T)


def _mean(attributes: dict[str, Any], x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return x.mean(tuple(axes.tolist()), keepdims=bool(attributes.get("keepdims", 1)))


_OPERATORS: dict[str, Callable[..., np.ndarray]] = {
    "Add": lambda _, a, b: a + b,
    "Div": lambda _, a, b: a / b,
    "Flatten": lambda _, x: x.reshape(len(x), -1),
    "MaxPool": _max_pool,
    "Mul": lambda _, a, b: a * b,
    "Pad": _pad,
    "ReduceMean": _mean,
    "Relu": lambda _, x: np.maximum(x, 0),
    "Reshape": lambda _, x, shape: x.reshape(len(x), *shape[1:].tolist()),
    "Slice": _slice,
    "Sub": lambda _, a, b: a - b,
}


def with_squares(path: Path) -> onnx.ModelProto:
    """Return the model with x * x in place of every ReLU."""
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Mul"
            node.input.append(node.input[0])
    return model


def evaluate_clear(model: Path | onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Return onnxruntime's outputs, float64."""
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return session.run(None, {name: x})[0].astype(np.float64)
