"""A server and a node as processes of the command line, and tritonclient beside onnxruntime."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from heinfer.plan import read_plan
from tests.parties import Process

SAMPLES = 40
CLIENTS = 8


@pytest.fixture
def node(dense_node: Process) -> str:
    """Where a node with the small dense model serves gRPC."""
    return dense_node.addresses["grpc"]


def wrapped(x: np.ndarray) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def plain(dense_bundle: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(dense_bundle.parent / "dense.onnx", providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


def tolerance(dense_bundle: Path, x: np.ndarray) -> float:
    """The blocks' bounds at unit inputs, carried through this small network, whose gain is below 100, and rounding."""
    plan, _ = read_plan(dense_bundle)
    return 2 * 100 * max(float(np.abs(x).max()), 1.0) * sum(block.unit_bound for block in plan.blocks)


def test_many_clients_get_what_the_model_answers(node: str, dense_bundle: Path) -> None:
    with triton.InferenceServerClient(node) as client:
        (entry,) = client.get_model_repository_index().models
        assert entry.state == "READY"
        assert client.is_model_ready(entry.name)
        model = client.get_model_metadata(entry.name)
        assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("x", "FP32", [-1, 3])]
        assert [(t.name, t.datatype, list(t.shape)) for t in model.outputs] == [("y", "FP32", [-1, 2])]
    failures: list[BaseException] = []
    answered = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with triton.InferenceServerClient(node) as client:
                for number in range(SAMPLES // CLIENTS):
                    x = rng.normal(size=(1 + (seed + number) % 3, 3)).astype(np.float32)
                    y = client.infer(entry.name, wrapped(x), request_id=f"{seed}.{number}").as_numpy("y")
                    assert np.abs(y - plain(dense_bundle, x)).max() <= tolerance(dense_bundle, x)
                    answered.append(len(y))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(answered) == SAMPLES


def test_health_and_errors_of_a_node(node: str) -> None:
    with grpc.insecure_channel(node) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    with triton.InferenceServerClient(node) as client:
        (entry,) = client.get_model_repository_index().models
        x = np.full((1, 3), np.inf, np.float32)
        with pytest.raises(InferenceServerException, match="NaN or infinity") as caught:
            client.infer(entry.name, wrapped(x))
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException, match="expected shape"):
            client.infer(entry.name, wrapped(np.zeros((1, 4), np.float32)))


def test_a_model_is_unloaded_and_loaded_again(node: str, dense_bundle: Path) -> None:
    x = np.ones((1, 3), np.float32)
    with triton.InferenceServerClient(node) as client:
        (entry,) = client.get_model_repository_index().models
        client.unload_model(entry.name)
        assert not client.is_model_ready(entry.name)
        with pytest.raises(InferenceServerException) as caught:
            client.infer(entry.name, wrapped(x))
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        client.load_model(entry.name)
        y = client.infer(entry.name, wrapped(x)).as_numpy("y")
    assert np.abs(y - plain(dense_bundle, x)).max() <= tolerance(dense_bundle, x)
