"""Both ends of a session as state machines without input or output, after h11.

`send` checks what we are about to say and `receive` what the peer said. A breach of the rules by our side is a
`LocalProtocolError`, a bug here; one by the peer is a `RemoteProtocolError`. After either the session is broken: a
server may still send its one `Failure`, a node nothing.

Nothing is buffered: a chunk is checked, counted and handed on. A chunk inside an announcement is treated as if it came
after it, and `receive` hands the two on apart. Objects are not thread-safe; where several threads
share one, hold a lock from `send` until the event is queued, so that the order checked is the order sent.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from heinfer.errors import LocalProtocolError, ParameterError, ProtocolError, RemoteProtocolError
from heinfer.wire.limits import Limits
from heinfer.wire.messages import (
    PROTOCOL_VERSION,
    AnswerComplete,
    BlockAnswer,
    BlockRequest,
    Chunk,
    End,
    Failure,
    FailureCode,
    Hello,
    Mode,
    NodeEvent,
    Ready,
    RefusedError,
    ServerEvent,
    UploadComplete,
    out_of_range,
)
from heinfer.wire.transfers import BlockShape, Role, Sizes, Stage, Transfer, iterate_row_chunks


class State(enum.Enum):
    """Where a session is. CLOSING: the node has ended its half. BROKEN: somebody broke the rules."""

    NEW = "new"
    GREETED = "greeted"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"

    __hash__ = object.__hash__  # that of an Enum is in Python and slow


#: (state, sender, event) -> state after it. What is missing is forbidden.
TRANSITIONS: dict[tuple[State, Role, type], State] = {
    (State.NEW, Role.NODE, Hello): State.GREETED,
    (State.NEW, Role.NODE, End): State.CLOSING,
    (State.NEW, Role.SERVER, Failure): State.CLOSED,
    (State.GREETED, Role.SERVER, Ready): State.READY,
    (State.GREETED, Role.SERVER, Failure): State.CLOSED,
    (State.READY, Role.NODE, BlockRequest): State.READY,
    (State.READY, Role.NODE, Chunk): State.READY,
    (State.READY, Role.NODE, End): State.CLOSING,
    (State.READY, Role.SERVER, BlockAnswer): State.READY,
    (State.READY, Role.SERVER, Chunk): State.READY,
    (State.READY, Role.SERVER, Failure): State.CLOSED,
    (State.READY, Role.SERVER, End): State.CLOSED,
    (State.CLOSING, Role.SERVER, BlockAnswer): State.CLOSING,
    (State.CLOSING, Role.SERVER, Chunk): State.CLOSING,
    (State.CLOSING, Role.SERVER, Failure): State.CLOSED,
    (State.CLOSING, Role.SERVER, End): State.CLOSED,
    (State.CLOSED, Role.SERVER, End): State.CLOSED,  # what follows a Failure
}

Event = NodeEvent | ServerEvent | End
Received = Event | UploadComplete | AnswerComplete
EventT = TypeVar("EventT", bound=Event)


class _Session:
    """What both ends share: one state, one table of open requests, one set of checks."""

    role: Role
    peer: Role

    def __init__(self, plan_hash: bytes, blocks: Sequence[BlockShape], limits: Limits) -> None:
        self._plan_hash = plan_hash
        self._blocks = tuple(blocks)
        self._limits = limits
        self._state = State.NEW
        self._hello: Hello | None = None
        self._open: dict[int, Transfer] = {}
        self._last_id = 0
        self._sizes: dict[tuple[int, Mode], Sizes] = {}
        for index, shape in enumerate(self._blocks):
            # A row of standard mode; those of prepared mode are shorter than any.
            mode = Mode.DEEP if shape.deep else Mode.STANDARD
            largest = shape.row_bytes(mode, shape.max_samples(mode, limits.max_samples))
            if largest > limits.chunk_bytes:
                raise ParameterError(
                    f"block {index}: a row at N = {shape.degree} may have {largest} bytes and must fit into a chunk: "
                    f"raise chunk_bytes, which is {limits.chunk_bytes}"
                )

    @property
    def state(self) -> State:
        """Where the session is."""
        return self._state

    @property
    def open_requests(self) -> tuple[int, ...]:
        """Ids of the requests that are announced and not yet answered in full, oldest first."""
        return tuple(self._open)

    @property
    def has_room(self) -> bool:
        """Whether one more request may be opened."""
        return len(self._open) < self._limits.max_open_requests

    def row_bytes(self, request_id: int) -> int:
        """Bytes of one row of an open request and of its answer.

        Raises:
            LocalProtocolError: no such request is open.
        """
        return self._transfer(request_id).row_bytes

    def send(self, event: EventT) -> EventT:
        """Note that we are about to send an event.

        Returns:
            The event, to be encoded.

        Raises:
            LocalProtocolError: it may not be sent now; the session is broken.
        """
        if self._state is State.BROKEN and self.role is Role.SERVER and isinstance(event, Failure):
            self._state = State.CLOSED
            return event
        try:
            self._apply(self.role, event)
            if isinstance(event, (BlockRequest, BlockAnswer)) and event.first is not None:
                self._apply(self.role, event.first)
        except ProtocolError as error:
            self._state = State.BROKEN
            raise LocalProtocolError(f"{self.role.value}: {error}") from None
        return event

    def receive(self, event: Event) -> tuple[Received, ...]:
        """Take an event from the peer; `End` when its half of the stream is over.

        Returns:
            The event, then the chunk that was inside it, if any, then UploadComplete or AnswerComplete if it brought
            the last row of a request.

        Raises:
            RemoteProtocolError: the peer may not send it now; the session is broken.
            RefusedError: likewise, with the code to tell the node; or it is the server's Failure.
        """
        received: list[Received] = []
        try:
            for part in _parts(event):
                complete = self._apply(self.peer, part)
                received.append(part)
                if complete is not None:
                    received.append(complete)
        except RefusedError:
            self._state = State.BROKEN
            raise
        except ProtocolError as error:
            self._state = State.BROKEN
            raise RemoteProtocolError(f"from the {self.peer.value}: {error}") from None
        if isinstance(event, Failure):
            raise RefusedError(event.code, f"the server ended the session with {event.code.name}")
        return tuple(received)

    def _apply(self, sender: Role, event: Event) -> UploadComplete | AnswerComplete | None:
        after = TRANSITIONS.get((self._state, sender, type(event)))
        if after is None:
            raise LocalProtocolError(f"{type(event).__name__} is not allowed in a session that is {self._state.value}")
        complete = None
        match event:
            case Chunk() | BlockAnswer():
                complete = self._advance(sender, event)
            case BlockRequest():
                self._open_request(event)
            case Hello():
                self._greet(event)
            case End():
                self._check_end(sender)
            case Failure():
                self._open.clear()
        self._state = after
        return complete

    def _greet(self, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise RefusedError(
                FailureCode.VERSION, f"protocol version {PROTOCOL_VERSION} expected, got {hello.protocol_version}"
            )
        self._check_plan(hello.plan_hash)
        self._hello = hello

    def _check_plan(self, plan_hash: bytes) -> None:
        if plan_hash != self._plan_hash:
            raise RefusedError(
                FailureCode.PLAN,
                f"plan {self._plan_hash.hex()[:16]} expected, got {plan_hash.hex()[:16]}: deploy both folders of one "
                "bundle",
            )

    def _open_request(self, request: BlockRequest) -> None:
        limits = self._limits
        if self._hello is None or request.session != self._hello.session:
            raise LocalProtocolError(f"request {request.request_id} belongs to another session")
        self._check_plan(request.plan_hash)
        if request.request_id <= self._last_id:
            raise LocalProtocolError(f"request ids must grow, got {request.request_id} after {self._last_id}")
        if len(self._open) >= limits.max_open_requests:
            raise RefusedError(FailureCode.BUSY, f"{len(self._open)} requests are open, which is the limit")
        mode, samples = request.mode, request.samples
        sizes = self._sizes_of(request.block, mode, samples)
        most = min(limits.max_samples, sizes.max_samples)
        if not 1 <= samples <= most:
            raise out_of_range(f"request {request.request_id}: samples", samples, 1, most)
        rows, up = max(sizes.rows_up, sizes.rows_down), sizes.rows_up
        if request.rows != up:
            raise out_of_range(f"request {request.request_id}: rows by the plan", request.rows, up, up)
        if not 1 <= rows <= limits.max_rows:
            raise out_of_range(f"request {request.request_id}: rows", rows, 1, limits.max_rows)
        if rows * sizes.row_bytes > limits.max_request_bytes:
            size = rows * sizes.row_bytes
            raise out_of_range(f"request {request.request_id}: bytes", size, 1, limits.max_request_bytes)
        self._last_id = request.request_id
        self._open[request.request_id] = Transfer(request, sizes)

    def _shape(self, block: int, mode: Mode) -> BlockShape:
        if not 0 <= block < len(self._blocks):
            raise out_of_range("block", block, 0, len(self._blocks) - 1)
        shape = self._blocks[block]
        if not shape.supports(mode):
            raise LocalProtocolError(f"block {block} has no {mode.name.lower()} form in this plan")
        return shape

    def _sizes_of(self, block: int, mode: Mode, samples: int) -> Sizes:
        """What the plan says about a request; that of the last one for each block is kept."""
        sizes = self._sizes.get((block, mode))
        if sizes is None or sizes.samples != samples:
            sizes = self._sizes[block, mode] = self._shape(block, mode).sizes(mode, samples)
        return sizes

    def _advance(self, sender: Role, event: Chunk | BlockAnswer) -> UploadComplete | AnswerComplete | None:
        transfer = self._open.get(event.request_id) or self._transfer(event.request_id)
        if isinstance(event, Chunk) and not 1 <= len(event.data) <= self._limits.chunk_bytes:
            what = f"chunk of request {event.request_id}: bytes"
            raise out_of_range(what, len(event.data), 1, self._limits.chunk_bytes)
        stage = transfer.advance(sender, event)
        if stage is Stage.UPLOADED:
            return UploadComplete(transfer.request)
        if stage is Stage.ANSWERED:
            del self._open[event.request_id]
            return AnswerComplete(transfer.request)
        return None

    def _check_end(self, sender: Role) -> None:
        waiting = [
            transfer.request.request_id
            for transfer in self._open.values()
            if sender is Role.SERVER or transfer.stage is Stage.UPLOADING
        ]
        if waiting:
            raise LocalProtocolError(f"the stream ends in the middle of requests {waiting}")

    def _transfer(self, request_id: int) -> Transfer:
        transfer = self._open.get(request_id)
        if transfer is None:
            raise LocalProtocolError(f"no request {request_id} is open")
        return transfer


class NodeSession(_Session):
    """The node's end.

    Args:
        session: 16 random bytes.
        plan_hash: 32 bytes, of the plan that both sides must have.
        blocks: what that plan says about the ciphertexts of each block.
        limits: what this side sends and receives at most.

    Raises:
        ParameterError: a row of a block does not fit into a chunk.
    """

    role, peer = Role.NODE, Role.SERVER

    def __init__(self, session: bytes, plan_hash: bytes, blocks: Sequence[BlockShape], limits: Limits) -> None:
        super().__init__(plan_hash, blocks, limits)
        self._session = session

    def hello(self) -> Hello:
        """Open the session: returns the event to be encoded. Raises as `send` does."""
        return self.send(Hello(self._plan_hash, self._session))

    def open_request(
        self,
        block: int,
        samples: int,
        mode: Mode = Mode.STANDARD,
        attempt: int = 0,
        first: Chunk | None = None,
        trace: bytes = b"",
    ) -> BlockRequest:
        """Announce the ciphertexts of a block, under the next free id.

        Args:
            block: index into the plan's blocks.
            samples: inputs that it will carry.
            mode: how the ciphertexts were made.
            attempt: how often the same bytes were sent before.
            first: the first chunk, of request `next_id`, if it is to travel inside.
            trace: names our span, where the server may know.

        Returns:
            The event to be encoded; its `request_id` is that of the chunks to send.

        Raises:
            LocalProtocolError: as `send`; among the reasons that too many requests are open.
        """
        rows = self._sizes_of(block, mode, samples).rows_up
        return self.send(
            BlockRequest(
                self._session, self._plan_hash, block, self.next_id, samples, rows, attempt, mode, first, trace
            )
        )

    @property
    def next_id(self) -> int:
        """The id of the request to be opened next."""
        return self._last_id + 1

    def upload(
        self, block: int, samples: int, mode: Mode, rows: bytes | memoryview, attempt: int = 0, trace: bytes = b""
    ) -> Iterator[BlockRequest | Chunk]:
        """Announce a request and send all its rows, as few messages as possible.

        Args:
            block: index into the plan's blocks.
            samples: inputs that it carries.
            mode: how the ciphertexts were made.
            rows: all rows, packed, C-contiguous.
            attempt: how often the same bytes were sent before.
            trace: names our span, where the server may know.

        Yields:
            The events to be encoded, the request first.

        Raises:
            LocalProtocolError: as `send`; among the reasons that rows are missing.
        """
        sizes = self._sizes_of(block, mode, samples)
        row, size = sizes.row_bytes, memoryview(rows).nbytes
        if size != sizes.rows_up * row:
            raise LocalProtocolError(f"block {block}: {sizes.rows_up} rows of {row} bytes expected, got {size} bytes")
        chunks = iterate_row_chunks(self.next_id, rows, row, self._limits.chunk_bytes)
        yield self.open_request(block, samples, mode, attempt, next(chunks, None), trace)
        for chunk in chunks:
            yield self.send(chunk)


class ServerSession(_Session):
    """The server's end; it learns the session's id from Hello.

    Args:
        plan_hash: 32 bytes, of the plan that this server has loaded.
        blocks: what that plan says about the ciphertexts of each block.
        limits: what this side sends and receives at most.

    Raises:
        ParameterError: a row of a block does not fit into a chunk.
    """

    role, peer = Role.SERVER, Role.NODE

    def answer(
        self, request_id: int, rows: int, compute_s: float, chunks: Iterable[Chunk]
    ) -> Iterator[BlockAnswer | Chunk]:
        """Announce an answer and send its chunks, the first inside the announcement.

        Args:
            request_id: of the request.
            rows: rows of the answer.
            compute_s: what the block took, in seconds.
            chunks: all of them, in order.

        Yields:
            The events to be encoded.

        Raises:
            LocalProtocolError: as `send`.
        """
        remaining = iter(chunks)
        yield self.send(BlockAnswer(request_id, rows, compute_s, next(remaining, None)))
        for chunk in remaining:
            yield self.send(chunk)


def _parts(event: Event) -> tuple[Event, ...]:
    """The event, with what was inside it after it."""
    # Not by `dataclasses.replace`, which takes longer than everything else here.
    match event:
        case BlockAnswer(first=Chunk() as first):
            return BlockAnswer(event.request_id, event.rows, event.compute_s), first
        case BlockRequest(first=Chunk() as first):
            e = event
            bare = BlockRequest(
                e.session, e.plan_hash, e.block, e.request_id, e.samples, e.rows, e.attempt, e.mode, trace=e.trace
            )
            return bare, first
    return (event,)
