from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.operators import (
    Hint,
    HintKind,
    Outline,
    PreparedForm,
    Program,
    cutting,
    degrees_from,
    evaluate_plain,
    map_names,
    outlines,
    prepare_form,
)
from heinfer.operators.plain import evaluate_step
from heinfer.operators.steps import Conv, MatMul, Scale, Step, Sum, Take, Window, WindowSum

Arrays = dict[str, np.ndarray]
POLYNOMIAL, DENSE, ELEMENTWISE = HintKind.POLYNOMIAL, HintKind.DENSE, HintKind.ELEMENTWISE


@dataclass(frozen=True)
class Case:
    """A program, where it is cut (degree, dense steps), and what the cut must be: values up, kinds, ciphertexts."""

    program: Program
    arrays: Arrays
    values_up: int
    kinds: tuple[HintKind, ...] = (POLYNOMIAL,)
    degree: int = 2048
    ciphertexts: int = 1
    front: tuple[str, ...] = field(default=())
    dense: tuple[int, ...] = ()


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng([*shape]).integers(-100, 101, shape).astype(np.int16)


def permuted(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count).astype(np.int32)


def sliding(
    height: int,
    width: int,
    kernel: tuple[int, int],
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilations: tuple[int, int] = (1, 1),
) -> Window:
    output = [
        (length + pads[i] + pads[i + 2] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1
        for i, length in enumerate((height, width))
    ]
    return Window(kernel, strides, pads, dilations, (output[0], output[1]))


def convolution(source: int, weights: str, window: Window, outputs: int, group: int = 1) -> Conv:
    return Conv(source, weights, window, group, (outputs, *window.output))


def one_conv(shape: tuple[int, int, int], outputs: int, window: Window, group: int = 1) -> tuple[Program, Arrays]:
    arrays = {"w": drawn(outputs, shape[0] // group, *window.kernel)}
    return Program((shape,), (convolution(0, "w", window, outputs, group),), (1,)), arrays


def one_matmul(shape: tuple[int, ...], outputs: int) -> tuple[Program, Arrays]:
    return Program((shape,), (MatMul(0, "w", (*shape[:-1], outputs)),), (1,)), {"w": drawn(shape[-1], outputs)}


def residual(top: Window, bottom: Window, shape: tuple[int, int, int], outputs: int) -> tuple[Program, Arrays]:
    """Two convolutions of one input, subtracted."""
    steps = (
        convolution(0, "w", top, outputs),
        convolution(0, "v", bottom, outputs),
        Sum((1, 2), (1, -1), (outputs, *top.output)),
    )
    weights = {"w": drawn(outputs, shape[0], *top.kernel), "v": drawn(outputs, shape[0], *bottom.kernel)}
    return Program((shape,), steps, (3,)), weights


def residual_outputs(top: Window, bottom: Window, shape: tuple[int, int, int]) -> tuple[Program, Arrays]:
    """Two convolutions of one input, both returned."""
    steps = (convolution(0, "w", top, 2), convolution(0, "v", bottom, 3))
    return Program((shape,), steps, (1, 2)), {
        "w": drawn(2, shape[0], *top.kernel),
        "v": drawn(3, shape[0], *bottom.kernel),
    }


SAME = (1, 1, 1, 1)


def moved_and_summed() -> Case:
    steps = (
        Take((0,), "p", (4, 6)),
        Take((1,), None, (4, 6)),
        Sum((2, 3), (1, -1), (4, 6)),
        MatMul(4, "w", (4, 2)),
        Take((3,), None, (24,)),
        MatMul(6, "v", (8,)),
        Take((5,), None, (8,)),
        Sum((7, 8), (1, 1), (8,)),
    )
    program = Program(((2, 3, 4), (2, 3, 4)), steps, (9, 7))
    arrays = {"p": permuted(24), "w": drawn(6, 2), "v": drawn(24, 8)}
    return Case(program, arrays, 48, (POLYNOMIAL, DENSE), ciphertexts=2, front=("take", "take", "sum", "take"))


def padded_by_a_map() -> Case:
    indices = np.full((2, 6, 6), -1, np.int32)
    indices[:, 1:5, 1:5] = np.arange(32).reshape(2, 4, 4)
    window = sliding(6, 6, (3, 3))
    pool = Window((2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (2, 2))
    steps = (
        Take((0,), "p", (2, 6, 6)),
        convolution(1, "w", window, 3),
        Take((2,), "r", (3, 4, 4)),
        Sum((2, 3), (1, 1), (3, 4, 4)),
        WindowSum(4, pool, (3, 2, 2)),
    )
    arrays = {"p": indices.ravel(), "r": permuted(48), "w": drawn(3, 2, 3, 3)}
    return Case(Program(((2, 4, 4),), steps, (5, 3)), arrays, 72)


def pooled_first() -> Case:
    pool = Window((2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (5, 4))
    steps = (WindowSum(0, pool, (3, 5, 4)), convolution(1, "w", sliding(5, 4, (3, 3), pads=SAME), 2))
    return Case(Program(((3, 10, 8),), steps, (2,)), {"w": drawn(2, 3, 3, 3)}, 3 * 7 * 6, front=("window_sum",))


def joined_inputs() -> Case:
    steps = (Take((0, 1), "p", (1, 5, 5)), convolution(2, "w", sliding(5, 5, (3, 3)), 2))
    return Case(Program(((2, 3, 4), (1,)), steps, (3,)), {"p": permuted(25), "w": drawn(2, 1, 3, 3)}, 25)


def conv_beside_matmul() -> Case:
    """A value that is uploaded twice, under two polynomials: as planes, and as tokens."""
    window = sliding(4, 6, (1, 3), pads=(0, 1, 0, 1))
    program = Program(((2, 4, 6),), (convolution(0, "w", window, 3), MatMul(0, "v", (2, 4, 5))), (1, 2))
    arrays = {"w": drawn(3, 2, 1, 3), "v": drawn(6, 5)}
    return Case(program, arrays, 2 * 4 * 8 + 48, (POLYNOMIAL, POLYNOMIAL), ciphertexts=2)


def one_vector_read_twice() -> Case:
    steps = (MatMul(0, "w", (4,)), MatMul(0, "v", (4,)), Sum((1, 2), (1, 1), (4,)))
    return Case(Program(((9,),), steps, (3,)), {"w": drawn(9, 4), "v": drawn(9, 4)}, 9, (DENSE, DENSE))


def dead_input() -> Case:
    program = Program(((4,), (3,)), (Take((0,), None, (2, 2)), MatMul(1, "w", (2,))), (3,))
    return Case(program, {"w": drawn(3, 2)}, 3, (DENSE,), front=())


def banded() -> Case:
    """7x7 over 90 x 94: bands of 14 rows of outputs at most, each of 20 rows of 100 inputs; the last of 6 and 12."""
    window = sliding(90, 94, (7, 7), (1, 1), (3, 3, 3, 3))
    return Case(*one_conv((2, 90, 94), 2, window), 2 * (6 * 20 + 12) * 100, (POLYNOMIAL,) * 7, ciphertexts=6 * 2 + 2)


def banded_in_phases() -> Case:
    """7x7, strides 2, over 120 x 100: phases of 38 rows of 53, so 35 rows of outputs a band; then 25, from 55 rows."""
    window = sliding(120, 100, (7, 7), (2, 2), (3, 3, 3, 3))
    return Case(*one_conv((2, 120, 100), 2, window), 2 * (75 + 55) * 105, (POLYNOMIAL, POLYNOMIAL), ciphertexts=8 + 8)


def dense_beside_polynomials() -> Case:
    """Two convolutions of one upload: the second has few positions, a dense hint, and reads a part of the plane."""
    wide, narrow = sliding(8, 8, (3, 3), pads=SAME), sliding(8, 8, (3, 2), (5, 6), (0, 0, 0, 0))
    steps = (convolution(0, "w", wide, 4, 2), convolution(0, "v", narrow, 6, 2))
    arrays = {"w": drawn(4, 2, 3, 3), "v": drawn(6, 2, 3, 2)}
    return Case(Program(((4, 8, 8),), steps, (1, 2)), arrays, 400, (POLYNOMIAL, DENSE), dense=(1,))


CASES: dict[str, Callable[[], Case]] = {
    "3x3 with padding": lambda: Case(*one_conv((4, 8, 8), 5, sliding(8, 8, (3, 3), pads=SAME)), 4 * 10 * 10),
    "padding on one side": lambda: Case(
        *one_conv((2, 8, 8), 2, sliding(8, 8, (3, 3), pads=(1, 0, 2, 3))), 2 * (8 + 3) * (8 + 3)
    ),
    "cropped": lambda: Case(*one_conv((2, 8, 8), 2, sliding(8, 8, (3, 3), pads=(-1, -2, 1, -1))), 2 * 8 * 5),
    "strides": lambda: Case(
        *one_conv((3, 32, 32), 4, sliding(32, 32, (3, 3), (2, 2), SAME)), 3 * 33 * 33, ciphertexts=2
    ),
    "strides of 2 and 3 with dilation": lambda: Case(
        *one_conv((3, 20, 19), 4, sliding(20, 19, (3, 2), (2, 3), SAME, (3, 2))), 3 * 21 * 21
    ),
    "patches": lambda: Case(*one_conv((3, 48, 56), 4, sliding(48, 56, (8, 8), (8, 8))), 3 * 48 * 56, ciphertexts=4),
    "steps over what is read": lambda: Case(*one_conv((2, 30, 30), 3, sliding(30, 30, (2, 2), (5, 7))), 2 * 27 * 30),
    "strides along one axis": lambda: Case(
        *one_conv((3, 1, 900), 4, sliding(1, 900, (1, 9), (1, 4))), 3 * 897, ciphertexts=2
    ),
    "strides in one row of windows": lambda: Case(
        *one_conv((2, 5, 40), 3, sliding(5, 40, (5, 4), (5, 4))), 2 * 5 * 40
    ),
    "strides of 2 beside 4": lambda: Case(
        *residual_outputs(sliding(33, 33, (3, 3), (2, 2), SAME), sliding(33, 33, (5, 5), (4, 4), SAME), (3, 33, 33)),
        3 * 35 * 35, (POLYNOMIAL, POLYNOMIAL), ciphertexts=2,
    ),
    "strides of 2 beside 3": lambda: Case(
        *residual_outputs(sliding(33, 33, (3, 3), (2, 2), SAME), sliding(33, 33, (3, 3), (3, 3)), (3, 33, 33)),
        3 * 35 * 35, (POLYNOMIAL, POLYNOMIAL), ciphertexts=3,
    ),
    "dilation": lambda: Case(*one_conv((2, 10, 12), 3, sliding(10, 12, (3, 3), (1, 1), SAME, (2, 2))), 2 * 12 * 14),
    "groups": lambda: Case(*one_conv((4, 10, 12), 6, sliding(10, 12, (3, 2), pads=SAME), 2), 4 * 12 * 14),
    "groups over several ciphertexts": lambda: Case(
        *one_conv((6, 30, 30), 4, sliding(30, 30, (3, 3), pads=SAME), 2), 6 * 32 * 32, ciphertexts=3
    ),
    "depthwise": lambda: Case(*one_conv((6, 7, 5), 12, sliding(7, 5, (3, 3), (2, 1), SAME), 6), 6 * 9 * 7),
    "1x1": lambda: Case(*one_conv((3, 6, 5), 4, sliding(6, 5, (1, 1))), 90),
    "1x1 strided": lambda: Case(*one_conv((3, 32, 31), 4, sliding(32, 31, (1, 1), (2, 2))), 3 * 16 * 16),
    "1x1 strided and padded": lambda: Case(
        *one_conv((3, 9, 8), 2, sliding(9, 8, (1, 1), (3, 2), SAME)), 3 * 4 * 5
    ),
    "3x3 beside 1x1": lambda: Case(
        *residual(sliding(32, 32, (3, 3), (2, 2), SAME), sliding(32, 32, (1, 1), (2, 2)), (3, 32, 32), 4),
        3 * 33 * 33, (POLYNOMIAL, POLYNOMIAL), ciphertexts=2,
    ),
    "5x5 beside 2x3": lambda: Case(
        *residual(
            sliding(20, 21, (5, 5), (2, 2), (2, 2, 2, 2)), sliding(20, 21, (2, 3), (2, 2), (0, 1, 0, 1)), (2, 20, 21), 2
        ),
        2 * 23 * 25, (POLYNOMIAL, POLYNOMIAL),
    ),
    "two 1x1 of one stride": lambda: Case(
        *residual(sliding(12, 12, (1, 1), (3, 2)), sliding(12, 12, (1, 1), (3, 2)), (3, 12, 12), 2),
        3 * 4 * 6, (POLYNOMIAL, POLYNOMIAL),
    ),
    "plane of 4096": lambda: Case(
        *one_conv((2, 60, 50), 2, sliding(60, 50, (3, 3), pads=SAME)), 2 * 62 * 52, degree=4096, ciphertexts=2
    ),
    "plane that fills 2048": lambda: Case(*one_conv((2, 64, 32), 2, sliding(64, 32, (2, 2))), 4096, ciphertexts=2),
    "bands": banded,
    "bands in phases": banded_in_phases,
    "bands of one row of windows": lambda: Case(
        *one_conv((1, 20, 900), 2, sliding(20, 900, (6, 3), (3, 1))), 5 * 6 * 900, (POLYNOMIAL,) * 5, ciphertexts=5 * 3
    ),
    "1x1 strided in bands": lambda: Case(
        *one_conv((1, 224, 199), 2, sliding(224, 199, (1, 1), (2, 2))), 112 * 100, (POLYNOMIAL,) * 2, 8192, 2
    ),
    "1x1 in many bands": lambda: Case(
        *one_conv((3, 112, 112), 2, sliding(112, 112, (1, 1))), 3 * 112**2, (POLYNOMIAL,) * 7, ciphertexts=6 * 3 + 1
    ),
    "tokens": lambda: Case(*one_matmul((5, 7), 3), 35),
    "tokens of rank 3": lambda: Case(*one_matmul((2, 5, 7), 3), 70),
    "tokens over several ciphertexts": lambda: Case(*one_matmul((500, 9), 2), 4500, ciphertexts=3),
    "tokens of 4096": lambda: Case(*one_matmul((2049, 2), 2), 4098, degree=4096, ciphertexts=2),
    "tokens in parts": lambda: Case(
        *one_matmul((9000, 2), 1), 18000, (POLYNOMIAL, POLYNOMIAL), 8192, 2 + 1
    ),
    "tokens in parts of 2048": lambda: Case(
        *one_matmul((2500, 3), 2), 7500, (POLYNOMIAL, POLYNOMIAL), ciphertexts=3 + 1
    ),
    "few tokens, dense": lambda: Case(*one_matmul((2, 3, 7), 4), 42, (DENSE,), dense=(0,)),
    "few tokens of 500, dense": lambda: Case(*one_matmul((6, 500), 4), 3000, (DENSE,), ciphertexts=2, dense=(0,)),
    "few positions, dense": lambda: Case(
        *one_conv((4, 5, 5), 6, sliding(5, 5, (3, 2), (1, 2), SAME, (2, 1)), 2), 4 * 7 * 6, (DENSE,), dense=(0,)
    ),
    "few positions of a plane that is too large, dense": lambda: Case(
        *one_conv((2, 60, 60), 3, sliding(60, 60, (59, 59))), 7200, (DENSE,), ciphertexts=4, dense=(0,)
    ),
    "dense beside polynomials": dense_beside_polynomials,
    "vector": lambda: Case(*one_matmul((7,), 3), 7, (DENSE,)),
    "row": lambda: Case(*one_matmul((1, 1, 7), 3), 7, (DENSE,)),
    "vector of 5000": lambda: Case(*one_matmul((5000,), 2), 5000, (DENSE,), ciphertexts=3),
    "scale": lambda: Case(
        Program(((7, 3),), (Scale(0, "w", (7, 3)),), (1,)), {"w": drawn(7, 3)}, 21, (ELEMENTWISE,)
    ),
    "scale of 3000": lambda: Case(
        Program(((3000,),), (Scale(0, "w", (3000,)),), (1,)), {"w": drawn(3000)}, 3000, (ELEMENTWISE,), ciphertexts=2
    ),
    "whole plane": lambda: Case(*one_conv((3, 5, 5), 4, sliding(5, 5, (5, 5))), 75, (DENSE,)),
    "one position of a larger plane": lambda: Case(
        *one_conv((4, 6, 6), 4, sliding(6, 6, (2, 3), (5, 5), (0, 1, 0, 0)), 2), 4 * 2 * 3, (DENSE,)
    ),
    "moved and summed": moved_and_summed,
    "padded by a map": padded_by_a_map,
    "pooled first": pooled_first,
    "joined inputs": joined_inputs,
    "conv beside matmul": conv_beside_matmul,
    "one vector read twice": one_vector_read_twice,
    "dead input": dead_input,
}  # fmt: skip


def maps(program: Program, arrays: Arrays) -> Arrays:
    return {name: arrays[name] for name in map_names(program)}


def cut(program: Program, arrays: Arrays, degree: int = 2048, dense: tuple[int, ...] = ()) -> PreparedForm:
    form = prepare_form(program, maps(program, arrays), degree, dense)
    assert form is not None
    return form


def server_inputs(form: PreparedForm, uploaded: np.ndarray) -> list[np.ndarray]:
    """Divide uploads, shape (samples, values_up), into the server's tensors."""
    ends = np.cumsum([prod(shape) for shape in form.program.inputs])
    parts = np.split(uploaded, ends[:-1], axis=1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, form.program.inputs, strict=True)]


def run_cut(form: PreparedForm, arrays: Arrays, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Do what node and server do together, in the clear."""
    values = list(inputs)
    for step in form.front:
        values.append(evaluate_step(step, arrays, values))
    samples = len(inputs[0])
    joined = np.concatenate([*(values[v].reshape(samples, -1) for v in form.gathered), np.zeros((samples, 1))], axis=1)
    return evaluate_plain(form.program, arrays | dict(form.arrays), server_inputs(form, joined[:, form.gather]))


def check_equal_function(program: Program, arrays: Arrays, form: PreparedForm) -> None:
    """Compare on small integers, for which float64 is exact."""
    generator = np.random.default_rng(1)
    inputs = [generator.integers(-9, 10, (2, *shape)).astype(np.float64) for shape in program.inputs]
    form.program.check_arrays(arrays | dict(form.arrays))
    expected = evaluate_plain(program, arrays, inputs)
    for got, want in zip(run_cut(form, arrays, inputs), expected, strict=True):
        assert np.abs(want).max() < 2**53
        np.testing.assert_array_equal(got, want, strict=True)


def cut_case(case: Case) -> PreparedForm:
    return cut(case.program, case.arrays, case.degree, case.dense)


def check_places(form: PreparedForm) -> None:
    """Check that no coefficient is used twice, and that planes lie within ciphertexts."""
    assert len(form.gather) == len(form.positions) == form.values_up == sum(map(prod, form.program.inputs))
    assert len(np.unique(form.positions)) == len(form.positions)
    assert form.positions.min() >= 0
    assert form.positions.max() < form.ciphertexts * form.degree
    assert len(np.unique(form.positions // form.degree)) == form.ciphertexts  # none is left over
    places = [p[0] for p in server_inputs(form, form.positions[None])]
    used = np.concatenate([np.unique(p // form.degree) for p in places])
    assert len(np.unique(used)) == len(used)  # inputs share no ciphertext
    for hint in form.hints:
        step = form.program.steps[hint.step]
        place = places[step.source]
        first, last = place.min() // form.degree, place.max() // form.degree
        assert (hint.first_ciphertext, hint.ciphertexts) == (first, last - first + 1)
        if hint.kind is POLYNOMIAL:
            for plane in planes_of(hint, step, place):
                rows = np.arange(len(plane))[:, None] * hint.width
                np.testing.assert_array_equal(plane - plane[0, 0], rows + np.arange(plane.shape[1]))
                assert plane[0, 0] // form.degree == plane[-1, -1] // form.degree
                assert plane[-1, -1] - plane[0, 0] < hint.plane


def planes_of(hint: Hint, step: Step, place: np.ndarray) -> list[np.ndarray]:
    """Return where the rows and columns of every plane lie."""
    if isinstance(step, MatMul):
        return list(place.T[:, None])
    down, across = hint.phases
    return [channel[y::down, x::across] for channel in place for y in range(down) for x in range(across)]


@pytest.mark.parametrize("name", CASES)
def test_cut_program_after_the_nodes_front_equals_the_program(name: str) -> None:
    case = CASES[name]()
    form = cut_case(case)
    check_equal_function(case.program, case.arrays, form)
    assert tuple(step.kind for step in form.front) == case.front
    assert form.program.output_shapes == case.program.output_shapes


@pytest.mark.parametrize("name", CASES)
def test_cut_places_every_value_once_and_planes_within_ciphertexts(name: str) -> None:
    check_places(cut_case(CASES[name]()))


@pytest.mark.parametrize("name", CASES)
def test_cut_has_the_expected_size(name: str) -> None:
    case = CASES[name]()
    form = cut_case(case)
    found = (form.values_up, tuple(hint.kind for hint in form.hints), form.degree, form.ciphertexts)
    assert found == (case.values_up, case.kinds, case.degree, case.ciphertexts)
    assert form.dense == case.dense
    assert form.values_down == sum(prod(shape) for shape in case.program.output_shapes)
    rows = {POLYNOMIAL: form.degree * 50 // 8, DENSE: form.degree * 50 // 8, ELEMENTWISE: 2}
    assert form.hint_bytes == sum(hint.rows * rows[hint.kind] for hint in form.hints)


@pytest.mark.parametrize("name", CASES)
def test_cut_is_repeated_from_its_degree_and_dense_steps(name: str) -> None:
    case = CASES[name]()
    first = cut_case(case)
    assert_same(cut(case.program, case.arrays, first.degree, first.dense), first)


@pytest.mark.parametrize("name", CASES)
def test_outlines_are_those_of_the_cuts(name: str) -> None:
    case = CASES[name]()
    found = list(outlines(case.program, 2048))
    assert found
    for outline in found:
        check_outline(outline, cut(case.program, case.arrays, outline.degree, outline.dense))


def check_outline(outline: Outline, form: PreparedForm) -> None:
    for part in fields(outline):
        if part.name != "hints":
            assert getattr(outline, part.name) == getattr(form, part.name), part.name
    assert outline.hint_bytes == form.hint_bytes
    assert_same(outline.hints, tuple(replace(hint, step=-1) for hint in form.hints))


def assert_same(got: object, want: object) -> None:
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        np.testing.assert_array_equal(got, want, strict=True)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for name, array in want.items():
            assert_same(got[name], array)
    elif isinstance(want, tuple):
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    elif isinstance(want, PreparedForm | cutting.Hint):
        for part in fields(want):
            assert_same(getattr(got, part.name), getattr(want, part.name))
    else:
        assert got == want


@pytest.mark.parametrize(
    ("shape", "kernel", "degrees"),
    [
        ((1, 4, 8192), (1, 2), (8192,)),  # a row fills a ciphertext
        ((1, 4, 8193), (1, 2), ()),
        ((1, 20, 1000), (8, 3), (8192,)),  # eight rows fit, one row of outputs a band
        ((1, 20, 1000), (9, 3), ()),
        ((1, 4, 2048), (1, 2), (2048, 4096, 8192)),
        ((1, 4, 2048), (2, 2), (4096, 8192)),
        ((1, 1, 8193), (1, 8193), (2048, 4096, 8192)),  # one position: any map of a vector serves
    ],
)
def test_outlines_are_of_all_degrees_at_which_a_band_fits(
    shape: tuple[int, int, int], kernel: tuple[int, int], degrees: tuple[int, ...]
) -> None:
    program, _ = one_conv(shape, 1, sliding(*shape[1:], kernel))
    assert tuple(outline.degree for outline in outlines(program, 2048)) == degrees


def test_outlines_are_none_where_one_of_two_steps_fits_no_degree() -> None:
    wide = convolution(1, "v", sliding(2, 9000, (2, 3)), 1)
    program = Program(((7,), (1, 2, 9000)), (MatMul(0, "w", (3,)), wide), (2, 3))
    assert not list(outlines(program, 2048))
    assert prepare_form(program, {}, 8192) is None


def test_outlines_make_steps_dense_from_the_fewest_positions_on() -> None:
    steps = (MatMul(0, "w", (4, 3)), MatMul(1, "v", (2, 3)), MatMul(2, "u", (100, 3)), MatMul(3, "t", (3,)))
    program = Program(((4, 5), (2, 5), (100, 5), (5,)), steps, (4, 5, 6, 7))
    found = [(outline.degree, outline.dense) for outline in outlines(program, 4096)]
    assert found == [(n, dense) for n in (4096, 8192) for dense in ((), (1,), (0, 1))]
    for outline in outlines(program, 4096):
        rows = [12 if 0 in outline.dense else 3, 6 if 1 in outline.dense else 3, 3, 3]
        assert [hint.rows for hint in outline.hints] == rows


def test_outlines_of_a_plane_that_fits_no_degree_are_dense_where_positions_are_few() -> None:
    window = sliding(1, 9004, (1, 9000))
    program, arrays = one_conv((1, 1, 9004), 2, window)
    assert [(outline.degree, outline.dense) for outline in outlines(program, 2048)] == [
        (n, (0,)) for n in (2048, 4096, 8192)
    ]
    check_equal_function(program, arrays, cut(program, arrays, dense=(0,)))


def test_dense_steps_that_have_no_choice_are_not_dense_by_choice() -> None:
    program, arrays = one_matmul((100, 5), 2)
    form = cut(program, arrays, dense=(0, 7))
    assert (form.dense, [hint.kind for hint in form.hints]) == ((), [POLYNOMIAL])


@pytest.mark.parametrize(("degree", "found"), [(2048, (2048, 4096, 8192)), (8192, (8192,)), (16384, (16384,))])
def test_degrees_of_blocks_double_from_the_rings_up_to_the_largest(degree: int, found: tuple[int, ...]) -> None:
    assert degrees_from(degree) == found


@pytest.mark.parametrize("degree", [2048, 4096, 8192])
def test_cut_keeps_a_degree_that_is_asked_for(degree: int) -> None:
    case = CASES["3x3 with padding"]()
    assert cut(case.program, case.arrays, degree).degree == degree


def test_cut_uploads_channels_times_the_padded_plane() -> None:
    channels, height, width, pad = 16, 32, 30, 2
    window = sliding(height, width, (5, 5), pads=(pad,) * 4)
    form = cut(*one_conv((channels, height, width), 3, window))
    assert form.values_up == channels * (height + 2 * pad) * (width + 2 * pad)
    assert np.count_nonzero(form.gather >= 0) == channels * height * width


# -- random geometry, at degrees so small that planes are cut into bands ---------------------------------------------

SMALL_DEGREE, LARGEST_SMALL_DEGREE = 16, 64


@st.composite
def windows(draw: st.DrawFn, height: int, width: int) -> Window:
    kernel, strides, dilations, pads = [], [], [], [[], []]
    for length in (height, width):
        before, after = draw(st.integers(-1, 3)), draw(st.integers(-1, 3))
        if length + before + after < 1:
            before = after = 0
        room = length + before + after
        kernel.append(draw(st.integers(1, min(4, room))))
        dilations.append(draw(st.integers(1, max(1, min(3, (room - 1) // max(1, kernel[-1] - 1))))))
        strides.append(draw(st.integers(1, 4)))
        pads[0].append(before)
        pads[1].append(after)
    return sliding(height, width, tuple(kernel), tuple(strides), (*pads[0], *pads[1]), tuple(dilations))


@st.composite
def convolutions(draw: st.DrawFn, largest: int = 12) -> tuple[Program, Arrays]:
    """Draw one to three convolutions of one input."""
    group = draw(st.integers(1, 3))
    shape = (group * draw(st.integers(1, 3)), draw(st.integers(1, largest)), draw(st.integers(1, largest)))
    steps: list[Step] = []
    arrays: Arrays = {}
    for i in range(draw(st.integers(1, 3))):
        window = draw(windows(*shape[1:]))
        outputs = group * draw(st.integers(1, 2))
        arrays[f"w{i}"] = drawn(outputs, shape[0] // group, *window.kernel)
        steps.append(convolution(0, f"w{i}", window, outputs, group))
    return Program((shape,), tuple(steps), tuple(range(1, len(steps) + 1))), arrays


@given(convolutions())
def test_cut_of_random_convolutions_keeps_function_and_places(found: tuple[Program, Arrays]) -> None:
    program, arrays = found
    form = cut(program, arrays)
    check_equal_function(program, arrays, form)
    check_places(form)


@given(convolutions(largest=20))
def test_cut_of_random_convolutions_into_bands_keeps_function_and_places(found: tuple[Program, Arrays]) -> None:
    program, arrays = found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "MAX_DEGREE", LARGEST_SMALL_DEGREE)
        found = list(outlines(program, SMALL_DEGREE))
    if not found:
        assert any(covered(step.window, 1) * extent(step.window, 0) > LARGEST_SMALL_DEGREE for step in program.steps)
    for outline in found:
        form = cut(program, arrays, outline.degree, outline.dense)
        check_outline(outline, form)
        check_equal_function(program, arrays, form)
        check_places(form)


@given(convolutions())
def test_cut_of_one_convolution_uploads_nothing_beyond_its_windows(found: tuple[Program, Arrays]) -> None:
    whole, arrays = found
    step = whole.steps[0]
    form = cut(Program(whole.inputs, (step,), (1,)), arrays)
    channels, height, width = form.program.inputs[0]
    assert channels == whole.inputs[0][0]
    if step.window.kernel == (1, 1) and prod(step.window.output) > 1:
        assert (height, width) == step.window.output
    else:
        assert (height, width) == (covered(step.window, 0), covered(step.window, 1))
    moved = form.program.steps[0].window
    for axis, length in enumerate((height, width)):
        starts = np.arange(moved.output[axis]) * moved.strides[axis] - moved.pads[axis]
        reached = starts[:, None] + np.arange(moved.kernel[axis]) * moved.dilations[axis]
        assert (reached.min(), reached.max()) == (0, length - 1)
    # What is no padding is an element of the input, each at most once.
    inside = form.gather[form.gather >= 0]
    assert len(np.unique(inside)) == len(inside)


def extent(window: Window, axis: int) -> int:
    return (window.kernel[axis] - 1) * window.dilations[axis] + 1


def covered(window: Window, axis: int) -> int:
    return (window.output[axis] - 1) * window.strides[axis] + extent(window, axis)


@given(
    st.lists(st.integers(1, 6), min_size=0, max_size=3),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_cut_of_random_matmuls_in_parts_keeps_function_and_places(tokens: list[int], inputs: int, outputs: int) -> None:
    program, arrays = one_matmul((*tokens, inputs), outputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "MAX_DEGREE", LARGEST_SMALL_DEGREE)
        found = list(outlines(program, SMALL_DEGREE))
    assert {outline.degree for outline in found} == {16, 32, 64}
    for outline in found:
        form = cut(program, arrays, outline.degree, outline.dense)
        check_outline(outline, form)
        assert form.values_up == prod(tokens) * inputs  # tokens need no padding
        check_equal_function(program, arrays, form)
        check_places(form)
