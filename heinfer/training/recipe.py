"""Recipes: everything that decides a training run, read from TOML, checked once and immutable afterwards.

Unknown keys are refused, so that a misspelt setting cannot be ignored in silence. A recipe with a table [privacy] asks
for training with differential privacy; without one, recipe and data determine the trained weights (on one machine, with
one version of torch).

A recipe may name an architecture of its own as "module:function", which is imported and run: read the recipes of others
before you use them, as you would read a program.
"""

from __future__ import annotations

import copy
import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from heinfer.errors import InputError
from heinfer.training.datasets.registry import SETS
from heinfer.training.settings import (
    CONFIG,
    Augmentation,
    ClippingMethod,
    Count,
    DataFormat,
    DataSource,
    Decay,
    Distillation,
    Features,
    FineTuned,
    Fraction,
    Natural,
    Normalisation,
    Optimiser,
    OptimiserName,
    Output,
    Polynomials,
    Pretraining,
    Privacy,
    Text,
    suggest,
)

__all__ = [
    "Augmentation",
    "ClippingMethod",
    "DataFormat",
    "DataSource",
    "Decay",
    "Distillation",
    "Features",
    "FineTuned",
    "Normalisation",
    "Optimiser",
    "OptimiserName",
    "Output",
    "Polynomials",
    "Pretraining",
    "Privacy",
    "Recipe",
    "parse_recipe",
    "read_recipe",
    "recipe_to_json",
]


@dataclass(frozen=True, slots=True, config=CONFIG)
class Recipe:
    """A training run.

    Attributes:
        name: name of the released model: lower case letters, digits and underscores.
        architecture: one of `heinfer.training.architectures.ARCHITECTURES`, or "module:function".
        data: the data set.
        epochs: passes over the training records; of a private run, epochs * N / B steps.
        batch_size: records per step; of a private run, the expected number.
        optimiser: how weights follow gradients.
        accuracy_floor: a model whose test accuracy, in [0, 1], is lower is not released.
        seed: decides initial weights, held-out images, order and augmentation; None leaves a private run unseeded.
        held_out_images: training images kept aside to watch the accuracy; not in a private run.
        augmentation: random changes of the training images.
        network: options of the architecture, by name.
        privacy: the guarantee; None trains without one.
        pretraining: training on public data before.
        distillation: learning from a teacher.
        features: how fixed features are computed.
        polynomials: what activations become before the training, which then begins with trained weights.
        output: what a release holds beside the model.
    """

    name: Annotated[str, Field(strict=True, pattern=r"^[a-z0-9_]+$")]
    architecture: Text
    data: DataSource
    epochs: Count
    batch_size: Count
    optimiser: Optimiser
    accuracy_floor: Fraction
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    held_out_images: Natural = 0
    augmentation: Augmentation = Augmentation()
    network: dict[str, Any] = Field(default_factory=dict)
    privacy: Privacy | None = None
    pretraining: Pretraining | None = None
    distillation: Distillation | None = None
    features: Features | None = None
    polynomials: Polynomials | None = None
    output: Output = Output()


_ADAPTER = TypeAdapter(Recipe)

#: The tables of a recipe that are checked here, for messages about unknown keys.
_TABLES: Mapping[tuple[str, ...], type] = {
    (): Recipe,
    ("data",): DataSource,
    ("optimiser",): Optimiser,
    ("augmentation",): Augmentation,
    ("privacy",): Privacy,
    ("pretraining",): Pretraining,
    ("pretraining", "data"): DataSource,
    ("distillation",): Distillation,
    ("features",): Features,
    ("polynomials",): Polynomials,
    ("output",): Output,
}

#: Short forms and other places of settings: where they may stand, and where they belong.
_ELSEWHERE: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("learning_rate",): ("optimiser", "learning_rate"),
    ("schedule",): ("optimiser", "decay"),
    ("weight_decay",): ("optimiser", "weight_decay"),
    ("output", "name"): ("name",),
    ("output", "accuracy_floor"): ("accuracy_floor",),
}


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


def recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a recipe, defaults included, as JSON has them: for cards, ledgers and checkpoints."""
    content: dict[str, Any] = _ADAPTER.dump_python(recipe, mode="json")
    return content


def parse_recipe(settings: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """Check settings as TOML yields them.

    Args:
        settings: nested tables of the recipe.
        origin: named in messages.

    Raises:
        InputError: as `read_recipe`.
    """
    gathered, moved, problems = _gather(settings)
    try:
        recipe = _ADAPTER.validate_python(gathered)
    except ValidationError as error:
        problems += [_describe(entry["type"], entry["loc"], entry["msg"], moved) for entry in error.errors()]
    else:
        problems += _contradictions(recipe)
    if problems:
        lines = [f"  - {problem}" for problem in problems]
        raise InputError("\n".join([f"{origin} has {len(lines)} unusable settings; correct them:", *lines]))
    return recipe


def _gather(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, ...], str], list[str]]:
    """Bring settings to where they belong, and fill in what a known data set brings.

    Returns:
        The settings; for each that was moved, or would have been, its name in the recipe; and what stands twice.
    """
    gathered = copy.deepcopy(dict(settings))
    moved: dict[tuple[str, ...], str] = {}
    problems = []
    short = "optimiser" not in gathered
    gathered.setdefault("optimiser", {})
    for place, home in _ELSEWHERE.items():
        table, target = _table(gathered, place[:-1]), _table(gathered, home[:-1])
        if table is None or target is None or place[-1] not in table:
            continue
        if home[-1] in target:
            problems.append(f"{'.'.join(place)}: stands in {'.'.join(home)} as well; leave one of them out")
        target[home[-1]] = table.pop(place[-1])
        moved[home] = ".".join(place)
    if short:
        moved[("optimiser", "learning_rate")] = "learning_rate"
        if "decay" not in gathered["optimiser"]:
            problems.append("schedule: Field required without [optimiser]")
    if gathered.get("privacy") is None and "seed" not in gathered:
        problems.append("seed: Field required without [privacy]")
    for place in (("data",), ("pretraining", "data")):
        source = _table(gathered, place)
        known = None if source is None else SETS.get(str(source.get("set")))
        if source is not None and known is not None:
            for key in ("license", "credit"):
                source.setdefault(key, getattr(known, key))
            source.setdefault("name", known.title)
    return gathered, moved, problems


def _table(settings: dict[str, Any], place: Sequence[str]) -> dict[str, Any] | None:
    """Find a nested table, None where there is none of that name."""
    found: Any = settings
    for name in place:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _describe(kind: str, location: tuple[int | str, ...], message: str, moved: Mapping[tuple[str, ...], str]) -> str:
    """Say what is wrong with a setting, under the name that it has in the recipe."""
    names = tuple(map(str, location))
    name = moved.get(names) or ".".join(names) or "recipe"
    if kind == "unexpected_keyword_argument":
        table = _TABLES.get(names[:-1])
        known = [field.name for field in dataclasses.fields(table)] if table is not None else []
        known += [place[-1] for place in _ELSEWHERE if place[:-1] == names[:-1]]
        where = f"in [{'.'.join(names[:-1])}]" if names[:-1] else "at the top level"
        return f"{name}: unknown key {where}{suggest(names[-1], known)}"
    return f"{name}: {message.removeprefix('Value error, ')}"


def _contradictions(recipe: Recipe) -> list[str]:
    """Say which tables don't go together."""
    problems = []
    if recipe.augmentation.copies > 1 and not (recipe.privacy is not None and recipe.augmentation.changes_images):
        problems.append("augmentation.copies: belongs to private training, [privacy], with images that are changed")
    if recipe.privacy is not None and recipe.held_out_images:
        problems.append(
            "held_out_images: the accuracy on them is a private value that would steer the run unpaid; leave it out, "
            "or set privacy.evaluation_reserve"
        )
    if recipe.polynomials is not None and recipe.privacy is not None:
        problems.append(
            "polynomials: training goes on without privacy, and the private loop does not know them; leave one of "
            "[polynomials] and [privacy] out"
        )
    if recipe.features is not None:
        if not recipe.architecture.startswith("scattering") and ":" not in recipe.architecture:
            problems.append(f"features: {recipe.architecture!r} has no fixed features; leave the table out")
        if recipe.features.computed_once and recipe.augmentation.changes_images:
            problems.append("features.computed_once: excludes augmentation; set it to false, or leave augmentation out")
    return problems
