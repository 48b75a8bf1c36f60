"""Clipping strategies: bounds for any norms, agreement with the published formulas, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from heinfer.errors import ParameterError
from heinfer.training.privacy.clipping import ROUNDING_MARGIN, Adaptive, Automatic, Clipping, Flat, PerLayer

LAYERS = 3
STRATEGIES: list[Clipping] = [
    Flat(0.7),
    Flat(1e-12),
    Flat(1e6),
    PerLayer((0.1, 2.0, 1e-3)),
    Automatic(0.7),
    Automatic(0.7, gamma=1e-9),
    Adaptive(0.7, quantile=0.5, learning_rate=0.2, count_deviation=10.0),
]

norm_rows = st.lists(
    st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-30, 1e30, allow_subnormal=False))] * LAYERS),
    min_size=1,
    max_size=8,
)


def tensor(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("clipping", STRATEGIES, ids=repr)
@given(rows=norm_rows)
def test_one_record_never_moves_the_sum_by_more_than_the_sensitivity(
    clipping: Clipping, rows: list[tuple[float, ...]]
) -> None:
    norms = tensor(*rows)
    factors = clipping.factors(norms)
    assert factors.shape == norms.shape
    assert (factors >= 0).all()
    contribution = (factors * norms).norm(dim=1)
    # float64 here; the margin left is for float32 norms
    assert (contribution <= clipping.sensitivity * (1 - ROUNDING_MARGIN / 2)).all()


@pytest.mark.parametrize("clipping", [Flat(5.1), PerLayer((3.1, 4.1, 0.1)), Adaptive(5.1, 0.5, 0.2, 1.0)], ids=repr)
def test_a_record_below_the_threshold_is_kept(clipping: Clipping) -> None:
    norms = tensor((3.0, 4.0, 0.0))
    assert clipping.factors(norms).tolist() == [[1.0, 1.0, 1.0]]
    assert clipping.within(norms).tolist() == [True]


def test_flat_scales_the_whole_gradient_to_the_clip_norm() -> None:
    factors = Flat(1.0).factors(tensor((3.0, 4.0, 0.0), (0.3, 0.4, 0.0)))
    assert factors[0].tolist() == pytest.approx([0.2] * 3, rel=2 * ROUNDING_MARGIN)
    assert factors[1].tolist() == [1.0] * 3


def test_per_layer_scales_each_layer_and_its_sensitivity_is_the_root_of_squares() -> None:
    clipping = PerLayer((1.0, 2.0, 2.0))
    assert clipping.sensitivity == pytest.approx(3.0)
    norms = tensor((4.0, 1.0, 4.0))
    assert clipping.factors(norms)[0].tolist() == pytest.approx([0.25, 1.0, 0.5], rel=2 * ROUNDING_MARGIN)
    assert clipping.within(tensor((1.0, 2.0, 2.0), (1.1, 0.0, 0.0))).tolist() == [True, False]


def test_automatic_is_the_formula_of_the_paper() -> None:
    norms = tensor((3.0, 4.0, 0.0), (0.0, 0.0, 0.0))
    factors = Automatic(2.0, gamma=0.01).factors(norms)
    assert factors[:, 0].tolist() == pytest.approx([2 / 5.01, 2 / 0.01], rel=2 * ROUNDING_MARGIN)


@pytest.mark.parametrize("records", [0, 1, 7])
def test_one_record_moves_the_centred_count_by_half(records: int) -> None:
    for within in range(records + 1):
        before = Adaptive.centred_count(within, records)
        for joins in (0, 1):
            moved = abs(Adaptive.centred_count(within + joins, records + 1) - before)
            assert moved == Adaptive.COUNT_SENSITIVITY


def test_the_noisy_fraction_is_the_fraction_plus_scaled_noise() -> None:
    adaptive = Adaptive(1.0, 0.5, 0.2, count_deviation=4.0)
    assert adaptive.noisy_fraction(30, 100, expected_batch=100, normal=0.0) == pytest.approx(0.3)
    assert adaptive.noisy_fraction(30, 100, expected_batch=100, normal=1.5) == pytest.approx(0.3 + 0.06)


@pytest.mark.parametrize(("fraction", "factor"), [(0.5, 1.0), (1.0, math.exp(-0.1)), (0.0, math.exp(0.1))])
def test_the_threshold_moves_geometrically_towards_the_quantile(fraction: float, factor: float) -> None:
    adaptive = Adaptive(2.0, quantile=0.5, learning_rate=0.2, count_deviation=1.0)
    adaptive.update(fraction)
    assert adaptive.threshold == adaptive.sensitivity == pytest.approx(2.0 * factor)


def test_the_threshold_settles_at_the_quantile() -> None:
    norms = torch.linspace(0.01, 3.0, 300, dtype=torch.float64)[:, None]
    adaptive = Adaptive(0.01, quantile=0.7, learning_rate=0.2, count_deviation=1.0)
    for _ in range(300):
        within = int(adaptive.within(norms).sum())
        adaptive.update(adaptive.noisy_fraction(within, 300, 300, normal=0.0))
    assert adaptive.threshold == pytest.approx(2.1, abs=0.02)


def test_a_threshold_that_leaves_the_numbers_is_refused_and_kept() -> None:
    adaptive = Adaptive(1.0, 0.5, 0.2, 1.0)
    with pytest.raises(ParameterError, match="adaptive threshold"):
        adaptive.update(1e9)
    assert adaptive.threshold == 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_thresholds_that_bound_nothing_are_refused(value: float) -> None:
    for make in (
        lambda: Flat(value),
        lambda: PerLayer((1.0, value)),
        lambda: Automatic(value),
        lambda: Automatic(1.0, gamma=value),
        lambda: Adaptive(value, 0.5, 0.2, 1.0),
        lambda: Adaptive(1.0, 0.5, value, 1.0),
        lambda: Adaptive(1.0, 0.5, 0.2, value),
    ):
        with pytest.raises(ParameterError, match="finite and above 0"):
            make()


def test_other_wrong_settings_are_refused() -> None:
    with pytest.raises(ParameterError, match="between 0 and 1"):
        Adaptive(1.0, 1.0, 0.2, 1.0)
    with pytest.raises(ParameterError, match="found none"):
        PerLayer(())
    with pytest.raises(ParameterError, match="2 clip norms, but the network has 3"):
        PerLayer((1.0, 1.0)).factors(tensor((1.0, 1.0, 1.0)))
