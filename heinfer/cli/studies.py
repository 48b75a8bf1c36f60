"""heinfer train --sweep-epsilon, heinfer study: what is measured with seeded runs, which are not private."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heinfer.cli.depth_study import depth_study_command
from heinfer.cli.screen import JsonOption, err, out, progress, table, write_json
from heinfer.errors import InputError
from heinfer.processes import core_count

if TYPE_CHECKING:
    from heinfer.training.datasets.dataset import Dataset
    from heinfer.training.recipe import Recipe
    from heinfer.training.sweep import Sweep


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(help="Studies: what popular claims are worth, measured.", no_args_is_help=True)
    group.command("dp")(study_command)
    group.command("block-depth")(depth_study_command)
    app.add_typer(group, name="study")


def sweep(
    recipe: Recipe, data: Dataset, output: Path, targets: str, seeds: int, public: Dataset | None
) -> dict[str, Any]:
    """Run a sweep and print it; return what sweep.json says.

    Raises:
        InputError: the targets are no numbers, or recipe and data don't fit together.
    """
    from heinfer.training.sweep import NOT_PRIVATE, run_sweep

    err.print(NOT_PRIVATE)
    with progress() as tell:
        found = run_sweep(recipe, data, output, read_targets(targets), seeds, public, tell)
    show_sweep(found)
    out.print(f"Written to {output}: {', '.join(sorted(p.name for p in output.iterdir() if p.is_file()))}")
    return found.to_json()


def read_targets(text: str) -> tuple[float, ...]:
    """Read numbers separated by commas.

    Raises:
        InputError: one is no number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"expected numbers separated by commas, for example 0.5,1,3,8, found {text!r}") from None


def show_sweep(found: Sweep) -> None:
    """Print mean, spread and worst accuracy, and go or no-go, at each epsilon."""
    rows = table(
        "epsilon", "noise multiplier", "mean", "spread", "worst", "minutes", right=(0, 1, 2, 3, 4, 5),
        title=f"\n{found.recipe} on {found.dataset}: {len(found.seeds)} seeds, delta {found.delta:.3g}",
    )  # fmt: skip
    for point in found.points:
        low, high = point.noise_multiplier
        spread = point.accuracy.spread
        rows.add_row(
            f"{point.target:g}",
            f"{low:.3f}" if math.isclose(low, high) else f"{low:.3f} to {high:.3f}",
            f"{point.accuracy.mean:.2%}",
            "-" if spread is None else f"{100 * spread:.2f}",
            f"{point.accuracy.worst:.2%}",
            f"{point.seconds / 60:.1f}",
        )
    out.print(rows)
    for point in found.points:
        out.print(f"epsilon {point.target:g}: {point.advice(found.floor)}")


def study_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Markdown to write; plots go beside it.")],
    claims: Annotated[
        str, typer.Option(metavar="NAME,...", help="Claims to test, for example linear-decay,model-size.")
    ] = "all",
    budget_minutes: Annotated[
        float, typer.Option(metavar="M", help="Time for this call; records and passes are chosen by it at the first.")
    ] = 60.0,
    data: Annotated[
        Path | None, typer.Option("--data", help="Public records, for example mnist.npz; small digits if not given.")
    ] = None,
    public_data: Annotated[
        Path | None, typer.Option("--public-data", help="Others of the same shape, to pretrain on.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each arm.")] = 3,
    work: Annotated[
        Path, typer.Option("--work", help="Folder with the results so far; gone on with where there is one.")
    ] = Path("runs/study-dp"),
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to train with; all cores if not given.")] = None,
    json: JsonOption = None,
) -> None:
    """Test popular claims about private training, each at equal epsilon, by seeded runs on public data."""
    import torch

    from heinfer.training.studies.claims import choose_claims
    from heinfer.training.studies.report import Context, tally, write_report
    from heinfer.training.studies.samples import load_records
    from heinfer.training.studies.study import run_study

    chosen = choose_claims(claims)
    torch.set_num_threads(threads or core_count())
    records = load_records(data)
    public = None if public_data is None else load_records(public_data)
    with progress() as tell:
        findings = run_study(chosen, records, work, 60 * budget_minutes, seeds, public, tell)
    command = _command(claims, budget_minutes, data, public_data, seeds, output)
    write_report(output, chosen, findings, Context(command, records, public, seeds))
    verdicts = tally(chosen, findings)
    rows = table("claim", "verdict", "in words")
    for claim in chosen:
        rows.add_row(claim.name, str(verdicts[claim.name]), claim.statement)
    out.print(rows)
    if not findings.finished:
        err.print(f"Not finished: call it again to go on; the results so far are in {work}.")
    out.print(f"Written to {output}")
    write_json(json, {name: str(verdict) for name, verdict in verdicts.items()})


def _command(claims: str, minutes: float, data: Path | None, public_data: Path | None, seeds: int, output: Path) -> str:
    """The command line, without the folders of this machine."""
    parts = [f"heinfer study dp --claims {claims} --budget-minutes {minutes:g} --seeds {seeds}"]
    parts += [f"--data {data.name}"] if data is not None else []
    parts += [f"--public-data {public_data.name}"] if public_data is not None else []
    return " ".join([*parts, f"-o {output.name if output.is_absolute() else output}"])
