"""The choice of N, bands and kinds of hints: what is cheapest by forecast, and never by the machine at hand."""

from __future__ import annotations

from math import prod

import pytest

from heinfer.operators import HintKind, PreparedForm, Program, outlines
from heinfer.operators.steps import Conv, MatMul, Window
from heinfer.plan import PreparedInfo
from heinfer.plan.forecast import forecast_form
from heinfer.plan.machine import SHIPPED, Link
from heinfer.plan.work import prepared_work
from partitioner.costs import REFERENCE_LINK
from partitioner.preparing import HINT_BYTE_S, choose_form, cost


def one_conv(channels: int, size: int, outputs: int, kernel: int, stride: int = 1, pad: int = 0) -> Program:
    length = (size + 2 * pad - kernel) // stride + 1
    window = Window((kernel, kernel), (stride, stride), (pad,) * 4, (1, 1), (length, length))
    step = Conv(0, "w", window, 1, (outputs, length, length))
    return Program(((channels, size, size),), (step,), (1,))


def tokens(count: int, inputs: int, outputs: int) -> Program:
    return Program(((count, inputs),), (MatMul(0, "w", (count, outputs)),), (1,))


def chosen(program: Program, degree: int = 2048) -> PreparedForm:
    form = choose_form(program, {}, degree)
    assert form is not None
    return form


PROGRAMS = {
    "plane of 34x34": (one_conv(16, 32, 16, 3, pad=1), 2048, 1, HintKind.POLYNOMIAL),
    "plane of 58x58, which bands would cut": (one_conv(64, 56, 64, 3, pad=1), 4096, 1, HintKind.POLYNOMIAL),
    "1x1 over 56x56": (one_conv(64, 56, 64, 1), 4096, 1, HintKind.POLYNOMIAL),
    "1x1 over 112x112, in bands at any N": (one_conv(64, 112, 64, 1), 2048, 7, HintKind.POLYNOMIAL),
    "patches": (one_conv(3, 224, 768, 16, 16), 2048, 1, HintKind.POLYNOMIAL),
    "128 tokens": (tokens(128, 384, 1536), 2048, 1, HintKind.POLYNOMIAL),
    "two tokens": (tokens(2, 64, 256), 2048, 1, HintKind.DENSE),
    "one token": (tokens(1, 64, 256), 2048, 1, HintKind.DENSE),
    "2x2 positions, whose hints would fill memory": (one_conv(64, 4, 512, 3), 2048, 1, HintKind.POLYNOMIAL),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_choice_of_degree_bands_and_kind(name: str) -> None:
    program, degree, bands, kind = PROGRAMS[name]
    form = chosen(program)
    assert (form.degree, len(form.hints), form.hints[0].kind) == (degree, bands, kind)
    assert form.dense == ((0,) if kind is HintKind.DENSE and prod(program.steps[0].shape[:-1]) > 1 else ())


@pytest.mark.parametrize("name", PROGRAMS)
def test_choice_costs_least_of_all_outlines(name: str) -> None:
    program = PROGRAMS[name][0]
    form = chosen(program)
    costs = {(found.degree, found.dense): cost(program, found) for found in outlines(program, 2048)}
    assert costs[form.degree, form.dense] == min(costs.values())
    assert len(set(costs.values())) == len(costs) > 2


def test_choice_is_never_below_the_rings_degree() -> None:
    assert chosen(one_conv(4, 8, 4, 3), 4096).degree == 4096


def test_choice_is_none_where_no_degree_has_room() -> None:
    assert choose_form(one_conv(1, 4100, 1, 2), {}, 2048) is None


def test_choice_weighs_hints_beside_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["two tokens"][0]
    assert chosen(program).hint_bytes == 2 * 256 * 12800
    monkeypatch.setattr("partitioner.preparing.HINT_BYTE_S", 1e-8)
    assert chosen(program).hint_bytes == 256 * 12800


def test_cost_is_that_of_the_shipped_machine_and_a_link() -> None:
    program = PROGRAMS["plane of 34x34"][0]
    (outline, *_) = outlines(program, 2048)
    info = PreparedInfo.of(outline)
    assert cost(program, outline) == forecast_form(program, info, SHIPPED, REFERENCE_LINK) + HINT_BYTE_S * 16 * 12800
    sent = 16 * (34 * 34 + 32 * 32) * 6.25
    alone, thin = (forecast_form(program, info, SHIPPED, Link(bandwidth)) for bandwidth in (None, 1e6))
    assert thin - alone == pytest.approx(8 * sent / 1e6, rel=1e-3)


def test_work_counts_lanes_of_every_hint_and_rows_of_dense_ones() -> None:
    program = Program(
        ((4, 6), (4, 6)), (MatMul(0, "w", (4, 9)), MatMul(1, "v", (4, 3))), (2, 3)
    )  # fmt: skip
    (info, *_) = (PreparedInfo.of(found) for found in outlines(program, 2048))
    work = prepared_work(program, info, 1, 1)
    assert (work.transformed, work.dense) == ((8 + 16 + 8 + 1) * 2048, 0)  # two ciphertexts, nine and three polynomials
    dense = next(found for found in outlines(program, 2048) if found.dense == (0, 1))
    work = prepared_work(program, PreparedInfo.of(dense), 8, 1)
    assert (work.transformed, work.dense) == ((2 * 8 + 8) * 2048, 8 * 4 * 12 * 2048)


def test_work_of_bands_counts_what_is_put_together() -> None:
    program = PROGRAMS["1x1 over 112x112, in bands at any N"][0]
    info = PreparedInfo.of(chosen(program))
    assert prepared_work(program, info, 3, 1).moved == 3 * 64 * 112**2
    whole = PreparedInfo.of(chosen(PROGRAMS["plane of 34x34"][0]))
    assert prepared_work(PROGRAMS["plane of 34x34"][0], whole, 3, 1).moved == 0
