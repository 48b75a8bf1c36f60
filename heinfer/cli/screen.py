"""What the commands share: consoles, the --json option, tables, units, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from heinfer.units import duration as duration
from heinfer.units import size as size

#: Columns where output goes to a file or a pipe: tables stay whole.
_FILE_COLUMNS = 132
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _FILE_COLUMNS)
err = Console(stderr=True, highlight=False, soft_wrap=True)

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the figures as JSON.")]
ModeOption = Annotated[
    Literal["auto", "standard", "prepared"],
    typer.Option(
        "--mode",
        help="prepared: milliseconds for one query; standard: SEAL alone; auto: the faster one by forecast.",
    ),
]
BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder written by `heinfer partition`.")]


def write_json(path: Path | None, content: Any) -> None:
    """Write figures where they were asked for."""
    if path is not None:
        from heinfer.plan.files import write_file

        write_file(path, (json.dumps(content, indent=1) + "\n").encode())


def table(*columns: str, title: str | None = None, right: tuple[int, ...] = ()) -> Table:
    """Return a plain table; columns numbered in `right` are aligned to the right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for position, name in enumerate(columns):
        result.add_column(name, justify="right" if position in right else "left", overflow="fold")
    return result


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function (phase, done, total) that draws one bar a phase on standard error."""
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def tell(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done)

        yield tell
