"""Spans of queries: from the moment they come until they are answered, in the queue and in the run they share.

    scheduler --submitted--> QueryTrace (query, queue) --started--> run, a child of the oldest query's --> engine

A run that serves several queries is a part of the oldest one's trace, and has links to the others. To the untrusted
server nothing is told unless the operator says so (`--trace-server`): what names a span is the same for all rounds of a
query, so the server could put them together by more than time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from heinfer.errors import InputError
from heinfer.spans import NO_TRACER, Span, SpanName, TraceContext, Tracer
from trusted_node.serving.interface import Outcome, Query

if TYPE_CHECKING:
    from heinfer.traces import Traces

_SERVICE = "heinfer-node"


def start_tracing(trace_server: bool = False) -> Traces:
    """Begin to export spans as the OTEL_* variables say.

    Args:
        trace_server: whether the untrusted server is told which span its work belongs to.

    Raises:
        InputError: the extra `traces` is not installed.
    """
    try:
        from heinfer.traces import export_traces
    except ModuleNotFoundError as error:
        raise InputError(f"traces need {error.name}: pip install 'heinfer[traces]'") from None
    return export_traces(_SERVICE, trace_server)


class QueryTrace:
    """The spans of one query.

    Args:
        query: the query's.
        queue: of its wait.
    """

    __slots__ = ("query", "queue")

    def __init__(self, query: Span, queue: Span) -> None:
        self.query = query
        self.queue = queue

    def end(self, outcome: Outcome) -> None:
        """End them, whatever still goes on."""
        failed = outcome is not Outcome.OK
        self.queue.end(failed=failed)
        self.query.end(failed=failed)


class QueryTracer:
    """Makes the spans of a model's queries; safe to use from several threads.

    Args:
        model: its name.
        tracer: who listens.
    """

    def __init__(self, model: str, tracer: Tracer = NO_TRACER) -> None:
        self._model = model
        self._tracer = tracer

    def submitted(self, query: Query, samples: int) -> QueryTrace:
        """Begin the spans of a query that has come."""
        parent = TraceContext.from_traceparent(query.traceparent) if query.traceparent else None
        span = self._tracer.start(SpanName.QUERY, parent, model=self._model, samples=samples)
        return QueryTrace(span, span.child(SpanName.QUEUE))

    def started(self, traces: Sequence[QueryTrace], samples: int) -> Span:
        """End the waits of queries that now run as one, oldest first; return the span of their run."""
        for trace in traces:
            trace.queue.end()
        oldest, *others = (trace.query.context for trace in traces)
        links = [context for context in others if context is not None]
        return self._tracer.start(SpanName.RUN, oldest, links, model=self._model, samples=samples)
