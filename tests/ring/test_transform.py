from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heinfer.errors import ParameterError
from heinfer.ring import (
    LANES,
    RingParameters,
    Transform,
    forward_group,
    inverse_group,
    multiply_mod,
    transform_self_test,
)
from heinfer.ring import transform as module
from heinfer.ring.parameters import is_prime
from heinfer.ring.transform import from_lanes, to_lanes

DEGREES = [2048, 4096, 8192, 16384, 32768]


def ring_above(start: int) -> RingParameters:
    """The ring of degree 2048 with the smallest suitable modulus above a multiple of 4096."""
    candidate = start + 1
    while not is_prime(candidate):
        candidate += 2 * 2048
    return RingParameters(2048, candidate)


#: Both ends of what the proofs allow, and near 2**49.5, where the largest products pass 2**102.
RINGS = [RingParameters.default(), ring_above(2**49), ring_above(194368031998 * 4096)]
MODULI = [RingParameters.default(degree).modulus for degree in DEGREES] + [ring.modulus for ring in RINGS[1:]]


def negacyclic_product(a: np.ndarray, b: np.ndarray, modulus: int) -> list[int]:
    """Multiply modulo X^N + 1 with two big integers, coefficients 128 bits apart: nothing in common with an NTT."""
    degree, width = len(a), 16
    packed = [b"".join(int(v).to_bytes(width, "little") for v in p) for p in (a, b)]
    product = int.from_bytes(packed[0], "little") * int.from_bytes(packed[1], "little")
    data = product.to_bytes(2 * degree * width, "little")
    sums = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
    return [(sums[k] - sums[degree + k]) % modulus for k in range(degree)]


def product(transform: Transform, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same by the transform, for (count, N) polynomials."""
    left, right = transform.forward(a), transform.forward(b)
    q = transform.modulus
    for x, w in zip(left.reshape(-1, LANES), right.reshape(-1, LANES), strict=True):
        for lane in range(LANES):
            x[lane] = multiply_mod(x[lane], w[lane] % q, q, transform.modulus_inverse)
    return transform.inverse(left, len(a))


@given(st.data())
def test_multiply_mod_any_operands_are_exact_and_within_the_bounds(data: st.DataObject) -> None:
    q = data.draw(st.sampled_from(MODULI))
    edges = st.sampled_from([0, 1, q // 2, q - 1])
    w = data.draw(st.integers(0, q - 1) | edges)
    a = data.draw(st.integers(-8 * q + 1, 8 * q - 1) | st.integers(-8, 7).map(lambda k: k * q + 1) | edges)
    result = multiply_mod(float(a), float(w), float(q), 1.0 / q)
    assert result == int(result)
    assert (int(result) - a * w) % q == 0
    bound = 1 if abs(a) <= 2 * q else Fraction(3, 2) if abs(a) <= 4 * q else 2
    assert abs(int(result)) <= bound * q
    assert abs(int(result)) < 2 * q


@pytest.mark.parametrize("modulus", MODULI)
def test_multiply_mod_largest_operands(modulus: int) -> None:
    for a in range(8 * modulus - 500, 8 * modulus):
        for w in (modulus - 1, modulus - 2, modulus // 2 + 1, modulus - a % 997):
            result = multiply_mod(float(a), float(w), float(modulus), 1.0 / modulus)
            assert (int(result) - a * w) % modulus == 0
            assert abs(result) < 2 * modulus


def test_multiply_mod_beyond_its_operands_breaks_its_bound() -> None:
    # The contract is needed: at 64q some results are above 2q.
    q = MODULI[0]
    rng = np.random.default_rng(7)
    factors = rng.integers(q // 2, q, 1000).tolist()
    assert any(abs(multiply_mod(64.0 * q - w % 999, float(w), float(q), 1.0 / q)) >= 2 * q for w in factors)


@pytest.mark.parametrize("degree", DEGREES)
def test_inverse_undoes_forward_and_changes_no_input(degree: int) -> None:
    ring = RingParameters.default(degree)
    transform = Transform.of(ring)
    polynomials = np.random.default_rng(0).integers(0, ring.modulus, (LANES + 3, degree))
    polynomials[0], polynomials[1] = ring.modulus - 1, 0
    kept = polynomials.copy()
    evaluations = transform.forward(polynomials)
    assert evaluations.shape == (2, degree, LANES)
    assert not evaluations[1, :, 3:].any()
    assert np.abs(evaluations).max() <= ring.modulus // 2
    before = evaluations.copy()
    np.testing.assert_array_equal(transform.inverse(evaluations, LANES + 3), kept)
    np.testing.assert_array_equal(polynomials, kept)
    np.testing.assert_array_equal(evaluations, before)


@pytest.mark.parametrize("degree", DEGREES)
def test_product_extreme_and_random_polynomials_matches_big_integers(degree: int) -> None:
    ring = RingParameters.default(degree)
    q = ring.modulus
    rng = np.random.default_rng(1)
    full, random = np.full(degree, q - 1), rng.integers(0, q, degree)
    signs = np.where(np.arange(degree) % 2 == 0, q // 2, q // 2 + 1)
    left, right = np.stack([full, signs, random]), np.stack([full, full, random[::-1]])
    found = product(Transform.of(ring), left, right)
    for a, b, c in zip(left, right, found, strict=True):
        assert c.tolist() == negacyclic_product(a, b, q)


def test_reference_on_a_product_done_by_hand() -> None:
    assert negacyclic_product(np.array([1, 2]), np.array([3, 4]), 97) == [(3 - 8) % 97, 10]


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: str(ring.modulus))
@settings(max_examples=30)
@given(data=st.data())
def test_product_any_polynomials_and_modulus_matches_big_integers(ring: RingParameters, data: st.DataObject) -> None:
    q = ring.modulus
    values = st.integers(0, q - 1) | st.sampled_from([0, 1, q // 2, q // 2 + 1, q - 1])
    polynomials = hnp.arrays(np.int64, ring.degree, elements=values, fill=values)
    a, b = data.draw(polynomials), data.draw(polynomials)
    found = product(Transform.of(ring), a[None], b[None])[0]
    assert found.tolist() == negacyclic_product(a, b, q)


@pytest.mark.parametrize("degree", DEGREES)
def test_entries_are_values_at_powers_of_the_smallest_root_in_reversed_order(degree: int) -> None:
    ring = RingParameters.default(degree)
    q, bits = ring.modulus, degree.bit_length() - 1
    transform = Transform.of(ring)
    psi = int(transform.roots[degree // 2])  # bitrev(N / 2) = 1
    assert pow(psi, degree, q) == q - 1
    assert all(psi <= pow(psi, k, q) for k in range(3, 2 * degree, 2))
    polynomial = np.random.default_rng(2).integers(0, q, degree)
    found = transform.forward(polynomial[None])[0, :, 0]
    for k in (0, 1, 2, degree // 3, degree - 1):
        point = pow(psi, 2 * int(format(k, f"0{bits}b")[::-1], 2) + 1, q)
        value = 0
        for coefficient in polynomial[::-1].tolist():
            value = (value * point + coefficient) % q
        assert int(found[k]) % q == value


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: str(ring.modulus))
def test_groups_at_twice_the_modulus_are_exact_and_centred(ring: RingParameters) -> None:
    # Largest inputs that the invariants allow, of either sign.
    transform, q = Transform.of(ring), ring.modulus
    sign = np.random.default_rng(3).choice([-1, 1], (ring.degree, LANES))
    sign[:, 0], sign[:, 1] = 1, -1
    x = sign * 2.0 * q - sign * np.arange(LANES)
    evaluations = x.copy()
    forward_group(evaluations, transform.roots, transform.modulus, transform.modulus_inverse)
    assert np.abs(evaluations).max() <= q // 2
    expected = transform.forward(np.ascontiguousarray(x.T.astype(np.int64) % q))[0]
    np.testing.assert_array_equal(evaluations, expected)
    lifted = evaluations + q * np.where(evaluations < 0, 2.0, -2.0)  # |.| <= 2q, same residues
    coefficients = [evaluations, lifted]
    for values in coefficients:
        assert np.abs(values).max() <= 2 * q
        inverse_group(
            values, transform.inverse_roots, transform.degree_inverse, transform.modulus, transform.modulus_inverse
        )
        assert np.abs(values).max() <= q // 2
        np.testing.assert_array_equal(values % q, x % q)


@pytest.mark.parametrize("quotient", range(-4, 5))
def test_reduce_twice_is_centred_next_to_every_multiple_and_half(quotient: int) -> None:
    for q in MODULI:
        for offset in (-2, -1, 0, 1, 2):
            for value in (quotient * q + offset, quotient * q + q // 2 + offset):
                if abs(value) > 4 * q:
                    continue
                once = module._reduce(float(value), float(q), 1.0 / q)
                twice = module._reduce(once, float(q), 1.0 / q)
                assert abs(once) <= (q + 1) // 2
                assert abs(twice) <= q // 2
                assert (int(twice) - value) % q == 0


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16])
def test_lanes_any_count_round_trip_and_missing_lanes_are_zero(count: int) -> None:
    q, degree = MODULI[0], 2048
    polynomials = np.random.default_rng(4).integers(0, q, (count, degree))
    groups = -(-count // LANES)
    back = np.full((count, degree), -1)
    for group in range(groups):
        x = np.full((degree, LANES), np.nan)
        to_lanes(polynomials, group, x)
        rows = polynomials[group * LANES : (group + 1) * LANES]
        np.testing.assert_array_equal(x[:, : len(rows)], rows.T)
        assert not x[:, len(rows) :].any()
        centred = np.where(x > q // 2, x - q, x)
        from_lanes(centred, group, back, float(q))
    np.testing.assert_array_equal(back, polynomials)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_forward_and_inverse_on_threads_do_every_group(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(module, "_BUTTERFLY_WORK", 2**40)
    transform, q = Transform.of(RINGS[0]), RINGS[0].modulus
    polynomials = np.random.default_rng(5).integers(0, q, (5 * LANES, 2048))
    one = np.concatenate([transform.forward(polynomials[i : i + LANES]) for i in range(0, 5 * LANES, LANES)])
    evaluations = transform.forward(polynomials, threads=threads)
    np.testing.assert_array_equal(evaluations, one)
    np.testing.assert_array_equal(transform.inverse(evaluations, 5 * LANES, threads=threads), polynomials)


def test_forward_takes_small_signed_integers_and_strided_arrays() -> None:
    transform, q = Transform.of(RINGS[0]), RINGS[0].modulus
    ternary = np.random.default_rng(6).integers(-1, 2, (3, 2048))
    expected = transform.forward(ternary % q)
    np.testing.assert_array_equal(transform.forward(ternary), expected)
    np.testing.assert_array_equal(transform.forward(ternary.astype(np.int8)), expected)
    np.testing.assert_array_equal(transform.forward(np.repeat(ternary, 2, axis=1)[:, ::2]), expected)
    shifted = np.empty((3, 1, 2048, LANES))
    shifted[1] = expected
    np.testing.assert_array_equal(transform.inverse(shifted[1], 3), ternary % q)


def test_forward_and_inverse_of_nothing_are_empty() -> None:
    transform = Transform.of(RINGS[0])
    evaluations = transform.forward(np.zeros((0, 2048), np.int64))
    assert evaluations.shape == (0, 2048, LANES)
    assert transform.inverse(evaluations, 0).shape == (0, 2048)


@pytest.mark.parametrize(
    "polynomials", [np.zeros((2, 4096), np.int64), np.zeros(2048, np.int64), np.zeros((2, 2048)), np.int64(3)]
)
def test_forward_wrong_arrays_are_refused(polynomials: np.ndarray) -> None:
    with pytest.raises(ParameterError, match="polynomials: expected"):
        Transform.of(RINGS[0]).forward(polynomials)


@pytest.mark.parametrize(
    ("evaluations", "count"),
    [
        (np.zeros((1, 2048, LANES)), 9),
        (np.zeros((2, 2048, LANES)), 8),
        (np.zeros((1, 4096, LANES)), 8),
        (np.zeros((1, 2048, LANES), np.int64), 8),
        (np.zeros((0, 2048, LANES)), -1),
    ],
)
def test_inverse_wrong_arrays_are_refused(evaluations: np.ndarray, count: int) -> None:
    with pytest.raises(ParameterError, match="evaluations: expected"):
        Transform.of(RINGS[0]).inverse(evaluations, count)


def test_transform_is_shared_and_immutable() -> None:
    transform = Transform.of(RINGS[0])
    assert transform is Transform.of(RingParameters.default())
    with pytest.raises(AttributeError):
        transform.modulus = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        transform.roots[0] = 0


@pytest.mark.parametrize("ring", [RingParameters.default(degree) for degree in DEGREES] + RINGS[1:])
def test_self_test_passes_here(ring: RingParameters) -> None:
    transform_self_test(ring)


@pytest.mark.parametrize("error", [1.0, -1.0])
def test_self_test_wrong_arithmetic_is_detected(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    # One coefficient of one lane, off by one, stands for a product that was rounded.
    real = inverse_group

    def rounded(x: np.ndarray, *arguments: object) -> None:
        real(x, *arguments)
        x[1025, 2] += error

    monkeypatch.setattr(module, "inverse_group", rounded)
    with pytest.raises(ParameterError, match="self-test"):
        transform_self_test(RINGS[0])
