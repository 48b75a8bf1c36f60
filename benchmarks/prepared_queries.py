"""One encrypted query: client, node and server as three processes on loopback, masks prepared before.

    python benchmarks/prepared_queries.py [--shared ../shared] [--only resnet20 lenet5 tutorial] [--json PATH]

For each model: the median of 50 single queries with a filled pool (online), of preparing one sample in the background,
and of queries that find the pool empty; then a batch, preparation included, compared with onnxruntime in the clear.
The tutorial's CNN has random weights: its answers are compared, its accuracy means nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from example_models import read_cifar, write_resnet20, write_tutorial_cnn

import heinfer
from heinfer.client.environment import machine_name
from heinfer.processes import core_count

REPOSITORY = Path(__file__).resolve().parent.parent
QUERIES, EMPTY_QUERIES = 50, 15
#: Entries of the pool, more than the queries in a row; and how long it gets to fill up, in times of preparing one.
POOL, FILL = 64, 2.0
#: Between queries of somebody who asks now and then: processes sleep, caches cool down, the pool is filled up.
PAUSE_S = 0.05


def read_digits(shared: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(shared / "data/mnist.npz") as archive:
        return archive["test_images"].astype(np.float32)[:, None] / 255, archive["test_labels"].astype(np.int64)


def median_online(model: heinfer.LocalModel, x: np.ndarray, pause_s: float, count: int) -> tuple[float, list[dict]]:
    """Return the median seconds of single queries, and their statistics."""
    times, statistics = [], []
    for i in range(count):
        time.sleep(pause_s)
        sample = x[i % len(x)][None]
        started = time.perf_counter()
        answer = model.query(sample, statistics=True)
        times.append(time.perf_counter() - started)
        statistics.append(answer.statistics)
    return float(np.median(times)), statistics


def measure(model: Path, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        heinfer.partition(model, bundle)
        with heinfer.local(bundle, mode="prepared", prepared=POOL) as local:
            started = time.perf_counter()
            local.predict(x[:1])
            first_s = time.perf_counter() - started
            background_s = local.query(x[:1], statistics=True).statistics["background_s"]
            time.sleep(FILL * POOL * background_s)
            online_s, found = median_online(local, x, 0.0, QUERIES)
            missed = sum(1 - s["pooled"] for s in found)
            time.sleep(FILL * POOL * background_s)
            sparse_s, _ = median_online(local, x, PAUSE_S, QUERIES)
        with heinfer.local(bundle, mode="prepared", prepared=0) as local:
            empty_s, _ = median_online(local, x, 0.0, EMPTY_QUERIES)
        report = heinfer.evaluate(bundle, x, y, mode="prepared")
    costs = report.costs
    assert costs is not None  # a real run has some
    blocks = found[-1]["blocks"]
    return {
        "online_ms": 1e3 * online_s,
        "online_after_a_pause_ms": 1e3 * sparse_s,
        "first_query_ms": 1e3 * first_s,
        "queries_that_missed_the_pool": missed,
        "preparation_ms": 1e3 * costs.preparation_s,
        "empty_pool_ms": 1e3 * empty_s,
        "bytes_up": sum(b["bytes_up"] for b in blocks),
        "bytes_down": sum(b["bytes_down"] for b in blocks),
        "server_ms": 1e3 * float(np.median([sum(b["server_s"] for b in s["blocks"]) for s in found])),
        "node_operators_ms": 1e3 * float(np.median([s["node_s"] for s in found])),
        "check_ms": 1e3 * float(np.median([sum(b["check_s"] for b in s["blocks"]) for s in found])),
        "encrypt_ms": 1e3 * float(np.median([sum(b["encrypt_s"] for b in s["blocks"]) for s in found])),
        "decrypt_ms": 1e3 * float(np.median([sum(b["decrypt_s"] for b in s["blocks"]) for s in found])),
        "wire_ms": 1e3 * float(np.median([sum(b["wire_s"] for b in s["blocks"]) for s in found])),
        "rounds": report.rounds,
        "samples": report.samples,
        "batch_s": costs.seconds,
        "agreement": report.agreement,
        "accuracy_plain": report.accuracy_plain,
        "accuracy_encrypted": report.accuracy_encrypted,
        "max_abs_error": report.max_abs_error,
        "error_estimate": report.error_estimate,
        "prepared_query_bytes": costs.prepared_query_bytes,
        "peak_memory_bytes": costs.peak_memory_bytes,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared")
    parser.add_argument("--only", nargs="*", default=["resnet20", "lenet5", "tutorial"])
    parser.add_argument("--samples", type=int, help="of the batch; all where not given")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.shared.is_dir():
        print(f"{arguments.shared} is missing: nothing to measure")
        return
    results: dict[str, Any] = {"machine": machine_name(), "cores": core_count()}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            if name == "resnet20":
                model = write_resnet20(arguments.shared, Path(folder) / "m.onnx")
                x, y = read_cifar(arguments.shared)
            elif name == "lenet5":
                model = REPOSITORY / "models/released/mnist_lenet5/model.onnx"
                x, y = read_digits(arguments.shared)
            else:
                model, (x, y) = write_tutorial_cnn(Path(folder) / "m.onnx"), read_digits(arguments.shared)
            count = arguments.samples or len(x)
            figures = results[name] = measure(model, x[:count], y[:count])
            print(
                f"{name}: online {figures['online_ms']:.1f} ms (median of {QUERIES} in a row; "
                f"{figures['online_after_a_pause_ms']:.1f} after pauses of {1e3 * PAUSE_S:.0f} ms), prepared before in "
                f"{figures['preparation_ms']:.1f} ms, empty pool {figures['empty_pool_ms']:.1f} ms, first query "
                f"{figures['first_query_ms']:.1f} ms; {figures['bytes_up'] / 1e6:.2f} MB up, "
                f"{figures['bytes_down'] / 1e6:.2f} MB down\n  split, ms: node {figures['encrypt_ms']:.1f} up "
                f"{figures['decrypt_ms']:.1f} down {figures['node_operators_ms']:.1f} operators, server "
                f"{figures['server_ms']:.1f}, wire {figures['wire_ms']:.1f}\n  batch: {figures['samples']} in "
                f"{figures['batch_s']:.1f} s, agreement {figures['agreement']:.4f}, largest error "
                f"{figures['max_abs_error']:.1e} (estimate {figures['error_estimate']:.1e}), peak memory "
                f"{ {k: round(v / 1e6) for k, v in figures['peak_memory_bytes'].items() if v} } MB "
                f"({results['machine']}, {results['cores']} cores)",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
