"""One line in the log for every query that ends, with fields for logs in JSON.

    query 7d0e2c of mnist_lenet5 by http: ok, 1 samples of 8 in 12.3 ms (queue 1.2, prepare 0.0, node 2.0, ...)

The parts are those of the run, which all queries that were joined share. Nothing else of `QueryStatistics` is said.
"""

from __future__ import annotations

import logging

from trusted_node.serving.interface import FinishedQuery
from trusted_node.statistics import QueryStatistics

logger = logging.getLogger(__name__)
#: Parts of all blocks of a run.
BLOCK_PARTS = ("encrypt", "decrypt", "check", "server", "wire")


def log_query(query: FinishedQuery) -> None:
    """Log a query that has ended."""
    if not logger.isEnabledFor(logging.INFO):
        return
    milliseconds = {"queue": 1e3 * query.queued_s}
    if query.statistics is not None:
        milliseconds |= {part: 1e3 * seconds for part, seconds in seconds_by_part(query.statistics).items()}
    logger.info(
        "query %s of %s by %s: %s, %d samples of %d in %.1f ms (%s)",
        query.request_id, query.model, query.channel.value, query.outcome.value, query.samples, query.joined,
        1e3 * query.seconds, ", ".join(f"{part} {ms:.1f}" for part, ms in milliseconds.items()),
        extra={
            "request_id": query.request_id, "model": query.model, "channel": query.channel.value,
            "outcome": query.outcome.value, "mode": None if query.statistics is None else query.statistics.mode,
            "samples": query.samples, "joined": query.joined, "ms": 1e3 * query.seconds,
            **{f"{part}_ms": ms for part, ms in milliseconds.items()},
        },
    )  # fmt: skip


def seconds_by_part(statistics: QueryStatistics) -> dict[str, float]:
    """Return what a run took: preparation that was late, the node's own operators, and the parts of all blocks."""
    parts = {"prepare": statistics.preparation_s, "node": statistics.node_s}
    for part in BLOCK_PARTS:
        parts[part] = sum(getattr(block, f"{part}_s") for block in statistics.blocks)
    return parts
