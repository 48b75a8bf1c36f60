"""All three roles on this machine, as separate processes on loopback: for trials, demos and evaluation.

The server gets only bundle/server, the node only bundle/node. Both end when this process ends, however it ends: they
watch a pipe that we hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from heinfer.client.remote import RemoteModel
from heinfer.errors import RemoteProtocolError
from heinfer.plan import read_bundle_plan
from heinfer.plan.signing import read_trusted_keys
from heinfer.processes import child_environment

START_S = 300.0
STOP_S = 10.0


class Role:
    """One of our processes: `heinfer serve` or `heinfer node`, on a port that the system chose."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self._last_words = ""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "heinfer.cli.main", *arguments, "--listen", "127.0.0.1:0", "--with-parent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment(),
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self) -> str:
        """Return the address that the process listens on.

        Raises:
            RemoteProtocolError: it ended, with its own words.
        """
        assert self._process.stdout is not None  # we asked for a pipe
        timer = threading.Timer(START_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            return str(json.loads(line)["listening"])
        except (ValueError, KeyError, TypeError):
            self.stop()
            raise RemoteProtocolError(f"the {self.name} did not start: {self.last_words()}") from None

    def last_words(self) -> str:
        """Return the end of what the process wrote to standard error."""
        if not self._errors.closed:
            self._errors.seek(0)
            self._last_words = self._errors.read().decode(errors="replace").strip()[-2000:]
        return self._last_words or "it said nothing"

    def stop(self) -> None:
        """End the process and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.last_words()
        self._errors.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def peak_memory_bytes(self) -> int | None:
        """Return the largest resident memory of the process and its children together, None where unknown."""
        return peak_memory_bytes(self.pid)


class LocalModel(RemoteModel):
    """A model whose node and server are processes of ours.

    Attributes:
        roles: the processes, server first.
        start_s: seconds until both were ready.
    """

    def __init__(self, address: str, roles: tuple[Role, Role], start_s: float) -> None:
        super().__init__(address)
        self.roles = roles
        self.start_s = start_s


@contextmanager
def local(
    bundle: str | Path,
    *,
    allow_trace: bool = False,
    mode: str = "auto",
    prepared: int | None = None,
    trusted_keys: Sequence[str | Path] = (),
    calibrated: bool = True,
) -> Iterator[LocalModel]:
    """Start an untrusted server and a trusted node on this machine, and connect to the node.

    Args:
        bundle: folder written by `partition`.
        allow_trace: let the node return values inside the model.
        mode: "auto", "standard" or "prepared".
        prepared: queries that the node keeps prepared; None: 16, or as many as 2 GiB hold.
        trusted_keys: files of public keys, one of which must have signed the bundle; none: no signature is asked for.
        calibrated: whether the node calibrates outputs of deep blocks.

    Raises:
        PlanError: the bundle is incomplete, or not signed by anybody trusted.
        RemoteProtocolError: a process did not start.
    """
    folder = Path(bundle)
    paths = [Path(path) for path in trusted_keys]
    read_bundle_plan(folder, read_trusted_keys(paths))
    trusted = [word for path in paths for word in ("--trusted-key", str(path))]
    started = time.perf_counter()
    server = Role("server", ["serve", str(folder / "server"), *trusted])
    node: Role | None = None
    try:
        address = server.wait_ready()
        options = [*trusted, "--mode", mode, *(["--allow-trace"] if allow_trace else [])]
        options += [] if calibrated else ["--no-calibration"]
        if prepared is not None:
            options += ["--prepared", str(prepared)]
        node = Role("node", ["node", str(folder / "node"), "--server", address, *options])
        with LocalModel(node.wait_ready(), (server, node), 0.0) as model:
            model.start_s = time.perf_counter() - started
            yield model
    finally:
        for role in (node, server):
            if role is not None:
                role.stop()


def peak_memory_bytes(pid: int) -> int | None:
    """Return the sum of peak resident memory over a process and its children, None where the system does not tell."""
    try:
        children = [c for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]
        own = read_memory(pid, "VmHWM")
    except OSError:
        return None
    return own + sum(peak_memory_bytes(int(child)) or 0 for child in children)


def read_memory(pid: int, field: str) -> int:
    """Return a field of a process's status (proc(5): VmHWM, RssAnon) in bytes, 0 where it has none.

    Raises:
        OSError: there is no such process, or the system does not tell.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
