"""The frame of a peer's script: arguments, clocks, comparison with onnxruntime, and the result file.

    python benchmarks/peers/PEER.py --model M.onnx --inputs X.npz --out RESULT.json --budget-s 60

A script hands `main` a function from a `Task` to a `Measured`; everything else is here. Standard output stays empty:
what the libraries print goes to standard error. Errors become a result too, with the exception's own words.

Client and server share a process, and bytes pass between them in memory: a network's time is not counted, which
favours the peers. What the server gets and gives is serialised, as it would be between two machines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from networks import NotExpressibleError, evaluate_clear, with_squares
from result import Result, Status, write_result

#: Queries of one measurement at most: more do not change a median.
QUERIES = 50

#: Largest log2 of the whole modulus, special primes included, for 128 bits of classical security by degree of the
#: ring (Bossuat et al., ePrint 2024/463, ternary secrets): the table that heinfer's own parameters go by.
LARGEST_LOG_MODULUS = {1024: 26, 2048: 53, 4096: 106, 8192: 214, 16384: 430, 32768: 868}
SECURITY_TABLE = "ePrint 2024/463"


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure.

    Attributes:
        model: An ONNX file.
        x: float32, samples first.
        budget_s: Seconds that the queries may take, preparation included; at least one query is made.
        deadline: `budget_s` from the start, by time.monotonic().
    """

    model: Path
    x: np.ndarray
    budget_s: float
    deadline: float


@dataclass(slots=True)
class Measured:
    """What a peer found; fields as in `Result`. `outputs` are of the first samples of the task."""

    outputs: np.ndarray
    latency_s: list[float]
    preparation_s: float | None = None
    server_s: list[float] = field(default_factory=list)
    throughput_per_s: float | None = None
    batch: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    key_bytes: int | None = None
    security_bits: int | None = None
    squares: bool = False
    note: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Traffic:
    """What crosses, in bytes, and the server's seconds, of one query.

    Attributes:
        up: Bytes to the server.
        down: Bytes to the client.
        server_s: Seconds.
    """

    up: int = 0
    down: int = 0
    server_s: float = 0.0


def summed_up(traffics: list[Traffic]) -> dict[str, Any]:
    """Return the fields of `Measured` that follow from queries: seconds of all, bytes of the last."""
    last = traffics[-1]
    return {"server_s": [traffic.server_s for traffic in traffics], "bytes_up": last.up, "bytes_down": last.down}


def main(peer: str, packages: tuple[str, ...], measure: Callable[[Task], Measured]) -> None:
    """Run one peer's measurement as a script. Packages are those whose versions to report."""
    parser = argparse.ArgumentParser(description=f"Measure {peer} on one model")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True, help="an .npz with x: float32, samples first")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=60.0)
    arguments = parser.parse_args()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with np.load(arguments.inputs) as archive:
        x = np.ascontiguousarray(archive["x"], dtype=np.float32)
    task = Task(arguments.model, x, arguments.budget_s, time.monotonic() + arguments.budget_s)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    write_result(_result(peer, versions, task, measure), arguments.out)


def _result(peer: str, version: str, task: Task, measure: Callable[[Task], Measured]) -> Result:
    """Return what the measurement gives, its errors included."""
    model = task.model.stem
    try:
        return _compared(peer, version, task, measure(task))
    except NotExpressibleError as error:
        return Result(peer, model, Status.NOT_EXPRESSIBLE, version, reason=str(error))
    except MemoryError as error:
        return Result(peer, model, Status.OUT_OF_MEMORY, version, reason=f"MemoryError: {error}")
    except Exception as error:  # the result says what went wrong; the trace is for standard error
        sys.excepthook(type(error), error, error.__traceback__)
        return Result(peer, model, Status.FAILED, version, reason=f"{type(error).__name__}: {error}"[:1000])


def _compared(peer: str, version: str, task: Task, measured: Measured) -> Result:
    """Compare with onnxruntime, and fill a result."""
    peak_bytes = peak_memory_bytes()
    outputs = np.asarray(measured.outputs, dtype=np.float64)
    if not np.all(np.isfinite(outputs)):
        raise ValueError("the decrypted outputs are not all finite")
    model = with_squares(task.model) if measured.squares else task.model
    expected = evaluate_clear(model, task.x[: len(outputs)]).reshape(outputs.shape)
    return Result(
        peer,
        task.model.stem,
        Status.OK,
        version,
        note=measured.note,
        latency_s=measured.latency_s,
        preparation_s=measured.preparation_s,
        server_s=float(np.median(measured.server_s)) if measured.server_s else None,
        throughput_per_s=measured.throughput_per_s or 1 / float(np.median(measured.latency_s)),
        batch=measured.batch or 1,
        bytes_up=measured.bytes_up,
        bytes_down=measured.bytes_down,
        key_bytes=measured.key_bytes,
        peak_memory_bytes=peak_bytes,
        max_error=float(np.abs(outputs - expected).max()),
        output_range=float(expected.max() - expected.min()),
        agreement=float(np.mean(outputs.argmax(1) == expected.argmax(1))),
        security_bits=measured.security_bits,
        parameters=measured.parameters,
    )


def repeat_queries(task: Task, query: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, list[float]]:
    """Ask one sample after the other, each of shape (1, ...), until the budget or `QUERIES` is spent.

    Returns:
        Outputs, one row a query, and the seconds of each.
    """
    outputs, seconds = [], []
    for sample in task.x[:QUERIES]:
        started = time.perf_counter()
        outputs.append(np.ravel(query(sample[None])))
        seconds.append(time.perf_counter() - started)
        if time.monotonic() + seconds[-1] > task.deadline:
            break
    return np.stack(outputs), seconds


def table_security_bits(degree: int, log_modulus: float) -> int:
    """Return 128 where the table allows the modulus, 0 where it does not: less than 128."""
    return 128 if log_modulus <= LARGEST_LOG_MODULUS.get(degree, 0) else 0


def peak_memory_bytes() -> int:
    """Return the process's largest resident set. (getrusage's would count what the parent had before exec, too.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def core_count() -> int:
    """Return the cores that this process may use, as its environment says."""
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))
