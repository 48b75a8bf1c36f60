"""heinfer privacy audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heinfer.cli.screen import JsonOption, out, progress, table, write_json
from heinfer.processes import core_count

if TYPE_CHECKING:
    from heinfer.training.auditing.audit import Finding
    from heinfer.training.datasets.dataset import Dataset
    from heinfer.training.recipe import Recipe
    from heinfer.training.runs import RunRecord

AUDIT_FILE = "audit.json"


def audit_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or a recipe in TOML.")],
    data: Annotated[Path | None, typer.Option("--data", help="The run's private data: a file or a folder.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the statement; RUN-audit if not given.")
    ] = None,
    canaries: Annotated[int, typer.Option(min=1, help="Made-up records; more of them see more.")] = 1000,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Audit the first steps only; the claim is then theirs.")
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Audit three broken trainers as well, and fail if one passes.")
    ] = False,
    public_data: Annotated[
        Path | None, typer.Option("--public-data", help="Public data for the recipe's table [pretraining].")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads to train with; all cores if not given.")] = core_count(),
    json: JsonOption = None,
) -> None:
    """Train a recipe again with canaries, release nothing, and bound its epsilon from below."""
    import torch

    from heinfer.errors import InputError
    from heinfer.training.assembly import load_public
    from heinfer.training.auditing.audit import Audit, AuditOptions
    from heinfer.training.datasets.loading import load_dataset

    torch.set_num_threads(threads)
    recipe, record = read_subject(run)
    place = (output or run.parent / f"{run.stem}-audit") / AUDIT_FILE
    if place.exists():
        raise InputError(
            f"{place} is there already, and repeating an audit until it passes proves nothing: keep it, and name "
            "another folder for this one"
        )
    examples = load_dataset(recipe.data, data)
    audit = Audit(recipe, examples, AuditOptions(canaries, steps), load_public(recipe, public_data))
    if record is not None:
        _note(record, examples, f"audit with {canaries} canaries, {audit.plan.steps} steps: nothing is released")
    with progress() as tell:
        finding = audit.run(tell)
        broken = audit.run_controls(tell) if controls else {}
        tell("forecast", 0, 1)
        power = audit.forecast()
        tell("forecast", 1, 1)
    statement = audit.to_json(finding, power, broken)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json(place, statement)
    write_json(json, statement)
    show(statement)
    out.print(f"Written to {place}")
    _judge(finding, broken)


def read_subject(run: Path) -> tuple[Recipe, RunRecord | None]:
    """Return the recipe to audit, and the run that it belongs to if it is one's.

    Raises:
        InputError: there is no such run or recipe, or it is damaged.
    """
    from heinfer.errors import InputError
    from heinfer.training.recipe import parse_recipe, read_recipe
    from heinfer.training.runs import RUN_FILE, RunFolder

    if not run.is_dir():
        return read_recipe(run), None
    record = RunFolder(run).read()
    if record is None:
        raise InputError(f"{run} has no {RUN_FILE}: name the folder of a private run, or a recipe")
    return parse_recipe(record.recipe, origin=f"the recipe of {run}"), record


def show(statement: dict[str, Any]) -> None:
    """Print what an audit found and what it could have found."""
    percent = f"{statement['confidence']:.0%}"
    rows = table("", "", title=f"\nAudit of {statement['name']}: {statement['method']}", right=())
    rows.add_row("claim", f"epsilon {statement['claim']:.3f} at delta {statement['delta']:.3g}")
    rows.add_row("audited", f"{statement['steps']:,} steps, q = {statement['sampling_probability']:.4g}")
    rows.add_row("lower bound", f"{statement['lower_bound']:.3f} with {percent} confidence")
    rows.add_row("guesses", f"{statement['guesses']:,} of {statement['canaries']:,}, {statement['correct']:,} right")
    rows.add_row("verdict", statement["verdict"])
    for name, control in statement["controls"].items():
        caught = "caught" if control["lower_bound"] > statement["claim"] else "NOT CAUGHT"
        rows.add_row(f"control, {name}", f"lower bound {control['lower_bound']:.3f}: {caught}")
    out.print(rows)
    power = table(
        "true epsilon", "noise", "expected bound", "noticed", title="\nWhat it would notice", right=(0, 1, 2, 3)
    )
    for row in statement["power"]["forecasts"]:
        cells = (f"{row['true_epsilon']:.2f}", f"{row['noise']:.2f}", f"{row['bound']:.2f}", f"{row['noticed']:.0%}")
        power.add_row(*cells)
    out.print(power)
    above = statement["power"]["noticed_above"]
    out.print(
        "Less noise than claimed would hardly have shown, down to the least that is accounted for: take more canaries."
        if above is None
        else f"This audit would have noticed a true epsilon above {above:.1f}, in nine simulations of ten."
    )
    out.print(statement["limits"])


def _note(record: RunRecord, data: Dataset, text: str) -> None:
    """Write to the run's ledger that its records are read again."""
    from heinfer.errors import InputError
    from heinfer.training.privacy.ledger import Ledger

    fingerprint = data.private_fingerprint()
    if record.data != fingerprint:
        raise InputError(
            f"the run was trained on other data ({record.data[:16]}..., these are {fingerprint[:16]}...); audit it "
            "with its own records"
        )
    Ledger(Path(record.ledger), fingerprint).record(record.run_id, text)


def _judge(finding: Finding, controls: dict[str, Finding]) -> None:
    """Fail where something is wrong.

    Raises:
        IntegrityError: the claim is refuted, or a broken trainer was not found out.
    """
    from heinfer.errors import IntegrityError
    from heinfer.training.auditing.audit import Verdict

    if finding.verdict is Verdict.VIOLATED:
        raise IntegrityError(
            f"the claim is VIOLATED: epsilon is at least {finding.lower_bound:.3f}, claimed is {finding.claim:.3f}; "
            "release nothing that was trained by this recipe before the cause is found"
        )
    missed = [name for name, control in controls.items() if control.verdict is not Verdict.VIOLATED]
    if missed:
        raise IntegrityError(
            f"the audit did not find out the broken trainer ({', '.join(missed)}), so it says nothing about the real "
            "one: take more canaries, or fewer steps"
        )
