"""tritonclient over HTTP against the node: everything that it offers and a node has."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.interfaces.fakes import MIXED, expected
from tests.interfaces.http_serving import digits, served
from trusted_node.serving.datatypes import datatype_of


@pytest.fixture(scope="module")
def node():
    with served() as node:
        yield node


@pytest.fixture(scope="module")
def client(node):
    with triton.InferenceServerClient(node.address, concurrency=4) as client:
        yield client


def image_input(x, binary=True):
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary)
    return tensor


def test_health_of_a_ready_node_is_good(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "2")
    assert not client.is_model_ready("unheard-of")


def test_metadata_name_node_and_tensors_with_a_free_batch(client):
    server = client.get_server_metadata()
    assert server["name"] == "heinfer"
    assert {"binary_tensor_data", "model_repository"} <= set(server["extensions"])
    assert client.get_model_metadata("digits", "1") == {
        "name": "digits",
        "versions": ["1"],
        "platform": "heinfer_plan",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1, 28, 28]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 10]}],
    }


def test_configuration_is_what_a_node_does(client):
    configuration = client.get_model_config("digits")
    assert configuration["max_batch_size"] == 64
    assert configuration["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 28, 28]}]
    assert configuration["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [10]}]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer_json_and_binary_each_way_returns_the_models_values(client, binary_in, binary_out):
    x = digits(3)
    outputs = [triton.InferRequestedOutput("y", binary_data=binary_out)]
    result = client.infer("digits", [image_input(x, binary_in)], outputs=outputs, request_id="visit 7")
    np.testing.assert_array_equal(result.as_numpy("y"), expected(x))
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("digits", "1", "visit 7")
    assert ("data" in result.get_output("y")) is not binary_out


@pytest.mark.parametrize("up", ["gzip", "deflate", None])
@pytest.mark.parametrize("down", ["gzip", "deflate", None])
def test_infer_compressed_each_way_returns_the_models_values(client, up, down):
    x = digits(40)
    result = client.infer(
        "digits", [image_input(x)], request_compression_algorithm=up, response_compression_algorithm=down
    )
    np.testing.assert_array_equal(result.as_numpy("y"), expected(x))


def test_large_bodies_take_the_way_through_threads(client):
    x = digits(64)
    assert x.nbytes > 64 * 1024
    for up in (None, "gzip"):
        result = client.infer("digits", [image_input(x)], request_compression_algorithm=up)
        np.testing.assert_array_equal(result.as_numpy("y"), expected(x))


def values_of(dtype):
    values = {"b": [[0, 1, 1]], "f": [[-1.5, 0, 2.25]], "i": [[-7, 0, 100]], "u": [[0, 7, 200]]}
    return np.array([values[np.dtype(dtype).kind] * 2] * 2).astype(dtype)


@pytest.mark.parametrize("binary", [True, False])
def test_infer_every_element_type_arrives_as_it_was(client, binary):
    inputs, arrays = [], {}
    for name, dtype in MIXED.items():
        arrays[name] = values_of(dtype)
        inputs.append(triton.InferInput(name, [2, 2, 3], datatype_of(dtype)))
        inputs[-1].set_data_from_numpy(arrays[name], binary_data=binary)
    outputs = [triton.InferRequestedOutput(f"o{name}", binary_data=binary) for name in MIXED]
    result = client.infer("mixed", inputs, outputs=outputs)
    for name, x in arrays.items():
        y = result.as_numpy(f"o{name}")
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, ~x if x.dtype == bool else x + x.dtype.type(1))


def test_infer_some_outputs_only_returns_these_in_that_order(client):
    first, second = np.arange(16, dtype=np.int32)[None], np.full((1, 16), -1, np.int32)
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    inputs[0].set_data_from_numpy(first, binary_data=False)
    inputs[1].set_data_from_numpy(second, binary_data=True)
    wanted = [
        triton.InferRequestedOutput("OUTPUT1", binary_data=False),
        triton.InferRequestedOutput("OUTPUT0", binary_data=True),
    ]
    result = client.infer("simple", inputs, outputs=wanted, query_params={"a": 1})
    assert [output["name"] for output in result.get_response()["outputs"]] == ["OUTPUT1", "OUTPUT0"]
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), first + second)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), first - second)
    only = client.infer("simple", inputs, outputs=wanted[:1])
    assert only.as_numpy("OUTPUT0") is None


def test_async_infer_many_at_once_each_gets_its_own_answer(client):
    images = [digits(1, seed) for seed in range(12)]
    running = [client.async_infer("digits", [image_input(x)]) for x in images]
    for x, request in zip(images, running, strict=True):
        np.testing.assert_array_equal(request.get_result().as_numpy("y"), expected(x))


def test_aio_client_infers_and_reads_errors(node):
    async def ask():
        async with triton_aio.InferenceServerClient(node.address) as client:
            assert await client.is_server_ready()
            x = digits(2)
            for algorithm in (None, "gzip", "deflate"):
                result = await client.infer(
                    "digits",
                    [image_input(x)],
                    request_compression_algorithm=algorithm,
                    response_compression_algorithm=algorithm,
                )
                np.testing.assert_array_equal(result.as_numpy("y"), expected(x))
            with pytest.raises(InferenceServerException, match="unknown model"):
                await client.get_model_metadata("unheard-of")

    asyncio.run(ask())


def test_repository_is_listed_loaded_and_unloaded(node, client):
    assert [entry["name"] for entry in client.get_model_repository_index()] == ["digits", "mixed", "simple"]
    client.unload_model("mixed")
    try:
        assert not client.is_model_ready("mixed")
        assert not client.is_server_ready()
        states = {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}
        assert states == {"digits": "READY", "mixed": "UNAVAILABLE", "simple": "READY"}
        ready = node.http.post("/v2/repository/index", json={"ready": True}).json()
        assert [entry["name"] for entry in ready] == ["digits", "simple"]
        with pytest.raises(InferenceServerException, match="not loaded") as refused:
            client.get_model_metadata("mixed")
        assert refused.value.status() == "503"
    finally:
        client.load_model("mixed")
    assert client.is_model_ready("mixed")


def test_loading_what_is_not_there_or_with_files_is_refused(client):
    with pytest.raises(InferenceServerException, match="failed to load 'unheard-of'") as refused:
        client.load_model("unheard-of")
    assert refused.value.status() == "404"
    with pytest.raises(InferenceServerException, match=r"failed to load 'simple'.*can't be sent along") as refused:
        client.load_model("simple", config='{"max_batch_size": 16}')
    assert refused.value.status() == "400"


def test_statistics_count_samples_and_failures(client):
    def counts():
        (model,) = client.get_inference_statistics("simple")["model_stats"]
        return model["inference_count"], model["inference_stats"]["success"]["count"]

    samples, queries = counts()
    x = np.zeros((4, 16), np.int32)
    inputs = [triton.InferInput(name, [4, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(x)
    client.infer("simple", inputs)
    assert counts() == (samples + 4, queries + 1)
    names = [model["name"] for model in client.get_inference_statistics()["model_stats"]]
    assert names == ["digits", "mixed", "simple"]


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda c: c.get_trace_settings(), "no such page"),
        (lambda c: c.get_log_settings(), "no such page"),
        (lambda c: c.get_system_shared_memory_status(), "no such page"),
    ],
)
def test_extensions_that_a_node_lacks_are_no_pages(client, ask, reason):
    with pytest.raises(InferenceServerException, match=reason) as refused:
        ask(client)
    assert refused.value.status() == "404"
