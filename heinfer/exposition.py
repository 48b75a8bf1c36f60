"""Metrics as Prometheus reads them: the only module that knows prometheus_client, which the extra `serve` brings.

    registry = new_registry("server")
    counter = Counter("heinfer_server_requests", "...", ["mode"], registry=registry)
    page, kind = render(registry, "text/plain")            # heinfer_server_requests_total{mode="prepared"} 5.0

Text or OpenMetrics, as the Accept header asks. Every registry has the process's own metrics (`process_*`: memory, CPU
time, open files) and says what runs (`heinfer_build_info`).
"""

from __future__ import annotations

import logging
import platform
import ssl
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from heinfer.errors import ParameterError
from heinfer.wire import Address, PlainText, Security, Tls
from heinfer.wire.address import cannot_listen
from heinfer.wire.security import check_listening

__all__ = [
    "Collector",
    "CollectorRegistry",
    "Counter",
    "CounterMetricFamily",
    "Family",
    "GaugeMetricFamily",
    "Histogram",
    "Metric",
    "MetricsServer",
    "Readings",
    "new_registry",
    "render",
]
logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", Counter, Histogram)
#: Seconds that a connection for metrics may be silent.
SILENT_S = 10.0
#: Bounds of histograms of seconds: parts of a query take tenths of a millisecond, batches minutes.
SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
#: Bounds of histograms of samples and of requests that run together.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


def new_registry(role: str) -> CollectorRegistry:
    """Return a registry that knows the process and says what runs.

    Args:
        role: "node" or "server".
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    build = Info("heinfer_build", "What runs here.", registry=registry)
    build.info({"version": version("heinfer"), "python": platform.python_version(), "role": role})
    return registry


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return all metrics, and the content type, that an Accept header asks for."""
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


class Family(Generic[Kind]):
    """A counter or histogram by labels, which keeps what `labels` would look up anew; safe to use from several threads.

    Args:
        metric: with labels.
    """

    def __init__(self, metric: Kind) -> None:
        self._metric: Kind = metric
        self._children: dict[tuple[str, ...], Kind] = {}

    def of(self, *labels: str) -> Kind:
        """Return the series of these labels, which come from closed sets."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._metric.labels(*labels)
        return child


class MetricsServer:
    """Serves a registry over HTTP, /metrics and any other path, until stopped.

    Args:
        address: where to listen; port 0 takes a free one.
        registry: what to serve.
        security: plain text on loopback; elsewhere TLS 1.3 where both sides show a certificate of the same authority
            as on the party's other port, or plain text where that was allowed.

    Raises:
        TransportError: the port is in use, or this is no way to listen there.
    """

    def __init__(
        self, address: Address, registry: CollectorRegistry, security: Security = PlainText.ON_LOOPBACK
    ) -> None:
        check_listening(address, security)
        ca, certificate, key = map(str, security.files) if isinstance(security, Tls) else (None, None, None)
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                address.port,
                address.host,
                registry,
                certfile=certificate,
                keyfile=key,
                client_cafile=ca,
                client_auth_required=ca is not None,
                tls_min_version=ssl.TLSVersion.TLSv1_3,
            )
        except OSError:
            raise cannot_listen(address) from None
        _bound(self._server)
        self.address = Address(address.host, self._server.server_port)

    def stop(self, grace_s: float = 0.0) -> None:
        """Stop; what is being answered ends with its connection."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(grace_s or None)


def _bound(server: Any) -> None:
    """Bound what a silent peer costs: of prometheus_client's server a thread, for `SILENT_S`.

    A handshake is for the connection's thread to do; in the thread that accepts it would make all others wait, and
    `shutdown` too.
    """
    server.RequestHandlerClass = type("_Handler", (server.RequestHandlerClass,), {"timeout": SILENT_S})
    server.handle_error = _log_failure
    if isinstance(server.socket, ssl.SSLSocket):
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]


def _log_failure(request: object, client_address: object) -> None:
    logger.warning("a request for metrics ended by %s", type(sys.exception()).__name__)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A metric whose series are asked for: what it is, and by labels the sources that each is the sum of."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    text: str
    labels: tuple[str, ...]
    series: dict[tuple[str, ...], list[Callable[[], float]]] = field(default_factory=dict)


class Readings(Collector):
    """Gauges and counters whose values are asked for at every scrape; safe to use from several threads.

    Args:
        registry: where they belong.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._readings: dict[str, _Reading] = {}
        registry.register(self)

    def gauge(self, name: str, text: str, labels: dict[str, str], read: Callable[[], float]) -> None:
        """Add a series to a gauge, which is made where it is not there yet; one with the same labels adds up.

        Raises:
            ParameterError: it has other labels.
        """
        self._add(_Reading(GaugeMetricFamily, text, tuple(labels)), name, labels, read)

    def counter(self, name: str, text: str, labels: dict[str, str], read: Callable[[], float]) -> None:
        """Add a series to a counter, whose name is given without `_total`. Raises as `gauge`."""
        self._add(_Reading(CounterMetricFamily, text, tuple(labels)), name, labels, read)

    def _add(self, made: _Reading, name: str, labels: dict[str, str], read: Callable[[], float]) -> None:
        with self._lock:
            reading = self._readings.setdefault(name, made)
            if (reading.kind, reading.labels) != (made.kind, made.labels):
                raise ParameterError(f"metric {name} has labels {reading.labels}, got {made.labels}")
            reading.series.setdefault(tuple(labels.values()), []).append(read)

    def collect(self) -> list[Metric]:
        """Return all of them, as they are now."""
        found: list[Metric] = []
        with self._lock:
            readings = [(name, reading, dict(reading.series)) for name, reading in self._readings.items()]
        for name, reading, series in readings:
            family = reading.kind(name, reading.text, labels=reading.labels)
            for values, sources in series.items():
                family.add_metric(values, sum(read() for read in sources))
            found.append(family)
        return found
