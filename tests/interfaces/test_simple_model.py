"""Sums and differences of integers, as Triton's own model `simple`, asked of a node in every way of tritonclient.

    INPUT0, INPUT1 --Concat, Cast--> 32 reals --MatMul [[I, I], [I, -I]]--> --Round, Cast, Split--> OUTPUT0, OUTPUT1

The product runs on the server under encryption, and yet every answer is exact: the block's error is far below the half
that rounding forgives. INPUT0 = [7, ...], INPUT1 = [2, ...] gives OUTPUT0 = [9, ...], OUTPUT1 = [5, ...].
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from heinfer.plan import read_plan
from partitioner import partition
from tests.interfaces.small_node import small_node
from tests.parties import LOOPBACK
from trusted_node.serving.grpc_service import GrpcServer
from trusted_node.serving.http_app import make_app
from trusted_node.serving.http_server import HttpServer

MODEL = "simple"
WIDTH = 16
IN = ("INPUT0", "INPUT1")
OUT = ("OUTPUT0", "OUTPUT1")
#: Sums of two such stay below 2**24, up to which float32 has every integer.
LARGEST = 2**23 - 1

Client = Any  # tritonclient has no types
#: Where the node listens, by name of the protocol.
Ways = dict[str, str]


def simple_model(path: Path) -> Path:
    """Write the model; its batch is free."""
    one = np.eye(WIDTH, dtype=np.float32)
    nodes = [
        helper.make_node("Concat", [*IN], ["both"], name="concat", axis=1),
        helper.make_node("Cast", ["both"], ["reals"], name="to_reals", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["reals", "weights"], ["mixed"], name="mix"),
        helper.make_node("Round", ["mixed"], ["whole"], name="round"),
        helper.make_node("Cast", ["whole"], ["integers"], name="to_integers", to=TensorProto.INT32),
        helper.make_node("Split", ["integers", "halves"], [*OUT], name="split", axis=1),
    ]
    constants = {"weights": np.block([[one, one], [one, -one]]), "halves": np.array([WIDTH, WIDTH], np.int64)}
    tensors = {name: helper.make_tensor_value_info(name, TensorProto.INT32, ["batch", WIDTH]) for name in IN + OUT}
    graph = helper.make_graph(
        nodes,
        MODEL,
        [tensors[name] for name in IN],
        [tensors[name] for name in OUT],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


@dataclass(frozen=True)
class Pair:
    """What goes into both inputs, shape (samples, 16)."""

    first: NDArray[np.int32]
    second: NDArray[np.int32]

    @classmethod
    def of(cls, seed: int, samples: int = 1) -> Pair:
        values = np.random.default_rng(seed).integers(-LARGEST, LARGEST, (2, samples, WIDTH), dtype=np.int32)
        return cls(values[0], values[1])

    def inputs(self, client: Client, binary: Sequence[bool] = (True, True)) -> list[Any]:
        """Wrap them for a module of tritonclient; over HTTP in binary or as JSON."""
        tensors = []
        for name, values, raw in zip(IN, (self.first, self.second), binary, strict=True):
            tensors.append(client.InferInput(name, list(values.shape), "INT32"))
            how = {} if "grpc" in client.__name__ else {"binary_data": raw}
            tensors[-1].set_data_from_numpy(values, **how)
        return tensors

    def check(self, result: Any) -> None:
        for name, expected in zip(OUT, (self.first + self.second, self.first - self.second), strict=True):
            found = result.as_numpy(name)
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, expected)


def wanted(client: Client) -> list[Any]:
    return [client.InferRequestedOutput(name) for name in OUT]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(MODEL)
    partition(simple_model(folder / f"{MODEL}.onnx"), folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def node(bundle: Path) -> Iterator[Ways]:
    """A node with the model and its server, in this process over real sockets."""
    with ExitStack() as stack:
        models = stack.enter_context(small_node(bundle, name=MODEL)).models
        http = HttpServer(LOOPBACK, make_app(models))
        stack.callback(http.stop, 0.0)
        spoken = GrpcServer(LOOPBACK, models)
        stack.callback(spoken.stop, 0.0)
        yield {"http": str(http.address), "grpc": str(spoken.address)}


@pytest.fixture(scope="module")
def over_http(node: Ways) -> Iterator[Client]:
    with tritonclient.http.InferenceServerClient(node["http"], concurrency=4) as client:
        yield client


@pytest.fixture(scope="module")
def over_grpc(node: Ways) -> Iterator[Client]:
    with tritonclient.grpc.InferenceServerClient(node["grpc"]) as client:
        yield client


def test_product_is_encrypted_and_near_enough_to_round(bundle: Path) -> None:
    plan, _ = read_plan(bundle)
    (block,) = plan.blocks
    assert block.unit_bound * LARGEST < 0.5


def test_health_and_metadata_are_those_of_the_model(over_http: Client, over_grpc: Client) -> None:
    spoken = over_grpc.get_model_metadata(MODEL, as_json=True)
    for tensor in spoken["inputs"] + spoken["outputs"]:
        tensor["shape"] = [int(size) for size in tensor["shape"]]
    assert spoken == over_http.get_model_metadata(MODEL, query_params={"a": 1})
    assert [(t["name"], t["datatype"], t["shape"]) for t in spoken["inputs"]] == [(n, "INT32", [-1, WIDTH]) for n in IN]
    assert [(t["name"], t["datatype"], t["shape"]) for t in spoken["outputs"]] == [
        (n, "INT32", [-1, WIDTH]) for n in OUT
    ]
    assert over_grpc.get_model_config(MODEL).config.name == over_http.get_model_config(MODEL)["name"] == MODEL
    for client in (over_http, over_grpc):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        with pytest.raises(InferenceServerException, match="Request for unknown model"):
            client.get_model_metadata("unheard-of")


@pytest.mark.parametrize("binary", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_http_sync(over_http: Client, binary: tuple[bool, bool], algorithm: str | None) -> None:
    pair = Pair.of(1, samples=3)
    packed = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    inputs = pair.inputs(tritonclient.http, binary)
    outputs = [tritonclient.http.InferRequestedOutput(n, binary_data=b) for n, b in zip(OUT, binary, strict=True)]
    query = {"query_params": {"a": 1, "b": 2}, "headers": {"x-anything": "1"}}
    pair.check(over_http.infer(MODEL, inputs, outputs=outputs, **query, **packed))
    pair.check(over_http.infer(MODEL, inputs, **query, **packed))


def test_grpc_sync(over_grpc: Client) -> None:
    pair = Pair.of(2, samples=3)
    inputs, extra = pair.inputs(tritonclient.grpc), {"headers": {"anything": "1"}, "client_timeout": 20.0}
    pair.check(over_grpc.infer(MODEL, inputs, outputs=wanted(tritonclient.grpc), **extra))
    pair.check(over_grpc.infer(MODEL, inputs))


def test_statistics_are_of_the_model_asked_for(over_http: Client, over_grpc: Client) -> None:
    def counted() -> list[tuple[str, int]]:
        (by_http,) = over_http.get_inference_statistics(MODEL)["model_stats"]
        (by_grpc,) = over_grpc.get_inference_statistics(MODEL).model_stats
        return [
            (by_http["name"], by_http["inference_stats"]["success"]["count"]),
            (by_grpc.name, by_grpc.inference_stats.success.count),
        ]

    before = counted()
    over_http.infer(MODEL, Pair.of(3).inputs(tritonclient.http))
    over_grpc.infer(MODEL, Pair.of(3).inputs(tritonclient.grpc))
    assert counted() == [(MODEL, count + 1) for _, count in before]


def test_http_async(over_http: Client) -> None:
    pairs = [Pair.of(seed) for seed in range(6)]
    running = [over_http.async_infer(MODEL, pair.inputs(tritonclient.http)) for pair in pairs]
    for pair, request in zip(pairs, running, strict=True):
        pair.check(request.get_result())


def test_grpc_async(over_grpc: Client) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    pairs = {str(seed): Pair.of(seed) for seed in range(6)}
    for number, pair in pairs.items():
        over_grpc.async_infer(
            MODEL,
            pair.inputs(tritonclient.grpc),
            callback=lambda result, error: answers.put((result, error)),
            request_id=number,
            client_timeout=20.0,
        )
    for _ in range(6):
        result, error = answers.get(timeout=20)
        assert error is None
        pairs.pop(result.get_response().id).check(result)
    assert not pairs


@pytest.mark.parametrize(("module", "way"), [(tritonclient.http.aio, "http"), (tritonclient.grpc.aio, "grpc")])
def test_aio(node: Ways, module: Client, way: str) -> None:
    pairs = [Pair.of(seed, samples=1 + seed) for seed in range(4)]

    async def ask() -> list[Any]:
        async with module.InferenceServerClient(node[way]) as client:
            with pytest.raises(InferenceServerException, match="Request for unknown model"):
                await client.infer("unheard-of", pairs[0].inputs(module))
            return await asyncio.gather(
                *(client.infer(MODEL, pair.inputs(module), outputs=wanted(module)) for pair in pairs)
            )

    for pair, result in zip(pairs, asyncio.run(ask()), strict=True):
        pair.check(result)


@pytest.mark.parametrize(
    "options",
    [
        {"keepalive_options": tritonclient.grpc.KeepAliveOptions(50, 5000, True, 0)},
        {"channel_args": [("grpc.keepalive_time_ms", 2**31 - 1), ("grpc.max_receive_message_length", 2**20)]},
    ],
    ids=["keepalive", "channel arguments"],
)
def test_grpc_channel_options(node: Ways, options: dict[str, Any]) -> None:
    with tritonclient.grpc.InferenceServerClient(node["grpc"], **options) as client:
        for seed in range(8):
            pair = Pair.of(seed)
            pair.check(client.infer(MODEL, pair.inputs(tritonclient.grpc)))


def explicit(pair: Pair) -> service_pb2.ModelInferRequest:
    """Make a request whose values are numbers of the message, not bytes."""
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, values in zip(IN, (pair.first, pair.second), strict=True):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=values.shape)
        tensor.contents.int_contents.extend(values.ravel().tolist())
    return request


def test_grpc_explicit_contents(node: Ways) -> None:
    pair = Pair.of(4, samples=2)
    request = explicit(pair)
    with grpc.insecure_channel(node["grpc"]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        pair.check(tritonclient.grpc.InferResult(stub.ModelInfer(request)))
        for values in (pair.first, pair.second):  # one of two, then both
            request.raw_input_contents.append(values.tobytes())
            with pytest.raises(grpc.RpcError, match="contents field must not be specified") as refused:
                stub.ModelInfer(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("module", "way"), [(tritonclient.http, "http"), (tritonclient.grpc, "grpc")])
def test_infer_objects_are_used_again(node: Ways, module: Client, way: str) -> None:
    first, second = Pair.of(5), Pair.of(6, samples=2)
    inputs, outputs = first.inputs(module), wanted(module)
    with module.InferenceServerClient(node[way]) as client:
        for _ in range(2):
            first.check(client.infer(MODEL, inputs, outputs=outputs))
        for tensor, name in zip(inputs + outputs, IN + OUT, strict=True):
            tensor.set_shared_memory(name, first.first.nbytes)
        with pytest.raises(InferenceServerException, match="shared memory"):
            client.infer(MODEL, inputs, outputs=outputs)
        for tensor, values in zip(inputs, (second.first, second.second), strict=True):
            tensor.set_shape(list(values.shape))
            tensor.set_data_from_numpy(values)
        for output in outputs:
            output.unset_shared_memory()
        second.check(client.infer(MODEL, inputs, outputs=outputs))


@pytest.mark.parametrize(("module", "way"), [(tritonclient.http, "http"), (tritonclient.grpc, "grpc")])
def test_a_new_client_for_every_query(node: Ways, module: Client, way: str) -> None:
    for seed in range(8):
        pair = Pair.of(seed)
        with module.InferenceServerClient(node[way]) as client:
            pair.check(client.infer(MODEL, pair.inputs(module)))
