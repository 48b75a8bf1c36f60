"""Many clients of a node in one process, which is none of the node's: what they ask, and what became of each query.

    Driver(Load("http", "127.0.0.1:8000", ...)).ends()     # serving_runs.py starts `main` in a process of its own

    closed loop     `clients` at a time, each asks again when it has its answer, `queries` times
    open loop       `rate` queries a second for `seconds`, by Poisson, whatever becomes of the earlier ones

Every query has a number, and a line in the result: when it was due, when it ended, how, and the answer. A query of an
open loop is due when it would have been sent by somebody who does not wait, so time that it waits for us counts.
Nothing is asked twice.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from load_channels import CUT, IMPATIENT, UNSENT, Client, Load, Questions, client_maker

from heinfer.processes import prepare_environment


@dataclass(frozen=True, slots=True)
class Ends:
    """What became of the queries, in the order of their numbers.

    Attributes:
        kind: "ok", a refusal's code, or one of `LOST` and `UNSENT`.
        due: moment (CLOCK_MONOTONIC) when it was or should have been sent.
        ended: when its answer, refusal or failure was there.
        answers: shape (queries, batch, outputs); NaN where there is none.
    """

    kind: np.ndarray
    due: np.ndarray
    ended: np.ndarray
    answers: np.ndarray

    def save(self, path: Path) -> None:
        """Write them."""
        np.savez(path, **{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Ends:
        """Read them."""
        with np.load(path) as archive:
            return cls(**{f.name: archive[f.name] for f in fields(cls)})


class Run:
    """Asks, and notes what became of each query."""

    def __init__(self, load: Load, questions: Questions, make: Callable[[], Any], stack: AsyncExitStack) -> None:
        self._load = load
        self._questions = questions
        self._make = make
        self._stack = stack
        self._ends: dict[int, tuple[str, float, float, np.ndarray | None]] = {}

    async def closed(self) -> None:
        """A closed loop."""
        load = self._load
        clients = [self._client() for _ in range(load.clients)]

        async def ask_all(index: int) -> None:
            for n in range(load.queries):
                await self._ask(clients[index], index * load.queries + n, time.monotonic())

        await asyncio.gather(*(ask_all(index) for index in range(load.clients)))

    async def open(self) -> None:
        """An open loop."""
        load, rng = self._load, np.random.default_rng(self._load.seed)
        idle: list[Client] = []
        made = 0
        tasks: set[asyncio.Task[None]] = set()
        begun = time.monotonic()
        due = begun + rng.exponential(1 / load.rate)
        number = 0

        async def ask(client: Client, number: int, due: float) -> None:
            await self._ask(client, number, due)
            idle.append(client)

        while due < begun + load.seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not idle and made < load.clients:
                idle.append(self._client())
                made += 1
            if idle:
                task = asyncio.create_task(ask(idle.pop(), number, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            else:
                self._ends[number] = (UNSENT, due, time.monotonic(), None)
            number += 1
            due += rng.exponential(1 / load.rate)
        while tasks:
            await asyncio.wait(tasks)

    def _client(self) -> Any:
        client = self._make()
        self._stack.push_async_callback(client.close)
        return client

    async def _ask(self, client: Client, number: int, due: float) -> None:
        assert number not in self._ends, "a query has one end"
        try:
            kind, answer = await asyncio.wait_for(client.ask(number), self._load.patience_s)
        except TimeoutError:
            kind, answer = IMPATIENT, None
        except (OSError, asyncio.IncompleteReadError):
            kind, answer = CUT, None
        self._ends[number] = (kind, due, time.monotonic(), answer)

    def ends(self) -> Ends:
        """Return what became of all of them."""
        ordered = [self._ends[number] for number in sorted(self._ends)]
        batch = self._load.batch
        width = next((a.size // batch for _, _, _, a in ordered if a is not None), 1)
        answers = np.full((len(ordered), batch, width), np.nan, np.float32)
        for row, (_, _, _, answer) in zip(answers, ordered, strict=True):
            if answer is not None:
                row[:] = answer.reshape(row.shape)
        kinds, due, ended, _ = zip(*ordered, strict=True)
        return Ends(np.array(kinds), np.array(due), np.array(ended), answers)


async def run(load: Load) -> Ends:
    """Make the load; returns what became of it."""
    questions = Questions(load)
    with ThreadPoolExecutor(max(1, load.clients)) as threads:
        async with AsyncExitStack() as stack:
            made = Run(load, questions, client_maker(load, questions, threads), stack)
            loop: Awaitable[None] = made.closed() if load.queries else made.open()
            await loop
        return made.ends()


def write_load(load: Load, path: Path) -> None:
    """Write what to ask for a process of its own."""
    path.write_text(json.dumps(asdict(load)))


def main() -> None:
    """Read what to ask, ask, and write what became of it."""
    prepare_environment()
    what, result = map(Path, sys.argv[1:])
    asyncio.run(run(Load(**json.loads(what.read_text())))).save(result)
