"""How throughput grows with cores and with queries that wait together.

    python benchmarks/scaling.py [--json PATH] [--docs]

LeNet-5 in prepared mode with hints for batches. Client, node and server share as many cores as a row says. Columns:
single-sample queries of 1, 4, 16, 64 clients at a time, and 10,000 samples in queries of 2,048.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from comparison_table import figure, insert, line
from own_figures import CHUNK, answer_all
from side_by_side import REPOSITORY, inputs

import heinfer
from heinfer.client.environment import machine_name
from heinfer.processes import core_count

CLIENTS = (1, 4, 16, 64)
#: Queries of a run, of each client at most; runs take turns, and their median counts.
SECONDS, RUNS = 2.0, 3
SAMPLES = 10_000


def rate(served: heinfer.LocalModel, x: np.ndarray, clients: int) -> float:
    """Return answers a second to as many clients, each asking one sample after the other for `SECONDS`."""
    until = time.perf_counter() + SECONDS

    def ask(first: int) -> int:
        count = 0
        while time.perf_counter() < until:
            i = (first + count) % len(x)
            served.predict(x[i : i + 1])
            count += 1
        return count

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answered = sum(pool.map(ask, range(clients)))
    return answered / (time.perf_counter() - started)


def measure(bundle: Path, x: np.ndarray, cores: list[int]) -> dict[str, float]:
    """Return rates on these cores; processes take them over when they start."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with heinfer.local(bundle, mode="prepared", prepared=64) as served:
            served.predict(x[:1])
            answer_all(served, x[:CHUNK])
            found: dict[str, list[float]] = {}
            for _ in range(RUNS):
                for clients in CLIENTS:
                    found.setdefault(str(clients), []).append(rate(served, x, clients))
                found.setdefault("batch", []).append(answer_all(served, x)[0])
    finally:
        os.sched_setaffinity(0, before)
    return {name: float(np.median(rates)) for name, rates in found.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks/results/scaling.json")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/performance.md")
    arguments = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < len(available)] + [len(available)]
    x = inputs("lenet5", SAMPLES, arguments.shared)
    rows: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        heinfer.partition(REPOSITORY / "models/released/mnist_lenet5/model.onnx", bundle, batch_hints=True)
        for count in counts:
            rows[count] = measure(bundle, x, available[:count])
    table = render(rows)
    print(table)
    result: dict[str, Any] = {"machine": machine_name(), "cores": core_count(), "rows": rows}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.docs:
        insert(REPOSITORY / "docs/performance.md", "scaling", table)


def render(rows: dict[int, dict[str, float]]) -> str:
    """Return the table, answers a second."""
    names = [f"{c} client{'s' if c > 1 else ''}" for c in CLIENTS] + [f"{SAMPLES:,} in queries of {CHUNK:,}"]
    lines = [line(["cores", *names]), "|" + "---|" * (len(names) + 1)]
    for count, rates in rows.items():
        lines.append(line([str(count), *map(figure, rates.values())]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
