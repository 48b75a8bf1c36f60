"""Around every HTTP request: who asks, under which id, what failed, and one line in the log.

    POST /v2/models/{name}/infer 200 in 6.4 ms, request 5f1d0c3a9b7e2468
    POST /v2/models/{name}/infer 503 in 0.2 ms, request clinic-17 (QueueFullError)

The line has the route's pattern, not the path, and nothing that the request or its answer says. An exception that is
none of ours is logged by its type and place: its message might quote a value.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from heinfer.errors import HeinferError, InputError, IntegrityError, RemoteProtocolError
from heinfer.wire.messages import FailureCode, RefusedError
from heinfer.wire.tokens import TokenFile
from trusted_node.serving.access import (
    OTHER_HOST,
    OTHER_ORIGIN,
    UNAUTHORISED,
    holder,
    is_open_to_all,
    is_other_origin,
    is_rebindable,
)
from trusted_node.serving.http_body import CodingError, FramingError, LateError, TooLargeError
from trusted_node.serving.interface import DeadlineError, ModelNotReadyError, QueueFullError, UnknownModelError

logger = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_INTERNAL = "internal error, see the node's log"
#: Results are a patient's: no cache keeps them, and no browser guesses that they are something else.
_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
#: What nginx logs where the client went away; nobody reads the answer.
CLIENT_GONE = 499


class CancelledByClientError(HeinferError):
    """The client went away before its answer was there."""


class StoppingError(HeinferError):
    """The node stops, and has not waited for this answer."""


def answer_json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make an answer of JSON."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(body, status, headers, "application/json")


class Gate:
    """The application around routes.

    Args:
        routes: what is served.
        tokens: the clients that are served; None: whoever connects.
        retry_after_s: seconds after which who came at a bad moment may come again.
    """

    def __init__(self, routes: Collection[BaseRoute], tokens: TokenFile | None, retry_after_s: int) -> None:
        self._router = Router(list(routes), redirect_slashes=False, default=_not_found)
        self._tokens = tokens
        self._retry_after_s = retry_after_s
        self._open = {r.path for r in routes if isinstance(r, Route) and is_open_to_all(r.endpoint)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        started = time.perf_counter()
        headers = {name: value for name, value in scope["headers"] if name in _READ}
        request_id = _request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        scope["app"] = self._router  # then a wrong method raises, and is answered like other errors
        scope.setdefault("state", {})["request_id"] = request_id
        said = _Said(send, request_id)
        failure: Exception | None = None
        try:
            self._let_in(scope, headers)
            await self._router(scope, receive, said)
        except Exception as error:
            failure = error
            if said.status:  # too late to say it
                raise
            await self._failed(error)(scope, receive, said)
        except asyncio.CancelledError:  # the server's grace is over
            failure = StoppingError("the node is stopping; ask again later")
            if not said.status:
                await self._failed(failure)(scope, receive, said)
        finally:
            _log(scope, said.status, time.perf_counter() - started, request_id, failure)

    def _let_in(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if is_other_origin(origin, host):
            raise HTTPException(403, OTHER_ORIGIN)
        if self._tokens is None:
            if scope["scheme"] != "https" and is_rebindable(host):
                raise HTTPException(403, OTHER_HOST)
        elif scope["path"] not in self._open:
            try:
                name = holder(self._tokens, headers.get(b"authorization", b"").decode("latin-1"))
            except InputError:
                raise HTTPException(503, "the node can't read its file of tokens") from None
            if name is None:
                raise HTTPException(401, UNAUTHORISED, {"WWW-Authenticate": "Bearer"})
            scope["state"]["client"] = name

    def _failed(self, error: Exception) -> Response:
        status, text, headers = status_of(error), text_of(error), {}
        if isinstance(error, HTTPException) and error.headers:
            headers = dict(error.headers)
        elif status == 503:
            headers = {"Retry-After": str(self._retry_after_s)}
        elif status in (408, 413) or isinstance(error, FramingError):  # what is left of the body is not read
            headers = {"Connection": "close"}
        return answer_json({"error": text}, status, headers)


class _Said:
    """What is sent, with headers that every answer has; remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = [*_HEADERS, (b"x-request-id", request_id.encode())]
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = list(message.get("headers", ()))
            names = {name for name, _ in given}
            message = {**message, "headers": given + [h for h in self._headers if h[0] not in names]}
        await self._send(message)


_READ = {b"host", b"origin", b"authorization", b"x-request-id"}


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    match error:
        case HTTPException():
            return error.status_code
        case UnknownModelError():
            return 404
        case TooLargeError():
            return 413
        case CodingError():
            return 415
        case InputError():
            return 400
        case LateError():
            return 408
        case ClientDisconnect() | CancelledByClientError():
            return CLIENT_GONE
        case QueueFullError() | ModelNotReadyError() | StoppingError() | concurrent.futures.CancelledError():
            return 503
        case RefusedError(code=FailureCode.BUSY | FailureCode.STOPPING):
            return 503
        case DeadlineError():
            return 504
        case RemoteProtocolError() | IntegrityError():
            return 502
        case _:
            return 500


def text_of(error: Exception) -> str:
    """Return what the client is told of an error: the message of ours, nothing of others."""
    match error:
        case HTTPException():
            return error.detail
        case concurrent.futures.CancelledError():
            return "the query was dropped: its model is being unloaded"
        case UnknownModelError():  # clients written for Triton look for these words
            return f"Request for unknown model: {error}"
        case HeinferError():
            return str(error)
        case _:
            return _INTERNAL


def _request_id(given: str) -> str:
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def _log(scope: Scope, status: int, seconds: float, request_id: str, failure: Exception | None) -> None:
    route = getattr(scope.get("route"), "path", "(no route)")
    method = scope["method"] if scope["method"] in _METHODS else "(other)"
    ms = 1e3 * seconds
    reason = "" if failure is None else f" ({type(failure).__name__})"
    extra = {"request_id": request_id, "ms": round(ms, 3), "status": status, "route": route, "method": method}
    logger.info("%s %s %d in %.1f ms, request %s%s", method, route, status, ms, request_id, reason, extra=extra)
    if failure is not None and status_of(failure) == 500 and not isinstance(failure, HeinferError):
        place = traceback.extract_tb(failure.__traceback__)[-1]
        logger.error(
            "request %s ended by %s at %s:%d", request_id, type(failure).__name__, place.filename, place.lineno or 0
        )


_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise HTTPException(404, "there is no such page: /openapi.json lists what there is")
    raise RuntimeError(f"expected HTTP, found {scope['type']}")
