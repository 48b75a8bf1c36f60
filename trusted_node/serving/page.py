"""The node's page: what it is doing, and a form that asks a model and shows what the server saw of it.

    GET  /              the page: one document, with its script and style inside and nothing from elsewhere
    GET  /page/status   what node and models are doing, as JSON (`page_view.status`)
    POST /page/infer    a query (`page_query`) -> its result and what each party saw (`page_view.answer`)

    app = make_app(models, limits, tokens, routes=page_routes(models, hosts=["10.0.0.7"], tokens=tokens))

The document holds nothing of models or queries, so everybody may have it; the other two check tokens, and all check
where a request comes from (`page_guard`). Scripts and styles run by their hashes only, and the script makes elements
and text, never markup: what a model's card says can't become code.
Sources: Content Security Policy Level 3 and Trusted Types (W3C).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, wraps
from importlib import resources
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heinfer.errors import HeinferError, InputError, IntegrityError, ProtocolError
from heinfer.wire import TokenFile
from trusted_node.engine import DataError, QueryResult
from trusted_node.serving import page_view
from trusted_node.serving.access import open_to_all
from trusted_node.serving.http_body import CodingError, LateError, Room, TooLargeError, read_body, share_of
from trusted_node.serving.interface import (
    Channel,
    DeadlineError,
    ModelNotReadyError,
    Models,
    Query,
    QueueFullError,
    ServedModel,
    UnknownModelError,
)
from trusted_node.serving.limits import JSON_WEIGHT, MIB, ServingLimits
from trusted_node.serving.page_guard import PageGuard, Refusal
from trusted_node.serving.page_query import PageQuery

logger = logging.getLogger(__name__)
#: Seconds that the page waits for a result.
QUERY_S: Final = 60.0
#: A request, base64 and all: an image of 3 x 1000 x 1000 in float32 fits.
BODY_BYTES: Final = 16 * MIB
_RETRY_S: Final = 1
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
#: Errors of a query: HTTP status, kind for the script, and words where the error's own are for somebody else.
_ANSWERS: Final[tuple[tuple[type[HeinferError], int, str, str | None], ...]] = (
    (UnknownModelError, 404, "model", None),
    (ModelNotReadyError, 503, "model", None),
    (QueueFullError, 429, "busy", None),
    (DeadlineError, 504, "late", None),
    (DataError, 422, "data", None),
    (TooLargeError, 413, "input", None),
    (CodingError, 415, "input", None),
    (LateError, 408, "input", None),
    (InputError, 400, "input", None),
    (IntegrityError, 502, "integrity", "the server's answer was not the one an honest server gives; it was not used"),
    (ProtocolError, 502, "server", "the untrusted server failed or is not there; the node goes on asking for it"),
)
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def page_routes(
    models: Models,
    *,
    hosts: Iterable[str] = (),
    tokens: TokenFile | None = None,
    limits: ServingLimits | None = None,
) -> list[Route]:
    """Return the routes of the page.

    Args:
        models: what it shows and asks.
        hosts: names and addresses by which the node is reached, beside loopback (`PageGuard.hosts`).
        tokens: clients that may ask; None: whoever may connect.
        limits: sizes and times; None: the usual ones. A request has `BODY_BYTES` at most.
    """
    page = _Page(models, PageGuard.of(hosts, tokens), limits or ServingLimits())
    return [
        Route("/", page.document, methods=["GET"]),
        Route("/page/status", page.status, methods=["GET"]),
        Route("/page/infer", page.infer, methods=["POST"]),
    ]


@cache
def document() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy."""
    folder = resources.files(__package__)
    style, script = (_read(folder, name) for name in (("page.css",), ("page_digits.js", "page.js")))
    text = _read(folder, ("page.html",)).replace("{{style}}", style).replace("{{script}}", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return text.encode(), policy


def _read(folder: Any, names: tuple[str, ...]) -> str:
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _answered(endpoint: Callable[[_Page, Request], Awaitable[Response]]) -> Any:
    """Turn what an endpoint refuses, or fails with, into an answer that can be read; `http_gate` does the rest."""

    @wraps(endpoint)
    async def answer(page: _Page, request: Request) -> Response:
        try:
            return await endpoint(page, request)
        except Refusal as refusal:
            found = refusal
        except HeinferError as error:
            found = _refusal(error)
        headers = dict(_HEADERS)
        if found.retry_s:
            headers["Retry-After"] = str(found.retry_s)
        if found.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": found.message, "kind": found.kind}, found.status, headers)

    return answer


class _Page:
    """The endpoints."""

    def __init__(self, models: Models, guard: PageGuard, limits: ServingLimits) -> None:
        self._models = models
        self._guard = guard
        self._limits = replace(limits, body_bytes=min(limits.json_bytes, BODY_BYTES))
        self._room = Room(limits)
        self._started = time.monotonic()

    @open_to_all
    @_answered
    async def document(self, request: Request) -> Response:
        """Return the page."""
        self._guard.check_host(request)
        text, policy = document()
        return Response(text, headers={**_HEADERS, "Content-Security-Policy": policy}, media_type="text/html")

    @_answered
    async def status(self, request: Request) -> Response:
        """Return what the node is doing."""
        self._guard.check_read(request)
        found = await asyncio.to_thread(page_view.status, self._models, time.monotonic() - self._started)
        return JSONResponse(found, headers=_HEADERS)

    @_answered
    async def infer(self, request: Request) -> Response:
        """Run a query."""
        self._guard.check_write(request)
        with share_of(self._room) as share:
            body = await read_body(request, self._limits, share)
            share.grow_to((1 + JSON_WEIGHT) * len(body))
            model, query, watched = await asyncio.to_thread(self._prepare, body)
            started = time.perf_counter()
            result = await _result(request, model.submit(query))
            ran = page_view.Ran(result, time.perf_counter() - started, watched)
            found = await asyncio.to_thread(page_view.answer, model.plan, model.card, query.inputs, ran)
        return JSONResponse(found, headers=_HEADERS)

    def _prepare(self, body: bytes | bytearray) -> tuple[ServedModel, Query, page_view.Watched]:
        asked = PageQuery.parse(body)
        model = self._models.get(asked.model)
        watched = page_view.Watched(page_view.SHOWN_BLOCK)
        deadline = time.monotonic() + QUERY_S
        request_id = f"page-{secrets.token_hex(8)}"
        query = Query(asked.inputs(model.plan), Channel.PAGE, request_id, deadline, watch=watched)
        return model, query, watched


async def _result(request: Request, future: Future[QueryResult]) -> QueryResult:
    """Wait for a query; one whose page has gone is dropped."""
    waiting, gone = asyncio.wrap_future(future), asyncio.ensure_future(_closed(request))
    both: list[asyncio.Future[Any]] = [waiting, gone]
    try:
        await asyncio.wait(both, timeout=QUERY_S, return_when=asyncio.FIRST_COMPLETED)
        if waiting.cancelled():
            raise Refusal(503, "model", "the query was dropped: its model is being unloaded", _RETRY_S)
        if waiting.done():
            return waiting.result()
        if gone.done():
            raise Refusal(499, "gone", "the page went away")
        raise DeadlineError(f"there was no result within {QUERY_S:g} s")
    finally:
        gone.cancel()
        waiting.cancel()


async def _closed(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: HeinferError) -> Refusal:
    for kind, status, word, message in _ANSWERS:
        if isinstance(error, kind):
            retry_s = _RETRY_S if status in (429, 503) else 0
            return Refusal(status, word, message or str(error), retry_s)
    logger.error("a query of the page failed: %s", type(error).__name__)
    return Refusal(500, "failed", "the query failed; the node's log has the kind of error")
