"""What a worker does: one job at a time, its units one after another, until its pipe closes.

    Job --> SEAL for its chain, its keys loaded      Task --> a unit is run      None --> the job is dropped

Every message has one reply: None; a `CiphertextError`, which is its maker's fault; the kind of any other error. SEAL is
loaded in the process that runs units, so the server's own has it only where it has no workers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from heinfer.errors import CiphertextError
from heinfer.plan.deep import DeepBlock
from heinfer.server.polynomial.files import Store
from heinfer.server.polynomial.units import Unit

if TYPE_CHECKING:
    from heinfer.ring.seal_chain import SealChain
    from heinfer.server.polynomial.running import DeepRunner


@dataclass(frozen=True, slots=True)
class Job:
    """What the units of one request have in common.

    Attributes:
        block: the block.
        arrays: of its layers.
        keys: for relinearisation.
    """

    block: DeepBlock
    arrays: Mapping[str, NDArray[Any]]
    keys: Store


@dataclass(frozen=True, slots=True)
class Task:
    """A unit, the values that it reads, and where its rows go."""

    unit: Unit
    sources: Sequence[Store]
    target: Store


#: What may be said to a worker; None drops its job.
Message = Job | Task | None
#: What it replies.
Reply = CiphertextError | str | None


def work(pipe: Connection, read_bytes: int) -> None:
    """Do what a process says until it closes its end, or is gone. Ctrl-C is its business.

    Args:
        pipe: to that process.
        read_bytes: that a product may take for what it reads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Desk(read_bytes) as desk:
        while True:
            try:
                pipe.send(desk.answer(pipe.recv()))
            except (EOFError, OSError):  # of the pipe: what goes wrong with a message is its reply
                return


def _end_with_parent() -> None:
    """End at once when the parent is gone, whatever a unit is at."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class Desk:
    """The job that a worker has, if any, and SEAL set up for the chain of the last one; a context manager."""

    def __init__(self, read_bytes: int) -> None:
        self._read_bytes = read_bytes
        self._chain: SealChain | None = None
        self._runner: DeepRunner | None = None

    def __enter__(self) -> Desk:
        """Return the desk."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of everything."""
        self._runner = None
        if self._chain is not None:
            self._chain.close()

    def answer(self, message: Message) -> Reply:
        """Do what a message says."""
        try:
            match message:
                case Job():
                    self._drop()
                    self._runner = self.open(message)
                case Task() if self._runner is not None:
                    self._runner.run(message.unit, message.sources, message.target)
                case None:
                    self._drop()
                case _:
                    return "a task without a job"
        except CiphertextError as error:
            return error
        except Exception as error:  # its text may quote data
            return type(error).__name__
        return None

    def _drop(self) -> None:
        """Let go of the job, and of the ciphertext that it has moved last."""
        self._runner = None
        if self._chain is not None:
            self._chain.clear()

    def open(self, job: Job) -> DeepRunner:
        """Return what runs the units of a job.

        Raises:
            CiphertextError: its keys are none of its chain.
        """
        from heinfer.server.polynomial.arithmetic import open_chain
        from heinfer.server.polynomial.running import DeepRunner

        parameters = job.block.chain.parameters
        if self._chain is None or self._chain.parameters != parameters:
            if self._chain is not None:
                self._chain.close()
                self._chain = None
            self._chain = open_chain(parameters)
        return DeepRunner(job.block, job.arrays, job.keys.open(), self._chain, self._read_bytes)
