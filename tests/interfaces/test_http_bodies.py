"""Bodies over HTTP: codings, bombs, sizes, and room beside others."""

from __future__ import annotations

import gzip
import json
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.interfaces.http_serving import DIGITS, binary_digits, digits, error_of, json_query, served
from tests.waiting import soon
from trusted_node.serving.limits import MIB, ServingLimits


@pytest.fixture(scope="module")
def node():
    with served() as node:
        yield node


def test_answers_are_compressed_only_for_who_asks_for_one_coding(node):
    query = json_query(digits(20))
    habit = node.http.post(DIGITS, json=query, headers={"Accept-Encoding": "gzip, deflate, br"})
    assert "content-encoding" not in habit.headers
    asked = node.http.post(DIGITS, json=query, headers={"Accept-Encoding": "gzip"})
    assert asked.headers["content-encoding"] == "gzip"
    assert asked.json() == habit.json()


def test_bodies_in_unknown_coding_or_damaged_are_refused(node):
    body = json.dumps(json_query(digits(1))).encode()
    packed = gzip.compress(body)
    cases = [
        (body, "br", 415),
        (body, "gzip", 400),
        (packed[:-9], "gzip", 400),
        (packed + b"more", "gzip", 400),
        (packed, "deflate", 400),
        (b"", "gzip", 400),
        (zlib.compress(body), "gzip", 400),
        (packed, "gzip, gzip", 415),
    ]
    for content, coding, status in cases:
        answer = node.http.post(DIGITS, content=content, headers={"Content-Encoding": coding})
        assert answer.status_code == status, (coding, answer.text)
        assert error_of(answer)


@pytest.fixture(scope="module")
def small_node():
    limits = ServingLimits(body_bytes=20_000, json_bytes=10_000, total_bytes=300_000)
    with served(limits) as node:
        yield node


def test_body_announced_too_large_is_refused_before_it_is_read(small_node):
    body, headers = binary_digits(digits(7))
    answer = small_node.http.post(DIGITS, content=body, headers=headers)
    assert answer.status_code == 413
    assert "20.0 KB" in error_of(answer)
    assert answer.headers["connection"] == "close"


def test_body_of_unknown_size_is_refused_when_it_has_become_too_large(small_node):
    answer = small_node.http.post(DIGITS, content=iter([b"x" * 1000] * 21))
    assert answer.status_code == 413


def test_body_that_fits_exactly_is_read(small_node):
    body, headers = binary_digits(digits(6))
    assert small_node.http.post(DIGITS, content=body, headers=headers).status_code == 200
    padded = json.dumps({"inputs": []}).encode().ljust(10_000)
    assert "inputs" in error_of(small_node.http.post(DIGITS, content=padded))


def test_too_much_json_is_refused(small_node):
    answer = small_node.http.post(DIGITS, content=b" " * 10_001)
    assert answer.status_code == 413
    assert "in binary" in error_of(answer)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_bomb_is_refused_when_it_has_become_too_large(small_node, pack):
    bomb = pack(bytes(10_000_000))
    assert len(bomb) < 20_000
    coding = "gzip" if pack is gzip.compress else "deflate"
    answer = small_node.http.post(DIGITS, content=bomb, headers={"Content-Encoding": coding})
    assert answer.status_code == 413
    assert "uncompressed" in error_of(answer)


def test_room_is_given_back_after_every_end(small_node):
    body, headers = binary_digits(digits(6))
    for _ in range(20):
        assert small_node.http.post(DIGITS, content=body, headers=headers).status_code == 200
        assert small_node.http.post(DIGITS, content=b"{" + b" " * 9000).status_code == 400
        assert small_node.http.post(DIGITS, content=b"x" * 20_000).status_code == 413


def test_no_room_beside_others_is_refused_until_there_is():
    body, headers = binary_digits(digits(6))
    limits = ServingLimits(body_bytes=30_000, json_bytes=10_000, total_bytes=30_000)
    with served(limits) as node, ThreadPoolExecutor(1) as threads:
        node.models["digits"].hold()
        first = threads.submit(node.http.post, DIGITS, content=body, headers=headers)
        assert soon(lambda: node.models["digits"].submitted)
        refused = node.http.post(DIGITS, content=body, headers=headers)
        node.models["digits"].release()
        assert first.result().status_code == 200
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert node.http.post(DIGITS, content=body, headers=headers).status_code == 200


def test_body_somewhat_too_large_is_passed_over_so_that_its_sender_hears_why():
    with (
        served(ServingLimits(body_bytes=MIB, json_bytes=MIB)) as node,
        triton.InferenceServerClient(node.address) as client,
    ):
        x = digits(1000)
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        with pytest.raises(InferenceServerException, match=r"1\.0 MB uncompressed") as refused:
            client.infer("digits", [tensor])
        assert refused.value.status() == "413"
        assert client.is_server_live()


@pytest.mark.parametrize("extra", range(9))
def test_values_in_binary_are_aligned_wherever_they_begin(node, extra):
    body, headers = binary_digits(digits(2), parameters={"note": "x" * extra})
    assert node.http.post(DIGITS, content=body, headers=headers).status_code == 200
    x = node.models["digits"].submitted[-1].inputs["x"]
    assert x.flags.aligned
    assert x.flags.c_contiguous
