"""The negacyclic number-theoretic transform (NTT), exact, in float64 with fused multiply-add (FMA).

Worked example: N = 2048, q = 1125899906826241. A product of polynomials modulo X^N + 1 is two forward transforms, N
products and one inverse transform. Eight polynomials lie side by side, one per lane of the last axis, so that every
butterfly is the same for all lanes and fills vector registers.

Entry k of a transform is the polynomial's value at psi**(2 * bitrev(k) + 1), psi the smallest primitive 2N-th root of
unity modulo q. Root and order are SEAL's (native/src/seal/util/ntt.cpp), so transforms of either can be mixed.

Formal guarantee. Every intermediate is an integer below 4q < 2**52 in magnitude, which float64 holds exactly; products
are reduced by `multiply_mod`, which is exact; nothing is rounded. FMA in software gives the same bits, more slowly.
No branch, address or number of iterations depends on a coefficient. Public arithmetic: nothing here is secret by
itself, but transforms of secrets may use it.

Sources: Harvey, Faster arithmetic for number-theoretic transforms, arXiv:1205.2926 (lazy reduction); van der Hoeven,
Lecerf, Quintin, Modular SIMD arithmetic in Mathemagix, arXiv:1407.3383 (modular products by FMA); Seiler, ePrint
2018/039 (centred residues, negacyclic butterflies).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Any, Final, cast

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.ring.packing import check_array, kernel
from heinfer.ring.parameters import RingParameters
from heinfer.ring.product import run_tiles

#: Polynomials in a group: two AVX2 or one AVX-512 register of float64.
LANES: Final = 8

#: Rows that are transposed at once: a cache line of eight residues is then read or written as a whole. Lines of
#: different polynomials lie a multiple of 16 KB apart and would push each other out of the cache.
_ROWS: Final = 8

#: Multiply-adds that a butterfly of one lane is worth, for the threshold of `run_tiles`.
_BUTTERFLY_WORK: Final = 16


def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> tuple[Any, Callable[..., Any]]:
    """For kernels: a * b + c with a single rounding. LLVM's fma, in hardware where there is one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


fma = cast("Callable[[float, float, float], float]", intrinsic(_fma))


@kernel
def multiply_mod(a: float, w: float, modulus: float, inverse: float) -> float:
    """Multiply modulo q, exactly: |result| < 2q for |a| < 8q, <= 1.5q for |a| <= 4q, <= q for |a| <= 2q.

    Proof, with k = q / 2**50 in (1/2, 1). high is a * w, rounded, and low = a * w - high is exact (FMA). The quotient t
    is an integer, off from high / q by at most
        r = |high| * 2**-103 <= k * k   the error of 1 / q, which lies in (2**-50, 2**-49),
        s                               rounding of high * inverse, and then to an integer,
    and a * w - t * q = (high - t * q) + low, |low| <= ulp(high) / 2. Three cases of |high|:
        below 2**101 (|a| <= 2q)  r <= k*k/4, s <= 1/2 + 1/8 (quotient below 2**51),  |low| <= 2**47 = q / 8k
        below 2**102 (|a| <= 4q)  r <= k*k/2, s <= 1/2 + 1/4 (below 2**52),           |low| <= 2**48 = q / 4k
        below 2**103 (|a| < 8q)   r < k*k,    s <= 1/2 (spacing 1: integers already), |low| <= 2**49 = q / 2k
    The sums k*k/c + s + 1/2ck, convex in k, are largest at k = 1: 1, 3/2 and 2. (In the last case k*k > 1/2, as
    8 q*q > 2**102. A product between 4 q*q and 2**102 has r <= 1/2, s <= 3/4 and |low| <= q/2: 7/4.) high - t * q is an
    integer below 2**52, so the second FMA rounds nothing, nor does the last sum. Should a quotient near a power of two
    be rounded across it, s becomes smaller.

    Args:
        a: integer, |a| < 8q.
        w: integer in [0, q).
        modulus: q, 2**49 < q < 2**50.
        inverse: 1 / q, rounded.

    Returns:
        An integer congruent to a * w.
    """
    high = a * w
    low = fma(a, w, -high)
    return fma(-np.rint(high * inverse), modulus, high) + low


@kernel
def _reduce(a: float, modulus: float, inverse: float) -> float:
    """Reduce |a| <= 4q to (q + 1) / 2 at most; a second time, to (q - 1) / 2: the centred residue.

    The estimate of a / q is off by less than 2**-50, so that only an `a` next to (k + 1/2) q may go to the wrong side,
    and then exceeds q / 2 by 1/2. The second time, at quotients near 1/2, it is off by 2**-52 at most, and the nearest
    ones are (q - 1) / 2q and (q + 1) / 2q, more than 2**-51 away from 1/2.
    """
    quotient: float = np.rint(a * inverse)
    return a - quotient * modulus


# The butterflies of a block run over two one-dimensional slices: LLVM then checks once that they do not overlap, and
# vectorises (twice the speed, on AVX2).


@kernel
def _forward_stage(
    values: NDArray[np.float64],
    roots: NDArray[np.float64],
    size: int,
    reduce_first: bool,
    modulus: float,
    inverse: float,
) -> None:
    """Butterflies (u, v) -> (u + w v, u - w v) between values `size` apart, one w for each block of 2 * size."""
    blocks = values.size // (2 * size)
    for block in range(blocks):
        start = 2 * size * block
        low, high = values[start : start + size], values[start + size : start + 2 * size]
        w = roots[blocks + block]
        if reduce_first:
            for index in range(size):
                u = _reduce(low[index], modulus, inverse)
                v = multiply_mod(high[index], w, modulus, inverse)
                low[index], high[index] = u + v, u - v
        else:
            for index in range(size):
                u, v = low[index], multiply_mod(high[index], w, modulus, inverse)
                low[index], high[index] = u + v, u - v


@kernel
def _inverse_stage(
    values: NDArray[np.float64], inverse_roots: NDArray[np.float64], size: int, modulus: float, inverse: float
) -> None:
    """Butterflies (u, v) -> (u + v, w (u - v)) between values `size` apart, one w for each block of 2 * size."""
    blocks = values.size // (2 * size)
    for block in range(blocks):
        start = 2 * size * block
        low, high = values[start : start + size], values[start + size : start + 2 * size]
        w = inverse_roots[blocks + block]
        for index in range(size):
            u, v = low[index], high[index]
            low[index], high[index] = _reduce(u + v, modulus, inverse), multiply_mod(u - v, w, modulus, inverse)


@kernel
def forward_group(x: NDArray[np.float64], roots: NDArray[np.float64], modulus: float, inverse: float) -> None:
    """Transform a group in place: coefficients to evaluations.

    Invariant. Stages 0, 2, 4, ... take |x| <= 2q and leave it <= 3q: the product of `multiply_mod` is within q. Stages
    1, 3, 5, ... take |x| <= 3q and leave it <= 2q: (q + 1) / 2 from the upper operand, reduced, and 11q/8 from the
    product (r <= 3/8 in the proof there). So the lazy sums never pass 3q.

    Args:
        x: integers, |x| <= 2q, shape (N, LANES), C-contiguous. Overwritten with centred residues, |x| < q / 2.
        roots: `Transform.roots`.
        modulus: q.
        inverse: 1 / q, rounded.
    """
    values = x.reshape(-1)
    size = values.size // 2
    reduce_first = False
    while size >= LANES:
        _forward_stage(values, roots, size, reduce_first, modulus, inverse)
        size //= 2
        reduce_first = not reduce_first
    for index in range(values.size):
        values[index] = _reduce(_reduce(values[index], modulus, inverse), modulus, inverse)


@kernel
def inverse_group(
    x: NDArray[np.float64], inverse_roots: NDArray[np.float64], degree_inverse: float, modulus: float, inverse: float
) -> None:
    """Transform a group in place: evaluations to coefficients.

    Invariant. The first stage takes |x| <= 2q, so its sums and differences are within 4q; it leaves at most 3q/2 in
    products and (q + 1) / 2 in sums. From then on sums and differences are within 3q, and leave no more.

    Args:
        x: integers, |x| <= 2q (a product of `multiply_mod` with |a| <= 4q, or the sum of two with |a| <= 2q), shape
            (N, LANES), C-contiguous. Overwritten with centred residues, |x| < q / 2.
        inverse_roots: `Transform.inverse_roots`.
        degree_inverse: 1 / N mod q.
        modulus: q.
        inverse: 1 / q, rounded.
    """
    values = x.reshape(-1)
    size = LANES
    while size < values.size:
        _inverse_stage(values, inverse_roots, size, modulus, inverse)
        size *= 2
    for index in range(values.size):
        value = multiply_mod(values[index], degree_inverse, modulus, inverse)
        values[index] = _reduce(_reduce(value, modulus, inverse), modulus, inverse)


@kernel
def to_lanes(polynomials: NDArray[Any], group: int, x: NDArray[np.float64]) -> None:
    """Lay the polynomials of one group side by side; lanes beyond the last polynomial become zero.

    Args:
        polynomials: integers, |p| <= 2q, any integer type, shape (count, N).
        group: its polynomials are LANES * group, LANES * group + 1, ...
        x: float64 output, shape (N, LANES).
    """
    first = group * LANES
    lanes = min(LANES, polynomials.shape[0] - first)
    if lanes < LANES:
        x[:] = 0.0
    for top in range(0, x.shape[0], _ROWS):
        for lane in range(lanes):
            for row in range(top, top + _ROWS):
                x[row, lane] = float(polynomials[first + lane, row])


@kernel
def from_lanes(x: NDArray[np.float64], group: int, polynomials: NDArray[np.int64], modulus: float) -> None:
    """Write the lanes of one group back as residues in [0, q).

    Args:
        x: centred residues, shape (N, LANES).
        group: index of the group.
        polynomials: int64 output, shape (count, N), of which only the rows of this group are written.
        modulus: q.
    """
    first = group * LANES
    lanes = min(LANES, polynomials.shape[0] - first)
    whole = int(modulus)
    for top in range(0, x.shape[0], _ROWS):
        for lane in range(lanes):
            for row in range(top, top + _ROWS):
                value = int(x[row, lane])
                polynomials[first + lane, row] = value + ((value >> 63) & whole)


@dataclass(frozen=True, slots=True, eq=False)
class Transform:
    """The transform of one ring, with its tables. Immutable and safe to share between threads; `of` keeps them.

    Attributes:
        parameters: the ring.
        modulus: q as float64.
        modulus_inverse: 1 / q, rounded.
        roots: psi**bitrev(k) mod q, float64 in [0, q), shape (N,), read-only; bitrev reverses log2 N bits.
        inverse_roots: psi**-bitrev(k) mod q, likewise.
        degree_inverse: 1 / N mod q as float64.
    """

    parameters: RingParameters
    modulus: float = field(init=False, repr=False)
    modulus_inverse: float = field(init=False, repr=False)
    roots: NDArray[np.float64] = field(init=False, repr=False)
    inverse_roots: NDArray[np.float64] = field(init=False, repr=False)
    degree_inverse: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the tables."""
        degree, modulus = self.parameters.degree, self.parameters.modulus
        powers = np.array(_powers(_smallest_root(self.parameters), modulus, degree), np.int64)
        reciprocals = np.concatenate([powers[:1], modulus - powers[:0:-1]])  # psi**-k = -psi**(N - k)
        order = _bit_reversal(degree)
        values = {
            "modulus": float(modulus),
            "modulus_inverse": 1.0 / modulus,
            "roots": _read_only(powers[order].astype(np.float64)),
            "inverse_roots": _read_only(reciprocals[order].astype(np.float64)),
            "degree_inverse": float(pow(degree, -1, modulus)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def of(parameters: RingParameters) -> Transform:
        """Return the transform of a ring: one and the same for equal parameters."""
        return _transform(parameters)

    def forward(self, polynomials: NDArray[Any], *, threads: int | None = None) -> NDArray[np.float64]:
        """Evaluate polynomials, on all cores.

        Args:
            polynomials: int64 residues in [0, q), or small integers of int8 or int64, shape (count, N). Not modified;
                their range is not checked, but |p| <= 2q is needed.
            threads: most threads to use; None: the cores of this process.

        Returns:
            Centred residues, shape (ceil(count / LANES), N, LANES): polynomial p is lane p % LANES of group p // LANES;
            lanes beyond the last are zero.

        Raises:
            ParameterError: wrong shape or type.
        """
        kind = np.int8 if getattr(polynomials, "dtype", None) == np.int8 else np.int64
        count = len(polynomials) if np.ndim(polynomials) else 0
        check_array("polynomials", polynomials, kind, (count, self.parameters.degree))
        source = np.ascontiguousarray(polynomials)
        evaluations = np.empty((-(-count // LANES), self.parameters.degree, LANES))

        def run(group: int) -> None:
            to_lanes(source, group, evaluations[group])
            forward_group(evaluations[group], self.roots, self.modulus, self.modulus_inverse)

        run_tiles(run, range(len(evaluations)), work=self._work(len(evaluations)), threads=threads)
        return evaluations

    def inverse(self, evaluations: NDArray[np.float64], count: int, *, threads: int | None = None) -> NDArray[np.int64]:
        """Interpolate polynomials from their evaluations, on all cores.

        Works on copies, which it does not overwrite: for secrets use `inverse_group` in place, on memory to be wiped.

        Args:
            evaluations: integers, |x| <= 2q, shape (ceil(count / LANES), N, LANES). Not modified; range not checked.
            count: polynomials to return.
            threads: most threads to use; None: the cores of this process.

        Returns:
            int64 residues in [0, q), shape (count, N).

        Raises:
            ParameterError: wrong shape or type.
        """
        shape = (-(-count // LANES), self.parameters.degree, LANES)
        if getattr(evaluations, "dtype", None) != np.float64 or evaluations.shape != shape or count < 0:
            found = f"{getattr(evaluations, 'dtype', type(evaluations).__name__)} {np.shape(evaluations)}"
            raise ParameterError(f"evaluations: expected float64 {shape} for {count} polynomials, found {found}")
        polynomials = np.empty((count, self.parameters.degree), np.int64)

        def run(group: int) -> None:
            x = np.array(evaluations[group], order="C")
            inverse_group(x, self.inverse_roots, self.degree_inverse, self.modulus, self.modulus_inverse)
            from_lanes(x, group, polynomials, self.modulus)

        run_tiles(run, range(len(evaluations)), work=self._work(len(evaluations)), threads=threads)
        return polynomials

    def _work(self, groups: int) -> int:
        """Multiply-adds that some groups are worth."""
        degree = self.parameters.degree
        return groups * LANES * _BUTTERFLY_WORK * degree // 2 * (degree.bit_length() - 1)


@lru_cache(maxsize=8)
def _transform(parameters: RingParameters) -> Transform:
    return Transform(parameters)


def _powers(base: int, modulus: int, count: int) -> list[int]:
    """Return base**0, base**1, ... modulo q."""
    return list(accumulate(repeat(base, count - 1), lambda power, factor: power * factor % modulus, initial=1))


def _smallest_root(parameters: RingParameters) -> int:
    """Return the smallest primitive 2N-th root of unity modulo q: the smallest odd power of any of them."""
    degree, modulus = parameters.degree, parameters.modulus
    # g**((q - 1) / 2N) has order 2N, a power of two, exactly where g is no square: then its N-th power is -1.
    no_square = next(g for g in range(2, modulus) if pow(g, (modulus - 1) // 2, modulus) == modulus - 1)
    root = pow(no_square, (modulus - 1) // (2 * degree), modulus)
    return min(power * root % modulus for power in _powers(root * root % modulus, modulus, degree))


def _bit_reversal(degree: int) -> NDArray[np.int64]:
    """Return the indices below N with their log2 N bits reversed."""
    order = np.zeros(1, np.int64)
    while order.size < degree:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order


def _read_only(array: NDArray[np.float64]) -> NDArray[np.float64]:
    array.flags.writeable = False
    return array


@kernel
def _multiply_into(x: NDArray[np.float64], y: NDArray[np.float64], modulus: float, inverse: float) -> None:
    """Multiply centred residues lane by lane: x <- x * y, |x| < 2q."""
    left, right = x.reshape(-1), y.reshape(-1)
    for index in range(left.size):
        w = right[index]
        left[index] = multiply_mod(left[index], w + modulus if w < 0 else w, modulus, inverse)


def transform_self_test(parameters: RingParameters) -> None:
    """Check this machine's transform with negacyclic products at the extremes; some 10 ms once compiled.

    All coefficients q - 1, and a multiple of X^(N - 1), have products that are known everywhere; of arbitrary
    polynomials one coefficient, half of whose terms wrap, is computed with Python integers.

    Args:
        parameters: ring to test.

    Raises:
        ParameterError: a product is wrong.
    """
    degree, modulus = parameters.degree, parameters.modulus
    transform = Transform.of(parameters)
    index = np.arange(degree)
    scattered = (index + 1) * 0x9E3779B97F4A7 % modulus  # Fibonacci hashing: spread over the whole range
    full = np.full(degree, modulus - 1)
    monomial = np.where(index == degree - 1, modulus - 1, 0)
    left = transform.forward(np.stack([full, scattered, scattered]))
    _multiply_into(
        left,
        transform.forward(np.stack([full, monomial, scattered[::-1]])),
        transform.modulus,
        transform.modulus_inverse,
    )
    ones, shifted, product = transform.inverse(left, 3)
    # (-1 - X - ...)**2 has k + 1 products below X^N, and N - 1 - k that wrap, with the other sign.
    exact = np.array_equal(ones, (2 * index + 2 - degree) % modulus)
    # -X^(N - 1) = X^-1 in this ring: every coefficient moves down by one, the lowest to the top, negated.
    exact &= np.array_equal(shifted, np.append(scattered[1:], modulus - scattered[0]))
    middle = degree // 2 + 1
    exact &= int(product[middle]) == _product_coefficient(scattered, scattered[::-1], middle, modulus)
    if not exact:
        raise ParameterError(
            f"self-test: expected exact transforms modulo {modulus} at degree {degree}, found wrong ones: this "
            "machine's fused multiply-add is not IEEE 754's, or kernels were compiled with fast arithmetic; clear "
            "__pycache__ and install numba from its official wheels"
        )


def _product_coefficient(a: NDArray[np.int64], b: NDArray[np.int64], k: int, modulus: int) -> int:
    """Return coefficient k of a * b modulo X^N + 1, in Python integers."""
    below = sum(map(operator.mul, a[: k + 1].tolist(), b[k::-1].tolist()))
    wrapped = sum(map(operator.mul, a[k + 1 :].tolist(), b[:k:-1].tolist()))
    return int(below - wrapped) % modulus
