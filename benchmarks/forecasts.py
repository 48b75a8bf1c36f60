"""Forecasts beside measurements: time and bytes of six models under real encryption.

    python benchmarks/forecasts.py [--rounds 3] [--only lenet5 ...] [--json benchmarks/results/forecasts.json]

Released LeNet-5, four architectures of tests/coverage as torch exports them, and SqueezeNet at 224x224. For each model
and round the machine's constants are measured, then single queries with masks prepared before, and queries of many
samples that find nothing prepared. A shared machine's speed changes from minute to minute: forecasts are made of the
medians of all constants found during the run, and compared with the medians of what was measured during it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch

import heinfer
from heinfer.cli.calibration import calibrate
from heinfer.client.environment import machine_name
from heinfer.plan import Plan, read_bundle_plan
from heinfer.plan.forecast import POOL_ENTRIES, forecast
from heinfer.plan.machine import Machine
from heinfer.processes import core_count

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.coverage.architectures import ARCHITECTURES  # noqa: E402
from tests.coverage.light_models import light_model  # noqa: E402

MODELS = ("lenet5", "lstm", "unet", "mobilenet_v2", "transformer", "squeezenet")
#: Single queries in a row, fewer than the pool has entries.
QUERIES = 15
#: Samples of the larger query, and how often it is asked.
BATCHES, REPETITIONS = {"squeezenet": 4}, 3
DEFAULT_BATCH = 64
#: What a pool gets to fill up, in times of preparing one.
FILL = 2.0


def write_model(name: str, path: Path) -> None:
    if name == "lenet5":
        path.write_bytes((REPOSITORY / "models/released/mnist_lenet5/model.onnx").read_bytes())
    elif name == "squeezenet":
        onnx.save(light_model(name), path)
    else:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        architecture = ARCHITECTURES[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                architecture.network(), architecture.examples(), dynamo=True, external_data=False, verbose=False
            )
        assert exported is not None
        onnx.save(exported.model_proto, path)


def samples_of(plan: Plan, count: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {t.name: generator.normal(size=(count, *t.shape)).astype(t.dtype) for t in plan.inputs}


def timed(model: heinfer.LocalModel, x: dict[str, np.ndarray], count: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the median seconds of queries, and their statistics."""
    seconds, found = [], []
    for _ in range(count):
        started = time.perf_counter()
        found.append(model.query(x, statistics=True).statistics)
        seconds.append(time.perf_counter() - started)
    return median(seconds), found


def measure(name: str, bundle: Path) -> dict[str, float]:
    plan = read_bundle_plan(bundle)
    batch = BATCHES.get(name, DEFAULT_BATCH)
    with heinfer.local(bundle, mode="prepared", prepared=POOL_ENTRIES) as model:
        one = samples_of(plan, 1)
        preparation_s = model.query(one, statistics=True).statistics["background_s"]
        time.sleep(FILL * POOL_ENTRIES * preparation_s)
        online_s, found = timed(model, one, QUERIES)
        preparation_s = median(s["background_s"] for s in found)
        memory = {role.name: role.peak_memory_bytes() or 0 for role in model.roles}
    with heinfer.local(bundle, mode="prepared", prepared=0) as model:
        batch_s, _ = timed(model, samples_of(plan, batch), REPETITIONS)
    return {
        "online_s": online_s,
        "preparation_s": preparation_s,
        "batch_s": batch_s,
        "bytes": sum(block["bytes_up"] + block["bytes_down"] for block in found[-1]["blocks"]),
        "node_memory_bytes": memory["node"],
        "server_memory_bytes": memory["server"],
    }


def predict(name: str, bundle: Path, machine: Machine) -> dict[str, float]:
    plan = read_bundle_plan(bundle)
    one = forecast(plan, "prepared", 1, machine)
    many = forecast(plan, "prepared", BATCHES.get(name, DEFAULT_BATCH), machine)
    return {
        "online_s": one.online_s,
        "preparation_s": one.preparation_s,
        "batch_s": many.total_s,
        "bytes": one.bytes_up + one.bytes_down,
        "node_memory_bytes": one.node_memory_bytes,
        "server_memory_bytes": one.server_memory_bytes,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--bundles", type=Path, help="folder of bundles that exist already, named like the models")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machines: list[Machine] = []
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
    with tempfile.TemporaryDirectory() as folder:
        bundles = arguments.bundles or Path(folder)
        for name in arguments.only if arguments.bundles is None else ():
            write_model(name, bundles / f"{name}.onnx")
            heinfer.partition(bundles / f"{name}.onnx", bundles / name, reference=False)
        for _ in range(arguments.rounds):
            for name in arguments.only:
                machines.append(calibrate())
                measured[name].append(measure(name, bundles / name))
                print(f"{name}: {measured[name][-1]}", flush=True)
        machine = typical(machines)
        expected = {name: predict(name, bundles / name, machine) for name in arguments.only}
    seen = {name: {key: median(m[key] for m in all_) for key in all_[0]} for name, all_ in measured.items()}
    print("\nforecast, measured, forecast / measured")
    for name, figures in seen.items():
        parts = [f"{k} {expected[name][k]:.4g}, {v:.4g}, {expected[name][k] / v:.2f}" for k, v in figures.items()]
        print(f"{name}: {'; '.join(parts)}")
    if arguments.json is not None:
        results = {"machine": machine_name(), "cores": core_count(), "forecast": expected, "measured": measured}
        constants = [asdict(found) for found in machines]
        arguments.json.write_text(json.dumps({**results, "constants": constants}, indent=1) + "\n")


def typical(machines: list[Machine]) -> Machine:
    """Return a machine whose constants are the medians of several."""
    names = [field.name for field in fields(Machine) if field.name.endswith("_s")]
    return replace(machines[0], **{name: median(getattr(m, name) for m in machines) for name in names})


if __name__ == "__main__":
    main()
