"""Drawings of a study: every run of a claim's arms, and every measured difference beside the claimed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from heinfer.training.studies.claims import Claim
from heinfer.training.studies.verdicts import estimate

_INK, _MARK = "#1f3a5f", "#7a1f1f"
_DPI = 110


def draw_claim(claim: Claim, accuracies: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the accuracies of a claim's arms: a ring for each seed, a bar for their mean."""
    arms = [arm.name for arm in claim.arms if accuracies.get(arm.name)]
    figure, axes = _new(len(arms))
    for row, arm in enumerate(arms):
        values = [100 * value for value in accuracies[arm]]
        axes.plot(values, [row] * len(values), "o", mfc="none", mec=_INK, markersize=7)
        axes.plot([sum(values) / len(values)], [row], "|", color=_MARK, markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, %\nrings: seeds, bar: mean", loc="right")
    axes.set_title(claim.name, loc="left")
    figure.savefig(path, dpi=_DPI)


def draw_overview(claims: Sequence[Claim], accuracies: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw every difference with its 95 % interval, and what was claimed."""
    rows = [
        (f"{claim.name}: {contrast.text}", contrast.claimed, found)
        for claim in claims
        for contrast in claim.compare(accuracies)
        if (found := estimate(contrast, accuracies)) is not None
    ]
    figure, axes = _new(len(rows))
    for row, (_, claimed, found) in enumerate(rows):
        reach = [[found.difference - found.low], [found.high - found.difference]]
        axes.errorbar([found.difference], [row], xerr=reach, fmt="o", color=_INK, capsize=4, label="_measured")
        axes.plot([claimed], [row], "D", mfc="white", mec=_MARK, markersize=7)
    axes.axvline(0, color="#555555", linewidth=1)
    axes.set_yticks(range(len(rows)), [text for text, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("points of accuracy\ndot: measured, with its 95 % interval; diamond: claimed at least", loc="right")
    figure.savefig(path, dpi=_DPI)


def _new(rows: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.0, 1.2 + 0.38 * max(rows, 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.5 / max(rows, 1))
    return figure, axes
