"""Queries of the Open Inference Protocol v2 over HTTP, from a request's body to its answer.

    body --> Inference --submit--> Future --> JSON, or JSON and values in binary
      |          |                    |
    413, 408   400, 415          503, 504, or the client goes away and takes the query with it

The event loop's thread never computes for long: what is large is read and written in a few threads aside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from heinfer.errors import HeinferError, InputError
from trusted_node.engine import QueryResult
from trusted_node.serving.counters import Counters
from trusted_node.serving.http_body import Room, Share, check_size, compress, read_body, share_of, wanted_coding
from trusted_node.serving.http_gate import CancelledByClientError
from trusted_node.serving.interface import (
    VERSION,
    Channel,
    DeadlineError,
    FinishedQuery,
    ModelNotReadyError,
    Models,
    Observer,
    Outcome,
    Query,
    ServedModel,
)
from trusted_node.serving.limits import JSON_WEIGHT, ServingLimits
from trusted_node.serving.tensors_json import Inference, read_inference, write_inference

#: Bytes from which on bodies are read and answers written in a thread aside: below, handing over takes longer.
_LARGE_BYTES = 64 * 1024
_THREADS = 2
#: Seconds after a query's deadline in which its model may still say so itself.
_GRACE_S = 0.25
_JSON_LENGTH = "inference-header-content-length"
_Made = TypeVar("_Made")


class Inferring:
    """The endpoint that runs queries.

    Args:
        models: what is served.
        limits: sizes and times.
        observer: is told of queries that are refused before they reach their model.

    Attributes:
        counters: of the queries.
    """

    def __init__(self, models: Models, limits: ServingLimits, observer: Observer | None) -> None:
        self.counters = Counters()
        self._models = models
        self._limits = limits
        self._observer = observer
        self._room = Room(limits)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="heinfer-http")

    def routes(self) -> list[Route]:
        """Return the endpoint's routes."""
        return routes_of_model("/infer", self.infer, "POST")

    async def infer(self, request: Request) -> Response:
        """Run a query."""
        started = time.monotonic()
        model = asked(self._models, request)
        self._check_queue(model, request)
        with share_of(self._room) as share:
            try:
                inference = await self._read(request, model, share)
            except InputError:
                self._refused(model, request, time.monotonic() - started)
                raise
            deadline = started + min(inference.timeout_s, self._limits.query_s)
            traceparent = request.headers.get("traceparent", "")
            query = Query(inference.inputs, Channel.HTTP, request.state.request_id, deadline, traceparent=traceparent)
            with self.counters.counting(model.name, VERSION, len(next(iter(inference.inputs.values())))):
                result = await self._run(request, model, query)
            return await self._written(request, model, inference, result)

    def _check_queue(self, model: ServedModel, request: Request) -> None:
        """Refuse a query before its body is read: under overload that is what a node does most."""
        try:
            model.check_queue(Channel.HTTP, request.state.request_id)
        except HeinferError:
            with self.counters.counting(model.name, VERSION, 0):
                raise

    async def _read(self, request: Request, model: ServedModel, share: Share) -> Inference:
        json_bytes = _json_length(request)
        body = await read_body(request, self._limits, share)
        size = len(body) if json_bytes is None else min(json_bytes, len(body))
        check_size(size, self._limits.json_bytes, "of JSON; send values in binary, or fewer samples at a time")
        share.grow_to(len(body) + JSON_WEIGHT * size)
        inference = await self._aside(len(body), lambda: read_inference(model.plan, body, json_bytes))
        share.shrink_to(len(body) + sum(x.nbytes for x in inference.inputs.values()))
        return inference

    async def _run(self, request: Request, model: ServedModel, query: Query) -> QueryResult:
        size = sum(x.nbytes for x in query.inputs.values())
        future = await self._aside(size, lambda: model.submit(query))
        return future.result() if future.done() else await _awaited(request, future, query.deadline)

    async def _written(
        self, request: Request, model: ServedModel, inference: Inference, result: QueryResult
    ) -> Response:
        def write() -> tuple[bytes, int | None, str | None]:
            body, head = write_inference(model.name, VERSION, inference, model.plan, result.outputs)
            coding = wanted_coding(request, len(body))
            return (body if coding is None else compress(body, coding)), head, coding

        size = sum(result.outputs[name].nbytes for name, _ in inference.outputs)
        body, head, coding = await self._aside(size, write)
        headers = {"content-type": "application/json" if head is None else "application/octet-stream"}
        if head is not None:
            headers[_JSON_LENGTH] = str(head)
        if coding is not None:
            headers["content-encoding"] = coding
        return Response(body, headers=headers)

    async def _aside(self, size: int, call: Callable[[], _Made]) -> _Made:
        """Call at once, or in a thread where there is much to do."""
        if size < _LARGE_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _refused(self, model: ServedModel, request: Request, seconds: float) -> None:
        if self._observer is not None:
            request_id = request.state.request_id
            self._observer.finished(
                FinishedQuery(model.name, Channel.HTTP, request_id, 0, 0, 0.0, seconds, Outcome.INPUT, None)
            )


def routes_of_model(tail: str, endpoint: Callable[..., Any], verb: str = "GET") -> list[Route]:
    """Return an endpoint's routes: of a model, and of a version of it."""
    paths = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    return [Route(path + tail, endpoint, methods=[verb]) for path in paths]


def asked(models: Models, request: Request) -> ServedModel:
    """Return the model that a request's path names. Raises as `Models.get`."""
    return models.get(request.path_params["name"], request.path_params.get("version", ""))


def _json_length(request: Request) -> int | None:
    text = request.headers.get(_JSON_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise InputError("Inference-Header-Content-Length is no number: expected how many bytes of the body are JSON")
    if int(text) == 0:
        raise InputError("Inference-Header-Content-Length is 0: bodies without JSON are not offered")
    return int(text)


async def _awaited(request: Request, future: Future[QueryResult], deadline: float) -> QueryResult:
    """Wait for a result as long as somebody listens and there is time; drop the query afterwards."""
    result: asyncio.Future[Any] = asyncio.wrap_future(future)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
    try:
        left = deadline + _GRACE_S - time.monotonic()
        await asyncio.wait({result, gone}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        if result.cancelled():
            raise ModelNotReadyError("the query was dropped: its model is being unloaded")
        if result.done():
            done: QueryResult = result.result()
            return done
        if gone.done():
            raise CancelledByClientError("the client went away")
        raise DeadlineError("the time of the query was over before its result was there")
    finally:
        gone.cancel()
        result.cancel()  # and the future with it, where it still waits


async def _disconnected(request: Request) -> None:
    """Return when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
