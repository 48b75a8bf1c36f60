"""The health service of grpc, for the node and each of its models, and reflection of all that is served.

    Check("")          SERVING where every model is ready
    Check("digits")    SERVING, NOT_SERVING; the call fails with NOT_FOUND where the node has no model of that name
    Watch("digits")    the same at first and whenever it changes, within `WATCH_S`; SERVICE_UNKNOWN instead of failing

Whoever connects may ask, so `PROBERS` may at a moment, and a question must come in time: strangers hold no places that
clients need.

States are asked of the models when they are asked for: nothing has to be told when one is loaded or unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from heinfer.errors import HeinferError
from trusted_node.serving.grpc_guard import SERVICE, Context, Handler, message_of
from trusted_node.serving.interface import Models, ModelState
from trusted_node.serving.proto import inference_pb2 as pb

#: Seconds between two looks at what is watched.
WATCH_S = 0.5
#: Calls for health that are under way at a moment, those that watch too; more are refused.
PROBERS = 64
_HEALTH = "grpc.health.v1.Health"
_Response = health_pb2.HealthCheckResponse


def add_health(server: aio.Server, models: Models, stopping: asyncio.Event, within_s: float) -> None:
    """Serve health: of a node that stops nothing is healthy any more, and who watches is told so and let go.

    Args:
        server: that serves it.
        models: whose health it is.
        stopping: set when the node stops.
        within_s: seconds for a question to come.
    """
    health = _Health(models, stopping, within_s)
    methods: dict[str, Handler] = {
        "Check": grpc.stream_unary_rpc_method_handler(health.check),
        "Watch": grpc.stream_stream_rpc_method_handler(health.watch),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_HEALTH, methods),))


def add_reflection(server: aio.Server) -> None:
    """Serve descriptions of the services, from the pool that has our messages."""
    pool = pb.DESCRIPTOR.pool
    for module in (health_pb2, reflection_pb2):
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        pool.Add(file)
    reflection.enable_server_reflection((SERVICE, _HEALTH, reflection.SERVICE_NAME), server, pool)


class _Health:
    def __init__(self, models: Models, stopping: asyncio.Event, within_s: float) -> None:
        self._models = models
        self._stopping = stopping
        self._within_s = within_s
        self._probers = 0

    async def check(self, _: object, context: Context) -> bytes:
        async with self._prober(context) as service:
            status = self._status(service)
            if status == _Response.SERVICE_UNKNOWN:
                await context.abort(StatusCode.NOT_FOUND, "the node has no service and no model of this name")
            return bytes(_Response(status=status).SerializeToString())

    async def watch(self, _: object, context: Context) -> None:
        async with self._prober(context) as service:
            said = None
            while True:
                last, status = self._stopping.is_set(), self._status(service)
                if status != said:
                    await context.write(_Response(status=status).SerializeToString())
                    said = status
                if last:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), WATCH_S)

    @asynccontextmanager
    async def _prober(self, context: Context) -> AsyncIterator[str]:
        """Let one more ask, and yield what it asks for."""
        if self._probers >= PROBERS:
            await context.abort(StatusCode.RESOURCE_EXHAUSTED, "as many ask for health as may: ask again later")
        self._probers += 1
        try:
            try:
                question = health_pb2.HealthCheckRequest.FromString(await message_of(context, self._within_s))
            except (DecodeError, HeinferError):
                await context.abort(StatusCode.INVALID_ARGUMENT, "expected a HealthCheckRequest, in time")
            yield question.service
        finally:
            self._probers -= 1

    def _status(self, service: str) -> int:
        if service in ("", SERVICE):
            serves = self._models.ready
        else:
            states = {entry.name: entry.state for entry in self._models.entries()}
            if service not in states:
                return int(_Response.SERVICE_UNKNOWN)
            serves = states[service] is ModelState.READY
        return int(_Response.SERVING if serves and not self._stopping.is_set() else _Response.NOT_SERVING)
