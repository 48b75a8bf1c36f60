"""Processes that run the units of deep blocks, since SEAL's binding holds Python's lock. They stay between requests.

    request:  job (block, weights, place of its keys) to every worker --> units to whoever is idle --> all of it dropped
    next one: the same processes within KEEP_S seconds, new ones later, or where one has died

One request runs at a time; the next one waits for its turn. A worker lets go of all that a request brought when it is
dropped: job, keys, weights, and the ciphertext that was last in its file in memory. It keeps SEAL set up for the chain
it saw last, which is public. What has been freed is not overwritten: ciphertexts and keys for relinearisation, which a
server may see, may be in the process's memory until something else is. Workers get no keys but those in the request's
folder.

While it waits, for its turn or for a worker, a request looks whether anybody wants its answer still.

Workers end when their parent does, however it does: they are daemons to Python, and watch it themselves.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Final, Protocol

from heinfer.errors import CiphertextError, HeinferError, RemoteProtocolError
from heinfer.processes import core_count
from heinfer.server.polynomial.files import Store
from heinfer.server.polynomial.units import Unit
from heinfer.server.polynomial.worker import Desk, Job, Message, Reply, Task, work

if TYPE_CHECKING:
    from heinfer.server.polynomial.running import DeepRunner

logger = logging.getLogger(__name__)
#: Seconds that processes stay when there is nothing to do.
KEEP_S: Final = 300.0
#: Bytes of what the products of all workers read at a time.
READ_BYTES: Final = 256 * 2**20
#: Seconds between two looks whether anybody waits for an answer.
_LOOK_S: Final = 0.5
#: Seconds that a process which was killed has to be gone.
_END_S: Final = 10.0

#: Whether nobody waits for an answer any more.
Gone = Callable[[], bool]


class RunUnits(Protocol):
    """Runs units of a request."""

    def __call__(self, units: Sequence[Unit], sources: Sequence[Store], target: Store) -> None:
        """Run units that read the same values and write to one store; they may run in any order."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection


class _DiedError(HeinferError):
    """A worker is gone."""


class DeepProcesses:
    """Workers for the requests of a server; safe to use from several threads.

    Args:
        workers: processes; the cores of this process where None; 0: units run on the calling thread.
        keep_s: seconds that they stay when there is nothing to do.
    """

    def __init__(self, workers: int | None = None, keep_s: float = KEEP_S) -> None:
        self.count = core_count() if workers is None else workers
        self._keep_s = keep_s
        self._turn = threading.Lock()
        self._changing = threading.Lock()  # of what follows; never held for long
        self._workers: list[_Worker] = []
        self._stopped = False
        self._timer: threading.Timer | None = None

    @contextmanager
    def request(self, job: Job, gone: Gone) -> Iterator[RunUnits]:
        """Wait for our turn, and lend the workers to a request.

        Raises:
            CiphertextError: its keys or ciphertexts are none of its chain.
            RemoteProtocolError: nobody waits for its answer any more.
            HeinferError: it was stopped, or a worker died; the next request gets new ones.
        """
        with self._our_turn(gone):
            if not self.count:
                with Desk(READ_BYTES) as desk:
                    yield _OnThisThread(self, desk.open(job), gone)
                return
            try:
                self._begin(job, gone)
                yield _OnWorkers(self, gone)
            except (CiphertextError, OSError):  # what came is wrong, or the disk is full: workers are as they were
                self._forget()
                raise
            except _DiedError:
                self._end_workers()
                self.check(gone)  # it was stopped, perhaps
                raise
            except BaseException:
                self._end_workers()
                raise
            self._forget()

    def check(self, gone: Gone) -> None:
        """Raise where the request that runs should not go on."""
        if self._stopped:
            raise HeinferError("the evaluation of deep blocks was stopped")
        if gone():
            raise RemoteProtocolError("the node went away while its deep block was evaluated")

    def stop(self) -> None:
        """End what runs, which raises then, and refuse further requests; from any thread."""
        with self._changing:
            self._stopped = True
            for worker in self._workers:
                worker.process.kill()  # which wakes who waits for it
        if self._turn.acquire(blocking=False):
            try:
                self._end_workers()
            finally:
                self._turn.release()

    @property
    def workers(self) -> Sequence[_Worker]:
        """Those that run."""
        return tuple(self._workers)

    def _tell_all(self, message: Job | None, gone: Gone) -> None:
        """Say something to every worker, and wait until they have done it."""
        for worker in self._workers:
            _send(worker, message)
        waiting = {worker.pipe: worker for worker in self._workers}
        failed: Exception | None = None
        while waiting:
            for pipe in self.await_replies(list(waiting), gone):
                failed = _receive(waiting.pop(pipe)) or failed
        if failed is not None:
            raise failed

    def await_replies(self, pipes: Sequence[Connection], gone: Gone) -> Sequence[Connection]:
        """Return those of the pipes that have something to say, after a while none."""
        ready = wait(pipes, _LOOK_S)
        self.check(gone)
        return [pipe for pipe in pipes if pipe in ready]

    @contextmanager
    def _our_turn(self, gone: Gone) -> Iterator[None]:
        self.check(gone)
        while not self._turn.acquire(timeout=_LOOK_S):
            self.check(gone)
        try:
            self.check(gone)
            yield
        finally:
            self._turn.release()

    def _begin(self, job: Job, gone: Gone) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._workers:
            try:
                self._tell_all(job, gone)
                return
            except _DiedError:  # since the last request, which is no fault of this one
                self._end_workers()
        self._start()
        self._tell_all(job, gone)

    def _start(self) -> None:
        context = get_context("spawn")
        for _ in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, READ_BYTES // self.count), daemon=True)
            with theirs, self._changing:
                try:
                    if self._stopped:
                        raise _DiedError("stopped before it started")
                    process.start()
                except OSError as error:
                    ours.close()
                    raise _DiedError("a process that evaluates a deep block can't be started") from error
                except _DiedError:
                    ours.close()
                    raise
                self._workers.append(_Worker(process, ours))

    def _forget(self) -> None:
        """Let workers drop the request, and keep them for a while."""
        try:
            self._tell_all(None, lambda: False)
        except HeinferError:
            self._end_workers()
            return
        self._timer = threading.Timer(self._keep_s, self._end_idle)
        self._timer.daemon = True
        self._timer.start()

    def _end_idle(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self._end_workers()
            finally:
                self._turn.release()

    def _end_workers(self) -> None:
        """End the workers; only for who has the turn."""
        if self._timer is not None:
            self._timer.cancel()
        with self._changing:
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.join(_END_S)
                worker.pipe.close()


@dataclass(frozen=True, slots=True)
class _OnThisThread:
    """Runs units where there are no workers."""

    processes: DeepProcesses
    runner: DeepRunner
    gone: Gone

    def __call__(self, units: Sequence[Unit], sources: Sequence[Store], target: Store) -> None:
        for unit in units:
            self.processes.check(self.gone)
            self.runner.run(unit, sources, target)


@dataclass(frozen=True, slots=True)
class _OnWorkers:
    """Gives units to workers, one at a time each."""

    processes: DeepProcesses
    gone: Gone

    def __call__(self, units: Sequence[Unit], sources: Sequence[Store], target: Store) -> None:
        left, idle = deque(units), list(self.processes.workers)
        busy: dict[Connection, _Worker] = {}
        failed: Exception | None = None
        while busy or (left and failed is None):
            while left and idle and failed is None:
                worker = idle.pop()
                _send(worker, Task(left.popleft(), sources, target))
                busy[worker.pipe] = worker
            for pipe in self.processes.await_replies(list(busy), self.gone):
                worker = busy.pop(pipe)
                failed = _receive(worker) or failed
                idle.append(worker)
        if failed is not None:
            raise failed


def _send(worker: _Worker, message: Message) -> None:
    try:
        worker.pipe.send(message)
    except OSError:
        raise _DiedError("a process that evaluates a deep block died") from None


def _receive(worker: _Worker) -> Exception | None:
    """Return what went wrong, if anything did."""
    try:
        reply: Reply = worker.pipe.recv()
    except (EOFError, OSError):
        raise _DiedError("a process that evaluates a deep block died") from None
    if isinstance(reply, str):
        logger.warning("a unit of a deep block failed: %s", reply)
        return HeinferError(f"a unit of a deep block failed: {reply}")
    return reply
