"""Plain beside encrypted: LeNet-5 on all of MNIST, and the two models of HE-MAN-TenSEAL, unmodified.

    python benchmarks/encrypted_models.py [--shared ../shared] [--json benchmarks/results/encrypted_models.json]

Needs the folder shared (MNIST and the models that others trained). Each model is partitioned into a temporary folder
and evaluated by `heinfer evaluate`'s own function: three processes, real sockets.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

import heinfer

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.shared.is_dir():
        print(f"{arguments.shared} is missing: nothing to measure")
        return
    with np.load(arguments.shared / "data/mnist.npz") as archive:
        x = archive["test_images"].astype(np.float32)[:, None] / 255
        y = archive["test_labels"].astype(np.int64)
    padded = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)))[:2000]
    cases = {
        "mnist_lenet5": (REPOSITORY / "models/released/mnist_lenet5/model.onnx", x, y),
        "heman_lenet5": (arguments.shared / "models/heman_lenet5.onnx", padded, y[:2000]),
        "heman_cryptonets": (arguments.shared / "models/heman_cryptonets.onnx", padded, y[:2000]),
    }
    results = {}
    for name, (model, samples, labels) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            heinfer.partition(model, Path(folder) / "bundle")
            report = heinfer.evaluate(Path(folder) / "bundle", samples, labels)
        results[name], costs = report.to_dict(), report.costs
        print(
            f"{name}: {report.samples} samples in {costs.seconds:.1f} s, accuracy {report.accuracy_plain:.2%} plain, "
            f"{report.accuracy_encrypted:.2%} encrypted, agreement {report.agreement:.2%}, largest error "
            f"{report.max_abs_error:.1e}, one query {costs.latency_s:.2f} s ({report.machine}, {report.cores} cores)",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
