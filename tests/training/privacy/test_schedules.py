"""Shapes keep their promise step by step, whatever the length of the run."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import ParameterError
from heinfer.training.privacy.schedules import MOST_LEVELS, Curve, NoiseShape, parse_shape

SHAPES = ["constant", "steps:0.6,0.9,1.1", "linear:1.0,0.3", "linear:1.0,0.3,0.3,0.7", "exponential:1.0,0.3"]


def per_step(text: str, steps: int) -> list[float]:
    return [value for value, count in parse_shape(text).levels(steps) for _ in range(count)]


@given(text=st.sampled_from(SHAPES), steps=st.integers(1, 3000))
def test_levels_any_length_add_up_and_are_few(text: str, steps: int) -> None:
    levels = parse_shape(text).levels(steps)
    assert sum(count for _, count in levels) == steps
    assert all(count >= 1 for _, count in levels)
    assert 1 <= len(levels) <= MOST_LEVELS
    assert len({value for value, _ in levels}) == len(levels)


def test_levels_constant_is_one() -> None:
    assert parse_shape("constant").levels(7) == ((1.0, 7),)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (9, ((0.6, 3), (0.9, 3), (1.1, 3))),
        (10, ((0.6, 4), (0.9, 3), (1.1, 3))),
        (2, ((0.6, 1), (0.9, 1))),
        (1, ((0.6, 1),)),
    ],
)
def test_levels_steps_are_equal_parts(steps: int, expected: tuple[tuple[float, int], ...]) -> None:
    assert parse_shape("steps:0.6,0.9,1.1").levels(steps) == expected


def test_levels_steps_with_equal_neighbours_are_one_level() -> None:
    assert parse_shape("steps:0.5,0.5,1").levels(9) == ((0.5, 6), (1.0, 3))


@pytest.mark.parametrize("steps", [2, 50, 1171])
def test_levels_linear_stays_near_the_line(steps: int) -> None:
    values = per_step("linear:1.0,0.3", steps)
    line = [1.0 - 0.7 * step / (steps - 1) for step in range(steps)]
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.3)
    assert max(abs(a - b) for a, b in zip(values, line, strict=True)) <= 0.7 / 2 / (MOST_LEVELS - 1) + 1e-12


def test_levels_linear_with_ends_is_flat_outside_and_falls_between() -> None:
    values = per_step("linear:1.0,0.3,0.3,0.7", 1001)
    assert set(values[:301]) == {1.0}
    assert max(values[700:]) == pytest.approx(0.3)
    assert values[500] == pytest.approx(0.65, abs=0.7 / 2 / (MOST_LEVELS - 1) + 1e-9)
    assert sorted(values, reverse=True) == values
    assert values[320] < 1.0
    assert values[680] > 0.31


@pytest.mark.parametrize(("first", "last"), [(1.0, 0.3), (0.3, 1.0)])
def test_levels_exponential_falls_by_equal_factors(first: float, last: float) -> None:
    values = per_step(f"exponential:{first},{last}", 1200)
    assert values[0] == first
    assert values[-1] == pytest.approx(last)
    distinct = list(dict.fromkeys(values))
    assert len(distinct) == MOST_LEVELS
    factor = (last / first) ** (1 / (MOST_LEVELS - 1))
    assert all(b / a == pytest.approx(factor) for a, b in itertools.pairwise(distinct))
    middle = math.sqrt(first * last)
    assert values[600] == pytest.approx(middle, rel=0.03)


@pytest.mark.parametrize("text", SHAPES)
def test_parse_shape_its_text_reads_the_same(text: str) -> None:
    shape = parse_shape(text)
    assert parse_shape(str(shape)) == shape


def test_parse_shape_spaces_and_capitals_do_not_matter() -> None:
    assert parse_shape(" Steps: 0.6, 0.9 ") == NoiseShape(Curve.STEPS, (0.6, 0.9))


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("exponental:1,0.3", "exponential"), ("step:1,2", "steps"), ("linar:1,2", "linear"), ("const", "constant")],
)
def test_parse_shape_unknown_word_names_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(ParameterError, match=f"did you mean '{nearest}'"):
        parse_shape(text)


def test_parse_shape_word_like_nothing_lists_all() -> None:
    with pytest.raises(ParameterError, match="constant, steps, linear, exponential"):
        parse_shape("zigzag")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "constant:1",
        "steps",
        "steps:",
        "steps:1,,2",
        "steps:1,x",
        "steps:0,1",
        "steps:-1,1",
        "steps:nan",
        "steps:inf",
        "steps:" + ",".join(str(1 + i) for i in range(MOST_LEVELS + 1)),
        "linear:1",
        "linear:1,2,3",
        "linear:1,0.3,0.7,0.3",
        "linear:1,0.3,0.5,0.5",
        "linear:1,0.3,-0.1,0.5",
        "linear:1,0.3,0.5,1.1",
        "linear:1,0.3,nan,0.5",
        "linear:1,0",
        "exponential:1,0.3,0,1",
        "exponential:1",
    ],
)
def test_parse_shape_numbers_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(ParameterError):
        parse_shape(text)


@pytest.mark.parametrize("steps", [0, -1])
def test_levels_of_no_steps_are_refused(steps: int) -> None:
    with pytest.raises(ParameterError, match="at least 1 step"):
        parse_shape("constant").levels(steps)
