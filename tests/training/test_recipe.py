"""Recipes are checked completely before anything is trained."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from heinfer.errors import InputError
from heinfer.training.recipe import Augmentation, Schedule, parse_recipe, read_recipe

RECIPES = Path(__file__).parents[2] / "models" / "recipes"
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "architecture": "lenet5",
    "epochs": 1,
    "batch_size": 32,
    "learning_rate": 0.01,
    "schedule": "cosine",
    "seed": 1,
    "accuracy_floor": 0.5,
    "data": {"name": "Synthetic", "license": "CC0", "credit": "nobody"},
}


def test_parse_recipe_minimal_settings_fills_in_defaults() -> None:
    recipe = parse_recipe(SETTINGS)
    assert recipe.schedule is Schedule.COSINE
    assert recipe.augmentation == Augmentation(shift_pixels=0, rotation_degrees=0)
    assert recipe.held_out_images == 0
    assert recipe.data.train_images == "train_images"


def test_parse_recipe_result_is_immutable() -> None:
    recipe = parse_recipe(SETTINGS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../escape"),
        ("name", "two words"),
        ("architecture", ""),
        ("epochs", 0),
        ("epochs", "3"),
        ("epochs", 1.5),
        ("epochs", True),
        ("batch_size", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("schedule", "linear"),
        ("weight_decay", -0.1),
        ("held_out_images", -1),
        ("seed", -1),
        ("accuracy_floor", 98.8),
        ("augmentation", {"shift_pixels": -1.0}),
        ("augmentation", {"rotation_degrees": 181.0}),
        ("augmentation", {"flip": True}),
        ("data", {"name": "MNIST", "license": "CC BY-SA 3.0"}),
        ("momentum", 0.9),
    ],
)
def test_parse_recipe_unusable_setting_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"1 unusable.*\n.*{key}"):
        parse_recipe({**SETTINGS, key: value})


@pytest.mark.parametrize("key", sorted(SETTINGS))
def test_parse_recipe_missing_setting_is_refused_by_name(key: str) -> None:
    settings = copy.copy(SETTINGS)
    del settings[key]
    with pytest.raises(InputError, match=rf"- {key}: .*required"):
        parse_recipe(settings)


def test_parse_recipe_several_errors_lists_every_one() -> None:
    with pytest.raises(InputError) as caught:
        parse_recipe({**SETTINGS, "epochs": 0, "batch_size": -1})
    assert "epochs" in str(caught.value)
    assert "batch_size" in str(caught.value)


def test_read_recipe_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.toml"):
        read_recipe(tmp_path / "absent.toml")


@pytest.mark.parametrize("content", [b"epochs = = 3", b"\xff\xfe"])
def test_read_recipe_not_toml_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not valid TOML"):
        read_recipe(path)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_read_recipe_shipped_recipe_is_valid_and_named_after_its_file(path: Path) -> None:
    assert read_recipe(path).name == path.stem
