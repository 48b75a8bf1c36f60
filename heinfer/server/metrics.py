"""The server's metrics: requests by block, bytes, times, sessions and memory. It knows nothing else.

    service --AnsweredRequest--> ServerMetrics (counters, a histogram) --+
    sessions, memory, products --asked at every scrape--------------------+--> /metrics

Served on a port of its own, plain text on loopback; elsewhere under the server's own TLS, or as plain text where that
was allowed. docs/metrics.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from heinfer.exposition import SECONDS, Counter, Family, Histogram, Readings, new_registry
from heinfer.server.observing import AnsweredRequest
from heinfer.server.prepared import PreparedBlocks
from heinfer.wire import MemoryBudget
from heinfer.wire.listener import ConnectionCounts


class ServerMetrics:
    """A `RequestObserver`, and what else is to be known of a server.

    Attributes:
        registry: all of its metrics.
    """

    def __init__(self) -> None:
        self.registry = new_registry("server")
        self._readings = Readings(self.registry)

        def counter(name: str, text: str, *labels: str) -> Family[Counter]:
            return Family(Counter(f"heinfer_server_{name}", text, labels, registry=self.registry))

        self._requests = counter("requests", "Requests that were answered.", "model", "block", "mode")
        self._samples = counter("samples", "Samples that answered requests carried.", "model", "block", "mode")
        self._bytes = counter("bytes", "Ciphertexts from (up) and to (down) nodes.", "model", "direction")
        self._block_seconds = counter(
            "block_seconds", "Products, and waits for their turn, of a block.", "model", "block"
        )
        self._seconds = Family(
            Histogram(
                "heinfer_server_request_seconds",
                "Products, and waits for their turn, of a request.",
                ("model", "mode"),
                registry=self.registry,
                buckets=SECONDS,
            )
        )

    def answered(self, request: AnsweredRequest) -> None:
        """Count a request."""
        model, block, mode = request.model, str(request.block), request.mode.name.lower()
        self._samples.of(model, block, mode).inc(request.samples)
        self._bytes.of(model, "up").inc(request.bytes_up)
        self._bytes.of(model, "down").inc(request.bytes_down)
        self._block_seconds.of(model, block).inc(request.seconds)
        self._seconds.of(model, mode).observe(request.seconds)
        self._requests.of(model, block, mode).inc()

    def watch_model(self, model: str, prepared: PreparedBlocks) -> None:
        """Ask at every scrape how many products a model's requests in prepared mode took."""
        text = "Products in prepared mode; fewer than requests where some shared one."
        self._readings.counter("heinfer_server_products", text, {"model": model}, lambda: prepared.products)

    def watch_sessions(self, read: Callable[[], ConnectionCounts]) -> None:
        """Ask the listener at every scrape."""
        self._readings.gauge("heinfer_server_sessions", "Sessions that are open.", {}, lambda: read().served)
        text = "Sessions that an error has ended."
        self._readings.counter("heinfer_server_sessions_failed", text, {}, lambda: read().failed)
        for reason in ("busy", "stopping", "handshake", "protocol"):
            self._readings.counter(
                "heinfer_server_sessions_refused",
                "Sessions that were refused.",
                {"reason": reason},
                lambda reason=reason: getattr(read(), reason),  # type: ignore[misc]
            )

    def watch_memory(self, memory: MemoryBudget) -> None:
        """Ask at every scrape what requests hold."""
        text = "Memory that requests hold."
        self._readings.gauge("heinfer_server_memory_bytes", text, {}, lambda: memory.used)
        text = "Memory that requests may hold."
        self._readings.gauge("heinfer_server_memory_limit_bytes", text, {}, lambda: memory.total)
        text = "Requests that wait for memory."
        self._readings.gauge("heinfer_server_memory_waiting", text, {}, lambda: memory.waiting)
