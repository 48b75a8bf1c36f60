"""Move strides back to the convolution that makes the values: positions that nobody reads are not computed.

    requires  a simplified, folded model
    ensures   no convolution makes planes of which all that reads them, behind operators that act position by position,
              takes every s-th row and column alone, unless what it reads would then cost more, going up again

    Conv 3x3 --> Relu --> Conv 1x1 --> Add --> Relu --+--> Conv 1x1, stride 2
                                        ^             +--> Conv 1x1, stride 2
    shortcut (read in full elsewhere) --+

    becomes

    Conv 3x3, stride 2 --> Relu --> Conv 1x1 --> Add --> Relu --+--> Conv 1x1
                                                  ^             +--> Conv 1x1
    shortcut --> Slice, every second row and column

A window of one point with stride s reads the positions 0, s, 2s and so on. What acts position by position can be given
these alone, and a convolution of stride t makes them with stride s t. So three quarters of the values do not come down,
and those that remain are the same numbers. Residual networks halve their planes at the start of three stages (He et al.
2016, "Deep residual learning for image recognition", table 1); those with the stride in the first convolution of a
stage, of 1x1, read every second row and column of what they add to. Where it is in the 3x3 convolution behind, the
first one reads all, and nothing moves. Nor does it where windows of one upload would differ, and more go up than need
not come down.

Worked example: 5 rows, stride 2: rows 0, 2, 4 are read. A 3x3 convolution of 5 rows with padding 1 makes them with
stride 2 and padding 1: its windows begin at rows -1, 1 and 3, as the first, third and fifth did. Of 6 rows it makes the
same three, and the padding below, which only the sixth read, goes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from partitioner.convolutions import MOST_AXES, convolution
from partitioner.folding import take_over
from partitioner.homogeneous import NOTE
from partitioner.lowering import constant, operand
from partitioner.misfits import blamed
from partitioner.shapes import Shape, infer_shapes
from partitioner.uploads import Emit, values_up
from partitioner.windows import Geometry, sliding_window

_STRIDED: Final = "makes only the rows and columns that are read"
_SLICED: Final = "takes the rows and columns that are read"
_MOVED: Final = "its stride is in the convolutions in front of it"
#: Operators whose result at a position follows from their operands there.
_UNARY: Final = (
    *("Abs", "Ceil", "Celu", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus"),
    *("Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu"),
)
_OF_SEVERAL: Final = ("Add", "Div", "Max", "Mean", "Min", "Mul", "PRelu", "Pow", "Sub", "Sum")
#: Bounds, statistics: operands that are none of the planes.
_BESIDE: Final = ("BatchNormalization", "Clip")
_POOLING: Final = ("AveragePool", "MaxPool")
#: Axes of a value in front of its plane: batch and channels.
_PLANE: Final = 2


@dataclass(frozen=True, slots=True)
class _Region:
    """What makes a value whose positions are read in steps.

    Attributes:
        convolutions: that are to make fewer positions.
        inner: operators between them and the value, which act position by position.
        sliced: operands of these that are read in full elsewhere, or can't be made in steps.
    """

    convolutions: Sequence[ir.Node]
    inner: Sequence[ir.Node]
    sliced: Sequence[ir.Value]


def stride_early(model: ir.Model, pinned: Collection[ir.Node] = ()) -> None:
    """Move strides back in place.

    Args:
        model: the graph.
        pinned: operators that the user has pinned; nothing about them changes.
    """
    while _stride_once(model, frozenset(pinned)):
        pass


def _stride_once(model: ir.Model, pinned: frozenset[ir.Node]) -> bool:
    """Go once from the results to the inputs; say whether anything has changed."""
    shapes, changed = infer_shapes(model), False
    for node in reversed(list(model.graph)):
        value = node.outputs[0]
        with blamed(node):
            steps = None if node.graph is None else _steps(value, shapes, pinned)
            region = None if steps is None else _region(model, value, shapes, pinned)
            if steps is not None and region is not None and _saves(region, steps, shapes):
                _apply(model, value, steps, region, shapes)
                common_passes.NameFixPass()(model)
                shapes, changed = infer_shapes(model), True
    return changed


# -- who reads --------------------------------------------------------------------------------------------------------


def _steps(value: ir.Value, shapes: Mapping[str, Shape], pinned: Collection[ir.Node]) -> Shape | None:
    """Return from what row to what row, and so on, a value is read; None if that is every one, or unknown."""
    uses, shape = list(value.uses()), shapes.get(str(value.name), ())
    if value.is_graph_output() or not uses or len(shape) < _PLANE:
        return None
    found = [None if use.node in pinned or use.idx != 0 else _points(use.node, shapes) for use in uses]
    strides = [each for each in found if each is not None]
    if len(strides) < len(found):
        return None
    steps = tuple(gcd(*along) for along in zip(*strides, strict=True))
    return steps if any(step > 1 < size for step, size in zip(steps, shape[1:], strict=True)) else None


def _points(node: ir.Node, shapes: Mapping[str, Shape]) -> Shape | None:
    """Return the strides of a window of one point that reads rows and columns 0, s, 2s, ...; None for anything else."""
    source, target = (shapes.get(str(value.name)) for value in (operand(node, 0), node.outputs[0]))
    if node.domain not in ("", "ai.onnx") or source is None or target is None:
        return None
    if node.op_type == "Slice":
        return _slice_steps(node, source)
    geometry = _window(node, source, target)
    if geometry is None or any(k != 1 for k in geometry.kernel) or any(geometry.begin):
        return None
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None  # positions of maxima
    positions = tuple(-(-size // stride) for size, stride in zip(source[1:], geometry.strides, strict=True))
    return geometry.strides if positions == geometry.output else None


def _window(node: ir.Node, source: Shape, target: Shape) -> Geometry | None:
    """Return the window of a convolution with constant weights, or of pooling; None for anything else."""
    weights = constant(node.inputs[1]) if node.op_type == "Conv" else None
    if weights is not None:
        kernel: Shape = weights.shape[_PLANE:]
    elif node.op_type in _POOLING:
        kernel = tuple(node.attributes.get_ints("kernel_shape", ()))
    else:
        return None
    if not len(kernel) == len(source) - 1 == len(target) - 1:
        return None  # who places the node refuses it
    return sliding_window(node, source[1:], target[1:], kernel)


def _slice_steps(node: ir.Node, source: Shape) -> Shape | None:
    """Return the steps of a Slice that takes rows and columns 0, s, 2s, ...; None for another one."""
    arrays = [constant(value) for value in node.inputs[1:]]
    if len(arrays) < 4 or any(array is None for array in arrays):
        return None
    numbers = [[int(number) for number in array] for array in arrays if array is not None]
    steps = [1] * (len(source) + 1)
    for start, end, axis, step in zip(*numbers, strict=True):
        place = axis % len(steps)
        if place < _PLANE or start != 0 or step < 1 or end < source[place - 1]:
            return None
        steps[place] = step
    return tuple(steps[_PLANE:])


# -- who makes --------------------------------------------------------------------------------------------------------


def _region(model: ir.Model, value: ir.Value, shapes: Mapping[str, Shape], pinned: Collection[ir.Node]) -> _Region:
    """Return what makes a value and nothing else, back to convolutions and to what others read."""
    wanted: list[ir.Value] = [value]
    convolutions: list[ir.Node] = []
    inner: list[ir.Node] = []
    for node in reversed(list(model.graph)):
        made = node.outputs[0]
        if made not in wanted or node in pinned:
            continue
        others = any(use.node not in inner for use in made.uses()) or made.is_graph_output()
        if others and made is not value:
            continue
        if _makes(node, shapes):
            convolutions.append(node)
        elif (planes := _planes(node, shapes)) is not None:
            inner.append(node)
            wanted += [each for each in planes if each not in wanted]
    made_here = {node.outputs[0] for node in (*convolutions, *inner)}
    return _Region(convolutions, inner, [each for each in wanted if each not in made_here])


def _makes(node: ir.Node, shapes: Mapping[str, Shape]) -> bool:
    """Whether a node is a convolution with constant weights that the server can run, and its shapes are known."""
    return _own_window(node, shapes) is not None


def _own_window(node: ir.Node, shapes: Mapping[str, Shape]) -> Geometry | None:
    """Return the window of a convolution with constant weights over 1 to 3 axes; None for anything else."""
    if node.op_type != "Conv":
        return None
    source, target = (shapes.get(str(value.name)) for value in (operand(node, 0), node.outputs[0]))
    if source is None or target is None or not 1 < len(source) <= MOST_AXES + 1:
        return None
    return _window(node, source, target)


def _planes(node: ir.Node, shapes: Mapping[str, Shape]) -> list[ir.Value] | None:
    """Return the operands of a node that have a plane, which its result follows position by position; None: not so."""
    shape = shapes.get(str(node.outputs[0].name))
    if node.domain not in ("", "ai.onnx") or shape is None:
        return None
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None
    joins = node.op_type == "Concat" and node.attributes["axis"].as_int() in (1, -len(shape))
    if not joins and node.op_type not in (*_UNARY, *_OF_SEVERAL, "BatchNormalization"):
        return None
    found = []
    for position, value in enumerate(node.inputs):
        if value is None or (position and node.op_type in _BESIDE):
            continue
        array = constant(value)
        sizes = shapes.get(str(value.name)) if array is None else ((1,) * (len(shape) + 1) + array.shape)[-len(shape) :]
        if sizes is None or len(sizes) != len(shape):
            return None
        if all(size == 1 for size in sizes[1:]):
            continue  # the same for all positions
        if any(size not in (1, full) for size, full in zip(sizes[1:], shape[1:], strict=True)):
            return None
        found.append(value)
    return found


# -- what it saves ----------------------------------------------------------------------------------------------------


def _saves(region: _Region, steps: Shape, shapes: Mapping[str, Shape]) -> bool:
    """Whether no more values go up than need not come down.

    Convolutions that read one value share an upload as long as their windows do (`partitioner.uploads`). Of all that a
    region makes the largest comes down at least: the rest may be added to it under encryption.
    """
    made = [shapes[str(node.outputs[0].name)] for node in region.convolutions]
    down = [prod(shape) - shape[0] * prod(_strided_sizes(shape[1:], steps)) for shape in made]
    return bool(down) and _added_up(region, steps, shapes) <= max(down)


def _added_up(region: _Region, steps: Shape, shapes: Mapping[str, Shape]) -> int:
    """Return how many values more go up for what a region reads, where others read it too."""
    added = 0
    for value in dict.fromkeys(operand(node, 0) for node in region.convolutions):
        readers = {node: window for use in value.uses() if (window := _own_window(node := use.node, shapes))}
        if len(readers) > 1:
            shape = shapes[str(value.name)]
            after = {n: _strided(n, steps, shapes) if n in region.convolutions else w for n, w in readers.items()}
            before, then = ([_emit(n, w) for n, w in windows.items()] for windows in (readers, after))
            added += values_up(shape, then) - values_up(shape, before)
    return added


def _emit(node: ir.Node, window: Geometry) -> Emit:
    """Return what appends a convolution with some window to a program."""
    weights, group = constant(node.inputs[1]), node.attributes.get_int("group", 1)
    assert weights is not None  # `_own_window` has looked
    return lambda builder, values: convolution(builder, values[0], weights, window, group)


def _strided_sizes(sizes: Shape, steps: Shape) -> Shape:
    """Return the positions that are left along every axis."""
    return tuple(-(-size // step) for size, step in zip(sizes, steps, strict=True))


# -- what changes -----------------------------------------------------------------------------------------------------


def _apply(model: ir.Model, value: ir.Value, steps: Shape, region: _Region, shapes: Mapping[str, Shape]) -> None:
    for node in region.convolutions:
        _multiply_strides(node, steps, shapes)
    for other in region.sliced:
        _slice(model, other, steps, region)
    for use in list(value.uses()):
        _divide_strides(model, use.node, value, steps)


def _multiply_strides(node: ir.Node, steps: Shape, shapes: Mapping[str, Shape]) -> None:
    """Let a convolution make every `steps`-th position, with the padding that these read."""
    window = _strided(node, steps, shapes)
    node.attributes.pop("auto_pad", None)
    node.attributes["strides"] = ir.AttrInt64s("strides", window.strides)
    node.attributes["pads"] = ir.AttrInt64s("pads", (*window.begin, *window.end))
    _note(node, _STRIDED)


def _strided(node: ir.Node, steps: Shape, shapes: Mapping[str, Shape]) -> Geometry:
    """Return the window with which a convolution makes every `steps`-th position."""
    source, window = shapes[str(operand(node, 0).name)][1:], _own_window(node, shapes)
    assert window is not None  # `_makes` has looked
    strides = tuple(s * step for s, step in zip(window.strides, steps, strict=True))
    moved = replace(window, strides=strides, output=_strided_sizes(window.output, steps))
    end = tuple(max(0, r - b - size) for r, b, size in zip(moved.reach, window.begin, source, strict=True))
    return replace(moved, end=end)


def _slice(model: ir.Model, value: ir.Value, steps: Shape, region: _Region) -> None:
    """Give the operators of a region every `steps`-th position of a value."""
    readers = [node for node in region.inner if value in node.inputs]  # the last first
    array = constant(value)
    if array is None:
        axes = [axis + _PLANE for axis, step in enumerate(steps) if step > 1]
        ends = np.full(len(axes), np.iinfo(np.int64).max)
        numbers = (np.zeros(len(axes)), ends, np.array(axes), np.array(steps)[np.array(axes) - _PLANE])
        operands = [value, *(_constant(model, f"{value.name}.strided", each.astype(np.int64)) for each in numbers)]
        node = ir.Node("", "Slice", operands, name=f"{value.name}.strided")
        node.outputs[0].type = value.type
        _note(node, _SLICED)
        model.graph.insert_before(readers[-1], node)
        taken = node.outputs[0]
    else:
        part = array
        for axis, step in enumerate(steps[::-1][: array.ndim], 1):  # a constant may lack the first axes
            part = np.take(part, np.arange(0, part.shape[-axis], step), axis=-axis)
        taken = _constant(model, f"{value.name}.strided", part)
    for node in readers:
        for position, operand_ in enumerate(node.inputs):
            if operand_ is value:
                node.replace_input_with(position, taken)


def _divide_strides(model: ir.Model, node: ir.Node, value: ir.Value, steps: Shape) -> None:
    """Let a reader of a value go on from the positions that are left; remove it where it takes all of them as is."""
    _note(node, _MOVED)
    if node.op_type == "Slice":
        axes, old = (constant(operand(node, position)) for position in (3, 4))
        assert axes is not None  # `_slice_steps` has looked
        assert old is not None
        rank = len(steps) + _PLANE
        new = np.array([step // steps[axis % rank - _PLANE] for axis, step in zip(axes, old, strict=True)])
        node.replace_input_with(4, _constant(model, f"{node.name}.steps", new.astype(old.dtype)))
        left = bool(np.any(new > 1))
    else:
        strides = node.attributes.get_ints("strides", (1,) * len(steps))
        divided = [stride // step for stride, step in zip(strides, steps, strict=True)]
        node.attributes["strides"] = ir.AttrInt64s("strides", divided)
        for name in ("auto_pad", "ceil_mode", "pads"):
            node.attributes.pop(name, None)
        left = node.op_type == "Conv" or any(step > 1 for step in divided)
    if not left:
        take_over(node.outputs[0], value)
        model.graph.remove(node, safe=True)


def _constant(model: ir.Model, name: str, array: NDArray[Any]) -> ir.Value:
    """Add a constant under a name that is free, or one like it."""
    number, free = 0, name
    while free in model.graph.initializers:
        number += 1
        free = f"{name}_{number}"
    tensor = ir.tensor(array, name=free)
    value = ir.Value(name=free, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _note(node: ir.Node, text: str) -> None:
    """Say why, for `inspect`, behind what other passes have noted."""
    notes = str(node.meta.get(NOTE, "")).split("; ")
    node.meta[NOTE] = "; ".join([*filter(None, notes), *([text] if text not in notes else [])])
