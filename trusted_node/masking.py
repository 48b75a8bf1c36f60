"""Products with secrets, and what is added to values: the inner loops of prepared mode.

    mask        = e - a s   at the position of every uploaded value, e fresh noise    (before the query)
    correction  = W(a s)    by hint times secret                                        (before the query)
    b           = x_int + mask   mod q                                                  (online, up)
    x           = centre(y + correction) / scale + bias                                 (online, down)

With (b, a) an encryption of x_int under s, y = W(b): y + W(a s) = W(b + a s) = W(x_int + e). No branch and no address
depends on a secret, a mask or a value; the numbers of steps depend on public shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heinfer.ring import LANES, Transform, inverse_group, kernel, multiply_mod

Floats = NDArray[np.float64]
Residues = NDArray[np.int64]


class Ring(NamedTuple):
    """What kernels need of a transform: q and 1 / q as float64, `Transform.inverse_roots`, 1 / N mod q."""

    modulus: float
    inverse: float
    roots: Floats
    degree_inverse: float


def tables_of(transform: Transform) -> Ring:
    """Return a transform's tables for kernels."""
    return Ring(transform.modulus, transform.modulus_inverse, transform.inverse_roots, transform.degree_inverse)


@kernel
def to_residues(evaluations: Floats, modulus: float) -> None:
    """Bring centred evaluations into [0, q), in place: the second factor of `multiply_mod`."""
    flat = evaluations.reshape(-1)
    inverse = 1.0 / modulus
    for i in range(flat.size):
        flat[i] -= np.floor(flat[i] * inverse) * modulus  # -1 for what is negative, else 0


@kernel
def fill_lanes(evaluations: Floats, lane: int, out: Floats) -> None:
    """Copy one lane of a group to all lanes of `out`; shape (N, LANES) both."""
    for j in range(out.shape[0]):
        value = evaluations[j, lane]
        for copy in range(LANES):
            out[j, copy] = value


@kernel
def _multiply(left: Floats, right: Floats, modulus: float, inverse: float, out: Floats) -> None:
    # One dimension, no lanes: LLVM vectorises this and not the loop over eight lanes.
    for i in range(out.size):
        out[i] = multiply_mod(left[i], right[i], modulus, inverse)


@kernel
def _product(left: Floats, right: Floats, ring: Ring, out: Floats) -> None:
    """Multiply polynomials lane by lane: evaluations, the right ones in [0, q), to centred coefficients."""
    _multiply(left.reshape(-1), right.reshape(-1), ring.modulus, ring.inverse, out.reshape(-1))
    inverse_group(out, ring.roots, ring.degree_inverse, ring.modulus, ring.inverse)


@kernel
def _write_mask(
    product: Floats, lane: int, elements: NDArray[np.int32], noise: NDArray[np.int8], whole: int, out: Residues
) -> None:
    """Write e - a s mod q for the values of one ciphertext."""
    for j in range(product.shape[0]):
        element = elements[j]
        if element >= 0:  # public: where values lie
            value = int(noise[element]) - int(product[j, lane])
            out[element] = value + ((value >> 63) & whole)


@kernel
def subtract_from_noise(noise: NDArray[np.int8], whole: int, out: Residues) -> None:
    """Replace a s, residues in [0, q), by e - a s mod q; shape (samples, values) both."""
    for sample in range(out.shape[0]):
        for i in range(out.shape[1]):
            value = int(noise[sample, i]) - out[sample, i]
            out[sample, i] = value + ((value >> 63) & whole)


@kernel
def _write_reads(
    product: Floats, lane: int, reads: NDArray[np.int64], first: int, stride: int, whole: int, out: Residues
) -> None:
    """Write the coefficients that are read of one product."""
    for r in range(reads.size):
        value = int(product[reads[r], lane])
        out[first + r * stride] = value + ((value >> 63) & whole)


# Eight products are made at a time. For one sample the lanes are eight polynomials under one secret, for several
# samples one polynomial under eight secrets: a block of one ciphertext would leave seven lanes empty.


@kernel
def make_masks(
    public: Floats,
    secrets: Floats,
    ring: Ring,
    elements: NDArray[np.int32],
    noise: NDArray[np.int8],
    lanes: Floats,
    products: Floats,
    out: Residues,
) -> None:
    """Write e - a s mod q for every uploaded value of a block, of one sample or of up to LANES.

    Args:
        public: evaluations of all polynomials a, shape (groups, N, LANES).
        secrets: evaluations in [0, q), shape (N, LANES): of one sample in all lanes, or of one sample a lane.
        ring: tables.
        elements: which value lies at a coefficient, -1 for none, shape (ciphertexts, N).
        noise: e, shape (samples, values).
        lanes: scratch, shape (N, LANES).
        products: scratch, shape (N, LANES); holds products with secrets afterwards.
        out: shape (samples, values).
    """
    whole = int(ring.modulus)
    for ciphertext in range(elements.shape[0]):
        group, lane = ciphertext // LANES, ciphertext % LANES
        if out.shape[0] == 1:
            if lane == 0:
                _product(public[group], secrets, ring, products)
            _write_mask(products, lane, elements[ciphertext], noise[0], whole, out[0])
        else:
            fill_lanes(public[group], lane, lanes)
            _product(lanes, secrets, ring, products)
            for sample in range(out.shape[0]):
                _write_mask(products, sample, elements[ciphertext], noise[sample], whole, out[sample])


@kernel
def make_polynomial_corrections(
    hints: Floats,
    rows: int,
    secrets: Floats,
    ring: Ring,
    reads: NDArray[np.int64],
    row_stride: int,
    read_stride: int,
    lanes: Floats,
    products: Floats,
    out: Residues,
) -> None:
    """Write hint times secret at the coefficients that are read, of one sample or of up to LANES.

    Args:
        hints: evaluations, shape (groups, N, LANES), of which the first `rows` polynomials count.
        rows: polynomials.
        secrets: as in `make_masks`.
        ring: tables.
        reads: coefficients, the same for all polynomials.
        row_stride: elements of a sample's output between polynomials.
        read_stride: elements of a sample's output between reads.
        lanes: scratch, shape (N, LANES).
        products: scratch, shape (N, LANES).
        out: residues in [0, q), shape (samples, rows * reads).
    """
    whole = int(ring.modulus)
    for row in range(rows):
        group, lane = row // LANES, row % LANES
        if out.shape[0] == 1:
            if lane == 0:
                _product(hints[group], secrets, ring, products)
            _write_reads(products, lane, reads, row * row_stride, read_stride, whole, out[0])
        else:
            fill_lanes(hints[group], lane, lanes)
            _product(lanes, secrets, ring, products)
            for sample in range(out.shape[0]):
                _write_reads(products, sample, reads, row * row_stride, read_stride, whole, out[sample])


@kernel
def _reduced(value: int, modulus: int) -> int:
    """Reduce |value| < 2**62 to [0, q) without a division, whose time would depend on it."""
    rest = value - int(np.rint(float(value) * (1.0 / modulus))) * modulus
    return rest + ((rest >> 63) & modulus)


@kernel
def make_dense_corrections(hint: Residues, plus: Residues, minus: Residues, modulus: int, out: Residues) -> None:
    """Write the products of rows with ternary secrets; a row is read once for all samples.

    A sum of 4096 residues is below 2**62: rows are summed in pieces of that length, so int64 never overflows.

    Args:
        hint: residues in [0, q), shape (rows, N).
        plus: -1 (all bits set) where a secret is 1, else 0, shape (samples, N).
        minus: the same where it is -1.
        modulus: q.
        out: residues in [0, q), shape (samples, rows).
    """
    degree = hint.shape[1]
    for row in range(hint.shape[0]):
        for sample in range(out.shape[0]):
            total = 0
            for start in range(0, degree, 4096):
                part = 0
                for j in range(start, min(start + 4096, degree)):
                    part += (hint[row, j] & plus[sample, j]) - (hint[row, j] & minus[sample, j])
                total += _reduced(part, modulus)
            out[sample, row] = _reduced(total, modulus)


@kernel
def make_elementwise_corrections(
    weights: NDArray[np.int16], masks: Residues, noise: NDArray[np.int8], ring: Ring, out: Residues
) -> None:
    """Write w * (a s), with a s = e - mask; weights of shape (values,), all else (samples, values)."""
    whole = int(ring.modulus)
    for sample in range(out.shape[0]):
        for i in range(weights.size):
            product = noise[sample, i] - masks[sample, i]  # a s, above -q - 22
            product += (product >> 63) & whole
            product += (product >> 63) & whole
            product -= whole & ((whole - 1 - product) >> 63)
            # |w| < q, so the result is within q.
            value = int(multiply_mod(float(weights[i]), float(product), ring.modulus, ring.inverse))
            value += (value >> 63) & whole
            value -= whole & ((whole - 1 - value) >> 63)
            out[sample, i] = value


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


@kernel
def encrypt_rows(
    public: Floats,
    secret: Floats,
    ring: Ring,
    noise: NDArray[np.int8],
    x: NDArray[np.float32],
    scale: Floats,
    products: Floats,
    out: Residues,
) -> None:
    """Encrypt a group of rows of a batch: b = rint(x * scale) + e - a s mod q, coefficient by coefficient.

    Args:
        public: evaluations of the rows' polynomials a, shape (N, LANES).
        secret: evaluations of s in [0, q), the same in every lane, shape (N, LANES).
        ring: tables.
        noise: e, shape (rows, samples), rows <= LANES, samples <= N.
        x: finite values, shape (rows, samples), |x * scale| < q / 2.
        scale: shape (samples,).
        products: scratch, shape (N, LANES).
        out: residues in [0, q), shape (rows, samples).
    """
    whole = int(ring.modulus)
    _product(public, secret, ring, products)
    for row in range(out.shape[0]):
        for j in range(out.shape[1]):
            value = int(noise[row, j]) - int(products[j, row]) + int(np.rint(float(x[row, j]) * scale[j]))
            value += (value >> 63) & whole  # above -q - 21
            value += (value >> 63) & whole
            value -= whole & ((whole - 1 - value) >> 63)
            out[row, j] = value


@kernel
def decrypt_rows(
    hint: Floats,
    secret: Floats,
    ring: Ring,
    y: Residues,
    scale: Floats,
    row_scale: Floats,
    bias: Floats,
    products: Floats,
    out: NDArray[np.float32],
) -> None:
    """Decrypt a group of rows of a batch: centre(y + W(a) s) / (scale * row_scale) + bias.

    Args:
        hint: evaluations of the rows' W(a), shape (N, LANES).
        secret: as in `encrypt_rows`.
        ring: tables.
        y: the server's residues in [0, q), shape (rows, samples).
        scale: shape (samples,).
        row_scale: shape (rows,).
        bias: shape (rows,).
        products: scratch, shape (N, LANES).
        out: shape (rows, samples).
    """
    whole = int(ring.modulus)
    half = whole // 2
    _product(hint, secret, ring, products)
    for row in range(out.shape[0]):
        for j in range(out.shape[1]):
            value = y[row, j] + int(products[j, row])  # above -q / 2 and below 1.5 q
            value -= whole & ((half - value) >> 63)
            value += whole & ((value + half) >> 63)
            out[row, j] = float(value) / (scale[j] * row_scale[row]) + bias[row]
