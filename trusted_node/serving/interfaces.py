"""A node's ways in: frames always, HTTP and gRPC where they are asked for, over the same models.

    Interfaces(models, settings)   frames --+
                                   HTTP   --+--> Models     HTTP also has the page, and /metrics
                                   gRPC   --+

HTTP and gRPC need the extra `serve`, which is imported here and nowhere earlier. All of them serve clients under one
policy: plain text on loopback only, elsewhere TLS where both sides show a certificate, or plain text where the operator
allowed it, and then with tokens (`heinfer.wire.query_service.check_serving`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from heinfer.errors import InputError
from heinfer.wire import Address, Limits, PlainText, Security, Tls, TokenFile
from heinfer.wire.query_service import check_serving
from trusted_node.engine import default_share
from trusted_node.service import NodeService
from trusted_node.serving.interface import Channel, Models
from trusted_node.serving.limits import ServingLimits

if TYPE_CHECKING:
    from trusted_node.serving.metrics import NodeMetrics

#: What the extra `serve` brings.
_SERVE: Final = frozenset({"grpc", "grpc_health", "grpc_reflection", "prometheus_client", "starlette", "uvicorn"})


@dataclass(frozen=True, slots=True)
class InterfaceSettings:
    """Where and how a node serves its clients.

    Attributes:
        frames: where it listens for heinfer's own clients.
        http: for HTTP; None: not at all.
        grpc: for gRPC; None: not at all.
        page: whether HTTP has the page.
        page_hosts: names by which the page is reached, beside loopback and the address itself.
        security: TLS with clients, or where plain text is allowed.
        tokens: the clients that are served; None: whoever connects.
        limits: sizes and times of frames.
        allow_trace: whether clients may ask for values inside the model, by frames.
        memory: bytes for all queries that are there at a moment, of which each way in has its part; None: a sixth of
            the machine's.
    """

    frames: Address
    http: Address | None = None
    grpc: Address | None = None
    page: bool = False
    page_hosts: Sequence[str] = ()
    security: Security = PlainText.ON_LOOPBACK
    tokens: TokenFile | None = None
    limits: Limits = field(default_factory=Limits)
    allow_trace: bool = False
    memory: int | None = None

    @property
    def part(self) -> int:
        """Bytes for the queries of one way in; the page is one beside the rest of HTTP."""
        ways = 1 + (self.http is not None) * (1 + self.page) + (self.grpc is not None)
        return (self.memory or default_share()) // ways

    def check(self) -> None:
        """Raise TransportError where this is no way to serve clients, ParameterError where memory is too small."""
        if self.http is not None or self.grpc is not None:
            ServingLimits.within(self.part)
        for address in (self.frames, self.http, self.grpc):
            if address is not None:
                check_serving(address, self.security, self.tokens)


class Interface(Protocol):
    """One way in."""

    address: Address

    def stop(self, grace_s: float) -> None:
        """Refuse new queries, let running ones end within the grace, then stop."""


class Interfaces:
    """Serves clients until stopped.

    Args:
        models: what is served.
        first: the model that clients of frames get who name none.
        settings: where and how.
        metrics: shown at /metrics of HTTP; None: not.

    Attributes:
        open: by name, "listening" for frames, in the order of the start.

    Raises:
        TransportError: a port is in use, or this is no way to listen there.
        InputError: the extra `serve` is needed and not installed.
    """

    def __init__(
        self, models: Models, first: str, settings: InterfaceSettings, metrics: NodeMetrics | None = None
    ) -> None:
        self.open: dict[str, Interface] = {}
        settings.check()
        ways: list[tuple[str, Callable[[], Interface]]] = [
            ("listening", lambda: _serve_frames(models, first, settings, metrics)),
        ]
        if settings.http is not None:
            ways.append(("http", lambda: _serve_http(models, settings, metrics)))
        if settings.grpc is not None:
            ways.append(("grpc", lambda: _serve_grpc(models, settings, metrics)))
        try:
            for name, start in ways:
                self.open[name] = start()
        except BaseException:
            self.stop(0.0)
            raise

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens, by name."""
        return {name: str(interface.address) for name, interface in self.open.items()}

    def stop(self, grace_s: float) -> None:
        """Stop all of them at once, so that they share the grace."""
        threads = [threading.Thread(target=interface.stop, args=(grace_s,)) for interface in self.open.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def make_metrics() -> NodeMetrics:
    """Return a node's metrics, an observer to be.

    Raises:
        InputError: the extra `serve` is not installed.
    """
    with _extra("--metrics"):
        from trusted_node.serving.metrics import NodeMetrics

        return NodeMetrics()


def _serve_frames(models: Models, first: str, settings: InterfaceSettings, metrics: NodeMetrics | None) -> Interface:
    service = NodeService(
        models,
        first,
        settings.frames,
        settings.limits,
        settings.allow_trace,
        settings.security,
        settings.tokens,
        settings.part,
    )
    if metrics is not None:
        metrics.watch_connections(Channel.FRAMES, service.connections)
        if isinstance(settings.security, Tls):
            metrics.watch_certificate("clients", settings.security)
    return service


def _serve_http(models: Models, settings: InterfaceSettings, metrics: NodeMetrics | None) -> Interface:
    assert settings.http is not None  # the caller has looked
    with _extra("--http"):
        from trusted_node.serving.http_app import make_app
        from trusted_node.serving.http_server import HttpServer

        limits = ServingLimits.within(settings.part)
        routes: list[Any] = [] if metrics is None else list(metrics.routes(models))
        if settings.page:
            from trusted_node.serving.page import page_routes

            hosts = (settings.http.host, *settings.page_hosts)
            routes += page_routes(models, hosts=hosts, tokens=settings.tokens, limits=limits)
        app = make_app(models, limits, settings.tokens, routes, metrics)
        return HttpServer(settings.http, app, settings.security, limits)


def _serve_grpc(models: Models, settings: InterfaceSettings, metrics: NodeMetrics | None) -> Interface:
    assert settings.grpc is not None  # the caller has looked
    with _extra("--grpc"):
        from trusted_node.serving.grpc_service import GrpcServer

        limits = ServingLimits.within(settings.part)
        return GrpcServer(settings.grpc, models, limits, settings.security, settings.tokens, metrics)


@contextmanager
def _extra(option: str) -> Iterator[None]:
    """Say in one line what is missing where the extra `serve` is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _SERVE:
            raise
        raise InputError(f"{option} needs {error.name}: pip install 'heinfer[serve]'") from None
