"""Who may call over gRPC, and what a call that fails is told.

    authorization: Bearer vQ3...     looked up in the node's file of tokens at every call, before its message is read
    QueueFullError                   UNAVAILABLE: ... ask again later
    any other exception              INTERNAL: internal error, see the node's log

Missing and wrong tokens get the same answer. A client is in the node's domain of trust and gets the reason of an error
that heinfer raised on purpose; of any other its message may quote a value, so neither client nor log have it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc import StatusCode, aio

from heinfer.errors import HeinferError, InputError, IntegrityError, RemoteProtocolError
from heinfer.wire.tokens import TokenFile
from trusted_node.serving.access import holder
from trusted_node.serving.interface import DeadlineError, ModelNotReadyError, QueueFullError, UnknownModelError
from trusted_node.serving.proto import inference_pb2 as pb

logger = logging.getLogger(__name__)

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # no generic when it runs

SERVICE: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_HEALTH = "/grpc.health.v1.Health/"
#: What needs no token, so that a prober sees that the node lives.
OPEN_METHODS = frozenset({f"/{SERVICE}/ServerLive", f"{_HEALTH}Check", f"{_HEALTH}Watch"})
UNAUTHENTICATED = "this node serves holders of a token: send it as metadata, 'authorization: Bearer TOKEN'"
_UNREADABLE = "the node can't read its file of tokens"
_INTERNAL = "internal error, see the node's log"
#: Status and reason travel as a header, and some clients take 8 KiB of these.
_MAX_REASON = 2000
#: Methods of the protocol's extensions that a node has no use for, and what to do instead.
_LEFT_OUT = {
    **dict.fromkeys(
        [f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")],
        "shared memory is not offered: send and take tensors in messages",
    ),
    "TraceSetting": "traces are the operator's to set: see `heinfer node --help`",
    "LogSettings": "logs are the operator's to set: see `heinfer --help`",
}


class NotAllowedError(HeinferError):
    """The client is known and may not do this."""


class LoadFailedError(HeinferError):
    """A model could not be loaded.

    Attributes:
        cause: why.
    """

    def __init__(self, model: str, cause: HeinferError) -> None:
        self.cause = cause
        super().__init__(f"failed to load {model!r}: {cause}")


def refusal(error: BaseException) -> tuple[StatusCode, str]:
    """Return status and reason that a client is told of an error."""
    reason = str(error)[:_MAX_REASON] if isinstance(error, HeinferError) else _INTERNAL
    match error:
        case asyncio.CancelledError() | concurrent.futures.CancelledError():
            return StatusCode.UNAVAILABLE, "the query was dropped: its model is being unloaded"
        case LoadFailedError(cause=cause):
            return refusal(cause)[0], reason
        case UnknownModelError():  # clients' examples look for these words of Triton's, and for "failed to load"
            return StatusCode.NOT_FOUND, f"Request for unknown model: {reason}"
        case InputError():
            return StatusCode.INVALID_ARGUMENT, reason
        case NotAllowedError():
            return StatusCode.PERMISSION_DENIED, reason
        case DeadlineError():
            return StatusCode.DEADLINE_EXCEEDED, reason
        case QueueFullError() | ModelNotReadyError() | RemoteProtocolError():
            return StatusCode.UNAVAILABLE, reason
        case IntegrityError():
            return StatusCode.DATA_LOSS, reason
        case _:
            return StatusCode.INTERNAL, reason


def log_failure(method: str, error: BaseException) -> None:
    """Log that a call failed: by kind, and where that was for an error that is none of ours."""
    if isinstance(error, HeinferError | asyncio.CancelledError | concurrent.futures.CancelledError):
        logger.info("grpc %s ended by %s", method, type(error).__name__)
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
    logger.error("grpc %s ended by %s at %s", method, type(error).__name__, where)


class Doorkeeper(aio.ServerInterceptor):
    """Refuses calls without a token that the node knows."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return what handles a call: its method, or a refusal."""
        if details.method in OPEN_METHODS:
            return await continuation(details)
        shown = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        try:
            name = holder(self._tokens, str(shown[0])) if len(shown) == 1 else None
        except InputError as error:
            logger.warning("client refused: no token can be looked up: %s", error)
            return _refuse(StatusCode.UNAVAILABLE, _UNREADABLE)
        if name is None:
            logger.warning("client refused: it shows no token that is in the file")
            return _refuse(StatusCode.UNAUTHENTICATED, UNAUTHENTICATED)
        return await continuation(details)


async def message_of(context: Context, within_s: float) -> bytes:
    """Return the message of a call that has one.

    Handlers ask for it when they want it, so that a call can be refused before its message has come.

    Raises:
        DeadlineError: it did not come in time.
        InputError: there is none.
    """
    try:
        async with asyncio.timeout(within_s):
            raw = await context.read()
    except TimeoutError:
        raise DeadlineError(f"the call's message did not come within {within_s:g} s") from None
    if raw is aio.EOF:
        raise InputError("the call has no message")
    return bytes(raw)


class LeftOut(grpc.GenericRpcHandler):
    """Answers methods of the protocol that a node does not have."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return a refusal of such a method, None for any other."""
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if service != SERVICE or method not in _LEFT_OUT:
            return None
        return _refuse(StatusCode.UNIMPLEMENTED, _LEFT_OUT[method])


def _refuse(status: StatusCode, reason: str) -> Handler:
    """Return a handler that aborts whatever is called; of a stream of requests none is read."""

    async def abort(_: object, context: Context) -> NoReturn:
        await context.abort(status, reason)

    return grpc.stream_stream_rpc_method_handler(abort)
