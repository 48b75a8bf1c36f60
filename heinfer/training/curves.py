"""How a run went, step by step: public values only, as one drawing in SVG.

The file of steps also holds private values (loss, norms, the fraction that was clipped, the size of each sample). They
are left behind where a line is read, so that nothing after it can show them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

#: What may be shown of a step: known in advance to anybody who has the recipe.
PUBLIC_FIELDS = ("step", "epsilon", "noise_multiplier", "learning_rate")
#: Points of a curve that are drawn; more cannot be told apart.
_MOST_POINTS = 400
#: Dark enough for text on white; each of its two uses differs in line style too.
_INK, _MARK = "#1f3a5f", "#7a1f1f"
#: Text stays text, in the page's own font; the salt makes the same run give the same page.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "heinfer",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.8,
}

Curve = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """Public curves of a run: numbers of steps taken, and values after them.

    Attributes:
        epsilon: spent.
        noise_multiplier: of the step.
        learning_rate: of the step.
        accuracy: on public test records, in [0, 1]; empty where they are private.
    """

    epsilon: Curve
    noise_multiplier: Curve
    learning_rate: Curve
    accuracy: Curve


@dataclass(frozen=True, slots=True)
class Marks:
    """Horizontal lines to compare with, None for no line."""

    target_epsilon: float | None = None
    accuracy_floor: float | None = None


def read_curves(steps_file: Path) -> Curves:
    """Read the public values of a file of steps (see `heinfer.training.observers.StepFile`).

    A step that was taken again after an interruption stands there twice; the later line counts. A line that a crash cut
    short is left out, and a missing file is one without lines.
    """
    steps: dict[int, dict[str, float]] = {}
    accuracies: dict[int, float] = {}
    for line in steps_file.read_text(encoding="utf-8").splitlines() if steps_file.exists() else ():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if "accuracy" in content:
            accuracies[int(content["step"])] = float(content["accuracy"])
        else:
            public = {name: float(content[name]) for name in PUBLIC_FIELDS}
            steps[int(public["step"]) + 1] = public  # what holds after this many steps
    taken = sorted(steps)
    shown = taken[:: max(1, len(taken) // _MOST_POINTS)]
    if taken and shown[-1] != taken[-1]:
        shown.append(taken[-1])

    def curve(name: str) -> Curve:
        return shown, [steps[step][name] for step in shown]

    measured = sorted(accuracies)
    return Curves(
        curve("epsilon"),
        curve("noise_multiplier"),
        curve("learning_rate"),
        (measured, [accuracies[step] for step in measured]),
    )


def draw_curves(curves: Curves, marks: Marks = Marks()) -> str:
    """Draw all curves over the steps.

    Returns:
        An <svg> element without prologue, metadata or references to anything outside it.
    """
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        places = figure.subplots(2, 2)
        _draw(places[0][0], curves.epsilon, "epsilon spent", marks.target_epsilon, "target", bottom=0)
        _draw(places[0][1], curves.noise_multiplier, "noise multiplier (sigma)", steps=True, bottom=0)
        _draw(places[1][0], curves.learning_rate, "learning rate", bottom=0)
        percent = (curves.accuracy[0], [100 * value for value in curves.accuracy[1]])
        floor = None if marks.accuracy_floor is None else 100 * marks.accuracy_floor
        _draw(places[1][1], percent, "test accuracy, %", floor, "demanded", marker="o")
        return _to_svg(figure)


def _draw(
    axes: Axes,
    curve: Curve,
    title: str,
    mark: float | None = None,
    meaning: str = "",
    steps: bool = False,
    bottom: float | None = None,
    marker: str = "",
) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("steps")
    if not len(curve[0]):
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    line: Mapping[str, Any] = {"drawstyle": "steps-pre"} if steps else {}
    axes.plot(*curve, color=_INK, marker=marker, markersize=5, **line)
    if mark is not None:
        axes.axhline(mark, color=_MARK, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{meaning}: {mark:g}",
            (0.99, mark),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=_MARK,
        )
    if bottom is not None:
        axes.set_ylim(bottom=bottom, top=1.12 * max(*curve[1], mark or 0.0, 1e-12))


def _to_svg(figure: Figure) -> str:
    """Render a figure as an element of a page: no prologue, which names a DTD, and no metadata, which names a URL."""
    FigureCanvasSVG(figure)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    element = text[text.index("<svg") :]
    while "<metadata>" in element:
        start, end = element.index("<metadata>"), element.index("</metadata>")
        element = element[:start] + element[end + len("</metadata>") :]
    return element
