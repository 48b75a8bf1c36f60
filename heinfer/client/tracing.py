"""The client's span of a query, where its program makes traces.

    from opentelemetry import trace
    trace.set_tracer_provider(...)                   # the program's business
    model.predict(x)                                 # a span "heinfer.query", below which node and server put theirs

A program that has not imported OpenTelemetry makes no traces, and is asked for no more than that.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

_API = "opentelemetry.trace"


def client_span(model: str, samples: int) -> AbstractContextManager[str]:
    """Make a span of a query, below the program's own; its value is its traceparent, "" where there is none.

    Args:
        model: its name.
        samples: of the query.
    """
    if _API not in sys.modules:
        return nullcontext("")
    from heinfer.traces import client_span

    return client_span(model, samples)
