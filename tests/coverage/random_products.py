"""How operators with weights are drawn: attributes and constants, all of them legal."""

from __future__ import annotations

from math import prod
from string import ascii_lowercase
from typing import Any

import numpy as np

from tests.coverage.graph_sketch import Shape, Sketch, Value


def partner(sketch: Sketch, value: Value, broadcast: bool = False) -> Value:
    """Return another value of the same shape, or one that broadcasts to it: known, new, or a product with weights."""
    shape = tuple(1 if broadcast and sketch.rarely() else size for size in value.shape)
    known = [v for v in sketch.values if v.shape == shape and v != value]
    match sketch.integer(0, 4):
        case 0 if known:
            return sketch.one_of(*known)
        case 1:
            return sketch.add_input(shape)
        case 2 if shape == value.shape:
            return mix_axis(sketch, value)
        case _:
            return mix_axis(sketch, sketch.add_input(shape))


def window(sketch: Sketch, spatial: Shape, pooling: bool = False) -> tuple[Shape, dict[str, Any]]:
    """Draw a window that fits; return its kernel and attributes."""
    auto_pad = sketch.one_of("NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    dilates = auto_pad in ("NOTSET", "VALID") and (not pooling or sketch.opset >= 19)
    kernel, strides, dilations, pads = [], [], [], []
    for length in spatial:
        size = sketch.integer(1, min(3, length))
        pad = (0, 0)
        if auto_pad == "NOTSET":
            most = size - 1 if pooling else 2
            pad = (sketch.integer(0, most), sketch.integer(0, most))
        room = length + sum(pad)
        kernel.append(size)
        # onnxruntime refuses SAME where it would have to crop.
        strides.append(sketch.integer(1, size if auto_pad.startswith("SAME") else 3))
        dilations.append(sketch.integer(1, min(3, (room - 1) // (size - 1))) if dilates and size > 1 else 1)
        pads.append(pad)
    attributes: dict[str, Any] = {"strides": strides} if sketch.boolean() else {}
    if set(dilations) != {1}:
        attributes["dilations"] = dilations
    if auto_pad != "NOTSET":
        attributes["auto_pad"] = auto_pad
    elif np.any(pads):
        attributes["pads"] = [int(p) for p in np.array(pads).T.ravel()]
    return tuple(kernel), attributes


def bias(sketch: Sketch, size: int) -> list[np.ndarray]:
    """Draw a bias, or none."""
    return [sketch.generator.normal(size=size).astype(np.float32)] if sketch.boolean() else []


def groups(sketch: Sketch, channels: int) -> int:
    """Draw a number of groups, all of the channels among them."""
    return sketch.one_of(*(g for g in range(1, channels + 1) if channels % g == 0))


def conv(sketch: Sketch, x: Value) -> Value:
    channels, *spatial = x.shape
    group = groups(sketch, channels)
    outputs = group * sketch.integer(1, 3)
    kernel, attributes = window(sketch, tuple(spatial))
    weights, magnitude = sketch.weights(outputs, channels // group, *kernel, fan_in=channels // group * prod(kernel))
    if group > 1 or sketch.boolean():
        attributes["group"] = group
    if sketch.boolean():
        attributes["kernel_shape"] = kernel
    return sketch.node("Conv", [x, weights, *bias(sketch, outputs)], x.magnitude * magnitude, **attributes)


def conv_transpose(sketch: Sketch, x: Value) -> Value:
    channels, *spatial = x.shape
    group = groups(sketch, channels)
    per_group = sketch.integer(1, 2)
    auto_pad = sketch.one_of("NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    kernel, strides, dilations, extra, pads, lengths = [], [], [], [], [], []
    for length in spatial:
        kernel.append(sketch.integer(1, 3))
        strides.append(sketch.integer(1, 3))
        dilations.append(sketch.integer(1, 2))
        extra.append(sketch.integer(0, strides[-1] - 1))
        reach = (length - 1) * strides[-1] + (kernel[-1] - 1) * dilations[-1] + 1 + extra[-1]
        before = sketch.integer(0, min(2, reach - 1))
        pads.append((before, sketch.integer(0, min(2, reach - 1 - before))))
        lengths.append(sketch.integer(max(length, reach - 2), reach))  # onnx's inference takes no smaller ones
    attributes: dict[str, Any] = {"strides": strides, "group": group}
    if set(dilations) != {1}:
        attributes["dilations"] = dilations
    if auto_pad != "NOTSET":
        attributes["auto_pad"] = auto_pad
    elif sketch.rarely():
        attributes["output_shape"] = lengths
    else:
        attributes["pads"] = [int(p) for p in np.array(pads).T.ravel()]
    if "output_shape" not in attributes and any(extra) and auto_pad == "NOTSET":
        attributes["output_padding"] = extra
    weights, magnitude = sketch.weights(channels, per_group, *kernel, fan_in=channels // group * prod(kernel))
    return sketch.node(
        "ConvTranspose", [x, weights, *bias(sketch, per_group * group)], x.magnitude * magnitude, **attributes
    )


def gemm(sketch: Sketch, x: Value) -> Value:
    """Gemm with the constant on either side, the activation transposed or not."""
    features, outputs = x.shape[0], sketch.integer(1, 5)
    weights, magnitude = sketch.weights(features, outputs, fan_in=features)
    attributes: dict[str, Any] = {}
    if sketch.boolean():
        attributes["alpha"] = sketch.one_of(0.5, -2.0)
    turned = sketch.rarely()
    source = sketch.node("Transpose", [x], perm=[1, 0]) if turned else x
    left = sketch.rarely()  # W' x' is (x W)'
    shape = (
        sketch.one_of(None, (outputs, 1), (1, 1)) if left else sketch.one_of(None, (outputs,), (1, outputs), (1,), ())
    )
    added = [] if shape is None else [sketch.generator.normal(size=shape).astype(np.float32)]
    if added and sketch.boolean():
        attributes["beta"] = sketch.one_of(0.5, -1.0, 0.0)
    transposes = sketch.boolean()
    if left:
        matrix = weights if transposes else np.ascontiguousarray(weights.T)
        made = sketch.node(
            "Gemm", [matrix, source, *added], x.magnitude * magnitude, transA=int(transposes), transB=int(not turned),
            **attributes,
        )  # fmt: skip
        return sketch.node("Transpose", [made], perm=[1, 0])
    matrix = np.ascontiguousarray(weights.T) if transposes else weights
    return sketch.node(
        "Gemm", [source, matrix, *added], x.magnitude * magnitude, transA=int(turned), transB=int(transposes),
        **attributes,
    )  # fmt: skip


def stack(sketch: Sketch, x: Value) -> Shape:
    """Draw leading axes of a stack of matrices: those of a value, or 1, the first ones left out."""
    axes = tuple(size if sketch.boolean() else 1 for size in x.shape[:-2])
    return axes[sketch.integer(0, len(axes)) :]


def matmul(sketch: Sketch, x: Value) -> Value:
    kind = sketch.integer(0, 4)
    if kind == 4 and x.rank > 1:
        weights, magnitude = sketch.weights(x.shape[-1], fan_in=x.shape[-1])
        return sketch.node("MatMul", [x, weights], x.magnitude * magnitude)
    if kind == 3 and x.rank > 1:
        weights, magnitude = sketch.weights(*stack(sketch, x), sketch.integer(1, 4), x.shape[-2], fan_in=x.shape[-2])
        return sketch.node("MatMul", [weights, x], x.magnitude * magnitude)
    weights, magnitude = sketch.weights(*stack(sketch, x), x.shape[-1], sketch.integer(1, 5), fan_in=x.shape[-1])
    return sketch.node("MatMul", [x, weights], x.magnitude * magnitude)


def mix_axis(sketch: Sketch, x: Value) -> Value:
    """A product with weights that keeps the shape: of the last axis, of channels, or element by element."""
    kind = sketch.integer(0, 2)
    if kind == 2 and 2 <= x.rank <= 4:
        weights, magnitude = sketch.weights(x.shape[0], x.shape[0], *[1] * (x.rank - 1), fan_in=x.shape[0])
        return sketch.node("Conv", [x, weights], x.magnitude * magnitude)
    if kind == 1 and x.rank:
        weights, magnitude = sketch.weights(x.shape[-1], x.shape[-1], fan_in=x.shape[-1])
        return sketch.node("MatMul", [x, weights], x.magnitude * magnitude)
    weights, magnitude = sketch.weights(*x.shape)
    return sketch.node("Mul", [x, weights], x.magnitude * magnitude)


def einsum(sketch: Sketch, x: Value) -> Value:
    """Einsum of an activation and a constant: any letters, an implicit result, an ellipsis."""
    own, fresh = list(ascii_lowercase[1 : 1 + x.rank]), list(ascii_lowercase[10:12])
    for axis in range(1, x.rank):  # a letter twice is a diagonal
        if x.shape[axis] == x.shape[axis - 1] and sketch.rarely():
            own[axis] = own[axis - 1]
    sizes = {letter: size for letter, size in zip(own, x.shape, strict=True)}
    shared = sketch.some_of(sorted(set(own)), least=0)
    new = sketch.some_of(fresh, least=0 if shared else 1)
    sizes.update({letter: sketch.integer(1, 3) for letter in new})
    weight_letters = sketch.some_of([*shared, *new], least=len(shared) + len(new))
    kept = [c for c in [*sizes] if c in own + new and (sketch.boolean() or (c in own and c not in shared))]
    result = sketch.some_of(kept, least=len(kept))
    array, magnitude = sketch.weights(*(sizes[c] for c in weight_letters))
    activation, weights_term = "a" + "".join(own), "".join(weight_letters)
    terms = [activation, weights_term]
    operands: list[Value | np.ndarray] = [x, array]
    if sketch.boolean():
        terms.reverse()
        operands.reverse()
    equation = ",".join(terms)
    if sketch.integer(0, 3):
        equation += "->a" + "".join(result)
    growth = max(1.0, prod(sizes.values()) ** 0.5)
    return sketch.node("Einsum", operands, x.magnitude * magnitude * growth, equation=equation)


def einsum_ellipsis(sketch: Sketch, x: Value) -> Value:
    """Einsum whose leading axes are an ellipsis."""
    weights, magnitude = sketch.weights(x.shape[-1], sketch.integer(1, 4), fan_in=x.shape[-1])
    equation = sketch.one_of("...k,kn->...n", "a...k,kn->a...n", "...k,kn", "a...k,kn->an...")
    return sketch.node("Einsum", [x, weights], x.magnitude * magnitude, equation=equation)


def batch_normalization(sketch: Sketch, x: Value) -> Value:
    channels, generator = x.shape[0], sketch.generator
    gain, shift, mean = (generator.normal(size=channels).astype(np.float32) for _ in range(3))
    variance = generator.uniform(0.3, 2, channels).astype(np.float32)
    attributes: dict[str, Any] = {"epsilon": 1e-2} if sketch.boolean() else {}
    return sketch.node("BatchNormalization", [x, gain, shift, mean, variance], max(1, x.magnitude), **attributes)


def factor_shape(sketch: Sketch, x: Value) -> Shape:
    """Draw the shape of a constant that broadcasts with a value, and may enlarge it."""
    axes = []
    for size in x.shape:
        kind = sketch.integer(0, 4)
        axes.append(1 if kind < 2 else sketch.integer(1, 3) if size == 1 else size)
    kind = sketch.integer(0, 2)
    return tuple(axes[sketch.integer(0, len(axes)) :]) if kind else (1, *axes)


def product(sketch: Sketch, x: Value, operator: str) -> Value:
    """Mul or Div by a constant tensor or number."""
    weights, magnitude = sketch.weights(*factor_shape(sketch, x))
    if operator == "Div":
        away = np.where(weights < 0, -0.1, 0.1).astype(np.float32) * magnitude
        return sketch.node("Div", [x, weights + away], x.magnitude * 3 / magnitude)
    operands: list[Value | np.ndarray] = [x, weights]
    return sketch.node("Mul", operands[:: sketch.one_of(1, -1)], x.magnitude * magnitude)
