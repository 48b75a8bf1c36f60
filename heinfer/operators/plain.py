"""Evaluate a program in float64: the reference of every encrypted block, and the source of its biases and norms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from heinfer.operators.planes import reach_of
from heinfer.operators.program import Arrays, Program
from heinfer.operators.steps import Conv, MatMul, Rescale, Scale, Shift, Step, Sum, Take, Window, WindowSum

Floats = NDArray[np.float64]
#: Weights that are made float64 at a time: all of a large layer would be twice the bytes of the model.
TILE_WEIGHTS = 2**22


def evaluate_plain(program: Program, arrays: Arrays, inputs: Sequence[Floats]) -> list[Floats]:
    """Evaluate a program on a batch.

    Args:
        program: full or server program.
        arrays: its arrays; weights of any real dtype.
        inputs: one array a program input, shape (samples, *shape).

    Returns:
        One float64 array an output, shape (samples, *shape).
    """
    values = [np.asarray(x, np.float64) for x in inputs]
    for step in program.steps:
        values.append(evaluate_step(step, arrays, values))
    return [values[o] for o in program.outputs]


def evaluate_step(step: Step, arrays: Arrays, values: Sequence[Floats]) -> Floats:
    """Evaluate one step on the values so far; shapes as in `evaluate_plain`."""

    def array(name: str) -> Floats:
        return np.asarray(arrays[name], np.float64)

    match step:
        case Conv():
            return convolve(values[step.source], array(step.weights), step)
        case MatMul():
            return _multiply(step, values[step.source], arrays[step.weights])
        case Scale():
            return values[step.source] * array(step.weights)
        case Take():
            return take([values[s] for s in step.sources], arrays[step.indices] if step.indices else None, step, 0.0)
        case Sum():
            terms = [sign * values[source] for sign, source in zip(step.signs, step.sources, strict=True)]
            return np.asarray(np.sum(terms, axis=0))
        case WindowSum():
            return np.asarray(windows(values[step.source], step.window).sum(axis=(2, 3)))
        case Shift():
            return values[step.source] + array(step.values)
        case Rescale():
            return values[step.source] * array(step.values)


def row_tiles(step: Conv | MatMul | Scale, weights: NDArray[Any]) -> list[slice]:
    """Return slices of a step's output rows (`output_rows`) with about `TILE_WEIGHTS` weights each.

    A Scale, and a Conv with groups, are one slice whatever their size.
    """
    if isinstance(step, Scale) or (isinstance(step, Conv) and step.group > 1):
        return [slice(None)]
    count = weights.shape[1] if isinstance(step, MatMul) else weights.shape[0]
    rows = max(1, TILE_WEIGHTS * count // max(1, weights.size))
    return [slice(first, min(first + rows, count)) for first in range(0, max(1, count), rows)]


def output_rows(step: Conv | MatMul | Scale, weights: NDArray[Any], rows: slice) -> NDArray[Any]:
    """Return a view of the weights that lead to some outputs: channels of Conv, columns of MatMul, all of Scale."""
    return weights[:, rows] if isinstance(step, MatMul) else weights[rows] if isinstance(step, Conv) else weights


def _multiply(step: MatMul, x: Floats, weights: NDArray[Any]) -> Floats:
    """Return x @ weights, whose columns become float64 in tiles."""
    result = np.empty((*x.shape[:-1], weights.shape[1]))
    for columns in row_tiles(step, weights):
        result[..., columns] = x @ np.asarray(output_rows(step, weights, columns), np.float64)
    return result


def take(sources: Sequence[Floats], indices: NDArray[np.int32] | None, step: Take, fill: float) -> Floats:
    """Apply an index map to values of shape (samples, *shape); -1 gives `fill`."""
    samples = sources[0].shape[0]
    flat = np.concatenate([s.reshape(samples, prod(s.shape[1:])) for s in sources], axis=1)
    if indices is not None:
        flat = np.concatenate([flat, np.full((samples, 1), fill)], axis=1)[:, indices]
    return flat.reshape(samples, *step.shape)


def convolve(x: Floats, weights: Floats, step: Conv) -> Floats:
    """Return the convolution of x, shape (samples, C, H, W)."""
    matrices = weights.reshape(step.group, weights.shape[0] // step.group, -1)
    positions = prod(step.window.output)
    result = np.empty((len(x), *matrices.shape[:2], positions))
    for sample in range(len(x)):  # the patches of a large plane fill gigabytes
        patches = windows(x[sample : sample + 1], step.window).reshape(step.group, matrices.shape[2], positions)
        np.matmul(matrices, patches, out=result[sample])
    return result.reshape(len(x), *step.shape)


def windows(x: Floats, window: Window) -> Floats:
    """View x (samples, C, H, W) as (samples, C, kh, kw, oh, ow), zeros outside."""
    top, left, bottom, right = window.pads
    reach = reach_of(window)
    # With ceil_mode the last window may reach beyond the padding.
    bottom = max(bottom, reach[0] - x.shape[2] - top)
    right = max(right, reach[1] - x.shape[3] - left)
    cropped = x[:, :, max(0, -top) : x.shape[2] - max(0, -bottom), max(0, -left) : x.shape[3] - max(0, -right)]
    padded = np.pad(cropped, ((0, 0), (0, 0), (max(0, top), max(0, bottom)), (max(0, left), max(0, right))))
    s0, s1, s2, s3 = padded.strides
    return as_strided(
        padded,
        (*x.shape[:2], *window.kernel, *window.output),
        (s0, s1, s2 * window.dilations[0], s3 * window.dilations[1], s2 * window.strides[0], s3 * window.strides[1]),
        writeable=False,
    )
