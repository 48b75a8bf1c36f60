"""How cost grows with channels, planes, depth and batch, beside the same in the clear.

    python benchmarks/growth.py [--json PATH] [--plot PATH] [--docs]

Stacks of 3x3 convolutions with ReLU between them, random weights, prepared mode, masks prepared before; one of
channels, side of the plane, layers and samples grows, the others stay. The floor: the same products in float64 on this
machine, and the bytes of the tensors that cross, in float32. Medians of single queries in a row; memory is the peak of
server and node, which start anew for every point.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from comparison_table import figure
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import heinfer
from heinfer.client.environment import machine_name
from heinfer.processes import core_count
from heinfer.training.export import export_network

REPOSITORY = Path(__file__).resolve().parent.parent
QUERIES = 15
#: Seconds that one point's queries may take together, and how long the pool fills in times of preparing one query.
BUDGET_S, FILL = 4.0, 2.0


@dataclass(frozen=True)
class Point:
    """A stack of convolutions and a batch.

    Attributes:
        channels: of every layer, inputs and outputs.
        side: of its square planes.
        layers: convolutions.
        samples: of a query.
    """

    channels: int = 32
    side: int = 16
    layers: int = 2
    samples: int = 1


BASE = Point()
AXES: dict[str, list[Point]] = {
    "channels": [replace(BASE, channels=c) for c in (8, 16, 32, 64, 128)],
    "side": [replace(BASE, side=s) for s in (8, 16, 32, 64)],
    "layers": [replace(BASE, layers=n) for n in (1, 2, 4, 8, 16)],
    "samples": [replace(BASE, samples=n) for n in (1, 4, 16, 64, 256)],
}
AXIS_NAMES = {
    "channels": "channels",
    "side": "side of the planes",
    "layers": "convolutions",
    "samples": "samples of a query",
}


def network(point: Point) -> nn.Sequential:
    """Return the stack, with random weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(point.layers):
        layers += [nn.ReLU()] if number else []
        layers.append(nn.Conv2d(point.channels, point.channels, 3, padding=1, bias=False))
    return nn.Sequential(*layers)


def floor_s(stack: nn.Sequential, x: np.ndarray) -> float:
    """Return seconds of the same convolutions in float64, all cores; ReLU is not counted."""
    value = torch.from_numpy(x).double()
    convolutions = [m.double() for m in stack if isinstance(m, nn.Conv2d)]
    times = []
    with torch.inference_mode():
        for _ in range(QUERIES):
            started = time.perf_counter()
            for convolution in convolutions:
                convolution(value)
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def measure(point: Point) -> dict[str, Any]:
    """Return the costs of a point."""
    shape = (point.channels, point.side, point.side)
    x = np.random.default_rng(0).standard_normal((point.samples, *shape)).astype(np.float32)
    stack = network(point)
    with tempfile.TemporaryDirectory() as folder:
        model, bundle = Path(folder) / "m.onnx", Path(folder) / "bundle"
        onnx.save(export_network(stack, shape), model)
        heinfer.partition(model, bundle)
        hint_bytes = sum(p.stat().st_size for p in (bundle / "node").rglob("*hints*") if p.is_file())
        with heinfer.local(bundle, mode="prepared", prepared=max(QUERIES + 1, point.samples)) as served:
            preparation_s = served.query(x, statistics=True).statistics["background_s"] or 0.0
            online, found = [], []
            while len(online) < QUERIES and sum(online) < BUDGET_S:
                time.sleep(min(2.0, FILL * preparation_s))
                started = time.perf_counter()
                found.append(served.query(x, statistics=True).statistics)
                online.append(time.perf_counter() - started)
            memory = {role.name: role.peak_memory_bytes() or 0 for role in served.roles}
    blocks = found[-1]["blocks"]
    values = point.samples * np.prod(shape) * point.layers
    return {
        "online_s": float(np.median(online)),
        "online_quartiles_s": np.percentile(online, [25, 75]).tolist(),
        "preparation_s": point.samples * preparation_s,
        "server_s": float(np.median([sum(b["server_s"] for b in s["blocks"]) for s in found])),
        "floor_s": floor_s(stack, x),
        "bytes": sum(b["bytes_up"] + b["bytes_down"] for b in blocks),
        "floor_bytes": int(2 * 4 * values),
        "hint_bytes": hint_bytes,
        "server_memory": memory["server"],
        "node_memory": memory["node"],
    }


SERIES = {
    "seconds": {
        "online": "online_s",
        "preparation": "preparation_s",
        "server": "server_s",
        "float64 product": "floor_s",
    },
    "MB": {"up and down": "bytes", "plain tensors": "floor_bytes", "hints": "hint_bytes"},
    "memory, MB": {"server": "server_memory", "node": "node_memory"},
}


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw rows of plots: time, bytes and memory; a column for every axis."""
    plot = Figure(figsize=(14, 9), layout="constrained")
    FigureCanvasAgg(plot)
    axes = plot.subplots(len(SERIES), len(AXES), sharey="row", squeeze=False)
    for column, (axis, points) in enumerate(AXES.items()):
        across = [getattr(p, axis) for p in points]
        for row, (unit, series) in enumerate(SERIES.items()):
            place = axes[row][column]
            scale = 1.0 if unit == "seconds" else 1e6
            for name, key in series.items():
                style = "--" if "floor" in key else "-"
                place.plot(across, [r[key] / scale for r in results[axis]], style, marker="o", markersize=3, label=name)
            place.set_xscale("log", base=2)
            if row < len(SERIES) - 1:
                place.set_yscale("log")
            place.set_xticks(across, [str(a) for a in across])
            place.minorticks_off()
            place.grid(visible=True, alpha=0.3)
            if row == len(SERIES) - 1:
                place.set_xlabel(AXIS_NAMES[axis])
            if column == 0:
                place.set_ylabel(unit)
                place.legend(fontsize=8)
    axes[-1][0].set_ylim(bottom=0)
    plot.suptitle(f"3x3 convolutions of {BASE.channels} channels of {BASE.side}x{BASE.side}, {BASE.layers} layers")
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, dpi=90)


def show(axis: str, points: Sequence[Point], rows: Sequence[dict[str, Any]]) -> None:
    """Print the points of an axis."""
    for point, row in zip(points, rows, strict=True):
        print(
            f"{axis} {getattr(point, axis)}: online {figure(1e3 * row['online_s'])} ms, server "
            f"{figure(1e3 * row['server_s'])}, float64 {figure(1e3 * row['floor_s'])}, preparation "
            f"{figure(1e3 * row['preparation_s'])} ms, {figure(row['bytes'] / 1e3)} kB of "
            f"{figure(row['floor_bytes'] / 1e3)} kB, hints {figure(row['hint_bytes'] / 1e6)} MB, memory "
            f"{row['server_memory'] / 1e6:.0f}, {row['node_memory'] / 1e6:.0f} MB",
            flush=True,
        )


def main() -> None:
    """Run, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks/results/growth.json")
    parser.add_argument(
        "--plot", type=Path, help="where to draw; nothing is drawn where neither this nor --docs is given"
    )
    parser.add_argument("--docs", action="store_true", help="write the plot to docs/growth.png")
    arguments = parser.parse_args()
    measured: dict[Point, dict[str, Any]] = {}
    results = {}
    for axis, points in AXES.items():
        for point in points:
            if point not in measured:
                measured[point] = measure(point)
        results[axis] = [measured[p] for p in points]
        show(axis, points, results[axis])
    content = {"machine": machine_name(), "cores": core_count(), "results": results}
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    for path in (arguments.plot, REPOSITORY / "docs/growth.png" if arguments.docs else None):
        if path is not None:
            draw(results, path)


if __name__ == "__main__":
    main()
