"""The table of the comparison, as Markdown: one part a model, ratios first, and its place in README and docs.

    cells (dicts as benchmarks/peers writes them) --> rows --> Markdown --> between <!-- name --> and <!-- end name -->

A ratio above 1 means that heinfer in prepared mode is so many times better; below 1, so many times worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OURS = "heinfer, prepared mode"
COLUMNS = (
    "", "latency, times ours", "throughput, ours over it", "one query", "prepared before in", "server", "samples/s",
    "up, down", "keys", "peak memory", "largest error", "of output", "bits",
)  # fmt: skip
#: Those of the README.
SHORT = (0, 1, 2, 3, 6, 7, 10, 12)


def render(models: Mapping[str, Sequence[Mapping[str, Any]]], titles: Mapping[str, str], short: bool = False) -> str:
    """Return a table with a heading row for every model.

    Args:
        models: cells of every model by its name.
        titles: what to call a model.
        short: whether to leave out columns, and rows without figures.
    """
    chosen = SHORT if short else tuple(range(len(COLUMNS)))
    lines = [line([COLUMNS[c] for c in chosen]), line(["---"] * len(chosen))]
    for name, cells in models.items():
        ours = next((c for c in cells if c["peer"] == OURS), None)
        lines.append(line([f"**{titles[name]}**", *[""] * (len(chosen) - 1)]))
        for cell in cells:
            if short and cell["status"] != "ok":
                continue
            row = _row(cell, ours)
            lines.append(line([row[c] for c in chosen]))
    return "\n".join(lines) + "\n"


def line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def _row(cell: Mapping[str, Any], ours: Mapping[str, Any] | None) -> list[str]:
    name = str(cell["peer"])
    if cell["status"] != "ok":
        return [name, str(cell["status"]), *[""] * (len(COLUMNS) - 2)]
    latency, rate = median(cell.get("latency_s")), cell.get("throughput_per_s")
    slower = faster = ""
    if ours is not None and cell is not ours:
        own, own_rate = median(ours["latency_s"]), ours["throughput_per_s"]
        slower = times(latency / own) if latency and own else ""
        faster = times(own_rate / rate) if rate and own_rate else ""
    error, span = cell.get("max_error"), cell.get("output_range")
    memory = cell.get("peak_memory_bytes")
    return [
        name,
        slower,
        faster,
        spread(cell.get("latency_s")),
        seconds(cell.get("preparation_s")),
        seconds(cell.get("server_s")),
        "" if not rate else figure(rate),
        _traffic(cell),
        size(cell.get("key_bytes")),
        size(memory),
        "" if error is None else f"{error:.1e}",
        "" if error is None or not span else f"{error / span:.0e}",
        _security(cell.get("security_bits")),
    ]


def _security(bits: int | None) -> str:
    return "" if bits is None else str(bits) if bits else "< 128"


def _traffic(cell: Mapping[str, Any]) -> str:
    if not cell.get("bytes_up"):
        return ""
    both, batch = f"{size(cell['bytes_up'])}, {size(cell['bytes_down'])}", cell.get("batch") or 1
    return both if batch == 1 else f"{both} of {batch:,}"


def median(values: Sequence[float] | None) -> float | None:
    """Return the median, None of nothing."""
    return float(np.median(values)) if values else None


def figure(value: float) -> str:
    """Three figures: 0.0123, 1.23, 123, 12,300."""
    if value == 0:
        return "0"
    digits = 2 - int(np.floor(np.log10(abs(value))))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def times(ratio: float) -> str:
    """A ratio."""
    return f"{float(f'{ratio:.2g}'):,g}"


def seconds(value: float | None) -> str:
    """A time with its unit."""
    if value is None:
        return ""
    return f"{figure(1e3 * value)} ms" if value < 1 else f"{figure(value)} s"


def spread(values: Sequence[float] | None) -> str:
    """The median, and the quartiles where there are enough."""
    if not values:
        return ""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return seconds(float(middle)) + (f" ({seconds(float(low))} to {seconds(float(high))})" if len(values) > 3 else "")


def size(value: float | None) -> str:
    """Bytes with their unit."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{figure(value / unit)} {name}"
    return f"{value:.0f} B"


def insert(path: Path, name: str, content: str) -> None:
    """Replace what stands between the marks of a name in a file.

    Raises:
        ValueError: the marks are not there.
    """
    text = path.read_text(encoding="utf-8")
    first, last = f"<!-- {name} -->\n", f"<!-- end {name} -->\n"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"{path}: expected {first.strip()} and {last.strip()}, once each")
    start = text.index(first) + len(first)
    path.write_text(text[:start] + content + text[text.index(last) :], encoding="utf-8")
