"""Products with secrets, and what is added to values: the inner loops of prepared mode.

    mask        = e - a s   at the position of every uploaded value, e fresh noise    (before the query)
    correction  = W(a s)    by hint times secret                                        (before the query)
    b           = x_int + mask   mod q                                                  (online, up)
    x           = centre(y + correction) / scale + bias                                 (online, down)

With (b, a) an encryption of x_int under s, y = W(b): y + W(a s) = W(b + a s) = W(x_int + e). No branch and no address
depends on a secret, a mask or a value; the numbers of steps depend on public shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.ring import LANES, inverse_group, kernel, multiply_mod

Floats = NDArray[np.float64]
Residues = NDArray[np.int64]


@kernel
def secret_evaluations(evaluations: Floats, lane: int, modulus: float, out: Floats) -> None:
    """Copy one lane of a group of transformed secrets, centred, to all lanes of `out`, as residues in [0, q)."""
    whole = int(modulus)
    for j in range(out.shape[0]):
        value = int(evaluations[j, lane])
        residue = float(value + ((value >> 63) & whole))
        for copy in range(LANES):
            out[j, copy] = residue


@kernel
def _multiply(left: Floats, right: Floats, modulus: float, inverse: float, out: Floats) -> None:
    # One dimension, no lanes: LLVM vectorises this and not the loop over eight lanes.
    for i in range(out.size):
        out[i] = multiply_mod(left[i], right[i], modulus, inverse)


@kernel
def _product(
    factor: Floats, secret: Floats, roots: Floats, degree_inverse: float, modulus: float, inverse: float, out: Floats
) -> None:
    """Multiply the polynomials of a group with a secret: both as evaluations, the product as centred coefficients."""
    _multiply(factor.reshape(-1), secret.reshape(-1), modulus, inverse, out.reshape(-1))
    inverse_group(out, roots, degree_inverse, modulus, inverse)


@kernel
def make_masks(
    public: Floats,
    secret: Floats,
    roots: Floats,
    degree_inverse: float,
    modulus: float,
    inverse: float,
    elements: NDArray[np.int32],
    noise: NDArray[np.int8],
    scratch: Floats,
    out: Residues,
) -> None:
    """Write e - a s mod q for every uploaded value of a block.

    Args:
        public: evaluations of all polynomials a, shape (groups, N, LANES).
        secret: evaluations of s in [0, q), the same in every lane, shape (N, LANES).
        roots: `Transform.inverse_roots`.
        degree_inverse: 1 / N mod q.
        modulus: q.
        inverse: 1 / q, rounded.
        elements: which value lies at a coefficient, -1 for none, shape (ciphertexts, N).
        noise: e, shape (values,).
        scratch: shape (N, LANES); holds products with the secret afterwards.
        out: shape (values,).
    """
    whole = int(modulus)
    for ciphertext in range(elements.shape[0]):
        lane = ciphertext % LANES
        if lane == 0:
            _product(public[ciphertext // LANES], secret, roots, degree_inverse, modulus, inverse, scratch)
        for j in range(secret.shape[0]):
            element = elements[ciphertext, j]
            if element >= 0:  # public: where values lie
                value = int(noise[element]) - int(scratch[j, lane])
                out[element] = value + ((value >> 63) & whole)


@kernel
def make_polynomial_corrections(
    hints: Floats,
    rows: int,
    secret: Floats,
    roots: Floats,
    degree_inverse: float,
    modulus: float,
    inverse: float,
    reads: NDArray[np.int64],
    row_stride: int,
    read_stride: int,
    scratch: Floats,
    out: Residues,
) -> None:
    """Write hint times secret at the coefficients that are read.

    Args:
        hints: evaluations, shape (groups, N, LANES), of which the first `rows` polynomials count.
        rows: polynomials.
        secret: as in `make_masks`; so are the next four.
        roots: see there.
        degree_inverse: see there.
        modulus: see there.
        inverse: see there.
        reads: coefficients, the same for all polynomials.
        row_stride: elements of `out` between polynomials.
        read_stride: elements of `out` between reads.
        scratch: shape (N, LANES).
        out: residues in [0, q), shape (rows * reads,).
    """
    whole = int(modulus)
    for row in range(rows):
        lane = row % LANES
        if lane == 0:
            _product(hints[row // LANES], secret, roots, degree_inverse, modulus, inverse, scratch)
        first = row * row_stride
        for r in range(reads.size):
            value = int(scratch[reads[r], lane])
            out[first + r * read_stride] = value + ((value >> 63) & whole)


@kernel
def _reduced(value: int, modulus: int) -> int:
    """Reduce |value| < 2**62 to [0, q) without a division, whose time would depend on it."""
    rest = value - int(np.rint(float(value) * (1.0 / modulus))) * modulus
    return rest + ((rest >> 63) & modulus)


@kernel
def make_dense_corrections(hint: Residues, plus: Residues, minus: Residues, modulus: int, out: Residues) -> None:
    """Write the products of rows with ternary secrets.

    A sum of 4096 residues is below 2**62: rows are summed in pieces of that length, so int64 never overflows.

    Args:
        hint: residues in [0, q), shape (rows, N).
        plus: -1 (all bits set) where the secret is 1, else 0, shape (N,).
        minus: the same where it is -1.
        modulus: q.
        out: residues in [0, q), shape (rows,).
    """
    degree = hint.shape[1]
    for row in range(hint.shape[0]):
        total = 0
        for start in range(0, degree, 4096):
            part = 0
            for j in range(start, min(start + 4096, degree)):
                part += (hint[row, j] & plus[j]) - (hint[row, j] & minus[j])
            total += _reduced(part, modulus)
        out[row] = _reduced(total, modulus)


@kernel
def make_elementwise_corrections(
    weights: NDArray[np.int16], masks: Residues, noise: NDArray[np.int8], modulus: float, inverse: float, out: Residues
) -> None:
    """Write w * (a s), with a s = e - mask; all of shape (values,)."""
    whole = int(modulus)
    for i in range(weights.size):
        product = noise[i] - masks[i]  # a s, above -q - 22
        product += (product >> 63) & whole
        product += (product >> 63) & whole
        product -= whole & ((whole - 1 - product) >> 63)
        value = int(multiply_mod(float(weights[i]), float(product), modulus, inverse))  # |w| < q, so within q
        value += (value >> 63) & whole
        value -= whole & ((whole - 1 - value) >> 63)
        out[i] = value


@kernel
def add_to_masks(x: NDArray[Any], scale: Floats, gather: NDArray[np.int32], modulus: int, masks: Residues) -> None:
    """Overwrite masks with b = rint(x * scale) + mask mod q.

    Args:
        x: finite values of shape (samples, elements), |x * scale| < q / 2.
        scale: shape (samples,).
        gather: which element an uploaded value is, -1 for padding, shape (values,).
        modulus: q.
        masks: residues in [0, q), shape (samples, values); residues in [0, q) afterwards.
    """
    for sample in range(x.shape[0]):
        factor = scale[sample]
        for i in range(gather.size):
            element = gather[i]
            residue = masks[sample, i]
            if element >= 0:  # public: where padding lies
                residue += int(np.rint(float(x[sample, element]) * factor))
                residue += (residue >> 63) & modulus
                residue -= modulus & ((modulus - 1 - residue) >> 63)
                masks[sample, i] = residue


@kernel
def remove_corrections(
    y: Residues,
    corrections: Residues,
    scale: Floats,
    row_scale: Floats,
    bias: Floats,
    modulus: int,
    out: NDArray[np.float32],
) -> None:
    """Write centre(y + correction) / (scale * row_scale) + bias, and wipe the corrections.

    Args:
        y: the server's residues in [0, q), shape (samples, values).
        corrections: residues in [0, q), same shape; zeros afterwards.
        scale: s_x of every sample, shape (samples,).
        row_scale: of every value, shape (values,).
        bias: likewise.
        modulus: q.
        out: same shape.
    """
    half = modulus // 2
    for sample in range(y.shape[0]):
        for i in range(y.shape[1]):
            value = y[sample, i] + corrections[sample, i]
            value -= modulus & ((modulus - 1 - value) >> 63)
            value -= modulus & ((half - value) >> 63)
            out[sample, i] = float(value) / (scale[sample] * row_scale[i]) + bias[i]
            corrections[sample, i] = 0
