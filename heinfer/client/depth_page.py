"""The study of block depth as one page: the curve of accuracy and error, what it costs, and all figures.

Like the page of an evaluation it is a single HTML file without scripts and without references to anything outside it.
The curve is also written alone, as SVG with its own style, for documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final

from heinfer.client.charts import WIDTH, Bar, Series, legend, stacked_bars
from heinfer.client.depth_study import DepthResult, DepthStudy
from heinfer.client.page import document, tile
from heinfer.client.svg import circle, drawing, group, line, text
from heinfer.units import duration, size

_STYLE: Final = """
.curve { stroke: var(--node); stroke-width: 2.5; } .base { stroke: var(--plain); stroke-dasharray: 6 4; }
td.words { white-space: pre-line; }
"""
#: Of a drawing that stands alone: the colours of the page on paper.
_ALONE: Final = (
    "<style>svg{font:12.5px system-ui,sans-serif;background:#fff}.mark{fill:#565d66}.grid{stroke:#d5d9de}"
    ".curve{stroke:#0072b2;stroke-width:2.5}.base{stroke:#7d858e;stroke-dasharray:6 4}.error{fill:#0072b2}"
    ".strong{font-weight:600}</style>"
)
_LEFT, _RIGHT, _TOP, _HEIGHT = 120.0, 1000.0, 40.0, 220.0
_BYTES = (Series("up, to the server", "up"), Series("down, to the node", "down"))
_TIME = (Series("a full batch, divided by its samples", "server"),)
_LATENCY = (Series("one query of one sample", "node"),)


def render_depth_page(study: DepthStudy) -> str:
    """Return the page as text."""
    name = escape(study.model)
    kind = "encrypted" if study.task.encrypted else "simulated"
    found = [row for row in study.rows if row.refusal is None]
    sections = [_curves(study), _loads(found)]
    if study.task.encrypted:
        sections.append(_times(found))
    sections.append(_figures(study))
    body = f"""<h1>{name}: block depth</h1>
<p class="sub">{kind} at {len(found)} depths on {study.task.samples:,} samples</p>
{"" if study.task.encrypted else _SIMULATED}
<div class="tiles">{"".join(_tiles(study, found))}</div>
{"".join(sections)}
<footer>{escape(_origin(study))}</footer>"""
    return document(f"{name}: block depth", body, _STYLE)


def render_curve(study: DepthStudy) -> str:
    """Return the first curve as a file of its own."""
    drawn = _accuracy(study) if _has_accuracy(study) else _errors(study)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace("\n", f"\n{_ALONE}\n", 1)


_SIMULATED = (
    '<p class="simulated">Simulated: nothing was encrypted. Integers and polynomials are those of a real run; '
    "accuracy, errors, rounds and bytes are too, and there are no times.</p>"
)


def _tiles(study: DepthStudy, found: Sequence[DepthResult]) -> Iterable[str]:
    if study.accuracy_plain is not None:
        yield tile(f"{study.accuracy_plain:.2%}", "accuracy, plain model", f"{study.task.samples:,} samples")
    for row in (found[0], found[-1]) if len(found) > 1 else found:
        figure = f"{row.max_error or 0:.1e}" if row.accuracy is None else f"{row.accuracy:.2%}"
        what = "largest error" if row.accuracy is None else "accuracy"
        detail = f"{row.rounds} rounds" if row.rounds > 1 else "1 round"
        yield tile(figure, f"{what} at d = {row.depth}", detail)


def _has_accuracy(study: DepthStudy) -> bool:
    return any(row.accuracy is not None for row in study.rows)


def _curves(study: DepthStudy) -> str:
    accuracy = ""
    if _has_accuracy(study):
        key = f"; dashed: the plain model, {study.accuracy_plain:.2%}" if study.accuracy_plain is not None else ""
        accuracy = (
            f'<h2>Accuracy by block depth</h2><p class="note">d activations at most in one block{key}.</p>'
            f'<div class="wide">{_accuracy(study)}</div>'
        )
    return (
        f'{accuracy}<h2>Error by block depth</h2><p class="note">Mean difference of an output from the plain '
        f'model\'s; logarithmic scale.</p><div class="wide">{_errors(study)}</div>'
    )


def _accuracy(study: DepthStudy) -> str:
    points = [(row.depth, row.accuracy) for row in study.rows]
    values = [value for _, value in points if value is not None] + [study.accuracy_plain or 0.0]
    low = max(0.0, math.floor(20 * min(values) - 0.2) / 20)
    high = min(1.0, math.ceil(100 * max(values)) / 100) if max(values) > low else low + 0.01
    marks = [low + i * (high - low) / 5 for i in range(6)]

    def height(share: float) -> float:
        return (share - low) / (high - low)

    return _curve(points, height, marks, "{:.2%}".format, "Accuracy by block depth", study.accuracy_plain)


def _errors(study: DepthStudy) -> str:
    points = [(row.depth, row.mean_error) for row in study.rows]
    values = [value for _, value in points if value]
    low = math.floor(math.log10(min(values, default=1e-6)))
    high = max(math.ceil(math.log10(max(values, default=1.0))), low + 1)
    marks = [10.0**e for e in range(low, high + 1)]

    def height(value: float) -> float:
        return max(0.0, (math.log10(value) - low) / (high - low)) if value > 0 else 0.0

    return _curve(points, height, marks, "{:.1e}".format, "Mean error by block depth, logarithmic")


def _curve(
    points: Sequence[tuple[str, float | None]],
    height: Callable[[float], float],
    marks: Sequence[float],
    unit: Callable[[float], str],
    about: str,
    base: float | None = None,
) -> str:
    """Draw one value a depth; refused depths leave a gap. `height` maps a value to 0 (bottom) to 1 (top)."""
    bottom = _TOP + _HEIGHT
    step = (_RIGHT - _LEFT) / max(1, len(points))
    parts = []
    for mark in marks:
        y = bottom - height(mark) * _HEIGHT
        parts += [line(_LEFT, y, _RIGHT, y, "grid"), text(_LEFT - 10, y + 4, unit(mark), "mark", "end")]
    if base is not None:
        y = bottom - height(base) * _HEIGHT
        parts.append(group(f"plain model: {unit(base)}", line(_LEFT, y, _RIGHT, y, "base")))
    before: tuple[float, float] | None = None
    for number, (depth, value) in enumerate(points):
        x = _LEFT + (number + 0.5) * step
        parts.append(text(x, bottom + 22, f"d = {depth}", "strong", "middle"))
        if value is None:
            parts.append(text(x, bottom - 8, "refused", "mark", "middle"))
            before = None
            continue
        y = bottom - height(value) * _HEIGHT
        if before is not None:
            parts.append(line(*before, x, y, "curve"))
        parts.append(group(f"d = {depth}: {unit(value)}", circle(x, y, 6, "error")))
        parts.append(text(x, y - 12, unit(value), "", "middle"))
        before = (x, y)
    return drawing(WIDTH, bottom + 34, about, *parts)


def _loads(found: Sequence[DepthResult]) -> str:
    bars = [
        Bar(f"d = {r.depth}, {r.rounds} rounds, {r.batch_samples:,} samples", (r.batch_bytes_up, r.batch_bytes_down))
        for r in found
    ]
    return (
        f'<h2>Bytes of one full batch</h2>{legend(*_BYTES)}<div class="wide">'
        f"{stacked_bars(bars, _BYTES, size, 'Bytes of one full batch by depth, up and down')}</div>"
    )


def _times(found: Sequence[DepthResult]) -> str:
    images = [Bar(f"d = {r.depth}, {r.batch_samples:,} samples a batch", (r.full_image_s or 0.0,)) for r in found]
    queries = [Bar(f"d = {r.depth}, {r.rounds} rounds", (r.latency_s or 0.0,)) for r in found]
    return (
        f'<h2>Time per image</h2>{legend(*_TIME)}<div class="wide">'
        f"{stacked_bars(images, _TIME, duration, 'Time per image by depth, in full batches')}</div>"
        f'<h2>Time of one query</h2>{legend(*_LATENCY)}<div class="wide">'
        f"{stacked_bars(queries, _LATENCY, duration, 'Time of one query by depth')}</div>"
    )


#: How many of the columns say what a depth gives; the others say what it costs.
GAINS: Final = 9


def depth_columns(encrypted: bool) -> tuple[str, ...]:
    """Return what `depth_cells` are."""
    costs = ("batch s", "s / image", "full batch", "one query", "server", "node") if encrypted else ()
    return ("d", "rounds", "degrees", "N", "accuracy", "agreement", "largest error", "mean error", "outside",
            "batch", "up", "down", "a sample", *costs)  # fmt: skip


def depth_cells(row: DepthResult, encrypted: bool) -> tuple[str, ...]:
    """Return the figures of a depth that was not refused, as people read them."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    cells = (
        row.depth if row.same_as is None else f"{row.depth} (as {row.same_as})",
        str(row.rounds),
        ", ".join(map(str, row.polynomials)) or "-",
        str(row.ring or "-"),
        share(row.accuracy),
        share(row.agreement),
        f"{row.max_error or 0:.1e}",
        f"{row.mean_error or 0:.1e}",
        "-" if row.outside is None else f"{row.outside:.1e}",
        f"{row.batch_samples:,}",
        size(row.batch_bytes_up),
        size(row.batch_bytes_down),
        size((row.batch_bytes_up + row.batch_bytes_down) / row.batch_samples),
    )
    if not encrypted:
        return cells
    memory = row.memory_bytes or {}
    peaks = (memory.get(party) for party in ("server", "node"))
    times = (row.batch_s, row.image_s, row.full_image_s, row.latency_s)
    return (*cells, *(duration(s or 0.0) for s in times), *("-" if p is None else size(p) for p in peaks))


def _figures(study: DepthStudy) -> str:
    encrypted = study.task.encrypted
    columns = depth_columns(encrypted)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = []
    for row in study.rows:
        if row.refusal is None:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in depth_cells(row, encrypted))
            rows.append(f"<tr>{cells}</tr>")
        else:
            words = escape(row.refusal)
            rows.append(f'<tr><td>{row.depth}</td><td class="words" colspan="{len(columns) - 1}">{words}</td></tr>')
    return (
        '<h2>Figures</h2><p class="note">Outside: values of deep blocks beyond the calibrated ranges. Bytes of one '
        "full batch, keys included, and what of them is a sample's.</p>"
        f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>{_gains(study)}'
    )


def _gains(study: DepthStudy) -> str:
    gains = [
        f"d = {row.depth}: {row.calibration_gain[0]:.1e} without, {row.calibration_gain[1]:.1e} with"
        for row in study.rows
        if row.calibration_gain is not None
    ]
    if not gains:
        return ""
    return f'<p class="note">Mean error without and with the calibration at the end: {escape("; ".join(gains))}.</p>'


def _origin(study: DepthStudy) -> str:
    task = study.task
    degree = "chosen for each activation" if task.degree is None else f"{task.degree} for every activation"
    parts = [f"fit: {task.fit}, degree {degree}", f"{study.machine}, {study.cores} cores"]
    parts.append(", ".join(f"{name} {version}" for name, version in study.versions.items()))
    return "; ".join(parts) + "."
