"""A precision is met by the cheapest form of the weights, block by block, or refused with the best there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from heinfer.errors import ParameterError, UnsupportedModelError
from heinfer.operators import Program
from heinfer.operators.steps import Conv, MatMul, Rescale, Shift, Sum, Take, Window, WindowSum
from heinfer.ring import RingParameters
from partitioner import partition
from partitioner.pinning import Pins
from partitioner.pipeline import partition_in_memory, prepare
from partitioner.precision import DIGIT_BITS, quantise_to
from partitioner.scaling import quantise_program
from tests.partitioner.examples import Partitioned, check, graph, weights

PARAMETERS = RingParameters.default()
#: Digits and bits, in the order in which they are tried.
FORMS = [(1, 15), *((digits, bits) for digits, choices in DIGIT_BITS.items() for bits in choices)]
#: By name: inputs and operators, constants, what is pinned to the server.
MODELS: dict[str, tuple[str, str, dict[str, np.ndarray], tuple[str, ...]]] = {
    "two convolutions, added and pooled": (
        "float[b,2,8,8] x",
        "c = Conv <pads = [1, 1, 1, 1]> (x, u, d) e = Conv <pads = [1, 1, 1, 1]> (x, v) s = Add (c, e)"
        " y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (s)",
        {"u": weights(3, 2, 3, 3), "d": weights(3), "v": 9 * weights(3, 2, 3, 3, seed=1)},
        ("AveragePool", "Add"),
    ),
    "sum over all rows": (
        "float[b,4,6] x",
        "a = MatMul (x, w) y = ReduceSum <keepdims = 0> (a, axes)",
        {"w": weights(6, 5), "axes": np.array([1])},
        ("ReduceSum",),
    ),
    "copies of one input": (
        "float[b,3] x",
        "e = Concat <axis = 1> (x, x, x) y = Gemm <transB = 1> (e, w, d)",
        {"w": weights(4, 9), "d": weights(4)},
        (),
    ),
    "two outputs of two layers": (
        "float[b,5] x",
        "y = MatMul (x, w) z = Gemm (x, v, d)",
        {"w": weights(5, 3), "v": weights(5, 2), "d": weights(2)},
        (),
    ),
    "normalised channels": (
        "float[b,2,6,6] x",
        "c = Conv (x, w) y = BatchNormalization (c, f, d, m, n)",
        {"w": weights(3, 2, 3, 3), "f": weights(3), "d": weights(3), "m": weights(3), "n": np.abs(weights(3)) + 0.1},
        (),
    ),
}


def model_of(name: str) -> onnx.ModelProto:
    inputs, body, constants, _ = MODELS[name]
    outputs = "float y, float z" if " z = " in body else "float y"
    return graph(f"g ({inputs}) => ({outputs}) {{ {body} }}", constants)


#: Digits that bring the bound of each of these models down by a factor: two give 2000 at least, three 20,000.
GAINS = {2: 100.0, 3: 12_000.0}


@pytest.mark.parametrize("digits", GAINS)
@pytest.mark.parametrize("name", MODELS)
def test_error_is_within_the_bound_and_the_bound_within_the_precision(name: str, digits: int, tmp_path: Path) -> None:
    found, precision = with_digits(name, digits, tmp_path)
    (block,) = found.plan.blocks
    assert block.digits == digits
    assert precision / 100 < block.unit_bound <= precision
    assert set(MODELS[name][3]) <= set(found.server_operators)


def with_digits(name: str, digits: int, tmp_path: Path) -> tuple[Partitioned, float]:
    """Partition a model to a precision that asks for so many digits, and check it; return it and the precision."""
    model, pinned = model_of(name), MODELS[name][3]
    path = tmp_path / "example.onnx"
    path.write_bytes(model.SerializeToString())
    (built,) = prepare(path, PARAMETERS, pins=Pins((), pinned)).blocks
    assert built.block.digits == 1
    precision = built.block.unit_bound / GAINS[digits]
    return check(model, tmp_path, precision=precision, on_server=pinned), precision


def wide(tmp_path: Path, inputs: int = 4608) -> Path:
    path = tmp_path / "wide.onnx"
    values = np.random.default_rng(0).uniform(-1, 1, (inputs, 3)).astype(np.float32)
    path.write_bytes(
        graph(f"g (float[b,{inputs}] x) => (float y) {{ y = MatMul (x, w) }}", {"w": values}).SerializeToString()
    )
    return path


def forms(path: Path, precision: float | None) -> list[tuple[int, int]]:
    plan = partition_in_memory(path, PARAMETERS, precision=precision)[1].plan
    return [(block.digits, block.digit_bits) for block in plan.blocks]


def test_wide_row_takes_more_digits_of_fewer_bits_as_the_precision_asks(tmp_path: Path) -> None:
    path = wide(tmp_path)
    found = [forms(path, precision)[0] for precision in (None, 1e-1, 1e-3, 1e-4, 1e-5)]
    assert found[:3] == [(1, 15), (1, 15), (2, 15)]
    digits, bits = zip(*found, strict=True)
    assert list(digits) == sorted(digits)
    assert list(bits) == sorted(bits, reverse=True)
    assert bits[-1] < 12


def test_error_of_a_wide_row_with_digits_is_within_the_bound(tmp_path: Path) -> None:
    path = wide(tmp_path)
    found = check(onnx.load(path), tmp_path, precision=1e-4)
    assert found.plan.blocks[0].digits == 2
    assert found.plan.blocks[0].unit_bound <= 1e-4


def test_only_blocks_that_need_it_get_digits_which_cost_answers_and_no_upload(tmp_path: Path) -> None:
    path = tmp_path / "mixed.onnx"
    constants = {"w": weights(40, 8) / 40, "v": 50 * weights(8, 8)}
    text = "g (float[b,40] x) => (float y) { a = MatMul (x, w) r = Relu (a) y = MatMul (r, v) }"
    path.write_bytes(graph(text, constants).SerializeToString())
    before = partition_in_memory(path, PARAMETERS)[1].plan.blocks
    between = float(np.sqrt(before[0].unit_bound * before[1].unit_bound))
    after = partition_in_memory(path, PARAMETERS, precision=between)[1].plan.blocks
    assert after[0] == before[0]
    assert (before[1].digits, after[1].digits) == (1, 2)
    assert before[1].prepared is not None
    assert after[1].prepared is not None
    assert after[1].input_rows == before[1].input_rows
    assert after[1].prepared.values_up == before[1].prepared.values_up
    assert after[1].output_rows == 2 * before[1].output_rows
    assert after[1].prepared.values_down == 2 * before[1].prepared.values_down


def test_partition_to_a_precision_out_of_reach_names_blocks_and_the_best_bound_which_can_be_had(tmp_path: Path) -> None:
    path = wide(tmp_path)
    with pytest.raises(UnsupportedModelError, match="at best") as caught:
        partition(path, tmp_path / "bundle", precision=1e-9)
    assert [p.name for p in tmp_path.iterdir()] == ["wide.onnx"]
    (offence,) = caught.value.offences
    assert offence.node == "block 0"
    assert "MatMul" in offence.operator
    offered = float(str(caught.value).partition("precision of ")[2].partition(",")[0])
    plan = partition(path, tmp_path / "bundle", precision=offered).plan
    assert offered / 1.2 < plan.blocks[0].unit_bound <= offered
    assert offered < 1e-5


@pytest.mark.parametrize("precision", [0.0, -1e-5, float("nan"), float("inf")])
def test_precision_that_is_no_bound_is_refused(precision: float, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="above 0"):
        partition(wide(tmp_path, 3), tmp_path / "bundle", precision=precision)


def test_bound_of_weights_that_are_integers_holds_no_rounding(tmp_path: Path) -> None:
    whole = np.random.default_rng(1).integers(-9, 10, (6, 4)).astype(np.float32)
    whole[0] = 32767  # the scale of every row is 1
    program = Program(((6,),), (MatMul(0, "w", (4,)),), (1,))
    exact = quantise_to(program, {"w": whole}, PARAMETERS, None)
    between = whole + np.float32(0.25) * (np.abs(whole) < 32767)
    rounded = quantise_to(program, {"w": between}, PARAMETERS, None)
    assert exact.norms[0][0].rounding.max() < 1e-10
    assert exact.unit_bound(PARAMETERS) < rounded.unit_bound(PARAMETERS) / 10
    np.testing.assert_allclose(rounded.norms[0][0].rounding, 0.25 * 5)


def test_form_that_is_chosen_is_the_first_that_is_precise_enough() -> None:
    program = Program(((1000,),), (MatMul(0, "w", (4,)),), (1,))
    arrays = {"w": np.random.default_rng(2).normal(size=(1000, 4))}
    best = quantise_to(program, arrays, PARAMETERS, 1e-30)
    assert best.digits == max(DIGIT_BITS)
    least = best.unit_bound(PARAMETERS)
    assert quantise_to(program, arrays, PARAMETERS, least).unit_bound(PARAMETERS) == least
    bounds = {form: quantise_program(program, arrays, *form).unit_bound(PARAMETERS) for form in FORMS}
    chosen = set()
    for precision in np.geomspace(least, 1e-1, 16):
        found = quantise_to(program, arrays, PARAMETERS, float(precision))
        assert found.unit_bound(PARAMETERS) <= precision
        form = (found.digits, found.bits)
        assert all(bounds[earlier] > precision for earlier in FORMS[: FORMS.index(form)])
        chosen.add(form)
    assert {digits for digits, _ in chosen} == {1, 2, 3, 4}
    assert len(chosen) > 4


def test_sum_in_front_of_weights_shares_no_scales() -> None:
    """What is added there has none: inputs, not rows."""
    program = Program(((3,), (3,)), (Sum((0, 1), (1, -1), (3,)), MatMul(2, "w", (2,))), (3,))
    arrays = {"w": np.array([[1.0, 100.0], [2.0, 50.0], [0.5, 10.0]])}
    alone = quantise_program(Program(((3,),), (MatMul(0, "w", (2,)),), (1,)), arrays)
    found = quantise_program(program, arrays)
    np.testing.assert_array_equal(found.norms[0][0].scale, alone.norms[0][0].scale)
    np.testing.assert_array_equal(found.arrays["w"], alone.arrays["w"])


def test_relative_bound_is_large_where_one_weight_hides_the_others() -> None:
    program = Program(((4608,),), (MatMul(0, "w", (1,)),), (1,))
    values = np.random.default_rng(3).uniform(-1, 1, (4608, 1)) * 1e-5
    even = quantise_to(program, {"w": values}, PARAMETERS, None)
    hidden = values.copy()
    hidden[7] = 1
    found = quantise_to(program, {"w": hidden}, PARAMETERS, None)
    assert even.relative_bound(PARAMETERS) < 1e-4
    assert found.relative_bound(PARAMETERS) > 1e-2
    assert quantise_to(program, {"w": hidden}, PARAMETERS, 1e-5).relative_bound(PARAMETERS) < 1e-4


def test_server_program_of_digits_shares_what_is_in_front_of_the_weights() -> None:
    window = Window((2, 2), (1, 1), (0, 0, 0, 0), (1, 1), (2, 2))
    pool = Window((2, 2), (1, 1), (0, 0, 0, 0), (1, 1), (1, 1))
    program = Program(
        ((1, 3, 3),),
        (
            Take((0,), "i", (1, 3, 3)),
            Conv(1, "w", window, 1, (2, 2, 2)),
            Rescale(2, "f", (2, 2, 2)),
            Conv(1, "v", window, 1, (2, 2, 2)),
            Shift(4, "b", (2, 2, 2)),
            Sum((3, 5), (1, -1), (2, 2, 2)),
            WindowSum(6, pool, (2, 1, 1)),
        ),
        (7, 5),
    )
    assert program.for_server(1) == program.for_server()
    assert program.for_server(2) == Program(
        ((1, 3, 3),),
        (
            Take((0,), "i", (1, 3, 3)),
            Conv(1, "w", window, 1, (2, 2, 2)),
            Conv(1, "w.digit1", window, 1, (2, 2, 2)),
            Conv(1, "v", window, 1, (2, 2, 2)),
            Conv(1, "v.digit1", window, 1, (2, 2, 2)),
            Sum((2, 4), (1, -1), (2, 2, 2)),
            Sum((3, 5), (1, -1), (2, 2, 2)),
            WindowSum(6, pool, (2, 1, 1)),
            WindowSum(7, pool, (2, 1, 1)),
        ),
        (8, 9, 4, 5),
    )


def test_digits_of_added_rows_share_every_scale(tmp_path: Path) -> None:
    found, _ = with_digits("two convolutions, added and pooled", 3, tmp_path)
    (block,), terms = found.plan.blocks, found.node.terms[0]
    assert len(terms) == 3
    for number, digit in enumerate(terms):
        finer = 2.0 ** (block.digit_bits * number)
        np.testing.assert_array_equal(digit.norms.scale, terms[0].norms.scale * finer)
        assert digit.bias.any() == (number == 0)
        assert digit.norms.rounding.any() == digit.norms.input_rounding.any() == (number == 2)
