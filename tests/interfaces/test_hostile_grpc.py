"""gRPC clients that mean harm, or come when the node is full: what they are told, and what they cost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from heinfer.errors import InputError
from heinfer.wire import Address, TokenFile
from heinfer.wire.tokens import make_token, token_line
from tests.interfaces.fakes import FakeModels, digits_model, fake_models
from trusted_node.serving import grpc_health
from trusted_node.serving.grpc_messages import structure_bytes
from trusted_node.serving.grpc_service import GrpcServer
from trusted_node.serving.interface import Channel
from trusted_node.serving.interfaces import Interfaces, InterfaceSettings
from trusted_node.serving.limits import JSON_WEIGHT, KIB, MIB, ServingLimits

LOOPBACK = Address("127.0.0.1", 0)
INFER = "/inference.GRPCInferenceService/ModelInfer"
CHECK = "/grpc.health.v1.Health/Check"
TIMEOUT_S = 20.0
#: An input of no name, which is two bytes.
EMPTY_INPUT = b"\x2a\x00"


@contextmanager
def serving(
    models: FakeModels | None = None, tokens: TokenFile | None = None, **limits: Any
) -> Iterator[tuple[GrpcServer, grpc.Channel]]:
    server = GrpcServer(LOOPBACK, models or fake_models(), ServingLimits(**limits), tokens=tokens)
    try:
        with grpc.insecure_channel(str(server.address)) as channel:
            yield server, channel
    finally:
        server.stop(0)


def request(samples: int = 1, raw: bool = True) -> Any:
    x = np.zeros((samples, 1, 28, 28), np.float32)
    found = service_pb2.ModelInferRequest(model_name="digits")
    tensor = found.inputs.add(name="x", datatype="FP32", shape=x.shape)
    if raw:
        found.raw_input_contents.append(x.tobytes())
    else:
        tensor.contents.fp32_contents.extend(x.ravel().tolist())
    return found


def status_of(call: Any) -> StatusCode:
    """How a call ends."""
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value.code()


@contextmanager
def silent(channel: grpc.Channel, *methods: str) -> Iterator[list[Any]]:
    """Calls whose messages do not come, as long as the block runs."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(TIMEOUT_S)
        yield from ()

    calls = [channel.stream_unary(method).future(nothing()) for method in methods]
    try:
        yield calls
    finally:
        over.set()
        for call in calls:
            call.cancel()


def test_a_query_for_the_only_model_is_refused_before_its_message_while_the_queue_is_full() -> None:
    models = FakeModels(digits_model())
    models["digits"].capacity = 0
    with serving(models) as (_, channel), silent(channel, INFER) as [call]:
        assert call.code() is StatusCode.UNAVAILABLE  # though it has said nothing yet
        assert [channel for channel, _ in models["digits"].turned_away] == [Channel.GRPC]
        models["digits"].capacity = 1
        assert GRPCInferenceServiceStub(channel).ModelInfer(request()).model_name == "digits"


def test_a_query_for_one_of_several_models_is_refused_before_its_tensors_while_the_queue_is_full() -> None:
    models = fake_models()
    models["digits"].capacity = 0
    damaged = request()
    damaged.raw_input_contents[0] = b"short"
    damaged.id = "early"
    with serving(models) as (_, channel):
        stub = GRPCInferenceServiceStub(channel)
        assert status_of(lambda: stub.ModelInfer(damaged)) is StatusCode.UNAVAILABLE
        assert models["digits"].turned_away == [(Channel.GRPC, "early")]
        models["digits"].capacity = 1
        assert status_of(lambda: stub.ModelInfer(damaged)) is StatusCode.INVALID_ARGUMENT


def test_calls_whose_message_does_not_come_are_ended() -> None:
    ready = "/inference.GRPCInferenceService/ServerReady"
    with serving(body_s=0.1, query_s=0.2, header_s=0.1) as (_, channel), silent(channel, ready, INFER, CHECK) as calls:
        ends = [call.code() for call in calls]
    assert ends == [StatusCode.DEADLINE_EXCEEDED, StatusCode.DEADLINE_EXCEEDED, StatusCode.INVALID_ARGUMENT]


def test_strangers_who_ask_for_health_take_no_places_that_clients_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_health, "PROBERS", 3)
    (tmp_path / "tokens").write_text(token_line(token := make_token(), "ward"))
    live = "/inference.GRPCInferenceService/ServerLive"
    with serving(tokens=TokenFile(tmp_path / "tokens"), connections=8) as (_, channel):
        health, stub = health_pb2_grpc.HealthStub(channel), GRPCInferenceServiceStub(channel)
        watching = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        assert [next(call).status for call in watching] == [health_pb2.HealthCheckResponse.SERVING] * 3
        for _ in range(9):
            more = health.Watch(health_pb2.HealthCheckRequest())
            assert status_of(lambda more=more: next(more)) is StatusCode.RESOURCE_EXHAUSTED
        with silent(channel, *9 * [live]) as calls:  # nobody waits for what these have to say
            assert [call.code() for call in calls] == 9 * [StatusCode.OK]
        known = [("authorization", f"Bearer {token}")]
        assert stub.ModelInfer(request(), metadata=known).model_name == "digits"
        watching[0].cancel()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with suppress(grpc.RpcError):
                assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
                break
            assert time.monotonic() < deadline


def test_connections_beyond_the_limit_are_closed() -> None:
    with serving(connections=2) as (server, _), ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_connection(server.address.endpoint, TIMEOUT_S)) for _ in range(6)]
        closed = sum(connection.recv(1) == b"" for connection in sockets)  # the others get grpc's settings
    assert closed == 4


def test_what_is_not_raw_is_counted_without_being_read() -> None:
    small = request()
    assert structure_bytes(small.SerializeToString()) == len(small.SerializeToString()) - 4 * 784
    typed = request(raw=False).SerializeToString()
    assert structure_bytes(typed) == len(typed)
    assert structure_bytes(b"") == 0
    for damaged in (b"\x3a", b"\x3a\xff", b"\x3a\x7f\x00", b"\xff" * 30, b"\x3a" + b"\xff" * 9 + b"\x01", b"\x08\x01"):
        assert 0 <= structure_bytes(damaged) <= len(damaged)
    with pytest.raises(InputError, match="fields"):
        structure_bytes(EMPTY_INPUT * 20_000)


def test_a_message_that_would_take_many_times_its_size_is_refused_unread() -> None:
    limits = {"body_bytes": 4 * MIB, "json_bytes": 64 * KIB, "total_bytes": 4 * MIB}
    with serving(**limits) as (server, channel):
        stub = GRPCInferenceServiceStub(channel)
        assert status_of(lambda: channel.unary_unary(INFER)(EMPTY_INPUT * MIB)) is StatusCode.INVALID_ARGUMENT
        assert status_of(lambda: stub.ModelInfer(request(64, raw=False))) is StatusCode.INVALID_ARGUMENT
        [answer] = stub.ModelStreamInfer(iter([request(64, raw=False)]))
        assert "raw_input_contents" in answer.error_message
        assert stub.ModelInfer(request(64)).model_name == "digits"
        assert stub.ModelInfer(request(1, raw=False)).model_name == "digits"
        assert server._calls._held_bytes == 0


def test_what_is_not_raw_counts_many_times_in_the_room_for_all() -> None:
    typed = request(16, raw=False)
    size = typed.ByteSize()
    with serving(body_bytes=MIB, json_bytes=MIB, total_bytes=JSON_WEIGHT * size) as (_, channel):
        stub = GRPCInferenceServiceStub(channel)
        assert status_of(lambda: stub.ModelInfer(typed)) is StatusCode.UNAVAILABLE
        assert stub.ModelInfer(request(16)).model_name == "digits"


def test_grpc_has_the_nodes_limits() -> None:
    ways_in = Interfaces(fake_models(), "digits", InterfaceSettings(LOOPBACK, grpc=LOOPBACK, memory=32 * MIB))
    try:
        with grpc.insecure_channel(str(ways_in.open["grpc"].address)) as channel:
            infer = channel.unary_unary(INFER)
            assert status_of(lambda: infer(bytes(4 * MIB))) is StatusCode.INVALID_ARGUMENT
            assert status_of(lambda: infer(bytes(4 * MIB + 1))) is StatusCode.RESOURCE_EXHAUSTED
    finally:
        ways_in.stop(0)
