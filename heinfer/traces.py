"""Spans as OpenTelemetry has them: exported by OTLP over HTTP, set up by the standard OTEL_* variables.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 heinfer node ... --traces
    heinfer.run  heinfer.model=mnist_lenet5  heinfer.mode=prepared  heinfer.samples=8

The only module that knows OpenTelemetry; it is imported where traces are asked for, and needs the extra `traces`.
Identifiers of spans are random. Exceptions are not recorded: their messages may quote data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from heinfer.spans import Span, SpanName, TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

#: Whose spans these are, for those who collect them.
LIBRARY = "heinfer"
#: Seconds that exporting may go on for when a party stops; OpenTelemetry would try for 10.
CLOSE_S = 2.0
_ID_BYTES = (16, 8)
#: Where a span begins and ends the talk with another process.
_KINDS = {SpanName.QUERY: SpanKind.SERVER, SpanName.BLOCK: SpanKind.CLIENT, SpanName.REQUEST: SpanKind.SERVER}


class Traces:
    """A tracer whose spans OpenTelemetry keeps; safe to use from several threads.

    Args:
        provider: what makes, samples and exports spans.
        share: whether the untrusted server may be told the names of spans.
        give_up: makes an export end that goes on for too long while we stop.
    """

    def __init__(
        self, provider: TracerProvider, share: bool = False, give_up: Callable[[], None] = lambda: None
    ) -> None:
        self._provider = provider
        self._give_up = give_up
        self._tracer = provider.get_tracer(LIBRARY)
        self._share = share

    def start(
        self,
        name: SpanName,
        parent: TraceContext | None,
        links: Sequence[TraceContext] = (),
        *,
        model: str | None = None,
        mode: str | None = None,
        samples: int | None = None,
        block: int | None = None,
    ) -> Span:
        """Begin a span, as `Tracer` describes."""
        above = None if parent is None else NonRecordingSpan(_to_context(parent))
        span = _RecordedSpan(self._tracer, self._share, name, above, links)
        span.note(model=model, mode=mode, samples=samples, block=block)
        return span

    def close(self) -> None:
        """Export what is left, then stop; where nobody takes it, after `CLOSE_S` seconds."""
        timer = threading.Timer(CLOSE_S, self._give_up)
        timer.daemon = True
        timer.start()
        self._provider.shutdown()
        timer.cancel()


class _RecordedSpan:
    """A span of OpenTelemetry's; see `Span`."""

    def __init__(
        self,
        tracer: trace.Tracer,
        share: bool,
        name: SpanName,
        above: trace.Span | None,
        links: Sequence[TraceContext] = (),
    ) -> None:
        self._tracer, self._share = tracer, share
        # An empty context where nothing is above: what the thread's own context holds is nobody's parent here.
        context = trace.set_span_in_context(above if above is not None else trace.INVALID_SPAN)
        self._span = tracer.start_span(
            _name(name),
            context,
            kind=_KINDS.get(name, SpanKind.INTERNAL),
            links=[Link(_to_context(link)) for link in links],
        )

    @property
    def context(self) -> TraceContext | None:
        """Return its name."""
        return _from_otel(self._span.get_span_context())

    @property
    def shared(self) -> bytes:
        """Return what the untrusted server may be told: nothing of a span that is not recorded."""
        context = self.context
        return context.to_bytes() if self._share and context is not None and context.sampled else b""

    def child(
        self,
        name: SpanName,
        *,
        model: str | None = None,
        mode: str | None = None,
        samples: int | None = None,
        block: int | None = None,
    ) -> Span:
        """Begin a part of it."""
        span = _RecordedSpan(self._tracer, self._share, name, self._span)
        span.note(model=model, mode=mode, samples=samples, block=block)
        return span

    def note(self, **attributes: str | float | None) -> None:
        """Set the attributes that are known."""
        for key, value in attributes.items():
            if value is not None:
                self._span.set_attribute(_key(key), value)

    def end(
        self,
        *,
        bytes_up: int | None = None,
        bytes_down: int | None = None,
        seconds: float | None = None,
        failed: bool = False,
    ) -> None:
        """End it; only the first call counts."""
        if not self._span.is_recording():
            return
        self.note(bytes_up=bytes_up, bytes_down=bytes_down, seconds=seconds)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def __enter__(self) -> Self:
        """Return the span."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""
        self.end(failed=kind is not None)


@contextmanager
def client_span(model: str, samples: int) -> Iterator[str]:
    """Make a client's span of a query, by whatever provider its program has set.

    Args:
        model: its name.
        samples: of the query.

    Yields:
        Its traceparent; "" where the program makes no traces.
    """
    attributes: dict[str, str | int] = {_key("model"): model, _key("samples"): samples}
    span = trace.get_tracer(LIBRARY).start_span(_name(SpanName.QUERY), kind=SpanKind.CLIENT, attributes=attributes)
    try:
        context = _from_otel(span.get_span_context())
        yield "" if context is None else context.to_traceparent()
    except BaseException:  # what it says may quote data
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        span.end()


def _name(name: SpanName) -> str:
    return f"{LIBRARY}.{name.value}"


def _key(attribute: str) -> str:
    return f"{LIBRARY}.{attribute}"


def _from_otel(context: SpanContext) -> TraceContext | None:
    if not context.is_valid:
        return None
    trace_id, span_id = (
        number.to_bytes(size) for number, size in zip((context.trace_id, context.span_id), _ID_BYTES, strict=True)
    )
    return TraceContext(trace_id, span_id, bool(context.trace_flags & TraceFlags.SAMPLED))


def _to_context(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int.from_bytes(context.trace_id), int.from_bytes(context.span_id), True, flags)


def export_traces(service: str, share: bool = False) -> Traces:
    """Begin to export spans, to where OTEL_EXPORTER_OTLP_ENDPOINT says (http://localhost:4318 where it does not).

    Args:
        service: our name, unless OTEL_SERVICE_NAME gives another.
        share: as for `Traces`.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # What the environment says comes last, and wins.
    resource = Resource.create({"service.name": service}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, share, exporter.shutdown)
