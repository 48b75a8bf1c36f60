"""The methods of the protocol's gRPC service: bytes of a message in, bytes of a message out.

    infer: bytes --> ModelInferRequest --> Query --> ServedModel.submit
           bytes <-- ModelInferResponse <-- Future[QueryResult], or the client gives up and the query with it

A call that waits is a coroutine and holds no thread; what is large is read and written in a few threads aside. Messages
are parsed here and not by grpc, which would log a traceback of each that is malformed. They are taken from the network
when a call has been let in, and not before: of a node with one model whose queue is full, no query is even read.

A stream (ModelStreamInfer) is answered in the order of its requests. `STREAM_WINDOW` of them are in the queue at a
time, and the next one is read when the first is answered. A request that fails is an answer too: the stream goes on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from heinfer.errors import HeinferError, InputError
from heinfer.units import size as readable
from trusted_node.engine import QueryResult
from trusted_node.serving import grpc_messages as messages
from trusted_node.serving.counters import Counters
from trusted_node.serving.grpc_guard import (
    SERVICE,
    Context,
    Handler,
    LoadFailedError,
    NotAllowedError,
    log_failure,
    message_of,
    refusal,
)
from trusted_node.serving.interface import (
    VERSION,
    Channel,
    DeadlineError,
    FinishedQuery,
    ModelNotReadyError,
    Models,
    ModelState,
    Observer,
    Outcome,
    Query,
    QueueFullError,
    UnknownModelError,
)
from trusted_node.serving.limits import JSON_WEIGHT, ServingLimits
from trusted_node.serving.proto import inference_pb2 as pb

#: Requests of one stream that are in the queue or run.
STREAM_WINDOW = 16
#: Bytes from which on messages are read and written in a thread aside.
_LARGE_BYTES = 64 * 1024
_THREADS = 2
#: Loading and unloading take seconds and wait for each other anyway.
_CONTROL_THREADS = 2
#: Seconds after a query's deadline in which its model may say so.
_GRACE_S = 0.1
_Made = TypeVar("_Made")
_Request = TypeVar("_Request", bound=Message)
_Method = Callable[[Context], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class _Came:
    """A request as it came.

    Attributes:
        raw: its bytes.
        at: when (`time.monotonic`).
        left_s: seconds until the call's deadline, None where it has none.
        traceparent: of the client's span; "": none.
    """

    raw: bytes
    at: float
    left_s: float | None
    traceparent: str


class Calls:
    """The service.

    Args:
        models: what is served.
        limits: sizes and times.
        allow_control: whether clients may load and unload models.
        observer: is told of queries that are refused before they reach a model; models tell of the others.
    """

    def __init__(self, models: Models, limits: ServingLimits, allow_control: bool, observer: Observer | None) -> None:
        self._models = models
        self._limits = limits
        self._allow_control = allow_control
        self._observer = observer
        self._counters = Counters()
        self._held_bytes = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="heinfer-grpc")
        self._control_threads = ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix="heinfer-control")

    def close(self) -> None:
        """Let go of threads; what they do ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._control_threads.shutdown(wait=False, cancel_futures=True)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service as grpc wants it."""

        def reading(kind: type[_Request], answer: Callable[[_Request], Awaitable[Message]]) -> _Method:
            return _parsing(kind, answer, self._limits.body_s)

        unary: Mapping[str, _Method] = {
            "ServerLive": self.live,
            "ServerReady": reading(pb.ServerReadyRequest, self.ready),
            "ModelReady": reading(pb.ModelReadyRequest, self.model_ready),
            "ServerMetadata": reading(pb.ServerMetadataRequest, self.metadata),
            "ModelMetadata": reading(pb.ModelMetadataRequest, self.model_metadata),
            "ModelConfig": reading(pb.ModelConfigRequest, self.model_config),
            "ModelStatistics": reading(pb.ModelStatisticsRequest, self.model_statistics),
            "RepositoryIndex": reading(pb.RepositoryIndexRequest, self.index),
            "RepositoryModelLoad": reading(pb.RepositoryModelLoadRequest, self.load),
            "RepositoryModelUnload": reading(pb.RepositoryModelUnloadRequest, self.unload),
            "ModelInfer": self.infer,
        }
        methods: dict[str, Handler] = {
            name: grpc.stream_unary_rpc_method_handler(_failing(name, call)) for name, call in unary.items()
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self.stream)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def live(self, context: Context) -> bytes:
        """Answer at all, whatever is asked: strangers may, and nobody waits for their messages."""
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def ready(self, request: pb.ServerReadyRequest) -> Message:
        """Say whether every model is ready."""
        return pb.ServerReadyResponse(ready=self._models.ready)

    async def model_ready(self, request: pb.ModelReadyRequest) -> Message:
        """Say whether a model can be asked; one that the node does not have can't."""
        try:
            self._models.get(request.name, request.version)
        except (UnknownModelError, ModelNotReadyError):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def metadata(self, request: pb.ServerMetadataRequest) -> Message:
        """Say who this is."""
        return messages.server_metadata()

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> Message:
        """Say what goes into a model and what comes out."""
        return messages.model_metadata(self._models.get(request.name, request.version))

    async def model_config(self, request: pb.ModelConfigRequest) -> Message:
        """Say the same as a Triton model configuration."""
        return messages.model_config(self._models.get(request.name, request.version))

    async def model_statistics(self, request: pb.ModelStatisticsRequest) -> Message:
        """Say how many queries came by gRPC: of one model, or of all."""
        if request.name:
            names = [self._models.get(request.name, request.version).name]
        else:
            names = [entry.name for entry in self._models.entries()]
        return messages.model_statistics([self._counters.of(name, VERSION) for name in names])

    async def index(self, request: pb.RepositoryIndexRequest) -> Message:
        """List the models, or those alone that are ready."""
        _refuse_repository(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in self._models.entries():
            if entry.state is ModelState.READY or not request.ready:
                response.models.add(
                    name=entry.name, version=entry.version, state=entry.state.value, reason=entry.reason
                )
        return response

    async def load(self, request: pb.RepositoryModelLoadRequest) -> Message:
        """Load a model, or read it anew."""
        try:
            if any(name == "config" or name.startswith("file:") for name in request.parameters):
                raise InputError("a model is loaded as its folder has it: a configuration or files can't be sent along")
            await self._change(self._models.load, request.repository_name, request.model_name)
        except HeinferError as error:
            raise LoadFailedError(request.model_name, error) from error
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> Message:
        """Unload a model; its running queries end."""
        await self._change(self._models.unload, request.repository_name, request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def infer(self, context: Context) -> bytes:
        """Run a query."""
        self._check_only_queue()
        raw = await message_of(context, self._limits.query_s)
        return await self._answer(raw, context, lambda response: response)

    async def stream(self, _: object, context: Context) -> None:
        """Run queries and write their answers in order."""
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        window = asyncio.Semaphore(STREAM_WINDOW)
        async with asyncio.TaskGroup() as group:

            async def read() -> None:
                await window.acquire()
                while (raw := await context.read()) is not aio.EOF:
                    answers.put_nowait(group.create_task(self._answer_in_stream(raw, context)))
                    await window.acquire()
                answers.put_nowait(None)

            group.create_task(read())
            while (answer := await answers.get()) is not None:
                await context.write(await answer)
                window.release()

    def _check_only_queue(self) -> None:
        """Refuse a query before its message is read, where it can only be for one model and that one's queue is full.

        Raises:
            QueueFullError: it is.
        """
        entries = self._models.entries()
        if len(entries) == 1:
            with suppress(UnknownModelError, ModelNotReadyError):
                self._models.get(entries[0].name).check_queue(Channel.GRPC, secrets.token_hex(8))

    async def _answer_in_stream(self, raw: bytes, context: Context) -> bytes:
        try:
            return await self._answer(
                raw, context, lambda response: pb.ModelStreamInferResponse(infer_response=response)
            )
        except asyncio.CancelledError as error:
            if _gives_up():
                raise
            failure: BaseException = error
        except Exception as error:
            failure = error
        log_failure("ModelStreamInfer", failure)
        answer = pb.ModelStreamInferResponse(error_message=refusal(failure)[1])
        answer.infer_response.id = messages.id_of(raw, self._limits.json_bytes)
        return answer.SerializeToString()

    async def _answer(self, raw: bytes, context: Context, wrap: Callable[[pb.ModelInferResponse], Message]) -> bytes:
        came = _Came(raw, time.monotonic(), context.time_remaining(), _traceparent(context))
        structure = messages.structure_bytes(raw)
        if structure > self._limits.json_bytes:
            raise InputError(
                f"a request may have {readable(self._limits.json_bytes)} beside raw_input_contents: send values there"
            )
        with self._room(len(raw) + JSON_WEIGHT * structure):
            asked = await self._aside(len(raw), lambda: self._read(came))
            with self._counters.counting(asked.model.name, VERSION, asked.samples):
                result = await _heard(await self._submit(asked, len(raw)), asked.query.deadline)
            size = sum(result.outputs[name].nbytes for name in asked.outputs)
            return await self._aside(
                size, lambda: wrap(messages.write_result(asked, result.outputs)).SerializeToString()
            )

    def _read(self, came: _Came) -> messages.Asked:
        request = messages.parse_request(came.raw)
        model = self._models.get(request.model_name, request.model_version)
        request_id = messages.request_id(request)
        model.check_queue(Channel.GRPC, request_id)
        try:
            timeout_s = min(messages.read_timeout(request), self._limits.query_s)
            outputs = messages.wanted_outputs(model, request)
            inputs = messages.read_inputs(model, request)
        except InputError:
            if self._observer is not None:
                seconds = time.monotonic() - came.at
                refused = FinishedQuery(model.name, Channel.GRPC, request_id, 0, 0, 0.0, seconds, Outcome.INPUT, None)
                self._observer.finished(refused)
            raise
        if came.left_s is not None:
            timeout_s = min(timeout_s, came.left_s)
        query = Query(inputs, Channel.GRPC, request_id, came.at + timeout_s, traceparent=came.traceparent)
        return messages.Asked(request, model, outputs, query)

    async def _submit(self, asked: messages.Asked, size: int) -> Future[QueryResult]:
        if size < _LARGE_BYTES:
            return asked.model.submit(asked.query)
        submitting = self._threads.submit(asked.model.submit, asked.query)
        try:
            return await asyncio.wrap_future(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_drop)
            raise

    async def _aside(self, size: int, call: Callable[[], _Made]) -> _Made:
        """Call at once, or in a thread where it has much to do."""
        if size < _LARGE_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _change(self, change: Callable[[str], None], repository: str, name: str) -> None:
        if not self._allow_control:
            raise NotAllowedError("this node does not let its clients load and unload models")
        _refuse_repository(repository)
        await asyncio.get_running_loop().run_in_executor(self._control_threads, change, name)

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Count a request's bytes as long as it is here. Runs in the event loop's thread only."""
        if self._held_bytes + size > self._limits.total_bytes:
            raise QueueFullError("the node holds as many requests as it has memory for; ask again later")
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size


async def _heard(future: Future[QueryResult], deadline: float) -> QueryResult:
    """Wait for a result. Where nobody waits any more the query is cancelled."""
    if future.done():
        return future.result()
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0) + _GRACE_S) as scope:
            return await asyncio.wrap_future(future)
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineError("the time of the query was over before its result was there") from None


def _drop(submitting: Future[Future[QueryResult]]) -> None:
    """Cancel a query that was submitted when its client had gone."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def _failing(name: str, call: _Method) -> Callable[[object, Context], Awaitable[bytes]]:
    """Let a call's errors end it with a status."""

    async def answer(_: object, context: Context) -> bytes:
        try:
            return await call(context)
        except asyncio.CancelledError as error:
            if _gives_up():
                raise
            failure: BaseException = error
        except Exception as error:
            failure = error
        log_failure(name, failure)
        await context.abort(*refusal(failure))

    return answer


def _gives_up() -> bool:
    """Whether the client has given up, rather than the model dropped its query."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _parsing(kind: type[_Request], answer: Callable[[_Request], Awaitable[Message]], within_s: float) -> _Method:
    """Let a method have its message read, within so many seconds, and its answer written."""

    async def call(context: Context) -> bytes:
        raw = await message_of(context, within_s)
        try:
            request = kind.FromString(raw)
        except DecodeError:
            raise InputError(f"the request is no {kind.DESCRIPTOR.full_name}") from None
        return (await answer(request)).SerializeToString()

    return call


def _refuse_repository(name: str) -> None:
    if name:
        raise InputError("the node's folders are its only repository, which has no name: leave repository_name empty")


def _traceparent(context: Context) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")
