"""Server and node as processes, loads as processes beside them, and what became of queries: what a measurement needs.

    case = Case.of(bundle, samples)
    with serving(bundle) as running:
        found, ends = drive(case, case.load(running, "http", clients=100, queries=20))
        found.wrong, found.lost, found.rate

An answer is wrong when an output is further from the plain model's than the end-to-end estimate of the error says (six
deviations of simulated errors); one of another client's query would be a thousand times as far away.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from load_channels import LOST, OK, UNSENT, Load
from load_clients import Ends, write_load

import heinfer
from heinfer.client.evaluation import run_reference
from heinfer.client.local import Role
from heinfer.plan import load_reference, read_bundle_plan
from heinfer.processes import child_environment

LOAD_S = 1200.0


# What is asked, and what is right


@dataclass(frozen=True, slots=True)
class Case:
    """A model with samples.

    Attributes:
        bundle: its bundle.
        samples: file of an array "x".
        expected: plain outputs, shape (samples, outputs).
        tolerance: how far an encrypted output may be from the plain one.
    """

    bundle: Path
    samples: Path
    expected: np.ndarray
    tolerance: float

    @classmethod
    def of(cls, bundle: Path, samples: Path) -> Case:
        """Evaluate samples in the clear, and estimate the error that encryption adds."""
        with np.load(samples) as archive:
            x = archive["x"]
        plan = read_bundle_plan(bundle)
        plain = run_reference(load_reference(bundle, plan).model, x, lambda done: None)
        estimate = heinfer.evaluate(bundle, x[:256], simulate=True).error_estimate
        return cls(bundle, samples, plain.reshape(len(x), -1), estimate)

    def load(self, serving: Serving, channel: str, **settings: Any) -> Load:
        """Return a load of this case's queries."""
        plan = read_bundle_plan(self.bundle)
        address = serving.addresses[channel.removeprefix("tritonclient-")]
        names = (plan.model.name, plan.inputs[0].name, plan.outputs[0].name)
        return Load(channel, address, *names, str(self.samples.resolve()), **settings)


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of a load's queries.

    Attributes:
        asked: queries that were to be asked.
        answered: that were answered.
        wrong: answers that were further from the plain model's than the tolerance.
        lost: that had no end, more than one, or one that was neither an answer nor a refusal.
        refused: by kind.
        unsent: that found no free connection of the load's.
        worst: largest difference of an output from the plain model's.
        seconds: from the first query to the last answer.
    """

    asked: int
    answered: int
    wrong: int
    lost: int
    refused: dict[str, int]
    unsent: int
    worst: float
    seconds: float

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.answered / self.seconds


def tally(case: Case, load: Load, ends: Ends) -> Tally:
    """Count, and compare every answer."""
    kinds = Counter(ends.kind.tolist())
    asked = load.clients * load.queries or len(ends.kind)
    rows = (np.arange(len(ends.kind))[:, None] * load.batch + np.arange(load.batch)) % len(case.expected)
    good = ends.kind == OK
    errors = np.abs(ends.answers[good] - case.expected[rows[good]]).max(axis=(1, 2)) if good.any() else np.zeros(1)
    return Tally(
        asked=asked,
        answered=int(good.sum()),
        wrong=int((~(errors <= case.tolerance)).sum()),  # NaN is wrong
        lost=asked - len(ends.kind) + sum(kinds[kind] for kind in LOST),
        refused={kind: count for kind, count in sorted(kinds.items()) if kind not in (OK, UNSENT, *LOST)},
        unsent=kinds[UNSENT],
        worst=float(errors.max()),
        seconds=float(ends.ended.max() - ends.due.min()),
    )


# Processes


@dataclass(frozen=True, slots=True)
class Serving:
    """Both parties, running.

    Attributes:
        addresses: by channel.
        pids: by role.
    """

    addresses: dict[str, str]
    pids: dict[str, int]


@contextmanager
def serving(bundle: Path, *options: str) -> Iterator[Serving]:
    """Start a server and a node that listens on all channels."""
    with ExitStack() as stack:
        server = Role("server", ["serve", str(bundle / "server")])
        stack.callback(server.stop)
        http, grpc = (f"127.0.0.1:{_free_port()}" for _ in range(2))
        arguments = ["node", str(bundle / "node"), "--server", server.wait_ready(), "--mode", "prepared"]
        node = Role("node", [*arguments, "--http", http, "--grpc", grpc, "--metrics", *options])
        stack.callback(node.stop)
        addresses = {"frames": node.wait_ready(), "http": http, "grpc": grpc}
        yield Serving(addresses, {"server": server.pid, "node": node.pid})


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Driver:
    """A load under way, in a process of its own."""

    def __init__(self, load: Load) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name)
        self._result, self._errors = folder / "result.npz", (folder / "errors").open("w+b")
        write_load(load, folder / "load.json")
        program = [sys.executable, "-c", "import load_clients; load_clients.main()"]
        self._process = subprocess.Popen(
            [*program, folder / "load.json", self._result],
            stderr=self._errors,
            env=child_environment(),
            cwd=Path(__file__).parent,
        )

    def ends(self) -> Ends:
        """Wait for its end.

        Raises:
            RuntimeError: it failed, with its own words.
        """
        try:
            code = self._process.wait(LOAD_S)
            if code:
                self._errors.seek(0)
                raise RuntimeError(f"the load ended with {code}: {self._errors.read().decode()[-2000:]}")
            return Ends.load(self._result)
        finally:
            self._process.kill()
            self._process.wait()
            self._errors.close()
            self._scratch.cleanup()


def drive(case: Case, load: Load) -> tuple[Tally, Ends]:
    """Make a load and wait for its end."""
    ends = Driver(load).ends()
    return tally(case, load, ends), ends


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    status = Path(f"/proc/{pid}/status").read_text()
    own = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    children = [c for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]
    return own + sum(resident_bytes(int(child)) for child in children)


def cpu_seconds(running: Serving) -> dict[str, float]:
    """CPU time until now: of each role, its children left out, and of all loads that have ended."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for role, pid in running.pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[role] = (int(fields[11]) + int(fields[12])) / tick  # utime and stime (proc_pid_stat(5))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**found, "load": ended.ru_utime + ended.ru_stime}
