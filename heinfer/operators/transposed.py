"""The transpose of a linear program, on residues: v = P^T r mod q, for the check that a server computed P.

    r, one residue an output element --(steps backwards)--> v, one an input element, with  r . P(b) = v . b mod q

Worked example: a 3x3 convolution of 16 channels to 32. r has 32 planes; each channel of v is the sum over kernel points
of 32 planes of r, weighted and moved back to where that point of the window read. Made once for a deployment, in the
owner's domain; what takes time is the same number of multiply-adds as the program itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.operators.movements import by_tiles, scale_elements
from heinfer.operators.plain import TILE_WEIGHTS
from heinfer.operators.planes import reach_of
from heinfer.operators.program import Arrays, Program
from heinfer.operators.steps import Conv, MatMul, Scale, Shape, Step, Sum, Take, Window, WindowSum
from heinfer.ring import ModularMatrix, RingParameters, checked_weights

Residues = NDArray[np.int64]
#: Halves in which residues are added up by index: 2**38 of them fit into int64.
_HALF_BITS = 25


def apply_transpose(
    program: Program, arrays: Arrays, outputs: Sequence[Residues], parameters: RingParameters
) -> list[Residues]:
    """Apply the transpose of a server program.

    Args:
        program: server program (no `Shift`, no `Rescale`).
        arrays: integer weights and index maps, checked by `Program.check_arrays`.
        outputs: int64 in [0, q), one array a program output, of its shape.
        parameters: ring.

    Returns:
        int64 in [0, q), one array a program input, of its shape.

    Raises:
        ParameterError: a step that belongs to the node.
    """
    numbered = list(zip(program.outputs, outputs, strict=True))
    return transpose_steps(program.inputs, program.steps, numbered, arrays, parameters)


def transpose_steps(
    inputs: Sequence[Shape],
    steps: Sequence[Step],
    outputs: Sequence[tuple[int, Residues]],
    arrays: Arrays,
    parameters: RingParameters,
) -> list[Residues]:
    """Apply the transpose of steps that need not be a whole program.

    Args:
        inputs: shapes of the values before the first step.
        steps: as in a server program.
        outputs: values by their numbers, each with int64 in [0, q) of its shape.
        arrays: integer weights and index maps.
        parameters: ring.

    Returns:
        As `apply_transpose`.

    Raises:
        ParameterError: a step that belongs to the node.
    """
    modulus, shapes = parameters.modulus, (*inputs, *(step.shape for step in steps))
    gathered: dict[int, Residues] = {}

    def add(value: int, part: Residues) -> None:
        known = gathered.get(value)
        shaped = part.reshape(shapes[value])
        gathered[value] = shaped % modulus if known is None else (known + shaped) % modulus

    for output, part in outputs:
        add(output, part)
    first = len(inputs)
    for number in range(len(shapes) - 1, first - 1, -1):
        if number not in gathered:  # nothing that counts reads it
            continue
        part, step = gathered.pop(number), steps[number - first]
        match step:
            case Conv():
                add(step.source, _convolution(step, arrays, shapes[step.source], part, parameters))
            case MatMul():
                add(step.source, _product(arrays[step.weights], part.reshape(-1, step.shape[-1]).T, parameters))
            case Scale():
                weights = checked_weights(arrays[step.weights].reshape(-1, 1))[:, 0]
                add(step.source, by_tiles(part.reshape(1, -1), part.size, scale_elements, weights, modulus))
            case Take():
                for source, back in zip(step.sources, _take(step, arrays, shapes, part, modulus), strict=True):
                    add(source, back)
            case Sum():
                for sign, source in zip(step.signs, step.sources, strict=True):
                    add(source, sign * part)
            case WindowSum():
                points = prod(step.window.kernel)
                patches = np.broadcast_to(part[:, None], (part.shape[0], points, *part.shape[1:]))
                add(step.source, _fold_back(patches, step.window, shapes[step.source], modulus))
            case _:
                raise ParameterError(f"a {step.kind} belongs to the node, found in a server's program")
    return [gathered.get(number, np.zeros(shape, np.int64)) for number, shape in enumerate(inputs)]


def _product(weights: NDArray[Any], part: Residues, parameters: RingParameters) -> Residues:
    """Return (weights @ part).T; weights become float64 in tiles of rows, for they may be gigabytes as such."""
    made = np.empty((part.shape[1], weights.shape[0]), np.int64)
    rows = max(1, TILE_WEIGHTS // max(1, weights.shape[1]))
    for first in range(0, weights.shape[0], rows):
        matrix = ModularMatrix(weights[first : first + rows], parameters)
        made[:, first : first + rows] = matrix.multiply(part).T
    return made


def _convolution(step: Conv, arrays: Arrays, source: Shape, part: Residues, parameters: RingParameters) -> Residues:
    weights, window = arrays[step.weights], step.window
    outputs, channels = weights.shape[0] // step.group, weights.shape[1]
    made = []
    for group in range(step.group):
        rows = slice(group * outputs, (group + 1) * outputs)
        matrix = ModularMatrix(weights[rows].reshape(outputs, -1).T, parameters)
        patches = matrix.multiply(part[rows].reshape(outputs, -1)).reshape(
            channels, prod(window.kernel), *part.shape[1:]
        )
        made.append(_fold_back(patches, window, (channels, *source[1:]), parameters.modulus))
    return np.concatenate(made)


def _fold_back(patches: Residues, window: Window, source: Shape, modulus: int) -> Residues:
    """Add patches, shape (channels, kernel points, output height, output width), where their windows read."""
    reach = reach_of(window)
    # The plane that windows read, whatever of it is padding, or cropped from the source.
    plane = np.zeros((source[0], *reach), np.int64)
    for point in range(prod(window.kernel)):
        first = [i * d for i, d in zip(divmod(point, window.kernel[1]), window.dilations, strict=True)]
        spots = tuple(
            slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(first, window.output, window.strides, strict=True)
        )
        target = plane[:, spots[0], spots[1]]
        target += patches[:, point]
        target %= modulus
    result = np.zeros(source, np.int64)
    inside, outside = [], []
    for length, extent, pad in zip(source[1:], reach, window.pads[:2], strict=True):
        start, stop = max(0, -pad), min(length, extent - pad)
        inside.append(slice(start, max(start, stop)))
        outside.append(slice(start + pad, max(start, stop) + pad))
    result[:, inside[0], inside[1]] = plane[:, outside[0], outside[1]]
    return result


def _take(step: Take, arrays: Arrays, shapes: Sequence[Shape], part: Residues, modulus: int) -> list[Residues]:
    sizes = [prod(shapes[source]) for source in step.sources]
    flat = part.reshape(-1)
    if step.indices is not None:
        indices = arrays[step.indices]
        used = indices >= 0
        halves = []
        for half in (flat >> _HALF_BITS, flat & (2**_HALF_BITS - 1)):
            total = np.zeros(sum(sizes), np.int64)
            np.add.at(total, indices[used], half[used])
            halves.append(total % modulus)
        # The upper half times 2**25, in two steps below 2**63.
        upper = halves[0]
        for bits in (13, 12):
            upper = (upper << bits) % modulus
        flat = (upper + halves[1]) % modulus
    return np.split(flat, np.cumsum(sizes)[:-1])
