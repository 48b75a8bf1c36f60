"""Cost of the server's operators on one prepared query against the same float64 operators in the clear.

Run from the repository root, on an otherwise idle machine:

    OMP_WAIT_POLICY=PASSIVE OPENBLAS_NUM_THREADS=1 python benchmarks/server_operators.py --json PATH

Contenders take turns, so that a disturbance hits both; times are medians, and minima are reported beside them. In the
clear a convolution gathers patches by the same kind of kernel and multiplies them with numpy's BLAS, cut into the same
tiles. One thread means that the process is bound to one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heinfer.processes import core_count, prepare_environment

prepare_environment()

import numba  # noqa: E402  (BLAS reads the environment when numpy is imported)
import numpy as np  # noqa: E402
from modular_product import cpu_model  # noqa: E402

from heinfer.operators import Program, ResidueProgram  # noqa: E402
from heinfer.operators.steps import Conv, MatMul, Window  # noqa: E402
from heinfer.ring import ModularMatrix, RingParameters, even_slices, kernel, run_tiles, scratch_array  # noqa: E402

TARGET = 2.5


@dataclass(frozen=True)
class Layer:
    """A square convolution of one query, or (kernel 0) a matrix applied to some queries."""

    channels: int
    outputs: int
    size: int = 1
    kernel: int = 0
    stride: int = 1
    pad: int = 0
    samples: int = 1
    target: float | None = None
    times: int = 1

    @property
    def name(self) -> str:
        if not self.kernel:
            return f"gemm {self.channels}x{self.outputs}, {self.samples} queries"
        stride = f" /{self.stride}" if self.stride > 1 else ""
        return f"conv {self.kernel}x{self.kernel} {self.channels}->{self.outputs} at {self.size}{stride}"


LAYERS = [
    Layer(64, 64, 32, 3, pad=1, target=TARGET),
    Layer(64, 64, 56, 3, pad=1, target=TARGET),
    Layer(128, 128, 28, 3, pad=1, target=TARGET),
    Layer(256, 256, 14, 3, pad=1, target=TARGET),
    Layer(64, 128, 56, 3, stride=2, pad=1, target=TARGET),
    Layer(1024, 1024),
    Layer(1024, 1024, samples=16, target=TARGET),
]
#: ResNet-20 for CIFAR-10, inputs padded already; `times` such layers.
RESNET20 = [
    Layer(3, 16, 34, 3),
    Layer(16, 16, 34, 3, times=6),
    Layer(16, 32, 34, 3, stride=2),
    Layer(32, 32, 18, 3, times=5),
    Layer(32, 64, 18, 3, stride=2),
    Layer(64, 64, 10, 3, times=5),
    Layer(64, 10),
]


@kernel
def _gather(x: np.ndarray, size: int, points: int, stride: int, pad: int, start: int, patches: np.ndarray) -> None:
    """Write the patches of output columns from `start` on; x is (channels, size * size)."""
    out_size = (size + 2 * pad - points) // stride + 1
    for row in range(patches.shape[0]):
        channel, point = divmod(row, points * points)
        down, across = point // points - pad, point % points - pad
        low = max(-(across // stride), 0)
        high = max(min((size - 1 - across) // stride + 1, out_size), low)
        at, oy, ox = 0, start // out_size, start % out_size
        while at < patches.shape[1]:
            end = min(out_size, ox + patches.shape[1] - at)
            iy = oy * stride + down
            begin = min(max(low, ox), end) if 0 <= iy < size else end
            stop = max(min(high, end), begin)
            target = patches[row, at : at + end - ox]
            target[: begin - ox] = 0.0
            target[stop - ox :] = 0.0
            if stop > begin:
                first = iy * size + across + begin * stride
                line = x[channel, first : first + (stop - begin - 1) * stride + 1]
                middle = target[begin - ox : stop - ox]
                if stride == 1:
                    for i in range(middle.shape[0]):
                        middle[i] = line[i]
                else:
                    for i in range(middle.shape[0]):
                        middle[i] = line[i * stride]
            at, ox, oy = at + end - ox, 0, oy + 1


def in_the_clear(layer: Layer, weights: np.ndarray, x: np.ndarray) -> Callable[[], np.ndarray]:
    """The float64 operator; returns a function that makes its result."""
    if not layer.kernel:
        transposed = weights.T

        def multiply() -> np.ndarray:
            out = np.empty((layer.samples, layer.outputs))
            tiles = even_slices(layer.outputs, core_count())
            work = float(layer.samples * weights.size)
            run_tiles(lambda t: np.matmul(x, transposed[:, t], out=out[:, t]), tiles, work=work)
            return out

        return multiply
    matrix, planes = weights.reshape(layer.outputs, -1), x.reshape(layer.channels, -1)
    columns = ((layer.size + 2 * layer.pad - layer.kernel) // layer.stride + 1) ** 2
    shape = ModularMatrix(np.zeros(matrix.shape), RingParameters.default())

    def convolve() -> np.ndarray:
        out = np.empty((layer.outputs, columns))

        def tile(span: slice) -> None:
            patches = scratch_array("plain", matrix.shape[1], span.stop - span.start)
            _gather(planes, layer.size, layer.kernel, layer.stride, layer.pad, span.start, patches)
            np.matmul(matrix, patches, out=out[:, span])

        run_tiles(tile, shape.column_tiles(columns), work=float(matrix.size * columns))
        return out

    return convolve


def exact(layer: Layer, weights: np.ndarray, x: np.ndarray) -> Callable[[], np.ndarray]:
    """The operator on residues."""
    if layer.kernel:
        size = (layer.size + 2 * layer.pad - layer.kernel) // layer.stride + 1
        strides, points = (layer.stride, layer.stride), (layer.kernel, layer.kernel)
        window = Window(points, strides, (layer.pad,) * 4, (1, 1), (size, size))
        step: Conv | MatMul = Conv(0, "w", window, 1, (layer.outputs, size, size))
        array = weights
    else:
        step, array = MatMul(0, "w", (layer.outputs,)), np.ascontiguousarray(weights.T)
    program = Program((x.shape[1:],), (step,), (1,))
    run = ResidueProgram(program, {"w": array.astype(np.int16)}, RingParameters.default())
    return lambda: run.evaluate([x])[0]


def take_turns(contenders: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of every contender and round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions + 2):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if repetition >= 2:  # the first rounds compile and warm the caches
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(layer: Layer, repetitions: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    points = (layer.kernel, layer.kernel) if layer.kernel else ()
    weights = rng.integers(-1000, 1001, (layer.outputs, layer.channels, *points)).astype(np.float64)
    shape = (layer.channels, layer.size, layer.size) if layer.kernel else (layer.channels,)
    residues = rng.integers(0, RingParameters.default().modulus, (layer.samples, *shape))
    small = rng.integers(0, 1000, residues.shape)  # both contenders compute these exactly, so they must agree
    clear = in_the_clear(layer, weights, small.astype(np.float64))()
    modulus = RingParameters.default().modulus
    np.testing.assert_array_equal(exact(layer, weights, small)().reshape(clear.shape), clear.astype(np.int64) % modulus)

    contenders = {
        "plain": in_the_clear(layer, weights, rng.standard_normal(residues.shape)),
        "exact": exact(layer, weights, residues),
    }
    row: dict[str, Any] = {"layer": layer.name, "times": layer.times, "target": layer.target}
    cores = os.sched_getaffinity(0)
    for kind, bound in (("single", {min(cores)}), ("cores", cores)):
        os.sched_setaffinity(0, bound)
        seconds = take_turns(contenders, repetitions)
        os.sched_setaffinity(0, cores)
        for name, values in seconds.items():
            row[f"{name}_{kind}_ms"] = round(statistics.median(values) * 1e3, 4)
            row[f"{name}_{kind}_least_ms"] = round(min(values) * 1e3, 4)
        row[f"ratio_{kind}"] = round(row[f"exact_{kind}_ms"] / row[f"plain_{kind}_ms"], 3)
        row[f"ratio_{kind}_least"] = round(row[f"exact_{kind}_least_ms"] / row[f"plain_{kind}_least_ms"], 3)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':28} {'one thread':>36}   {f'{core_count()} cores':>36}")
    print(f"{'layer':>28}" + f"{'plain ms':>9} {'exact ms':>9} {'ratio':>6} {'(least)':>8}   " * 2)
    for row in rows:
        cells = [
            f"{row[f'plain_{kind}_ms']:9.3f} {row[f'exact_{kind}_ms']:9.3f} {row[f'ratio_{kind}']:6.2f} "
            f"{row[f'ratio_{kind}_least']:8.2f}   "
            for kind in ("single", "cores")
        ]
        print(f"{row['layer']:>28}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="Server operators on residues against float64 in the clear.")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repetitions", type=int, default=31, help="timed rounds per layer, at least 15")
    arguments = parser.parse_args()
    if arguments.repetitions < 15:
        parser.error("--repetitions: expected at least 15")
    rows = [measure(layer, arguments.repetitions) for layer in LAYERS]
    resnet = [measure(layer, arguments.repetitions) for layer in RESNET20]
    show(rows + resnet)
    total = {
        f"{name}_{kind}_ms": round(sum(row["times"] * row[f"{name}_{kind}_ms"] for row in resnet), 3)
        for name in ("plain", "exact")
        for kind in ("single", "single_least", "cores", "cores_least")
    }
    print("ResNet-20, one query:", ", ".join(f"{name} {value}" for name, value in total.items()))
    if arguments.json:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        report = {
            "benchmark": "server_operators",
            "cpu": cpu_model(),
            "cores": core_count(),
            "load_average_1_minute": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "blas": f"{blas['name']} {blas['version']}",
            "results": rows,
            "resnet20": {"layers": resnet, **total},
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
