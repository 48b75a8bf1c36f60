from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from heinfer.errors import ParameterError, PlanError
from heinfer.operators import Program, ResidueProgram, ScaleConflictError, analyse, evaluate_plain
from heinfer.operators.steps import Conv, MatMul, Rescale, Scale, Shift, Step, Sum, Take, Window, WindowSum
from heinfer.plan.execution import open_session
from heinfer.ring import NOISE_LIMIT, WEIGHT_LIMIT, RingParameters, RowNorms, input_scale

PARAMETERS = RingParameters.default()
Q = PARAMETERS.modulus
Arrays = dict[str, np.ndarray]


@st.composite
def windows(draw: st.DrawFn, height: int, width: int, ceil: bool = False) -> Window:
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dilations = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    strides = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pads = draw(st.tuples(*[st.integers(0, 2)] * 4))
    output = []
    for i, length in enumerate((height, width)):
        room = length + pads[i] + pads[i + 2] - (kernel[i] - 1) * dilations[i] - 1
        output.append(max(1, (room + (strides[i] - 1) * ceil) // strides[i] + 1))
        if room < 0:  # the kernel does not fit: make it a point
            kernel = (1, kernel[1]) if i == 0 else (kernel[0], 1)
            output[-1] = (length + pads[i] + pads[i + 2] - 1) // strides[i] + 1
    return Window(kernel, strides, pads, dilations, (output[0], output[1]))


def integers(generator: np.random.Generator, *shape: int) -> np.ndarray:
    values = generator.integers(-WEIGHT_LIMIT, WEIGHT_LIMIT + 1, shape)
    extreme = generator.random(shape) < 0.2
    return np.where(extreme, np.sign(values) * WEIGHT_LIMIT, values).astype(np.int16)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, Arrays]:
    """Draw (C, H, W) -> weighted step -> index map -> sum of two -> window sum, two outputs."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group = draw(st.integers(1, 3))
    channels, height, width = group * draw(st.integers(1, 2)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    source = (channels, height, width)
    arrays: Arrays = {}
    steps: list[Step] = []
    kind = draw(st.sampled_from(["conv", "matmul", "scale"]))
    if kind == "conv":
        window = draw(windows(height, width))
        made = (group * draw(st.integers(1, 2)), *window.output)
        arrays["w"] = integers(generator, made[0], channels // group, *window.kernel)
        steps.append(Conv(0, "w", window, group, made))
    elif kind == "matmul":
        made = (channels, height, draw(st.integers(1, 5)))
        arrays["w"] = integers(generator, width, made[-1])
        steps.append(MatMul(0, "w", made))
    else:
        made = source
        arrays["w"] = integers(generator, *made)
        steps.append(Scale(0, "w", made))
    moved = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    arrays["i"] = generator.integers(-1, 2 * np.prod(made), np.prod(moved)).astype(np.int32)
    steps.append(Take((1, 1), "i", moved))
    arrays["j"] = generator.integers(-1, np.prod(made), np.prod(moved)).astype(np.int32)
    steps.append(Take((1,), "j", moved))
    steps.append(Sum((2, 3, 2), tuple(draw(st.lists(st.sampled_from([-1, 1]), min_size=3, max_size=3))), moved))
    pool = draw(windows(*moved[1:], ceil=True))
    steps.append(WindowSum(4, pool, (moved[0], *pool.output)))
    return Program((source,), tuple(steps), (5, 1, 3)), arrays


def exact(program: Program, arrays: Arrays, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Evaluate with Python integers, element by element, as the steps are defined."""
    values = [x.astype(object) for x in inputs]
    for step in program.steps:
        out = np.zeros((len(inputs[0]), *step.shape), object)
        match step:
            case Conv():
                weights = arrays[step.weights].astype(object)
                each, per = step.shape[0] // step.group, weights.shape[1]
                for o, c, y, x in np.ndindex(step.shape[0], per, *step.shape[1:]):
                    for iy, ix, ky, kx in _reach(step.window, y, x, values[step.source].shape[2:]):
                        out[:, o, y, x] += weights[o, c, ky, kx] * values[step.source][:, o // each * per + c, iy, ix]
            case WindowSum():
                for y, x in np.ndindex(*step.shape[1:]):
                    for iy, ix, _, _ in _reach(step.window, y, x, values[step.source].shape[2:]):
                        out[:, :, y, x] += values[step.source][:, :, iy, ix]
            case MatMul():
                out = values[step.source] @ arrays[step.weights].astype(object)
            case Scale():
                out = values[step.source] * arrays[step.weights].astype(object)
            case Sum():
                for sign, source in zip(step.signs, step.sources, strict=True):
                    out = out + sign * values[source]
            case Take():
                flat = [v for s in step.sources for v in values[s].reshape(len(out), -1).T]
                order = range(len(flat)) if step.indices is None else arrays[step.indices]
                rows = [flat[i] if i >= 0 else 0 * flat[0] for i in order]
                out = np.array(rows, object).T.reshape(out.shape)
        values.append(out)
    return [values[o] for o in program.outputs]


def _reach(window: Window, y: int, x: int, plane: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    found = []
    for ky, kx in np.ndindex(*window.kernel):
        iy = y * window.strides[0] + ky * window.dilations[0] - window.pads[0]
        ix = x * window.strides[1] + kx * window.dilations[1] - window.pads[1]
        if 0 <= iy < plane[0] and 0 <= ix < plane[1]:
            found.append((iy, ix, ky, kx))
    return found


def residues(seed: int, samples: int, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.integers(0, Q, (samples, *shape))
    values[generator.random(values.shape) < 0.2] = Q - 1
    return values


@given(programs(), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_residue_program_on_random_geometry_equals_python_integers(
    drawn: tuple[Program, Arrays], samples: int, seed: int
) -> None:
    program, arrays = drawn
    x = residues(seed, samples, program.inputs[0])
    found = ResidueProgram(program, arrays, PARAMETERS).evaluate([x])
    for got, want in zip(found, exact(program, arrays, [x]), strict=True):
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, (want % Q).astype(np.int64))


@given(programs(), st.integers(0, 2**32 - 1))
def test_evaluate_plain_on_small_integers_equals_python_integers(drawn: tuple[Program, Arrays], seed: int) -> None:
    program, arrays = drawn
    x = np.random.default_rng(seed).integers(-1000, 1001, (2, *program.inputs[0]))
    for got, want in zip(evaluate_plain(program, arrays, [x]), exact(program, arrays, [x]), strict=True):
        np.testing.assert_array_equal(got, want.astype(np.float64))


def explicit(program: Program, arrays: Arrays) -> list[np.ndarray]:
    """Return the matrix of every output: one row an element of the input, then the output's shape."""
    size = int(np.prod(program.inputs[0]))
    unit = np.eye(size, dtype=np.int64).reshape(size, *program.inputs[0])
    return [columns.astype(np.float64) for columns in exact(program, arrays, [unit])]


def padding_as_input(program: Program) -> Program:
    """Return the program on inputs that hold the padding of its first step, as prepared mode uploads them."""
    step, ((channels, height, width),) = program.steps[0], program.inputs
    if not isinstance(step, Conv):
        return program
    top, left, bottom, right = (max(0, pad) for pad in step.window.pads)
    cropped = tuple(min(0, pad) for pad in step.window.pads)
    moved = replace(step, window=replace(step.window, pads=cropped))
    return Program(
        ((channels, top + height + bottom, left + width + right),), (moved, *program.steps[1:]), program.outputs
    )


@given(programs())
def test_analyse_equals_the_norms_of_the_explicit_matrix(drawn: tuple[Program, Arrays]) -> None:
    program, arrays = drawn
    step = program.steps[0]
    rows = len(arrays["w"]) if isinstance(step, Conv) else arrays["w"].shape[-1]
    scales = {"w": np.ones_like(arrays["w"], float) if isinstance(step, Scale) else np.ones(rows)}
    found = analyse(program, arrays, scales, {})
    uploaded = explicit(padding_as_input(program), arrays)
    for norms, matrix, with_padding in zip(found, explicit(program, arrays), uploaded, strict=True):
        np.testing.assert_array_equal(norms.scale, 1)
        assert np.all(np.abs(with_padding).sum(axis=0) <= norms.l1)  # equal where nothing cancels
        assert np.all(np.sqrt((with_padding**2).sum(axis=0)) <= norms.l2 * (1 + 1e-12))
        assert np.all((matrix != 0).sum(axis=0) <= 2 * norms.rounding)  # a half for every weight
    plain, matrix = found[1], uploaded[1]
    np.testing.assert_array_equal(plain.l1, np.abs(matrix).sum(axis=0))
    np.testing.assert_allclose(plain.l2, np.sqrt((matrix**2).sum(axis=0)), rtol=1e-12)
    assert np.all(plain.input_rounding == 0.5)


def test_analyse_without_cancellation_equals_the_explicit_matrix() -> None:
    window = Window((2, 2), (1, 1), (0, 1, 1, 0), (1, 1), (3, 3))
    program = Program(
        ((2, 3, 3),),
        (
            Conv(0, "w", window, 1, (2, 3, 3)),
            Take((1,), "i", (2, 3, 3)),
            Sum((1, 2), (1, 1), (2, 3, 3)),
            WindowSum(3, Window((2, 2), (1, 1), (0, 0, 0, 0), (1, 1), (2, 2)), (2, 2, 2)),
        ),
        (4,),
    )
    arrays = {
        "w": np.abs(integers(np.random.default_rng(0), 2, 2, 2, 2)),
        "i": np.arange(18, dtype=np.int32)[::-1].copy(),
    }
    (norms,) = analyse(program, arrays, {"w": np.ones(2)}, {})
    (matrix,) = explicit(padding_as_input(program), arrays)
    np.testing.assert_array_equal(norms.l1, matrix.sum(axis=0))


def test_analyse_counts_padding_around_a_sum_in_front_of_the_weights() -> None:
    """Two inputs, added and then met by the middle of nine weights: the other eight meet the noise of the padding."""
    window = Window((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (1, 1))
    point = (1, 1, 1)
    program = Program((point, point), (Sum((0, 1), (1, 1), point), Conv(2, "w", window, 1, point)), (3,))
    weights = np.full((1, 1, 3, 3), 32767, np.int16)
    weights[0, 0, 1, 1] = 3277
    (norms,) = analyse(program, {"w": weights}, {"w": np.ones(1)}, {})
    assert norms.l1.item() == 2 * 3277 + 8 * 32767
    assert norms.l2.item() >= np.sqrt(3277**2 + 8 * 32767.0**2)
    assert norms.rounding.item() == 2 * 0.5  # one weight meets both inputs


def test_analyse_counts_padding_among_what_carries_noise_and_not_among_what_is_rounded() -> None:
    """One point, and eight weights of nine that meet padding; in front of the weights an index map may pad as well."""
    window = Window((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (1, 1))
    by_window = Program(((1, 1, 1),), (Conv(0, "w", window, 1, (1, 1, 1)),), (1,))
    inner = replace(window, pads=(0, 0, 0, 0))
    by_map = Program(((1, 1, 1),), (Take((0,), "i", (1, 3, 3)), Conv(1, "w", inner, 1, (1, 1, 1))), (2,))
    arrays = {"w": np.full((1, 1, 3, 3), 5, np.int16), "i": np.array([-1, -1, -1, -1, 0, -1, -1, -1, -1], np.int32)}
    for program in (by_window, by_map):
        (norms,) = analyse(program, arrays, {"w": np.ones(1)}, {})
        assert (norms.l1.item(), norms.l2.item(), norms.rounding.item()) == (45, 15, 0.5)


def test_analyse_of_duplicated_inputs_counts_how_many_weights_meet_one_input() -> None:
    program = Program(((1,),), (Take((0,), "i", (4,)), MatMul(1, "w", (1,))), (2,))
    arrays = {"i": np.zeros(4, np.int32), "w": np.full((4, 1), 3, np.int16)}
    (norms,) = analyse(program, arrays, {"w": np.ones(1)}, {})
    assert norms.input_rounding == 4 * 0.5
    assert norms.l1 == 12
    assert norms.l2 >= 12


def test_analyse_of_one_input_joined_with_itself_counts_it_twice() -> None:
    reverse = np.arange(4, dtype=np.int32)[::-1].copy()
    steps = (Take((0,), "r", (4,)), Take((0, 1), None, (8,)), MatMul(2, "w", (3,)))
    program = Program(((4,),), steps, (3,))
    weights = np.random.default_rng(5).integers(1, 100, (8, 3))
    (norms,) = analyse(program, {"r": reverse, "w": weights}, {"w": np.ones(3)}, {})
    matrix = weights[:4] + weights[4:][::-1]
    assert np.all(norms.input_rounding >= 2 * 0.5)
    assert np.all(norms.l2 >= np.linalg.norm(matrix, axis=0))


def test_analyse_of_values_with_different_scales_names_the_step() -> None:
    program = Program(((2,),), (MatMul(0, "a", (2,)), MatMul(0, "b", (2,)), Sum((1, 2), (1, 1), (2,))), (3,))
    weights = np.ones((2, 2), np.int16)
    with pytest.raises(ScaleConflictError) as caught:
        analyse(program, {"a": weights, "b": weights}, {"a": np.ones(2), "b": np.array([1.0, 2.0])}, {})
    assert caught.value.step == 2


@given(programs(), st.floats(1e-9, 1e6), st.integers(0, 2**32 - 1))
def test_adversarial_inputs_and_noise_never_overflow(drawn: tuple[Program, Arrays], peak: float, seed: int) -> None:
    program, arrays = drawn
    size = int(np.prod(program.inputs[0]))
    unit = np.eye(size, dtype=np.int64).reshape(size, *program.inputs[0])
    outputs = exact(program, arrays, [unit])
    matrix = np.concatenate([m.reshape(size, -1) for m in outputs], axis=1).T  # object integers
    row_sum = int(max(np.abs(matrix).sum(axis=1), default=0))
    scale = float(input_scale(np.array([peak]), row_sum, PARAMETERS)[0])
    for row in matrix[np.argsort(-np.abs(matrix).sum(axis=1))[:3]]:
        signs = np.where(row >= 0, 1, -1)
        sent = np.rint(signs * peak * scale).astype(np.int64).astype(object) + NOISE_LIMIT * signs
        assert 2 * abs(int((row * sent).sum())) < Q
    if row_sum:  # the scale is not wasteful: the worst case comes within noise and rounding of the limit
        assert 2 * row_sum * (peak * scale + NOISE_LIMIT + 1.5) + 8 > Q


@pytest.mark.parametrize("layout", ["samples last", "reversed", "every other", "broadcast"])
def test_residue_program_of_strided_inputs_equals_contiguous_ones(layout: str) -> None:
    window = Window((2, 3), (1, 2), (1, 0, 0, 1), (1, 1), (4, 2))
    program = Program(((3, 4, 4),), (Conv(0, "w", window, 1, (5, 4, 2)),), (1,))
    run = ResidueProgram(program, {"w": integers(np.random.default_rng(0), 5, 3, 2, 3)}, PARAMETERS)
    x = residues(1, 6, (3, 4, 4))
    if layout == "samples last":
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0)
    elif layout == "reversed":
        x = x[::-1, :, ::-1]
    elif layout == "every other":
        x = np.repeat(x, 2, axis=0)[::2]
    else:
        x = np.broadcast_to(x[:1], x.shape)
    np.testing.assert_array_equal(run.evaluate([x])[0], run.evaluate([x.copy()])[0])


def test_residue_program_fed_with_its_own_results_is_exact() -> None:
    program = Program(((3, 2),), (MatMul(0, "w", (3, 2)),), (1,))
    arrays = {"w": integers(np.random.default_rng(0), 2, 2)}
    run, x = ResidueProgram(program, arrays, PARAMETERS), residues(2, 5, (3, 2))
    twice = run.evaluate(run.evaluate([x]))[0]
    want = exact(program, arrays, [exact(program, arrays, [x])[0]])[0]
    np.testing.assert_array_equal(twice, (want % Q).astype(np.int64))


def test_residue_program_with_rows_above_one_products_limit_is_exact() -> None:
    inputs = 2**28 // WEIGHT_LIMIT + 100
    program = Program(((inputs,),), (MatMul(0, "w", (2,)),), (1,))
    arrays = {"w": np.full((inputs, 2), WEIGHT_LIMIT, np.int16) * np.array([1, -1], np.int16)}
    x = np.full((1, inputs), Q - 1)
    found = ResidueProgram(program, arrays, PARAMETERS).evaluate([x])[0]
    total = inputs * WEIGHT_LIMIT * (Q - 1)
    assert found.tolist() == [[total % Q, -total % Q]]


@pytest.mark.parametrize("inputs", [[], [residues(0, 2, (3,))] * 2, [residues(0, 2, (4,))], [np.zeros((2, 3))]])
def test_residue_program_with_wrong_inputs_is_refused(inputs: list[np.ndarray]) -> None:
    run = ResidueProgram(Program(((3,),), (MatMul(0, "w", (2,)),), (1,)), {"w": np.ones((3, 2), np.int16)}, PARAMETERS)
    with pytest.raises(ParameterError):
        run.evaluate(inputs)


@pytest.mark.parametrize(
    "weights", [np.full((3, 2), 0.5), np.full((3, 2), WEIGHT_LIMIT + 1.0), np.full((3, 2), np.nan)]
)
def test_residue_program_with_weights_that_are_no_small_integers_is_refused(weights: np.ndarray) -> None:
    with pytest.raises(ParameterError):
        ResidueProgram(Program(((3,),), (MatMul(0, "w", (2,)),), (1,)), {"w": weights}, PARAMETERS)


@pytest.mark.parametrize("step", [Shift(1, "v", (2,)), Rescale(1, "v", (2,))])
def test_residue_program_with_a_step_of_the_node_is_refused(step: Step) -> None:
    program = Program(((3,),), (MatMul(0, "w", (2,)), step), (2,))
    with pytest.raises(ParameterError, match="belongs to the node"):
        ResidueProgram(program, {"w": np.ones((3, 2), np.int16), "v": np.ones(2)}, PARAMETERS)


def test_for_server_drops_the_nodes_steps_and_keeps_the_linear_map() -> None:
    full = Program(
        ((3,),),
        (
            MatMul(0, "w", (2,)),
            Shift(1, "v", (2,)),
            Rescale(2, "f", (2,)),
            Sum((3, 1), (1, -1), (2,)),
            Take((4, 2), "i", (3,)),
        ),
        (5, 3),
    )
    arrays = {"w": np.arange(6.0).reshape(3, 2), "i": np.array([3, -1, 0], np.int32)}
    server = full.for_server()
    assert [s.kind for s in server.steps] == ["matmul", "sum", "take"]
    x = np.arange(6.0).reshape(2, 3)
    ones = arrays | {"v": np.zeros(2), "f": np.ones(2)}
    for got, want in zip(evaluate_plain(server, arrays, [x]), evaluate_plain(full, ones, [x]), strict=True):
        np.testing.assert_array_equal(got, want)


WINDOW = Window((2, 2), (1, 1), (0, 0, 0, 0), (1, 1), (2, 2))
BROKEN = {
    "two weighted steps on a path": (((3,),), (MatMul(0, "w", (3,)), MatMul(1, "w", (3,))), (2,)),
    "a sum with an unweighted value": (((3,),), (MatMul(0, "w", (3,)), Sum((0, 1), (1, 1), (3,))), (2,)),
    "an output without weights": (((3,),), (MatMul(0, "w", (3,)),), (0,)),
    "no output": (((3,),), (MatMul(0, "w", (3,)),), ()),
    "an output that does not exist": (((3,),), (MatMul(0, "w", (3,)),), (2,)),
    "a value that is made later": (((3,),), (MatMul(1, "w", (3,)),), (1,)),
    "a negative source": (((3,),), (MatMul(-1, "w", (3,)),), (1,)),
    "a sum of nothing": (((3,),), (MatMul(0, "w", (3,)), Sum((), (), (3,))), (1,)),
    "a sum with too few signs": (((3,),), (MatMul(0, "w", (3,)), Sum((1, 1), (1,), (3,))), (2,)),
    "a sum of two shapes": (((3,),), (MatMul(0, "w", (2,)), MatMul(0, "v", (3,)), Sum((1, 2), (1, 1), (3,))), (3,)),
    "a take that loses elements": (((3,),), (MatMul(0, "w", (3,)), Take((1,), None, (2,))), (2,)),
    "a scale of another shape": (((3,),), (Scale(0, "w", (2,)),), (1,)),
    "a matmul that changes leading axes": (((2, 3),), (MatMul(0, "w", (3, 3)),), (1,)),
    "a conv of a vector": (((3,),), (Conv(0, "w", WINDOW, 1, (1, 2, 2)),), (1,)),
    "a conv whose window leaves the plane": (((1, 2, 3),), (Conv(0, "w", WINDOW, 1, (1, 2, 2)),), (1,)),
    "a conv whose groups don't divide": (((3, 3, 3),), (Conv(0, "w", WINDOW, 2, (2, 2, 2)),), (1,)),
    "a conv of another output": (((1, 3, 3),), (Conv(0, "w", WINDOW, 1, (1, 3, 3)),), (1,)),
    "a window sum that changes channels": (
        ((1, 3, 3),),
        (Scale(0, "w", (1, 3, 3)), WindowSum(1, WINDOW, (2, 2, 2))),
        (2,),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_program_that_is_inconsistent_is_refused(case: str) -> None:
    with pytest.raises(PlanError):
        Program(*BROKEN[case])


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("w", None),
        ("i", None),
        ("w", np.ones((2, 3), np.int16)),
        ("i", np.zeros(3, np.int32)),
        ("i", np.array([0, 2], np.int32)),
        ("i", np.array([0, -2], np.int32)),
        ("i", np.array([0, 1], np.int64)),
    ],
)
def test_check_arrays_with_an_array_that_does_not_fit_names_it(name: str, array: np.ndarray | None) -> None:
    program = Program(((3,),), (MatMul(0, "w", (2,)), Take((1,), "i", (2,))), (2,))
    arrays: Arrays = {"w": np.ones((3, 2), np.int16), "i": np.array([1, -1], np.int32)}
    program.check_arrays(arrays)
    arrays.pop(name)
    with pytest.raises(PlanError, match=repr(name)):
        program.check_arrays(arrays if array is None else arrays | {name: array})


@given(st.data())
def test_evaluate_plain_of_conv_equals_onnxruntime(data: st.DataObject) -> None:
    height, width, group = (data.draw(st.integers(1, n)) for n in (7, 7, 3))
    window = data.draw(windows(height, width))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    weights = generator.integers(-9, 10, (2 * group, 2, *window.kernel)).astype(np.float32)
    x = generator.integers(-9, 10, (2, 2 * group, height, width)).astype(np.float32)
    node = helper.make_node(
        "Conv", ["x", "w"], ["y"], strides=window.strides, pads=window.pads, dilations=window.dilations, group=group
    )
    graph = helper.make_graph(
        [node],
        "conv",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    expected = open_session(model.SerializeToString()).run(None, {"x": x})[0]
    program = Program((x.shape[1:],), (Conv(0, "w", window, group, expected.shape[1:]),), (1,))
    # Small integers: float32 is exact.
    np.testing.assert_array_equal(evaluate_plain(program, {"w": weights}, [x])[0], expected)


def test_row_norms_of_zero_rows_are_zero() -> None:
    program = Program(((3,),), (MatMul(0, "w", (2,)),), (1,))
    weights = np.array([[1, 0], [2, 0], [3, 0]], np.int16)
    norms: RowNorms = analyse(program, {"w": weights}, {"w": np.ones(2)}, {})[0]
    assert norms.l1.tolist() == [6, 0]
    assert norms.l2[1] == 0
