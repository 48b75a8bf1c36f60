"""The pool of prepared queries: filled between queries, every entry once, for minutes, for one process."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import LocalProtocolError
from heinfer.plan import load_node
from tests.waiting import wait_for
from trusted_node import pool as pool_module
from trusted_node.pool import PreparedPool
from trusted_node.preparation import Preparer

PATIENCE_S = 20.0


class Entry:
    """Stands for a prepared query."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.made_at = time.monotonic()
        self.wiped = False

    def wipe(self) -> None:
        self.wiped = True


class Maker:
    """Stands for a preparer; `fail` makes the next calls raise, `hold` makes calls wait."""

    def __init__(self, fail: int = 0, query_bytes: int = 0) -> None:
        self.query_bytes = query_bytes
        self.made: list[Entry] = []
        self.calls = 0
        self.fail = fail
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Event()
        self._lock = threading.Lock()

    def prepare(self, samples: int, threads: int | None = None) -> Entry:
        with self._lock:
            self.calls += 1
            if self.fail:
                self.fail -= 1
                raise MemoryError("no memory")
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        entry = Entry(samples)
        with self._lock:
            self.made.append(entry)
        return entry


def pool_of(maker: Maker, size: int | None, **options: float) -> PreparedPool:
    return PreparedPool(maker, size, **options)  # type: ignore[arg-type]


def exit_code(pid: int) -> int:
    """Wait for a child."""
    statuses: list[int] = []

    def ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        statuses.append(status)
        return found == pid

    wait_for(ended)
    return os.waitstatus_to_exitcode(statuses[-1])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background looks every few milliseconds, not every few seconds."""
    monkeypatch.setattr(pool_module, "_CHECK_S", 0.02)


def test_pool_fills_up_to_its_size_and_no_further() -> None:
    maker = Maker()
    with pool_of(maker, 5) as pool:
        assert pool.wait_full(PATIENCE_S)
        time.sleep(0.1)
        assert pool.ready == len(maker.made) == 5
        assert {entry.samples for entry in maker.made} == {1}
        assert pool.preparation_s is not None
        assert 0 <= pool.preparation_s < 1


def test_pool_refills_between_queries_and_not_while_one_is_online() -> None:
    maker = Maker()
    with pool_of(maker, 4) as pool:
        assert pool.wait_full(PATIENCE_S)
        with pool.online():
            with pool.online():
                assert pool.take(3).pooled == 3
            time.sleep(0.2)  # the outer query is still under way
            assert (pool.ready, maker.calls) == (1, 4)
            assert not pool.wait_full(0.05)
        assert pool.wait_full(PATIENCE_S)
        assert (pool.ready, maker.calls) == (4, 7)


def test_pool_refills_after_a_query_that_failed() -> None:
    maker = Maker()
    with pool_of(maker, 2) as pool:
        assert pool.wait_full(PATIENCE_S)

        def fail() -> None:
            with pool.online():
                pool.take(2)
                raise RuntimeError("query")

        with pytest.raises(RuntimeError, match="query"):
            fail()
        assert pool.wait_full(PATIENCE_S)


def test_take_of_what_is_there_takes_no_time() -> None:
    with pool_of(Maker(), 4) as pool:
        assert pool.wait_full(PATIENCE_S)
        with pool.online():
            taken = pool.take(4)
    assert (taken.pooled, taken.seconds, len(taken.queries)) == (4, 0.0, 4)


def test_take_of_more_than_there_is_prepares_the_rest_and_says_so() -> None:
    maker = Maker()
    with pool_of(maker, 3) as pool:
        assert pool.wait_full(PATIENCE_S)
        with pool.online():
            taken = pool.take(10)
            assert [query.samples for query in taken.queries] == [1, 1, 1, 7]
            assert taken.pooled == 3
            assert 0 < taken.seconds < PATIENCE_S
            assert maker.calls == 4
            empty = pool.take(2)
    assert (empty.pooled, [query.samples for query in empty.queries]) == (0, [2])
    assert empty.seconds > 0
    taken.wipe()
    assert all(query.wiped for query in taken.queries)  # type: ignore[attr-defined]


def test_take_that_fails_wipes_what_it_had_taken() -> None:
    maker = Maker()
    with pool_of(maker, 3) as pool:
        assert pool.wait_full(PATIENCE_S)
        maker.fail = 1
        with pool.online(), pytest.raises(MemoryError):
            pool.take(5)
        assert all(entry.wiped for entry in maker.made[:3])
        assert pool.wait_full(PATIENCE_S)
        assert not any(entry.wiped for entry in maker.made[3:])


def test_expired_entries_are_wiped_and_not_handed_out() -> None:
    maker = Maker()
    with pool_of(maker, 3, lifetime_s=0.15) as pool:
        assert pool.wait_full(PATIENCE_S)
        with pool.online():
            time.sleep(0.2)
            taken = pool.take(2)
            assert taken.pooled == 0
            assert [query.samples for query in taken.queries] == [2]
            assert [entry.wiped for entry in maker.made[:3]] == [True] * 3
            assert pool.ready == 0


def test_entries_expire_and_are_renewed_while_nobody_asks(quick: None) -> None:
    maker = Maker()
    with pool_of(maker, 2, lifetime_s=0.1) as pool:
        assert pool.wait_full(PATIENCE_S)
        wait_for(lambda: len(maker.made) >= 6)
        assert all(entry.wiped for entry in maker.made[:4])
        assert not maker.made[-1].wiped


def test_entries_expire_while_queries_keep_the_pool_from_refilling(quick: None) -> None:
    maker = Maker()
    with pool_of(maker, 2, lifetime_s=0.1) as pool:
        assert pool.wait_full(PATIENCE_S)
        with pool.online():
            wait_for(lambda: pool.ready == 0)
            assert all(entry.wiped for entry in maker.made)
            assert maker.calls == 2


def test_entries_live_for_minutes_by_default() -> None:
    assert 60 <= pool_module.LIFETIME_S <= 600


def test_close_wipes_what_is_left_and_stops() -> None:
    maker = Maker()
    pool = pool_of(maker, 4)
    assert pool.wait_full(PATIENCE_S)
    pool.close()
    assert all(entry.wiped for entry in maker.made)
    assert pool.ready == 0
    time.sleep(0.1)
    assert maker.calls == 4
    pool.close()  # twice does no harm


def test_close_wipes_the_entry_that_is_just_being_made() -> None:
    maker = Maker()
    maker.go_on.clear()
    pool = pool_of(maker, 4)
    assert maker.entered.wait(PATIENCE_S)
    closer = threading.Thread(target=pool.close)
    closer.start()
    time.sleep(0.05)
    maker.go_on.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert [entry.wiped for entry in maker.made] == [True]
    assert pool.ready == 0


def test_every_entry_is_handed_out_once_to_sixteen_threads() -> None:
    maker = Maker()
    with pool_of(maker, 20) as pool, ThreadPoolExecutor(16) as threads:
        assert pool.wait_full(PATIENCE_S)

        def query(number: int) -> list[int]:
            with pool.online():
                taken = pool.take(1 + number % 3)
                assert sum(entry.samples for entry in taken.queries) == 1 + number % 3
                return [id(entry) for entry in taken.queries]

        given = [entry for one in threads.map(query, range(600)) for entry in one]
        assert len(set(given)) == len(given)
        assert set(given) <= {id(entry) for entry in maker.made}  # `made` keeps them alive: an id is one entry
        assert len(given) >= 600


def test_pool_of_size_zero_prepares_nothing_ahead() -> None:
    maker = Maker()
    with pool_of(maker, 0) as pool:
        assert pool.wait_full(PATIENCE_S)
        time.sleep(0.1)
        assert maker.calls == 0
        assert pool.preparation_s is None
        with pool.online():
            taken = pool.take(3)
        assert (taken.pooled, [entry.samples for entry in taken.queries]) == (0, [3])
        time.sleep(0.05)
        assert (pool.ready, maker.calls) == (0, 1)


def test_preparer_that_fails_does_not_end_the_refilling(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    maker = Maker(fail=3)
    with caplog.at_level(logging.DEBUG), pool_of(maker, 2) as pool:
        assert pool.wait_full(PATIENCE_S)
        assert maker.calls == 5
    assert [record.getMessage() for record in caplog.records] == ["preparing ahead failed"] * 3


def test_close_does_not_wait_for_a_preparer_that_fails() -> None:
    maker = Maker(fail=10**6)
    pool = pool_of(maker, 2)
    wait_for(lambda: maker.calls > 0)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < pool_module._CHECK_S / 2
    assert maker.calls <= 2  # it does not try without a pause


def test_forked_child_finds_an_empty_pool_that_works_though_the_lock_was_held() -> None:
    maker = Maker()
    with pool_of(maker, 3) as pool:
        assert pool.wait_full(PATIENCE_S)
        with pool._changed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # since Python 3.12 there is one for a process with threads
            pid = os.fork()
            if pid == 0:
                code = 99
                try:
                    code = pool.ready + 10 * pool._changed.acquire(timeout=5)
                finally:
                    os._exit(code)
        assert exit_code(pid) == 10
        assert pool.ready == 3
        assert not any(entry.wiped for entry in maker.made)


def test_pool_of_real_entries_hands_out_masks_that_work_once(dense_bundle: Path) -> None:
    with PreparedPool(Preparer(load_node(dense_bundle / "node")), 3) as pool:
        assert pool.wait_full(PATIENCE_S)
        with pool.online():
            taken = pool.take(4)
        assert taken.pooled == 3
        x, scale = np.ones((1, 3), np.float32), np.ones(1)
        seen = [query.encrypt(0, x, scale).copy() for query in taken.queries]
        assert len(np.unique(np.concatenate(seen))) == 4 * 3
        with pytest.raises(LocalProtocolError, match="once"):
            taken.queries[0].encrypt(0, x, scale)
        taken.wipe()
        with pytest.raises(LocalProtocolError):
            taken.queries[0].encrypt(1, np.ones((1, 4), np.float32), scale)


@pytest.mark.parametrize(("query_bytes", "size"), [(0, 16), (2**27, 16), (2**27 + 1, 15), (2**30, 2), (2**33, 1)])
def test_pool_without_a_size_keeps_16_or_what_2_gib_hold(query_bytes: int, size: int) -> None:
    with pool_of(Maker(query_bytes=query_bytes), None) as pool:
        assert pool.wait_full(PATIENCE_S)
        assert pool.ready == pool.size == size
