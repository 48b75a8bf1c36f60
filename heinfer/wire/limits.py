"""What either side is willing to receive.

At the defaults one session may hold 8 requests open at a time. Nothing is buffered below the level of a chunk, so
the protocol itself needs about `chunk_bytes` a session; what a request may pile up is for its owner to bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from heinfer.errors import ParameterError

KIB, MIB, GIB = 2**10, 2**20, 2**30

#: What an envelope of a session may have: ids, counters, tags. 160 bytes would do.
ENVELOPE_BYTES = KIB
#: protobuf stops below this, and a frame counts its parts in 32 bits.
_FRAME_BYTES = 2**31
_MAY_BE_ZERO = ("retry_s", "room_s")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times that bound one connection. All are inclusive.

    Attributes:
        chunk_bytes: payload bytes in one chunk.
        message_bytes: bytes of one message to or from a client beside its chunk: names and shapes, statistics, reasons.
        max_rows: rows of one request or answer: ciphertexts, or groups of 32 residues in prepared mode.
        max_samples: samples of one request; in standard mode never more than the degree N in any case.
        max_request_bytes: payload bytes of one request, one answer, or all tensors of one query or result.
        max_open_requests: requests of one session that are announced and not yet answered in full.
        max_tensors: tensors of one query, result or description.
        idle_s: seconds of silence on a connection after which its peer is probed.
        reply_s: seconds that a node waits for the next message of an answer, and that either side waits for the rest
            of a message that has begun, or for a peer that does not read.
        slowest_bytes_s: bytes per second that an upload or answer as a whole must keep up with, `reply_s` to begin
            with aside: a peer that dribbles is late at last.
        max_idle_s: seconds after which a connection on which nothing is said is closed by the side that listens.
        retry_s: seconds after an upload's first failure in which it is sent again, the same bytes; 0: never.
        query_s: seconds in which a node takes a group of a query's samples through all rounds, repetitions included.
        deep_s: seconds that it has more for each deep block, which may take hours; an answer's announcement is waited
            for as long.
        room_s: seconds that a request waits for room in its receiver's memory.
    """

    chunk_bytes: int = MIB
    message_bytes: int = 4 * MIB
    max_rows: int = 2**24
    max_samples: int = 2**15
    max_request_bytes: int = 8 * GIB
    max_open_requests: int = 8
    max_tensors: int = 4096
    idle_s: float = 60.0
    reply_s: float = 300.0
    slowest_bytes_s: float = 16 * KIB
    max_idle_s: float = 900.0
    retry_s: float = 30.0
    query_s: float = 3600.0
    deep_s: float = 12 * 3600.0
    room_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse limits that contradict each other.

        Raises:
            ParameterError: a limit is not positive, or a frame of that size can't be.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)) and not (field.name in _MAY_BE_ZERO and value == 0):
                raise ParameterError(f"limit {field.name} must be positive and finite, got {value}")
        if max(self.chunk_bytes, self.message_bytes) >= _FRAME_BYTES:
            raise ParameterError(
                f"chunk_bytes and message_bytes must be below 2**31, got {self.chunk_bytes} and {self.message_bytes}"
            )

    def latest(self, started: float, size: int) -> float:
        """When a transfer that began then (`time.monotonic`) must have so many bytes through, at the latest."""
        return started + self.reply_s + size / self.slowest_bytes_s
