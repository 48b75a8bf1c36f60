"""Recipes: everything that decides a training run, read from TOML, checked once and immutable afterwards.

A recipe and the data determine the trained weights (on one machine, with one version of torch). Unknown keys are
refused, so that a misspelt setting cannot be ignored in silence.
"""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from heinfer.errors import InputError

_CONFIG = ConfigDict(extra="forbid")

_Text = Annotated[str, Field(strict=True, min_length=1)]
_Count = Annotated[int, Field(strict=True, ge=1)]
_Natural = Annotated[int, Field(strict=True, ge=0)]
_Rate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class Schedule(StrEnum):
    """How the learning rate moves during training, step by step."""

    ONE_CYCLE = "one-cycle"  #: up to the peak in the first 30 % of the steps, then down to nearly nothing
    COSINE = "cosine"  #: from the peak down to zero along half a cosine


@dataclass(frozen=True, slots=True, config=_CONFIG)
class DataSource:
    """Where the images come from, for the card, and under which keys the .npz file holds them.

    Attributes:
        name: the data set's name.
        license: the licence under which the images are distributed.
        credit: whom to name as their authors.
        train_images: key of the training images, uint8, shape (images, height, width).
        train_labels: key of their labels, uint8, shape (images,).
        test_images: key of the test images.
        test_labels: key of their labels.
    """

    name: _Text
    license: _Text
    credit: _Text
    train_images: _Text = "train_images"
    train_labels: _Text = "train_labels"
    test_images: _Text = "test_images"
    test_labels: _Text = "test_labels"


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Augmentation:
    """Random changes of each training image, drawn anew in every epoch.

    Attributes:
        shift_pixels: largest shift along each axis, uniform.
        rotation_degrees: largest rotation about the centre in either direction, uniform.
    """

    shift_pixels: Annotated[float, Field(strict=True, ge=0, le=8)] = 0.0
    rotation_degrees: Annotated[float, Field(strict=True, ge=0, le=180)] = 0.0


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Recipe:
    """A training run.

    Attributes:
        name: name of the released model: lower case letters, digits and underscores.
        architecture: one of `heinfer.training.architectures.ARCHITECTURES`.
        data: the data set.
        epochs: passes over the training images.
        batch_size: images per step; the last step of an epoch may have fewer.
        learning_rate: peak learning rate of AdamW.
        schedule: how the learning rate moves.
        weight_decay: decoupled weight decay of AdamW.
        held_out_images: training images kept aside to watch the accuracy during training.
        augmentation: random changes of the training images.
        seed: decides initial weights, held-out images, order and augmentation.
        accuracy_floor: a model whose test accuracy, in [0, 1], is lower is not released.
    """

    name: Annotated[str, Field(strict=True, pattern=r"^[a-z0-9_]+$")]
    architecture: _Text
    data: DataSource
    epochs: _Count
    batch_size: _Count
    learning_rate: _Rate
    schedule: Schedule
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    accuracy_floor: _Fraction
    weight_decay: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    held_out_images: _Natural = 0
    augmentation: Augmentation = Augmentation()


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML file.

    Raises:
        InputError: the file is missing, is not TOML, or holds a setting that is unknown, missing or out of range;
            the message lists all of them.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the recipe {path} is not valid TOML: {error}") from error
    return parse_recipe(settings, origin=str(path))


def parse_recipe(settings: dict[str, Any], origin: str = "recipe") -> Recipe:
    """Check settings as TOML yields them.

    Args:
        settings: nested tables of the recipe.
        origin: named in messages.

    Raises:
        InputError: as `read_recipe`.
    """
    try:
        return TypeAdapter(Recipe).validate_python(settings)
    except ValidationError as error:
        lines = [f"  - {'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()]
        raise InputError("\n".join([f"{origin} has {len(lines)} unusable settings; correct them:", *lines])) from error
