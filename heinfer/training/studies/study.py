"""Runs a study within a time budget, and goes on with one that was stopped.

    study.json     how large its runs are, decided once by measuring how fast they are
    trials.jsonl   every run

All arms are run with the first seed, then all with the second, and so on: where the time ends, every arm has as many
seeds as any other, or one less.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from heinfer.errors import InputError, ParameterError
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.experiments import Progress, SeededRuns, tell_percent
from heinfer.training.studies.arms import ARMS, EPOCHS, Arm
from heinfer.training.studies.claims import Claim, gather_arms
from heinfer.training.studies.samples import take_part
from heinfer.training.trials import Setup, Trial, TrialFile

STUDY_FILE, TRIALS_FILE = "study.json", "trials.jsonl"
#: Part of the budget for the runs themselves; the accountant's search for the noise takes the rest.
_SHARE = 0.75
#: Fewer records than this say nothing, and are fewer than the largest batch.
_FEWEST_RECORDS = 1200
_MOST_EPOCHS = 30
#: Records and passes of the runs that are timed: the first warms up, two others give a straight line.
_TIMED = (1000, (1, 1, 3))


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the runs of a study are.

    Attributes:
        data: fingerprint of all records, before a part was taken.
        records: training records of every run.
        epochs: passes over them.
        fixed_s: seconds of a run without records.
        record_s: seconds of the base for one record, once.
    """

    data: str
    records: int
    epochs: int
    fixed_s: float
    record_s: float

    def seconds(self, arm: Arm) -> float:
        """Expected time of one run."""
        return self.fixed_s + self.record_s * self.records * self.epochs * arm.cost


@dataclass(frozen=True, slots=True)
class Findings:
    """What a study found so far.

    Attributes:
        scale: of its runs.
        trials: by arm, one for each seed that was run.
        skipped: arms that cannot be run, with the reason.
        finished: whether all arms have all seeds.
    """

    scale: Scale
    trials: Mapping[str, Sequence[Trial]]
    skipped: Mapping[str, str]
    finished: bool

    @property
    def accuracies(self) -> dict[str, list[float]]:
        """By arm, in [0, 1], one for each seed."""
        return {arm: [trial.accuracy for trial in trials] for arm, trials in self.trials.items()}


def run_study(
    claims: Sequence[Claim],
    data: Dataset,
    work: Path,
    budget_s: float,
    seeds: int = 3,
    public: Dataset | None = None,
    progress: Progress = lambda phase, done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Findings:
    """Run what the claims need, until it is done or the time is over.

    Args:
        claims: to be tested.
        data: records that are public; a part of them is used where the time does not allow for all.
        work: folder of the study; gone on with where there is one.
        budget_s: seconds; a run that is not expected to end in time is not begun.
        seeds: of every arm.
        public: other public records, to pretrain on.
        progress: called with a phase, what is done of it, and of how much.
        clock: seconds.

    Raises:
        InputError: the folder holds a study on other data, or the data don't fit the network.
        ParameterError: the budget or the number of seeds is out of range.
    """
    if not (math.isfinite(budget_s) and budget_s > 0 and seeds >= 1):
        raise ParameterError(f"expected a positive budget and at least 1 seed, found {budget_s} s and {seeds} seeds")
    end = clock() + budget_s
    arms = gather_arms(claims)
    skipped = {arm.name: "needs --public-data" for arm in arms if arm.needs_public and public is None}
    arms = tuple(arm for arm in arms if arm.name not in skipped)
    scale = _read_scale(work, data)
    if scale is None:
        scale = _decide(arms, seeds, data, budget_s, progress)
        _write_scale(work, scale)
    part = take_part(data, scale.records)
    other = None if public is None else take_part(public, scale.records)
    runs = SeededRuns(part, other, TrialFile(work / TRIALS_FILE))
    finished = _run_all(arms, seeds, runs, scale, end, progress, clock)
    trials = {arm.name: _find(runs, arm, scale, seeds) for arm in arms}
    return Findings(scale, trials, skipped, finished and not skipped)


def choose_scale(
    data: str, records: int, fixed_s: float, record_s: float, costs: Sequence[float], budget_s: float
) -> Scale:
    """Choose how many records and passes fit into a budget.

    Args:
        data: fingerprint of the records.
        records: how many there are.
        fixed_s: seconds of a run without records.
        record_s: seconds of the base for one record, once.
        costs: of every run, relative to the base.
        budget_s: seconds for all of them.
    """
    left = _SHARE * budget_s - fixed_s * len(costs)
    affordable = max(0.0, left) / (record_s * sum(costs))  # record passes of one run
    kept = min(records, max(_FEWEST_RECORDS, int(affordable / EPOCHS)))
    epochs = EPOCHS if kept < records else min(_MOST_EPOCHS, max(EPOCHS, int(affordable / kept)))
    return Scale(data, kept, epochs, fixed_s, record_s)


def _decide(arms: Sequence[Arm], seeds: int, data: Dataset, budget_s: float, progress: Progress) -> Scale:
    """Measure the time of a run and choose the scale by it."""
    records, passes = _TIMED
    part = take_part(data, records)
    noise = {"privacy.target_epsilon": None, "privacy.noise_multiplier": 1.0}  # known, so that none is searched for
    base = Arm("timing", {**ARMS["base"].changes, **noise})
    times = []
    for number, epochs in enumerate(passes):
        progress("timing", number, len(passes))
        times.append(SeededRuns(part).run(Setup(base.recipe(epochs=epochs)), seed=0).seconds)
    progress("timing", len(passes), len(passes))
    _, short, long = times
    record_s = max((long - short) / ((passes[2] - passes[1]) * len(part.train)), 1e-7)
    fixed_s = max(short - record_s * passes[1] * len(part.train), 0.0)
    costs = [arm.cost for arm in arms for _ in range(seeds)]
    return choose_scale(data.fingerprint(), len(data.train), fixed_s, record_s, costs, budget_s)


def _run_all(
    arms: Sequence[Arm],
    seeds: int,
    runs: SeededRuns,
    scale: Scale,
    end: float,
    progress: Progress,
    clock: Callable[[], float],
) -> bool:
    """Run every arm with the first seed, then with the next; return whether all of it is done."""
    order = [(arm, seed) for seed in range(seeds) for arm in arms]
    slower = 1.0  # than expected; measured as the study goes on
    for done, (arm, seed) in enumerate(order):
        progress("runs", done, len(order))
        setup = arm.setup(scale.epochs)
        if runs.find(setup, seed) is not None:
            continue
        if clock() + slower * scale.seconds(arm) > end:
            return False
        trial = runs.run(setup, seed, tell_percent(progress))
        slower = 0.7 * slower + 0.3 * trial.seconds / max(scale.seconds(arm), 1e-9)
    progress("runs", len(order), len(order))
    return True


def _find(runs: SeededRuns, arm: Arm, scale: Scale, seeds: int) -> list[Trial]:
    found = [runs.find(arm.setup(scale.epochs), seed) for seed in range(seeds)]
    return [trial for trial in found if trial is not None]


def _read_scale(work: Path, data: Dataset) -> Scale | None:
    path = work / STUDY_FILE
    if not path.exists():
        return None
    try:
        scale = Scale(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged: {error}; name another folder with --work") from None
    if scale.data != data.fingerprint():
        raise InputError(
            f"{work} holds a study on other data ({scale.data[:16]}..., these are {data.fingerprint()[:16]}...); name "
            "another folder with --work"
        )
    return scale


def _write_scale(work: Path, scale: Scale) -> None:
    work.mkdir(parents=True, exist_ok=True)
    (work / STUDY_FILE).write_text(json.dumps(asdict(scale), indent=1) + "\n", encoding="utf-8")
