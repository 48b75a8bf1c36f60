"""One upload on its way, without sockets."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from heinfer.errors import IntegrityError
from heinfer.wire import BlockAnswer, Chunk, FailureCode, Limits, MemoryBudget, Mode, RefusedError
from trusted_node import delivery as deliveries
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


class BusySession(FakeSession):
    """A session of a server that has no room until a moment, or for ever."""

    def __init__(self, until: float) -> None:
        self.until, self.asked = until, 0

    def receive(self, request_id: int) -> tuple[BlockAnswer, Iterator[Chunk]]:
        self.asked += 1
        if time.monotonic() < self.until:
            raise RefusedError(FailureCode.BUSY, "come again")
        return super().receive(request_id)


@pytest.mark.parametrize(("mode", "last_s"), [(Mode.DEEP, 60.0), (Mode.DEEP, 0.5), (Mode.STANDARD, 60.0)])
def test_an_upload_to_a_busy_server_of_a_deep_block_comes_again_until_its_last_moment(
    mode: Mode, last_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others for `retry_s`, and for none of them has the server failed."""
    monkeypatch.setattr(deliveries, "_DEEP_BUSY_S", (0.001, 0.002))
    monkeypatch.setattr(deliveries, "_BUSY_S", (0.001, 0.002))
    link: Any = FakeLink("a")
    began = time.monotonic()
    link.session = BusySession(began + (1.0 if last_s > 1 else 60.0))
    replicas = Replicas([link])
    delivery = Delivery(replicas, Limits(retry_s=0.2), MemoryBudget(100), began + last_s)
    delivery.send(0, 1, mode, b"rows")
    if mode is Mode.DEEP and last_s > 1:
        assert delivery.accept(lambda _, chunks: [chunk.data for chunk in chunks]) == [b"row"]
        assert link.session.asked > deliveries.MOST_ATTEMPTS
    else:
        with pytest.raises(RefusedError):
            delivery.accept(lambda *_: None)
        ended = time.monotonic() - began
        assert (0.4 if mode is Mode.DEEP else 0.15) < ended < (1.0 if mode is Mode.STANDARD else 10.0)
    assert replicas.failures(link) == 0
    assert not replicas.is_resting(link)


def test_a_busy_server_is_left_alone_by_that_upload_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "_DEEP_BUSY_S", (30.0, 30.0))
    links: list[Any] = [FakeLink("a"), FakeLink("b")]
    links[0].session = BusySession(time.monotonic() + 60)
    replicas = Replicas(links)
    delivery = Delivery(replicas, Limits(), MemoryBudget(100), time.monotonic() + 60)
    delivery.send(0, 1, Mode.DEEP, b"rows")
    assert delivery.accept(lambda _, chunks: len(list(chunks))) == 1  # of the other, at once
    assert links[0].session.asked == 1
    assert {replicas.acquire((), time.monotonic())[0] for _ in range(2)} == set(links)
