"""The card of a private model: what was promised, what it cost, on which data, and how good the model is.

It lies beside the model as card.json and inside it as the ONNX metadata `heinfer.card`, so that it travels along.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import onnx

from heinfer.cards import CARD_KEY
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.evaluation import Quality
from heinfer.training.interface import describe_interface
from heinfer.training.privacy.accounting import ACCOUNTANT_VERSION, ADJACENCY
from heinfer.training.privacy.planning import PrivacyPlan
from heinfer.training.recipe import Recipe, recipe_to_json

CARD_FORMAT = 1
SAMPLES_FILE = "samples.npz"
_PACKAGES = ("heinfer", "torch", "opacus", "dp-accounting", "onnx", "onnxscript", "onnxruntime", "numpy")

_PRIVATE = (
    "Trained with DP-SGD. Adding or removing one training record changes the probability of any outcome by a factor of "
    "at most e^epsilon, up to delta. This protects the records, not facts about the population."
)
_SEEDED = (
    "Not private: trained from a fixed seed, for debugging or a study, so that anybody can compute the noise. The "
    "budget is that of the same recipe without a seed."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        plan: the noise of every step, and its cost.
        steps: how many were taken.
        epsilon_pld: what these cost, with everything that was reserved.
        epsilon_rdp: the same by Rényi accounting.
        clip_norms: the L2 sensitivity, first and last where it moved.
        seed: of a run that is not private, None for the operating system's generator.
        quality: how good the model is.
        checks: what was verified, with its result, for the checklist.
    """

    plan: PrivacyPlan
    steps: int
    epsilon_pld: float
    epsilon_rdp: float
    clip_norms: tuple[float, ...]
    seed: int | None
    quality: Quality
    checks: Mapping[str, str]


def make_private_card(
    recipe: Recipe, data: Dataset, outcome: Outcome, samples: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Say what the model is and how it came about; the contents of card.json.

    Args:
        recipe: what was trained.
        data: on what.
        outcome: what came of it.
        samples: file, number and accuracy of the samples beside the model, None where there are none.
    """
    plan, private = outcome.plan, outcome.seed is None
    levels = plan.taken(outcome.steps)
    known = recipe.data.set is not None
    public = [recipe.pretraining.data.name] if recipe.pretraining is not None else []
    public += [f"teacher {recipe.distillation.teacher}"] if recipe.distillation is not None else []
    return {
        "format": CARD_FORMAT,
        "name": recipe.name,
        "architecture": recipe.architecture,
        "recipe": recipe_to_json(recipe),
        "epsilon": outcome.epsilon_pld if private else None,
        "epsilon_rdp": outcome.epsilon_rdp if private else None,
        "epsilon_without_seed": outcome.epsilon_pld,
        "delta": plan.delta,
        "adjacency": ADJACENCY,
        "accountant": ACCOUNTANT_VERSION,
        "sampler": "poisson",
        "sampling_probability": plan.sampling_probability,
        "noise": {
            "schedule": recipe.privacy.noise_schedule if recipe.privacy is not None else "constant",
            "multipliers": [level.noise_multiplier for level in levels],
            "steps": [level.steps for level in levels],
        },
        "clipping": recipe.privacy.clipping.value if recipe.privacy is not None else None,
        "clip_norm": outcome.clip_norms[0] if len(outcome.clip_norms) == 1 else list(outcome.clip_norms),
        "steps": outcome.steps,
        "public_data": public,
        "privacy": _PRIVATE if private else _SEEDED,
        "seeds": "none: noise and sampling from the operating system's generator" if private else outcome.seed,
        "seed": outcome.seed,
        "checks": dict(outcome.checks),
        "dataset": recipe.data.name,
        "data_license": recipe.data.license,
        "data_credit": recipe.data.credit,
        # Who knows all records but one could find that one by its hash: only that of public sets is published.
        "data_fingerprint": data.fingerprint() if known else None,
        "private_fingerprint": data.private_fingerprint() if known else None,
        "classes": list(data.class_names) or data.classes,
        "train_records": len(data.train),
        **outcome.quality.to_json(),
        **({"test_data": "held out of the private file; not protected"} if is_split(recipe) else {}),
        "samples": samples,
        **describe_interface(data),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
    }


def is_split(recipe: Recipe) -> bool:
    """Whether the test records come from the same file as the private ones, and are measured without noise."""
    return (
        recipe.data.test_fraction is not None and recipe.privacy is not None and not recipe.privacy.evaluation_reserve
    )


def attach_card(model: onnx.ModelProto, card: Mapping[str, Any]) -> None:
    """Write a card into a model's metadata, in place of an earlier one."""
    kept = [entry for entry in model.metadata_props if entry.key != CARD_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=CARD_KEY, value=json.dumps(card, sort_keys=True))
