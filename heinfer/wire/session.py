"""Both ends of an Evaluator.Session as state machines without input or output, after h11.

`send` checks what we are about to say and `receive` what the peer said. A breach of the rules by our side is a
`LocalProtocolError`, a bug here; one by the peer is a `RemoteProtocolError`. After either the session is broken: a
server may still send its one `Failure`, a node nothing.

Nothing is buffered: a chunk is checked, counted and handed on. Objects are not thread-safe; where several threads
share one, hold a lock from `send` until the event is queued, so that the order checked is the order sent.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
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
    NodeEvent,
    Ready,
    RefusedError,
    ServerEvent,
    UploadComplete,
    check_range,
)
from heinfer.wire.transfers import BlockShape, Role, Stage, Transfer, row_bytes


class State(enum.Enum):
    """Where a session is. CLOSING: the node has ended its half. BROKEN: somebody broke the rules."""

    NEW = "new"
    GREETED = "greeted"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"


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
        for index, shape in enumerate(self._blocks):
            largest = row_bytes(min(shape.degree, limits.max_samples), shape.degree)
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
        except ProtocolError as error:
            self._state = State.BROKEN
            raise LocalProtocolError(f"{self.role.value}: {error}") from None
        return event

    def receive(self, event: Event) -> tuple[Received, ...]:
        """Take an event from the peer; `End` when its half of the stream is over.

        Returns:
            The event, followed by UploadComplete or AnswerComplete if it brought the last row of a request.

        Raises:
            RemoteProtocolError: the peer may not send it now; the session is broken.
            RefusedError: likewise, with the code to tell the node; or it is the server's Failure.
        """
        try:
            complete = self._apply(self.peer, event)
        except RefusedError:
            self._state = State.BROKEN
            raise
        except ProtocolError as error:
            self._state = State.BROKEN
            raise RemoteProtocolError(f"from the {self.peer.value}: {error}") from None
        if isinstance(event, Failure):
            raise RefusedError(event.code, f"the server ended the session with {event.code.name}")
        return (event,) if complete is None else (event, complete)

    def _apply(self, sender: Role, event: Event) -> UploadComplete | AnswerComplete | None:
        after = TRANSITIONS.get((self._state, sender, type(event)))
        if after is None:
            raise LocalProtocolError(f"{type(event).__name__} is not allowed in a session that is {self._state.value}")
        complete = None
        match event:
            case Hello():
                self._greet(event)
            case BlockRequest():
                self._open_request(event)
            case Chunk() | BlockAnswer():
                complete = self._advance(sender, event)
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
        if not self.has_room:
            raise RefusedError(FailureCode.BUSY, f"{len(self._open)} requests are open, which is the limit")
        where = f"request {request.request_id}"
        check_range(f"{where}: block", request.block, 0, len(self._blocks) - 1)
        shape = self._blocks[request.block]
        check_range(f"{where}: samples", request.samples, 1, min(shape.degree, limits.max_samples))
        check_range(f"{where}: rows by the plan", request.rows, shape.input_rows, shape.input_rows)
        check_range(f"{where}: rows", max(shape.input_rows, shape.output_rows), 1, limits.max_rows)
        transfer = Transfer(request, shape)
        largest = max(shape.input_rows, shape.output_rows) * transfer.row_bytes
        check_range(f"{where}: bytes", largest, 1, limits.max_request_bytes)
        self._last_id = request.request_id
        self._open[request.request_id] = transfer

    def _advance(self, sender: Role, event: Chunk | BlockAnswer) -> UploadComplete | AnswerComplete | None:
        transfer = self._transfer(event.request_id)
        if isinstance(event, Chunk):
            check_range(f"chunk of request {event.request_id}: bytes", len(event.data), 1, self._limits.chunk_bytes)
        transfer.advance(sender, event)
        if transfer.stage is Stage.UPLOADED:
            return UploadComplete(transfer.request)
        if transfer.stage is Stage.ANSWERED:
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

    def open_request(self, block: int, samples: int, attempt: int = 0) -> BlockRequest:
        """Announce the ciphertexts of a block, under the next free id.

        Returns:
            The event to be encoded; its `request_id` is that of the chunks to send.

        Raises:
            LocalProtocolError: as `send`; among the reasons that too many requests are open.
        """
        check_range("block", block, 0, len(self._blocks) - 1)
        rows = self._blocks[block].input_rows
        return self.send(
            BlockRequest(self._session, self._plan_hash, block, self._last_id + 1, samples, rows, attempt=attempt)
        )


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
