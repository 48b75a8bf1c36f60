"""How composite operators, those of the node, and products with the batch elsewhere are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from tests.coverage.graph_sketch import Sketch, Value, any_axis, integers
from tests.coverage.random_products import bias, partner, window

_MOST_STEPS = 3


def split(sketch: Sketch, x: Value) -> Value:
    """Split into given or equal parts; a part, the others are results or read by nothing."""
    axis = any_axis(sketch, x)
    size = x.full[axis]
    if size < 2:
        return sketch.node("Split", [x, integers(1)], axis=axis)
    if size % 2 == 0 and sketch.boolean():
        attributes = {"num_outputs": 2} if sketch.opset >= 18 else {}
        return sketch.node("Split", [x], outputs=2, output=sketch.integer(0, 1), axis=axis, **attributes)
    first = sketch.integer(1, size - 1)
    return sketch.node("Split", [x, integers(first, size - first)], outputs=2, output=sketch.integer(0, 1), axis=axis)


def recurrent(sketch: Sketch, x: Value, operator: str) -> Value:
    """LSTM, GRU or RNN over an activation (time, features) of every sample.

    Its biases keep results near 1: onnxruntime's kernels have an absolute error, which exceeds what verification grants
    where all results are tiny.
    """
    if x.shape[0] > _MOST_STEPS:
        x = sketch.node("Slice", [x, integers(0), integers(_MOST_STEPS), integers(1)])
    gates, size = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator], sketch.integer(1, 3)
    direction = sketch.one_of("forward", "reverse", "bidirectional")
    both = 2 if direction == "bidirectional" else 1
    source = sketch.normal(x)
    features, generator = x.shape[1], sketch.generator
    operands = [
        (generator.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for shape in ((both, gates * size, features), (both, gates * size, size), (both, 2 * gates * size))
    ]
    sequence = sketch.node("Transpose", [source], perm=[1, 0, 2])
    attributes = {"linear_before_reset": sketch.integer(0, 1)} if operator == "GRU" else {}
    last = sketch.boolean()
    made = sketch.node(
        operator, [sequence, *operands], 0.5, outputs=2, output=int(last),
        hidden_size=size, direction=direction, **attributes,
    )  # fmt: skip
    return sketch.node("Transpose", [made], perm=[1, 0, 2] if last else [2, 0, 1, 3])


def quantised(sketch: Sketch, x: Value, operator: str) -> Value:
    """A quantised product or convolution; its result is one of the model, as rounding may go either way."""
    source = sketch.normal(x)
    input_scale, output_scale = np.array(0.0213, np.float32), np.array(0.0371, np.float32)
    zero, integer_zero = np.array(119, np.uint8), np.array(0, np.int8)
    outputs, channels = (
        sketch.integer(1, 3),
        x.shape[-1] if operator in ("MatMulInteger", "QLinearMatMul") else x.shape[0],
    )
    shape = (
        (channels, outputs) if "MatMul" in operator else (outputs, channels, *(min(2, size) for size in x.shape[1:]))
    )
    integer_weights = sketch.generator.integers(-40, 41, shape).astype(np.int8)
    weight_scale = np.array(0.0117, np.float32)
    q = sketch.node("QuantizeLinear", [source, input_scale, zero])
    sketch.step = max(sketch.step, 2 * float(output_scale))
    if operator == "QDQ":
        dequantised = sketch.node("DequantizeLinear", [q, input_scale, zero])
        name = sketch.add_constant(integer_weights)
        sketch.nodes.append(dequantise(sketch, name, weight_scale, integer_zero))
        weights = Value(sketch.nodes[-1].output[0], shape)
        made = sketch.node("Conv", [dequantised, weights])
        made = sketch.node("QuantizeLinear", [made, output_scale, zero])
        return sketch.node("DequantizeLinear", [made, output_scale, zero])
    if operator in ("MatMulInteger", "ConvInteger"):
        made = sketch.node(operator, [q, integer_weights, zero])
        cast = sketch.node("Cast", [made], to=1)
        sketch.step = max(sketch.step, 2 * float(input_scale * weight_scale))
        return sketch.node("Mul", [cast, input_scale * weight_scale])
    made = sketch.node(
        operator, [q, input_scale, zero, integer_weights, weight_scale, integer_zero, output_scale, zero]
    )
    return sketch.node("DequantizeLinear", [made, output_scale, zero])


def dequantise(sketch: Sketch, name: str, scale: np.ndarray, zero: np.ndarray) -> Any:
    """Return a DequantizeLinear of constants."""
    operands = [name, sketch.add_constant(scale), sketch.add_constant(zero)]
    return helper.make_node("DequantizeLinear", operands, [f"v{len(sketch.nodes)}"], name=f"n{len(sketch.nodes)}")


def nonlinear(sketch: Sketch, x: Value, operator: str, **attributes: Any) -> Value:
    """An operator of one value that runs on the node."""
    return sketch.node(operator, [sketch.normal(x)], 0.7, **attributes)


def softmax(sketch: Sketch, x: Value) -> Value:
    return nonlinear(sketch, x, "Softmax", axis=any_axis(sketch, x))


def max_pool(sketch: Sketch, x: Value) -> Value:
    kernel, attributes = window(sketch, x.shape[1:], pooling=True)
    return sketch.node("MaxPool", [x], kernel_shape=kernel, **attributes)


def layer_normalization(sketch: Sketch, x: Value) -> Value:
    gain = sketch.generator.normal(size=x.shape[-1]).astype(np.float32)
    return sketch.node("LayerNormalization", [sketch.normal(x), gain], 1.0, axis=-1, epsilon=1e-2)


def clip(sketch: Sketch, x: Value) -> Value:
    return sketch.node("Clip", [sketch.normal(x), np.array(-1, np.float32), np.array(1, np.float32)], 0.7)


def product_of_activations(sketch: Sketch, x: Value) -> Value:
    value = sketch.normal(x)
    return sketch.node("Mul", [value, sketch.normal(partner(sketch, value))], 1.0)


def attention(sketch: Sketch, x: Value) -> Value:
    """MatMul of two activations: a value times its transpose."""
    value = sketch.normal(x)
    perm = [*range(x.rank - 1), x.rank, x.rank - 1]
    return sketch.node("MatMul", [value, sketch.node("Transpose", [value], perm=perm)], x.shape[-1] ** 0.5)


def sequence_first(sketch: Sketch, x: Value) -> Value:
    """A product of a value whose second axis is the batch."""
    turned = sketch.node("Transpose", [x], perm=[1, 0, 2])
    weights, magnitude = sketch.weights(x.shape[1], sketch.integer(1, 4), fan_in=x.shape[1])
    made = sketch.node("MatMul", [turned, weights], x.magnitude * magnitude)
    return sketch.node("Transpose", [made], perm=[1, 0, 2])


def merged_batch(sketch: Sketch, x: Value) -> Value:
    """A Gemm of rows of all samples."""
    outputs = sketch.integer(1, 4)
    flat = sketch.node("Reshape", [x, integers(-1, x.shape[1])])
    weights, magnitude = sketch.weights(x.shape[1], outputs, fan_in=x.shape[1])
    made = sketch.node("Gemm", [flat, weights, *bias(sketch, outputs)], x.magnitude * magnitude)
    return sketch.node("Reshape", [made, integers(-1, x.shape[0], outputs)])


def embedding(sketch: Sketch, x: Value) -> Value:
    """Rows of a table by token ids, which are another input; `x` only says how many."""
    tokens = sketch.add_input((x.shape[0],), element=7)
    table = sketch.generator.normal(size=(8, sketch.integer(1, 4))).astype(np.float32)
    return sketch.node("Gather", [table, tokens], 1.0)
