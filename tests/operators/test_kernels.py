from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import ParameterError
from heinfer.operators import Program, ResidueProgram, compile_step, convolutions, direct, matrices, movements, residues
from heinfer.operators.steps import Conv, MatMul, Scale, Shift, Step, Sum, Take, Window, WindowSum
from heinfer.ring import (
    ROW_SUM_LIMIT,
    WEIGHT_LIMIT,
    ModularMatrix,
    RingParameters,
    join_limbs,
    product,
    transpose_into,
)

PARAMETERS = RingParameters.default()
Q = PARAMETERS.modulus
PATHS = ["direct", "products"]
seeds = st.integers(0, 2**32 - 1)


@contextmanager
def forced(path: str, small_tiles: bool) -> Iterator[None]:
    """Send convolutions along one path, on request in tiles so small that every border occurs, on threads."""
    limit = 0 if path == "products" else 1 << 30
    with ExitStack() as stack:
        for name in ("_SHORT_OUTPUTS", "_LONG_OUTPUTS", "_POINT_OUTPUTS"):
            stack.enter_context(patch.object(convolutions, name, limit))
        if small_tiles:
            stack.enter_context(patch.object(direct, "_TILE_POSITIONS", 8))
            stack.enter_context(patch.object(direct, "_TILE_LIMBS", 64))
            stack.enter_context(patch.object(direct, "_TILE_WORK", 500))
            stack.enter_context(patch.object(product, "THREADED_WORK", 0))
            stack.enter_context(patch.object(ModularMatrix, "column_tiles", lambda _, columns: slices(columns, 7)))
        yield


def slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def extreme_weights(generator: np.random.Generator, *shape: int) -> np.ndarray:
    values = generator.integers(-WEIGHT_LIMIT, WEIGHT_LIMIT + 1, shape)
    return np.where(generator.random(shape) < 0.3, np.sign(values) * WEIGHT_LIMIT, values).astype(np.int16)


def extreme_residues(generator: np.random.Generator, *shape: int) -> np.ndarray:
    values = generator.integers(0, Q, shape)
    values[generator.random(shape) < 0.3] = Q - 1
    return values


@st.composite
def windows(draw: st.DrawFn, height: int, width: int) -> Window:
    """Draw kernels, strides, dilations and pads, negative ones too, that leave at least one position."""
    kernel, strides, dilations, before, after, output = [], [], [], [], [], []
    for length in (height, width):
        first = draw(st.integers(-min(2, length - 1), 2))
        last = draw(st.integers(-min(2, length + min(first, 0) - 1), 2))
        dilation, points = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        points = min(points, (length + first + last - 1) // dilation + 1)
        stride = draw(st.integers(1, 3))
        kernel.append(points)
        strides.append(stride)
        dilations.append(dilation)
        before.append(first)
        after.append(last)
        output.append((length + first + last - (points - 1) * dilation - 1) // stride + 1)
    return Window(tuple(kernel), tuple(strides), (*before, *after), tuple(dilations), tuple(output))


def windowed(x: np.ndarray, window: Window) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield every kernel point with what it sees, (samples, channels, *output), in integers of Python."""
    top, left, bottom, right = window.pads
    pads = [(0, 0), (0, 0), (max(top, 0), max(bottom, 0)), (max(left, 0), max(right, 0))]
    padded = np.pad(x, pads).astype(object)
    padded = padded[:, :, max(-top, 0) :, max(-left, 0) :]
    for ky, kx in np.ndindex(*window.kernel):
        y, x0 = ky * window.dilations[0], kx * window.dilations[1]
        rows = padded[:, :, y : y + (window.output[0] - 1) * window.strides[0] + 1 : window.strides[0]]
        yield ky, kx, rows[..., x0 : x0 + (window.output[1] - 1) * window.strides[1] + 1 : window.strides[1]]


def convolved(x: np.ndarray, weights: np.ndarray, window: Window, group: int) -> np.ndarray:
    outputs, inputs = weights.shape[0] // group, weights.shape[1]
    parts = []
    for g in range(group):
        part = weights[g * outputs : (g + 1) * outputs].astype(object)
        seen = windowed(x[:, g * inputs : (g + 1) * inputs], window)
        parts.append(np.moveaxis(sum(np.tensordot(part[:, :, ky, kx], v, (1, 1)) for ky, kx, v in seen), 0, 1))
    return (np.concatenate(parts, axis=1) % Q).astype(np.int64)


def run_one(step: Step, array: np.ndarray, x: np.ndarray) -> np.ndarray:
    program = Program((x.shape[1:],), (step,), (1,))
    found = ResidueProgram(program, {"w": array}, PARAMETERS).evaluate([x])[0]
    assert found.flags.c_contiguous
    return found


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data(), samples=st.integers(1, 5), small_tiles=st.booleans(), seed=seeds)
def test_convolution_of_any_geometry_equals_python_integers(
    path: str, data: st.DataObject, samples: int, small_tiles: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    group, outputs, inputs = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3)))
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 21))
    window = data.draw(windows(height, width))
    weights = extreme_weights(generator, group * outputs, inputs, *window.kernel)
    x = extreme_residues(generator, samples, group * inputs, height, width)
    step = Conv(0, "w", window, group, (group * outputs, *window.output))
    with forced(path, small_tiles):
        found = run_one(step, weights, x)
    np.testing.assert_array_equal(found, convolved(x, weights, window, group))


@pytest.mark.parametrize("path", PATHS)
def test_depthwise_convolution_of_many_channels_equals_python_integers(path: str) -> None:
    generator = np.random.default_rng(1)
    window = Window((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (5, 6))
    weights, x = extreme_weights(generator, 300, 1, 3, 3), extreme_residues(generator, 2, 300, 5, 6)
    with forced(path, False):
        found = run_one(Conv(0, "w", window, 300, (300, 5, 6)), weights, x)
    np.testing.assert_array_equal(found, convolved(x, weights, window, 300))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("output", [(4, 5), (3, 5), (2, 3)])
def test_convolution_of_one_point_on_all_or_a_part_of_the_plane(path: str, output: tuple[int, int]) -> None:
    generator = np.random.default_rng(2)
    strides = (2, 2) if output == (2, 3) else (1, 1)
    window = Window((1, 1), strides, (0, 0, 0, 0), (1, 1), output)
    weights, x = extreme_weights(generator, 7, 9, 1, 1), extreme_residues(generator, 3, 9, 4, 5)
    with forced(path, False):
        found = run_one(Conv(0, "w", window, 1, (7, *output)), weights, x)
    np.testing.assert_array_equal(found, convolved(x, weights, window, 1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [(1, 3000), (40, 33)])
def test_convolution_of_planes_larger_than_a_tile(path: str, size: tuple[int, int]) -> None:
    generator = np.random.default_rng(3)
    window = Window((1, 3), (1, 2), (0, 1, 0, 1), (1, 2), (size[0], (size[1] - 3) // 2 + 1))
    weights, x = extreme_weights(generator, 5, 2, 1, 3), extreme_residues(generator, 2, 2, *size)
    with forced(path, False), patch.object(product, "THREADED_WORK", 0):
        found = run_one(Conv(0, "w", window, 1, (5, *window.output)), weights, x)
    np.testing.assert_array_equal(found, convolved(x, weights, window, 1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("channels", [4096, 4200])
def test_convolution_at_and_above_the_row_sum_limit_is_exact(path: str, channels: int) -> None:
    # 4096 channels by 2 points: the largest row sum that one product takes; above, inputs come in chunks.
    window = Window((1, 2), (1, 1), (0, 0, 0, 0), (1, 1), (1, 2))
    weights = np.full((2, channels, 1, 2), WEIGHT_LIMIT, np.int16)
    weights[1] *= -1
    assert (2 * channels * WEIGHT_LIMIT <= ROW_SUM_LIMIT) == (channels == 4096)
    x = np.full((2, channels, 1, 3), Q - 1)
    x[1, ::3] = np.random.default_rng(4).integers(0, Q, x[1, ::3].shape)
    with forced(path, False):
        found = run_one(Conv(0, "w", window, 1, (2, 1, 2)), weights, x)
    np.testing.assert_array_equal(found, convolved(x, weights, window, 1))


@given(
    few=st.sampled_from([0, 4, 1000]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 150)),
    small_tiles=st.booleans(),
    seed=seeds,
)
def test_product_of_rows_equals_python_integers(
    few: int, shape: tuple[int, int, int, int], small_tiles: bool, seed: int
) -> None:
    samples, tokens, inputs, outputs = shape
    generator = np.random.default_rng(seed)
    weights, x = extreme_weights(generator, inputs, outputs), extreme_residues(generator, samples, tokens, inputs)
    with ExitStack() as stack:
        stack.enter_context(patch.object(matrices, "_FEW_ROWS", few))
        if small_tiles:
            for owner, name, value in ((matrices, "_TILE_ROWS", 2), (matrices, "_TILE_OUTPUTS", 8)):
                stack.enter_context(patch.object(owner, name, value))
            stack.enter_context(patch.object(matrices, "THREADED_WORK", 0))
            stack.enter_context(patch.object(product, "THREADED_WORK", 0))
        found = run_one(MatMul(0, "w", (tokens, outputs)), weights, x)
    want = x.astype(object) @ weights.astype(object) % Q
    np.testing.assert_array_equal(found, want.astype(np.int64))


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
@pytest.mark.parametrize("inputs", [8192, 8193, 17001])
def test_product_of_rows_at_and_above_the_row_sum_limit_is_exact(rows: int, inputs: int) -> None:
    generator = np.random.default_rng(5)
    weights = np.full((inputs, 3), WEIGHT_LIMIT, np.int16) * np.array([1, -1, 1], np.int16)
    weights[:, 2] = extreme_weights(generator, inputs)
    x = np.full((rows, inputs), Q - 1)
    x[-1] = extreme_residues(generator, inputs)
    found = run_one(MatMul(0, "w", (3,)), weights, x)
    np.testing.assert_array_equal(found, (x.astype(object) @ weights.astype(object) % Q).astype(np.int64))


@given(st.data(), st.integers(1, 5), seeds)
def test_window_sum_with_negative_pads_equals_python_integers(data: st.DataObject, samples: int, seed: int) -> None:
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    window = data.draw(windows(height, width))
    generator = np.random.default_rng(seed)
    x = extreme_residues(generator, samples, 3, height, width)
    step = WindowSum(0, window, (3, *window.output))
    want = sum(seen for _, _, seen in windowed(x, window)) % Q
    run = compile_step(step, {}, (x.shape[1:],), PARAMETERS)
    with patch.object(movements, "_TILE_RESIDUES", 7):
        found = run([x.reshape(samples, -1)])
    np.testing.assert_array_equal(found.reshape(want.shape), want.astype(np.int64))


def test_compile_step_of_the_steps_after_the_weights_equals_the_program() -> None:
    generator = np.random.default_rng(6)
    arrays = {"w": extreme_weights(generator, 2, 3, 4), "i": np.array([5, -1, 0, 23, 7, 7], np.int32)}
    steps = (
        Scale(0, "w", (2, 3, 4)),
        Take((1,), "i", (6,)),
        Take((1, 2), None, (30,)),
        Sum((2, 2, 2), (1, 1, -1), (6,)),
    )
    program = Program(((2, 3, 4),), steps, (1, 3, 4))
    x = extreme_residues(generator, 3, 2, 3, 4)
    scaled, joined, summed = ResidueProgram(program, arrays, PARAMETERS).evaluate([x])
    values = [x.reshape(3, -1), scaled.reshape(3, -1)]
    for step in steps[1:]:
        values.append(compile_step(step, arrays, program.shapes, PARAMETERS)(values))
    np.testing.assert_array_equal(values[3], joined)
    np.testing.assert_array_equal(values[4], summed)
    np.testing.assert_array_equal(summed, values[2])


def test_compile_step_of_the_node_is_refused() -> None:
    with pytest.raises(ParameterError, match="belongs to the node"):
        compile_step(Shift(0, "v", (3,)), {"v": np.ones(3)}, ((3,),), PARAMETERS)


def test_steps_that_name_one_array_share_one_matrix() -> None:
    program = Program(((4,),), (MatMul(0, "w", (3,)), MatMul(0, "w", (3,)), Sum((1, 2), (1, 1), (3,))), (3,))
    weights = extreme_weights(np.random.default_rng(7), 4, 3)
    with patch.object(residues, "ModularMatrix", wraps=ModularMatrix) as made:
        run = ResidueProgram(program, {"w": weights}, PARAMETERS)
    assert made.call_count == 1
    x = extreme_residues(np.random.default_rng(8), 2, 4)
    want = 2 * (x.astype(object) @ weights.astype(object)) % Q
    np.testing.assert_array_equal(run.evaluate([x])[0], want.astype(np.int64))


@pytest.mark.parametrize("path", PATHS)
def test_program_is_independent_of_its_arrays(path: str) -> None:
    generator = np.random.default_rng(9)
    x = extreme_residues(generator, 2, 3, 4, 4)
    window = Window((2, 2), (1, 1), (0, 0, 0, 0), (1, 1), (3, 3))
    steps = (Conv(0, "c", window, 1, (5, 3, 3)), MatMul(0, "m", (3, 4, 2)), Take((1,), "i", (2,)))
    arrays = {
        "c": extreme_weights(generator, 5, 3, 2, 2),
        "m": extreme_weights(generator, 4, 2),
        "i": np.array([3, 1], np.int32),
    }
    with forced(path, False):
        run = ResidueProgram(Program(((3, 4, 4),), steps, (1, 2, 3)), arrays, PARAMETERS)
    before = run.evaluate([x])
    for array in arrays.values():
        array[...] = 0
    for got, want in zip(run.evaluate([x]), before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (64, 32), (5, 200)])
def test_transpose_into_in_parts_equals_numpy(shape: tuple[int, int]) -> None:
    source = np.random.default_rng(10).integers(0, Q, shape)
    out = np.full(shape[::-1], -1)
    middle = shape[1] // 3
    transpose_into(source, 0, middle, out)
    transpose_into(source, middle, shape[1], out)
    np.testing.assert_array_equal(out, source.T)


@given(st.integers(-(2**53) + 1, 2**53 - 1), st.integers(-(2**53) + 1, 2**53 - 1))
def test_join_limbs_of_any_sums_below_the_limit_is_exact(high: int, low: int) -> None:
    assert join_limbs(float(high), float(low), Q, 1.0 / Q) == (high * 2**25 + low) % Q
