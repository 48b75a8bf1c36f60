"""Which server is asked next: without sockets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from heinfer.errors import IntegrityError, ParameterError, RemoteProtocolError
from trusted_node import replicas
from trusted_node.integrity import ATTEMPTS, Conduct
from trusted_node.replicas import Replicas, ServerError


class FakeLink:
    """A link whose sessions are its own name, or an error."""

    def __init__(self, name: str) -> None:
        self.conduct = Conduct(name)
        self.error: Exception | None = None
        self.closed = False

    def acquire(self) -> str:
        if self.error is not None:
            raise self.error
        return self.conduct.name

    def close(self) -> None:
        self.closed = True


def made(*names: str) -> tuple[Replicas, list[Any]]:
    links: list[Any] = [FakeLink(name) for name in names]
    return Replicas(links), links


def asked(of: Replicas, times: int = 1, avoid: tuple[Any, ...] = ()) -> str:
    return "".join(str(of.acquire(avoid, time.monotonic() + 30)[1]) for _ in range(times))


def test_equals_take_turns() -> None:
    of, _ = made("a", "b", "c")
    assert asked(of, 7) == "abcabca"


def test_one_that_failed_is_left_alone_for_a_while_and_asked_again_when_it_has_answered() -> None:
    of, (a, _) = made("a", "b")
    of.record_failure(a)
    assert asked(of, 4) == "bbbb"
    time.sleep(replicas.FIRST_REST_S + 0.02)
    assert asked(of, 2) == "bb"  # rested, but it has failed more often
    of.record_success(a)
    assert sorted(asked(of, 4)) == ["a", "a", "b", "b"]


def test_rests_grow_up_to_a_limit_and_failures_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of, (a,) = made("a")
    now = [0.0]
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now[0])
    rests = []
    for _ in range(12):
        for _ in range(5):
            of.record_failure(a)
        rests.append(of._standings[0].rests_until - now[0])
        now[0] = of._standings[0].rests_until
    for number, rest in enumerate(rests):
        longest = min(replicas.LONGEST_REST_S, replicas.FIRST_REST_S * 2**number)
        assert 0.5 * longest <= rest <= longest
    assert len({round(rest / min(2.0, 0.05 * 2**n), 6) for n, rest in enumerate(rests)}) > 1  # jittered


def test_the_only_one_is_asked_after_its_rest_and_not_after_the_deadline() -> None:
    of, (a,) = made("a")
    of.record_failure(a)
    started = time.monotonic()
    assert asked(of) == "a"
    assert time.monotonic() - started >= 0.5 * replicas.FIRST_REST_S
    for _ in range(8):
        of.record_failure(a)
        of._standings[0].rests_until = 0.0
    of.record_failure(a)
    started = time.monotonic()
    with pytest.raises(RemoteProtocolError, match="no server is ready in time: a"):
        of.acquire((), time.monotonic() + 0.1)
    assert time.monotonic() - started < 0.5


def test_one_in_quarantine_is_never_asked() -> None:
    of, (a, b) = made("a", "b")
    for _ in range(ATTEMPTS):
        a.conduct.record_failure(0)
    for _ in range(3):
        of.record_failure(b)
        assert asked(of, 2) == "bb"
    assert not of.has_other((b,))
    with pytest.raises(IntegrityError, match="quarantine"):
        of.acquire((b,), time.monotonic() + 1)


def test_one_that_comes_into_quarantine_when_it_has_been_chosen_is_passed_over() -> None:
    """Another upload's failure may be the last one that is forgiven, between the choice and the session."""
    of, (a, b) = made("a", "b")

    def acquire() -> str:
        while not a.conduct.in_quarantine:
            a.conduct.record_failure(0)
        a.conduct.check()
        raise AssertionError

    a.acquire = acquire
    assert asked(of, 3) == "bbb"
    assert a.conduct.failures == ATTEMPTS
    with pytest.raises(IntegrityError, match="server a is in quarantine"):
        of.acquire((b,), time.monotonic() + 1)


def test_those_to_avoid_are_not_asked() -> None:
    of, (a, b) = made("a", "b")
    assert asked(of, 3, (a,)) == "bbb"
    assert of.has_other((a,))
    assert not of.has_other((a, b))
    with pytest.raises(RemoteProtocolError, match="no server is left"):
        of.acquire((a, b), time.monotonic() + 1)


def test_error_names_its_server() -> None:
    of, (a, _) = made("a", "b")
    a.error = RemoteProtocolError("gone")
    with pytest.raises(ServerError, match="gone") as caught:
        of.acquire((), time.monotonic() + 1)
    assert caught.value.link is a


def test_closed_lends_nothing() -> None:
    of, links = made("a", "b")
    of.close()
    assert all(link.closed for link in links)
    with pytest.raises(RemoteProtocolError, match="closed"):
        of.acquire((), time.monotonic() + 1)


def test_without_servers_there_are_no_replicas() -> None:
    with pytest.raises(ParameterError, match="at least one"):
        Replicas([])
