"""Rounding of results to their error bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trusted_node.rounding import round_to_step, rounding_step


@given(st.floats(1e-30, 1e30))
def test_rounding_step_is_the_power_of_two_within_a_factor_of_two_of_the_bound(bound: float) -> None:
    step = float(rounding_step(np.array([[bound, bound / 3]]))[0])
    assert np.frexp(step)[0] == 0.5
    assert bound / 2 < step <= bound


def test_rounding_step_is_zero_for_a_bound_of_zero_and_changes_nothing() -> None:
    step = rounding_step(np.zeros((1, 2)))
    values = np.array([[0.1, -0.3]], np.float32)
    assert step.tolist() == [0]
    assert np.array_equal(round_to_step(values, step), values)


def test_round_to_step_gives_multiples_of_each_sample_s_own_step() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    step = np.array([0.25, 0.125])
    rounded = round_to_step(values, step)
    multiples = rounded / step[:, None, None]
    assert np.array_equal(multiples, np.rint(multiples))
    assert (np.abs(rounded - values) <= step[:, None, None] / 2).all()
    assert rounded.dtype == np.float32
