"""The node's HTTP server: uvicorn in a thread of its own, with its own event loop.

    server = HttpServer(Address("127.0.0.1", 8000), make_app(models), security)
    ...
    server.stop(grace_s=10.0)       # running answers have ten seconds to end

HTTP/1.1 by h11; TLS 1.3 with certificates of both sides, or plain text on loopback, as everywhere here. What uvicorn
does not bound is bounded here: connections, how long headers may take, and their size.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from heinfer.wire.address import Address, cannot_listen
from heinfer.wire.security import PlainText, Security, Tls, check_listening
from trusted_node.serving.http_gate import answer_json
from trusted_node.serving.limits import ServingLimits

_BACKLOG = 1024
#: Seconds beyond the grace after which the thread is not waited for any more.
_LAST_S = 5.0


class HttpServer:
    """Serves an application until stopped.

    Args:
        address: where to listen; port 0 takes a free one.
        app: the application.
        security: TLS, or where plain text is allowed.
        limits: sizes and times; None: the usual ones.

    Raises:
        TransportError: the port is in use, the address is not this machine's, or this is no way to listen there.
    """

    def __init__(
        self,
        address: Address,
        app: ASGIApp,
        security: Security = PlainText.ON_LOOPBACK,
        limits: ServingLimits | None = None,
    ) -> None:
        check_listening(address, security)
        self._socket = _listen(address)
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._server = uvicorn.Server(_configuration(app, security, limits or ServingLimits()))
        self._thread = threading.Thread(target=self._run, name="heinfer-http", daemon=True)
        self._running = threading.Event()
        self.start()

    def start(self) -> None:
        """Begin to answer; the constructor has done so already, and a second call does nothing."""
        if not self._running.is_set():
            self._running.set()
            self._thread.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Take no more connections, let running answers end within the grace, then stop."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(grace_s + _LAST_S)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def _listen(address: Address) -> socket.socket:
    """Bind a socket that knows that it is TCP's.

    Of others asyncio doesn't switch Nagle's algorithm off, and then an answer in two writes takes 40 ms.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address.endpoint)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise cannot_listen(address) from None
    return listening


def _configuration(app: ASGIApp, security: Security, limits: ServingLimits) -> uvicorn.Config:
    tls = security.accepting if isinstance(security, Tls) else None
    return uvicorn.Config(
        app,
        http=partial(_Connection, limits),  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,  # has paths and addresses; the gate's line has not
        proxy_headers=False,  # nobody is believed who says for whom he asks
        server_header=False,
        timeout_keep_alive=round(limits.idle_s),
        h11_max_incomplete_event_size=limits.header_bytes,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


class _Connection(H11Protocol):
    """A connection whose silence, slow headers and unread answers end, and whose errors are JSON."""

    def __init__(self, limits: ServingLimits, **given: Any) -> None:
        super().__init__(**given)
        self.access_log = False  # whatever handlers uvicorn's logger has been given
        self._limits = limits
        self._late: asyncio.TimerHandle | None = None
        self._unread = 0
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self.app = partial(_busy, self._limits.retry_after_s)
        if len(self.connections) > 2 * self._limits.connections:  # not even a word for each of these
            transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._heed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        """Watch that an answer is read while the next one waits behind it."""
        super().pause_writing()
        self._await_reading(0)

    def resume_writing(self) -> None:
        """Watch no more."""
        self._heed()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which nothing is asked; one whose last answer is being read may go on."""
        left = self.transport.get_write_buffer_size()
        if left and left == self._unread:
            self.transport.abort()
        elif left:
            self._unread = left
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": "this is no HTTP request, or its headers are too large"}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        parts = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        for part in parts:
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An offer to speak something else is passed over, without a word in the log."""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Give headers their time, from the connection's or their own first byte on, and so to unread bodies."""
        answered = self.cycle is None or self.cycle.response_complete
        their_state = self.conn.their_state
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        if answered and (their_state is h11.SEND_BODY or (their_state is h11.IDLE and begun)):
            self._late = self._late or self.loop.call_later(self._limits.header_s, self.transport.abort)
        else:
            self._forget()

    def _await_reading(self, unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left == unread:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(self._limits.idle_s, self._await_reading, left)

    def _heed(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def _busy(retry_after_s: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse what comes on a connection too many."""
    headers = {"Retry-After": str(retry_after_s), "Connection": "close"}
    answer = answer_json({"error": "the node has as many connections as it takes; ask again later"}, 503, headers)
    await answer(scope, receive, send)
