"""Hints: the weights applied to the public polynomials a, once, so that W(a s) costs the node one product a row.

    POLYNOMIAL   h_o = sum over channels c and kernel offsets k of w[o, c, k] * X^-(place of c and k) * (the a there)
                 (h_o s) at coefficient p is output o at the position whose window starts at p
    DENSE        H = W A, A[i] the row of the negacyclic matrix of a that gives a s at the position of input i: row o of
                 H is the polynomial w_o(X) a(1/X)
                 (H s)[o] is output o
    ELEMENTWISE  the weights

Made where the weights are known, by the partitioner in the owner's domain. Nothing here is secret.
Source: design note "Encrypted linear algebra", Prepared mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.prepared import Hint, HintKind, PreparedForm, hint_names
from heinfer.operators.steps import Conv, MatMul, Step, Window
from heinfer.ring import (
    LANES,
    ModularMatrix,
    RingParameters,
    Transform,
    forward_group,
    from_lanes,
    inverse_group,
    kernel,
    multiply_mod,
    run_tiles,
    scratch_array,
)

Residues = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Residues of shifted polynomials that are in memory at a time (32 MB).
_PIECE: Final = 1 << 22


def make_hints(
    form: PreparedForm, arrays: Mapping[str, NDArray[Any]], public: Residues, parameters: RingParameters
) -> list[NDArray[Any]]:
    """Apply a block's weights to its public polynomials.

    Args:
        form: how the block is cut.
        arrays: integer weights.
        public: the polynomials a, int64 in [0, q), shape (ciphertexts, N).
        parameters: ring of this block's degree.

    Returns:
        One array a hint of the form: int64 residues of shape (rows, N), or int16 weights of shape (rows,).
    """
    return [_make(form, hint, arrays, public, parameters) for hint in form.hints]


def _make(
    form: PreparedForm, hint: Hint, arrays: Mapping[str, NDArray[Any]], public: Residues, parameters: RingParameters
) -> NDArray[Any]:
    step = form.program.steps[hint.step]
    weights = arrays[hint_names(form.program, hint)]
    match hint.kind:
        case HintKind.ELEMENTWISE:
            return weights.astype(np.int16).ravel()
        case HintKind.DENSE:
            return _dense(form, hint, step, weights, public, parameters)
        case HintKind.POLYNOMIAL:
            return _polynomials(hint, step, weights, public, parameters)


def _polynomials(
    hint: Hint, step: Step, weights: NDArray[Any], public: Residues, parameters: RingParameters
) -> Residues:
    """Return one polynomial an output channel."""
    if isinstance(step, MatMul):  # a 1x1 convolution whose channels are features
        weights, group = weights.T[:, :, None, None], 1
        down, across = np.zeros((2, 1), np.int64)
    else:
        assert isinstance(step, Conv)  # the only two steps with polynomial hints
        group = step.group
        down, across = (_first_window(step.window, axis) for axis in range(2))
    outputs, channels = weights.shape[:2]
    per_group = outputs // group
    made = np.empty((outputs, parameters.degree), np.int64)
    doubled = np.concatenate([public, (parameters.modulus - public) % parameters.modulus], axis=1)
    phases = hint.phases
    phase = (down % phases[0])[:, None] * phases[1] + across % phases[1]
    offset = (down // phases[0])[:, None] * hint.width + across // phases[1]
    for g in range(group):
        channel = g * channels + np.arange(channels)
        plane = channel[:, None] * prod(phases) + phase.ravel()
        rows = (hint.first_ciphertext + plane // hint.planes).ravel()
        shift = plane % hint.planes * hint.plane + offset.ravel()
        matrix = ModularMatrix(weights[g * per_group : (g + 1) * per_group].reshape(per_group, -1), parameters)
        _multiply_shifted(matrix, doubled, rows, shift.ravel(), made[g * per_group : (g + 1) * per_group])
    return made


def _multiply_shifted(
    matrix: ModularMatrix, doubled: Residues, rows: NDArray[np.int64], shift: NDArray[np.int64], out: Residues
) -> None:
    """Multiply a matrix with the polynomials X^-shift * a of some rows, some coefficients at a time.

    Args:
        matrix: shape (outputs, shifted polynomials).
        doubled: a and -a, shape (ciphertexts, 2 N): coefficient N + j of X^-shift a is -a_j.
        rows: the ciphertext of every shifted polynomial.
        shift: its shift.
        out: shape (outputs, N).
    """
    degree = out.shape[1]
    width = max(8, min(degree, _PIECE // max(1, len(rows))))
    for start in range(0, degree, width):
        shifted = np.empty((len(rows), min(width, degree - start)), np.int64)
        _copy_shifted(doubled, rows, shift + start, shifted)
        matrix.multiply(shifted, out=out[:, start : start + shifted.shape[1]])


@kernel
def _copy_shifted(doubled: Residues, rows: NDArray[np.int64], first: NDArray[np.int64], out: Residues) -> None:
    """Write out[i] = doubled[rows[i], first[i]:...]."""
    for i in range(out.shape[0]):
        out[i] = doubled[rows[i], first[i] : first[i] + out.shape[1]]


def _dense(
    form: PreparedForm, hint: Hint, step: Step, weights: NDArray[Any], public: Residues, parameters: RingParameters
) -> Residues:
    """Return w_o(X) a(1/X) for every output o, where w_o has the weights of o at the positions of their inputs.

    (a s) at position p is the sum over j of s_j times coefficient j of X^p a(1/X); so coefficient j of the product is
    what s_j adds to output o.
    """
    assert isinstance(step, Conv | MatMul)  # the only two steps with dense hints
    shape = form.program.inputs[step.source]
    first = sum(map(prod, form.program.inputs[: step.source]))
    positions = form.positions[first : first + prod(shape)].reshape(shape)
    transform = Transform.of(parameters)
    mirrored = np.concatenate([public[:, :1], (parameters.modulus - public[:, :0:-1]) % parameters.modulus], axis=1)
    evaluations = _side_by_side(transform.forward(mirrored), len(public), transform.modulus)
    made = np.empty((hint.rows, parameters.degree), np.int64)
    if isinstance(step, MatMul):
        tokens = made.reshape(-1, weights.shape[1], parameters.degree)
        for token, out in zip(positions.reshape(len(tokens), -1), tokens, strict=True):
            _multiply_placed(weights.T, token, evaluations, transform, out)
        return made
    rows = made.reshape(step.group, -1, prod(step.window.output), parameters.degree)
    for part, matrix, out in zip(np.split(positions, step.group), np.split(weights, step.group), rows, strict=True):
        for number, window in enumerate(_windows(part, step.window)):
            found = np.empty((len(matrix), parameters.degree), np.int64)
            _multiply_placed(matrix.reshape(len(matrix), -1), window, evaluations, transform, found)
            out[:, number] = found
    return made


def _first_window(window: Window, axis: int) -> NDArray[np.int64]:
    """Return the rows (axis 0) or columns (axis 1) of an uploaded plane that a convolution's first window reads."""
    return np.arange(window.kernel[axis]) * window.dilations[axis] - window.pads[axis]


def _windows(positions: NDArray[np.int64], window: Window) -> NDArray[np.int64]:
    """Return what every window reads of uploaded channels, shape (windows, channels * kernel)."""
    down, across = (
        np.arange(window.output[i])[:, None] * window.strides[i] + _first_window(window, i) for i in range(2)
    )
    read = positions[:, down[:, None, :, None], across[None, :, None, :]]  # (channels, *output, *kernel)
    return np.ascontiguousarray(np.moveaxis(read, 0, 2)).reshape(prod(window.output), -1)


def _side_by_side(evaluations: Floats, count: int, modulus: float) -> Floats:
    """Bring evaluations, shape (groups, N, LANES), into [0, q) and the shape (count, N)."""
    rows = evaluations.transpose(0, 2, 1).reshape(-1, evaluations.shape[1])[:count]
    return np.where(rows < 0, rows + modulus, rows)


def _multiply_placed(
    matrix: NDArray[Any], positions: NDArray[np.int64], evaluations: Floats, transform: Transform, out: Residues
) -> None:
    """Multiply the rows of a matrix, as polynomials over some ciphertexts, with one polynomial a ciphertext.

    Args:
        matrix: integer weights, shape (outputs, inputs).
        positions: ciphertext * N + coefficient of every input, shape (inputs,).
        evaluations: in [0, q), shape (ciphertexts, N).
        transform: of the ring.
        out: sums over the ciphertexts, shape (outputs, N).
    """
    degree, modulus, inverse = transform.parameters.degree, transform.modulus, transform.modulus_inverse
    ciphertexts, coefficients = np.divmod(positions, degree)
    used = [(c, np.flatnonzero(ciphertexts == c)) for c in np.unique(ciphertexts)]

    def run(first: int) -> None:
        rows = matrix[first : first + LANES]
        placed, sums = (scratch_array(name, degree, LANES) for name in ("placed", "sums"))
        sums[...] = 0
        for ciphertext, inputs in used:
            placed[...] = 0
            placed[coefficients[inputs], : len(rows)] = rows[:, inputs].T
            forward_group(placed, transform.roots, modulus, inverse)
            _add_products(placed, evaluations[ciphertext], modulus, inverse, sums)
        inverse_group(sums, transform.inverse_roots, transform.degree_inverse, modulus, inverse)
        from_lanes(sums, 0, out[first : first + LANES], modulus)

    run_tiles(run, range(0, len(matrix), LANES))


@kernel
def _add_products(x: Floats, y: Floats, modulus: float, inverse: float, sums: Floats) -> None:
    """Add x * y, x of shape (N, LANES) and centred, y of shape (N,) in [0, q).

    `multiply_mod` returns at most q for |x| < q / 2, so sums within (q + 1) / 2 stay below 2q, and a rounded quotient
    brings them back (`heinfer.ring.transform`).
    """
    for k in range(x.shape[0]):
        for lane in range(x.shape[1]):
            value = sums[k, lane] + multiply_mod(x[k, lane], y[k], modulus, inverse)
            sums[k, lane] = value - np.rint(value * inverse) * modulus
