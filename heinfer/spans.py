"""What takes how long, told while it goes on: spans, of which a trace is made.

    query (client) > query (node) > queue
                                  > run > round > block > request (server) > evaluate

Whoever has something to tell gets a `Span` and makes children of it; where nobody listens it is `SILENT`, and telling
costs a call. `heinfer.traces` listens, by OpenTelemetry. What a span may say is closed: names, and numbers that the
untrusted server could count itself. No text that a client or the data could choose goes in.

    with run.child(SpanName.ROUND) as trip:
        upload = trip.child(SpanName.BLOCK, block=3)
        upload.end(bytes_up=1200, bytes_down=3200, seconds=0.004)
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

_TRACE_BYTES, _SPAN_BYTES = 16, 8
#: Bytes of a context where it travels to the server.
CONTEXT_BYTES: Final = _TRACE_BYTES + _SPAN_BYTES
#: W3C Trace Context, section 3.2.2; what later versions add after the flags is not read (section 3.2.4).
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FIRST_VERSION, _NO_VERSION = "00", "ff"
_SAMPLED = 1
#: Characters of a traceparent that are looked at.
_LONGEST = 256


class SpanName(enum.Enum):
    """What a span is about."""

    QUERY = "query"  # of a client, and the node's part of it
    QUEUE = "queue"  # until it runs
    RUN = "run"  # of one query or several that were joined
    ROUND = "round"  # trip to the server and back
    BLOCK = "block"  # one upload, from its encryption to the accepted answer
    REQUEST = "request"  # the server's part of it
    EVALUATE = "evaluate"  # the product, and the wait for its turn


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Names a span, so that another process can put its own below it.

    Attributes:
        trace_id: 16 bytes, not all zero.
        span_id: 8 bytes, not all zero.
        sampled: whether the span is recorded.
    """

    trace_id: bytes
    span_id: bytes
    sampled: bool = True

    def to_bytes(self) -> bytes:
        """Return what goes to the server: `CONTEXT_BYTES`; whether it is sampled is not said, since only such go."""
        return self.trace_id + self.span_id

    @classmethod
    def from_bytes(cls, data: bytes) -> TraceContext | None:
        """Read what `to_bytes` wrote; None for anything else."""
        return _context(data[:_TRACE_BYTES], data[_TRACE_BYTES:], True) if len(data) == CONTEXT_BYTES else None

    def to_traceparent(self) -> str:
        """Return the header of W3C Trace Context."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{_SAMPLED if self.sampled else 0:02x}"

    @classmethod
    def from_traceparent(cls, text: str) -> TraceContext | None:
        """Read the header of W3C Trace Context; None for anything else, which starts a trace anew (section 4.3)."""
        match = _TRACEPARENT.fullmatch(text[:_LONGEST])
        if match is None or match[1] == _NO_VERSION or (match[1] == _FIRST_VERSION and match[5]):
            return None
        return _context(bytes.fromhex(match[2]), bytes.fromhex(match[3]), bool(int(match[4], 16) & _SAMPLED))


def _context(trace_id: bytes, span_id: bytes, sampled: bool) -> TraceContext | None:
    return TraceContext(trace_id, span_id, sampled) if any(trace_id) and any(span_id) else None


class Span(Protocol):
    """Something that takes time. A context manager, which ends it, failed where an exception comes through."""

    @property
    def context(self) -> TraceContext | None:
        """Return its name; None where nobody listens."""

    @property
    def shared(self) -> bytes:
        """Return what the untrusted server may be told of it: `CONTEXT_BYTES`, or nothing unless that was allowed."""

    def child(
        self,
        name: SpanName,
        *,
        model: str | None = None,
        mode: str | None = None,
        samples: int | None = None,
        block: int | None = None,
    ) -> Span:
        """Begin a part of it.

        Args:
            name: what it is.
            model: the plan's name of it.
            mode: "standard", "prepared" or "batch".
            samples: of all queries that run as one.
            block: index.
        """

    def end(
        self,
        *,
        bytes_up: int | None = None,
        bytes_down: int | None = None,
        seconds: float | None = None,
        failed: bool = False,
    ) -> None:
        """End it; only the first call counts.

        Args:
            bytes_up: sent to the server.
            bytes_down: received from it.
            seconds: that the server says it computed.
            failed: whether it did; why is not said.
        """

    def __enter__(self) -> Self:
        """Return the span."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""


class Tracer(Protocol):
    """Begins spans that have no parent in this process."""

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
        """Begin a span.

        Args:
            name: what it is.
            parent: in another process, or elsewhere in this one; None begins a trace.
            links: other spans that it serves too.
            model: as for `Span.child`.
            mode: likewise.
            samples: likewise.
            block: likewise.
        """


class _Silent:
    """A span, and a tracer, that nobody listens to."""

    context: None = None
    shared: bytes = b""

    def start(self, *_: object, **__: object) -> Span:
        return self

    def child(self, *_: object, **__: object) -> Span:
        return self

    def end(self, **_: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_silent = _Silent()
SILENT: Final[Span] = _silent
NO_TRACER: Final[Tracer] = _silent
