"""Log lines on standard error, for people or for machines: one set-up for us, uvicorn and gRPC.

    2026-01-31 08:15:30,123 INFO heinfer.server.service: block 0: 784 rows in, 3456 out, 1.2 ms
    {"time": "2026-01-31T08:15:30.123456Z", "level": "INFO", "logger": "heinfer.server.service", "message": "block 0:
     784 rows in, 3456 out, 1.2 ms", "session": "9f86d081", "block": 0, "ms": 1.2}

Lines hold ids, shapes, bytes and milliseconds. Fields of JSON are those of `FIELDS`, whatever else a record carries. Of
an exception its type and the places in the code are written; its message may quote data and is not.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal

Format = Literal["text", "json"]
#: What records may carry (`extra=`) that is written as a field.
FIELDS: Final = (
    "request_id",
    "session",
    "model",
    "channel",
    "method",
    "route",
    "status",
    "outcome",
    "mode",
    "block",
    "samples",
    "joined",
    "rows_up",
    "rows_down",
    "ms",
    "queue_ms",
    "prepare_ms",
    "node_ms",
    "encrypt_ms",
    "decrypt_ms",
    "check_ms",
    "server_ms",
    "wire_ms",
)
#: Loggers of libraries that bring handlers of their own; theirs go the way of ours.
_LIBRARIES: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "grpc", "grpc._server", "grpc._cython")
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_Exception = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def set_up_logging(level: int, form: Format = "text") -> None:
    """Send what is logged from now on to standard error, and nowhere else.

    Args:
        level: below which nothing is written.
        form: how lines look.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(_TEXT))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    logging.captureWarnings(form == "json")


class TextFormatter(logging.Formatter):
    """Lines for people; what would move the cursor or begin a line of its own is written as an escape."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return a record's line."""
        line = super().formatMessage(record)
        return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)

    def formatException(self, ei: _Exception) -> str:  # noqa: N802 - logging's name
        """Return where an exception came from, without its message."""
        return describe_exception(ei[1])


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        line: dict[str, Any] = {
            "time": time.removesuffix("+00:00") + "Z",  # RFC 3339
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: _plain(record.__dict__[name]) for name in FIELDS if record.__dict__.get(name) is not None}
        if record.exc_info:
            line["exception"] = describe_exception(record.exc_info[1])
        return json.dumps(line)


def _plain(value: object) -> str | int | float:
    """Return a value as JSON has it; arrays and other objects are not for logs."""
    if isinstance(value, float):
        return round(value, 3)
    return value if isinstance(value, int | str) else type(value).__name__


def describe_exception(error: BaseException | None) -> str:
    """Return an exception's type and where it passed, and those of its causes; no messages and no source lines."""
    parts = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.extract_tb(error.__traceback__)
        places = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        parts.append(f"{type(error).__qualname__} at {places or 'an unknown place'}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "; caused by ".join(parts)
