"""How sums and movements are drawn: attributes, constants and other operands, all of them legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from tests.coverage.graph_sketch import BATCH, Sketch, Value, any_axis, integers
from tests.coverage.random_products import factor_shape, partner, window

INT64_MAX = 2**63 - 1


def addition(sketch: Sketch, x: Value, operator: str) -> Value:
    """Add or Sub of two activations, or of one and a constant."""
    if sketch.boolean():
        other: Value | np.ndarray = partner(sketch, x, broadcast=True)
        magnitude = x.magnitude + (other.magnitude if isinstance(other, Value) else 0.0)
    else:
        other, size = sketch.weights(*factor_shape(sketch, x))
        magnitude = x.magnitude + size
    operands: list[Value | np.ndarray] = [x, other]
    return sketch.node(operator, operands[:: sketch.one_of(1, -1)], magnitude)


def many(sketch: Sketch, x: Value, operator: str) -> Value:
    """Sum or Mean of one to four operands."""
    operands: list[Value | np.ndarray] = [x]
    magnitude = x.magnitude
    for _ in range(sketch.integer(1, 3)):
        if sketch.rarely():
            operands.append(sketch.weights(*factor_shape(sketch, x))[0])
        else:
            other = partner(sketch, x, broadcast=True)
            operands.append(other)
            magnitude += other.magnitude
    return sketch.node(operator, operands, magnitude)


def negation(sketch: Sketch, x: Value) -> Value:
    return sketch.node("Neg", [x])


def average_pool(sketch: Sketch, x: Value) -> Value:
    kernel, attributes = window(sketch, x.shape[1:], pooling=True)
    if sketch.boolean():
        attributes["count_include_pad"] = 1
    # onnx's inference counts windows that begin in the padding on the right, onnxruntime does not.
    strides = attributes.get("strides", (1,) * len(kernel))
    if "auto_pad" not in attributes and all(s <= k for s, k in zip(strides, kernel, strict=True)) and sketch.boolean():
        attributes["ceil_mode"] = 1
    return sketch.node("AveragePool", [x], kernel_shape=kernel, **attributes)


def global_average_pool(sketch: Sketch, x: Value) -> Value:
    return sketch.node("GlobalAveragePool", [x])


def reduction(sketch: Sketch, x: Value, operator: str) -> Value:
    """ReduceMean or ReduceSum over axes behind the batch, given as attribute or input."""
    axes = [axis - x.rank - 1 if sketch.boolean() else axis for axis in sketch.some_of(range(1, x.rank + 1))]
    attributes: dict[str, Any] = {"keepdims": sketch.integer(0, 1)} if sketch.boolean() else {}
    if operator == "ReduceMean" and sketch.opset < 18:
        return sketch.node(operator, [x], axes=axes, **attributes)
    if sketch.rarely():
        attributes["noop_with_empty_axes"] = 1
    grown = x.magnitude * (prod(x.shape) ** 0.5 if operator == "ReduceSum" else 1)
    return sketch.node(operator, [x, integers(*axes)], grown, **attributes)


def cumulative_sum(sketch: Sketch, x: Value) -> Value:
    axis = np.array(any_axis(sketch, x), np.int64)
    attributes = {name: 1 for name in ("exclusive", "reverse") if sketch.boolean()}
    return sketch.node("CumSum", [x, axis], x.magnitude * 2, **attributes)


def center_crop_pad(sketch: Sketch, x: Value) -> Value:
    axes = sketch.some_of(range(1, x.rank + 1))
    lengths = [sketch.integer(max(1, x.full[axis] - 2), x.full[axis] + 2) for axis in axes]
    return sketch.node("CenterCropPad", [x, integers(*lengths)], axes=axes)


def concat(sketch: Sketch, x: Value) -> Value:
    axis = any_axis(sketch, x)
    operands: list[Value | np.ndarray] = [x]
    magnitude = x.magnitude
    for _ in range(sketch.integer(1, 2)):
        kind = sketch.integer(0, 3)
        if kind == 0 and not sketch.symbolic:
            shape = [*x.shape]
            shape[axis if axis < 0 else axis - 1] = sketch.integer(1, 2)
            operands.append(sketch.weights(1, *shape)[0])
        elif kind == 1:
            operands.append(x)
        else:
            other = partner(sketch, x)
            operands.append(other)
            magnitude = max(magnitude, other.magnitude)
    return concatenated(sketch, sketch.some_of(operands, least=len(operands)), magnitude, axis)


def concatenated(sketch: Sketch, operands: Sequence[Value | np.ndarray], magnitude: float, axis: int) -> Value:
    """Append a Concat, for which constants count as one sample."""
    if not any(isinstance(operand, np.ndarray) for operand in operands):
        return sketch.node("Concat", operands, magnitude, axis=axis)
    whole = [o if isinstance(o, Value) else np.repeat(o, BATCH, axis=0) for o in operands]
    made = sketch.node("Concat", whole, magnitude, axis=axis)
    for name, operand in zip(sketch.nodes[-1].input, operands, strict=True):
        if isinstance(operand, np.ndarray):
            sketch.constants[name] = operand
    return made


def depth_to_space(sketch: Sketch, x: Value) -> Value:
    """DepthToSpace of a value whose channels a Concat has multiplied."""
    turned = sketch.node("Concat", [x] * 4, axis=1)
    return sketch.node("DepthToSpace", [turned], blocksize=2, mode=sketch.one_of("DCR", "CRD"))


def space_to_depth(sketch: Sketch, x: Value) -> Value:
    """SpaceToDepth of a value that a Tile has made divisible."""
    tiled = sketch.node("Tile", [x, integers(1, 1, 2, 2)])
    return sketch.node("SpaceToDepth", [tiled], blocksize=2)


def expand(sketch: Sketch, x: Value) -> Value:
    axis = sketch.integer(1, x.rank + 1)
    source = sketch.node("Unsqueeze", [x, integers(axis)])
    target = [size if size > 1 and sketch.boolean() else 1 for size in source.full]
    target[0], target[axis] = 1, sketch.integer(2, 3)
    return sketch.node("Expand", [source, integers(*target)])


def flatten(sketch: Sketch, x: Value) -> Value:
    return sketch.node("Flatten", [x], axis=sketch.one_of(1, -x.rank))


def gather(sketch: Sketch, x: Value) -> Value:
    axis = any_axis(sketch, x)
    length = x.full[axis]
    shape = tuple(sketch.integer(1, 3) for _ in range(sketch.integer(0, 2)))
    indices = sketch.generator.integers(-length, length, shape)
    return sketch.node("Gather", [x, np.asarray(indices, np.int64)], axis=axis)


def identity(sketch: Sketch, x: Value) -> Value:
    return sketch.node("Identity", [x])


def pad(sketch: Sketch, x: Value) -> Value:
    mode = sketch.one_of("constant", "constant", "reflect", "edge", *(["wrap"] if sketch.opset >= 19 else []))
    pairs = []
    for size in x.shape:
        most = {"reflect": size - 1, "wrap": size}.get(mode, 2)
        least = 0 if mode != "constant" or size < 3 or not sketch.rarely() else -1
        pairs.append((sketch.integer(least, min(2, most)), sketch.integer(least, min(2, most))))
    operands: list[Value | np.ndarray | None] = []
    if sketch.opset >= 18 and sketch.boolean():
        axes = sketch.some_of(range(1, x.rank + 1))
        pairs = [pairs[axis - 1] for axis in axes]
        operands = [None, integers(*axes)]
    else:
        pairs = [(0, 0), *pairs]
    if mode == "constant" and sketch.boolean():
        value = np.array(sketch.one_of(0.0, 1.5), np.float32)
        operands = [value, *operands[1:]]
    pads = np.array(pairs, np.int64).T.ravel()
    return sketch.node("Pad", [x, pads, *operands], max(1.0, x.magnitude), mode=mode)


def reshape(sketch: Sketch, x: Value) -> Value:
    factors, rest = [], prod(x.shape)
    for divisor in (2, 3, 2, 5):
        if rest % divisor == 0 and sketch.boolean():
            factors.append(divisor)
            rest //= divisor
    target = sketch.some_of([*factors, rest], least=len(factors) + 1)[:4]
    target[-1] = prod(x.shape) // prod(target[:-1])
    first = sketch.one_of(0, -1) if sketch.symbolic else sketch.one_of(0, -1, 1)
    if first == 1:
        return reshaped_at_one(sketch, x, target)
    if first == 0 and sketch.boolean():
        target[sketch.integer(0, len(target) - 1)] = -1
    return sketch.node("Reshape", [x, integers(first, *target)])


def reshaped_at_one(sketch: Sketch, x: Value, target: list[int]) -> Value:
    """Append a Reshape that fixes the batch at 1."""
    made = sketch.node("Reshape", [x, integers(-1, *target)])
    sketch.constants[sketch.nodes[-1].input[1]] = integers(1, *target)
    return made


def resize(sketch: Sketch, x: Value, modes: Sequence[str] = ("nearest",)) -> Value:
    mode = sketch.one_of(*modes)
    least = 1 if mode == "nearest" else 2
    scales = [1.0] * (least) + [sketch.one_of(0.5, 1.0, 2.0, 1.5) for _ in x.full[least:]]
    scales = [s if int(s * size) > 0 else 1.0 for s, size in zip(scales, x.full, strict=True)]
    attributes: dict[str, Any] = {"mode": mode}
    if sketch.boolean():
        attributes["coordinate_transformation_mode"] = sketch.one_of("asymmetric", "half_pixel", "align_corners")
    if mode == "nearest" and sketch.boolean():
        attributes["nearest_mode"] = sketch.one_of("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    if sketch.opset >= 18 and mode == "nearest" and sketch.boolean():
        axes = list(range(2, x.rank + 1)) if x.rank > 1 else [1]
        sizes = [int(scales[axis] * x.full[axis]) for axis in axes]
        return sketch.node("Resize", [x, None, None, integers(*sizes)], axes=axes, **attributes)
    return sketch.node("Resize", [x, None, np.array(scales, np.float32)], **attributes)


def slice_(sketch: Sketch, x: Value) -> Value:
    starts, ends, axes, steps = [], [], [], []
    for axis in sketch.some_of(range(1, x.rank + 1)):
        size, step = x.full[axis], sketch.one_of(1, 1, 2, -1, -2)
        first = sketch.integer(0, size - 1)
        if step > 0:
            last = sketch.one_of(sketch.integer(first + 1, size), INT64_MAX)
        else:
            last = sketch.one_of(sketch.integer(0, first) - 1, -1)
            last = -INT64_MAX if last < 0 else last
        negative = sketch.boolean() and 0 <= last < INT64_MAX
        starts.append(first - size if negative else first)
        ends.append(last - size if negative and last < size else last)
        axes.append(axis - x.rank - 1 if sketch.boolean() else axis)
        steps.append(step)
    return sketch.node("Slice", [x, integers(*starts), integers(*ends), integers(*axes), integers(*steps)])


def squeeze(sketch: Sketch, x: Value) -> Value:
    axis = sketch.integer(1, x.rank + 1)
    source = sketch.node("Unsqueeze", [x, integers(axis)])
    axes = [a for a in range(1, source.rank + 1) if a == axis or (source.full[a] == 1 and sketch.boolean())]
    return sketch.node("Squeeze", [source, integers(*axes)])


def unsqueeze(sketch: Sketch, x: Value) -> Value:
    axis = sketch.integer(1, x.rank + 1)
    return sketch.node("Unsqueeze", [x, integers(axis - x.rank - 2 if sketch.boolean() else axis)])


def tile(sketch: Sketch, x: Value) -> Value:
    return sketch.node("Tile", [x, integers(1, *(sketch.one_of(1, 1, 2, 3) for _ in x.shape))])


def transpose(sketch: Sketch, x: Value) -> Value:
    return sketch.node("Transpose", [x], perm=[0, *sketch.some_of(range(1, x.rank + 1), least=x.rank)])


def trilu(sketch: Sketch, x: Value) -> Value:
    k = [np.array(sketch.integer(-2, 2), np.int64)] if sketch.boolean() else []
    return sketch.node("Trilu", [x, *k], upper=sketch.integer(0, 1))


def where(sketch: Sketch, x: Value) -> Value:
    condition = sketch.generator.random(factor_shape(sketch, x)) < 0.5
    if sketch.boolean():
        other: Value | np.ndarray = partner(sketch, x, broadcast=True)
    else:  # what the condition has enlarged is not to be enlarged to another size
        joined = replace(x, full=np.broadcast_shapes(x.full, condition.shape))
        other = sketch.weights(*factor_shape(sketch, joined))[0]
    magnitude = max(x.magnitude, other.magnitude if isinstance(other, Value) else 1.0)
    branches: list[Value | np.ndarray] = [x, other]
    return sketch.node("Where", [condition, *branches[:: sketch.one_of(1, -1)]], magnitude)
