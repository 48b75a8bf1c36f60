"""Products of residue rows with an integer matrix, exactly: (rows, inputs) to (rows, outputs).

Worked example: 16 queries times a matrix of 1024 x 1024. Rows are split into limbs, upper ones first, which makes 32
rows; one float64 product covers them all, and a pass joins rows r and 16 + r. One query alone is bound by reading the
weights, so a kernel reads them as 16-bit integers, once for both limbs: a quarter of the bytes.

Exactness is that of `heinfer.ring.product`: weights come in chunks of inputs whose rows sum to 2**28 - 1 at most.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.steps import MatMul
from heinfer.processes import core_count
from heinfer.ring import (
    THREADED_WORK,
    ModularMatrix,
    even_slices,
    high_limb,
    join_limbs,
    kernel,
    low_limb,
    run_tiles,
    scratch_array,
)

Residues = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Rows up to which the kernel for few rows is faster than BLAS.
_FEW_ROWS = 4
#: Most rows of a tile, most bytes of its limbs, and the fewest outputs that are worth a tile of their own.
_TILE_ROWS, _TILE_BYTES, _TILE_OUTPUTS = 512, 64 * 2**20, 64


def compile_matmul(step: MatMul, matrix: ModularMatrix, weights: NDArray[Any]) -> Callable[[Residues], Residues]:
    """Return the product as a function from (samples, elements) to (samples, elements).

    Args:
        step: shape of a sample of the result; its last axis is the outputs, the others count rows.
        matrix: the weights, shape (outputs, inputs).
        weights: the same, shape (inputs, outputs).
    """
    narrow = np.array(weights, np.int16, order="C")
    rows_of_sample = prod(step.shape[:-1])

    def run(x: Residues) -> Residues:
        rows = x.shape[0] * rows_of_sample
        out = np.empty((rows, matrix.outputs), np.int64)
        if out.size == 0 or matrix.inputs == 0:
            out[...] = 0
        else:
            source = x.reshape(rows, matrix.inputs)
            tile = _few_rows(matrix, narrow, source, out) if rows <= _FEW_ROWS else _many_rows(matrix, source, out)
            run_tiles(tile, _tiles(matrix, rows), work=2 * rows * matrix.inputs * matrix.outputs)
        return out.reshape(x.shape[0], prod(step.shape))

    return run


def _tiles(matrix: ModularMatrix, rows: int) -> list[tuple[slice, slice]]:
    """Tiles of (rows, outputs): outputs are cut only where there are too few rows for all threads."""
    longest = max(chunk.stop - chunk.start for chunk in matrix.chunks)
    workers = core_count() if 2 * rows * matrix.inputs * matrix.outputs >= THREADED_WORK else 1
    height = min(_TILE_ROWS, max(8, _TILE_BYTES // (16 * longest)))
    count = -(-rows // height)
    if rows >= 2 * workers * _TILE_OUTPUTS:
        count = -(-count // workers) * workers
    cuts = min(-(-workers // count), max(1, matrix.outputs // _TILE_OUTPUTS))
    return [(span, outputs) for span in even_slices(rows, count) for outputs in even_slices(matrix.outputs, cuts)]


def _many_rows(matrix: ModularMatrix, x: Residues, out: Residues) -> Callable[[tuple[slice, slice]], None]:
    modulus = matrix.parameters.modulus

    def tile(job: tuple[slice, slice]) -> None:
        span, outputs = job
        rows = 2 * (span.stop - span.start)
        product = scratch_array("product", rows, outputs.stop - outputs.start)
        for chunk in matrix.chunks:
            limbs = scratch_array("limbs", rows, chunk.stop - chunk.start)
            _split(x, span.start, chunk.start, limbs)
            np.matmul(limbs, matrix.weights[outputs, chunk].T, out=product)
            _join(product, span.start, outputs.start, modulus, chunk.start > 0, out)

    return tile


def _few_rows(
    matrix: ModularMatrix, weights: NDArray[np.int16], x: Residues, out: Residues
) -> Callable[[tuple[slice, slice]], None]:
    modulus = matrix.parameters.modulus

    def tile(job: tuple[slice, slice]) -> None:
        span, outputs = job
        rows = 2 * (span.stop - span.start)
        sums = scratch_array("product", rows, outputs.stop - outputs.start)
        for chunk in matrix.chunks:
            limbs = scratch_array("limbs", rows, chunk.stop - chunk.start)
            _split(x, span.start, chunk.start, limbs)
            _multiply(limbs, weights, chunk.start, outputs.start, sums)
            _join(sums, span.start, outputs.start, modulus, chunk.start > 0, out)

    return tile


@kernel
def _split(x: Residues, first_row: int, first_input: int, limbs: Floats) -> None:
    """Split rows: upper limbs of all, then lower ones; limbs is (2 * rows, inputs)."""
    rows, inputs = limbs.shape[0] // 2, limbs.shape[1]
    for row in range(rows):
        source = x[first_row + row, first_input : first_input + inputs]
        upper, lower = limbs[row], limbs[rows + row]
        for i in range(inputs):
            upper[i] = high_limb(source[i])
            lower[i] = low_limb(source[i])


@kernel
def _join(product: Floats, first_row: int, first_output: int, modulus: int, accumulate: bool, out: Residues) -> None:
    """Join limb sums, shape (2 * rows, outputs), into residues, or add them to residues that are there."""
    inverse = 1.0 / modulus
    rows, outputs = product.shape[0] // 2, product.shape[1]
    for row in range(rows):
        upper, lower = product[row], product[rows + row]
        target = out[first_row + row, first_output : first_output + outputs]
        if accumulate:
            for i in range(outputs):
                total = target[i] + join_limbs(upper[i], lower[i], modulus, inverse)
                target[i] = total - modulus if total >= modulus else total
        else:
            for i in range(outputs):
                target[i] = join_limbs(upper[i], lower[i], modulus, inverse)


@kernel
def _multiply(limbs: Floats, weights: NDArray[np.int16], first_input: int, first_output: int, sums: Floats) -> None:
    """Multiply limbs, shape (2 * rows, inputs), by a chunk of the weights, shape (all inputs, all outputs).

    Proof of exactness: as in `heinfer.ring.product`; a chunk's rows sum to 2**28 - 1 at most and limbs are below 2**25,
    so all partial sums, in any order, are integers below 2**53. Inputs go in pairs, which halves the traffic of sums.
    """
    rows, inputs = limbs.shape[0] // 2, limbs.shape[1]
    outputs = sums.shape[1]
    sums[:] = 0.0
    for k in range(0, inputs - 1, 2):
        left = weights[first_input + k, first_output : first_output + outputs]
        right = weights[first_input + k + 1, first_output : first_output + outputs]
        for row in range(rows):
            upper, lower = sums[row], sums[rows + row]
            high, low = limbs[row, k], limbs[rows + row, k]
            next_high, next_low = limbs[row, k + 1], limbs[rows + row, k + 1]
            for i in range(outputs):
                first, second = float(left[i]), float(right[i])
                upper[i] += first * high + second * next_high
                lower[i] += first * low + second * next_low
    if inputs % 2:
        last = weights[first_input + inputs - 1, first_output : first_output + outputs]
        for row in range(2 * rows):
            target, limb = sums[row], limbs[row, inputs - 1]
            for i in range(outputs):
                target[i] += float(last[i]) * limb
