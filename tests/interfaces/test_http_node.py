"""A server and a node as processes of the command line, asked over HTTP, beside onnxruntime."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import onnxruntime
import pytest
import tritonclient.http as triton

from heinfer.plan import read_plan
from tests.interfaces.http_serving import error_of
from tests.parties import Process

SAMPLES = 40
CLIENTS = 8


@pytest.fixture
def node(dense_node: Process) -> str:
    """Where a node with the small dense model serves HTTP."""
    return dense_node.addresses["http"]


def values(samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(samples, 3)).astype(np.float32)


def plain(dense_bundle: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(dense_bundle.parent / "dense.onnx", providers=["CPUExecutionProvider"])
    answer: np.ndarray = session.run(["y"], {"x": x})[0]
    return answer


def tolerance(dense_bundle: Path, x: np.ndarray) -> float:
    """The blocks' bounds at unit inputs, carried through this small network, whose gain is below 100, and rounding."""
    plan, _ = read_plan(dense_bundle)
    return 2 * 100 * max(float(np.abs(x).max()), 1.0) * sum(block.unit_bound for block in plan.blocks)


def ask(address: str, x: np.ndarray) -> np.ndarray:
    with triton.InferenceServerClient(address) as client:
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        answer: np.ndarray = client.infer("dense", [tensor]).as_numpy("y")
        return answer


def test_many_clients_get_what_the_model_answers(node: str, dense_bundle: Path) -> None:
    queries = [values(1 + seed % 3, seed) for seed in range(SAMPLES)]
    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = list(threads.map(lambda x: ask(node, x), queries))
    for x, found in zip(queries, answers, strict=True):
        assert np.abs(found - plain(dense_bundle, x)).max() <= tolerance(dense_bundle, x)


def test_json_is_answered_like_binary(node: str, dense_bundle: Path) -> None:
    x = values(2, 7)
    query = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": x.tolist()}]}
    answer = httpx.post(f"http://{node}/v2/models/dense/infer", json=query, timeout=30)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("y", "FP32", [2, 2])
    found = np.float32(output["data"]).reshape(2, 2)
    assert np.abs(found - plain(dense_bundle, x)).max() <= tolerance(dense_bundle, x)


def test_wrong_query_is_refused_and_the_next_one_answered(node: str, dense_bundle: Path) -> None:
    query = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 1e39]}]}
    answer = httpx.post(f"http://{node}/v2/models/dense/infer", json=query, timeout=30)
    assert answer.status_code == 400
    assert "infinity" in error_of(answer)
    x = values(1, 8)
    assert np.abs(ask(node, x) - plain(dense_bundle, x)).max() <= tolerance(dense_bundle, x)


def test_model_is_unloaded_and_loaded_again(node: str, dense_bundle: Path) -> None:
    with triton.InferenceServerClient(node, network_timeout=60) as client:
        assert client.is_server_ready()
        client.unload_model("dense")
        assert not client.is_model_ready("dense")
        client.load_model("dense")
        assert client.is_model_ready("dense")
    x = values(1, 9)
    assert np.abs(ask(node, x) - plain(dense_bundle, x)).max() <= tolerance(dense_bundle, x)
