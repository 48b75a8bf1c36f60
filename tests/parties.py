"""Both parties, for tests: in this process over real sockets and watched, or as processes of the command line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heinfer.cli.main import main
from heinfer.plan import ServerBundle, load_node, load_server
from heinfer.processes import child_environment
from heinfer.ring import RingParameters
from heinfer.server.evaluation import BlockEvaluator
from heinfer.server.service import EvaluatorService
from heinfer.wire import Address, Limits, block_shapes
from trusted_node.deep_workers import DeepPool
from trusted_node.engine import Engine, QueryResult
from trusted_node.link import ServerLink
from trusted_node.modes import ModeChoice
from trusted_node.pool import PreparedPool
from trusted_node.preparation import Preparer
from trusted_node.service import NodeService
from trusted_node.serving.interface import Channel, ModelEntry, ModelState, ModelStatus, Query, UnknownModelError
from trusted_node.serving.scheduling import MAX_SAMPLES, QueueLimits, Scheduler
from trusted_node.workers import CryptoPool, Encrypted

REPOSITORY = Path(__file__).resolve().parent.parent
LOOPBACK = Address("127.0.0.1", 0)
#: A server that is gone is given up soon.
IMPATIENT = Limits(retry_s=0.3)
COMMAND = (sys.executable, "-m", "heinfer.cli.main")
NODE_READY_S = 60.0


class WatchedEvaluator(BlockEvaluator):
    """Notes (block, columns) of every request; `fail` makes the next ones raise."""

    def __init__(self, bundle: ServerBundle) -> None:
        super().__init__(bundle)
        self.requests: list[tuple[int, int]] = []
        self.fail = False

    def evaluate(self, block: int, residues: np.ndarray) -> np.ndarray:
        self.requests.append((block, residues.shape[1]))
        if self.fail:
            raise RuntimeError("asked to fail")
        return super().evaluate(block, residues)


class WatchedPool(CryptoPool):
    """Keeps what a node must not give away: secrets (the live objects and copies of them) and scales."""

    def __init__(self, parameters: RingParameters, workers: int | None = None) -> None:
        super().__init__(parameters, workers)
        self.forget()

    def forget(self) -> None:
        self.live: list[bytearray] = []
        self.secrets: list[bytes] = []
        self.scales: list[np.ndarray] = []

    def generate_secret(self) -> bytearray:
        secret = super().generate_secret()
        self.live.append(secret)
        self.secrets.append(bytes(secret))
        return secret

    def encrypt(
        self, secret: bytes, values: np.ndarray, scale: np.ndarray, weights: np.ndarray | None = None
    ) -> Future[Encrypted]:
        self.scales.append(scale.copy())
        return super().encrypt(secret, values, scale, weights)


class OnlyModel:
    """A model as a node serves it, and all the models of one, for an engine that the test has made."""

    card = None
    max_samples = MAX_SAMPLES
    ready = True

    def __init__(self, engine: Engine, limits: QueueLimits | None = None) -> None:
        self.name, self.plan = engine.bundle.plan.model.name, engine.bundle.plan
        self.plan_hash = engine.bundle.plan_hash
        self.scheduler = Scheduler(engine, limits=limits)

    def submit(self, query: Query) -> Future[QueryResult]:
        return self.scheduler.submit(query)

    def check_queue(self, channel: Channel, request_id: str) -> None:
        self.scheduler.check_queue(channel, request_id)

    def status(self) -> ModelStatus:
        load = self.scheduler.load()
        return ModelStatus(load.queued_queries, load.queued_samples, load.running_queries, 0, 0, (), (), None)

    def get(self, name: str, version: str = "") -> OnlyModel:
        if name != self.name:
            raise UnknownModelError(f"no model {name!r}")
        return self

    def entries(self) -> Sequence[ModelEntry]:
        return [ModelEntry(self.name, "1", ModelState.READY)]

    def load(self, name: str) -> None:
        raise NotImplementedError

    def unload(self, name: str) -> None:
        raise NotImplementedError


@contextmanager
def serving(engine: Engine, limits: Limits, allow_trace: bool = True, **options: Any) -> Iterator[NodeService]:
    """Serve an engine's model to clients, by frames."""
    model = OnlyModel(engine)
    node = NodeService(model, model.name, LOOPBACK, limits, allow_trace, **options)
    try:
        yield node
    finally:
        node.stop(0)
        model.scheduler.close(0)


@dataclass
class Parties:
    """Server and node in this process, with a real connection between them."""

    evaluator: WatchedEvaluator
    server: EvaluatorService
    engine: Engine
    node: NodeService
    pool: WatchedPool


@contextmanager
def parties(
    bundle: Path,
    pool: WatchedPool,
    through: Any = None,
    mode: ModeChoice = ModeChoice.STANDARD,
    ready: int = 0,
    limits: Limits = IMPATIENT,
    deep: DeepPool | None = None,
) -> Iterator[Parties]:
    """Start both; `through(address)` may put something between them and return its address."""
    pool.forget()
    evaluator = WatchedEvaluator(load_server(bundle / "server"))
    server = EvaluatorService(evaluator, LOOPBACK, limits)
    address = server.address if through is None else through(server.address)
    node_bundle = load_node(bundle / "node")
    link = ServerLink(address, node_bundle.plan_hash, block_shapes(node_bundle.plan), limits)
    prepared = None if mode is ModeChoice.STANDARD else PreparedPool(Preparer(node_bundle), ready)
    engine = Engine(node_bundle, link, pool, limits, prepared, mode, deep=deep)
    try:
        with serving(engine, limits) as node:
            yield Parties(evaluator, server, engine, node, pool)
    finally:
        engine.close()
        if prepared is not None:
            prepared.close()
        link.close()
        server.stop(0)


@dataclass
class Process:
    """A party started from the command line."""

    process: subprocess.Popen[bytes]
    errors: Path
    address: str = field(default="")
    addresses: dict[str, str] = field(default_factory=dict)

    def said(self) -> str:
        """What it wrote to standard error."""
        return self.errors.read_text(errors="replace")


@contextmanager
def start(errors: Path, *arguments: str, command: Sequence[str] = COMMAND) -> Iterator[Process]:
    """Run `heinfer [options] serve|node ...` until the block ends; it has said where it listens."""
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            [*command, *arguments, "--with-parent"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, env=child_environment(), cwd=REPOSITORY,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(NODE_READY_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        timer.cancel()
        assert line, f"it did not start: {errors.read_text()}"
        addresses = json.loads(line)
        yield Process(process, errors, addresses["listening"], addresses)
    finally:
        timer.cancel()
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


def command(*arguments: object, timeout_s: float = 120) -> Outcome:
    """Run `heinfer ...` to its end."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, cwd=REPOSITORY,
        env={**child_environment(), "COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


def inside(*arguments: object) -> Outcome:
    """Run `heinfer ...` to its end in this process, which spares the seconds that starting one takes."""
    out, err, code = StringIO(), StringIO(), 0
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["heinfer", *map(str, arguments)])
        patch.setenv("COLUMNS", "200")
        patch.setenv("NO_COLOR", "1")
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
    return Outcome(code, out.getvalue(), err.getvalue())


def output_of(*arguments: object) -> str:
    """Run, in this process, a command that must succeed; return what it prints."""
    done = inside(*arguments)
    assert done.code == 0, done
    return done.out


def refusal(*arguments: object) -> str:
    """Run, in this process, a command that must be refused; return its one line of reason."""
    return refused(inside(*arguments))


def refused(done: Outcome) -> str:
    """Return the one line of reason of a command that must have been refused.

    The line is on standard error, there is nothing else and no traceback, and the exit code is 1.
    """
    assert done.code == 1, done
    assert "Traceback" not in done.err + done.out, done
    lines = done.err.strip().splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("heinfer: "), lines
    return lines[0]
