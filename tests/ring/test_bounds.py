from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.ring import (
    NOISE_LIMIT,
    WEIGHT_LIMIT,
    RingParameters,
    RowNorms,
    input_scale,
    multiply_mod_reference,
    quantise,
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


def evaluate(matrix: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return measured errors and their bounds, both (samples, outputs), with noise as SEAL draws it."""
    scale = weight_scale(np.abs(matrix).max(axis=1))
    whole = quantise(matrix, scale[:, None]).astype(np.int64)
    norms = RowNorms(
        scale,
        np.abs(whole).sum(axis=1).astype(np.float64),
        np.sqrt((whole.astype(np.float64) ** 2).sum(axis=1)),
        np.full(len(matrix), float(matrix.shape[1])),
        np.ones(len(matrix)),
    )
    peak, magnitude = np.abs(x).max(axis=1), np.abs(x).sum(axis=1)
    s_x = input_scale(peak, int(norms.l1.max()), PARAMETERS)
    generator = np.random.default_rng(2)
    noise = generator.binomial(NOISE_LIMIT, 0.5, x.shape) - generator.binomial(NOISE_LIMIT, 0.5, x.shape)
    sent = (np.rint(x * s_x[:, None]).astype(np.int64) + noise) % Q
    answer = multiply_mod_reference(whole, sent.T, Q).T
    centred = np.where(answer > Q // 2, answer - Q, answer)
    got = (centred / (s_x[:, None] * scale)).astype(np.float32)
    want = x @ matrix.T
    return np.abs(got - want), norms.error_bound(s_x, peak, magnitude, want)


KINDS = ["random", "sparse", "constant", "zero", "huge", "tiny", "denormal", "mixed"]


@pytest.mark.parametrize("kind", KINDS)
def test_error_bound_holds_for_simulated_noise(kind: str) -> None:
    error, bound = evaluate(real_weights(), inputs(kind))
    smallest = np.finfo(np.float32).smallest_subnormal  # below it a cast to float32 has no relative error
    assert np.all(np.isfinite(bound))
    assert np.all(error <= bound + smallest)


@pytest.mark.parametrize("kind", ["random", "sparse", "constant", "huge", "tiny"])
def test_error_bound_is_not_vacuous(kind: str) -> None:
    error, bound = evaluate(real_weights(), inputs(kind))
    live = np.arange(OUTPUTS) != 3
    # Rounding errors of 60 weights add up like sqrt(60) / sqrt(12) of the 60 / 2 that the bound allows: a factor of 13.
    assert np.max(error[:, live] / bound[:, live]) > 1 / 40


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


def test_unit_bound_is_the_largest_bound_of_inputs_of_magnitude_one() -> None:
    norms = RowNorms(*(np.array(v) for v in ([100.0, 7.0], [50.0, 60.0], [10.0, 12.0], [9.0, 4.0], [1.0, 2.0])))
    room = 1000.0
    bounds = norms.error_bound(np.array([room]), np.ones(1), np.full(1, 1e9), np.zeros((1, 2)))
    assert norms.unit_bound(room) == pytest.approx(bounds.max())


finite = st.floats(0, 1e300, allow_subnormal=True)


@given(finite)
def test_weight_scale_of_any_magnitude_fits_sixteen_bits(largest: float) -> None:
    scale = weight_scale(np.array([largest]))
    assert np.isfinite(scale[0])
    assert scale[0] > 0
    assert abs(int(quantise(np.array([largest]), scale)[0])) <= WEIGHT_LIMIT
    assert abs(largest - int(quantise(np.array([-largest]), scale)[0]) / -scale[0]) <= 0.5 / scale[0]


@given(st.floats(0, 1e300, allow_subnormal=True), st.integers(0, 2**34))
def test_input_scale_of_any_peak_is_finite_and_never_overflows(peak: float, row_sum: int) -> None:
    scale = float(input_scale(np.array([peak]), row_sum, PARAMETERS)[0])
    assert np.isfinite(scale)
    assert scale > 0
    assert 2 * row_sum * (int(np.rint(peak * scale if row_sum else 0)) + NOISE_LIMIT) < Q
