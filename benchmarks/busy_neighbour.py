"""How an evaluation fares beside a process that keeps one core busy: nobody spins, so it takes at most twice as long.

    python benchmarks/busy_neighbour.py [--json benchmarks/results/busy_neighbour.json]

LeNet-5 on 4,096 digits of its sample file, alone and beside the neighbour, interleaved; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import heinfer
from heinfer.client.environment import machine_name
from heinfer.processes import core_count

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLES = 4096
REPETITIONS = 3


def seconds_of(bundle: Path, x: np.ndarray) -> float:
    """Evaluate under encryption; return the seconds that it took."""
    costs = heinfer.evaluate(bundle, x).costs
    assert costs is not None  # a real run has some
    return costs.seconds


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = REPOSITORY / "models/released/mnist_lenet5"
    with np.load(folder / "samples.npz") as archive:
        x = np.resize(archive["x"], (SAMPLES, *archive["x"].shape[1:]))
    seconds: dict[str, list[float]] = {"alone": [], "beside": []}
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        heinfer.partition(folder / "model.onnx", bundle)
        for _ in range(REPETITIONS):
            seconds["alone"].append(seconds_of(bundle, x))
            neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                seconds["beside"].append(seconds_of(bundle, x))
            finally:
                neighbour.kill()
                neighbour.wait()
    alone, beside = statistics.median(seconds["alone"]), statistics.median(seconds["beside"])
    print(
        f"{SAMPLES} digits: alone {alone:.2f} s, beside a busy process {beside:.2f} s, ratio {beside / alone:.2f} "
        f"({machine_name()}, {core_count()} cores)"
    )
    if arguments.json is not None:
        result = {**seconds, "ratio": beside / alone, "machine": machine_name(), "cores": core_count()}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
