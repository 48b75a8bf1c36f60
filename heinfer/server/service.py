"""The untrusted server: one handler a stream, the protocol's state machine, and the evaluator.

The server keeps nothing between requests but the loaded plan. Whatever goes wrong, its peer sees a fixed code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from heinfer.server.evaluation import BlockEvaluator, Upload, pack_rows
from heinfer.wire import (
    Address,
    BlockAnswer,
    BlockRequest,
    BlockShape,
    Chunk,
    End,
    Hello,
    Limits,
    NodeEvent,
    Ready,
    ServerEvent,
    ServerSession,
    UploadComplete,
    add_evaluator,
    bind,
    make_server,
    row_bytes,
)

logger = logging.getLogger(__name__)
#: Streams served at once; a node opens a few.
WORKERS = 32


class EvaluatorService:
    """Serves block requests until stopped.

    Args:
        evaluator: the loaded plan.
        address: where to listen.
        limits: sizes and times.

    Raises:
        TransportError: the port is in use.
    """

    def __init__(self, evaluator: BlockEvaluator, address: Address, limits: Limits) -> None:
        self._evaluator = evaluator
        self._limits = limits
        plan = evaluator.bundle.plan
        self._shapes = [BlockShape(b.input_rows, b.output_rows, plan.ring.degree) for b in plan.blocks]
        self._server: Any = make_server(limits, WORKERS)
        add_evaluator(self._server, self._handle, limits)
        self.address = bind(self._server, address)
        self._server.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new streams, let running ones end within the grace, then stop."""
        self._server.stop(grace_s).wait()

    def _handle(self, events: Iterator[NodeEvent]) -> Iterator[ServerEvent | End]:
        ring = self._evaluator.bundle.plan.ring
        session = ServerSession(self._evaluator.bundle.plan_hash, self._shapes, self._limits)
        uploads: dict[int, Upload] = {}
        for event in events:
            for received in session.receive(event):
                match received:
                    case Hello():
                        yield session.send(Ready())
                    case BlockRequest():
                        uploads[received.request_id] = Upload(
                            received.rows, received.samples, ring.degree, ring.modulus
                        )
                    case Chunk():
                        uploads[received.request_id].add(received.first_row, received.rows, received.data)
                    case UploadComplete():
                        yield from self._answer(session, received.request, uploads.pop(received.request.request_id))
                    case _:
                        pass
        session.receive(End())
        yield session.send(End())

    def _answer(self, session: ServerSession, request: BlockRequest, upload: Upload) -> Iterator[ServerEvent]:
        started = time.perf_counter()
        result = self._evaluator.evaluate(request.block, upload.residues)
        seconds = time.perf_counter() - started
        logger.info("block %d: %d rows in, %d out, %.1f ms", request.block, request.rows, len(result), 1e3 * seconds)
        yield session.send(BlockAnswer(request.request_id, len(result), seconds))
        size = row_bytes(request.samples, self._evaluator.bundle.plan.ring.degree)
        step = max(1, self._limits.chunk_bytes // size)
        for first, rows, data in pack_rows(result, request.samples, step):
            yield session.send(Chunk(request.request_id, first, rows, data))
