"""The Open Inference Protocol v2 over HTTP, as an ASGI application.

    POST /v2/models/digits/infer --> Gate: who asks, how long it took, what failed
        --> body, bounded (http_body) --> tensors (tensors_json) --> ServedModel.submit
        <-- outputs in JSON or binary <-- Future, or the client goes away and the query with it

    $ curl localhost:8000/v2/models/dense/infer \
        -d '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 1]}]}'
    {"model_name":"dense","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,1],"data":[3.5]}]}

An error is {"error": "what was expected, what was found, what to do"}: clients are in the node's domain of trust, and
are told why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from heinfer.errors import HeinferError, InputError
from heinfer.wire.tokens import TokenFile
from trusted_node.serving.access import is_from_here, open_to_all
from trusted_node.serving.counters import Counters
from trusted_node.serving.http_body import Room, read_body, share_of
from trusted_node.serving.http_gate import Gate, answer_json, status_of
from trusted_node.serving.http_infer import Inferring, asked, routes_of_model
from trusted_node.serving.interface import VERSION, ModelNotReadyError, Models, ModelState, Observer
from trusted_node.serving.limits import KIB, ServingLimits
from trusted_node.serving.metadata import model_configuration, model_metadata, server_metadata
from trusted_node.serving.openapi import describe
from trusted_node.serving.request_models import ControlRequest, IndexRequest, read_json

#: What a request to the repository may have.
_CONTROL_BYTES = 64 * KIB
#: Loading and unloading take seconds; more than these wait for each other.
_CONTROL_THREADS = 2
_Body = TypeVar("_Body", IndexRequest, ControlRequest)


def make_app(
    models: Models,
    limits: ServingLimits | None = None,
    tokens: TokenFile | None = None,
    routes: Sequence[BaseRoute] = (),
    observer: Observer | None = None,
    allow_control: bool | None = None,
) -> ASGIApp:
    """Make the application.

    Args:
        models: what is served.
        limits: sizes and times; None: the usual ones.
        tokens: the clients that are served; None: whoever connects.
        routes: further ones, as of a page or of metrics. They are under the same protection; `access.open_to_all` marks
            what needs no token.
        observer: is told of queries that are refused before they reach their model, which tells of the others.
        allow_control: whether clients may load and unload models; None: those with a token, and those on this machine.
    """
    limits = limits or ServingLimits()
    control = _Control(models, limits, allow_control, tokens is not None)
    inferring = Inferring(models, limits, observer)
    reading = _Reading(models, inferring.counters, tokens is not None)
    ours = [*inferring.routes(), *reading.routes(), *control.routes()]  # what is asked most is looked for first
    return Gate([*ours, *routes], tokens, limits.retry_after_s)


class _Reading:
    """Endpoints that say something of the node and its models."""

    def __init__(self, models: Models, counters: Counters, has_tokens: bool) -> None:
        self._models = models
        self._counters = counters
        self._has_tokens = has_tokens

    def routes(self) -> list[Route]:
        return [
            Route("/v2/health/live", _live),
            Route("/v2/health/ready", self.ready),
            Route("/v2", self.metadata),
            Route("/openapi.json", self.description),
            Route("/v2/models/stats", self.all_statistics),
            *routes_of_model("", self.model),
            *routes_of_model("/ready", self.model_ready),
            *routes_of_model("/config", self.configuration),
            *routes_of_model("/stats", self.statistics),
        ]

    async def ready(self, _: Request) -> Response:
        if not self._models.ready:
            raise ModelNotReadyError("a model of this node is not ready: POST /v2/repository/index says which")
        return answer_json({"ready": True})

    async def metadata(self, _: Request) -> Response:
        return answer_json(server_metadata())

    async def description(self, _: Request) -> Response:
        return answer_json(describe(server_metadata()["version"], self._has_tokens))

    async def model(self, request: Request) -> Response:
        return answer_json(model_metadata(asked(self._models, request)))

    async def model_ready(self, request: Request) -> Response:
        return answer_json({"name": asked(self._models, request).name, "ready": True})

    async def configuration(self, request: Request) -> Response:
        return answer_json(model_configuration(asked(self._models, request)))

    async def statistics(self, request: Request) -> Response:
        return answer_json({"model_stats": [self._counters.of(asked(self._models, request).name, VERSION)]})

    async def all_statistics(self, _: Request) -> Response:
        entries = [e for e in self._models.entries() if e.state is ModelState.READY]
        return answer_json({"model_stats": [self._counters.of(e.name, e.version) for e in entries]})


class _Control:
    """The repository: which models there are, and loading and unloading them."""

    def __init__(self, models: Models, limits: ServingLimits, allowed: bool | None, has_tokens: bool) -> None:
        self._models = models
        self._limits = replace(
            limits,
            body_bytes=min(limits.body_bytes, _CONTROL_BYTES),
            json_bytes=min(limits.json_bytes, _CONTROL_BYTES),
        )
        self._allowed = allowed
        self._has_tokens = has_tokens
        self._room = Room(limits)
        self._threads = ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix="heinfer-control")

    def routes(self) -> list[Route]:
        return [
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route("/v2/repository/models/{name}/load", self.load, methods=["POST"]),
            Route("/v2/repository/models/{name}/unload", self.unload, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        wanted = await self._read(request, IndexRequest)
        entries = [
            {"name": e.name, "version": e.version, "state": e.state.value, "reason": e.reason}
            for e in self._models.entries()
            if e.state is ModelState.READY or not wanted.ready
        ]
        return answer_json(entries)

    async def load(self, request: Request) -> Response:
        wanted = await self._admitted(request)
        try:
            if any(name == "config" or name.startswith("file:") for name in wanted.parameters):
                raise InputError("a model is loaded as its folder has it: configurations and files can't be sent along")
            return await self._change(self._models.load, request)
        except HeinferError as error:  # the words are Triton's: its clients look for them
            name = request.path_params["name"]
            raise HTTPException(status_of(error), f"failed to load {name!r}: {error}") from error

    async def unload(self, request: Request) -> Response:
        await self._admitted(request)
        return await self._change(self._models.unload, request)

    async def _admitted(self, request: Request) -> ControlRequest:
        allowed = self._has_tokens or is_from_here(request.client) if self._allowed is None else self._allowed
        if not allowed:
            raise HTTPException(403, "this node does not let its clients load and unload models")
        return await self._read(request, ControlRequest)

    async def _change(self, change: Callable[[str], None], request: Request) -> Response:
        await asyncio.get_running_loop().run_in_executor(self._threads, change, request.path_params["name"])
        return answer_json({})

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        with share_of(self._room) as share:
            body = await read_body(request, self._limits, share)
            return read_json(kind, body) if body.strip() else kind()


@open_to_all
async def _live(_: Request) -> Response:
    return answer_json({"live": True})
