"""Releases: a folder with the model, a card that says how it came about, and sample images to try it on.

    model.onnx    the network (see `heinfer.training.export`)
    card.json     recipe, accuracy, data and their licence, privacy, versions (see `make_card`)
    samples.npz   the first test records, 1,000 unless the recipe says otherwise: `x` float32 (records, *input_shape),
                  as the model takes them, `y` int64 (records,)

The folder appears complete or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from rich.progress import Progress

from heinfer.errors import HeinferError, InputError
from heinfer.training.architectures import find_architecture
from heinfer.training.datasets.dataset import Dataset, model_inputs
from heinfer.training.datasets.loading import load_dataset
from heinfer.training.export import export_network, run_model
from heinfer.training.interface import describe_interface
from heinfer.training.recipe import Recipe, read_recipe, recipe_to_json
from heinfer.training.trainer import Adaptation, train

_logger = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"
CARD_FILE = "card.json"
SAMPLES_FILE = "samples.npz"
CARD_FORMAT = 1

PRIVACY_NOTE = (
    "Trained without differential privacy: epsilon is null because there is no bound on what the weights reveal about "
    "the training records. Release such a model only where its training data are public."
)
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


class AccuracyFloorError(HeinferError):
    """A trained model is less accurate than its recipe demands and is not released."""


def release(recipe_path: Path, data_path: Path, output_dir: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Read a recipe and data, and do as `release_model`, which see.

    Raises:
        InputError: also where the recipe or the data are unusable.
    """
    recipe = read_recipe(recipe_path)
    find_architecture(recipe.architecture)  # before the data are read
    return release_model(recipe, load_dataset(recipe.data, data_path), output_dir, progress)


def release_model(recipe: Recipe, data: Dataset, output_dir: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Train a model without privacy, export it and write its folder.

    Args:
        recipe: without a table [privacy].
        data: what to train and test on.
        output_dir: the folder to make; an earlier release there is replaced.
        progress: a bar made by `heinfer.training.trainer.training_progress` and already started, or None.

    Returns:
        The card, as written to card.json.

    Raises:
        InputError: the recipe does not fit the data, or `output_dir` is not writable or holds something else than a
            release.
        AccuracyFloorError: the test accuracy is below the recipe's floor; nothing is written.
        ExportError: the exported model does not compute what the network computes.
    """
    _check_replaceable(output_dir)
    with _staged(output_dir) as folder:  # made before training, so that a place that is not writable is noticed
        card = _train_into(folder, recipe, data, progress)
    _logger.info("released %s, test accuracy %.4f", recipe.name, card["accuracy"])
    return card


def _train_into(folder: Path, recipe: Recipe, data: Dataset, progress: Progress | None) -> dict[str, Any]:
    """Train and write the three files."""
    trained = train(recipe, data, progress)
    if trained.test_accuracy < recipe.accuracy_floor:
        raise AccuracyFloorError(
            f"{recipe.name} reached a test accuracy of {trained.test_accuracy:.4f}, its recipe demands "
            f"{recipe.accuracy_floor:.4f}: train longer, change the recipe, or lower accuracy_floor"
        )
    model = export_network(trained.network, data.input_shape)
    card = make_card(recipe, data, _correct_answers(model, data), trained.adaptation)
    onnx.save_model(model, folder / MODEL_FILE)
    (folder / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    np.savez_compressed(
        folder / SAMPLES_FILE,
        x=model_inputs(data.test.inputs[: recipe.output.samples]),
        y=data.test.labels[: recipe.output.samples],
    )
    return card


def make_card(
    recipe: Recipe, data: Dataset, correct: NDArray[np.bool_], adaptation: Adaptation | None = None
) -> dict[str, Any]:
    """Say what the model is and how it came about.

    Args:
        recipe: what was trained.
        data: what it was trained and tested on.
        correct: for every test record, whether the exported model classifies it correctly.
        adaptation: how it came to have polynomials, where it has.

    Returns:
        The contents of card.json.
    """
    samples = correct[: recipe.output.samples]
    return {
        "format": CARD_FORMAT,
        "name": recipe.name,
        "architecture": recipe.architecture,
        "recipe": recipe_to_json(recipe),
        "seed": recipe.seed,
        "epsilon": None,
        "privacy": PRIVACY_NOTE,
        "dataset": recipe.data.name,
        "data_license": recipe.data.license,
        "data_credit": recipe.data.credit,
        "data_fingerprint": data.fingerprint(),
        "train_images": len(data.train) - recipe.held_out_images,
        "test_images": len(correct),
        "accuracy": float(correct.mean()),
        **({} if adaptation is None else {"polynomials": dataclasses.asdict(adaptation)}),
        "samples": {
            "file": SAMPLES_FILE,
            "images": len(samples),
            "accuracy": float(samples.mean()) if len(samples) else None,
        },
        **describe_interface(data),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
    }


def _correct_answers(model: onnx.ModelProto, data: Dataset) -> NDArray[np.bool_]:
    """For every test record, whether the exported model classifies it correctly."""
    predicted = run_model(model, model_inputs(data.test.inputs)).argmax(axis=1)
    return np.asarray(predicted == data.test.labels)


def _check_replaceable(folder: Path) -> None:
    """Refuse, before the training, to replace anything but an earlier release."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder for the release")
    others = sorted({entry.name for entry in folder.iterdir()} - {MODEL_FILE, CARD_FILE, SAMPLES_FILE})
    if others:
        raise InputError(f"{folder} holds {', '.join(others)}, not just a release; name another folder")


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder to write into, renamed to `folder` when the block ends well and removed when it does not."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    replaced = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder.parent}: {error.strerror}; name another folder") from error
    try:
        yield staging
        if folder.exists():
            folder.rename(replaced)
        staging.rename(folder)
    except BaseException:
        if replaced.exists():
            replaced.rename(folder)
        raise
    finally:
        for leftover in (staging, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
