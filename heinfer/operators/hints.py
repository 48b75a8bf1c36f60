"""Hints: the weights applied to the public polynomials a, once, so that W(a s) costs the node one product a row.

    POLYNOMIAL   h_o = sum over channels c and kernel offsets k of w[o, c, k] * X^-(place of c and k) * (a that c is in)
                 (h_o s) at coefficient p is output o at the position whose window starts at p
    DENSE        H = W A, A[i] the row of the negacyclic matrix of a that gives a s at the position of input i
                 (H s)[o] is output o
    ELEMENTWISE  the weights

Made where the weights are known, by the partitioner in the owner's domain. Nothing here is secret.
Source: design note "Encrypted linear algebra", Prepared mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.prepared import Hint, HintKind, PreparedForm, hint_names
from heinfer.operators.program import Program
from heinfer.operators.residues import ResidueProgram
from heinfer.operators.steps import Conv, MatMul, Step
from heinfer.ring import ModularMatrix, RingParameters

Residues = NDArray[np.int64]
#: Residues of shifted polynomials, or of rows of a negacyclic matrix, that are in memory at a time (32 MB).
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
            return _dense(form, hint, step, arrays, public, parameters)
        case HintKind.POLYNOMIAL:
            return _polynomials(hint, step, weights, public, parameters)


def _polynomials(
    hint: Hint, step: Step, weights: NDArray[Any], public: Residues, parameters: RingParameters
) -> Residues:
    """Return one polynomial an output channel."""
    if isinstance(step, MatMul):  # a 1x1 convolution whose channels are features
        weights, group = weights.T[:, :, None, None], 1
        dilations = (1, 1)
    else:
        assert isinstance(step, Conv)  # the only two steps with polynomial hints
        group, dilations = step.group, step.window.dilations
    outputs, channels, down, across = weights.shape
    per_group = outputs // group
    made = np.empty((outputs, parameters.degree), np.int64)
    offsets = (np.arange(down)[:, None] * dilations[0] * hint.width + np.arange(across) * dilations[1]).ravel()
    for g in range(group):
        channel = g * channels + np.arange(channels)
        ciphertext = hint.first_ciphertext + channel // hint.planes
        shift = (channel % hint.planes * hint.plane)[:, None] + offsets
        matrix = ModularMatrix(weights[g * per_group : (g + 1) * per_group].reshape(per_group, -1), parameters)
        rows = np.repeat(ciphertext, len(offsets))
        _multiply_shifted(matrix, public, rows, shift.ravel(), made[g * per_group : (g + 1) * per_group])
    return made


def _multiply_shifted(
    matrix: ModularMatrix, public: Residues, rows: NDArray[np.int64], shift: NDArray[np.int64], out: Residues
) -> None:
    """Multiply a matrix with the polynomials X^-shift * public[row], some coefficients at a time."""
    degree, modulus = public.shape[1], matrix.parameters.modulus
    doubled = np.concatenate([public, (modulus - public) % modulus], axis=1)  # coefficient N + j of X^-shift a is -a_j
    width = max(8, min(degree, _PIECE // max(1, len(rows))))
    for start in range(0, degree, width):
        columns = shift[:, None] + np.arange(start, min(start + width, degree))
        piece = np.ascontiguousarray(out[:, start : start + columns.shape[1]])
        out[:, start : start + columns.shape[1]] = matrix.multiply(doubled[rows[:, None], columns], out=piece)


def _dense(
    form: PreparedForm,
    hint: Hint,
    step: Step,
    arrays: Mapping[str, NDArray[Any]],
    public: Residues,
    parameters: RingParameters,
) -> Residues:
    """Return the step applied to every column of the negacyclic matrices of its input's polynomials."""
    assert isinstance(step, Conv | MatMul)  # the only two steps with dense hints
    sizes = [prod(shape) for shape in form.program.inputs]
    first = sum(sizes[: step.source])
    positions = form.positions[first : first + sizes[step.source]]
    alone = Program((form.program.inputs[step.source],), (replace(step, source=0),), (1,))
    program = ResidueProgram(alone, arrays, parameters)
    degree = parameters.degree
    made = np.empty((hint.rows, degree), np.int64)
    width = max(8, min(degree, _PIECE // max(1, len(positions))))
    for start in range(0, degree, width):
        columns = np.arange(start, min(start + width, degree))
        values = negacyclic_columns(public, positions, columns, parameters.modulus)
        (result,) = program.evaluate([values.reshape(len(columns), *alone.inputs[0])])
        made[:, columns] = result.reshape(len(columns), -1).T
    return made


def negacyclic_columns(
    public: Residues, positions: NDArray[np.int64], columns: NDArray[np.int64], modulus: int
) -> Residues:
    """Return entries of the negacyclic matrices: (a s)[position] is the sum over columns j of entry[j, position] * s_j.

    Args:
        public: polynomials a, shape (ciphertexts, N).
        positions: ciphertext * N + coefficient, shape (values,).
        columns: j, shape (columns,).
        modulus: q.

    Returns:
        int64 in [0, q), shape (columns, values).
    """
    degree = public.shape[1]
    ciphertext, coefficient = positions // degree, positions % degree
    index = coefficient[None] - columns[:, None]
    entries = public[ciphertext[None], index % degree]
    signed: Residues = np.where(index >= 0, entries, (modulus - entries) % modulus)
    return signed
