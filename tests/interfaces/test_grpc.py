"""The protocol over gRPC with clients as they are: tritonclient, and grpc's own of health and reflection."""

from __future__ import annotations

import json
import logging
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from heinfer.errors import HeinferError, IntegrityError, RemoteProtocolError
from heinfer.processes import child_environment
from heinfer.wire import Address
from heinfer.wire.address import TransportError
from tests.interfaces.fakes import FakeModels, Notes, digits_model, expected, fake_models
from tests.parties import REPOSITORY
from tests.waiting import wait_for
from trusted_node.engine import DataError
from trusted_node.serving.grpc_calls import STREAM_WINDOW
from trusted_node.serving.grpc_service import GrpcServer
from trusted_node.serving.interface import Channel, ModelNotReadyError, Outcome, QueueFullError
from trusted_node.serving.limits import KIB, MIB, ServingLimits

LOOPBACK = Address("127.0.0.1", 0)
GENEROUS_S = 20.0


class Served:
    """A server of fake models, and what watches it."""

    def __init__(self, limits: ServingLimits | None = None, **options: Any) -> None:
        self.models = fake_models()
        self.notes = Notes()
        self.server = GrpcServer(LOOPBACK, self.models, limits, observer=self.notes, **options)
        self.url = str(self.server.address)
        self.client = triton.InferenceServerClient(self.url)
        self.channel = grpc.insecure_channel(self.url)
        self.stub = GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.server.stop(0)  # first: a client waits until its stream has ended
        self.client.close()
        self.channel.close()

    @property
    def digits(self) -> Any:
        return self.models["digits"]


@pytest.fixture
def served() -> Iterator[Served]:
    node = Served()
    yield node
    node.close()


def digits(samples: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((samples, 1, 28, 28), dtype=np.float32)


def wrapped(x: np.ndarray) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def fails(call: Callable[[], object], status: StatusCode) -> str:
    """Run a call of tritonclient that ends with a status; return what the client was told."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert caught.value.status() == str(status), caught.value
    return str(caught.value.message())


# What a client's README does.


def test_health_and_metadata(served: Served) -> None:
    client = served.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "2")
    assert not client.is_model_ready("unknown")
    metadata = client.get_server_metadata(as_json=True)
    assert metadata["name"] == "heinfer"
    assert "model_repository" in metadata["extensions"]
    model = client.get_model_metadata("digits")
    assert (model.name, list(model.versions)) == ("digits", ["1"])
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("x", "FP32", [-1, 1, 28, 28])]
    assert [(t.name, t.datatype, list(t.shape)) for t in model.outputs] == [("y", "FP32", [-1, 10])]
    config = client.get_model_config("digits").config
    assert config.max_batch_size == served.digits.max_samples
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("x", 11, [1, 28, 28])]
    assert config.HasField("dynamic_batching")


def test_infer_returns_what_the_model_answers(served: Served) -> None:
    x = digits(3)
    outputs = [triton.InferRequestedOutput("y")]
    result = served.client.infer("digits", wrapped(x), outputs=outputs, request_id="q-1")
    np.testing.assert_array_equal(result.as_numpy("y"), expected(x))
    assert result.get_response().id == "q-1"
    (query,) = served.digits.submitted
    assert query.channel is Channel.GRPC
    assert query.request_id == "q-1"
    assert query.traceparent == ""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    served.client.infer("digits", wrapped(x), headers={"traceparent": parent})
    assert served.digits.submitted[-1].traceparent == parent
    assert served.client.infer("digits", wrapped(x)).get_response().id == ""


def test_the_sum_and_difference_of_tritons_examples(served: Served) -> None:
    values = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), -1, np.int32)
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor, array in zip(inputs, values, strict=True):
        tensor.set_data_from_numpy(array)
    outputs = [triton.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    result = served.client.infer("simple", inputs, outputs=outputs, client_timeout=None, headers={"test": "1"})
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values[0] + values[1])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), values[0] - values[1])
    only = served.client.infer("simple", inputs, outputs=outputs[1:])
    assert only.as_numpy("OUTPUT0") is None
    np.testing.assert_array_equal(only.as_numpy("OUTPUT1"), values[0] - values[1])
    # The same with typed contents, as an example with the generated stubs sends them.
    request = service_pb2.ModelInferRequest(model_name="simple", model_version="1")
    for name, array in zip(("INPUT0", "INPUT1"), values, strict=True):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        tensor.contents.int_contents[:] = array.reshape(-1).tolist()
    request.outputs.add(name="OUTPUT0")
    (raw,) = served.stub.ModelInfer(request).raw_output_contents
    np.testing.assert_array_equal(np.frombuffer(raw, "<i4"), (values[0] + values[1])[0])


def test_infer_of_every_type_in_and_out(served: Served) -> None:
    plan = served.models["mixed"].plan
    values = {t.name: np.ones((2, *t.shape), t.dtype) for t in plan.inputs}
    model = served.client.get_model_metadata("mixed")
    inputs = []
    for tensor in model.inputs:
        inputs.append(triton.InferInput(tensor.name, [2, *tensor.shape[1:]], tensor.datatype))
        inputs[-1].set_data_from_numpy(values[tensor.name])
    result = served.client.infer("mixed", inputs)
    for name, array in values.items():
        found = result.as_numpy(f"o{name}")
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, ~array if array.dtype == bool else array + array.dtype.type(1))


def test_large_tensors_go_through_threads_and_arrive(served: Served) -> None:
    x = digits(64)  # 200 KB
    np.testing.assert_array_equal(served.client.infer("digits", wrapped(x)).as_numpy("y"), expected(x))


def test_async_infer_calls_back(served: Served) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    xs = [digits(seed=seed) for seed in range(20)]
    for number, x in enumerate(xs):
        served.client.async_infer(
            "digits", wrapped(x), lambda result, error: answers.put((result, error)), request_id=str(number)
        )
    for _ in xs:
        result, error = answers.get(timeout=GENEROUS_S)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), expected(xs[int(result.get_response().id)]))


def test_a_cancelled_call_cancels_the_query(served: Served) -> None:
    served.digits.hold()
    errors: queue.Queue[Any] = queue.Queue()
    call = served.client.async_infer("digits", wrapped(digits()), lambda result, error: errors.put(error))
    wait_for(lambda: served.digits.pending == 1, "the query")
    call.cancel()
    assert "CANCELLED" in str(errors.get(timeout=GENEROUS_S))
    wait_for(lambda: served.digits.pending == 0, "its end")
    served.digits.release()
    np.testing.assert_array_equal(served.client.infer("digits", wrapped(digits())).as_numpy("y"), expected(digits()))


def test_a_client_that_goes_away_cancels_its_queries(served: Served) -> None:
    served.digits.hold()
    client = triton.InferenceServerClient(served.url)
    for x in (digits(), digits(64)):
        client.async_infer("digits", wrapped(x), lambda result, error: None)
    wait_for(lambda: served.digits.pending == 2, "the queries")
    client.close()
    wait_for(lambda: served.digits.pending == 0, "their end")


def test_a_large_query_whose_client_leaves_while_it_is_submitted_is_cancelled(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    made: Future[Any] = Future()

    def submit(query: Any) -> Future[Any]:
        begun.set()
        assert goes_on.wait(GENEROUS_S)
        return made

    monkeypatch.setattr(served.digits, "submit", submit)
    ended = threading.Event()
    call = served.client.async_infer("digits", wrapped(digits(64)), lambda result, error: ended.set())
    assert begun.wait(GENEROUS_S)
    call.cancel()
    assert ended.wait(GENEROUS_S)
    wait_for(lambda: served.server._calls._held_bytes == 0, "the call's end in the node")
    goes_on.set()
    wait_for(made.cancelled, "the query's end")


def test_aio_client() -> None:
    """In a process of its own: grpc's event loops of one process get into each other's way."""
    node = Served()
    program = """
import asyncio, json, sys
import numpy as np
import tritonclient.grpc.aio as triton

async def main(url):
    async with triton.InferenceServerClient(url) as client:
        assert await client.is_server_live()
        x = np.full((1, 1, 28, 28), 0.5, np.float32)
        tensor = triton.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        results = await asyncio.gather(*(client.infer("digits", [tensor]) for _ in range(20)))
        async def requests():
            for number in range(5):
                yield {"model_name": "digits", "inputs": [tensor], "request_id": str(number)}
        ids = [result.get_response().id async for result, error in client.stream_infer(requests())]
        print(json.dumps([len(results), ids, results[-1].as_numpy("y").tolist()]))

asyncio.run(main(sys.argv[1]))
"""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, node.url],
            capture_output=True, text=True, timeout=60, env=child_environment(), cwd=REPOSITORY,
        )  # fmt: skip
    finally:
        node.close()
    assert done.returncode == 0, done.stderr
    x = np.full((1, 1, 28, 28), 0.5, np.float32)
    count, ids, found = json.loads(done.stdout)
    assert (count, ids) == (20, ["0", "1", "2", "3", "4"])
    np.testing.assert_array_equal(np.array(found, np.float32), expected(x))


# Streams.


class Stream:
    """tritonclient's stream; what comes back is queued."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._client = client
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(self, x: np.ndarray, number: int, **options: Any) -> None:
        self._client.async_stream_infer("digits", wrapped(x), request_id=str(number), **options)

    def receive(self) -> tuple[Any, Any]:
        return self._answers.get(timeout=GENEROUS_S)


def test_a_stream_answers_every_request_in_order(served: Served) -> None:
    stream = Stream(served.client)
    xs = [digits(1 + seed % 3, seed) for seed in range(3 * STREAM_WINDOW)]
    for number, x in enumerate(xs):
        stream.send(x, number, enable_empty_final_response=number == 1)
    for number, x in enumerate(xs):
        result, error = stream.receive()
        assert error is None
        response = result.get_response()
        assert response.id == str(number)
        assert ("triton_final_response" in response.parameters) == (number == 1)
        np.testing.assert_array_equal(result.as_numpy("y"), expected(x))
    served.client.stop_stream()


def test_requests_of_a_stream_wait_together_and_no_more_than_the_window(served: Served) -> None:
    served.digits.hold()
    stream = Stream(served.client)
    for number in range(2 * STREAM_WINDOW):
        stream.send(digits(), number)
    wait_for(lambda: served.digits.pending == STREAM_WINDOW, "the window")
    time.sleep(0.1)
    assert served.digits.pending == STREAM_WINDOW
    served.digits.release()
    assert [stream.receive()[0].get_response().id for _ in range(2 * STREAM_WINDOW)] == [
        str(number) for number in range(2 * STREAM_WINDOW)
    ]
    served.client.stop_stream()


def test_a_request_of_a_stream_that_fails_leaves_the_others(served: Served) -> None:
    requests = [request_for(digits(seed=n)) for n in range(3)]
    for number, request in enumerate(requests):
        request.id = str(number)
    requests[1].inputs[0].name = "z"
    answers = list(served.stub.ModelStreamInfer(iter(requests), timeout=GENEROUS_S))
    assert [a.infer_response.id for a in answers] == ["0", "1", "2"]
    assert [bool(a.error_message) for a in answers] == [False, True, False]
    assert answers[1].error_message == "input 'z' is unknown: expected ['x'], each once"


def test_a_stream_that_is_given_up_cancels_its_queries(served: Served) -> None:
    served.digits.hold()
    stream = Stream(served.client)
    for number in range(5):
        stream.send(digits(), number)
    wait_for(lambda: served.digits.pending == 5, "the queries")
    served.client.stop_stream(cancel_requests=True)
    wait_for(lambda: served.digits.pending == 0, "their end")


# Errors.


def request_for(x: np.ndarray) -> Any:
    request = service_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    request.raw_input_contents.append(x.tobytes())
    return request


def test_unknown_models_and_versions_are_not_found(served: Served) -> None:
    client = served.client
    text = fails(lambda: client.infer("unknown", wrapped(digits())), StatusCode.NOT_FOUND)
    assert text.startswith("Request for unknown model: ")
    fails(lambda: client.infer("digits", wrapped(digits()), model_version="2"), StatusCode.NOT_FOUND)
    fails(lambda: client.get_model_metadata("unknown"), StatusCode.NOT_FOUND)
    fails(lambda: client.get_model_config("digits", "2"), StatusCode.NOT_FOUND)
    fails(lambda: client.get_inference_statistics("unknown"), StatusCode.NOT_FOUND)


def test_inputs_that_do_not_fit_are_invalid_and_noted(served: Served) -> None:
    wrong = triton.InferInput("x", [1, 28, 28], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 28, 28), np.float32))
    text = fails(lambda: served.client.infer("digits", [wrong]), StatusCode.INVALID_ARGUMENT)
    assert text == "input 'x': expected shape ('samples', 1, 28, 28), found (1, 28, 28)"
    assert "expected inputs ['x'], found []" in fails(
        lambda: served.client.infer("digits", []), StatusCode.INVALID_ARGUMENT
    )
    not_finite = wrapped(np.full((1, 1, 28, 28), np.nan, np.float32))
    assert "NaN" in fails(lambda: served.client.infer("digits", not_finite), StatusCode.INVALID_ARGUMENT)
    # Of the others the model itself tells.
    assert [(q.model, q.channel, q.outcome) for q in served.notes.queries] == [("digits", Channel.GRPC, Outcome.INPUT)]
    assert not served.digits.submitted


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (DataError("the data made a value that is not finite"), StatusCode.INVALID_ARGUMENT),
        (RemoteProtocolError("no server is left to ask"), StatusCode.UNAVAILABLE),
        (ModelNotReadyError("it is being unloaded"), StatusCode.UNAVAILABLE),
        (IntegrityError("an answer was not honest"), StatusCode.DATA_LOSS),
        (HeinferError("a process died"), StatusCode.INTERNAL),
    ],
)
def test_a_failed_query_ends_with_its_status_and_reason(
    served: Served, failure: HeinferError, status: StatusCode
) -> None:
    served.digits.failure = failure
    assert fails(lambda: served.client.infer("digits", wrapped(digits())), status) == str(failure)
    served.digits.failure = None
    served.client.infer("digits", wrapped(digits()))


def test_foreign_exceptions_are_told_to_nobody(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.digits.failure = ValueError("activation was 12.375")
    with caplog.at_level(logging.DEBUG):
        text = fails(lambda: served.client.infer("digits", wrapped(digits())), StatusCode.INTERNAL)
        stream = list(served.stub.ModelStreamInfer(iter([request_for(digits())]), timeout=GENEROUS_S))
    assert text == "internal error, see the node's log"
    assert stream[0].error_message == text
    assert "ModelInfer ended by ValueError" in caplog.text
    assert "12.375" not in caplog.text


def test_a_query_that_its_model_dropped_is_unavailable(served: Served) -> None:
    served.digits.hold()
    errors: queue.Queue[Any] = queue.Queue()
    served.client.async_infer("digits", wrapped(digits()), lambda result, error: errors.put(error))
    wait_for(lambda: served.digits.pending == 1, "the query")
    assert served.digits._held[0][1].cancel()
    error = errors.get(timeout=GENEROUS_S)
    assert error.status() == str(StatusCode.UNAVAILABLE)
    assert "unloaded" in error.message()


def test_a_query_that_was_dropped_before_anybody_waited_is_unavailable(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: Future[Any] = Future()
    dropped.cancel()
    monkeypatch.setattr(served.digits, "submit", lambda query: dropped)
    assert "unloaded" in fails(lambda: served.client.infer("digits", wrapped(digits())), StatusCode.UNAVAILABLE)


def test_a_full_queue_is_unavailable(served: Served) -> None:
    served.digits.refusal = QueueFullError("40 queries wait already; ask again later")
    text = fails(lambda: served.client.infer("digits", wrapped(digits())), StatusCode.UNAVAILABLE)
    assert text == "40 queries wait already; ask again later"


def test_a_message_that_is_none_is_invalid_and_leaves_no_traceback(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for method in ("ModelInfer", "ModelMetadata"):
            call = served.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\x0a\xff\xff\xff\xff\xff")
            assert caught.value.code() is StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith("the request is no ")
    assert "Traceback" not in caplog.text


def test_methods_that_are_left_out_say_what_to_do(served: Served) -> None:
    client = served.client
    assert fails(client.get_log_settings, StatusCode.UNIMPLEMENTED).startswith("logs are the operator's")
    assert fails(client.get_trace_settings, StatusCode.UNIMPLEMENTED).startswith("traces are the operator's")
    for call in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status):
        assert fails(call, StatusCode.UNIMPLEMENTED).startswith("shared memory is not offered")
    with pytest.raises(grpc.RpcError) as caught:
        served.channel.unary_unary("/inference.GRPCInferenceService/Other")(b"")
    assert caught.value.code() is StatusCode.UNIMPLEMENTED


# Time.


def test_the_timeout_parameter_is_the_querys_deadline(served: Served) -> None:
    served.digits.delay_s = 30.0
    before = time.monotonic()
    text = fails(
        lambda: served.client.infer("digits", wrapped(digits()), timeout=150_000), StatusCode.DEADLINE_EXCEEDED
    )
    assert 0.15 <= time.monotonic() - before < 5
    assert "time of the query was over" in text
    assert 0.1 < served.digits.submitted[0].deadline - before < 5


def test_a_model_that_says_nothing_is_given_up_at_the_deadline(served: Served) -> None:
    served.digits.hold()
    fails(lambda: served.client.infer("digits", wrapped(digits()), timeout=100_000), StatusCode.DEADLINE_EXCEEDED)
    wait_for(lambda: served.digits.pending == 0, "its end")


def test_the_calls_deadline_is_the_querys_and_cancels_it(served: Served) -> None:
    served.digits.hold()
    before = time.monotonic()
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        served.client.infer("digits", wrapped(digits()), client_timeout=0.2)
    assert 0 < served.digits.submitted[0].deadline - before < 1
    wait_for(lambda: served.digits.pending == 0, "its end")


def test_a_query_without_a_time_has_the_nodes() -> None:
    node = Served(ServingLimits(query_s=7))
    try:
        before = time.monotonic()
        node.client.infer("digits", wrapped(digits()))
        node.client.infer("digits", wrapped(digits()), timeout=100_000_000)
        assert all(6 < query.deadline - before < 17 for query in node.digits.submitted)
        assert len(node.digits.submitted) == 2
    finally:
        node.close()


# Sizes.


def test_a_message_over_the_limit_is_refused_and_one_at_it_is_served() -> None:
    size = len(request_for(digits(8)).SerializeToString())
    node = Served(ServingLimits(body_bytes=size, json_bytes=KIB))
    try:
        node.client.infer("digits", wrapped(digits(8)))
        text = fails(lambda: node.client.infer("digits", wrapped(digits(9))), StatusCode.RESOURCE_EXHAUSTED)
        assert "larger than max" in text
    finally:
        node.close()


def test_more_requests_than_there_is_memory_for_are_refused_until_some_end() -> None:
    node = Served(ServingLimits(body_bytes=8 * KIB, json_bytes=KIB, total_bytes=8 * KIB))
    try:
        node.digits.hold()
        answers: queue.Queue[Any] = queue.Queue()
        for _ in range(2):  # 3.2 KB each
            node.client.async_infer("digits", wrapped(digits()), lambda result, error: answers.put(error))
        wait_for(lambda: node.digits.pending == 2, "the queries")
        text = fails(lambda: node.client.infer("digits", wrapped(digits())), StatusCode.UNAVAILABLE)
        assert "as many requests as it has memory for" in text
        node.digits.release()
        assert [answers.get(timeout=GENEROUS_S) for _ in range(2)] == [None, None]
        wait_for(lambda: node.server._calls._held_bytes == 0, "all bytes given back")
        node.client.infer("digits", wrapped(digits()))
    finally:
        node.close()


def test_more_calls_than_the_limit_are_refused() -> None:
    node = Served(ServingLimits(connections=3))
    try:
        node.digits.hold()
        answers: queue.Queue[Any] = queue.Queue()
        for _ in range(10):
            node.client.async_infer("digits", wrapped(digits()), lambda result, error: answers.put(error))
        refused = [answers.get(timeout=GENEROUS_S) for _ in range(7)]
        assert {error.status() for error in refused} == {str(StatusCode.RESOURCE_EXHAUSTED)}
        node.digits.release()
        assert [answers.get(timeout=GENEROUS_S) for _ in range(3)] == [None] * 3
    finally:
        node.close()


def test_compressed_requests_are_refused_before_they_are_unpacked(served: Served) -> None:
    bomb = bytes(8 * MIB)
    call = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as caught:
        call(bomb, compression=grpc.Compression.Gzip)
    assert caught.value.code() is StatusCode.UNIMPLEMENTED
    assert "gzip" in caught.value.details()
    fails(
        lambda: served.client.infer("digits", wrapped(digits()), compression_algorithm="gzip"),
        StatusCode.UNIMPLEMENTED,
    )
    assert not served.digits.submitted


def test_a_hundred_waiting_calls_hold_no_threads(served: Served) -> None:
    served.digits.hold()
    before = threading.active_count()
    answers: queue.Queue[Any] = queue.Queue()
    for _ in range(100):
        served.client.async_infer("digits", wrapped(digits()), lambda result, error: answers.put(error))
    wait_for(lambda: served.digits.pending == 100, "the queries")
    assert threading.active_count() - before < 10
    served.digits.release()
    assert [answers.get(timeout=GENEROUS_S) for _ in range(100)] == [None] * 100


# The repository.


def test_models_are_listed_loaded_and_unloaded(served: Served) -> None:
    client = served.client

    def index() -> dict[str, str]:
        return {entry.name: entry.state for entry in client.get_model_repository_index().models}

    assert index() == {"digits": "READY", "mixed": "READY", "simple": "READY"}
    client.unload_model("digits")
    assert index() == {"digits": "UNAVAILABLE", "mixed": "READY", "simple": "READY"}
    ready = served.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True))
    assert [entry.name for entry in ready.models] == ["mixed", "simple"]
    assert not client.is_model_ready("digits")
    assert not client.is_server_ready()
    assert client.is_server_live()
    text = fails(lambda: client.infer("digits", wrapped(digits())), StatusCode.UNAVAILABLE)
    assert "not loaded" in text
    client.load_model("digits")
    assert client.is_server_ready()
    client.infer("digits", wrapped(digits()))


def test_what_can_not_be_loaded_says_why(served: Served) -> None:
    client = served.client
    assert fails(lambda: client.load_model("unknown"), StatusCode.NOT_FOUND).startswith("failed to load 'unknown': ")
    fails(lambda: client.unload_model("unknown"), StatusCode.NOT_FOUND)
    fails(lambda: client.load_model("digits", config='{"max_batch_size": 1}'), StatusCode.INVALID_ARGUMENT)
    served.models.load_failure = HeinferError("plan.json is damaged")
    assert fails(lambda: client.load_model("digits"), StatusCode.INTERNAL) == (
        "failed to load 'digits': plan.json is damaged"
    )
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(repository_name="other"))
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT


def test_a_node_that_lets_nobody_change_models_says_so() -> None:
    node = Served(allow_control=False)
    try:
        fails(lambda: node.client.load_model("digits"), StatusCode.PERMISSION_DENIED)
        fails(lambda: node.client.unload_model("digits"), StatusCode.PERMISSION_DENIED)
        assert node.client.is_model_ready("digits")
    finally:
        node.close()


def test_calls_are_answered_while_a_model_loads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(served.models, "load", lambda name: goes_on.wait(GENEROUS_S))
    loading = served.stub.RepositoryModelLoad.future(service_pb2.RepositoryModelLoadRequest(model_name="mixed"))
    served.client.infer("digits", wrapped(digits()))
    assert not loading.done()
    goes_on.set()
    loading.result(GENEROUS_S)


def test_statistics_count_queries_and_samples(served: Served) -> None:
    served.client.infer("digits", wrapped(digits(3)))
    served.client.infer("digits", wrapped(digits(2)))
    served.digits.failure = DataError("no")
    fails(lambda: served.client.infer("digits", wrapped(digits())), StatusCode.INVALID_ARGUMENT)
    (stats,) = served.client.get_inference_statistics("digits").model_stats
    assert (stats.name, stats.version, stats.inference_count) == ("digits", "1", 5)
    assert (stats.inference_stats.success.count, stats.inference_stats.fail.count) == (2, 1)
    assert stats.inference_stats.success.ns > 0
    assert [s.name for s in served.client.get_inference_statistics().model_stats] == ["digits", "mixed", "simple"]


# Health and reflection.


def test_health_follows_models(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

    def status(service: str) -> int:
        return int(health.Check(health_pb2.HealthCheckRequest(service=service)).status)

    names = ("", "inference.GRPCInferenceService", "digits", "mixed")
    assert [status(name) for name in names] == [serving] * 4
    served.client.unload_model("digits")
    assert [status(name) for name in names] == [not_serving, not_serving, not_serving, serving]
    with pytest.raises(grpc.RpcError) as caught:
        status("unknown")
    assert caught.value.code() is StatusCode.NOT_FOUND


def test_watched_health_tells_of_every_change(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    kinds = health_pb2.HealthCheckResponse
    watched = health.Watch(health_pb2.HealthCheckRequest(service="digits"), timeout=GENEROUS_S)
    assert next(watched).status == kinds.SERVING
    served.client.unload_model("digits")
    assert next(watched).status == kinds.NOT_SERVING
    served.client.load_model("digits")
    assert next(watched).status == kinds.SERVING
    watched.cancel()
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="unknown"), timeout=GENEROUS_S)
    assert next(unknown).status == kinds.SERVICE_UNKNOWN
    unknown.cancel()


def test_who_watches_a_node_that_stops_is_told_and_does_not_hold_it_up(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=GENEROUS_S)
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    started = time.monotonic()
    served.server.stop(GENEROUS_S)
    assert time.monotonic() - started < GENEROUS_S / 2
    assert [answer.status for answer in watched] == [health_pb2.HealthCheckResponse.NOT_SERVING]


def test_reflection_describes_what_is_served(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="unknown.Service"),
    ]
    listed, ours, health, unknown = stub.ServerReflectionInfo(iter(questions), timeout=GENEROUS_S)
    assert {service.name for service in listed.list_services_response.service} == {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert b"ModelInferRequest" in ours.file_descriptor_response.file_descriptor_proto[0]
    assert b"HealthCheckRequest" in health.file_descriptor_response.file_descriptor_proto[0]
    assert unknown.error_response.error_code == StatusCode.NOT_FOUND.value[0]


# Starting and stopping.


def test_a_port_in_use_is_refused(served: Served) -> None:
    with pytest.raises(TransportError, match="port is in use") as caught:
        GrpcServer(served.server.address, FakeModels(digits_model()))
    assert re.search(r"127\.0\.0\.1:\d+", str(caught.value))


def test_stopping_lets_running_queries_end_within_the_grace(served: Served) -> None:
    served.digits.delay_s = 0.4
    answers: queue.Queue[Any] = queue.Queue()
    served.client.async_infer("digits", wrapped(digits()), lambda result, error: answers.put(error))
    wait_for(lambda: served.digits.pending == 1, "the query")
    served.server.stop(GENEROUS_S)
    assert answers.get(timeout=GENEROUS_S) is None
    assert not served.server._thread.is_alive()


def test_stopping_without_grace_cancels_what_runs(served: Served) -> None:
    served.digits.hold()
    answers: queue.Queue[Any] = queue.Queue()
    served.client.async_infer("digits", wrapped(digits()), lambda result, error: answers.put(error))
    wait_for(lambda: served.digits.pending == 1, "the query")
    started = time.monotonic()
    served.server.stop(0.1)
    assert time.monotonic() - started < 5
    assert answers.get(timeout=GENEROUS_S) is not None
    wait_for(lambda: served.digits.pending == 0, "its end")
    served.server.stop(0)
