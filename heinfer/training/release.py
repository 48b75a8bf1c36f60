"""Releases: a folder with the model, a card that says how it came about, and sample images to try it on.

    model.onnx    the network (see `heinfer.training.export`)
    card.json     recipe, accuracy, data and their licence, privacy, versions (see `make_card`)
    samples.npz   the first 1,000 test images: `x` float32 (images, 1, height, width) in [0, 1], `y` int64 (images,)

The folder appears complete or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from rich.progress import Progress

from heinfer.errors import HeinferError, InputError
from heinfer.training.architectures import Architecture, find_architecture
from heinfer.training.data import ImageData, as_unit_range, load_images
from heinfer.training.export import INPUT_NAME, OUTPUT_NAME, export_network, run_model
from heinfer.training.recipe import Recipe, read_recipe
from heinfer.training.trainer import train

_logger = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"
CARD_FILE = "card.json"
SAMPLES_FILE = "samples.npz"
CARD_FORMAT = 1
SAMPLE_IMAGES = 1000

PRIVACY_NOTE = (
    "Trained without differential privacy: epsilon is null because there is no bound on what the weights reveal about "
    "the training records. Release such a model only where its training data are public."
)
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


class AccuracyFloorError(HeinferError):
    """A trained model is less accurate than its recipe demands and is not released."""


def release(recipe_path: Path, data_path: Path, output_dir: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Train a model, export it and write its folder.

    Args:
        recipe_path: a recipe in TOML.
        data_path: labelled images as .npz.
        output_dir: the folder to make; an earlier release there is replaced.
        progress: a bar made by `heinfer.training.trainer.training_progress` and already started, or None.

    Returns:
        The card, as written to card.json.

    Raises:
        InputError: the recipe or the data are unusable, or `output_dir` is not writable or holds something else than a
            release.
        AccuracyFloorError: the test accuracy is below the recipe's floor; nothing is written.
        ExportError: the exported model does not compute what the network computes.
    """
    recipe = read_recipe(recipe_path)
    architecture = find_architecture(recipe.architecture)
    data = load_images(data_path, recipe.data)
    _check_replaceable(output_dir)
    with _staged(output_dir) as folder:  # made before training, so that a place that is not writable is noticed
        card = _train_into(folder, recipe, architecture, data, progress)
    _logger.info("released %s, test accuracy %.4f", recipe.name, card["accuracy"])
    return card


def _train_into(
    folder: Path, recipe: Recipe, architecture: Architecture, data: ImageData, progress: Progress | None
) -> dict[str, Any]:
    """Train and write the three files."""
    trained = train(recipe, data, progress)
    if trained.test_accuracy < recipe.accuracy_floor:
        raise AccuracyFloorError(
            f"{recipe.name} reached a test accuracy of {trained.test_accuracy:.4f}, its recipe demands "
            f"{recipe.accuracy_floor:.4f}: train longer, change the recipe, or lower accuracy_floor"
        )
    model = export_network(trained.network, architecture.image_shape)
    card = make_card(recipe, architecture, data, _correct_answers(model, data))
    onnx.save_model(model, folder / MODEL_FILE)
    (folder / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    np.savez_compressed(
        folder / SAMPLES_FILE,
        x=as_unit_range(data.test_images[:SAMPLE_IMAGES]),
        y=data.test_labels[:SAMPLE_IMAGES].astype(np.int64),
    )
    return card


def make_card(
    recipe: Recipe, architecture: Architecture, data: ImageData, correct: NDArray[np.bool_]
) -> dict[str, Any]:
    """Say what the model is and how it came about.

    Args:
        recipe: what was trained.
        architecture: the recipe's architecture.
        data: what it was trained and tested on.
        correct: for every test image, whether the exported model classifies it correctly.

    Returns:
        The contents of card.json.
    """
    samples = correct[:SAMPLE_IMAGES]
    return {
        "format": CARD_FORMAT,
        "name": recipe.name,
        "architecture": recipe.architecture,
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "epsilon": None,
        "privacy": PRIVACY_NOTE,
        "dataset": recipe.data.name,
        "data_license": recipe.data.license,
        "data_credit": recipe.data.credit,
        "data_fingerprint": data.fingerprint(),
        "train_images": len(data.train_images) - recipe.held_out_images,
        "test_images": len(correct),
        "accuracy": float(correct.mean()),
        "samples": {"file": SAMPLES_FILE, "images": len(samples), "accuracy": float(samples.mean())},
        "inputs": {
            INPUT_NAME: {
                "dtype": "float32",
                "shape": ["batch", *architecture.image_shape],
                "meaning": "pixels divided by 255, in [0, 1]; the model normalises them itself",
            }
        },
        "outputs": {
            OUTPUT_NAME: {
                "dtype": "float32",
                "shape": ["batch", architecture.classes],
                "meaning": "one logit for each class; the largest is the predicted label",
            }
        },
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
    }


def _correct_answers(model: onnx.ModelProto, data: ImageData) -> NDArray[np.bool_]:
    """For every test image, whether the exported model classifies it correctly."""
    predicted = run_model(model, as_unit_range(data.test_images)).argmax(axis=1)
    return np.asarray(predicted == data.test_labels)


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
