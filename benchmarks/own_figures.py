"""heinfer's own cells of the comparison: one model, one mode, in the form that peers give theirs.

    model, samples --> partition --> three processes on loopback --> single queries | batches --> figures

Latency is that of single queries in a row with masks prepared before, whose time is stated apart; throughput counts
everything, preparation included, from the first sample sent until the last answer.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import heinfer
from heinfer.client.evaluation import run_reference

QUERIES = {"prepared": 50, "standard": 5}
#: Seconds after which no further one is asked: ResNet-20 moves gigabytes a query in standard mode.
QUERIES_S = 20.0
#: Entries of the pool, more than the queries in a row; and how long it gets to fill up, in times of preparing one.
POOL, FILL = 64, 2.0
#: Samples of a query where there are thousands, and queries on their way at a time: as `heinfer evaluate` asks.
CHUNK, IN_FLIGHT = 2048, 3
#: Runs over all samples, whose median is the throughput, and after how many seconds there is no further one.
RUNS, RUNS_S = 3, 25.0


def measure(model: Path, x: np.ndarray, mode: str, batch_hints: bool) -> dict[str, Any]:
    """Measure one model in one mode.

    Args:
        model: ONNX file.
        x: samples, shape (samples, *input_shape); all of them make the throughput.
        mode: "prepared" or "standard".
        batch_hints: whether the bundle has hints for batches (prepared mode).
    """
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        started = time.perf_counter()
        plan = heinfer.partition(model, bundle, batch_hints=batch_hints).plan
        partition_s = time.perf_counter() - started
        plain = run_reference(model.read_bytes(), x, lambda done: None)
        with heinfer.local(bundle, mode=mode, prepared=POOL if mode == "prepared" else 0) as served:
            first = served.query(x[:1], statistics=True).statistics
            preparation_s = first["background_s"] or 0.0
            time.sleep(FILL * POOL * preparation_s)
            latency: list[float] = []
            found: list[dict[str, Any]] = []
            for i in range(QUERIES[mode]):
                if sum(latency) > QUERIES_S:
                    break
                started = time.perf_counter()
                answer = served.query(x[i : i + 1], statistics=True)
                latency.append(time.perf_counter() - started)
                found.append(answer.statistics)
            rates, outputs = _throughput(served, x)
            memory = sum(role.peak_memory_bytes() or 0 for role in served.roles)
    blocks = found[-1]["blocks"]
    parameters = plan.ring.parameters
    return {
        "peer": f"heinfer, {mode} mode",
        "version": heinfer.__version__,
        "status": "ok",
        "reason": "",
        "note": "",
        "latency_s": latency,
        "missed_the_pool": sum(1 - s["pooled"] for s in found) if mode == "prepared" else None,
        "preparation_s": preparation_s if mode == "prepared" else None,
        "server_s": float(np.median([sum(b["server_s"] for b in s["blocks"]) for s in found])),
        "throughput_per_s": float(np.median(rates)),
        "throughputs_per_s": rates,
        "batch": 1,
        "samples": len(x),
        "bytes_up": sum(b["bytes_up"] for b in blocks),
        "bytes_down": sum(b["bytes_down"] for b in blocks),
        "key_bytes": 0,
        "peak_memory_bytes": memory,
        "max_error": float(np.max(np.abs(outputs - plain))),
        "output_range": float(np.ptp(plain)),
        "agreement": float(np.mean(np.argmax(outputs, axis=-1) == np.argmax(plain, axis=-1))),
        "security_bits": parameters.security_bits,
        "parameters": {"N": parameters.degree, "log2_q": parameters.modulus_bits, "batch_hints": batch_hints},
        "rounds": plan.rounds,
        "partition_s": partition_s,
    }


def _throughput(served: heinfer.LocalModel, x: np.ndarray) -> tuple[list[float], np.ndarray]:
    """Return samples a second of several runs over all samples, and the outputs of the last."""
    rates: list[float] = []
    began = time.perf_counter()
    while len(rates) < RUNS and (not rates or time.perf_counter() - began < RUNS_S):
        rate, outputs = answer_all(served, x)
        rates.append(rate)
    return rates, outputs


def answer_all(served: heinfer.LocalModel, x: np.ndarray) -> tuple[float, np.ndarray]:
    """Return samples a second in large queries, several under way, and the outputs."""
    chunks = [x[start : start + CHUNK] for start in range(0, len(x), CHUNK)]
    started = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        outputs = list(pool.map(served.predict, chunks))
    return len(x) / (time.perf_counter() - started), np.concatenate(outputs)
