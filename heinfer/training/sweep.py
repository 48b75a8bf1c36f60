"""Accuracy against epsilon: seeded runs of one recipe at several targets, and whether each reaches what is demanded.

    sweep.json      the figures
    sweep.png       mean accuracy over epsilon, with the worst and the best seed
    trials.jsonl    every run; a sweep that was stopped goes on from it

The runs are not private (see `heinfer.training.experiments`): a sweep is made on public data, or for the operator's
eyes only, before the one unseeded run whose model is released.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from heinfer.errors import InputError, ParameterError
from heinfer.training.assembly import require_privacy
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.experiments import Progress, SeededRuns, tell_percent
from heinfer.training.recipe import Recipe
from heinfer.training.trials import Setup, Summary, Trial, TrialFile, summarise

SWEEP_FILE, PLOT_FILE, TRIALS_FILE = "sweep.json", "sweep.png", "trials.jsonl"
NOT_PRIVATE = (
    "Seeded runs: their noise can be computed, so none of them is private, no ledger pays for them, and no model is "
    "kept. On private records these accuracies are for the operator's eyes only."
)
_INK, _MARK = "#1f3a5f", "#7a1f1f"


@dataclass(frozen=True, slots=True)
class Point:
    """One target.

    Attributes:
        target: epsilon that was asked for.
        epsilon: what an unseeded run costs.
        noise_multiplier: the smallest and the largest of the run.
        accuracy: on the test records, over the seeds.
        seconds: that the runs took together.
        go: whether even the worst seed reaches the recipe's accuracy floor.
    """

    target: float
    epsilon: float
    noise_multiplier: tuple[float, float]
    accuracy: Summary
    seconds: float
    go: bool

    def advice(self, floor: float) -> str:
        """Say go or no-go, and why."""
        worst, among = self.accuracy.worst, f"the worst of {len(self.accuracy.values)} seeds"
        relation = "reaches" if self.go else "misses"
        verdict = "go" if self.go else "no-go"
        return f"{verdict}: {among}, {worst:.2%}, {relation} the floor of {floor:.2%}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """All targets of one recipe, smallest first.

    Attributes:
        recipe: its name.
        dataset: name of the data.
        delta: of every run.
        floor: accuracy that the recipe demands, in [0, 1].
        seeds: that were run at each target.
        points: by target.
    """

    recipe: str
    dataset: str
    delta: float
    floor: float
    seeds: tuple[int, ...]
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what sweep.json says."""
        points = [{**asdict(point), "advice": point.advice(self.floor)} for point in self.points]
        return {**asdict(self), "points": points, "private": False, "note": NOT_PRIVATE}


def run_sweep(
    recipe: Recipe,
    data: Dataset,
    folder: Path,
    targets: Sequence[float],
    seeds: int = 3,
    public: Dataset | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> Sweep:
    """Run a recipe with several seeds at several targets, and write what came of it.

    Args:
        recipe: with a table [privacy]; its target or noise multiplier is replaced.
        data: training and test records.
        folder: where to write; trials of the same recipe and data that are in it are not run again.
        targets: values of epsilon.
        seeds: runs at each of them, with the seeds 0, 1, ...
        public: data of the recipe's table [pretraining].
        progress: called with a phase, what is done of it, and of how much.

    Raises:
        InputError: the recipe has no table [privacy], or does not fit the data.
        ParameterError: a target or the number of seeds is out of range.
        PrivacyBudgetError: no noise meets a target.
    """
    setups = [Setup(at_epsilon(recipe, target)) for target in check_targets(targets)]
    if seeds < 1:
        raise ParameterError(f"expected at least 1 seed, found {seeds}")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder for the sweep")
    runs = SeededRuns(data, public, TrialFile(folder / TRIALS_FILE))
    trials: dict[tuple[int, int], Trial] = {}
    done, total = 0, len(setups) * seeds
    progress("runs", 0, total)
    for seed in range(seeds):
        for number, setup in enumerate(setups):
            trials[number, seed] = runs.run(setup, seed, tell_percent(progress))
            done += 1
            progress("runs", done, total)
    points = tuple(
        _summarise(setup, [trials[number, seed] for seed in range(seeds)], recipe.accuracy_floor)
        for number, setup in enumerate(setups)
    )
    plan = trials[0, 0].plan
    assert plan is not None  # of a private run
    sweep = Sweep(recipe.name, data.name, plan["delta"], recipe.accuracy_floor, tuple(range(seeds)), points)
    write_sweep(folder, sweep)
    return sweep


def check_targets(targets: Sequence[float]) -> tuple[float, ...]:
    """Return the targets, each once, smallest first.

    Raises:
        ParameterError: there are none, or one is not positive.
    """
    bad = [target for target in targets if not (math.isfinite(target) and target > 0)]
    if bad or not targets:
        raise ParameterError(f"expected positive targets for epsilon, found {', '.join(map(str, bad)) or 'none'}")
    return tuple(sorted(set(targets)))


def at_epsilon(recipe: Recipe, target: float) -> Recipe:
    """Return a recipe with another target.

    Raises:
        InputError: it has no table [privacy].
    """
    return replace(recipe, privacy=replace(require_privacy(recipe), target_epsilon=target, noise_multiplier=None))


def target_of(setup: Setup) -> float:
    """Return the target of a setup that `at_epsilon` made."""
    target = require_privacy(setup.recipe).target_epsilon
    assert target is not None  # `at_epsilon` sets it
    return target


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write figures and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP_FILE).write_text(json.dumps(sweep.to_json(), indent=1) + "\n", encoding="utf-8")
    draw_sweep(sweep, folder / PLOT_FILE)


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draw mean accuracy over epsilon, from worst to best seed, and the floor."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    targets = [point.target for point in sweep.points]
    means = [100 * point.accuracy.mean for point in sweep.points]
    below = [100 * (point.accuracy.mean - point.accuracy.worst) for point in sweep.points]
    above = [100 * (max(point.accuracy.values) - point.accuracy.mean) for point in sweep.points]
    axes.errorbar(targets, means, yerr=[below, above], color=_INK, marker="o", capsize=5, label="mean, worst and best")
    axes.axhline(
        100 * sweep.floor, color=_MARK, linestyle="--", linewidth=1.2, label=f"demanded: {100 * sweep.floor:g} %"
    )
    axes.set_xscale("log")
    axes.set_xticks(targets, [f"{target:g}" for target in targets])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"epsilon at delta = {sweep.delta:.3g}")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"{sweep.recipe} on {sweep.dataset}, {len(sweep.seeds)} seeds", loc="left")
    axes.grid(color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", framealpha=1.0, edgecolor="white")
    figure.savefig(path, dpi=130)


def _summarise(setup: Setup, trials: Sequence[Trial], floor: float) -> Point:
    accuracy = summarise(trial.accuracy for trial in trials)
    first = trials[0]
    assert first.epsilon is not None
    assert first.plan is not None  # a private run has both
    noise = first.plan["noise_multipliers"]
    return Point(
        target=target_of(setup),
        epsilon=first.epsilon,
        noise_multiplier=(min(noise), max(noise)),
        accuracy=accuracy,
        seconds=sum(trial.seconds for trial in trials),
        go=accuracy.worst >= floor,
    )
