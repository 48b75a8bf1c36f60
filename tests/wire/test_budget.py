"""Memory for all requests together: who fits comes in, who does not waits its turn, for a while."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from heinfer.errors import InputError, ParameterError
from heinfer.wire import FailureCode, MemoryBudget, RefusedError, parse_size
from heinfer.wire.budget import machine_memory
from tests.waiting import soon


def test_room_is_taken_and_given_back():
    budget = MemoryBudget(100)
    with budget.room(60):
        assert budget.used == 60
        assert budget.try_take(40)
        assert not budget.try_take(1)
        budget.give(40)
    assert budget.used == 0


def test_request_that_would_not_fit_alone_is_refused_at_once():
    budget = MemoryBudget(100, option="--memory")
    with pytest.raises(InputError, match=r"101 B.*raise --memory"):
        budget.take(101)
    assert budget.used == 0


def test_wait_for_room_ends_with_busy():
    budget = MemoryBudget(100, wait_s=0.1)
    budget.take(100)
    started = time.monotonic()
    with pytest.raises(RefusedError) as caught:
        budget.take(1)
    assert caught.value.code is FailureCode.BUSY
    assert 0.1 <= time.monotonic() - started < 5
    budget.give(100)
    budget.take(100)  # who gave up left nothing behind


def test_small_requests_do_not_overtake_a_large_one_that_waits():
    budget = MemoryBudget(100, wait_s=20)
    budget.take(50)
    order = []

    def ask(amount):
        with budget.room(amount):
            order.append(amount)

    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(ask, 90)
        assert soon(lambda: len(budget._queue) == 1)
        small = threads.submit(ask, 10)
        assert soon(lambda: len(budget._queue) == 2)
        assert not budget.try_take(1)
        budget.give(50)
        large.result(10)
        small.result(10)
    assert order == [90, 10]
    assert budget.used == 0


def test_many_threads_never_hold_more_than_there_is():
    budget, lock = MemoryBudget(100, wait_s=30), threading.Lock()
    held = most = 0

    def ask(number):
        nonlocal held, most
        amount = 1 + number * 37 % 100
        with budget.room(amount):
            with lock:
                held += amount
                most = max(most, held)
            time.sleep(0.0005)
            with lock:
                held -= amount

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, range(300)))
    assert 50 < most <= 100
    assert budget.used == 0


def test_budget_of_nothing_is_refused_and_the_default_is_part_of_the_machine():
    with pytest.raises(ParameterError):
        MemoryBudget(0)
    assert MemoryBudget().total == machine_memory() // 2


@pytest.mark.parametrize(("text", "size"), [("4GiB", 4 * 2**30), ("500MB", 500_000_000), ("0.5MiB", 2**19)])
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4", "GiB", "-1GiB", "0MB", "nanGiB", "infGiB", "4 gib", "1e400GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="such as 4GiB"):
        parse_size(text)
