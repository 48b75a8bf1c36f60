"""Results of seeded runs, kept in a file so that a sweep or a study that was stopped goes on where it was."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from heinfer.errors import InputError
from heinfer.training.recipe import Recipe, recipe_to_json

#: Settings of a recipe that don't change what is trained.
_IMMATERIAL = ("name", "accuracy_floor", "output", "seed")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained, but for the seed.

    Attributes:
        recipe: with or without a table [privacy].
        last_clip_norm: where flat clipping's threshold ends, on a straight line that is declared in advance; None
            leaves it at the recipe's clip norm. There is no such setting in recipes: it is here to be studied.
    """

    recipe: Recipe
    last_clip_norm: float | None = None

    def key(self, data: str) -> str:
        """Return a name for this setup on these data, whose fingerprint is given."""
        settings = {name: value for name, value in recipe_to_json(self.recipe).items() if name not in _IMMATERIAL}
        content = {"recipe": settings, "last_clip_norm": self.last_clip_norm, "data": data}
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Trial:
    """What one seeded run came to.

    Attributes:
        key: of its setup.
        seed: of its noise, samples and initial weights.
        accuracy: on the test records, in [0, 1].
        epsilon: what the run would cost without a seed; None where it is without privacy.
        steps: how many were taken.
        seconds: for training and evaluation.
        plan: noise and cost, as `PrivacyPlan.to_json`; None without privacy.
    """

    key: str
    seed: int
    accuracy: float
    epsilon: float | None
    steps: int
    seconds: float
    plan: Mapping[str, Any] | None


class TrialFile:
    """A line of JSON for every trial; only ever appended to.

    Args:
        path: the file; made with the first trial.

    Raises:
        InputError: a line is no trial. The last one may be cut short by a crash; it is then left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole, _, self._torn = text.rpartition("\n")
        self._trials: dict[tuple[str, int], Trial] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._keep(Trial(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise InputError(f"{path}, line {number}: expected a trial, found {line[:60]!r} ({error})") from None

    def __len__(self) -> int:
        """Return how many trials there are."""
        return len(self._trials)

    def find(self, key: str, seed: int) -> Trial | None:
        """Return the trial of a setup and a seed, None where there is none yet."""
        return self._trials.get((key, seed))

    def plan(self, key: str) -> Mapping[str, Any] | None:
        """Return the plan of a setup that was run with any seed."""
        return next((trial.plan for (found, _), trial in self._trials.items() if found == key), None)

    def append(self, trial: Trial) -> None:
        """Write a trial down."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._torn:  # take the remains of a cut line away
            kept = self._path.read_text(encoding="utf-8").rpartition("\n")[0]
            self._path.write_text(kept + "\n" if kept else "", encoding="utf-8")
            self._torn = ""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
        self._keep(trial)

    def _keep(self, trial: Trial) -> None:
        self._trials[trial.key, trial.seed] = trial


@dataclass(frozen=True, slots=True)
class Summary:
    """Accuracies of several seeds.

    Attributes:
        values: one for each seed.
        mean: of them.
        spread: sample standard deviation; None for a single one.
        worst: the smallest.
    """

    values: tuple[float, ...]
    mean: float
    spread: float | None
    worst: float


def summarise(values: Iterable[float]) -> Summary:
    """Summarise at least one accuracy."""
    kept = tuple(values)
    spread = statistics.stdev(kept) if len(kept) > 1 else None
    return Summary(kept, statistics.fmean(kept), spread, min(kept))
