"""Cost of the exact modular product against the float64 product of the same shape in the clear.

Run from the repository root, on an otherwise idle machine:

    OMP_WAIT_POLICY=PASSIVE OPENBLAS_NUM_THREADS=1 python benchmarks/modular_product.py --json PATH

Contenders take turns, so that a disturbance hits all of them; times are medians. On a shared machine wall-clock times
include waiting for others; the ratios of processor time (all threads of the process) do not. `single` runs on one
thread and compares with one numpy product over all columns; `cores` runs tiles on all cores and compares with the
float64 product cut into the same tiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heinfer.processes import core_count, prepare_environment

prepare_environment()

import numba  # noqa: E402  (BLAS reads the environment when numpy is imported)
import numpy as np  # noqa: E402

from heinfer.ring import ModularMatrix, RingParameters, multiply_mod_reference, run_tiles  # noqa: E402

#: outputs, inputs, columns.
SHAPES = [(1024, 1024, 256), (512, 4608, 784), (64, 576, 1024), (16, 150, 4096)]
TARGET = {(512, 4608, 784): 2.5}


def median_times(
    contenders: dict[str, Callable[[], object]], repetitions: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of every contender, by the wall clock and of processor time; they take turns."""
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions + 2):
        for name, contender in contenders.items():
            start, busy = time.perf_counter(), time.process_time()
            contender()
            if repetition >= 2:  # the first rounds compile and warm the caches
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
    medians = [{name: statistics.median(values) for name, values in times.items()} for times in (wall, processor)]
    return medians[0], medians[1]


def measure(shape: tuple[int, int, int], repetitions: int) -> dict[str, Any]:
    """Time one shape; checks the result on a few columns first."""
    outputs, inputs, columns = shape
    rng = np.random.default_rng(0)
    parameters = RingParameters.default()
    weights = rng.integers(-1000, 1001, (outputs, inputs)).astype(np.float64)
    residues = rng.integers(0, parameters.modulus, (inputs, columns))
    matrix, result = ModularMatrix(weights, parameters), np.empty((outputs, columns), np.int64)
    values, plain = rng.standard_normal((inputs, columns)), np.empty((outputs, columns))
    matrix.multiply(residues, result)
    expected = multiply_mod_reference(weights[:4], residues[:, ::97], parameters.modulus)
    np.testing.assert_array_equal(result[:4, ::97], expected)

    tiles = matrix.column_tiles(columns)
    work = 2.0 * outputs * inputs * columns

    def plain_tile(tile: slice) -> None:
        plain[:, tile] = weights @ values[:, tile]

    seconds, processor = median_times(
        {
            "plain_single": lambda: np.matmul(weights, values, out=plain),
            "exact_single": lambda: matrix.multiply(residues, result, threads=1),
            "plain_cores": lambda: run_tiles(plain_tile, tiles, work=work),
            "exact_cores": lambda: matrix.multiply(residues, result),
        },
        repetitions,
    )
    return {
        "outputs": outputs,
        "inputs": inputs,
        "columns": columns,
        "repetitions": repetitions,
        **{f"{name}_ms": round(value * 1e3, 4) for name, value in seconds.items()},
        "ratio_single": round(seconds["exact_single"] / seconds["plain_single"], 3),
        "ratio_cores": round(seconds["exact_cores"] / seconds["plain_cores"], 3),
        "processor_ratio_single": round(processor["exact_single"] / processor["plain_single"], 3),
        "processor_ratio_cores": round(processor["exact_cores"] / processor["plain_cores"], 3),
        "target": TARGET.get(shape),
    }


def cpu_model() -> str:
    """Model of the processor, as far as the system tells."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact modular product against float64 in the clear.")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repetitions", type=int, default=21, help="timed rounds per shape, at least 15")
    arguments = parser.parse_args()
    if arguments.repetitions < 15:
        parser.error("--repetitions: expected at least 15")
    rows = [measure(shape, arguments.repetitions) for shape in SHAPES]
    print(f"{'':18} {'one thread':>32}   {f'{core_count()} cores':>32}")
    print(f"{'shape':>18}" + f"{'plain ms':>9} {'exact ms':>9} {'ratio':>6} {'(cpu)':>6}  " * 2)
    for row in rows:
        shape = f"{row['outputs']}x{row['inputs']}x{row['columns']}"
        cells = [
            f"{row[f'plain_{kind}_ms']:9.3f} {row[f'exact_{kind}_ms']:9.3f} {row[f'ratio_{kind}']:6.2f} "
            f"{row[f'processor_ratio_{kind}']:6.2f}  "
            for kind in ("single", "cores")
        ]
        print(f"{shape:>18}" + "".join(cells))
    if arguments.json:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        report = {
            "benchmark": "modular_product",
            "cpu": cpu_model(),
            "cores": core_count(),
            "load_average_1_minute": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "blas": f"{blas['name']} {blas['version']}",
            "results": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
