"""Bundles with a deep block that tests of several parties share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from partitioner import partition
from partitioner.deep.building import FitOptions
from partitioner.deep.deepening import DeepOptions
from tests.partitioner.examples import graph, weights


def partition_square(folder: Path) -> tuple[Path, np.ndarray]:
    """Partition x (3) -> Gemm -> square -> Gemm -> y (2), one deep block of 4 and 2 rows.

    Returns:
        The bundle, in the folder, and the calibration data: float32, shape (200, 3).
    """
    model = graph(
        "g (float[n,3] x) => (float y) { d = Gemm (x, w, b) q = Mul (d, d) y = Gemm (q, v, c) }",
        {"w": weights(3, 4), "b": weights(4), "v": weights(4, 2), "c": weights(2)},
    )
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    x = np.random.default_rng(0).uniform(-1, 1, (200, 3)).astype(np.float32)
    partition(folder / "model.onnx", folder / "bundle", deep=DeepOptions("all", {"x": x}, FitOptions()))
    return folder / "bundle", x
