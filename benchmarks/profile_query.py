"""Where the milliseconds of an encrypted ResNet-20 query go: py-spy on client, node and server at once.

    python benchmarks/profile_query.py [--shared ../shared] [--queries 150] [--json PATH]

Queries run one after the other with a pool that was filled before. A sample of py-spy is a thread that is not waiting;
it belongs to the innermost frame that a rule below knows. Needs permission to trace processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from example_models import read_cifar, write_resnet20

import heinfer
from heinfer.client.environment import machine_name
from heinfer.processes import core_count

REPOSITORY = Path(__file__).resolve().parent.parent
RATE = 100
SPY = Path(sys.executable).with_name("py-spy")
#: A thread whose innermost frame is one of these waits: for its peer, for work, for a message.
WAITING = (
    "_read",
    "_watch_parent",
    "wait (threading",
    "_worker (concurrent",
    "_wait_once",
    "next_event",
    "accept (socket",
    "sleep",
    "_wait_for_tstate",
    "_poll",
    "_communicate",
)
#: Part of a frame -> what it is. The first rule that matches the innermost frames wins.
RULES = {
    "node": [
        ("unpack (", "unpack answers"),
        ("pack (", "pack ciphertexts"),
        ("PreparedQuery.encrypt", "scale, round, add masks"),
        ("PreparedQuery.decrypt", "add corrections, scale back"),
        ("scaling.py", "choose scales"),
        ("scales.py", "choose scales"),
        ("_finite", "choose scales"),
        ("results.py", "outputs, bounds, rounding"),
        ("rounding.py", "outputs, bounds, rounding"),
        ("connection.py", "sockets"),
        ("link.py", "messages of the session"),
        ("heinfer/wire/session.py", "messages of the session"),
        ("heinfer/wire/transfers.py", "messages of the session"),
        ("heinfer/wire/codec.py", "messages of the session"),
        ("heinfer/wire/messages.py", "messages of the session"),
        ("onnxruntime", "the model's own operators"),
        ("execution.py", "the model's own operators"),
        ("preparation.py", "prepare in the background, wipe"),
        ("sampling.py", "prepare in the background, wipe"),
        ("pool.py", "prepare in the background, wipe"),
        ("heinfer/wire/", "towards the client"),
    ],
    "server": [
        ("unpack (", "unpack and check"),
        ("pack (", "pack answers"),
        ("heinfer/operators/", "the operator: split, product, join"),
        ("heinfer/ring/", "the operator: split, product, join"),
        ("merging.py", "merge what waits together"),
        ("connection.py", "sockets"),
        ("heinfer/wire/", "messages of the session"),
        ("heinfer/server/", "messages of the session"),
    ],
    "client": [("", "client")],
}


def category(stack: list[str], role: str) -> str:
    for frame in reversed(stack):
        for part, name in RULES[role]:
            if part in frame:
                return name
    return "other"


def fold(path: Path, role: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = stack.split(";")
        if not any(part in frames[-1] for part in WAITING):
            counts[category(frames, role)] += int(count)
    return counts


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared")
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.shared.is_dir():
        print(f"{arguments.shared} is missing: nothing to measure")
        return
    x, _ = read_cifar(arguments.shared)
    times: list[float] = []
    statistics: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        heinfer.partition(write_resnet20(arguments.shared, folder / "m.onnx"), folder / "bundle")
        with heinfer.local(folder / "bundle", mode="prepared", prepared=arguments.queries + 20) as model:
            model.predict(x[:1])
            time.sleep(0.08 * arguments.queries)  # the pool fills
            server, node = model.roles
            pids = {"server": server.pid, "node": node.pid, "client": os.getpid()}
            spies = [
                subprocess.Popen(
                    [SPY, "record", "--nonblocking", "-p", str(pid), "-r", str(RATE), "-d", "3600", "-f", "raw",
                     "-o", folder / role],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
                for role, pid in pids.items()
            ]  # fmt: skip
            time.sleep(3)
            for i in range(arguments.queries):
                started = time.perf_counter()
                statistics.append(model.query(x[i % len(x)][None], statistics=True).statistics)
                times.append(time.perf_counter() - started)
            for spy in spies:
                spy.send_signal(2)
            for spy in spies:
                spy.wait(60)
        counts = {role: fold(folder / role, role) for role in pids}
    wall = 1e3 * float(np.median(times))
    missed = sum(1 - s["pooled"] for s in statistics)
    figures: dict[str, Any] = {"machine": machine_name(), "cores": core_count(), "median_ms": wall, "missed": missed}
    print(f"one query: {wall:.1f} ms under the profiler (median of {len(times)}, {missed} without a prepared mask)")
    for role, found in counts.items():
        figures[role] = {}
        total = sum(found.values())
        print(f"{role}: {1e3 * total / RATE / len(times):.1f} ms of processor time a query")
        for what, count in found.most_common():
            figures[role][what] = 1e3 * count / RATE / len(times)
            print(f"  {figures[role][what]:6.2f} ms  {what}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
