from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.operators import HintKind, PreparedForm, Program, cutting, evaluate_plain, map_names, prepare_form
from heinfer.operators.plain import evaluate_step
from heinfer.operators.steps import Conv, MatMul, Scale, Step, Sum, Take, Window, WindowSum

Arrays = dict[str, np.ndarray]
POLYNOMIAL, DENSE, ELEMENTWISE = HintKind.POLYNOMIAL, HintKind.DENSE, HintKind.ELEMENTWISE


@dataclass(frozen=True)
class Case:
    """A program, and what its cut must be: values up, kinds of hints, degree, ciphertexts."""

    program: Program
    arrays: Arrays
    values_up: int
    kinds: tuple[HintKind, ...] = (POLYNOMIAL,)
    degree: int = 2048
    ciphertexts: int = 1
    front: tuple[str, ...] = field(default=())


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
    """7x7, strides 2, over 120 x 100: bands of 36 and 24 rows of outputs, 77 and 53 rows of 105 inputs."""
    window = sliding(120, 100, (7, 7), (2, 2), (3, 3, 3, 3))
    return Case(*one_conv((2, 120, 100), 2, window), 2 * (77 + 53) * 105, (POLYNOMIAL, POLYNOMIAL), 8192, 4)


CASES: dict[str, Callable[[], Case]] = {
    "3x3 with padding": lambda: Case(*one_conv((4, 8, 8), 5, sliding(8, 8, (3, 3), pads=SAME)), 4 * 10 * 10),
    "padding on one side": lambda: Case(
        *one_conv((2, 8, 8), 2, sliding(8, 8, (3, 3), pads=(1, 0, 2, 3))), 2 * (8 + 3) * (8 + 3)
    ),
    "cropped": lambda: Case(*one_conv((2, 8, 8), 2, sliding(8, 8, (3, 3), pads=(-1, -2, 1, -1))), 2 * 8 * 5),
    "strides": lambda: Case(
        *one_conv((3, 32, 32), 4, sliding(32, 32, (3, 3), (2, 2), SAME)), 3 * 33 * 33, ciphertexts=3
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
        3 * 33 * 33, (POLYNOMIAL, POLYNOMIAL), ciphertexts=3,
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
    "1x1 strided in bands": lambda: Case(
        *one_conv((1, 224, 199), 2, sliding(224, 199, (1, 1), (2, 2))), 112 * 100, (POLYNOMIAL,) * 2, 8192, 2
    ),
    "tokens": lambda: Case(*one_matmul((5, 7), 3), 35),
    "tokens of rank 3": lambda: Case(*one_matmul((2, 5, 7), 3), 70),
    "tokens over several ciphertexts": lambda: Case(*one_matmul((500, 9), 2), 4500, ciphertexts=3),
    "tokens of 4096": lambda: Case(*one_matmul((2049, 2), 2), 4098, degree=4096, ciphertexts=2),
    "tokens in parts": lambda: Case(
        *one_matmul((9000, 2), 1), 18000, (POLYNOMIAL, POLYNOMIAL), 8192, 2 + 1
    ),
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


def cut(program: Program, arrays: Arrays, degree: int = 2048) -> PreparedForm:
    form = prepare_form(program, maps(program, arrays), degree)
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
            planes = place.T if isinstance(step, MatMul) else place
            planes = planes.reshape(len(planes), -1)
            np.testing.assert_array_equal(planes - planes[:, :1], np.broadcast_to(np.arange(hint.plane), planes.shape))
            np.testing.assert_array_equal(planes[:, 0] // form.degree, planes[:, -1] // form.degree)


@pytest.mark.parametrize("name", CASES)
def test_cut_program_after_the_nodes_front_equals_the_program(name: str) -> None:
    case = CASES[name]()
    form = cut(case.program, case.arrays)
    check_equal_function(case.program, case.arrays, form)
    assert tuple(step.kind for step in form.front) == case.front
    assert form.program.output_shapes == case.program.output_shapes


@pytest.mark.parametrize("name", CASES)
def test_cut_places_every_value_once_and_planes_within_ciphertexts(name: str) -> None:
    case = CASES[name]()
    check_places(cut(case.program, case.arrays))


@pytest.mark.parametrize("name", CASES)
def test_cut_has_the_expected_size(name: str) -> None:
    case = CASES[name]()
    form = cut(case.program, case.arrays)
    found = (form.values_up, tuple(hint.kind for hint in form.hints), form.degree, form.ciphertexts)
    assert found == (case.values_up, case.kinds, case.degree, case.ciphertexts)
    assert form.values_down == sum(prod(shape) for shape in case.program.output_shapes)
    rows = {POLYNOMIAL: form.degree * 50 // 8, DENSE: form.degree * 50 // 8, ELEMENTWISE: 2}
    assert form.hint_bytes == sum(hint.rows * rows[hint.kind] for hint in form.hints)


@pytest.mark.parametrize("name", CASES)
def test_cut_at_the_degree_it_chose_is_the_same_cut(name: str) -> None:
    case = CASES[name]()
    first = cut(case.program, case.arrays)
    assert_same(cut(case.program, case.arrays, first.degree), first)


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
    ("shape", "kernel", "degree"),
    [
        ((1, 4, 8192), (1, 2), 8192),  # a row fills a ciphertext
        ((1, 4, 8193), (1, 2), None),
        ((1, 20, 1000), (8, 3), 8192),  # eight rows fit, one row of outputs a band
        ((1, 20, 1000), (9, 3), None),
        ((1, 4, 2048), (1, 2), 8192),
        ((1, 2, 2048), (1, 2), 4096),
        ((1, 2, 1024), (1, 2), 2048),
        ((1, 1, 8193), (1, 8193), 2048),  # one position: any map of a vector serves
    ],
)
def test_cut_takes_the_smallest_degree_and_none_where_no_band_fits(
    shape: tuple[int, int, int], kernel: tuple[int, int], degree: int | None
) -> None:
    program, _ = one_conv(shape, 1, sliding(*shape[1:], kernel))
    form = prepare_form(program, {}, 2048)
    assert (None if form is None else form.degree) == degree


def test_cut_of_two_steps_takes_the_degree_of_the_larger() -> None:
    steps = (MatMul(0, "w", (3,)), MatMul(1, "v", (3000, 1)))
    form = cut(Program(((7,), (3000, 2)), steps, (2, 3)), {})
    assert form.degree == 4096
    wide = convolution(1, "v", sliding(2, 9000, (2, 3)), 1)
    assert prepare_form(Program(((7,), (1, 2, 9000)), (steps[0], wide), (2, 3)), {}, 2048) is None


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
        form = prepare_form(program, {}, SMALL_DEGREE)
        if form is None:
            assert any(
                covered(step.window, 1) * extent(step.window, 0) > LARGEST_SMALL_DEGREE for step in program.steps
            )
            return
        assert_same(prepare_form(program, {}, form.degree), form)
        smaller = prepare_form(program, {}, form.degree // 2)
    assert form.degree == SMALL_DEGREE or (smaller is not None and smaller.degree == form.degree)
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
        form = prepare_form(program, {}, SMALL_DEGREE)
    assert form is not None
    assert form.values_up == prod(tokens) * inputs  # tokens need no padding
    check_equal_function(program, arrays, form)
    check_places(form)
