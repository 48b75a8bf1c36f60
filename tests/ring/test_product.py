from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heinfer.errors import ParameterError
from heinfer.ring import product
from heinfer.ring.packing import join_into, join_limbs, split_into
from heinfer.ring.parameters import ROW_SUM_LIMIT, WEIGHT_LIMIT, RingParameters
from heinfer.ring.product import ModularMatrix, multiply_mod_reference, run_tiles, self_test

PARAMETERS = RingParameters.default()
Q = PARAMETERS.modulus
FULL, REST = divmod(ROW_SUM_LIMIT, WEIGHT_LIMIT)

weight_values = st.integers(-WEIGHT_LIMIT, WEIGHT_LIMIT) | st.sampled_from([-WEIGHT_LIMIT, 0, WEIGHT_LIMIT])
residue_values = st.integers(0, Q - 1) | st.sampled_from([0, 2**25 - 1, 2**25, Q // 2, Q - 1])


@st.composite
def products(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    outputs, inputs, columns = (draw(st.integers(0, 12)) for _ in range(3))
    weights = draw(hnp.arrays(np.int64, (outputs, inputs), elements=weight_values))
    return weights, draw(hnp.arrays(np.int64, (inputs, columns), elements=residue_values))


def largest_row(last: int) -> np.ndarray:
    row = np.full((1, FULL + 1), WEIGHT_LIMIT)
    row[0, -1] = last
    return row


@given(products())
def test_multiply_any_shape_matches_python_integers(case: tuple[np.ndarray, np.ndarray]) -> None:
    weights, residues = case
    result = ModularMatrix(weights.astype(np.float64), PARAMETERS).multiply(residues)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(result, multiply_mod_reference(weights, residues, Q))


def test_reference_on_a_product_done_by_hand() -> None:
    assert multiply_mod_reference(np.array([[2, -3]]), np.array([[5], [4]]), 7).tolist() == [[5]]


@pytest.mark.parametrize("degree", [2048, 16384])
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_multiply_row_sums_at_the_limit_are_exact(degree: int, columns: int) -> None:
    parameters = RingParameters.default(degree)
    weights = np.concatenate([largest_row(REST), -largest_row(REST)])
    matrix = ModularMatrix(weights, parameters)
    assert matrix.row_sum == ROW_SUM_LIMIT
    assert len(matrix.chunks) == 1
    residues = np.full((matrix.inputs, columns), parameters.modulus - 1)
    residues[1::2, -1] = np.random.default_rng(2).integers(0, parameters.modulus, residues[1::2].shape[0])
    expected = multiply_mod_reference(weights, residues, parameters.modulus)
    np.testing.assert_array_equal(matrix.multiply(residues), expected)


def test_float64_product_above_the_row_sum_limit_is_wrong_without_chunks() -> None:
    # The contract is needed: one chunk of four times the row sum loses low bits.
    weights = np.tile(largest_row(REST), (1, 4))
    residues = np.random.default_rng(3).integers(Q - 2**20, Q, (weights.shape[1], 4))
    limbs = np.empty((weights.shape[1], 8))
    split_into(residues, 0, limbs)
    out = np.empty((1, 4), np.int64)
    join_into(weights.astype(np.float64) @ limbs, out, Q, False)
    expected = multiply_mod_reference(weights, residues, Q)
    assert not np.array_equal(out, expected)
    np.testing.assert_array_equal(ModularMatrix(weights, PARAMETERS).multiply(residues), expected)


def test_multiply_row_sums_above_the_limit_are_split_and_exact() -> None:
    rng = np.random.default_rng(4)
    weights = np.concatenate([largest_row(REST + 1), rng.integers(-5, 6, (1, FULL + 1))])
    weights = np.concatenate([weights, weights[:, ::-1]], axis=1)
    matrix = ModularMatrix(weights, PARAMETERS)
    assert len(matrix.chunks) == 3
    assert matrix.row_sum == 2 * (ROW_SUM_LIMIT + 1)
    for chunk in matrix.chunks:
        assert np.abs(weights[:, chunk]).sum(axis=1).max() <= ROW_SUM_LIMIT
    residues = np.stack([np.full(matrix.inputs, Q - 1), rng.integers(0, Q, matrix.inputs)], axis=1)
    expected = multiply_mod_reference(weights, residues, Q)
    np.testing.assert_array_equal(matrix.multiply(residues), expected)
    limbs, wide = np.empty((matrix.inputs, 4)), np.full((2, 5), -1, dtype=np.int64)
    split_into(residues, 0, limbs)
    matrix.multiply_limbs(limbs, wide[:, 1:3], np.empty((2, 4)))
    np.testing.assert_array_equal(wide[:, 1:3], expected)
    assert (wide[:, [0, 3, 4]] == -1).all()


@given(
    st.integers(-ROW_SUM_LIMIT * (2**25 - 1), ROW_SUM_LIMIT * (2**25 - 1)),
    st.integers(-ROW_SUM_LIMIT * (2**25 - 1), ROW_SUM_LIMIT * (2**25 - 1)),
    st.sampled_from([Q, RingParameters.default(32768).modulus, 2**49 + 69, 2**50 - 27]),
)
def test_join_limbs_any_sums_and_modulus_is_exact(high: int, low: int, modulus: int) -> None:
    assert join_limbs(float(high), float(low), modulus, 1.0 / modulus) == (high * 2**25 + low) % modulus


@given(st.integers(-(2**27), 2**27), st.integers(-1, 1), st.sampled_from([Q, 2**49 + 69]))
def test_join_limbs_near_multiples_and_halves_of_the_modulus(quotient: int, offset: int, modulus: int) -> None:
    for value in (quotient * modulus + offset, quotient * modulus + modulus // 2 + offset):
        high, low = divmod(value, 2**25)
        assert join_limbs(float(high), float(low), modulus, 1.0 / modulus) == value % modulus


def test_multiply_non_contiguous_input_and_strided_output() -> None:
    rng = np.random.default_rng(5)
    weights = rng.integers(-100, 101, (7, 9))
    matrix = ModularMatrix(weights, PARAMETERS)
    residues = rng.integers(0, Q, (40, 18))[::2, ::-2].T
    expected = multiply_mod_reference(weights, residues, Q)
    out = np.full((7, 30), -1, dtype=np.int64)
    assert matrix.multiply(residues, out[:, 4:24]) is not None
    np.testing.assert_array_equal(out[:, 4:24], expected)
    assert (out[:, :4] == -1).all()
    assert (out[:, 24:] == -1).all()


def test_multiply_zero_rows_and_no_inputs_give_zeros() -> None:
    residues = np.full((3, 4), Q - 1)
    assert not ModularMatrix(np.zeros((2, 3)), PARAMETERS).multiply(residues).any()
    matrix = ModularMatrix(np.zeros((2, 0)), PARAMETERS)
    out = np.full((2, 4), 7)
    matrix.multiply(np.zeros((0, 4), np.int64), out)
    assert not out.any()
    out[:] = 7
    matrix.multiply_limbs(np.empty((0, 8)), out)
    assert not out.any()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("outputs", "inputs", "columns"), [(33, 60, 301), (300, 50, 9), (130, 40, 1)])
def test_multiply_tiles_on_threads_cover_everything(
    monkeypatch: pytest.MonkeyPatch, threads: int, outputs: int, inputs: int, columns: int
) -> None:
    monkeypatch.setattr(product, "THREADED_WORK", 0)
    rng = np.random.default_rng(6)
    weights = rng.integers(-WEIGHT_LIMIT, WEIGHT_LIMIT + 1, (outputs, inputs))
    residues = rng.integers(0, Q, (inputs, columns))
    result = ModularMatrix(weights, PARAMETERS).multiply(residues, threads=threads)
    np.testing.assert_array_equal(result, multiply_mod_reference(weights, residues, Q))


@given(st.integers(1, 600), st.integers(1, 6000), st.integers(0, 5000), st.integers(1, 16))
def test_column_tiles_partition_the_columns(outputs: int, inputs: int, columns: int, threads: int) -> None:
    matrix = ModularMatrix(np.zeros((outputs, inputs), np.int8), PARAMETERS)
    tiles = matrix.column_tiles(columns, threads)
    assert [index for tile in tiles for index in range(tile.start, tile.stop)] == list(range(columns))
    assert all(tile.start < tile.stop for tile in tiles)


@pytest.mark.parametrize(
    ("residues", "out"),
    [
        (np.zeros((4, 2), np.int64), None),
        (np.zeros(3, np.int64), None),
        (np.zeros((3, 2), np.int32), None),
        (np.zeros((3, 2)), None),
        (np.zeros((3, 2), np.int64), np.zeros((2, 3), np.int64)),
        (np.zeros((3, 2), np.int64), np.zeros((2, 2))),
        (np.zeros((3, 2), np.int64), np.zeros((2, 4), np.int64)[:, ::2]),
    ],
)
def test_multiply_wrong_arrays_are_refused(residues: np.ndarray, out: np.ndarray | None) -> None:
    with pytest.raises(ParameterError, match="expected"):
        ModularMatrix(np.ones((2, 3)), PARAMETERS).multiply(residues, out)


@pytest.mark.parametrize(
    ("limbs", "scratch"),
    [
        (np.zeros((3, 5)), None),
        (np.zeros((2, 4)), None),
        (np.zeros((3, 8))[:, ::2], None),
        (np.zeros((3, 4), np.float32), None),
        (np.zeros((3, 4)), np.zeros((2, 2))),
    ],
)
def test_multiply_limbs_wrong_arrays_are_refused(limbs: np.ndarray, scratch: np.ndarray | None) -> None:
    with pytest.raises(ParameterError, match="expected"):
        ModularMatrix(np.ones((2, 3)), PARAMETERS).multiply_limbs(limbs, np.zeros((2, 2), np.int64), scratch)


def test_matrix_is_immutable_and_independent_of_its_source() -> None:
    weights = np.array([[3, -4]])
    matrix = ModularMatrix(weights, PARAMETERS)
    weights[:] = 0
    assert (matrix.outputs, matrix.inputs, matrix.row_sum) == (1, 2, 7)
    assert matrix.multiply(np.array([[1], [1]])).tolist() == [[Q - 1]]
    with pytest.raises(AttributeError, match="immutable"):
        matrix.row_sum = 1  # type: ignore[misc]


def test_self_test_passes_here() -> None:
    for degree in (2048, 32768):
        self_test(RingParameters.default(degree))


def test_self_test_wrong_arithmetic_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    # float32 accumulation stands for a BLAS that is not IEEE float64.
    def rounded(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        out[...] = left.astype(np.float32) @ right.astype(np.float32)

    monkeypatch.setattr(product.np, "matmul", rounded)
    with pytest.raises(ParameterError, match="self-test"):
        self_test(PARAMETERS)


def test_run_tiles_calls_every_tile_once_on_several_threads() -> None:
    barrier = threading.Barrier(2, timeout=20)
    seen: list[tuple[int, int]] = []

    def visit(tile: int) -> None:
        if tile < 2:
            barrier.wait()  # passes only when two threads are inside
        seen.append((tile, threading.get_ident()))

    run_tiles(visit, range(20), threads=2)
    assert sorted(tile for tile, _ in seen) == list(range(20))
    assert len({thread for _, thread in seen}) == 2


def test_run_tiles_little_work_stays_on_the_calling_thread() -> None:
    threads: set[int] = set()
    run_tiles(lambda _: threads.add(threading.get_ident()), range(8), work=10, threads=4)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("threads", [1, 4])
def test_run_tiles_exception_propagates_and_later_calls_work(threads: int) -> None:
    def fail(tile: int) -> None:
        if tile == 5:
            raise KeyError(tile)

    with pytest.raises(KeyError):
        run_tiles(fail, range(50), threads=threads)
    done: list[int] = []
    run_tiles(done.append, range(50), threads=threads)
    assert sorted(done) == list(range(50))


def test_run_tiles_nested_and_concurrent_calls_do_not_deadlock() -> None:
    done: list[int] = []

    def outer(_: int) -> None:
        run_tiles(done.append, range(10), threads=4)

    with ThreadPoolExecutor(8) as callers:
        for call in [callers.submit(run_tiles, outer, range(10), threads=4) for _ in range(8)]:
            call.result(timeout=60)
    assert len(done) == 800


def test_tiles_that_run_are_waited_for_when_a_thread_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wipe and reuse memory after an error: nobody may be writing there then."""
    begun, finished, calls = threading.Event(), [], []

    def work(tile: int) -> None:
        begun.set()
        time.sleep(0.2)
        finished.append(tile)

    class Pool:
        def submit(self, function: Callable[[], None]) -> Future[None]:
            calls.append(function)
            if len(calls) == 2:
                assert begun.wait(5)
                raise RuntimeError("can't start new thread")
            threading.Thread(target=function).start()
            return Future()

    monkeypatch.setattr(product, "_pool", [Pool()])
    with pytest.raises(RuntimeError, match="new thread"):
        product.run_tiles(work, range(50), threads=3)
    assert len(finished) == 1  # the one that had begun, to its end
    time.sleep(0.3)
    assert len(finished) == 1
