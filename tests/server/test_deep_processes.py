"""Processes that evaluate deep blocks: kept between requests, made anew where one died, gone with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import CiphertextError, HeinferError, RemoteProtocolError
from heinfer.processes import child_environment
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.server.polynomial.files import Store
from heinfer.server.polynomial.processes import DeepProcesses
from heinfer.server.polynomial.resources import DeepResources
from heinfer.server.polynomial.units import Unit
from heinfer.server.polynomial.worker import Desk, Job, Task
from tests.parties import REPOSITORY
from tests.server.test_polynomial import SCALE, make_block, new_secret
from tests.waiting import wait_for

#: Seconds in which a process that is told to must end, on a busy machine.
END_S = 10.0
#: A unit of a layer that is none.
NOTHING = Task(Unit(99, ()), [], Store(Path("none"), (1, 1, 1, 1)))


class Query:
    """Keys and inputs of a small block."""

    def __init__(self) -> None:
        self.block, self.arrays = make_block("square", 2)
        secret = new_secret(self.block)
        x = np.random.default_rng(3).uniform(-1, 1, (20, 5))
        self.inputs, self.keys = secret.encrypt(x, SCALE), secret.make_keys()

    def job(self, folder: Path, keys: np.ndarray | None = None) -> Job:
        held = self.keys if keys is None else keys
        store = Store(folder / f"keys-{time.monotonic_ns()}", held.shape)
        store.create()[...] = held
        return Job(self.block, self.arrays, store)


@pytest.fixture(scope="module")
def query() -> Query:
    return Query()


@pytest.fixture
def resources(tmp_path: Path) -> Iterator[DeepResources]:
    made = DeepResources(tmp_path, workers=1)
    yield made
    made.stop()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def worker(resources: DeepResources) -> int:
    (only,) = resources.processes.workers
    assert only.process.pid is not None
    return only.process.pid


def test_a_worker_stays_and_one_that_died_is_replaced(query: Query, resources: DeepResources, tmp_path: Path) -> None:
    evaluator = DeepEvaluator(query.block, query.arrays, resources)
    first = evaluator.evaluate(query.inputs, query.keys)
    kept = worker(resources)
    with pytest.raises(CiphertextError, match="relinearisation keys"):  # the fault of who asked
        evaluator.evaluate(query.inputs, query.keys[:-1])
    assert np.array_equal(evaluator.evaluate(query.inputs, query.keys), first)
    assert worker(resources) == kept

    os.kill(kept, signal.SIGKILL)  # between requests: no request fails
    assert np.array_equal(evaluator.evaluate(query.inputs, query.keys), first)
    assert worker(resources) != kept

    def die() -> None:
        with resources.processes.request(query.job(tmp_path), lambda: False) as run:
            os.kill(worker(resources), signal.SIGKILL)
            run([NOTHING.unit], NOTHING.sources, NOTHING.target)

    with pytest.raises(HeinferError, match="died"):  # in the middle: that one fails
        die()
    assert not resources.processes.workers


def test_workers_end_when_there_is_nothing_to_do_for_a_while(query: Query, tmp_path: Path) -> None:
    processes = DeepProcesses(1, keep_s=2.0)
    with processes.request(query.job(tmp_path), lambda: False):
        (only,) = processes.workers
        pid = only.process.pid
        assert pid is not None
    assert alive(pid)
    wait_for(lambda: not alive(pid), within_s=END_S)
    assert not processes.workers
    processes.stop()
    with pytest.raises(HeinferError, match="stopped"), processes.request(query.job(tmp_path), lambda: False):
        pass


def test_a_worker_ends_when_its_request_is_given_up(query: Query, tmp_path: Path) -> None:
    processes, left = DeepProcesses(1), threading.Event()
    pids: list[int | None] = []

    def leave() -> None:
        with processes.request(query.job(tmp_path), left.is_set) as run:
            pids.extend(worker.process.pid for worker in processes.workers)
            left.set()
            run([NOTHING.unit], NOTHING.sources, NOTHING.target)

    with pytest.raises(RemoteProtocolError, match="went away"):
        leave()
    assert pids[0] is not None
    assert not alive(pids[0])


def test_who_waits_for_its_turn_goes_when_its_node_does(query: Query, tmp_path: Path) -> None:
    processes = DeepProcesses(0)
    left = threading.Event()
    raised: list[BaseException] = []

    def second() -> None:
        try:
            with processes.request(query.job(tmp_path), left.is_set):
                pass
        except RemoteProtocolError as error:
            raised.append(error)

    with processes.request(query.job(tmp_path), lambda: False):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        left.set()
        thread.join(END_S)
    assert len(raised) == 1


def test_a_worker_keeps_nothing_of_a_request(query: Query, tmp_path: Path) -> None:
    with Desk(2**20) as desk:
        assert desk.answer(query.job(tmp_path)) is None
        runner = weakref.ref(desk._runner)  # keys and weights are its attributes
        assert runner() is not None
        assert desk._chain is not None
        degree, primes = query.block.chain.degree, len(query.block.chain.primes)
        desk._chain.dump(desk._chain.load(np.ones((2, primes, degree), np.int64), SCALE))  # as units do
        assert desk._chain._file.read()
        assert desk.answer(None) is None
        assert runner() is None
        assert not desk._chain._file.read()
        assert desk.answer(NOTHING) == "a task without a job"
        assert isinstance(desk.answer(query.job(tmp_path, query.keys[:-1])), CiphertextError)
        assert desk.answer(NOTHING) == "a task without a job"  # nothing of the last good one either
        assert desk.answer(query.job(tmp_path)) is None
        assert desk.answer(NOTHING) == "IndexError"  # the kind alone


PARENT = """
import sys, threading
from multiprocessing import get_context
from heinfer.server.polynomial.worker import work

if __name__ == "__main__":
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, 2**20), daemon=True)
    process.start()
    ours.send(None)
    ours.recv()
    print(process.pid, flush=True)
    threading.Event().wait()
"""


def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**child_environment(), "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        wait_for(lambda: not alive(pid), within_s=END_S)
