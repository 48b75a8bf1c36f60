"""The node's metrics: what was asked, what it took, and how models, pools and servers are.

    scheduler --FinishedQuery--> NodeMetrics (counters, histograms) --+
    models, certificates, connections --asked at every scrape---------+--> /metrics

Labels come from closed sets: models and servers that the operator named, and enums. Numbers are times, sizes and
counts; of `QueryStatistics`, whose error bound and rounding step depend on data, only those are read. docs/metrics.md
lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from heinfer.exposition import (
    COUNTS,
    SECONDS,
    Collector,
    CollectorRegistry,
    Counter,
    CounterMetricFamily,
    Family,
    GaugeMetricFamily,
    Histogram,
    Metric,
    Readings,
    new_registry,
    render,
)
from heinfer.wire import Tls
from trusted_node.serving.interface import (
    Channel,
    FinishedQuery,
    ModelNotReadyError,
    Models,
    ModelState,
    ModelStatus,
    Outcome,
    UnknownModelError,
)
from trusted_node.serving.query_log import seconds_by_part
from trusted_node.statistics import QueryStatistics

if TYPE_CHECKING:
    from starlette.requests import Request

    from heinfer.wire.listener import ConnectionCounts

PATH = "/metrics"
#: What is said instead of a mode where a query did not run, and instead of a model that the node does not have.
NO_MODE, NO_MODEL = "none", "unknown"
_DAY = timedelta(days=1)


class NodeMetrics:
    """An `Observer`, and what else is to be known of a node.

    Attributes:
        registry: all of its metrics.
    """

    def __init__(self) -> None:
        self.registry = new_registry("node")
        self._models: Models | None = None
        self._names: frozenset[str] = frozenset()
        self._readings = Readings(self.registry)

        def counter(name: str, text: str, *labels: str) -> Family[Counter]:
            return Family(Counter(f"heinfer_node_{name}", text, labels, registry=self.registry))

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Family[Histogram]:
            return Family(Histogram(f"heinfer_node_{name}", text, labels, registry=self.registry, buckets=buckets))

        self._queries = counter("queries", "Queries that have ended.", "model", "channel", "mode", "outcome")
        self._samples = counter("samples", "Samples that were answered.", "model", "mode")
        self._seconds = histogram("query_seconds", "Answered queries, from coming to going.", "model", "channel")
        self._runs = counter("runs", "Runs of one query, or of several that were joined.", "model", "mode")
        self._joined = histogram("run_samples", "Samples of a run.", "model", buckets=COUNTS)
        self._parts = histogram(
            "part_seconds", "Where the time goes; the queue by query, the rest by run.", "model", "part"
        )
        self._bytes = counter("bytes", "Ciphertexts of runs, to (up) and from (down) servers.", "model", "direction")
        self._rounds = counter("rounds", "Round trips of runs.", "model")
        self._prepared = counter(
            "prepared_samples", "Samples of runs in prepared mode: from the pool, or prepared late.", "model", "source"
        )

    def finished(self, query: FinishedQuery) -> None:
        """Count a query that has ended, and once for all of its queries a run."""
        model, statistics = self._known(query.model), query.statistics
        mode = NO_MODE if statistics is None else statistics.mode
        self._parts.of(model, "queue").observe(query.queued_s)
        if query.outcome is Outcome.OK:
            self._samples.of(model, mode).inc(query.samples)
            self._seconds.of(model, query.channel.value).observe(query.seconds)
        if statistics is not None and statistics.count_once():
            self._count_run(model, query.joined, statistics)
        self._queries.of(model, query.channel.value, mode, query.outcome.value).inc()

    def watch(self, models: Models) -> None:
        """Ask these models at every scrape; before, every model's name is `NO_MODEL`."""
        if self._models is None:
            self._models = models
            _ModelsCollector(models, self.registry)

    def watch_connections(self, channel: Channel, read: Callable[[], ConnectionCounts]) -> None:
        """Ask a listener at every scrape."""
        labels = {"channel": channel.value}
        text = "Connections that are open."
        self._readings.gauge("heinfer_node_connections", text, labels, lambda: read().served)
        for reason in ("busy", "stopping", "handshake", "protocol"):
            self._readings.counter(
                "heinfer_node_connections_refused",
                "Connections that were refused.",
                {**labels, "reason": reason},
                lambda reason=reason: getattr(read(), reason),  # type: ignore[misc]
            )

    def watch_certificate(self, towards: str, tls: Tls) -> None:
        """Tell when our certificate expires.

        Args:
            towards: "servers" or "clients".
            tls: holds it.
        """
        self._readings.gauge(
            "heinfer_node_certificate_days_left",
            "Days until our certificate expires; negative afterwards.",
            {"towards": towards},
            lambda: (tls.expires - datetime.now(UTC)) / _DAY,
        )

    def routes(self, models: Models) -> list[BaseRoute]:
        """Return the route for /metrics; watches the models."""
        self.watch(models)

        def answer(request: Request) -> Response:
            content, kind = render(self.registry, request.headers.get("accept", ""))
            return Response(content, headers={"Content-Type": kind, "Cache-Control": "no-store"})

        return [Route(PATH, answer, methods=["GET"])]

    def _known(self, model: str) -> str:
        """Return a model's name if it is one of ours: what a client asks for does not become a label."""
        if model not in self._names and self._models is not None:
            self._names = frozenset(entry.name for entry in self._models.entries())
        return model if model in self._names else NO_MODEL

    def _count_run(self, model: str, samples: int, statistics: QueryStatistics) -> None:
        blocks = statistics.blocks
        self._runs.of(model, statistics.mode).inc()
        self._joined.of(model).observe(samples)
        self._rounds.of(model).inc(statistics.rounds)
        self._bytes.of(model, "up").inc(sum(block.bytes_up for block in blocks))
        self._bytes.of(model, "down").inc(sum(block.bytes_down for block in blocks))
        for part, seconds in seconds_by_part(statistics).items():
            self._parts.of(model, part).observe(seconds)
        if statistics.mode == "prepared":
            self._prepared.of(model, "pool").inc(statistics.pooled)
            self._prepared.of(model, "late").inc(max(0, samples - statistics.pooled))


class _ModelsCollector(Collector):
    """Asks models how they are."""

    def __init__(self, models: Models, registry: CollectorRegistry) -> None:
        self._models = models
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Return their states, and of those that are loaded what they do."""
        ready = GaugeMetricFamily("heinfer_node_ready", "1 where every model that should be is ready.")
        ready.add_metric((), self._models.ready)
        states = GaugeMetricFamily("heinfer_node_model_state", "1 for the state it is in.", labels=("model", "state"))
        loaded: dict[str, ModelStatus] = {}
        for entry in self._models.entries():
            for state in ModelState:
                states.add_metric((entry.name, state.value), entry.state is state)
            try:
                loaded[entry.name] = self._models.get(entry.name).status()
            except (ModelNotReadyError, UnknownModelError):
                continue
        return iter((ready, states, *_gauges(loaded), *_servers(loaded)))


def _gauges(models: dict[str, ModelStatus]) -> Iterator[Metric]:
    rows: tuple[tuple[str, str, Callable[[ModelStatus], float | None]], ...] = (
        ("queue_queries", "Queries that wait.", lambda s: s.queued_queries),
        ("queue_samples", "Samples that wait.", lambda s: s.queued_samples),
        ("running_queries", "Queries under way.", lambda s: s.running_queries),
        ("pool_ready", "Prepared samples that are ready.", lambda s: s.pool_ready),
        ("pool_size", "Prepared samples that are kept when idle.", lambda s: s.pool_size),
        ("hints_days_left", "Days until seed and hints are to be renewed.", lambda s: s.hints_days_left),
    )
    for name, text, read in rows:
        gauge = GaugeMetricFamily(f"heinfer_node_{name}", text, labels=("model",))
        for model, status in models.items():
            value = read(status)
            if value is not None:
                gauge.add_metric((model,), value)
        yield gauge


def _servers(models: dict[str, ModelStatus]) -> Iterator[Metric]:
    labels = ("model", "server")
    families = (
        (GaugeMetricFamily("heinfer_node_server_resting", "1 for one left alone for now.", labels=labels), "resting"),
        (
            GaugeMetricFamily("heinfer_node_server_quarantined", "1 for one asked no more.", labels=labels),
            "in_quarantine",
        ),
        (GaugeMetricFamily("heinfer_node_server_failures", "Recent failures in a row.", labels=labels), "failures"),
        (CounterMetricFamily("heinfer_node_server_forgeries", "Dishonest answers.", labels=labels), "forgeries"),
        (CounterMetricFamily("heinfer_node_server_repetitions", "Uploads sent again.", labels=labels), "repetitions"),
    )
    for family, name in families:
        for model, status in models.items():
            for server in status.servers:
                family.add_metric((model, server.name), float(getattr(server, name)))
        yield family
