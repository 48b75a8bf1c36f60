from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.ring import (
    FLOAT32_ROUNDING,
    NOISE_LIMIT,
    WEIGHT_LIMIT,
    Digit,
    RingParameters,
    RowNorms,
    input_scale,
    multiply_mod_reference,
    split_digits,
    weight_scale,
)

PARAMETERS = RingParameters.default()
Q = PARAMETERS.modulus
OUTPUTS, INPUTS, SAMPLES = 12, 60, 16
SMALLEST32 = float(np.float32(1e-45))


def real_weights() -> np.ndarray:
    """Return rows of many magnitudes, a zero row and a row with one large weight."""
    matrix = np.random.default_rng(0).normal(size=(OUTPUTS, INPUTS)) * np.logspace(-6, 3, OUTPUTS)[:, None]
    matrix[3] = 0
    matrix[5, 1:] *= 1e-4
    return matrix


def inputs(kind: str) -> np.ndarray:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(SAMPLES, INPUTS))
    match kind:
        case "sparse":
            x *= np.arange(INPUTS) == generator.integers(0, INPUTS, (SAMPLES, 1))
        case "constant":
            x[:] = 0.7
        case "zero":
            x[:] = 0
        case "huge":
            x *= 1e6
        case "tiny":
            x *= 1e-9
        case "denormal":
            x = np.sign(x) * SMALLEST32
        case "mixed":
            x[:, 0] = 1e6
    return x


def evaluate(matrix: np.ndarray, x: np.ndarray, digits: int = 1, bits: int = 15) -> tuple[np.ndarray, np.ndarray]:
    """Return measured errors and their bounds, both (samples, outputs), with noise as SEAL draws it.

    Digits are added in float64, so that casts do not hide the noise, and cast once.
    """
    scale = weight_scale(np.abs(matrix).max(axis=1), bits)
    split = split_digits(matrix, scale[:, None], digits, bits)
    rows = [norms_of(digit, scale * 2.0 ** (bits * i), i == digits - 1) for i, digit in enumerate(split)]
    peak, magnitude = np.abs(x).max(axis=1), np.abs(x).sum(axis=1)
    s_x = input_scale(peak, int(max(norms.l1.max() for norms in rows)), PARAMETERS)
    generator = np.random.default_rng(2)
    noise = generator.binomial(NOISE_LIMIT, 0.5, x.shape) - generator.binomial(NOISE_LIMIT, 0.5, x.shape)
    sent = (np.rint(x * s_x[:, None]).astype(np.int64) + noise) % Q
    want, got, bound = x @ matrix.T, 0.0, 0.0
    for digit, norms in zip(split, rows, strict=True):
        answer = multiply_mod_reference(digit.integers.astype(np.int64), sent.T, Q).T
        got = got + np.where(answer > Q // 2, answer - Q, answer) / (s_x[:, None] * norms.scale)
        bound = bound + norms.error_bound(s_x, peak, magnitude, np.zeros_like(want))
    return np.abs(got.astype(np.float32) - want), bound + FLOAT32_ROUNDING * np.abs(want)


def norms_of(digit: Digit, scale: np.ndarray, last: bool) -> RowNorms:
    whole = digit.integers.astype(np.float64)
    rest = digit.rest if last else 0 * digit.rest
    return RowNorms(
        scale, np.abs(whole).sum(axis=1), np.sqrt((whole**2).sum(axis=1)), rest.sum(axis=1), rest.max(axis=1)
    )


KINDS = ["random", "sparse", "constant", "zero", "huge", "tiny", "denormal", "mixed"]


FORMS = [(1, 15), (2, 15), (2, 12), (3, 10), (4, 8)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("digits", "bits"), FORMS)
def test_error_bound_holds_for_simulated_noise(kind: str, digits: int, bits: int) -> None:
    error, bound = evaluate(real_weights(), inputs(kind), digits, bits)
    smallest = np.finfo(np.float32).smallest_subnormal  # below it a cast to float32 has no relative error
    assert np.all(np.isfinite(bound))
    assert np.all(error <= bound + smallest)


@pytest.mark.parametrize("kind", ["random", "sparse", "constant", "huge", "tiny"])
def test_error_bound_is_not_vacuous(kind: str) -> None:
    error, bound = evaluate(real_weights(), inputs(kind))
    live = np.arange(OUTPUTS) != 3
    # Rounding errors of 60 weights add up like sqrt(60 / 12) of the 60 / 4 that the bound allows: a factor of 7.
    assert np.max(error[:, live] / bound[:, live]) > 1 / 20


def test_error_with_digits_is_as_small_as_their_bits_say() -> None:
    """Inputs are float64 here, and results small: neither hides what the digits do."""
    matrix, x = real_weights()[8:9] / 10, np.random.default_rng(5).uniform(-1, 1, (200, INPUTS))
    errors = {form: evaluate(matrix, x, *form) for form in FORMS}
    casts = FLOAT32_ROUNDING * np.abs(x @ matrix.T)
    measured = {form: np.max(np.maximum(error - casts, 0)) for form, (error, _) in errors.items()}
    bounds = {form: np.max(bound - casts) for form, (_, bound) in errors.items()}
    assert bounds[1, 15] > 1000 * max(bounds[2, 15], bounds[2, 12] / 4)
    assert min(bounds[2, 15], bounds[2, 12]) > 5 * bounds[3, 10] > 15 * bounds[4, 8]
    assert measured[1, 15] > 1000 * max(measured[2, 15], measured[2, 12] / 4) > 0


@given(st.integers(1, 4), st.integers(1, 15), st.integers(0, 2**32 - 1))
def test_split_digits_with_what_they_leave_are_the_weights(digits: int, bits: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights = (generator.normal(size=(3, 7)) * 10.0 ** generator.integers(-40, 30, (3, 1))).astype(np.float32)
    weights[generator.random(weights.shape) < 0.2] = 0
    scale = weight_scale(np.abs(weights).max(axis=1).astype(np.float64), bits)[:, None]
    found = split_digits(weights, scale, digits, bits)
    assert len(found) == digits
    for row, column in np.ndindex(weights.shape):
        exact, real = Fraction(0), Fraction(float(weights[row, column])) * Fraction(float(scale[row, 0]))
        for number, digit in enumerate(found):
            assert abs(int(digit.integers[row, column])) < 2**bits
            exact += Fraction(int(digit.integers[row, column]), 2 ** (bits * number))
            left = abs(real - exact) * 2 ** (bits * number)
            rest = Fraction(float(digit.rest[row, column]))
            assert left <= rest <= Fraction(1, 2) + Fraction(2) ** (bits * (number + 1) - 52)
            assert (rest > 0) == (weights[row, column] != 0)


@pytest.mark.parametrize("kind", KINDS)
def test_error_bound_holds_without_weight_rounding_and_scales_with_the_noise(kind: str) -> None:
    matrix = np.random.default_rng(3).integers(-WEIGHT_LIMIT, WEIGHT_LIMIT + 1, (OUTPUTS, INPUTS)).astype(np.float64)
    matrix[:, 0] = WEIGHT_LIMIT
    error, bound = evaluate(matrix, inputs(kind))
    assert np.all(error <= bound)


def test_error_bound_of_a_zero_row_at_zero_is_the_noise_alone() -> None:
    error, bound = evaluate(np.zeros((2, 5)), np.zeros((3, 5)))
    assert not error.any()
    assert not bound.any()


def test_error_of_a_zero_input_vanishes_for_weights_of_any_size() -> None:
    error, bound = evaluate(1e6 * np.random.default_rng(4).normal(size=(4, 5)), np.zeros((3, 5)))
    assert np.all(error <= bound)
    assert bound.max() < 1e-30


def test_unit_bounds_are_those_of_inputs_of_magnitude_one_and_gain_the_largest_output() -> None:
    norms = RowNorms(*(np.array(v) for v in ([100.0, 7.0], [50.0, 60.0], [10.0, 12.0], [9.0, 4.0], [1.0, 2.0])))
    room = 1000.0
    bounds = norms.error_bound(np.array([room]), np.ones(1), np.full(1, 1e9), np.zeros((1, 2)))
    np.testing.assert_allclose(norms.unit_bounds(room), bounds[0])
    np.testing.assert_allclose(norms.gain, [59 / 100, 64 / 7])


def test_split_digits_of_one_weight_without_axes_are_arrays() -> None:
    first, second = split_digits(np.array(-0.3), np.array(32767 / 0.7), 2, 15)
    assert first.integers.shape == second.rest.shape == ()
    assert int(first.integers) == round(-0.3 * 32767 / 0.7)
    assert second.rest < 0.51


finite = st.floats(0, 1e300, allow_subnormal=True)


@given(finite)
def test_weight_scale_of_any_magnitude_fits_sixteen_bits(largest: float) -> None:
    scale = weight_scale(np.array([largest]))
    assert np.isfinite(scale[0])
    assert scale[0] > 0
    (whole,), (negative,) = (split_digits(np.array([x]), scale)[0].integers for x in (largest, -largest))
    assert abs(int(whole)) <= WEIGHT_LIMIT
    assert abs(largest - int(negative) / -scale[0]) <= 0.5 / scale[0]


@given(st.floats(0, 1e300, allow_subnormal=True), st.integers(0, 2**34))
def test_input_scale_of_any_peak_is_finite_and_never_overflows(peak: float, row_sum: int) -> None:
    scale = float(input_scale(np.array([peak]), row_sum, PARAMETERS)[0])
    assert np.isfinite(scale)
    assert scale > 0
    assert 2 * row_sum * (int(np.rint(peak * scale if row_sum else 0)) + NOISE_LIMIT) < Q
