"""The untrusted server: one handler a connection, the protocol's state machine, and the evaluator.

It may serve several plans on one port: the hash in a node's greeting picks one, and one that is unknown is refused.
Plans share the memory for requests and the slots for products (`heinfer.server.prepared.shared_merger`).

The server keeps nothing between requests but the loaded plan. Whatever goes wrong, its peer sees a fixed code.
What a request asks for depends on its mode: `REQUESTS` names who takes its rows and makes its answer.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import RemoteProtocolError
from heinfer.ring import pack, packed_bytes, unpack
from heinfer.ring.packing import GROUP_RESIDUES
from heinfer.server.deep import DeepRequest
from heinfer.server.evaluation import BlockEvaluator, Upload, pack_rows
from heinfer.server.observing import SESSION_DIGITS, AnsweredRequest, RequestObserver, Unobserved
from heinfer.server.prepared import Collector
from heinfer.spans import NO_TRACER, Span, SpanName, TraceContext, Tracer
from heinfer.wire import (
    GROUP_BYTES,
    Address,
    BlockRequest,
    BlockShape,
    Chunk,
    End,
    Hello,
    Limits,
    MemoryBudget,
    Mode,
    NodeEvent,
    PlainText,
    Ready,
    Security,
    ServerEvent,
    ServerSession,
    UploadComplete,
    block_shapes,
    iterate_row_chunks,
    row_bytes,
    serve_sessions,
)
from heinfer.wire.listener import ConnectionCounts, Heard

logger = logging.getLogger(__name__)
#: Connections served at once. A node may open 24 for a model, four uploads for each of two small runs and of four
#: groups of larger ones.
WORKERS = 128
#: Residues in memory for one that travels, in either direction: as unpacked, and as laid out for the product.
_COPIES = 2
_RESIDUE_BYTES = 8
#: What a request for a deep block holds outside of files.
DEEP_BYTES = 2**30


class OpenRequest(Protocol):
    """One request of some mode, from its first row to its answer."""

    def add(self, chunk: Chunk) -> None:
        """Take the next rows.

        Raises:
            CiphertextError: they are no residues.
        """

    def evaluate(self, gone: Callable[[], bool]) -> tuple[int, Iterator[Chunk]]:
        """Return the number of rows of the answer, and its chunks; all rows are there.

        Args:
            gone: whether the node waits no more; looked at by what takes minutes, which ends then.
        """

    def close(self) -> None:
        """Let go of what a request holds that does not come to its end."""


class StandardRequest:
    """A request in standard mode: ciphertexts of `samples` residues of b and N of a each.

    Args:
        evaluator: the loaded plan.
        request: how it was announced.
        limits: chunk size.
    """

    def __init__(self, evaluator: BlockEvaluator, request: BlockRequest, limits: Limits) -> None:
        ring = evaluator.bundle.plan.ring
        self._evaluator = evaluator
        self._request = request
        self._step = max(1, limits.chunk_bytes // row_bytes(request.samples, ring.degree))
        self._upload = Upload(request.rows, request.samples, ring.degree, ring.modulus)

    def add(self, chunk: Chunk) -> None:
        """Take the next rows."""
        self._upload.add(chunk.first_row, chunk.rows, chunk.data)

    def close(self) -> None:
        """Nothing is held but memory."""

    def evaluate(self, gone: Callable[[], bool]) -> tuple[int, Iterator[Chunk]]:
        """Evaluate the block; the answer is packed chunk by chunk."""
        result = self._evaluator.evaluate(self._request.block, self._upload.residues)
        packed = pack_rows(result, self._request.samples, self._step)
        return len(result), (Chunk(self._request.request_id, *part) for part in packed)


class BatchRequest:
    """A request of a batch: `samples` residues of b alone of each ciphertext.

    Args:
        evaluator: the loaded plan.
        request: how it was announced.
        limits: chunk size.
    """

    def __init__(self, evaluator: BlockEvaluator, request: BlockRequest, limits: Limits) -> None:
        self._evaluator = evaluator
        self._request = request
        self._limits = limits
        self._residues = np.empty((request.rows, request.samples), np.int64)
        self._size = packed_bytes(request.samples)

    def add(self, chunk: Chunk) -> None:
        """Take the next rows."""
        packed = np.frombuffer(chunk.data, np.uint8).reshape(chunk.rows, self._size)
        modulus = self._evaluator.bundle.plan.ring.modulus
        self._residues[chunk.first_row : chunk.first_row + chunk.rows] = unpack(packed, self._request.samples, modulus)

    def close(self) -> None:
        """Nothing is held but memory."""

    def evaluate(self, gone: Callable[[], bool]) -> tuple[int, Iterator[Chunk]]:
        """Evaluate the block; the answer is packed chunk by chunk."""
        result = self._evaluator.evaluate(self._request.block, self._residues)
        return len(result), self._chunks(result)

    def _chunks(self, result: NDArray[np.int64]) -> Iterator[Chunk]:
        step = max(1, self._limits.chunk_bytes // self._size)
        for first in range(0, len(result), step):
            part = result[first : first + step]
            yield Chunk(self._request.request_id, first, len(part), pack(part).tobytes())


class PreparedRequest:
    """A request in prepared mode: b alone, every sample packed by itself.

    Args:
        evaluator: the loaded plan; the session accepts such requests for blocks with prepared mode only.
        request: how it was announced.
        limits: chunk size.
    """

    def __init__(self, evaluator: BlockEvaluator, request: BlockRequest, limits: Limits) -> None:
        assert evaluator.prepared is not None  # the session has looked
        self._blocks = evaluator.prepared
        self._request = request
        self._limits = limits
        self._collector = Collector(request.rows * GROUP_BYTES)

    def add(self, chunk: Chunk) -> None:
        """Take the next rows."""
        self._collector.add(chunk.data)

    def close(self) -> None:
        """Nothing is held but memory."""

    def evaluate(self, gone: Callable[[], bool]) -> tuple[int, Iterator[Chunk]]:
        """Evaluate the block, perhaps together with other requests for it."""
        request = self._request
        up, _ = self._blocks.values(request.block)
        packed = self._blocks.evaluate(request.block, self._collector.rows(request.samples, up))
        rows = packed.size // GROUP_BYTES
        data = packed.data.cast("B")
        return rows, iterate_row_chunks(request.request_id, data, GROUP_BYTES, self._limits.chunk_bytes)


def open_deep(evaluator: BlockEvaluator, request: BlockRequest, limits: Limits) -> OpenRequest:
    """Take a request for a deep block, which the wire counts after the others."""
    bundle = evaluator.bundle
    deep = evaluator.deep(request.block - len(bundle.plan.blocks))
    return DeepRequest(deep, request, limits, bundle.check_unchanged)


#: Who takes the requests of a mode.
REQUESTS: dict[Mode, Callable[[BlockEvaluator, BlockRequest, Limits], OpenRequest]] = {
    Mode.STANDARD: StandardRequest,
    Mode.PREPARED: PreparedRequest,
    Mode.BATCH: BatchRequest,
    Mode.DEEP: open_deep,
}


class EvaluatorService:
    """Serves block requests until stopped.

    Args:
        evaluators: the loaded plans, at least one.
        address: where to listen.
        limits: sizes and times.
        security: TLS with nodes, or where plain text is allowed.
        memory: bytes for all requests together; None: half of the machine's.
        observer: is told of answered requests.
        tracer: makes spans of them.

    Raises:
        TransportError: the port is in use, or this is no way to listen there.
    """

    def __init__(
        self,
        evaluators: BlockEvaluator | Sequence[BlockEvaluator],
        address: Address,
        limits: Limits,
        security: Security = PlainText.ON_LOOPBACK,
        memory: int | None = None,
        observer: RequestObserver | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._observer = observer or Unobserved()
        self._tracer = tracer
        self._memory = MemoryBudget(memory, limits.room_s)
        self._limits = limits
        served = [evaluators] if isinstance(evaluators, BlockEvaluator) else evaluators
        self._plans = {e.bundle.plan_hash: _Served(e, tuple(block_shapes(e.bundle.plan))) for e in served}
        self._first = self._plans[served[0].bundle.plan_hash]
        self._server = serve_sessions(address, self._handle, limits, WORKERS, security)
        self.address = self._server.address

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new sessions, let running answers end within the grace, then stop; deep blocks end there."""
        try:
            self._server.stop(grace_s)
        finally:
            for served in self._plans.values():
                served.evaluator.stop()

    @property
    def memory(self) -> MemoryBudget:
        """What requests hold."""
        return self._memory

    def connections(self) -> ConnectionCounts:
        """Return what has become of the sessions."""
        return self._server.connections()

    def _handle(self, events: Heard[NodeEvent]) -> Generator[ServerEvent | End, None, None]:
        greeting = next(events, None)
        served = self._plans.get(greeting.plan_hash) if isinstance(greeting, Hello) else None
        served = served or self._first  # which refuses what is not its own
        session = ServerSession(served.evaluator.bundle.plan_hash, served.shapes, self._limits)
        arriving: dict[int, _Arriving] = {}
        try:
            for event in events if greeting is None else itertools.chain((greeting,), events):
                for received in session.receive(event):
                    match received:
                        case Hello():
                            yield session.send(Ready())
                        case BlockRequest():
                            arriving[received.request_id] = self._let_in(served, received)
                        case Chunk():
                            arriving[received.request_id].add(received, self._limits)
                        case UploadComplete(request=request):
                            came = arriving[request.request_id]
                            yield from self._answer(session, request, served, came, events)
                            self._memory.give(arriving.pop(request.request_id).needs)
                        case _:
                            pass
        finally:
            for left in arriving.values():
                left.span.end(failed=True)
                left.opened.close()
            self._memory.give(sum(request.needs for request in arriving.values()))
        session.receive(End())
        yield session.send(End())

    def _let_in(self, served: _Served, request: BlockRequest) -> _Arriving:
        """Wait for room in memory; meanwhile nothing is read, so TCP makes the node wait."""
        shape, parameters = served.shapes[request.block], served.evaluator.bundle.plan.ring
        rows = request.rows + shape.rows_down(request.mode, request.samples)
        columns = {
            Mode.STANDARD: request.samples + parameters.degree,
            Mode.BATCH: request.samples,
            Mode.PREPARED: GROUP_RESIDUES,
            Mode.DEEP: 0,
        }
        needs = DEEP_BYTES if shape.deep else _COPIES * _RESIDUE_BYTES * rows * columns[request.mode]
        self._memory.take(needs)
        span = self._tracer.start(
            SpanName.REQUEST,
            TraceContext.from_bytes(request.trace),
            model=served.name,
            mode=request.mode.name.lower(),
            samples=request.samples,
            block=request.block,
        )
        try:
            opened = REQUESTS[request.mode](served.evaluator, request, self._limits)
        except BaseException:
            span.end(failed=True)
            self._memory.give(needs)
            raise
        return _Arriving(opened, needs, time.monotonic(), span)

    def _answer(
        self,
        session: ServerSession,
        request: BlockRequest,
        served: _Served,
        arriving: _Arriving,
        events: Heard[NodeEvent],
    ) -> Iterator[ServerEvent]:
        started = time.perf_counter()
        with arriving.span.child(SpanName.EVALUATE):
            rows, chunks = arriving.opened.evaluate(lambda: events.gone)
        seconds = time.perf_counter() - started
        self._log(served.name, request, rows, seconds)
        began, sent = time.monotonic(), 0
        for event in session.answer(request.request_id, rows, seconds, chunks):
            yield event
            data = event if isinstance(event, Chunk) else event.first
            sent += 0 if data is None else len(data.data)
            if time.monotonic() > self._limits.latest(began, sent):
                raise RemoteProtocolError("the node reads its answer too slowly")
        arriving.span.end(bytes_up=arriving.received, bytes_down=sent, seconds=seconds)
        up, samples = arriving.received, request.samples
        answered = AnsweredRequest(served.name, request.block, request.mode, samples, up, sent, seconds)
        self._observer.answered(answered)

    @staticmethod
    def _log(model: str, request: BlockRequest, rows: int, seconds: float) -> None:
        session, milliseconds = request.session.hex()[:SESSION_DIGITS], 1e3 * seconds
        logger.info(
            "session %s, block %d: %d rows in, %d out, %.1f ms",
            session, request.block, request.rows, rows, milliseconds,
            extra={
                "session": session, "model": model, "block": request.block,
                "mode": request.mode.name.lower(), "rows_up": request.rows, "rows_down": rows, "ms": milliseconds,
            },
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Served:
    """A plan that is served, and the shapes of its blocks."""

    evaluator: BlockEvaluator
    shapes: tuple[BlockShape, ...]

    @property
    def name(self) -> str:
        """The model's."""
        return self.evaluator.bundle.plan.model.name


@dataclass(slots=True)
class _Arriving:
    """A request on its way in.

    Attributes:
        opened: takes its rows.
        needs: memory that it holds.
        began: when it was announced.
        received: bytes of its rows.
        span: of the request.
    """

    opened: OpenRequest
    needs: int
    began: float
    span: Span
    received: int = 0

    def add(self, chunk: Chunk, limits: Limits) -> None:
        """Take rows.

        Raises:
            RemoteProtocolError: they dribble.
        """
        self.received += len(chunk.data)
        if time.monotonic() > limits.latest(self.began, self.received):
            raise RemoteProtocolError(f"an upload dribbles: {self.received} bytes since it was announced")
        self.opened.add(chunk)
