"""Tensors in JSON and in binary: what is written is read again, bit by bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from heinfer.errors import InputError
from heinfer.plan import TensorSpec
from tests.interfaces.fakes import fake_plan
from trusted_node.serving.datatypes import DATATYPES, datatype_of
from trusted_node.serving.tensors_json import read_inference, write_inference

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


def finite(dtype: np.dtype) -> st.SearchStrategy:
    if dtype.kind == "f":
        return st.floats(allow_nan=False, allow_infinity=False, width=8 * dtype.itemsize)
    return arrays.from_dtype(dtype)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(DATATYPES.values(), key=str)))
    shape = (draw(st.integers(1, 4)), *draw(SHAPES))
    return draw(arrays.arrays(dtype, shape, elements=finite(dtype)))


def plan_of(x: np.ndarray):
    return fake_plan("echo", [TensorSpec("x", x.shape[1:], x.dtype.name)], [TensorSpec("y", x.shape[1:], x.dtype.name)])


def head_of(x: np.ndarray, **more) -> dict:
    return {"name": "x", "shape": list(x.shape), "datatype": datatype_of(x.dtype.name), **more}


def same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@given(tensors())
def test_flat_nested_and_binary_are_read_as_the_same_array(x):
    bodies = [
        (json.dumps({"inputs": [head_of(x, data=data)]}).encode(), None) for data in (x.ravel().tolist(), x.tolist())
    ]
    head = json.dumps({"inputs": [head_of(x, parameters={"binary_data_size": x.nbytes})]}).encode()
    for body, size in [*bodies, (head + x.tobytes(), len(head))]:
        assert same(read_inference(plan_of(x), body, size).inputs["x"], x)


@given(tensors(), st.booleans())
def test_written_answers_are_read_as_they_were(x, binary):
    plan = plan_of(x)
    query = {"inputs": [head_of(x, data=x.ravel().tolist())], "parameters": {"binary_data_output": binary}, "id": "é"}
    inference = read_inference(plan, json.dumps(query).encode(), None)
    body, size = write_inference("echo", "1", inference, plan, {"y": x})
    answer = json.loads(body[:size])
    assert answer["id"] == "é"
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"]) == ("y", datatype_of(x.dtype.name))
    if binary:
        assert output["parameters"] == {"binary_data_size": x.nbytes}
        found = np.frombuffer(body[size:], x.dtype)
    else:
        found = np.array(output["data"], x.dtype)
    assert same(found.reshape(output["shape"]), x)


@given(st.binary(max_size=200), st.none() | st.integers(0, 250))
def test_any_bytes_are_read_or_refused(body, size):
    with pytest.raises(InputError):
        read_inference(plan_of(np.zeros((1, 3), np.float32)), body, size)
