"""Arrays to chunks and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heinfer.errors import InputError, ParameterError, RemoteProtocolError
from heinfer.wire import (
    Limits,
    QueryFailedError,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    ResultHeader,
    Statistics,
    TensorAssembler,
    TensorChunk,
    TensorSpec,
    describe_tensors,
    iterate_tensor_chunks,
    read_query,
    read_result,
)
from heinfer.wire.queries import DTYPE_BYTES

LIMITS = Limits(chunk_bytes=10, max_request_bytes=10_000)
arrays = st.sampled_from(sorted(DTYPE_BYTES)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


def query(tensors):
    return [QueryHeader(1, describe_tensors(tensors)), *iterate_tensor_chunks(tensors, LIMITS)]


@given(st.lists(arrays, max_size=4))
def test_query_arrives_bit_by_bit(values):
    tensors = {f"t{index}": value for index, value in enumerate(values)}
    _, received = read_query(query(tensors), LIMITS)
    assert list(received) == list(tensors)
    for name, value in tensors.items():
        assert received[name].dtype == value.dtype
        assert received[name].shape == value.shape
        assert received[name].tobytes() == value.tobytes()
        assert received[name].flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=">i4").reshape(2, 3), np.arange(24.0).reshape(4, 6)[::2, ::-1], np.arange(6.0).reshape(2, 3).T],
    ids=["big-endian", "strided", "transposed"],
)
def test_layout_in_memory_does_not_matter(array):
    received = read_query(query({"x": array}), LIMITS)[1]["x"]
    np.testing.assert_array_equal(received, array)
    assert received.dtype.isnative


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.array([1j]), np.array(0, "M8[s]")])
def test_array_of_a_dtype_that_does_not_travel_is_an_input_error(array):
    with pytest.raises(InputError, match="dtype"):
        describe_tensors({"x": array})


TWO = (TensorSpec("a", "uint8", (12,)), TensorSpec("b", "uint8", (1,)))
OUT_OF_ORDER = {
    "second tensor first": [TensorChunk(1, 0, b"x")],
    "offset skipped": [TensorChunk(0, 1, b"x")],
    "offset repeated": [TensorChunk(0, 0, b"x"), TensorChunk(0, 0, b"x")],
    "longer than announced": [TensorChunk(0, 0, b"x" * 10), TensorChunk(0, 10, b"xxx")],
    "longer than a chunk": [TensorChunk(0, 0, b"x" * 11)],
    "unknown tensor": [TensorChunk(2, 0, b"x")],
    "after the end": [
        TensorChunk(0, 0, b"x" * 10),
        TensorChunk(0, 10, b"xx"),
        TensorChunk(1, 0, b"x"),
        TensorChunk(2, 0, b"x"),
    ],
}


@pytest.mark.parametrize("chunks", OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_assembler_refuses(chunks):
    assembler = TensorAssembler(TWO, LIMITS)
    for chunk in chunks[:-1]:
        assembler.add(chunk)
    with pytest.raises(RemoteProtocolError):
        assembler.add(chunks[-1])


def test_header_that_announces_too_much_is_refused_and_at_the_limit_costs_nothing():
    TensorAssembler([TensorSpec("a", "uint8", (2**40,))], Limits(max_request_bytes=2**40))
    with pytest.raises(RemoteProtocolError):
        TensorAssembler([TensorSpec("a", "uint8", (10_001,))], LIMITS)


def test_missing_bytes_and_wrong_bools_are_refused():
    with pytest.raises(RemoteProtocolError, match="0 of 12"):
        TensorAssembler(TWO, LIMITS).finish()
    assembler = TensorAssembler([TensorSpec("a", "bool", (2,))], LIMITS)
    assembler.add(TensorChunk(0, 0, b"\x01\x02"))
    with pytest.raises(RemoteProtocolError, match="neither 0 nor 1"):
        assembler.finish()


GOOD = query({"x": np.ones(4, np.float32)})


@pytest.mark.parametrize(
    "events", [[], GOOD[1:], GOOD[:-1], [GOOD[0], GOOD[0]], [GOOD[0], GOOD[2]]], ids=lambda events: str(len(events))
)
def test_broken_query_is_the_clients_fault(events):
    with pytest.raises(QueryFailedError) as caught:
        read_query(events, LIMITS)
    assert caught.value.code is QueryFailureCode.INPUT


RESULT = [ResultHeader(1, GOOD[0].tensors), *GOOD[1:], Statistics(b"{}")]


def test_result_with_and_without_statistics():
    header, tensors, statistics = read_result(RESULT, LIMITS, True)
    assert header.request_id == 1
    assert statistics == Statistics(b"{}")
    np.testing.assert_array_equal(tensors["x"], np.ones(4, np.float32))
    assert read_result(RESULT[:-1], LIMITS, False)[2] is None


@pytest.mark.parametrize(
    "events",
    [
        [],
        RESULT[1:],
        RESULT[:2],
        RESULT[:-1],
        [RESULT[0], RESULT[-1]],
        [*RESULT[:-1], RESULT[-2]],
        [RESULT[0], RESULT[0]],
    ],
)
def test_result_out_of_order_is_refused(events):
    with pytest.raises(RemoteProtocolError):
        read_result(events, LIMITS, True)


def test_nothing_is_read_after_the_last_byte():
    query, result = iter([*GOOD, "next"]), iter([*RESULT[:-1], "next"])
    read_query(query, LIMITS)
    read_result(result, LIMITS, False)
    assert [*query, *result] == ["next", "next"]


def test_query_may_be_refused_by_its_header_before_anything_else_is_read():
    def refuse(header):
        raise InputError(f"not query {header.request_id}")

    query = iter(GOOD)
    with pytest.raises(InputError, match="not query 1"):
        read_query(query, LIMITS, refuse)
    assert len(list(query)) == len(GOOD) - 1


def test_failure_of_a_query_is_raised_with_code_and_reason():
    with pytest.raises(QueryFailedError, match="too hot") as caught:
        read_result([*RESULT[:2], QueryFailure(QueryFailureCode.INTEGRITY, "too hot")], LIMITS, True)
    assert caught.value.code is QueryFailureCode.INTEGRITY


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_bytes": 0},
        {"max_rows": -1},
        {"idle_s": float("nan")},
        {"chunk_bytes": 2**31},
        {"message_bytes": 2**31},
    ],
)
def test_limits_that_make_no_sense_are_refused(changes):
    with pytest.raises(ParameterError):
        Limits(**changes)
