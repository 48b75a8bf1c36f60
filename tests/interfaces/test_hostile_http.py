"""HTTP clients that mean harm, or come when the node is full: what they are told, and what they cost."""

from __future__ import annotations

import gzip
import json
import os
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from heinfer.errors import InputError, ParameterError
from heinfer.wire import Address
from tests.interfaces.fakes import fake_models
from tests.interfaces.http_serving import DIGITS, LOOPBACK, Served, binary_digits, digits, served
from tests.waiting import soon
from trusted_node.serving.http_body import Room, Share, decompress
from trusted_node.serving.http_server import HttpServer
from trusted_node.serving.interface import Channel
from trusted_node.serving.interfaces import Interfaces, InterfaceSettings
from trusted_node.serving.limits import JSON_WEIGHT, MIB, ServingLimits
from trusted_node.serving.request_models import InferRequest, read_json

CAPACITY = 1000


@pytest.fixture(scope="module")
def node() -> Iterator[Served]:
    with served(ServingLimits(body_bytes=20_000, json_bytes=10_000, total_bytes=300_000)) as node:
        yield node


@contextmanager
def connected(address: Address) -> Iterator[Any]:
    """A connection, as a file of bytes in both directions."""
    with socket.create_connection(address.endpoint, timeout=20) as connection, connection.makefile("rwb") as file:
        yield file


def head(node: Served, *headers: str) -> bytes:
    return "\r\n".join([f"POST {DIGITS} HTTP/1.1", f"Host: {node.address}", *headers, "", ""]).encode()


def say(file: Any, content: bytes) -> None:
    file.write(content)
    file.flush()


def hear(file: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Read an answer: its status, headers and JSON."""
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().decode().strip()) != "":
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    return status, headers, json.loads(file.read(int(headers["content-length"])))


def test_a_body_whose_end_is_said_twice_is_refused_and_its_connection_closed(node: Served) -> None:
    """A body in chunks that announces one byte would have no bound, and a proxy may see another request behind it."""
    with connected(node.server.address) as file:
        say(file, head(node, "Content-Length: 1", "Transfer-Encoding: chunked"))
        status, headers, answer = hear(file)
    assert status == 400
    assert "Transfer-Encoding" in answer["error"]
    assert headers["connection"] == "close"


def test_a_query_that_comes_when_the_queue_is_full_is_refused_before_its_body(node: Served) -> None:
    body, headers = binary_digits(digits(1))
    model = node.models["digits"]
    announced = [f"{name}: {value}" for name, value in headers.items()]
    with connected(node.server.address) as file:
        model.capacity = 0
        try:
            say(file, head(node, f"Content-Length: {len(body)}", "X-Request-Id: early", *announced))
            status, said, answer = hear(file)  # though no byte of the body was sent
        finally:
            model.capacity = CAPACITY
        assert (status, said["retry-after"]) == (503, "1")
        assert "wait already" in answer["error"]
        assert model.turned_away[-1] == (Channel.HTTP, "early")
        say(file, body)  # nobody reads it, and the connection goes on
        say(file, head(node, f"Content-Length: {len(body)}", *announced) + body)
        assert hear(file)[0] == 200
    counts = node.http.get("/v2/models/digits/stats").json()["model_stats"][0]["inference_stats"]
    assert (counts["fail"]["count"], counts["success"]["count"]) == (1, 1)


def test_who_reads_no_answer_is_cut_off_while_more_of_it_waits() -> None:
    ended = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            await send({"type": "http.response.body", "body": bytes(16 * MIB), "more_body": True})
        ended.append(scope["path"])

    server = HttpServer(LOOPBACK, answer, limits=ServingLimits(idle_s=0.1))
    try:
        with connected(server.address) as file:
            say(file, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert soon(lambda: ended)  # what is sent to nobody does not wait
    finally:
        server.stop(0)


def test_a_coding_is_undone_without_further_copies_of_the_body() -> None:
    size = 8 * MIB
    body = gzip.compress(os.urandom(size), 0)
    limits = ServingLimits()
    tracemalloc.start()
    try:
        assert len(decompress(body, "gzip", limits, Share(Room(limits)))) == size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.8 * size


def test_what_follows_a_coded_body_by_far_is_refused_too() -> None:
    limits = ServingLimits()
    with pytest.raises(InputError, match="one whole gzip stream"):
        decompress(gzip.compress(b"{}") + bytes(3 * MIB), "gzip", limits, Share(Room(limits)))


@pytest.mark.parametrize("value", ["0", "0.5", "300", "[]", "{}", '"ab"', "[0]"])
def test_json_takes_no_more_memory_than_it_is_counted_for(value: str) -> None:
    data = ",".join([value] * (200_000 // (len(value) + 1)))
    body = f'{{"inputs":[{{"name":"x","shape":[1],"datatype":"FP32","data":[{data}]}}]}}'.encode()
    tracemalloc.start()
    try:
        request = read_json(InferRequest, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert request.inputs
    assert peak < JSON_WEIGHT * len(body)


def test_limits_fit_a_share_of_memory_and_say_when_it_is_too_small() -> None:
    for memory in (16 * MIB, 100 * MIB, 3000 * MIB):
        limits = ServingLimits.within(memory)
        assert limits.total_bytes == memory
        assert limits.json_bytes * (1 + JSON_WEIGHT) < memory
        assert limits.body_bytes <= memory // 4
    with pytest.raises(ParameterError, match="--memory"):
        ServingLimits.within(MIB)


def test_every_way_in_has_its_part_of_the_nodes_memory() -> None:
    settings = InterfaceSettings(LOOPBACK, http=LOOPBACK, grpc=LOOPBACK, page=True, memory=64 * MIB)
    assert settings.part == 16 * MIB
    assert InterfaceSettings(LOOPBACK, memory=64 * MIB).part == 64 * MIB
    with pytest.raises(ParameterError, match="--memory"):
        InterfaceSettings(LOOPBACK, grpc=LOOPBACK, memory=4 * MIB).check()


def test_http_and_the_page_have_the_nodes_limits() -> None:
    models = fake_models()
    settings = InterfaceSettings(LOOPBACK, http=LOOPBACK, page=True, memory=48 * MIB)
    ways_in = Interfaces(models, "digits", settings)
    try:
        address = ways_in.open["http"].address
        for path, more, largest in ((DIGITS, (), 4 * MIB), ("/page/infer", ("Sec-Fetch-Site: same-origin",), 300_000)):
            lines = [f"POST {path} HTTP/1.1", f"Host: {address}", f"Content-Length: {largest + 1}", *more]
            with connected(address) as file:
                say(file, "\r\n".join([*lines, "Content-Type: application/json", "Expect: 1", "", ""]).encode())
                assert hear(file)[0] == 413
    finally:
        ways_in.stop(0)
    assert not models["digits"].submitted
