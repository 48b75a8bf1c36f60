"""heinfer beside what a user would pick instead: same models, inputs and cores, on one machine.

    python benchmarks/side_by_side.py [--only tutorial mlp ...] [--peers onnxruntime ...] [--json PATH] [--docs]

    models, inputs --> files --> heinfer (prepared, standard) | every peer, in an environment of its own --> table

Contenders of a model run one after the other. A peer has at most 16 GiB and a deadline; its cell may say "not
expressible", "out of memory" or "timeout", and the reason is below the table and in the JSON. Environments of peers are
built first (benchmarks/peers/environments.py), and stay. What the JSON has of models that are not
in --only stays. --docs writes the table into README.md and docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from comparison_table import figure, insert, render, seconds
from example_models import read_cifar, write_matrix, write_mlp, write_resnet20, write_tutorial_cnn
from own_figures import measure

from heinfer.client.environment import machine_name, versions
from heinfer.processes import core_count

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY / "benchmarks/peers"))

from running import PEERS, Limits, run_peer  # noqa: E402 - peers are scripts, no package

#: Seconds in which a peer asks queries, and until it is ended: of a model, and where not given.
BUDGET_S, TIMEOUT_S, TIMEOUTS_S = 15.0, 240.0, {"resnet20": 120.0, "matrix": 150.0}
#: Samples that peers get: latency from the first ones, error over all.
PEER_SAMPLES = 32


@dataclass(frozen=True)
class Case:
    """A model of the comparison.

    Attributes:
        title: what it is.
        write: writes it to a path, and returns where it is.
        samples: of our throughput.
        standard: likewise in standard mode; 0: not measured, since ResNet-20 then moves gigabytes a query, minutes.
        batch_hints: whether ours has hints for batches: they take 12.8 KB for every value that comes back.
    """

    title: str
    write: Callable[[Path], Path]
    samples: int
    standard: int
    batch_hints: bool = True


def cases(shared: Path) -> dict[str, Case]:
    """Return the models by name; those that need what lies in `shared` only where it is there."""
    found = {
        "tutorial": Case("CNN of TenSEAL's tutorial, ReLU", write_tutorial_cnn, 10_000, 10_000),
        "lenet5": Case(
            "LeNet-5, MNIST", lambda _: REPOSITORY / "models/released/mnist_lenet5/model.onnx", 10_000, 4096
        ),
        "mlp": Case("MLP 784-64-10, ReLU", write_mlp, 10_000, 10_000),
        "matrix": Case("one vector times 512x512", write_matrix, 10_000, 10_000),
    }
    if (shared / "models/resnet20_cifar10.npz").exists():
        found["resnet20"] = Case("ResNet-20, CIFAR-10", lambda p: write_resnet20(shared, p), 1000, 0, False)
    return found


def inputs(name: str, count: int, shared: Path) -> np.ndarray:
    """Return samples: real images where `shared` has them, evenly distributed values otherwise."""
    rng = np.random.default_rng(0)
    if name == "matrix":
        return rng.standard_normal((count, 512)).astype(np.float32)
    if name == "resnet20":
        x, _ = read_cifar(shared)
        return np.resize(x, (count, *x.shape[1:]))
    if (shared / "data/mnist.npz").exists():
        with np.load(shared / "data/mnist.npz") as archive:
            x = archive["test_images"][:count].astype(np.float32) / 255
    else:
        x = rng.random((count, 28, 28)).astype(np.float32)
    return x.reshape(count, 784) if name == "mlp" else x[:, None]


def compare(
    name: str, case: Case, shared: Path, peers: list[str], folder: Path, deadline: float
) -> list[dict[str, Any]]:
    """Return the cells of a model; peers whose turn comes after the deadline are not run, and say so."""
    model = case.write(folder / f"{name}.onnx")
    x = inputs(name, case.samples, shared)
    sample_file = folder / f"{name}.npz"
    np.savez(sample_file, x=x[:PEER_SAMPLES])
    cells = []
    for mode, count, hints in (("prepared", case.samples, case.batch_hints), ("standard", case.standard, False)):
        if not count:
            continue
        cells.append(measure(model, x[:count], mode, hints) | {"model": name})
        _tell(cells[-1])
    for peer in peers:
        left_s = min(TIMEOUTS_S.get(name, TIMEOUT_S), deadline - time.perf_counter())
        if left_s < BUDGET_S:
            cells.append({"peer": peer, "model": name, "status": "not run", "reason": "no time was left (--minutes)"})
        else:
            found = run_peer(PEERS[peer], model, sample_file, folder / "result.json", Limits(BUDGET_S, left_s))
            cells.append(asdict(found) | {"model": name, "status": str(found.status)})
        _tell(cells[-1])
    return cells


def _tell(cell: dict[str, Any]) -> None:
    rate, latency = cell.get("throughput_per_s"), cell.get("latency_s")
    found = f"{seconds(float(np.median(latency)))} a query" if latency else cell["status"]
    print(f"  {cell['peer']}: {found}{f', {figure(rate)} samples/s' if rate else ''}", file=sys.stderr, flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared", help="data sets and ResNet-20")
    parser.add_argument("--only", nargs="*", help="models")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks/results/side_by_side.json")
    parser.add_argument("--docs", action="store_true", help="write the table into README.md and docs/performance.md")
    parser.add_argument("--minutes", type=float, default=33, help="after which no further peer is run")
    arguments = parser.parse_args()
    known = cases(arguments.shared)
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"expected models of {', '.join(known)}, found {', '.join(sorted(unknown))}")
    started = time.perf_counter()
    deadline = started + 60 * arguments.minutes
    result: dict[str, Any] = {"models": {}}
    if arguments.json.exists():
        result = json.loads(arguments.json.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or known:
            print(known[name].title, file=sys.stderr, flush=True)
            found = compare(name, known[name], arguments.shared, arguments.peers, Path(folder), deadline)
            models = result["models"] | {name: found}
            result = {
                "machine": machine_name(),
                "cores": core_count(),
                "versions": versions(),
                "seconds": time.perf_counter() - started,
                "models": {key: models[key] for key in known if key in models},
            }
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    write(result, {name: case.title for name, case in known.items()}, arguments.docs)


def write(result: dict[str, Any], titles: dict[str, str], docs: bool) -> None:
    """Print the table, and put it into the documents where this is asked."""
    words: dict[str, list[str]] = {}
    for name, cells in result["models"].items():
        for cell in cells:
            if said := " ".join(filter(None, (cell.get("reason"), cell.get("note")))):
                words.setdefault(f"{cell['peer']}: {said}", []).append(titles[name])
    reasons = [f"- {about} ({'; '.join(models)})" for about, models in words.items()]
    where = f"{result['machine']}, {result['cores']} cores.\n\n"
    table = where + render(result["models"], titles)
    print(table)
    print("\n".join(reasons))
    if docs:
        insert(REPOSITORY / "README.md", "side by side", where + render(result["models"], titles, short=True))
        insert(REPOSITORY / "docs/performance.md", "side by side", table + "\n" + "\n".join(reasons) + "\n")


if __name__ == "__main__":
    main()
