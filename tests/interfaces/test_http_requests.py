"""Requests over HTTP that are wrong, too much, or come at a bad moment: status, reason, and nothing else."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from heinfer.errors import HeinferError, IntegrityError, RemoteProtocolError
from heinfer.wire.messages import FailureCode, RefusedError
from tests.interfaces.fakes import CLASSES, expected
from tests.interfaces.http_serving import (
    DIGITS,
    binary_digits,
    binary_query,
    digits,
    error_of,
    json_query,
    served,
)
from trusted_node.engine import DataError
from trusted_node.serving.interface import DeadlineError, ModelNotReadyError, Outcome, QueueFullError

ONE = digits(1)
RAW = ONE.tobytes()


@pytest.fixture(scope="module")
def shared_node():
    with served() as node:
        yield node


@pytest.fixture
def node(shared_node):
    model = shared_node.models["digits"]
    model.submitted.clear()
    shared_node.notes.queries.clear()
    yield shared_node
    model.failure = model.refusal = None
    model.delay_s = 0.0


def tensor(**changes):
    """The input of a good query, changed; None takes a member away."""
    good = {"name": "x", "shape": [1, 1, 28, 28], "datatype": "FP32", "data": ONE.ravel().tolist()}
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def test_infer_nested_data_is_read_as_flat(node):
    answer = node.http.post(DIGITS, json={"inputs": [tensor(data=ONE.tolist())]})
    np.testing.assert_array_equal(np.float32(answer.json()["outputs"][0]["data"]), expected(ONE)[0])


def test_infer_version_in_the_path_and_plain_json_gets_plain_json(node):
    answer = node.http.post("/v2/models/digits/versions/1/infer", json=json_query(ONE, id="a"))
    assert answer.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in answer.headers
    assert answer.headers["cache-control"] == "no-store"
    content = answer.json()
    assert content["id"] == "a"
    assert content["outputs"][0]["shape"] == [1, CLASSES]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": "x"}, "inputs"),
        ({"inputs": [tensor(name=None)]}, "name"),
        ({"inputs": [tensor(name="z")]}, "'z' is unknown"),
        ({"inputs": [tensor(), tensor()]}, "there twice"),
        ({"inputs": [tensor(shape=None)]}, "shape"),
        ({"inputs": [tensor(shape=[1, 28, 28])]}, "expected shape"),
        ({"inputs": [tensor(shape=[-1, 1, 28, 28])]}, "shape"),
        ({"inputs": [tensor(shape=[2**62, 1, 28, 28])]}, "shape"),
        ({"inputs": [tensor(shape=[2, 1, 28, 28])]}, "1568 values, found 784"),
        ({"inputs": [tensor(shape=[0, 1, 28, 28], data=[])]}, "at least one sample"),
        ({"inputs": [tensor(shape=[1.0, 1, 28, 28])]}, "shape"),
        ({"inputs": [tensor(datatype="FP64")]}, "expected datatype FP32"),
        ({"inputs": [tensor(datatype="BYTES")]}, "'BYTES' is not supported"),
        ({"inputs": [tensor(datatype="BF16")]}, "'BF16' is not supported"),
        ({"inputs": [tensor(datatype="float32")]}, "'float32' is unknown"),
        ({"inputs": [tensor(data=None)]}, "neither data nor"),
        ({"inputs": [tensor(data=[True] * 784)]}, "expected numbers"),
        ({"inputs": [tensor(data=["1"] * 784)]}, "expected numbers"),
        ({"inputs": [tensor(data=[None] * 784)]}, "expected numbers"),
        ({"inputs": [tensor(data=[[[[1.0] * 28] * 27]])]}, "nested data"),
        ({"inputs": [tensor(data=[[[[[1.0]] * 28] * 28]])]}, "expected numbers"),
        ({"inputs": [tensor(data=[10**400] * 784)]}, "beyond FP64"),
        ({"inputs": [tensor(data=[1e39] * 784)]}, "NaN or infinity"),
        ({"inputs": [tensor(parameters={"shared_memory_region": "r"}, data=None)]}, "shared memory"),
        ({"inputs": [tensor(parameters={"binary_data_size": -1}, data=None)]}, "whole number"),
        ({"inputs": [tensor(parameters={"binary_data_size": True}, data=None)]}, "whole number"),
        ({"inputs": [tensor(parameters={"binary_data_size": 8}, data=None)]}, "0 are left"),
        ({"inputs": [tensor()], "outputs": [{"name": "z"}]}, "output 'z' is unknown"),
        ({"inputs": [tensor()], "outputs": [{"name": "y"}, {"name": "y"}]}, "asked for twice"),
        ({"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification"),
        ({"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "true or false"),
        ({"inputs": [tensor()], "parameters": {"binary_data_output": "yes"}}, "true or false"),
        ({"inputs": [tensor()], "parameters": {"timeout": 0.5}}, "'timeout'"),
        ({"inputs": [tensor()], "parameters": {"timeout": 10**18}}, "'timeout'"),
        ({"inputs": [tensor()], "parameters": {"sequence_id": 4}}, "sequences"),
        ({"inputs": [tensor()], "parameters": {"a": []}}, "parameters"),
        ({"inputs": [tensor()], "id": 5}, "id"),
    ],
)
def test_infer_malformed_json_is_refused_with_the_reason(node, query, reason):
    answer = node.http.post(DIGITS, json=query)
    assert answer.status_code == 400
    assert reason in error_of(answer)
    assert node.models["digits"].submitted == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"inputs": [NaN]}', b"\xff\xfe", b"[" * 100_000, b'{"inputs": [' + b"[" * 50_000, b"null"],
)
def test_infer_body_that_is_no_query_is_refused(node, body):
    answer = node.http.post(DIGITS, content=body)
    assert answer.status_code == 400
    assert "JSON" in error_of(answer)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_infer_not_finite_numbers_in_json_are_refused(node, value):
    body = json.dumps({"inputs": [tensor()]}).replace(repr(float(ONE.flat[0])), value, 1)
    assert value in body
    answer = node.http.post(DIGITS, content=body)
    assert answer.status_code == 400
    assert "JSON" in error_of(answer) or "infinity" in error_of(answer)


def test_infer_not_finite_numbers_in_binary_are_refused(node):
    body, headers = binary_digits(np.full_like(ONE, np.nan))
    answer = node.http.post(DIGITS, content=body, headers=headers)
    assert answer.status_code == 400
    assert "NaN" in error_of(answer)


@pytest.mark.parametrize(
    ("sizes", "tail", "reason"),
    [
        ({"x": len(RAW) - 4}, b"", "has 3136 bytes, found 3132"),
        ({"x": len(RAW) + 1}, b"", "3136 are left"),
        ({"x": 10**30}, b"", "3136 are left"),
        ({}, b"more", "4 bytes behind the JSON"),
    ],
)
def test_infer_binary_of_another_size_is_refused(node, sizes, tail, reason):
    body, headers = binary_query({"x": ("FP32", ONE.shape, RAW)}, sizes)
    answer = node.http.post(DIGITS, content=body + tail, headers=headers)
    assert answer.status_code == 400
    assert reason in error_of(answer)


@pytest.mark.parametrize("length", ["0", "-1", "x", "1e3", "9" * 30, "100000"])
def test_infer_wrong_length_of_the_json_is_refused(node, length):
    body, _ = binary_digits(ONE)
    answer = node.http.post(DIGITS, content=body, headers={"Inference-Header-Content-Length": length})
    assert answer.status_code == 400
    assert error_of(answer)


def test_infer_values_in_json_and_in_binary_are_refused(node):
    head = json.dumps({"inputs": [tensor(parameters={"binary_data_size": len(RAW)})]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = node.http.post(DIGITS, content=head + RAW, headers=headers)
    assert answer.status_code == 400
    assert "in JSON and in binary" in error_of(answer)


def test_infer_booleans_in_binary_are_zero_or_one(node):
    body, headers = binary_query({"b": ("BOOL", (1, 2, 3), bytes([0, 1, 2, 0, 1, 0]))})
    answer = node.http.post("/v2/models/mixed/infer", content=body, headers=headers)
    assert answer.status_code == 400
    assert "0 and 1 only" in error_of(answer)


@pytest.mark.parametrize(
    ("name", "datatype", "value", "reason"),
    [
        ("i8", "INT8", 128, "holds -128 to 127"),
        ("u8", "UINT8", -1, "holds 0 to 255"),
        ("u64", "UINT64", 2**64, "holds 0 to 18446744073709551615"),
        ("i32", "INT32", 1.5, "expected whole numbers"),
        ("i32", "INT32", True, "expected whole numbers"),
        ("b", "BOOL", 1, "expected true or false"),
    ],
)
def test_infer_numbers_beyond_their_type_are_refused(node, name, datatype, value, reason):
    one = {"name": name, "shape": [1, 2, 3], "datatype": datatype, "data": [value] * 6}
    answer = node.http.post("/v2/models/mixed/infer", json={"inputs": [one]})
    assert answer.status_code == 400
    assert reason in error_of(answer)


def test_infer_errors_quote_no_values(node):
    secret = 8.75e77
    answer = node.http.post(DIGITS, json={"inputs": [tensor(data=[secret] * 784)], "id": None})
    assert answer.status_code == 400
    broken = node.http.post(DIGITS, json={"inputs": [tensor(data={"value": secret})]})
    assert broken.status_code == 400
    assert "8.75" not in answer.text + broken.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/unheard-of", 404),
        ("GET", "/v2/models/digits/versions/7", 404),
        ("POST", "/v2/models/unheard-of/infer", 404),
        ("POST", "/v2/models/digits/versions/7/infer", 404),
        ("GET", "/v2/models/a%2Fb/ready", 404),
        ("GET", "/v3", 404),
        ("GET", "/", 404),
        ("GET", "/v2/", 404),
        ("GET", DIGITS, 405),
        ("POST", "/v2", 405),
        ("DELETE", "/v2/models/digits", 405),
        ("PUT", "/v2/health/live", 405),
    ],
)
def test_unknown_places_and_methods_are_refused(node, method, path, status):
    answer = node.http.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (DataError("output 'y' holds NaN or infinity"), 400, "output 'y'"),
        (RemoteProtocolError("the server went away"), 502, "went away"),
        (IntegrityError("the answer is not honest"), 502, "not honest"),
        (RefusedError(FailureCode.BUSY, "the server is busy"), 503, ""),
        (ModelNotReadyError("being unloaded"), 503, "unloaded"),
        (DeadlineError("over"), 504, "over"),
        (HeinferError("a process died"), 500, "died"),
        (ValueError("could not convert 3.25 to a number"), 500, "internal error"),
    ],
)
def test_infer_failures_of_a_model_have_their_status(node, failure, status, reason, caplog):
    node.models["digits"].failure = failure
    with caplog.at_level(logging.DEBUG):
        answer = node.http.post(DIGITS, json=json_query(ONE))
    assert answer.status_code == status
    assert reason in error_of(answer)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert "3.25" not in answer.text + caplog.text


def test_infer_full_queue_is_refused_with_a_time_to_come_again(node):
    node.models["digits"].refusal = QueueFullError("256 queries wait already; ask again later")
    answer = node.http.post(DIGITS, json=json_query(ONE))
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "256" in error_of(answer)


def test_infer_timeout_in_microseconds_is_the_deadline(node):
    node.models["digits"].delay_s = 5.0
    answer = node.http.post(DIGITS, json=json_query(ONE, parameters={"timeout": 50_000}))
    assert answer.status_code == 504
    assert answer.elapsed.total_seconds() < 2
    assert "time" in error_of(answer)


def test_infer_model_that_forgets_its_deadline_is_not_waited_for(node):
    node.models["digits"].hold()
    try:
        answer = node.http.post(DIGITS, json=json_query(ONE, parameters={"timeout": 50_000}))
    finally:
        node.models["digits"].release()
    assert answer.status_code == 504
    assert node.models["digits"].pending == 0


def test_observer_is_told_of_what_no_model_saw(node):
    assert node.http.post(DIGITS, json={"inputs": [tensor(shape=[2, 1, 28, 28])]}).status_code == 400
    assert node.http.post(DIGITS, json=json_query(ONE)).status_code == 200
    assert node.notes.outcomes == [Outcome.INPUT]
    assert (node.notes.queries[0].model, node.notes.queries[0].samples) == ("digits", 0)


def test_query_carries_id_and_trace_of_its_request(node):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    node.http.post(DIGITS, json=json_query(ONE), headers={"X-Request-ID": "clinic-17", "traceparent": parent})
    (query,) = node.models["digits"].submitted
    assert (query.request_id, query.traceparent) == ("clinic-17", parent)
