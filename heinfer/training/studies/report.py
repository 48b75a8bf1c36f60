"""What a study found, in Markdown, with plots beside it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from heinfer.processes import core_count
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.studies.arms import BASE, BATCH, EPSILON
from heinfer.training.studies.claims import Claim
from heinfer.training.studies.plots import draw_claim, draw_overview
from heinfer.training.studies.study import Findings
from heinfer.training.studies.verdicts import Verdict, estimate, judge
from heinfer.training.trials import Trial, summarise

_PACKAGES = ("heinfer", "torch", "opacus", "dp-accounting", "numpy")

_RULE = """\
A difference is the difference of mean accuracies over the seeds, in points. Its standard error comes from each arm's
own spread, its 95 % interval from Student's t with the degrees of freedom of Welch and Satterthwaite.

- **holds**: the interval is above zero, and the difference reaches what is claimed.
- **holds in part**: the interval is above zero, the difference is smaller than claimed; or parts of the claim hold and
  others do not.
- **fails**: the interval ends below what is claimed and is not above zero.
- **undecided**: neither; the budget did not settle it.

Where a claim is a bound (accuracy falls by at most so much), the bound stands in for zero. Intervals are of one
difference each: among twenty, one is expected to miss by chance. Arms that share seeds share initial weights; the
intervals do not make use of it."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a report says of its circumstances.

    Attributes:
        command: line that makes it again.
        data: all records, before a part was taken.
        public: other records, None where there were none.
        seeds: wanted for each arm.
    """

    command: str
    data: Dataset
    public: Dataset | None
    seeds: int


def write_report(path: Path, claims: Sequence[Claim], findings: Findings, context: Context) -> None:
    """Write the report, and its plots into a folder of the same name beside it."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    draw_overview(claims, findings.accuracies, folder / "overview.png")
    for claim in claims:
        draw_claim(claim, findings.accuracies, folder / f"{claim.name}.png")
    sections = [_head(claims, findings, folder.name)]
    sections += [_section(claim, findings, folder.name) for claim in claims]
    sections.append(_circumstances(findings, context))
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _head(claims: Sequence[Claim], findings: Findings, folder: str) -> str:
    rows = [
        (f"[{claim.name}](#{claim.name})", claim.statement, f"**{claim.judge(findings.accuracies)}**")
        for claim in claims
    ]
    unfinished = "" if findings.finished else "\n\nThe study is not finished: see the number of seeds of each arm."
    return (
        "# Claims about private training, measured\n\n"
        f"Every private arm is trained at the same epsilon, {EPSILON:g} where the claim names no other, and with the "
        "accountant's own noise for it. The runs are seeded, on public data; none of them is private, and no model is "
        f"kept.{unfinished}\n\n{_markdown(('claim', 'in words', 'verdict'), rows)}\n\n"
        f"![all differences]({folder}/overview.png)\n\n## How claims are judged\n\n{_RULE}"
    )


def _section(claim: Claim, findings: Findings, folder: str) -> str:
    accuracies = findings.accuracies
    parts = [f"## {claim.name}", f"{claim.statement} **{str(claim.judge(accuracies)).capitalize()}.**", claim.reading]
    arms = []
    for arm in claim.arms:
        trials = findings.trials.get(arm.name, ())
        arms.append((arm.name, f"`{arm.describe()}`", _epsilon(trials), str(len(trials)), _accuracy(trials)))
    parts.append(_markdown(("arm", "differs from the base by", "epsilon", "seeds", "accuracy"), arms))
    reasons = sorted({findings.skipped[arm.name] for arm in claim.arms if arm.name in findings.skipped})
    parts += [f"Not all of it was run: {'; '.join(reasons)}."] if reasons else []
    rows = []
    for contrast in claim.compare(accuracies):
        found = estimate(contrast, accuracies)
        measured = "-" if found is None else f"{found.difference:+.2f} ± {found.error:.2f}"
        interval = "-" if found is None else f"{found.low:+.2f} to {found.high:+.2f}"
        promised = "above 0" if contrast.claimed == 0 else f"at least {contrast.claimed:+g}"
        rows.append((contrast.text, promised, measured, interval, str(judge(contrast, found))))
    header = ("difference", "claimed, points", "measured ± standard error", "95 % interval", "verdict")
    if rows:
        parts.append(_markdown(header, rows))
    if claim.ladder is not None:
        parts.append(_ladder(claim, findings))
    parts.append(f"![{claim.name}]({folder}/{claim.name}.png)")
    return "\n\n".join(part for part in parts if part)


def _ladder(claim: Claim, findings: Findings) -> str:
    assert claim.ladder is not None
    best = claim.ladder.best(findings.accuracies)
    if best is None:
        return "The best rate without privacy is not known yet."
    low, *_, high = claim.ladder.rates
    return f"The best rate without privacy is {best:g}, on a ladder from {low:g} to {high:g}."


def _circumstances(findings: Findings, context: Context) -> str:
    scale, data = findings.scale, context.data
    seconds = sum(trial.seconds for trials in findings.trials.values() for trial in trials)
    runs = sum(map(len, findings.trials.values()))
    public = "none" if context.public is None else f"{context.public.name}, at most as many records"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    rows = [
        ("command", f"`{context.command}`"),
        ("data", f"{data.name}: {scale.records:,} of {len(data.train):,} records, {len(data.test):,} for the test"),
        ("fingerprint of all records", f"`{scale.data}`"),
        ("public data", public),
        ("length of a run", f"{scale.epochs} passes over the records, batch {BATCH} where an arm has no other"),
        ("runs", f"{runs}, {seconds / 60:.0f} minutes in all; {context.seeds} seeds wanted for each arm"),
        ("machine", f"{_processor()}, cores: {core_count()}, threads: {torch.get_num_threads()}"),
        ("versions", f"Python {platform.python_version()}, {versions}"),
    ]
    shown = {key: value for key, value in BASE.items() if key not in ("name", "data", "accuracy_floor", "seed")}
    return (
        f"## How it was measured\n\n{_markdown(('', ''), rows)}\n\nThe base, from which the arms differ:\n\n"
        f"```json\n{json.dumps({**shown, 'epochs': scale.epochs}, indent=1)}\n```\n\n"
        "Learning rates were not tuned for each arm. Fewer records than there are make every private run worse than "
        "it would be on all of them; differences between arms may change, too."
    )


def _accuracy(trials: Sequence[Trial]) -> str:
    if not trials:
        return "-"
    found = summarise(100 * trial.accuracy for trial in trials)
    return f"{found.mean:.2f} %" if found.spread is None else f"{found.mean:.2f} ± {found.spread:.2f} %"


def _epsilon(trials: Sequence[Trial]) -> str:
    if not trials:
        return "-"
    return "none" if trials[0].epsilon is None else f"{trials[0].epsilon:.3f}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _processor() -> str:
    """The processor's name, as Linux has it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def tally(claims: Sequence[Claim], findings: Findings) -> dict[str, Verdict]:
    """Return the verdicts by claim."""
    return {claim.name: claim.judge(findings.accuracies) for claim in claims}
