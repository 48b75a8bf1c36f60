from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import local
from heinfer.plan import NodeStep
from heinfer.plan.execution import open_original
from partitioner import partition
from tests.coverage.light_models import NAMES, image, light_model, with_logits

#: Largest error of what enters the final Softmax, relative to the largest value there.
TOLERANCE = 1e-2
#: Single precision sums in another order; what `partitioner.verification` grants.
FLOAT32_ORDER = 1e-4
ENCRYPTED = ("squeezenet", "shufflenet", "densenet121", "resnet50")


def check_partition(name: str, folder: Path) -> None:
    """Partition an architecture: every convolution and dense layer is on the server, in prepared mode.

    Of a normalisation the node may have what is left when its gains have moved into weights.
    """
    model = light_model(name)
    path = folder / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    found = partition(path, folder / "bundle", reference=False)
    path.unlink()
    kinds = Counter(step.kind for block in found.plan.blocks for step in block.program.steps)
    layers = Counter(node.op_type for node in model.graph.node)
    assert kinds["conv"] == layers["Conv"]
    assert kinds["matmul"] == layers["Gemm"]
    steps = [step for step in found.plan.steps if isinstance(step, NodeStep)]
    on_node = {name: why for step in steps for name, why in zip(step.operators, step.reasons, strict=True)}
    assert not [name for name in on_node if name.endswith(("(Conv)", "(Gemm)", "(MatMul)"))]
    normalisations = [why for name, why in on_node.items() if name.endswith("(BatchNormalization)")]
    assert all("gains are in the weights behind it" in why for why in normalisations)
    assert found.plan.has_prepared_mode
    assert found.difference <= FLOAT32_ORDER


def check_encrypted(name: str, folder: Path) -> None:
    """Answer one image under encryption, by two processes, and compare what enters the final Softmax."""
    model = light_model(name)
    logits = with_logits(model)
    content = model.SerializeToString()
    (folder / f"{name}.onnx").write_bytes(content)
    partition(folder / f"{name}.onnx", folder / "bundle", reference=False)
    session = open_original(content)
    feeds = {session.get_inputs()[0].name: image()}
    (want,) = session.run([logits], feeds)
    with local(folder / "bundle", mode="prepared", prepared=1) as served:
        found = served.query(feeds).outputs[logits]
    largest = np.max(np.abs(want))
    assert np.isfinite(largest)
    assert np.std(want) > 0.05 * largest  # nothing has vanished: the error is measured against values that differ
    assert np.max(np.abs(found - want)) <= TOLERANCE * largest


@pytest.mark.slow
def test_squeezenet_at_224_encrypted_is_close_to_onnxruntime(tmp_path: Path) -> None:
    check_encrypted("squeezenet", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_architecture_partitions_with_all_its_weights_on_the_server(name: str, tmp_path: Path) -> None:
    check_partition(name, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ENCRYPTED)
def test_architecture_at_224_encrypted_is_close_to_onnxruntime(name: str, tmp_path: Path) -> None:
    check_encrypted(name, tmp_path)
