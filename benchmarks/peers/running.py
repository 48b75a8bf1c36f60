"""Run a peer on a model in its own environment, within limits of time and memory; there is always a result.

    python benchmarks/peers/running.py --models m.onnx ... --inputs FOLDER --out FOLDER [--peers ...] [--budget-s 60]

    run_peer(peer, m.onnx, m.npz, RESULT.json)   ->   environment's python PEER.py --model ...   ->   Result
         watches the resident memory of the process and its children, and the clock

A process that is killed for its memory gives "out of memory", one that is killed for its time "timeout", one that ends
without a result "failed" with the last line of its standard error. Memory is looked at every `POLL_S`: a limit on the
address space would be exact, but some libraries reserve far more than they use. Peers get the same cores: the first
ones that this process may use, and the variables that thread pools go by.

Needs psutil, for the process tree. Inputs of FOLDER/m.onnx's model lie in FOLDER/m.npz.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))  # these scripts are no package: peers run them by path

from environments import DEFAULT_FOLDER, is_built
from result import Result, Status, read_result, write_result

SCRIPTS = Path(__file__).resolve().parent
MEMORY_BYTES = 16 * 2**30
CORES = 2
POLL_S = 0.1

#: What thread pools of the peers' libraries go by: OpenMP, OpenBLAS, MKL, Go's runtime, Rayon.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "GOMAXPROCS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Peer:
    """What to run.

    Attributes:
        name: As in its results.
        script: Beside this file, or a path.
        environment: One of `environments.names()`; empty for heinfer's own.
        arguments: Beyond those that every script takes.
    """

    name: str
    script: str
    environment: str = ""
    arguments: tuple[str, ...] = ()

    def python(self, folder: Path) -> Path:
        """Return the interpreter."""
        return folder / self.environment / "bin/python" if self.environment else Path(sys.executable)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("onnxruntime", "clear.py"),
        Peer("tenseal-tutorial", "tenseal_tutorial.py", "tenseal"),
        Peer("tenseal-batched", "tenseal_batched.py", "tenseal"),
        Peer("concrete-hybrid", "concrete_hybrid.py", "concrete"),
        Peer("orion-v2-hybrid", "orion_v2.py", "orion_v2", ("--form", "hybrid")),
        Peer("orion-v2-square", "orion_v2.py", "orion_v2", ("--form", "square")),
        Peer("orion-hybrid", "orion_fhe.py", "orion"),
    )
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run.

    Attributes:
        budget_s: What the peer is told: it asks no further query after so many seconds.
        timeout_s: When it is killed.
        memory_bytes: Of the process and its children, resident, together.
        cores: Processors and threads.
    """

    budget_s: float = 60.0
    timeout_s: float = 600.0
    memory_bytes: int = MEMORY_BYTES
    cores: int = CORES


def run_peer(
    peer: Peer, model: Path, inputs: Path, out: Path, limits: Limits | None = None, folder: Path = DEFAULT_FOLDER
) -> Result:
    """Run one peer on one model; write its result, and return it, whatever became of the process."""
    limits = limits or Limits()
    out.unlink(missing_ok=True)
    if peer.environment and not is_built(peer.environment, folder):
        remedy = f"python benchmarks/peers/environments.py --only {peer.environment}"
        result = Result(
            peer.name,
            model.stem,
            Status.FAILED,
            reason=f"its environment is not built, or of other requirements: run `{remedy}`",
        )
    else:
        command = [str(peer.python(folder)), str(SCRIPTS / peer.script), *peer.arguments, "--model", str(model)]
        command += ["--inputs", str(inputs), "--out", str(out), "--budget-s", str(limits.budget_s)]
        result = _watched(peer, command, model.stem, out, limits)
    write_result(result, out)
    return result


def _watched(peer: Peer, command: list[str], model: str, out: Path, limits: Limits) -> Result:
    """Run a command until it ends or breaks a limit, and say which."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(limits.cores)) | {"OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment, start_new_session=True
        )
        try:
            ended, peak_bytes = _wait(process, limits)
        finally:
            _end(process)
        if ended is not None:
            return Result(peer.name, model, *ended, peak_memory_bytes=peak_bytes)
        errors.seek(0)
        return _read(peer, model, out, process.returncode, peak_bytes, errors.read())


def _wait(process: subprocess.Popen[bytes], limits: Limits) -> tuple[tuple[Status, None, str] | None, int]:
    """Return the limit that was broken, as status, version and reason, or None; and the largest memory seen."""
    deadline = time.monotonic() + limits.timeout_s
    peak_bytes = 0
    _pin(process.pid, limits.cores)
    while process.poll() is None:
        used = _resident_bytes(process.pid)
        peak_bytes = max(peak_bytes, used)
        if used > limits.memory_bytes:
            reason = f"killed at {used / 2**30:.1f} GiB of memory, the limit is {limits.memory_bytes / 2**30:.1f} GiB"
            return (Status.OUT_OF_MEMORY, None, reason), peak_bytes
        if time.monotonic() > deadline:
            return (Status.TIMEOUT, None, f"killed after {limits.timeout_s:g} s"), peak_bytes
        time.sleep(POLL_S)
    return None, peak_bytes


def _read(peer: Peer, model: str, out: Path, code: int, peak_bytes: int, errors: str) -> Result:
    """Return the result that the process wrote, or one that says how it ended without."""
    last = _telling_line(errors)
    if code == -signal.SIGKILL:  # by somebody else: this is what the kernel does when memory runs out
        reason = "killed by the system, which does so when memory runs out"
        return Result(peer.name, model, Status.OUT_OF_MEMORY, reason=reason, peak_memory_bytes=peak_bytes)
    try:
        result = read_result(out)
    except (FileNotFoundError, ValueError) as error:
        said = "no result" if isinstance(error, FileNotFoundError) else f"an unreadable result ({error})"
        reason = f"{said}, exit code {code}: {last}"
        return Result(peer.name, model, Status.FAILED, reason=reason, peak_memory_bytes=peak_bytes or None)
    if code:
        return dataclasses.replace(result, status=Status.FAILED, reason=f"exit code {code} after its result: {last}")
    return dataclasses.replace(result, peak_memory_bytes=max(peak_bytes, result.peak_memory_bytes or 0) or None)


def _telling_line(errors: str) -> str:
    """Return the last line that names an error, or the last one: Go's traces, for one, end with addresses."""
    lines = [line[:500] for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or line.startswith(("panic:", "fatal error:"))]
    return (named or lines or ["nothing on standard error"])[-1]


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process and all below it; what ends meanwhile counts nothing."""
    total = 0
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in tree:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _pin(pid: int, cores: int) -> None:
    """Keep a process that has just started, and so its threads and children, on the first cores."""
    try:
        psutil.Process(pid).cpu_affinity(sorted(os.sched_getaffinity(0))[:cores])
    except psutil.NoSuchProcess:
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children: they are one process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Run peers on models, one after the other, and print a line for each."""
    parser = argparse.ArgumentParser(description="Run peers on models")
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--inputs", type=Path, required=True, help="folder with an .npz for each model")
    parser.add_argument("--out", type=Path, required=True, help="folder for PEER-MODEL.json")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="of the environments")
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    limits = Limits(arguments.budget_s, arguments.timeout_s)
    for model in arguments.models:
        for name in arguments.peers:
            out = arguments.out / f"{name}-{model.stem}.json"
            inputs = arguments.inputs / f"{model.stem}.npz"
            result = run_peer(PEERS[name], model, inputs, out, limits, arguments.folder)
            print(f"{name:18} {model.stem:14} {result.status} {result.reason}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
