"""Every model under models/released is what its card says. Needs onnxruntime, not torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

RELEASED = Path(__file__).parents[2] / "models" / "released"
FOLDERS = sorted(path.parent for path in RELEASED.glob("*/card.json"))
FIELDS = {
    "format", "name", "architecture", "recipe", "seed", "epsilon", "privacy", "dataset", "data_license", "data_credit",
    "data_fingerprint", "accuracy", "samples", "inputs", "outputs", "versions",
}  # fmt: skip
PRIVATE_FIELDS = {
    "epsilon_rdp", "delta", "adjacency", "accountant", "sampler", "sampling_probability", "noise", "clipping",
    "clip_norm", "steps", "public_data", "seeds", "checks", "private_fingerprint", "train_records", "test_records",
}  # fmt: skip


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def card(folder: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    return contents


def test_released_models_include_the_mnist_baseline() -> None:
    assert "mnist_lenet5" in {folder.name for folder in FOLDERS}


def test_released_card_is_complete(folder: Path, card: dict[str, Any]) -> None:
    assert set(card) >= FIELDS | (PRIVATE_FIELDS if card["recipe"].get("privacy") else set())
    assert card["name"] == folder.name == card["recipe"]["name"]
    assert card["accuracy"] >= card["recipe"]["accuracy_floor"]
    assert len(bytes.fromhex(card["data_fingerprint"])) == 32


def test_released_card_without_epsilon_says_that_training_was_not_private(card: dict[str, Any]) -> None:
    if card["epsilon"] is None:
        assert "without differential privacy" in card["privacy"]


def test_released_private_card_states_what_its_noise_costs(folder: Path, card: dict[str, Any]) -> None:
    """Checked with the accountant from the card's own noise, and the same card is inside the model."""
    if card["epsilon"] is None:
        pytest.skip("not private")
    accounting = pytest.importorskip("heinfer.training.privacy.accounting")
    mechanisms = pytest.importorskip("heinfer.training.privacy.mechanisms")
    taken = [
        mechanisms.SampledGaussian(multiplier, card["sampling_probability"], steps)
        for multiplier, steps in zip(card["noise"]["multipliers"], card["noise"]["steps"], strict=True)
    ]
    assert sum(event.steps for event in taken) == card["steps"]
    assert accounting.compute_epsilon(taken, card["delta"]) == pytest.approx(card["epsilon"], abs=1e-9)
    assert card["epsilon"] <= card["recipe"]["privacy"]["target_epsilon"]
    assert card["delta"] < 1 / card["train_records"]
    assert card["seed"] is None
    (entry,) = [p for p in onnx.load(folder / "model.onnx").metadata_props if p.key == "heinfer.card"]
    assert json.loads(entry.value) == card


def test_released_folder_is_small_and_self_contained(folder: Path) -> None:
    assert {entry.name for entry in folder.iterdir()} == {"model.onnx", "card.json", "samples.npz"}
    assert (folder / "model.onnx").stat().st_size < 500_000
    assert (folder / "samples.npz").stat().st_size < 700_000


def test_released_model_has_the_inputs_and_outputs_of_its_card(folder: Path, card: dict[str, Any]) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    for section, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
        found = {
            value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
            for value in values
        }
        assert found == {name: entry["shape"] for name, entry in card[section].items()}


def test_released_samples_are_unit_range_multiples_of_a_pixel_step(folder: Path, card: dict[str, Any]) -> None:
    with np.load(folder / card["samples"]["file"]) as samples:
        x, y = samples["x"], samples["y"]
    (entry,) = card["inputs"].values()
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert x.shape == (card["samples"]["images"], *entry["shape"][1:])
    assert y.shape == x.shape[:1]
    np.testing.assert_array_equal(np.rint(x * 255).astype(np.uint8).astype(np.float32) / np.float32(255), x)


def test_released_model_classifies_its_samples_as_its_card_says(folder: Path, card: dict[str, Any]) -> None:
    with np.load(folder / card["samples"]["file"]) as samples:
        x, y = samples["x"], samples["y"]
    (input_name,), (output_name,) = card["inputs"], card["outputs"]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # no threads that spin while they wait
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    correct = session.run([output_name], {input_name: x})[0].argmax(axis=1) == y
    # Another machine rounds differently: an image between two classes may change sides, hardly more than one.
    assert abs(int(correct.sum()) - round(card["samples"]["accuracy"] * len(y))) <= 1
    # The samples are drawn from the test images, so their accuracy varies around the card's by this deviation.
    deviation = math.sqrt(card["accuracy"] * (1 - card["accuracy"]) / len(y))
    assert abs(float(correct.mean()) - card["accuracy"]) <= 4 * deviation
