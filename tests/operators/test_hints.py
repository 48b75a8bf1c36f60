from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinfer.operators import Hint, HintKind, PreparedForm, Program, evaluate_plain, hints, make_hints
from heinfer.ring import WEIGHT_LIMIT, RingParameters
from tests.operators.test_cutting import (
    CASES,
    Arrays,
    convolutions,
    cut,
    cut_case,
    one_conv,
    one_matmul,
    server_inputs,
    sliding,
)

LIMB = 25


def limbs(residues: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Halves of residues, so small that sums of their products with small integers are exact in 64 bits."""
    return residues >> LIMB, residues & (2**LIMB - 1)


def joined(high: np.ndarray, low: np.ndarray, modulus: int) -> np.ndarray:
    """(high * 2**25 + low) mod q in Python integers."""
    whole = (high.astype(object) << LIMB) + low.astype(object)
    return (whole % modulus).astype(np.int64)


def negacyclic_product(a: np.ndarray, s: np.ndarray, modulus: int) -> np.ndarray:
    """a * s modulo X^N + 1 and q, for ternary s, by the definition."""
    parts = []
    for limb in limbs(a):
        full = np.convolve(limb, s)
        folded = full[: len(a)].copy()
        folded[: len(a) - 1] -= full[len(a) :]
        parts.append(folded)
    return joined(*parts, modulus)


def apply_step(form: PreparedForm, hint: Hint, arrays: Arrays, inputs: list[np.ndarray], modulus: int) -> np.ndarray:
    """Apply one weighted step of the server's program to residues, flat."""
    step = form.program.steps[hint.step]
    alone = Program((form.program.inputs[step.source],), (replace(step, source=0),), (1,))
    parts = []
    for limb in limbs(inputs[step.source]):
        (found,) = evaluate_plain(alone, arrays, [limb.astype(np.float64)])
        assert np.abs(found).max() < 2**53
        parts.append(found.ravel().astype(np.int64))
    return joined(*parts, modulus)


def correct(hint: Hint, made: np.ndarray, secret: np.ndarray, masked: np.ndarray, modulus: int) -> np.ndarray:
    """Hint times secret, read as the hint says; `masked` is what the step reads, for elementwise hints."""
    if hint.kind is HintKind.POLYNOMIAL:
        found = np.full(hint.rows * len(hint.reads), -1)
        for row, polynomial in enumerate(made):
            product = negacyclic_product(polynomial, secret, modulus)
            found[row * hint.row_stride + np.arange(len(hint.reads)) * hint.read_stride] = product[hint.reads]
        return found
    if hint.kind is HintKind.DENSE:
        return joined(*(limb @ secret for limb in limbs(made)), modulus)
    return joined(*(made.astype(np.int64) * limb.ravel() for limb in limbs(masked)), modulus)


def check_hints(program: Program, arrays: Arrays, seed: int = 0) -> None:
    check_form(cut(program, arrays), arrays, seed)


def check_form(form: PreparedForm, arrays: Arrays, seed: int = 0) -> None:
    parameters = RingParameters.default(form.degree)
    q = parameters.modulus
    generator = np.random.default_rng(seed)
    public = generator.integers(0, q, (form.ciphertexts, form.degree))
    secret = generator.integers(-1, 2, form.degree)
    products = np.stack([negacyclic_product(a, secret, q) for a in public])
    inputs = server_inputs(form, products.ravel()[form.positions][None])
    made = make_hints(form, arrays, public, parameters)
    assert len(made) == len(form.hints)
    for hint, array in zip(form.hints, made, strict=True):
        if hint.kind is HintKind.ELEMENTWISE:
            assert (array.dtype, array.shape) == (np.int16, (hint.rows,))
        else:
            assert (array.dtype, array.shape) == (np.int64, (hint.rows, form.degree))
            assert array.min() >= 0
            assert array.max() < q
        step = form.program.steps[hint.step]
        want = apply_step(form, hint, arrays, inputs, q)
        assert want.size == prod(step.shape)
        np.testing.assert_array_equal(correct(hint, array, secret, inputs[step.source], q), want)


@pytest.mark.parametrize("name", CASES)
def test_hint_times_secret_equals_the_step_applied_to_a_times_secret(name: str) -> None:
    case = CASES[name]()
    check_form(cut_case(case), case.arrays)


@settings(max_examples=25)
@given(convolutions(largest=8), st.integers(0, 2**32 - 1))
def test_hints_of_random_convolutions_times_secret_equal_the_step(found: tuple[Program, Arrays], seed: int) -> None:
    program, arrays = found
    few = [number for number, step in enumerate(program.steps) if prod(step.window.output) <= 16]
    for dense in ((), few):
        check_form(cut(program, arrays, dense=dense), arrays, seed)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_hints_of_random_matmuls_times_secret_equal_the_step(
    tokens: list[int], inputs: int, outputs: int, seed: int
) -> None:
    program, arrays = one_matmul((*tokens, inputs), outputs)
    for dense in ((), (0,)):
        check_form(cut(program, arrays, dense=dense), arrays, seed)


@pytest.mark.parametrize("kind", ["conv", "tokens"])
def test_hints_made_in_many_pieces_equal_those_made_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, arrays = {
        "conv": lambda: one_conv((4, 6, 6), 4, sliding(6, 6, (3, 3), pads=(1, 1, 1, 1)), 2),
        "tokens": lambda: one_matmul((5, 7), 3),
    }[kind]()
    form, parameters = cut(program, arrays), RingParameters.default()
    public = np.random.default_rng(0).integers(0, parameters.modulus, (form.ciphertexts, form.degree))
    (want,) = make_hints(form, arrays, public, parameters)
    monkeypatch.setattr(hints, "_PIECE", 4096)  # pieces whose width does not divide N
    (got,) = make_hints(form, arrays, public, parameters)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("residue", ["zero", "largest"])
@pytest.mark.parametrize("kind", ["conv", "vector"])
def test_hints_of_extreme_weights_and_residues_are_exact(kind: str, residue: str) -> None:
    program, arrays = one_conv((8, 6, 6), 2, sliding(6, 6, (3, 3))) if kind == "conv" else one_matmul((300,), 2)
    arrays = {"w": np.sign(arrays["w"]) * np.int16(WEIGHT_LIMIT)}
    form, parameters = cut(program, arrays), RingParameters.default()
    q = parameters.modulus
    public = np.full((form.ciphertexts, form.degree), 0 if residue == "zero" else q - 1)
    (made,) = make_hints(form, arrays, public, parameters)
    if residue == "zero":
        assert not made.any()  # q itself is no residue
        return
    secret = np.ones(form.degree, np.int64)
    products = np.stack([negacyclic_product(a, secret, q) for a in public])
    inputs = server_inputs(form, products.ravel()[form.positions][None])
    want = apply_step(form, form.hints[0], arrays, inputs, q)
    np.testing.assert_array_equal(correct(form.hints[0], made, secret, inputs[0], q), want)


@pytest.mark.parametrize("outputs", [1, 8, 13])
@pytest.mark.parametrize("kind", ["vector", "one window", "one window in groups"])
def test_dense_hints_over_several_ciphertexts_times_secret_equal_the_step(kind: str, outputs: int) -> None:
    program, arrays = {
        "vector": lambda: one_matmul((5000,), outputs),
        "one window": lambda: one_conv((30, 9, 9), outputs, sliding(9, 9, (5, 5), dilations=(2, 2))),
        "one window in groups": lambda: one_conv((52, 9, 9), 2 * outputs, sliding(9, 9, (9, 9)), 2),
    }[kind]()
    form = cut(program, arrays)
    assert [hint.kind for hint in form.hints] == [HintKind.DENSE]
    assert form.ciphertexts > 1
    check_hints(program, arrays)
