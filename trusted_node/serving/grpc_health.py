"""The health service of grpc, for the node and each of its models, and reflection of all that is served.

    Check("")          SERVING where every model is ready
    Check("digits")    SERVING, NOT_SERVING; the call fails with NOT_FOUND where the node has no model of that name
    Watch("digits")    the same at first and whenever it changes, within `WATCH_S`; SERVICE_UNKNOWN instead of failing

States are asked of the models when they are asked for: nothing has to be told when one is loaded or unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from trusted_node.serving.grpc_guard import SERVICE, Context
from trusted_node.serving.interface import Models, ModelState
from trusted_node.serving.proto import inference_pb2 as pb

#: Seconds between two looks at what is watched.
WATCH_S = 0.5
_HEALTH = "grpc.health.v1.Health"
_Response = health_pb2.HealthCheckResponse


def add_health(server: aio.Server, models: Models, stopping: asyncio.Event) -> None:
    """Serve health: of a node that stops nothing is healthy any more, and who watches is told so and let go."""
    health = _Health(models, stopping)
    kinds = {
        "request_deserializer": health_pb2.HealthCheckRequest.FromString,
        "response_serializer": _Response.SerializeToString,
    }
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(health.check, **kinds),
        "Watch": grpc.unary_stream_rpc_method_handler(health.watch, **kinds),
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
    def __init__(self, models: Models, stopping: asyncio.Event) -> None:
        self._models = models
        self._stopping = stopping

    async def check(self, request: Any, context: Context) -> Any:
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            await context.abort(StatusCode.NOT_FOUND, "the node has no service and no model of this name")
        return _Response(status=status)

    async def watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        said = None
        while True:
            last, status = self._stopping.is_set(), self._status(request.service)
            if status != said:
                yield _Response(status=status)
                said = status
            if last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), WATCH_S)

    def _status(self, service: str) -> int:
        if service in ("", SERVICE):
            serves = self._models.ready
        else:
            states = {entry.name: entry.state for entry in self._models.entries()}
            if service not in states:
                return int(_Response.SERVICE_UNKNOWN)
            serves = states[service] is ModelState.READY
        return int(_Response.SERVING if serves and not self._stopping.is_set() else _Response.NOT_SERVING)
