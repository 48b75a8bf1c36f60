"""Both ends of a session, in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from heinfer.errors import LocalProtocolError, ParameterError, ProtocolError, RemoteProtocolError
from heinfer.wire import (
    AnswerComplete,
    BlockAnswer,
    BlockRequest,
    BlockShape,
    Chunk,
    End,
    Failure,
    FailureCode,
    Hello,
    Limits,
    Mode,
    NodeSession,
    Ready,
    RefusedError,
    Role,
    ServerSession,
    State,
    UploadComplete,
    failure_code,
    iterate_row_chunks,
    row_bytes,
)
from heinfer.wire.session import TRANSITIONS
from heinfer.wire.transfers import STAGES, Stage

PLAN, OTHER_PLAN, SESSION = b"p" * 32, b"o" * 32, b"s" * 16
DEGREE = 64
#: The last has a prepared form: 2 groups a sample up, 3 down.
BLOCKS = (BlockShape(5, 3, DEGREE), BlockShape(2, 7, DEGREE), BlockShape(4, 2, DEGREE, 40, 70))
PREPARED_BLOCK = 2
LIMITS = Limits(chunk_bytes=2000, max_open_requests=3)
HELLO = Hello(PLAN, SESSION)


def request(request_id=1, **changes):
    return replace(BlockRequest(SESSION, PLAN, 0, request_id, samples=33, rows=5), **changes)


def chunk(request_id, first_row, rows, samples=33, extra=0):
    return Chunk(request_id, first_row, rows, bytes(rows * row_bytes(samples, DEGREE) + extra))


def groups(request_id, first_row, rows, extra=0):
    return Chunk(request_id, first_row, rows, bytes(rows * 200 + extra))


def prepared(samples=3, **changes):
    return request(**{"block": 2, "mode": Mode.PREPARED, "samples": samples, "rows": 2 * samples, **changes})


def peers(limits=LIMITS):
    return NodeSession(SESSION, PLAN, BLOCKS, limits), ServerSession(PLAN, BLOCKS, limits)


def opened(limits=LIMITS):
    node, server = peers(limits)
    server.receive(node.hello())
    node.receive(server.send(Ready()))
    return node, server


def test_row_bytes_counts_groups_of_32_residues_of_50_bits():
    assert row_bytes(1, 2048) == 200 + 64 * 200
    assert row_bytes(33, 64) == 400 + 400


def test_three_interleaved_requests_arrive_whole_and_in_order():
    node, server = opened()
    announced = [node.open_request(block, samples) for block, samples in ((0, 33), (1, 64), (0, 1))]
    for event in announced:
        assert server.receive(event) == (event,)
    assert node.open_requests == server.open_requests == (1, 2, 3)
    assert not node.has_room
    uploads = {}
    for event in announced:
        size = event.rows * server.row_bytes(event.request_id)
        data = bytes((event.request_id + k) % 251 for k in range(size))
        uploads[event.request_id] = data, iterate_row_chunks(event.request_id, data, size // event.rows, 2000)
    received = {event.request_id: b"" for event in announced}
    complete = []
    while uploads:
        for request_id, (data, chunks) in list(uploads.items()):
            piece = next(chunks, None)
            if piece is None:
                assert received[request_id] == data
                del uploads[request_id]
                continue
            first, *rest = server.receive(node.send(piece))
            received[request_id] += first.data
            complete += rest
    assert {event.request.request_id for event in complete} == {1, 2, 3}
    assert all(isinstance(event, UploadComplete) for event in complete)
    # Answers out of order, interleaved row by row.
    for request_id, rows in ((3, 3), (2, 7)):
        assert len(node.receive(server.send(BlockAnswer(request_id, rows, 0.5)))) == 1
    for row in range(7):
        done = node.receive(server.send(chunk(2, row, 1, 64)))[1:]
        assert done == ((AnswerComplete(announced[1]),) if row == 6 else ())
        if row < 3:
            done = node.receive(server.send(chunk(3, row, 1, 1)))[1:]
            assert done == ((AnswerComplete(announced[2]),) if row == 2 else ())
    server.receive(node.send(End()))
    node.receive(server.send(BlockAnswer(1, 3, 0.0)))
    assert node.receive(server.send(chunk(1, 0, 2)))[1:] == ()
    assert node.receive(server.send(chunk(1, 2, 1)))[1:] == (AnswerComplete(announced[0]),)
    node.receive(server.send(End()))
    assert node.state is server.state is State.CLOSED
    assert node.open_requests == server.open_requests == ()


# What a node says, the last event being illegal; Ready stands for the server's turn.
ILLEGAL_FROM_NODE = {
    "request before hello": [request()],
    "chunk before hello": [chunk(1, 0, 1)],
    "request before ready": [HELLO, request()],
    "end before ready": [HELLO, End()],
    "hello twice": [HELLO, Ready(), HELLO],
    "hello twice at once": [HELLO, HELLO],
    "other session": [HELLO, Ready(), request(session=b"x" * 16)],
    "block too large": [HELLO, Ready(), request(block=3)],
    "rows not the plan's": [HELLO, Ready(), request(rows=4)],
    "rows of another block": [HELLO, Ready(), request(block=1)],
    "samples above degree": [HELLO, Ready(), request(samples=65)],
    "id used before": [HELLO, Ready(), request(7), request(7)],
    "id not growing": [HELLO, Ready(), request(7), request(6)],
    "chunk of unknown id": [HELLO, Ready(), request(1), chunk(2, 0, 1)],
    "first row skipped": [HELLO, Ready(), request(), chunk(1, 1, 1)],
    "row repeated": [HELLO, Ready(), request(), chunk(1, 0, 2), chunk(1, 1, 1)],
    "rows skipped": [HELLO, Ready(), request(), chunk(1, 0, 1), chunk(1, 2, 1)],
    "more rows than announced": [HELLO, Ready(), request(samples=1, block=1, rows=2), chunk(1, 0, 3, 1)],
    "rows after the last": [HELLO, Ready(), request(block=1, rows=2), chunk(1, 0, 2), chunk(1, 2, 1)],
    "a byte too many": [HELLO, Ready(), request(), chunk(1, 0, 1, extra=1)],
    "a byte too few": [HELLO, Ready(), request(), chunk(1, 0, 1, extra=-1)],
    "no bytes": [HELLO, Ready(), request(), Chunk(1, 0, 1, b"")],
    "rows of other samples": [HELLO, Ready(), request(), chunk(1, 0, 1, 32)],
    "chunk above the limit": [HELLO, Ready(), request(), chunk(1, 0, 3)],
    "end in the middle": [HELLO, Ready(), request(), End()],
    "first chunk not at row 0": [HELLO, Ready(), request(first=chunk(1, 1, 1))],
    "first chunk of all rows and one more": [
        HELLO,
        Ready(),
        request(samples=1, block=1, rows=2, first=chunk(1, 0, 3, 1)),
    ],
    "first chunk a byte too long": [HELLO, Ready(), request(first=chunk(1, 0, 1, extra=1))],
    "first chunk without bytes": [HELLO, Ready(), request(first=Chunk(1, 0, 1, b""))],
    "first chunk above the limit": [HELLO, Ready(), request(first=chunk(1, 0, 3))],
    "first row again": [HELLO, Ready(), request(first=chunk(1, 0, 2)), chunk(1, 0, 1)],
    "rows after a first chunk of all": [HELLO, Ready(), request(block=1, rows=2, first=chunk(1, 0, 2)), chunk(1, 2, 1)],
    "end after a first chunk of some": [HELLO, Ready(), request(first=chunk(1, 0, 2)), End()],
    "no prepared form": [HELLO, Ready(), prepared(block=0)],
    "no prepared form, rows of standard": [HELLO, Ready(), request(mode=Mode.PREPARED)],
    "prepared rows one too few": [HELLO, Ready(), prepared(3, rows=5)],
    "prepared rows of one sample": [HELLO, Ready(), prepared(3, rows=2)],
    "prepared rows of standard": [HELLO, Ready(), prepared(3, rows=4)],
    "standard rows of prepared": [HELLO, Ready(), request(block=2, samples=3, rows=6)],
    "prepared a byte too many": [HELLO, Ready(), prepared(), groups(1, 0, 1, extra=1)],
    "prepared row of standard": [HELLO, Ready(), prepared(1), chunk(1, 0, 1, 1)],
    "prepared more groups than announced": [HELLO, Ready(), prepared(1), groups(1, 0, 3)],
    "anything after end": [HELLO, Ready(), End(), request()],
    "what a server says": [HELLO, Ready(), BlockAnswer(1, 3, 0.0)],
    "failure": [HELLO, Failure(FailureCode.FAILED)],
}
REFUSED_WITH_CODE = {
    "version": ([replace(HELLO, protocol_version=1)], FailureCode.VERSION),
    "plan": ([Hello(OTHER_PLAN, SESSION)], FailureCode.PLAN),
    "plan of a request": ([HELLO, Ready(), request(plan_hash=OTHER_PLAN)], FailureCode.PLAN),
    "too many": ([HELLO, Ready(), *(request(k) for k in range(1, 5))], FailureCode.BUSY),
}


@pytest.mark.parametrize("events", ILLEGAL_FROM_NODE.values(), ids=ILLEGAL_FROM_NODE)
def test_server_refuses_what_a_node_may_not_say(events):
    server = peers()[1]
    for event in events[:-1]:
        server.send(event) if isinstance(event, Ready) else server.receive(event)
    with pytest.raises(RemoteProtocolError) as caught:
        server.receive(events[-1])
    assert failure_code(caught.value) is FailureCode.FAILED
    assert server.state is State.BROKEN
    with pytest.raises(RemoteProtocolError):
        server.receive(HELLO)
    server.send(Failure(FailureCode.FAILED))
    with pytest.raises(LocalProtocolError):
        server.send(Failure(FailureCode.FAILED))


@pytest.mark.parametrize("events", ILLEGAL_FROM_NODE.values(), ids=ILLEGAL_FROM_NODE)
def test_node_refuses_to_say_what_it_may_not(events):
    node = peers()[0]
    for event in events[:-1]:
        node.receive(event) if isinstance(event, Ready) else node.send(event)
    with pytest.raises(LocalProtocolError):
        node.send(events[-1])
    for event in (HELLO, Failure(FailureCode.FAILED)):
        with pytest.raises(LocalProtocolError):
            node.send(event)


@pytest.mark.parametrize(("events", "code"), REFUSED_WITH_CODE.values(), ids=REFUSED_WITH_CODE)
def test_server_refuses_with_code(events, code):
    server = peers()[1]
    for event in events[:-1]:
        server.send(event) if isinstance(event, Ready) else server.receive(event)
    with pytest.raises(RefusedError) as caught:
        server.receive(events[-1])
    assert caught.value.code is failure_code(caught.value) is code


# What a server says after one request (block 0, 3 answer rows) was uploaded; the last event is illegal.
ILLEGAL_FROM_SERVER = {
    "ready twice": [Ready()],
    "chunk before answer": [chunk(1, 0, 1)],
    "unknown id": [BlockAnswer(2, 3, 0.0)],
    "rows not the plan's": [BlockAnswer(1, 4, 0.0)],
    "answer twice": [BlockAnswer(1, 3, 0.0), BlockAnswer(1, 3, 0.0)],
    "row skipped": [BlockAnswer(1, 3, 0.0), chunk(1, 1, 1)],
    "too many rows": [BlockAnswer(1, 3, 0.0), chunk(1, 0, 2), chunk(1, 2, 2)],
    "after the last row": [BlockAnswer(1, 3, 0.0), chunk(1, 0, 2), chunk(1, 2, 1), chunk(1, 3, 1)],
    "a byte too many": [BlockAnswer(1, 3, 0.0), chunk(1, 0, 1, extra=1)],
    "end in the middle": [BlockAnswer(1, 3, 0.0), End()],
    "first chunk not at row 0": [BlockAnswer(1, 3, 0.0, chunk(1, 1, 1))],
    "first chunk above the limit": [BlockAnswer(1, 3, 0.0, chunk(1, 0, 3))],
    "first chunk a byte too short": [BlockAnswer(1, 3, 0.0, chunk(1, 0, 2, extra=-1))],
    "first row again": [BlockAnswer(1, 3, 0.0, chunk(1, 0, 2)), chunk(1, 0, 1)],
    "first chunk of groups": [BlockAnswer(1, 3, 0.0, groups(1, 0, 3))],
    "what a node says": [HELLO],
}


@pytest.mark.parametrize("events", ILLEGAL_FROM_SERVER.values(), ids=ILLEGAL_FROM_SERVER)
def test_illegal_from_server_is_remote_at_the_node_and_local_at_the_server(events):
    node, server = opened()
    for event in (request(), chunk(1, 0, 2), chunk(1, 2, 2), chunk(1, 4, 1)):
        server.receive(node.send(event))
    for event in events[:-1]:
        node.receive(server.send(event))
    with pytest.raises(LocalProtocolError):
        server.send(events[-1])
    with pytest.raises(RemoteProtocolError):
        node.receive(events[-1])
    assert node.state is server.state is State.BROKEN


def test_small_block_is_one_message_each_way_and_complete_at_once():
    node, server = opened()
    data, answer = bytes(range(200)) * 6, bytes(range(100)) * 18
    (asked,) = node.upload(PREPARED_BLOCK, 3, Mode.PREPARED, data)
    bare = replace(asked, first=None)
    assert server.receive(asked) == (bare, Chunk(1, 0, 6, data), UploadComplete(bare))
    (said,) = server.answer(1, 9, 0.25, iterate_row_chunks(1, answer, 200, LIMITS.chunk_bytes))
    announced, first, complete = node.receive(said)
    assert (announced, first) == (BlockAnswer(1, 9, 0.25), Chunk(1, 0, 9, answer))
    assert isinstance(complete, AnswerComplete)
    assert complete.request.request_id == 1
    assert node.open_requests == server.open_requests == ()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_large_block_is_cut_and_the_first_piece_travels_inside(kind):
    node, server = opened()
    data = bytes(k % 251 for k in range(16 * 200))
    asked, *more = node.upload(PREPARED_BLOCK, 8, Mode.PREPARED, kind(data), attempt=4)
    assert (asked.attempt, asked.rows, len(asked.first.data), len(more)) == (4, 16, 2000, 1)
    bare, first = server.receive(asked)
    assert bare.first is None
    chunk, complete = server.receive(more[0])
    assert complete == UploadComplete(bare)
    assert b"".join([first.data, chunk.data]) == data
    pieces = [groups(1, row, 6) for row in (0, 6, 12, 18)]
    events = [item for event in server.answer(1, 24, 0.0, pieces) for item in node.receive(event)]
    assert events[:-1] == [BlockAnswer(1, 24, 0.0), *pieces]
    assert isinstance(events[-1], AnswerComplete)


@pytest.mark.parametrize("size", [0, 200, 1199, 1201, 1400])
def test_upload_that_is_not_all_rows_is_refused_before_anything_is_sent(size):
    node, _ = opened()
    with pytest.raises(LocalProtocolError, match="6 rows of 200 bytes"):
        list(node.upload(PREPARED_BLOCK, 3, Mode.PREPARED, bytes(size)))
    assert node.state is State.READY
    assert node.open_requests == ()


def test_prepared_request_for_a_block_without_prepared_form_is_refused_on_both_sides():
    node, server = opened()
    with pytest.raises(LocalProtocolError, match="no prepared form"):
        node.open_request(0, 1, Mode.PREPARED)
    assert node.state is State.READY
    with pytest.raises(RemoteProtocolError, match="no prepared form"):
        server.receive(prepared(block=0))


def test_prepared_samples_may_exceed_the_degree_but_not_the_limit():
    limits = replace(LIMITS, max_samples=DEGREE + 6)
    assert opened(limits)[1].receive(prepared(DEGREE + 6)) == (prepared(DEGREE + 6),)
    with pytest.raises(RemoteProtocolError, match="samples"):
        opened(limits)[1].receive(prepared(DEGREE + 7))


@pytest.mark.parametrize("changes", [{"max_rows": 8}, {"max_request_bytes": 9 * 200 - 1}], ids=["rows", "bytes"])
def test_prepared_answer_that_would_exceed_a_limit_is_refused_with_its_request(changes):
    name, value = next(iter(changes.items()))
    opened(replace(LIMITS, **{name: value + 1}))[1].receive(prepared(3))
    with pytest.raises(RemoteProtocolError):
        opened(replace(LIMITS, **changes))[1].receive(prepared(3))


def test_shape_counts_rows_by_mode():
    shape = BlockShape(4, 2, DEGREE, 40, 64)
    assert (shape.rows_up(Mode.STANDARD, 9), shape.rows_down(Mode.STANDARD, 9)) == (4, 2)
    assert (shape.rows_up(Mode.PREPARED, 9), shape.rows_down(Mode.PREPARED, 9)) == (18, 18)
    assert shape.row_bytes(Mode.STANDARD, 9) == row_bytes(9, DEGREE)
    assert shape.row_bytes(Mode.PREPARED, 9) == 200
    assert shape.supports(Mode.PREPARED)
    assert not BlockShape(4, 2, DEGREE).supports(Mode.PREPARED)


@pytest.mark.parametrize("values", [(1, 0), (0, 1), (-1, 1), (-1, -1)])
def test_shape_with_values_one_way_only_is_refused(values):
    with pytest.raises(ParameterError):
        BlockShape(4, 2, DEGREE, *values)


@pytest.mark.parametrize("event", [request, lambda **changes: BlockAnswer(1, 3, 0.0, **changes)])
def test_first_chunk_of_another_request_is_no_event(event):
    with pytest.raises(LocalProtocolError, match="request 2"):
        event(first=chunk(2, 0, 1))


def test_answer_before_the_upload_is_complete_is_refused_on_both_sides():
    node, server = opened()
    server.receive(node.send(request()))
    with pytest.raises(LocalProtocolError):
        server.send(BlockAnswer(1, 3, 0.0))
    with pytest.raises(RemoteProtocolError):
        node.receive(BlockAnswer(1, 3, 0.0))


@pytest.mark.parametrize("code", FailureCode)
def test_failure_reaches_the_node_with_its_code(code):
    node, server = opened()
    with pytest.raises(RefusedError) as caught:
        node.receive(server.send(Failure(code)))
    assert caught.value.code is code
    with pytest.raises(LocalProtocolError):
        node.open_request(0, 1)


@pytest.mark.parametrize(
    "changes",
    [{"max_rows": 4}, {"max_request_bytes": 5 * 800 - 1}, {"max_samples": 32}],
    ids=["rows", "bytes", "samples"],
)
def test_request_above_a_limit_is_refused_and_at_the_limit_is_not(changes):
    name, value = next(iter(changes.items()))
    opened(replace(LIMITS, **{name: value + 1}))[1].receive(request())
    with pytest.raises(RemoteProtocolError):
        opened(replace(LIMITS, **changes))[1].receive(request())


def test_answer_that_would_exceed_a_limit_is_refused_with_its_request():
    with pytest.raises(RemoteProtocolError):
        opened(replace(LIMITS, max_rows=6))[1].receive(request(block=1, rows=2))


def test_row_that_fits_into_no_chunk_is_refused_when_the_session_is_made():
    peers(replace(LIMITS, chunk_bytes=800))
    with pytest.raises(ParameterError, match="chunk_bytes"):
        peers(replace(LIMITS, chunk_bytes=799))


def test_tables_name_only_what_a_role_can_send():
    node = {event for _, role, event in TRANSITIONS if role is Role.NODE}
    server = {event for _, role, event in TRANSITIONS if role is Role.SERVER}
    assert node == {Hello, BlockRequest, Chunk, End}
    assert server == {Ready, BlockAnswer, Chunk, Failure, End}
    assert not any(stage is Stage.ANSWERED for stage, _, _ in STAGES)


@pytest.mark.parametrize(("data", "row"), [(b"x" * 7, 2), (b"x" * 8, 4)], ids=["fraction of a row", "row too long"])
def test_row_chunks_refuse(data, row):
    with pytest.raises(LocalProtocolError):
        list(iterate_row_chunks(1, data, row, 3))


small = st.integers(1, 4)
EVENTS = st.one_of(
    st.sampled_from([HELLO, Hello(OTHER_PLAN, SESSION), Ready(), End(), *map(Failure, FailureCode)]),
    st.builds(
        BlockRequest,
        st.sampled_from([SESSION, SESSION, b"x" * 16]),
        st.sampled_from([PLAN, PLAN, OTHER_PLAN]),
        st.integers(0, 3),
        small,
        st.sampled_from([1, 33, 64, 65]),
        st.sampled_from([5, 2, 2**63]),
        mode=st.sampled_from(Mode),
    ),
    st.sampled_from([request(k, first=chunk(k, row, 2)) for k in (1, 2, 3) for row in (0, 1)]),
    st.sampled_from([prepared(3, request_id=k, first=groups(k, 0, rows)) for k in (1, 2, 3) for rows in (5, 6, 7)]),
    st.sampled_from([BlockAnswer(k, 3, 0.1, chunk(k, 0, rows)) for k in (1, 2) for rows in (1, 2, 3)]),
    st.builds(groups, small, st.integers(0, 5), st.integers(1, 3)),
    st.builds(chunk, small, st.integers(0, 5), st.integers(1, 3), st.just(33), st.sampled_from([0, 0, 0, 1])),
    st.builds(BlockAnswer, small, st.sampled_from([3, 7, 9]), st.just(0.25)),
)
STARTS = st.sampled_from([[], [HELLO], [HELLO, Ready()], [HELLO, Ready(), request(), chunk(1, 0, 2), chunk(1, 2, 2)]])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([0, 1]), STARTS, st.lists(st.tuples(st.booleans(), EVENTS), max_size=12))
def test_random_events_raise_protocol_errors_only(side, start, script):
    session = peers()[side]
    for event in start:
        (session.send if isinstance(event, Ready) == bool(side) else session.receive)(event)
    for outgoing, event in script:
        caught = None
        try:
            session.send(event) if outgoing else session.receive(event)
        except ProtocolError as error:
            caught = error
        if isinstance(caught, RefusedError):
            assert not outgoing
        elif caught is not None:
            assert type(caught) is (LocalProtocolError if outgoing else RemoteProtocolError)
            assert session.state is State.BROKEN
        assert len(session.open_requests) <= LIMITS.max_open_requests


class HonestPeers(RuleBasedStateMachine):
    """Two honest peers with messages in flight both ways: neither ever has cause to complain.

    One rule draws among the moves that are possible. As rules with preconditions, states in which one move alone is
    possible would make hypothesis give up on most runs: it leaves rules out of a run at random.
    """

    def __init__(self):
        super().__init__()
        self.node, self.server = peers()
        self.up, self.down = deque([self.node.hello()]), deque()
        self.uploads, self.ready, self.answers = {}, [], {}
        self.asked = self.answered = 0

    @rule(data=st.data())
    def move(self, data):
        moves = {
            self.server_receives: self.up,
            self.node_receives: self.down,
            self.ask: self.node.state is State.READY and self.node.has_room,
            self.upload: self.uploads,
            self.answer: self.ready,
            self.download: self.answers,
        }
        data.draw(st.sampled_from([move for move, possible in moves.items() if possible]))(data)

    def server_receives(self, data):
        event, *others = self.server.receive(self.up.popleft())
        if isinstance(event, Hello):
            self.down.append(self.server.send(Ready()))
        self.ready += [item.request for item in others if isinstance(item, UploadComplete)]

    def node_receives(self, data):
        received = self.node.receive(self.down.popleft())
        self.answered += sum(isinstance(item, AnswerComplete) for item in received)

    def ask(self, data):
        block = data.draw(st.integers(0, len(BLOCKS) - 1))
        mode = data.draw(st.sampled_from([mode for mode in Mode if BLOCKS[block].supports(mode)]))
        samples = data.draw(st.integers(1, BLOCKS[block].max_samples(mode, 20)))
        chunks = self._chunks(self.node.next_id, BLOCKS[block].rows_up, block, mode, samples)
        first = chunks.popleft() if data.draw(st.booleans()) else None
        event = self.node.open_request(block, samples, mode, first=first)
        self.up.append(event)
        if chunks:
            self.uploads[event.request_id] = chunks
        self.asked += 1

    def upload(self, data):
        self._send_one(data, self.node, self.uploads, self.up)

    def answer(self, data):
        event = self.ready.pop(data.draw(st.integers(0, len(self.ready) - 1)))
        shape = BLOCKS[event.block]
        rows = shape.rows_down(event.mode, event.samples)
        chunks = self._chunks(event.request_id, shape.rows_down, event.block, event.mode, event.samples)
        first = chunks.popleft() if data.draw(st.booleans()) else None
        self.down.append(self.server.send(BlockAnswer(event.request_id, rows, 0.1, first)))
        if chunks:
            self.answers[event.request_id] = chunks

    @staticmethod
    def _chunks(request_id, rows, block, mode, samples):
        row = BLOCKS[block].row_bytes(mode, samples)
        return deque(iterate_row_chunks(request_id, bytes(rows(mode, samples) * row), row, 1999))

    def download(self, data):
        self._send_one(data, self.server, self.answers, self.down)

    def _send_one(self, data, session, pending, queue):
        request_id = data.draw(st.sampled_from(sorted(pending)))
        queue.append(session.send(pending[request_id].popleft()))
        if not pending[request_id]:
            del pending[request_id]

    @invariant()
    def node_counts_what_is_open(self):
        assert len(self.node.open_requests) == self.asked - self.answered <= LIMITS.max_open_requests
        assert set(self.server.open_requests) <= set(self.node.open_requests)


TestHonestPeers = HonestPeers.TestCase
TestHonestPeers.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
