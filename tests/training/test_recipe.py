"""Recipes are checked completely before anything is trained."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from heinfer.errors import InputError
from heinfer.training.recipe import (
    Augmentation,
    ClippingMethod,
    Decay,
    FineTuned,
    Optimiser,
    OptimiserName,
    Output,
    parse_recipe,
    read_recipe,
    recipe_to_json,
)

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
    assert recipe.optimiser == Optimiser(learning_rate=0.01, name=OptimiserName.ADAMW, decay=Decay.COSINE)
    assert recipe.augmentation == Augmentation(shift_pixels=0, rotation_degrees=0)
    assert recipe.held_out_images == 0
    assert recipe.data.train_images == "train_images"
    assert recipe.output == Output(samples=1000)
    assert recipe.privacy is recipe.pretraining is recipe.distillation is recipe.features is None


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
        ("schedule", "stepwise"),
        ("weight_decay", -0.1),
        ("held_out_images", -1),
        ("seed", -1),
        ("accuracy_floor", 98.8),
        ("augmentation", {"shift_pixels": -1.0}),
        ("augmentation", {"rotation_degrees": 181.0}),
        ("augmentation", {"flip": 1}),
        ("augmentation", {"copies": 0}),
        ("augmentation", {"copies": 4}),  # of private training
        ("output", {"samples": -1}),
        ("features", {"octaves": 3}),
        ("features", {}),  # LeNet-5 has none
        ("network", 3),
        ("distillation", {"teacher": "teacher.onnx", "weight": 1.5}),
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


PRIVATE: dict[str, Any] = {
    "name": "private",
    "architecture": "scattering_cnn",
    "epochs": 30,
    "batch_size": 1024,
    "accuracy_floor": 0.9,
    "data": {"set": "mnist"},
    "optimiser": {"name": "sgd", "learning_rate": 2.0, "momentum": 0.9, "decay": "cosine", "ema": 0.99},
    "privacy": {"target_epsilon": 3.0, "delta": 1e-5, "noise_schedule": "linear:1.0,0.3", "clip_norm": 1},
}


def test_parse_recipe_private_settings_need_no_seed_and_know_their_set() -> None:
    recipe = parse_recipe(PRIVATE)
    assert recipe.seed is None
    assert recipe.privacy is not None
    assert recipe.privacy.clipping is ClippingMethod.FLAT
    assert (recipe.data.name, recipe.data.license) == ("MNIST", "CC BY-SA 3.0")
    assert recipe.optimiser.momentum == 0.9
    assert parse_recipe({**PRIVATE, "seed": 3}).seed == 3


def test_parse_recipe_all_tables_are_read() -> None:
    recipe = parse_recipe(
        {
            **PRIVATE,
            "privacy": {
                "noise_multiplier": 1.1,
                "clipping": "per-layer",
                "clip_norms": [1.0, 0.5],
                "layer_noise": [0.7, 1.2],
                "evaluation_reserve": 0.2,
                "physical_batch": 64,
            },
            "pretraining": {
                "data": {"set": "fashion_mnist", "path": "fashion.npz"},
                "epochs": 2,
                "batch_size": 64,
                "learning_rate": 0.001,
                "layers": "head",
                "freeze": ["features"],
            },
            "distillation": {"teacher": "teacher.onnx", "temperature": 4.0, "weight": 0.5},
            "augmentation": {"shift_pixels": 1.0, "flip": True, "copies": 8},
            "features": {"kind": "scattering", "octaves": 2, "angles": 8, "computed_once": False},
            "network": {"groups": 9, "widths": [8, 16]},
            "output": {"samples": 10},
        }
    )
    assert recipe.privacy is not None
    assert recipe.privacy.clip_norms == (1.0, 0.5)
    assert recipe.pretraining is not None
    assert recipe.pretraining.layers is FineTuned.HEAD
    assert recipe.pretraining.data.license == "MIT"
    assert recipe.network == {"groups": 9, "widths": [8, 16]}
    assert recipe.augmentation.copies == 8


def test_parse_recipe_settings_may_stand_elsewhere() -> None:
    settings = {**PRIVATE, "output": {"name": "moved", "accuracy_floor": 0.7, "samples": 5}}
    del settings["name"], settings["accuracy_floor"]
    recipe = parse_recipe(settings)
    assert (recipe.name, recipe.accuracy_floor, recipe.output.samples) == ("moved", 0.7, 5)
    with pytest.raises(InputError, match=r"- output\.name: stands in name as well"):
        parse_recipe({**PRIVATE, "output": {"name": "moved"}})
    with pytest.raises(InputError, match=r"- learning_rate: stands in optimiser\.learning_rate as well"):
        parse_recipe({**PRIVATE, "learning_rate": 0.1})


def test_parse_recipe_leaves_the_settings_as_they_are() -> None:
    settings = copy.deepcopy(PRIVATE)
    parse_recipe(settings)
    assert settings == PRIVATE


@pytest.mark.parametrize("settings", [SETTINGS, PRIVATE], ids=["plain", "private"])
def test_recipe_to_json_is_json_and_gives_the_recipe_again(settings: dict[str, Any]) -> None:
    recipe = parse_recipe(settings)
    assert parse_recipe(json.loads(json.dumps(recipe_to_json(recipe)))) == recipe


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({}, "exactly one of target_epsilon and noise_multiplier"),
        ({"target_epsilon": 3.0, "noise_multiplier": 1.0}, "exactly one of"),
        ({"target_epsilon": 0.0}, r"privacy\.target_epsilon: "),
        ({"target_epsilon": 3.0, "delta": 1.0}, r"privacy\.delta: "),
        ({"target_epsilon": 3.0, "clip_norm": -1.0}, r"privacy\.clip_norm: "),
        ({"target_epsilon": 3.0, "noise_schedule": "stepz:1,2"}, "noise_schedule: .*steps"),
        ({"target_epsilon": 3.0, "clipping": "per-layer"}, "clip_norms, one for each layer"),
        ({"target_epsilon": 3.0, "clip_norms": [1.0]}, "clip_norms, one for each layer"),
        (
            {"target_epsilon": 3.0, "clipping": "per-layer", "clip_norms": [1.0, 1.0], "layer_noise": [1.0]},
            "one layer_noise for each of 2",
        ),
        ({"target_epsilon": 3.0, "clipping": "adaptive"}, "count_deviation belongs to"),
        ({"target_epsilon": 3.0, "evaluation_reserve": 0.6}, r"privacy\.evaluation_reserve: "),
        (
            {"target_epsilom": 3.0},
            r"privacy\.target_epsilom: unknown key in \[privacy\], did you mean 'target_epsilon'",
        ),
    ],
)
def test_parse_recipe_unusable_privacy_is_refused(privacy: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_recipe({**PRIVATE, "privacy": privacy})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out_images": 100}, "held_out_images: the accuracy on them is a private value"),
        ({"sed": 3}, "sed: unknown key at the top level, did you mean 'seed'"),
        ({"learning_rat": 3}, "learning_rat: unknown key at the top level, did you mean 'learning_rate'"),
        ({"data": {"set": "mnits"}}, r"data\.set: unknown set 'mnits', did you mean 'mnist'"),
        ({"data": {"set": "mnist", "normalise": "private"}}, "declare public bounds"),
        ({"data": {"set": "mnist", "range": [1.0, 1.0]}}, "range: expected .low, high. with low < high"),
        ({"data": {"set": "mnist", "ranges": {"age": [9, 1]}}}, "age: expected .low, high. with low < high"),
        ({"data": {"set": "mnist", "test_fraction": 1.0}}, r"data\.test_fraction: "),
        ({"optimiser": {"learning_rate": 1.0, "momentum": 0.9}}, "momentum is a setting of"),
        ({"optimiser": {"learning_rate": 1.0, "name": "sgd", "nesterov": True}}, "nesterov needs momentum"),
        ({"optimiser": {"learning_rate": 1.0, "decay": "one-cycle", "warmup_steps": 5}}, "warm-up of its own"),
        ({"optimiser": {"name": "sgd"}}, r"- optimiser\.learning_rate: .*required"),
        ({"pretraining": {"data": {"set": "mnist", "nam": "x"}}}, r"unknown key in \[pretraining\.data\], .* 'name'"),
        ({"features": {}, "augmentation": {"shift_pixels": 1.0}}, r"features\.computed_once: excludes augmentation"),
        ({"augmentation": {"copies": 4}}, "with images that are changed"),
    ],
)
def test_parse_recipe_contradiction_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_recipe({**PRIVATE, **changes})


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
