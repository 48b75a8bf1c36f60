"""Programs on a device of PyTorch give the bits of the native ones, and of Python integers, for every kind of step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs PyTorch (the extra [train])")

from heinfer.errors import InputError, ParameterError, PlanError  # noqa: E402
from heinfer.operators import Program, ResidueProgram  # noqa: E402
from heinfer.operators import torch_program as programs_on_devices  # noqa: E402
from heinfer.operators.backends import backend_on, open_device  # noqa: E402
from heinfer.operators.steps import Conv, MatMul, Scale, Shift, Step, Take, Window, WindowSum  # noqa: E402
from heinfer.operators.torch_device import TorchDevice, join_limb_sums, multiply_mod  # noqa: E402
from heinfer.operators.torch_products import ByteProducts, FloatProducts, Limbs, make_products  # noqa: E402
from heinfer.operators.torch_program import TorchBackend, TorchProgram, check_device  # noqa: E402
from heinfer.ring import ROW_SUM_LIMIT, WEIGHT_LIMIT, RingParameters  # noqa: E402
from tests.operators.test_kernels import convolved, extreme_residues, extreme_weights, windows  # noqa: E402
from tests.operators.test_programs import exact, programs, residues  # noqa: E402

PARAMETERS = RingParameters.default()
Q = PARAMETERS.modulus
GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
)
seeds = st.integers(0, 2**32 - 1)
pytestmark = [pytest.mark.parametrize("limbs", list(Limbs)), pytest.mark.parametrize("name", ["cpu", GPU])]


@pytest.fixture
def tiny_pieces() -> Iterator[None]:
    """Working memory so small that every sample, line and row is a piece of its own."""
    with patch.object(programs_on_devices, "WORKING_WORDS", 1):
        yield


def joined(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def run_one(name: str, limbs: Limbs, step: Step, array: np.ndarray, x: np.ndarray) -> np.ndarray:
    program, arrays = Program((x.shape[1:],), (step,), (1,)), {"w": array}
    found = TorchProgram(program, arrays, PARAMETERS, TorchDevice(name), limbs).evaluate_joined(joined(x))
    native = ResidueProgram(program, arrays, PARAMETERS).evaluate_joined(joined(x))
    assert found.dtype == np.int64
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, native)
    return found.reshape(len(x), *step.shape)


@settings(max_examples=40)
@given(drawn=programs(), samples=st.integers(1, 4), small=st.booleans(), seed=seeds)
def test_program_of_every_kind_of_step_equals_python_integers(
    name: str, limbs: Limbs, drawn: tuple[Program, dict[str, np.ndarray]], samples: int, small: bool, seed: int
) -> None:
    program, arrays = drawn
    x = residues(seed, samples, program.inputs[0])
    with patch.object(programs_on_devices, "WORKING_WORDS", 1 if small else 1 << 20):
        found = TorchProgram(program, arrays, PARAMETERS, TorchDevice(name), limbs).evaluate_joined(joined(x))
    want = np.concatenate([joined(y) for y in exact(program, arrays, [x])], axis=1) % Q
    np.testing.assert_array_equal(found, want.astype(np.int64))
    np.testing.assert_array_equal(found, ResidueProgram(program, arrays, PARAMETERS).evaluate_joined(joined(x)))


@settings(max_examples=60)
@given(data=st.data(), samples=st.integers(1, 5), seed=seeds)
def test_convolution_of_any_geometry_equals_python_integers(
    name: str, limbs: Limbs, data: st.DataObject, samples: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    group, outputs, inputs = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)))
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 21))
    window = data.draw(windows(height, width))
    weights = extreme_weights(generator, group * outputs, inputs, *window.kernel)
    x = extreme_residues(generator, samples, group * inputs, height, width)
    step = Conv(0, "w", window, group, (group * outputs, *window.output))
    with patch.object(programs_on_devices, "WORKING_WORDS", data.draw(st.sampled_from([1, 2000, 1 << 20]))):
        found = run_one(name, limbs, step, weights, x)
    np.testing.assert_array_equal(found, convolved(x, weights, window, group))


@pytest.mark.parametrize("channels", [4096, 4200])
def test_convolution_at_and_above_the_row_sum_limit_is_exact(name: str, limbs: Limbs, channels: int) -> None:
    window = Window((1, 2), (1, 1), (0, 0, 0, 0), (1, 1), (1, 2))
    weights = np.full((2, channels, 1, 2), WEIGHT_LIMIT, np.int16)
    weights[1] *= -1
    assert (2 * channels * WEIGHT_LIMIT <= ROW_SUM_LIMIT) == (channels == 4096)
    x = np.full((2, channels, 1, 3), Q - 1)
    x[1, ::3] = np.random.default_rng(4).integers(0, Q, x[1, ::3].shape)
    found = run_one(name, limbs, Conv(0, "w", window, 1, (2, 1, 2)), weights, x)
    np.testing.assert_array_equal(found, convolved(x, weights, window, 1))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("inputs", [8192, 8193, 2**16 + 3])
def test_product_of_rows_at_and_above_every_limit_is_exact(name: str, limbs: Limbs, rows: int, inputs: int) -> None:
    generator = np.random.default_rng(5)
    weights = np.full((inputs, 3), WEIGHT_LIMIT, np.int16) * np.array([1, -1, 1], np.int16)
    weights[:, 2] = extreme_weights(generator, inputs)
    x = np.full((rows, inputs), Q - 1)
    x[-1] = extreme_residues(generator, inputs)
    found = run_one(name, limbs, MatMul(0, "w", (3,)), weights, x)
    np.testing.assert_array_equal(found, (x.astype(object) @ weights.astype(object) % Q).astype(np.int64))


@pytest.mark.usefixtures("tiny_pieces")
def test_product_of_tokens_in_pieces_equals_python_integers(name: str, limbs: Limbs) -> None:
    generator = np.random.default_rng(6)
    weights, x = extreme_weights(generator, 9, 13), extreme_residues(generator, 3, 5, 9)
    found = run_one(name, limbs, MatMul(0, "w", (5, 13)), weights, x)
    np.testing.assert_array_equal(found, (x.astype(object) @ weights.astype(object) % Q).astype(np.int64))


def test_digits_at_every_edge_multiply_exactly(name: str, limbs: Limbs) -> None:
    weights = np.array([-32767, -32640, -129, -128, -1, 0, 1, 127, 128, 32639, 32640, 32767])
    x = np.array([0, 1, 127, 128, 2**25 - 1, 2**25, 2**49, Q // 2, Q - 1])
    made = make_products(limbs, weights.astype(float).reshape(1, -1, 1), PARAMETERS, TorchDevice(name))
    split = made.split(torch.from_numpy(x.reshape(1, 1, -1)).to(name)).permute(1, 2, 0, 3)
    want = (weights.astype(object)[:, None] * x.astype(object) % Q).astype(np.int64)
    np.testing.assert_array_equal(made.multiply(split)[0].cpu().numpy(), want)


def test_window_sum_over_more_points_than_fit_into_64_bits_of_residues(name: str, limbs: Limbs) -> None:
    window = Window((128, 128), (1, 1), (0, 0, 0, 0), (1, 1), (1, 1))
    x = np.full((2, 1, 128, 128), Q - 1)
    program = Program(((1, 128, 128),), (Scale(0, "w", (1, 128, 128)), WindowSum(1, window, (1, 1, 1))), (2,))
    arrays = {"w": np.full((1, 128, 128), WEIGHT_LIMIT, np.int16)}
    found = TorchProgram(program, arrays, PARAMETERS, TorchDevice(name), limbs).evaluate_joined(joined(x))
    assert found.tolist() == [[-(2**14) * WEIGHT_LIMIT % Q]] * 2


def test_programs_of_no_inputs_or_no_outputs_are_zero_or_empty(name: str, limbs: Limbs) -> None:
    window = Window((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (2, 2))
    assert not run_one(name, limbs, MatMul(0, "w", (3,)), np.zeros((0, 3), np.int16), np.zeros((2, 0), np.int64)).any()
    empty = run_one(name, limbs, MatMul(0, "w", (0,)), np.zeros((3, 0), np.int16), np.ones((2, 3), np.int64))
    assert empty.shape == (2, 0)
    x = np.zeros((2, 0, 2, 2), np.int64)
    assert not run_one(name, limbs, Conv(0, "w", window, 1, (3, 2, 2)), np.zeros((3, 0, 1, 1), np.int16), x).any()


def test_program_does_not_write_to_what_it_is_given_and_takes_read_only_residues(name: str, limbs: Limbs) -> None:
    program = Program(((4,),), (Take((0,), None, (2, 2)), MatMul(1, "w", (2, 3))), (2,))
    run = TorchProgram(program, {"w": np.ones((2, 3), np.int16)}, PARAMETERS, TorchDevice(name), limbs)
    x = extreme_residues(np.random.default_rng(7), 3, 4)
    before = x.copy()
    x.flags.writeable = False
    first = run.evaluate_joined(x)
    np.testing.assert_array_equal(run.evaluate_joined(x), first)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(run.evaluate_joined(np.asfortranarray(before)), first)


def test_program_with_what_does_not_fit_is_refused(name: str, limbs: Limbs) -> None:
    device, program = TorchDevice(name), Program(((3,),), (MatMul(0, "w", (2,)),), (1,))
    good = np.ones((3, 2), np.int16)
    with pytest.raises(PlanError, match="'w' is missing"):
        TorchProgram(program, {}, PARAMETERS, device, limbs)
    with pytest.raises(ParameterError, match="at most 32767"):
        TorchProgram(program, {"w": np.full((3, 2), WEIGHT_LIMIT + 1.0)}, PARAMETERS, device, limbs)
    shifted = Program(((3,),), (MatMul(0, "w", (2,)), Shift(1, "v", (2,))), (2,))
    with pytest.raises(ParameterError, match="belongs to the node"):
        TorchProgram(shifted, {"w": good, "v": np.ones(2)}, PARAMETERS, device, limbs)
    run = TorchProgram(program, {"w": good}, PARAMETERS, device, limbs)
    for wrong in (np.zeros((2, 4), np.int64), np.zeros((2, 3)), np.zeros(3, np.int64)):
        with pytest.raises(ParameterError, match="expected int64 of shape"):
            run.evaluate_joined(wrong)


def test_steps_that_name_one_array_share_its_copy_on_the_device(name: str, limbs: Limbs) -> None:
    weights = extreme_weights(np.random.default_rng(8), 40, 30)
    taken = []
    for steps in ((MatMul(0, "w", (30,)),), (MatMul(0, "w", (30,)), MatMul(0, "w", (30,)))):
        device = TorchDevice(name)
        run = TorchProgram(Program(((40,),), steps, (1,)), {"w": weights}, PARAMETERS, device, limbs)
        taken.append(device.kept_bytes)
        assert run.program.steps == steps
    assert taken[0] == taken[1] == (8 * 1200 if limbs is Limbs.FLOAT64 else 64 * 40)


def test_weights_above_the_bound_on_memory_are_refused_and_at_it_are_taken(name: str, limbs: Limbs) -> None:
    program, arrays = Program(((40,),), (MatMul(0, "w", (30,)),), (1,)), {"w": np.ones((40, 30), np.int16)}
    size = 8 * 1200 if limbs is Limbs.FLOAT64 else 64 * 40
    exact_fit = TorchDevice(name, size)
    for _ in range(2):  # what is gone makes room for what comes
        run = TorchProgram(program, arrays, PARAMETERS, exact_fit, limbs)
        assert exact_fit.kept_bytes == size
        del run
        gc.collect()
        assert exact_fit.kept_bytes == 0
    with pytest.raises(InputError, match=rf"at most {size - 1:,} bytes .* at least {size:,}; .*--device-memory"):
        TorchProgram(program, arrays, PARAMETERS, TorchDevice(name, size - 1), limbs)


def test_check_of_a_device_passes_and_notices_a_sum_that_is_off_by_one(name: str, limbs: Limbs) -> None:
    device = TorchDevice(name)
    check_device(device, limbs, PARAMETERS)
    owner, function = (torch, "matmul") if limbs is Limbs.FLOAT64 else (torch, "_int_mm")
    right = getattr(torch, function)

    def wrong(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made = right(left, other)
        made[..., 1, 3] += 1
        return made

    with patch.object(owner, function, wrong), pytest.raises(ParameterError, match="self-test of"):
        check_device(device, limbs, PARAMETERS)


def test_backend_measures_which_limbs_are_faster_unless_told(name: str, limbs: Limbs) -> None:
    program, arrays = Program(((3,),), (MatMul(0, "w", (2,)),), (1,)), {"w": np.ones((3, 2), np.int16)}
    told, free = TorchBackend(TorchDevice(name), limbs), TorchBackend(TorchDevice(name))
    assert free.limbs is None
    for backend in (told, free):
        assert backend.load(program, arrays, PARAMETERS).evaluate_joined(np.array([[1, 2, Q - 1]])).tolist() == [[2, 2]]
        assert backend.device.kept_bytes < 10_000  # what it was tried with is gone
    assert told.limbs is limbs
    assert free.limbs in Limbs


@given(
    a=st.integers(-Q + 1, Q - 1), w=st.integers(-Q + 1, Q - 1), high=st.integers(-(2**53) + 1, 2**53 - 1),
    low=st.integers(-(2**53) + 1, 2**53 - 1),
)  # fmt: skip
def test_elementwise_arithmetic_is_exact_anywhere(name: str, limbs: Limbs, a: int, w: int, high: int, low: int) -> None:
    left, right = torch.tensor([a], device=name), torch.tensor([w], device=name)
    assert multiply_mod(left, right, right.double() / Q, Q).item() == a * w % Q
    kind = torch.float64 if limbs is Limbs.FLOAT64 else torch.int64
    sums = (torch.tensor([value], dtype=kind, device=name) for value in (high, low))
    assert join_limb_sums(*sums, Q).item() == (high * 2**25 + low) % Q


def test_convolutions_of_many_groups_are_float64_whatever_was_asked_for(name: str, limbs: Limbs) -> None:
    kinds = [type(make_products(limbs, np.ones((g, 2, 3)), PARAMETERS, TorchDevice(name))) for g in (1, 4, 5)]
    assert kinds == [FloatProducts if limbs is Limbs.FLOAT64 else ByteProducts] * 2 + [FloatProducts]


def test_open_device_with_a_wrong_name_or_without_what_it_needs_says_what_to_do(name: str, limbs: Limbs) -> None:
    assert open_device("native") is None
    device = open_device(name)
    assert device is not None
    assert device.name.startswith(name)
    assert backend_on(device).slots == 1
    for wrong in ("gpu", "cuda:", "cpu:0", "cuda:999", "mps", "cuda:0 "):
        with pytest.raises(InputError, match="expected native, cpu, cuda"):
            open_device(wrong)
    with pytest.raises(InputError, match="expected a GPU that PyTorch can use"):
        open_device("cuda:99")
    with pytest.raises(InputError, match="--device-memory goes with"):
        open_device("native", 1 << 30)
    with patch("heinfer.operators.backends.find_spec", return_value=None), pytest.raises(InputError, match="'heinfer"):
        open_device(name)
