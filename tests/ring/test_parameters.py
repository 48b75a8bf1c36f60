from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tenseal.sealapi as seal
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import ParameterError
from heinfer.ring.parameters import (
    COEFFICIENT_BYTES,
    ROW_SUM_LIMIT,
    SECURITY_TABLE,
    WEIGHT_LIMIT,
    RingParameters,
    checked_weights,
    cut_inputs,
    is_prime,
    max_modulus_bits,
)

DEGREES = [2048, 4096, 8192, 16384, 32768]


@pytest.mark.parametrize("degree", DEGREES)
def test_default_every_degree_is_the_prime_of_seal(degree: int) -> None:
    assert RingParameters.default(degree).modulus == seal.CoeffModulus.Create(degree, [50])[0].value()


def test_default_degree_2048_has_the_documented_modulus() -> None:
    parameters = RingParameters.default()
    assert (parameters.degree, parameters.modulus) == (2048, 1125899906826241)
    assert (parameters.modulus_bits, parameters.security_bits, COEFFICIENT_BYTES) == (50, 128, 6.25)


def test_parameters_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RingParameters.default().modulus = 3  # type: ignore[misc]


@pytest.mark.parametrize("degree", [0, -2048, 2047, 3072, 65536, 2048.0, True])
def test_parameters_degree_outside_the_table_is_refused(degree: int) -> None:
    with pytest.raises(ParameterError, match="ring degree"):
        RingParameters(degree, 1125899906826241)


def test_parameters_modulus_above_the_security_table_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"at most 26 bits at degree 1024.*found 50.*larger degree"):
        RingParameters(1024, 1125899906826241)
    with pytest.raises(ParameterError, match="at most 53 bits"):
        RingParameters(2048, 2**53 + 1)


@pytest.mark.parametrize("modulus", [-1, 0, 1, 12289, 2**49 - 1, 2**50 + 1])
def test_parameters_modulus_not_of_50_bits_is_refused(modulus: int) -> None:
    with pytest.raises(ParameterError, match=r"expected between 2\*\*49 and 2\*\*50"):
        RingParameters(2048, modulus)


def test_parameters_modulus_of_another_type_is_refused() -> None:
    with pytest.raises(ParameterError, match="expected an int, found float"):
        RingParameters(2048, 1125899906826241.0)  # type: ignore[arg-type]


def test_parameters_prime_without_transform_is_refused() -> None:
    assert is_prime(2**50 - 27)
    with pytest.raises(ParameterError, match="1 modulo twice the degree"):
        RingParameters(2048, 2**50 - 27)


def test_parameters_composite_is_refused() -> None:
    composite = 2**50 + 1 - 4096  # the first candidate below 2**50, above the default
    assert composite > RingParameters.default().modulus
    with pytest.raises(ParameterError, match="expected a prime"):
        RingParameters(2048, composite)


def test_default_degree_1024_is_refused() -> None:
    with pytest.raises(ParameterError, match="allows 26"):
        RingParameters.default(1024)


def test_max_modulus_bits_follows_the_guidelines() -> None:
    assert [max_modulus_bits(degree) for degree in (1024, *DEGREES)] == [26, 53, 106, 214, 430, 868]
    assert list(SECURITY_TABLE) == [1024, *DEGREES]
    with pytest.raises(ParameterError):
        max_modulus_bits(512)


@given(st.integers(min_value=0, max_value=100_000))
def test_is_prime_small_numbers_agrees_with_trial_division(number: int) -> None:
    assert is_prime(number) == (number > 1 and all(number % d for d in range(2, int(number**0.5) + 1)))


@pytest.mark.parametrize("number", [561, 3215031751, 3825123056546413051, (2**31 - 1) ** 2])
def test_is_prime_strong_pseudoprimes_are_composite(number: int) -> None:
    assert not is_prime(number)


def test_is_prime_large_numbers() -> None:
    assert is_prime(2**61 - 1)
    assert is_prime(2**64 - 59)
    with pytest.raises(ParameterError, match="below 2"):
        is_prime(2**64)


@pytest.mark.parametrize(
    "weights",
    [
        np.array([[0.5]]),
        np.array([[np.nan]]),
        np.array([[np.inf]]),
        np.array([[WEIGHT_LIMIT + 1.0]]),
        np.array([[-WEIGHT_LIMIT - 1]]),
        np.array([[np.iinfo(np.int64).min]]),
        np.array([[2**64 - 1]], dtype=np.uint64),
        np.array([[np.iinfo(np.int16).min]], dtype=np.int16),
        np.zeros(3),
        np.zeros((1, 1, 1)),
        np.zeros((1, 1), dtype=np.float32),
        np.zeros((1, 1), dtype=bool),
    ],
)
def test_checked_weights_outside_the_contract_are_refused(weights: np.ndarray) -> None:
    with pytest.raises(ParameterError, match="weights: expected"):
        checked_weights(weights)


def test_checked_weights_are_a_read_only_copy() -> None:
    weights = np.array([[WEIGHT_LIMIT, -WEIGHT_LIMIT]], dtype=np.int16)
    checked = checked_weights(weights)
    weights[0, 0] = 1
    assert checked.tolist() == [[WEIGHT_LIMIT, -WEIGHT_LIMIT]]
    with pytest.raises(ValueError, match="read-only"):
        checked[0, 0] = 1


def test_cut_inputs_row_sum_at_the_limit_stays_whole_and_one_more_is_cut() -> None:
    full, rest = divmod(ROW_SUM_LIMIT, WEIGHT_LIMIT)
    row = np.full((1, full + 1), float(WEIGHT_LIMIT))
    row[0, -1] = rest
    assert cut_inputs(row) == (slice(0, full + 1),)
    row[0, -1] += 1
    assert cut_inputs(row) == (slice(0, full), slice(full, full + 1))
    assert cut_inputs(np.zeros((2, 0))) == ()
