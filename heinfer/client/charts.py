"""The charts of the report's page: accuracy, errors against bounds, stacked bars; one row a block, however many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from heinfer.client.report import Report
from heinfer.client.svg import circle, drawing, group, line, rectangle, shortened, text

#: Units of all drawings: labels to the left, figures to the right, the chart between them.
WIDTH = 1120
_LEFT, _RIGHT = 370, 960
_ROW, _HEAD = 24, 30
#: Axes have about so many marks.
_MARKS = 6
#: Errors below float64's own are drawn as zeros.
_SMALLEST_ERROR = 1e-18


@dataclass(frozen=True, slots=True)
class Series:
    """A part of every bar: its name, and its class in the style sheet."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its label, and one length for every series."""

    label: str
    parts: tuple[float, ...]


def legend(*series: Series) -> str:
    """Say what colours and marks mean."""
    keys = (f'<span class="key"><i class="{s.kind}"></i>{escape(s.name)}</span>' for s in series)
    return f'<p class="legend">{"".join(keys)}</p>'


def accuracy_chart(report: Report) -> str:
    """Draw both accuracies as bars of one scale, 0 to 100 %."""
    other = "simulated" if report.simulated else "encrypted"
    bars = (("plain", report.accuracy_plain, "plain"), (other, report.accuracy_encrypted, "server"))
    parts = _axis([i / 5 for i in range(6)], lambda share: _LEFT + share * (_RIGHT - _LEFT), "{:.0%}".format, 2)
    for row, (name, share, kind) in enumerate(bars):
        top = _HEAD + row * _ROW
        found = share or 0.0
        words = f"{found:.2%} ({round(found * report.samples):,} of {report.samples:,})"
        bar = rectangle(_LEFT, top + 4, found * (_RIGHT - _LEFT), _ROW - 8, kind)
        parts.append(group(f"{name}: {words}", bar))
        parts += [text(_LEFT - 10, top + 16, name, "", "end"), text(_RIGHT + 12, top + 16, words)]
    return drawing(WIDTH, _HEAD + 2 * _ROW + 4, "Accuracy of the plain and of the other run", *parts)


def stacked_bars(bars: Sequence[Bar], series: Sequence[Series], unit: Callable[[float], str], about: str) -> str:
    """Draw one bar a row, its parts one after the other.

    Args:
        bars: rows, downwards.
        series: what the parts are.
        unit: how an amount is written.
        about: what is drawn, for those who can't see it.
    """
    largest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    marks = _linear_marks(largest)
    scale = (_RIGHT - _LEFT) / largest
    parts = _axis(marks, lambda amount: _LEFT + amount * scale, unit, len(bars))
    for row, bar in enumerate(bars):
        top, x = _HEAD + row * _ROW, float(_LEFT)
        words = ", ".join(f"{s.name} {unit(amount)}" for s, amount in zip(series, bar.parts, strict=True))
        pieces = []
        for part, amount in zip(series, bar.parts, strict=True):
            pieces.append(rectangle(x, top + 4, amount * scale, _ROW - 8, part.kind))
            x += amount * scale
        parts.append(group(f"{bar.label}: {words}", _label(bar.label, top), *pieces))
        parts.append(text(_RIGHT + 12, top + 16, unit(sum(bar.parts))))
    return drawing(WIDTH, _HEAD + len(bars) * _ROW + 4, about, *parts)


def error_chart(report: Report) -> str:
    """Draw the measured error of every block beside its bound, and of the whole model beside its estimate.

    Where there is no bound, or no estimate as for models with deep blocks, the measured error stands alone.
    """
    rows: list[tuple[str, float, float | None, str]] = [
        (block_label(b.block, b.operators), b.measured_error, b.error_bound, b.bound_text) for b in report.blocks
    ]
    whole_model = "whole model: largest error, and estimate"
    rows.append((whole_model, report.max_abs_error, report.error_estimate, report.estimate_text))
    amounts = [amount for _, error, bound, _ in rows for amount in (error, bound)]
    positive = [amount for amount in amounts if amount is not None and amount > _SMALLEST_ERROR]
    low = math.floor(math.log10(min(positive, default=1e-6)))
    high = max(math.ceil(math.log10(max(positive, default=1.0))), low + 1)
    scale = (_RIGHT - _LEFT) / (high - low)
    step = max(1, round((high - low) / _MARKS))

    def place(value: float) -> float:
        return _LEFT + (math.log10(value) - low) * scale if value > _SMALLEST_ERROR else _LEFT

    exponents = [10.0**exponent for exponent in range(low, high + 1, step)]
    parts = _axis(exponents, place, "{:.0e}".format, len(rows))
    for row, (label, error, bound, said) in enumerate(rows):
        top = _HEAD + row * _ROW
        middle = top + _ROW / 2
        short = f"{error:.1e}, none" if bound is None else f"{error:.1e} of {bound:.1e}"
        marks = [circle(place(error), middle, 5, "error")]
        if bound is not None:
            span = line(place(error), middle, place(bound), middle, "span")
            marks = [span, *marks, rectangle(place(bound) - 2, middle - 8, 4, 16, "bound")]
        whole = row == len(report.blocks)
        parts.append(
            group(
                f"{label}: {error:.1e}, {'estimate' if whole else 'bound'} {said}",
                _label(label, top, "strong" if whole else ""),
                *marks,
            )
        )
        parts.append(text(_RIGHT + 12, top + 16, short))
    return drawing(WIDTH, _HEAD + len(rows) * _ROW + 4, "Error and bound of every block, logarithmic", *parts)


def block_label(block: int, operators: Sequence[str]) -> str:
    """Return a block's number and what it holds."""
    return f"{block}: {', '.join(operators)}"


def _label(label: str, top: float, kind: str = "") -> str:
    return text(_LEFT - 10, top + 16, shortened(label, _LEFT - 10), kind, "end")


def _axis(
    marks: Sequence[float], place: Callable[[float], float], unit: Callable[[float], str], rows: int
) -> list[str]:
    bottom = _HEAD + rows * _ROW
    parts = []
    for mark in marks:
        x = place(mark)
        parts += [line(x, _HEAD - 6, x, bottom, "grid"), text(x, _HEAD - 12, unit(mark), "mark", "middle")]
    return parts


def _linear_marks(largest: float) -> list[float]:
    """Return round numbers from 0 to at most `largest`: steps of 1, 2 or 5 times a power of ten."""
    rough = largest / _MARKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [i * step for i in range(int(largest / step) + 1)]
