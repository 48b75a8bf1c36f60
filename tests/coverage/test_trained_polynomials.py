"""Networks whose activations were replaced in training are taken as exact polynomials by the partitioner.

The oracle is onnxruntime on the exported model: at full depth, the block's integers and polynomials evaluated in the
clear differ from it by rounding alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from heinfer.plan.execution import PlanRunner, plain_rounds  # noqa: E402
from heinfer.ring import RingParameters  # noqa: E402
from heinfer.training.export import export_network, run_model  # noqa: E402
from heinfer.training.polynomials import freeze, replace_activations  # noqa: E402
from heinfer.training.recipe import Polynomials  # noqa: E402
from partitioner.deep.deepening import DeepOptions, deepen  # noqa: E402
from partitioner.pipeline import partition_in_memory  # noqa: E402

#: Activations have 2**32 to their range, in sums of up to a hundred terms; onnxruntime computes in float32.
RELATIVE_ERROR = 1e-4


def make_network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 4)
    )


@pytest.mark.parametrize("degree", [2, 3, 7])
def test_partition_finds_trained_polynomials_exactly(degree: int, tmp_path: Path) -> None:
    images = torch.rand(300, 1, 10, 10, generator=torch.Generator().manual_seed(1))
    network = make_network()
    settings = Polynomials(start="unused", degree=degree, average_pooling=True)
    replace_activations(network, images, settings)
    model = export_network(freeze(network), (1, 10, 10))
    onnx.save_model(model, tmp_path / "model.onnx")

    _, draft, _ = partition_in_memory(tmp_path / "model.onnx", RingParameters.default())
    calibration: dict[str, Any] = {"image": images[:200].numpy()}
    deep = deepen(draft, DeepOptions("all", calibration))
    (block,) = deep.deep
    assert [(a.degree, a.exact) for a in block.activations] == [(degree, True)] * 2
    inputs = images[200:].numpy()
    runner = PlanRunner(deep.plan, deep.submodels)
    found = runner.run({"image": inputs}, plain_rounds(deep.plan, deep.reference()))["logits"]
    expected = run_model(model, inputs)
    assert np.abs(found - expected).max() < RELATIVE_ERROR * np.abs(expected).max()
