"""Clients of a node, one class a channel: each asks one query at a time, and says how it ended.

"http" is a client of our own on a kept connection, in a few lines, so that a load costs little on a machine that it
shares with what it measures; "grpc" has the stubs of tritonclient; "frames" is heinfer.connect, in a thread;
"tritonclient-http" and "tritonclient-grpc" are the whole library.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

CHANNELS = ("http", "grpc", "frames", "tritonclient-http", "tritonclient-grpc")
OK = "ok"
#: Kinds of ends that are the client's own doing or the connection's: not an answer, and not a refusal by the node.
UNSENT, CUT, IMPATIENT, GARBLED = (
    "no free connection",
    "connection cut",
    "nothing came",
    "another answer than asked for",
)
LOST = (CUT, IMPATIENT, GARBLED)
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask.

    Attributes:
        channel: one of `CHANNELS`.
        address: of that channel, "host:port".
        model: its name.
        input: name of its input.
        output: name of its output.
        samples: file of an array "x"; query n asks about `batch` of them, from n * `batch` on, round and round.
        batch: samples of a query.
        clients: at a time; in an open loop connections at most.
        queries: of each client; 0: an open loop.
        rate: queries a second of an open loop.
        seconds: that an open loop lasts.
        timeout_s: that the node is told a query may take; 0: it is told nothing.
        patience_s: after which a client gives up.
        seed: of the arrivals.
    """

    channel: str
    address: str
    model: str
    input: str
    output: str
    samples: str
    batch: int = 1
    clients: int = 1
    queries: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    timeout_s: float = 0.0
    patience_s: float = 60.0
    seed: int = 0


class Client(Protocol):
    """One client; asks one query at a time."""

    async def ask(self, number: int) -> tuple[str, np.ndarray | None]:
        """Return how query `number` ended, and its answer."""


class Questions:
    """The inputs of every query, by its number."""

    def __init__(self, load: Load) -> None:
        with np.load(load.samples) as archive:
            self._x = np.ascontiguousarray(archive["x"], dtype=np.float32)
        self.batch = load.batch

    def rows(self, number: int) -> np.ndarray:
        """Which samples query `number` asks about."""
        return (number * self.batch + np.arange(self.batch)) % len(self._x)

    def of(self, number: int) -> np.ndarray:
        """What it sends."""
        return self._x[self.rows(number)]


class HttpClient:
    """The protocol's HTTP form with binary tensors, on one kept connection."""

    def __init__(self, load: Load, questions: Questions) -> None:
        self._load = load
        self._questions = questions
        self._host, _, port = load.address.rpartition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def _request(self, number: int) -> bytes:
        load, x = self._load, self._questions.of(number)
        body = x.tobytes()
        sent = {"name": load.input, "shape": x.shape, "datatype": "FP32", "parameters": {"binary_data_size": len(body)}}
        wanted = {"name": load.output, "parameters": {"binary_data": True}}
        header: dict[str, Any] = {"id": str(number), "inputs": [sent], "outputs": [wanted]}
        if load.timeout_s:
            header["parameters"] = {"timeout": round(load.timeout_s * 1e6)}
        text = json.dumps(header).encode()
        head = (
            f"POST /v2/models/{load.model}/infer HTTP/1.1\r\nHost: {load.address}\r\n"
            f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(text)}\r\n"
            f"Content-Length: {len(text) + len(body)}\r\n\r\n"
        )
        return head.encode() + text + body

    async def ask(self, number: int) -> tuple[str, np.ndarray | None]:
        """Ask; a connection that was cut is made anew for the next query."""
        try:
            return await self._exchange(number)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self.close()
            raise

    async def _exchange(self, number: int) -> tuple[str, np.ndarray | None]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(self._request(number))
        head = (await reader.readuntil(_HEAD_END)).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection", "").lower() == "close":
            await self.close()
        status = head[0].split()[1]
        if status != "200":
            return f"HTTP {status}", None
        length = int(headers["inference-header-content-length"])
        answer = json.loads(body[:length])
        if answer["id"] != str(number) or [o["name"] for o in answer["outputs"]] != [self._load.output]:
            return GARBLED, None
        return OK, np.frombuffer(body[length:], np.float32)

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class GrpcClient:
    """tritonclient's stubs over a channel of its own."""

    def __init__(self, load: Load, questions: Questions) -> None:
        import grpc.aio
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        self._load = load
        self._questions = questions
        self._messages = service_pb2
        self._failure = grpc.aio.AioRpcError
        self._channel = grpc.aio.insecure_channel(load.address, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ask(self, number: int) -> tuple[str, np.ndarray | None]:
        """Ask."""
        load, x = self._load, self._questions.of(number)
        request = self._messages.ModelInferRequest(model_name=load.model, id=str(number))
        request.inputs.add(name=load.input, shape=x.shape, datatype="FP32")
        request.raw_input_contents.append(x.tobytes())
        request.outputs.add(name=load.output)
        if load.timeout_s:
            request.parameters["timeout"].int64_param = round(load.timeout_s * 1e6)
        try:
            answer = await self._stub.ModelInfer(request)
        except self._failure as error:
            return f"gRPC {error.code().name}", None
        if answer.id != str(number) or [o.name for o in answer.outputs] != [load.output]:
            return GARBLED, None
        return OK, np.frombuffer(answer.raw_output_contents[0], np.float32)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class FramesClient:
    """heinfer.connect, in a thread."""

    def __init__(self, load: Load, questions: Questions, threads: ThreadPoolExecutor) -> None:
        import heinfer

        self._questions = questions
        self._threads = threads
        self._model = heinfer.connect(load.address)

    async def ask(self, number: int) -> tuple[str, np.ndarray | None]:
        """Ask."""
        from heinfer.errors import RemoteProtocolError
        from heinfer.wire import QueryFailedError

        x = self._questions.of(number)
        try:
            return OK, await asyncio.get_running_loop().run_in_executor(self._threads, self._model.predict, x)
        except QueryFailedError as error:
            return f"frames {error.code.name}", None
        except RemoteProtocolError:
            return CUT, None

    async def close(self) -> None:
        """Close the connections."""
        self._model.close()


class TritonClient:
    """tritonclient's asyncio client, over HTTP or gRPC."""

    def __init__(self, load: Load, questions: Questions) -> None:
        if load.channel == "tritonclient-http":
            import tritonclient.http as kinds
            import tritonclient.http.aio as library
        else:
            import tritonclient.grpc as kinds
            import tritonclient.grpc.aio as library
        from tritonclient.utils import InferenceServerException

        self._load = load
        self._questions = questions
        self._kinds = kinds
        self._failure = InferenceServerException
        self._client = library.InferenceServerClient(load.address)

    async def ask(self, number: int) -> tuple[str, np.ndarray | None]:
        """Ask."""
        x = self._questions.of(number)
        sent = self._kinds.InferInput(self._load.input, x.shape, "FP32")
        sent.set_data_from_numpy(x)
        wanted = self._kinds.InferRequestedOutput(self._load.output)
        limit = {"timeout": round(self._load.timeout_s * 1e6)} if self._load.timeout_s else {}
        try:
            answer = await self._client.infer(
                self._load.model, [sent], outputs=[wanted], request_id=str(number), **limit
            )
        except self._failure as error:
            return f"{self._load.channel} {error.status()}", None
        return OK, answer.as_numpy(self._load.output)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def client_maker(load: Load, questions: Questions, threads: ThreadPoolExecutor) -> Callable[[], Any]:
    """Return what makes a client of the load's channel."""
    match load.channel:
        case "http":
            return lambda: HttpClient(load, questions)
        case "grpc":
            return lambda: GrpcClient(load, questions)
        case "frames":
            return lambda: FramesClient(load, questions, threads)
        case "tritonclient-http" | "tritonclient-grpc":
            return lambda: TritonClient(load, questions)
    raise ValueError(f"expected a channel of {', '.join(CHANNELS)}, found {load.channel!r}")
