"""Requests that wait together are evaluated together, and each gets its own rows."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest

from heinfer.server import merging
from heinfer.server.merging import Merger
from tests.waiting import wait_for

PATIENCE_S = 20.0


class Gate:
    """An evaluation that notes what it gets, and whose first call waits until it may go on."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, np.ndarray]] = []
        self.entered = threading.Event()
        self.open = threading.Event()
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def __call__(self, block: int, residues: np.ndarray) -> np.ndarray:
        with self._lock:
            self.runs.append((block, residues.copy()))
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        if self.error is not None and len(self.runs) > 1:
            raise self.error
        return answer(block, residues)


def answer(block: int, residues: np.ndarray) -> np.ndarray:
    """Something that differs by block and by row."""
    return residues[:, :2] * 10 + block


def request(number: int, samples: int = 1) -> np.ndarray:
    return np.arange(3 * samples, dtype=np.int64).reshape(samples, 3) + 1000 * number


def waiting(merger: Merger) -> int:
    return sum(map(len, merger._waiting.values()))


def behind_a_gate(
    threads: ThreadPoolExecutor, merger: Merger, gate: Gate, requests: list[tuple[int, np.ndarray]]
) -> list[Future[np.ndarray]]:
    """Let the first request enter the only slot, and all others wait behind it; then open."""
    first = threads.submit(merger.evaluate, *requests[0])
    assert gate.entered.wait(PATIENCE_S)
    futures = [first]
    for count, item in enumerate(requests[1:], 1):
        futures.append(threads.submit(merger.evaluate, *item))
        wait_for(lambda count=count: waiting(merger) == count)  # type: ignore[misc]
    gate.open.set()
    assert not wait(futures, PATIENCE_S).not_done
    return futures


def test_requests_that_wait_together_are_one_run_and_each_gets_its_rows() -> None:
    gate = Gate()
    merger = Merger(gate, 1)
    requests = [(3, request(number, samples)) for number, samples in enumerate([1, 2, 1, 5, 3])]
    with ThreadPoolExecutor(8) as threads:
        futures = behind_a_gate(threads, merger, gate, requests)
    assert [len(residues) for _, residues in gate.runs] == [1, 11]
    for (block, residues), future in zip(requests, futures, strict=True):
        assert np.array_equal(future.result(), answer(block, residues))
    assert waiting(merger) == 0


def test_requests_for_different_blocks_are_not_mixed() -> None:
    gate = Gate()
    merger = Merger(gate, 1)
    requests = [(number % 3, request(number)) for number in range(13)]
    with ThreadPoolExecutor(16) as threads:
        futures = behind_a_gate(threads, merger, gate, requests)
    assert sorted((block, len(residues)) for block, residues in gate.runs) == [(0, 1), (0, 4), (1, 4), (2, 4)]
    for block, residues in gate.runs:
        assert all(row[0] // 1000 % 3 == block for row in residues)
    for (block, residues), future in zip(requests, futures, strict=True):
        assert np.array_equal(future.result(), answer(block, residues))


def test_error_reaches_every_request_of_the_run_and_none_besides() -> None:
    gate = Gate()
    gate.error = ValueError("broken")
    merger = Merger(gate, 1)
    requests = [(0, request(number)) for number in range(6)]
    with ThreadPoolExecutor(8) as threads:
        first, *others = behind_a_gate(threads, merger, gate, requests)
    assert np.array_equal(first.result(), answer(0, requests[0][1]))
    for future in others:
        with pytest.raises(ValueError, match="broken"):
            future.result()
    gate.error = None
    assert np.array_equal(merger.evaluate(0, request(9)), answer(0, request(9)))  # the slot was given back


def test_requests_above_the_size_limit_do_not_share_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MOST_RESIDUES", 12)
    gate = Gate()
    merger = Merger(gate, 1)
    sizes = [1, 2, 2, 2, 7, 1]  # rows of three residues; 7 rows alone are above the limit
    requests = [(0, request(number, samples)) for number, samples in enumerate(sizes)]
    with ThreadPoolExecutor(8) as threads:
        futures = behind_a_gate(threads, merger, gate, requests)
    assert sum(len(residues) for _, residues in gate.runs) == sum(sizes)
    for _, residues in gate.runs:
        assert residues.size <= 12 or len(residues) == 7
    assert len(gate.runs) < len(sizes)  # those that fit were merged
    for (block, residues), future in zip(requests, futures, strict=True):
        assert np.array_equal(future.result(), answer(block, residues))


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_nobody_waits_for_ever_and_every_row_is_evaluated_once(slots: int) -> None:
    """Sixteen threads, 640 requests, some of which fail."""
    lock = threading.Lock()
    seen: list[int] = []
    running = most = 0

    def run(block: int, residues: np.ndarray) -> np.ndarray:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            seen.extend(residues[:, 0])
        try:
            threading.Event().wait(0.0005)
            if block == 3:
                raise ArithmeticError("block 3")
            return answer(block, residues)
        finally:
            with lock:
                running -= 1

    merger = Merger(run, slots)

    def ask(number: int) -> bool:
        block, residues = number % 4, request(number)
        try:
            return np.array_equal(merger.evaluate(block, residues), answer(block, residues))
        except ArithmeticError:
            return block == 3

    threads = ThreadPoolExecutor(16)
    futures = [threads.submit(ask, number) for number in range(640)]
    done, late = wait(futures, PATIENCE_S)
    assert not late
    threads.shutdown()
    assert all(future.result() for future in done)
    assert sorted(seen) == [1000 * number for number in range(640)]
    assert most <= slots
    assert waiting(merger) == 0


def test_request_that_was_taken_along_is_done_when_it_is_answered_though_no_slot_is_free() -> None:
    """Block 0 runs; 0, 0 and 1 wait. The first slot answers both zeros, then runs block 1, for which nobody waits."""
    gate, last = Gate(), threading.Event()

    def run(block: int, residues: np.ndarray) -> np.ndarray:
        if block == 1:
            assert last.wait(PATIENCE_S)
            return answer(block, residues)
        return gate(block, residues)

    merger = Merger(run, 1)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(merger.evaluate, 0, request(1))
        assert gate.entered.wait(PATIENCE_S)
        others = [threads.submit(merger.evaluate, 0, request(2))]
        wait_for(lambda: waiting(merger) == 1)
        blocked = threads.submit(merger.evaluate, 1, request(3))
        wait_for(lambda: waiting(merger) == 2)
        others.append(threads.submit(merger.evaluate, 0, request(4)))
        wait_for(lambda: waiting(merger) == 3)
        gate.open.set()
        assert not wait([first, *others], PATIENCE_S).not_done
        assert not blocked.done()
        last.set()
        assert np.array_equal(blocked.result(PATIENCE_S), answer(1, request(3)))


def test_slot_goes_to_who_has_waited_longest() -> None:
    gate = Gate()
    merger = Merger(gate, 1)
    requests = [(0, request(0)), (2, request(1)), (1, request(2)), (3, request(3)), (1, request(4))]
    with ThreadPoolExecutor(8) as threads:
        behind_a_gate(threads, merger, gate, requests)
    assert [block for block, _ in gate.runs] == [0, 2, 1, 3]
