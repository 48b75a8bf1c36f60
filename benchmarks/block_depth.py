"""The curves of docs/block-depth.md: from exact activations on the node to fully encrypted, for four networks.

    python benchmarks/block_depth.py --work FOLDER [--only CASE ...] [--docs]     hours; goes on where it was stopped

    models/released, MNIST of ../shared --> heinfer study block-depth --> study.json --> results, tables, rule of thumb

2,000 test images; ranges from 2,000 of the first 20,000 training images. The rule of thumb takes measured seconds of
one query and of an image, and adds round trips and bytes of a network: a LAN of 1 Gbit/s and 1 ms, a WAN of 100 Mbit/s
and 50 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from comparison_table import figure, insert, line, seconds, size

from heinfer.client.depth_study import batch_bytes
from heinfer.plan import read_bundle_plan
from heinfer.plan.forecast import prepared_bytes

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLES, TRAINING = 2000, 20_000


@dataclass(frozen=True)
class Case:
    """A study.

    Attributes:
        title: what it is.
        model: name of a released model, or of one in shared/models.
        degree: of every polynomial; None: chosen by the partitioner.
        encrypted: or simulated.
        depths: as `heinfer study block-depth` takes them.
        padding: pixels around the images.
    """

    title: str
    model: str
    degree: int | None = None
    encrypted: bool = True
    depths: str = "0,1,2,3,all"
    padding: int = 0


CASES = {
    "lenet5": Case("LeNet-5, average pooling, as it is, degree 2", "mnist_lenet5_average", 2),
    "lenet5-tuned": Case("LeNet-5, average pooling, fine-tuned with degree 2", "mnist_lenet5_degree2"),
    "tanh": Case("tanh CNN, as it is, degree 3", "mnist_tanh_average", 3),
    "tanh-tuned": Case("tanh CNN, fine-tuned with degree 3", "mnist_tanh_degree3"),
    "heman": Case("LeNet-5 of HE-MAN-TenSEAL, as it is, degree 2", "heman_lenet5", 2, depths="all", padding=2),
    "lenet5-chosen": Case(
        "LeNet-5, average pooling, as it is, degrees chosen, simulated", "mnist_lenet5_average", None, encrypted=False
    ),
    "tanh-chosen": Case("tanh CNN, as it is, degrees chosen, simulated", "mnist_tanh_average", None, encrypted=False),
    "heman-chosen": Case(
        "LeNet-5 of HE-MAN-TenSEAL, as it is, degrees chosen, simulated",
        "heman_lenet5",
        None,
        encrypted=False,
        padding=2,
    ),
}
#: Bits a second, and seconds of a round trip.
NETWORKS = {"LAN": (1e9, 0.001), "WAN": (1e8, 0.05)}


def write_data(shared: Path, folder: Path, padding: int) -> tuple[Path, Path]:
    """Write test and training images as `heinfer study` takes them: uint8, shape (samples, 1, side, side)."""
    test, train = folder / f"test-{padding}.npz", folder / f"train-{padding}.npz"
    border = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    with np.load(shared / "data/mnist.npz") as archive:
        np.savez(
            test,
            x=np.pad(archive["test_images"][:, None], border),
            y=archive["test_labels"].astype(np.int64),
        )
        np.savez(train, x=np.pad(archive["train_images"][:TRAINING, None], border))
    return test, train


def run(case: Case, shared: Path, folder: Path, data: tuple[Path, Path]) -> dict[str, Any]:
    """Run a study, or read what it found, and return it."""
    model = REPOSITORY / f"models/released/{case.model}/model.onnx"
    if not model.exists():
        model = shared / f"models/{case.model}.onnx"
    options = ["--encrypted" if case.encrypted else "--simulate", "--depths", case.depths]
    options += [] if case.degree is None else ["--degree", str(case.degree)]
    command = [sys.executable, "-m", "heinfer.cli.main", "study", "block-depth", str(model), "--data", str(data[0])]
    command += ["--calibration", str(data[1]), "--divide", "255", "--samples", str(SAMPLES), "-o", str(folder)]
    subprocess.run([*command, *options], check=True)
    study: dict[str, Any] = json.loads((folder / "study.json").read_text())
    for row in study["rows"]:
        if row["refusal"] is None:
            row |= _one_query(folder / f"depth-{row['depth']}/bundle")
    return study


def _one_query(bundle: Path) -> dict[str, int]:
    """Return the bytes of one sample, both ways: prepared mode where there are no deep blocks."""
    plan = read_bundle_plan(bundle)
    return {"query_bytes": sum(batch_bytes(plan, 1)) if plan.deep else prepared_bytes(plan)}


def table(study: dict[str, Any]) -> str:
    """Return the curve as Markdown."""
    encrypted = study["task"]["encrypted"]
    names = ["d", "rounds", "degrees", "N", "accuracy", "agreement", "largest error", "mean error"]
    names += ["up, down, a full batch"]
    names += ["one query", "an image, slots full", "server, node: peak memory"] if encrypted else []
    lines = [line(names), "|" + "---|" * len(names)]
    for row in study["rows"]:
        if row["refusal"] is not None:
            lines.append(line([row["depth"], "refused", *[""] * (len(names) - 2)]))
            continue
        same = row["same_as"]
        cells = [row["depth"] if same is None else f"{row['depth']} (as {same})", str(row["rounds"])]
        cells += [", ".join(map(str, row["polynomials"])) or "-", f"{row['ring']:,}" if row["ring"] else "-"]
        cells += [f"{row['accuracy']:.2%}", f"{row['agreement']:.2%}"]
        cells += [f"{row['max_error']:.1e}", f"{row['mean_error']:.1e}"]
        cells += [f"{size(row['batch_bytes_up'])}, {size(row['batch_bytes_down'])} of {row['batch_samples']:,}"]
        if encrypted:
            memory = row["memory_bytes"]
            cells += [seconds(row["latency_s"]), seconds(row["full_image_s"])]
            cells += [", ".join(size(memory[role]) for role in ("server", "node"))]
        lines.append(line(cells))
    return "\n".join(lines) + "\n"


def network_table(studies: dict[str, dict[str, Any]]) -> str:
    """Return what one query and an image of a full batch take over networks, from measured times, rounds and bytes."""
    names = ["", "d", "accuracy"]
    names += [f"one query, {n}" for n in NETWORKS] + [f"images a second, {n}" for n in NETWORKS]
    lines = [line(names), "|" + "---|" * len(names)]
    for name, study in studies.items():
        for row in study["rows"]:
            if row["refusal"] is not None or row["same_as"] is not None or not study["task"]["encrypted"]:
                continue
            cells = [CASES[name].title, row["depth"], f"{row['accuracy']:.2%}"]
            image = (row["batch_bytes_up"] + row["batch_bytes_down"]) / row["batch_samples"]
            for bandwidth, trip in NETWORKS.values():
                cells.append(seconds(row["latency_s"] + row["rounds"] * trip + 8 * row["query_bytes"] / bandwidth))
            for bandwidth, trip in NETWORKS.values():
                each = row["full_image_s"] + row["rounds"] * trip / row["batch_samples"] + 8 * image / bandwidth
                cells.append(figure(1 / each))
            lines.append(line(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared")
    parser.add_argument("--work", type=Path, required=True, help="studies lie there, and are gone on with")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks/results/block_depth.json")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/block-depth.md")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    studies: dict[str, dict[str, Any]] = {}
    if arguments.json.exists():
        studies = json.loads(arguments.json.read_text())
    for name in arguments.only:
        case = CASES[name]
        data = write_data(arguments.shared, arguments.work, case.padding)
        studies[name] = run(case, arguments.shared, arguments.work / name, data)
        studies = {key: studies[key] for key in CASES if key in studies}
        arguments.json.write_text(json.dumps(studies, indent=1) + "\n")
    for name, study in studies.items():
        print(f"\n{CASES[name].title}: plain model {study['accuracy_plain']:.2%}\n\n{table(study)}")
        if arguments.docs:
            insert(REPOSITORY / "docs/block-depth.md", name, table(study))
    print(network_table(studies))
    if arguments.docs:
        insert(REPOSITORY / "docs/block-depth.md", "networks", network_table(studies))


if __name__ == "__main__":
    main()
