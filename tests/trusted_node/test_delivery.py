"""One upload on its way, without sockets."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from heinfer.errors import IntegrityError
from heinfer.wire import BlockAnswer, Chunk, Limits, MemoryBudget, Mode
from trusted_node.delivery import Delivery
from trusted_node.integrity import Conduct
from trusted_node.replicas import Replicas


class FakeSession:
    """A session whose answers are all alike."""

    ends_at = 0.0

    def send(self, *_: object) -> int:
        return 1

    def receive(self, request_id: int) -> tuple[BlockAnswer, Iterator[Chunk]]:
        return BlockAnswer(request_id, 1, 0.0), iter([Chunk(request_id, 0, 1, b"row")])

    def close(self) -> None:
        pass


class FakeLink:
    """A link with such a session."""

    def __init__(self, name: str) -> None:
        self.conduct = Conduct(name)
        self.session = FakeSession()

    def acquire(self) -> FakeSession:
        return self.session

    def release(self, _: FakeSession) -> None:
        pass


@pytest.fixture
def links() -> list[Any]:
    return [FakeLink("a"), FakeLink("b")]


def deliver(links: list[Any], last_moment: float) -> Delivery:
    delivery = Delivery(Replicas(links), Limits(), MemoryBudget(100), last_moment)
    delivery.send(0, 1, Mode.PREPARED, b"rows")
    return delivery


def test_answer_that_failed_is_let_go_before_the_next_is_read(links: list[Any]) -> None:
    """Room in memory is for one answer of an upload."""

    class Answer:
        pass

    read: list[weakref.ref[Answer]] = []

    def check(_: BlockAnswer, chunks: Iterator[Chunk]) -> int:
        assert all(answer() is None for answer in read)
        answer = Answer()
        read.append(weakref.ref(answer))
        assert [chunk.data for chunk in chunks] == [b"row"]
        if len(read) == 1:
            raise IntegrityError("forged")
        return len(read)

    assert deliver(links, time.monotonic() + 60).accept(check) == 2
    assert sorted(link.conduct.failures for link in links) == [0, 1]


def test_session_is_told_when_its_upload_ends(links: list[Any]) -> None:
    moment = time.monotonic() + 60
    deliver(links, moment)
    assert moment in (link.session.ends_at for link in links)


def test_failure_after_the_last_moment_is_the_last(links: list[Any]) -> None:
    attempts = []

    def check(*_: object) -> None:
        attempts.append(1)
        raise IntegrityError("forged")

    with pytest.raises(IntegrityError, match="forged"):
        deliver(links, time.monotonic()).accept(check)
    assert len(attempts) == 1
