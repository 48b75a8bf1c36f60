"""heinfer privacy: plan and ledger; audit is in `heinfer.cli.auditing`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heinfer.cli.auditing import audit_command
from heinfer.cli.screen import JsonOption, err, out, table, write_json

if TYPE_CHECKING:
    from heinfer.training.privacy.ledger import Ledger
    from heinfer.training.privacy.planning import PrivacyPlan

#: Targets to start from; each is printed with what it really costs.
PRESETS = {"medical": 3.0, "finance": 5.0, "commerce": 9.9}
#: Levels of noise that are listed one by one.
_LISTED = 8


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(help="Differential privacy of training: what it costs, what was spent.", no_args_is_help=True)
    group.command("plan")(plan_command)
    group.command("ledger")(ledger_command)
    group.command("audit")(audit_command)
    app.add_typer(group, name="privacy")


def plan_command(
    samples: Annotated[int, typer.Option(metavar="N", help="Records of the training data.")],
    batch: Annotated[int, typer.Option(metavar="B", help="Expected batch: a record joins a step with B / N.")],
    epochs: Annotated[float | None, typer.Option(help="Length of the run: floor(epochs * N / B) steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length of the run, instead of --epochs.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="Find the noise that costs this at most.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Give the noise, deviation over clip norm, instead of a target.")
    ] = None,
    preset: Annotated[
        Literal["medical", "finance", "commerce"] | None,
        typer.Option(help="A target to start from: epsilon 3, 5, or below 10."),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(help="constant, steps:0.6,0.9,1.1, linear:1.0,0.3[,start,end] or exponential:1.0,0.3."),
    ] = "constant",
    delta: Annotated[float | None, typer.Option(help="Below 1 / N; min(1e-5, 1 / (10 N)) if not given.")] = None,
    json: JsonOption = None,
) -> None:
    """Say what noise a private training run needs and what it costs, before it reads anything."""
    from heinfer.training.privacy.planning import plan_training

    if preset is not None and (target_epsilon is not None or noise_multiplier is not None):
        raise typer.BadParameter("--preset is a target; leave out --target-epsilon and --noise-multiplier")
    plan = plan_training(
        samples=samples,
        batch=batch,
        epochs=epochs,
        steps=steps,
        delta=delta,
        target_epsilon=PRESETS[preset] if preset is not None else target_epsilon,
        noise_multiplier=noise_multiplier,
        shape=schedule,
    )
    show(plan, preset)
    write_json(json, {**plan.to_json(), "schedule": schedule, "preset": preset})


def show(plan: PrivacyPlan, preset: str | None = None) -> None:
    """Print a plan."""
    from heinfer.training.privacy.accounting import ACCOUNTANT_VERSION

    out.print(
        f"{plan.samples:,} records, {plan.steps:,} steps on Poisson samples of {plan.expected_batch:,} expected "
        f"records (probability {plan.sampling_probability:.4g})"
    )
    levels = table("steps", "noise multiplier", right=(0, 1))
    shown = plan.levels if len(plan.levels) <= _LISTED else (*plan.levels[:3], None, *plan.levels[-3:])
    for level in shown:
        levels.add_row(*(("...", "...") if level is None else (f"{level.steps:,}", f"{level.noise_multiplier:.4f}")))
    out.print(levels)
    if len(plan.levels) > _LISTED:
        out.print(f"{len(plan.levels)} levels in all")
    wanted = "" if plan.target_epsilon is None else f"; target {plan.target_epsilon:g}"
    named = "" if preset is None else f" (preset {preset})"
    out.print(
        f"epsilon {round_up(plan.epsilon_pld)} at delta {plan.delta:.3g}{wanted}{named}\n"
        f"by {ACCOUNTANT_VERSION} with privacy loss distributions; {round_up(plan.epsilon_rdp)} by Rényi accounting\n"
        "adjacency: add or remove one record"
    )


def round_up(epsilon: float) -> str:
    """Return epsilon with three decimals, never less than it is."""
    from decimal import ROUND_CEILING, Decimal

    if epsilon == float("inf"):
        return "infinity"
    return str(Decimal(epsilon).quantize(Decimal("0.001"), ROUND_CEILING))


def ledger_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, its run.json, or a ledger file.")],
    budget: Annotated[float | None, typer.Option(metavar="EPSILON", help="Say what is left of this budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="The smallest one of the runs if not given.")] = None,
    json: JsonOption = None,
) -> None:
    """Verify a ledger and say what was spent on these data, on what, and what is left."""
    from heinfer.errors import PrivacyBudgetError
    from heinfer.training.privacy.ledger import Ledger

    ledger = Ledger(find_ledger(run))
    ledger.verify()
    figures = _figures(ledger, delta, budget)
    _show_ledger(ledger, figures)
    write_json(json, figures)
    if budget is not None and figures["epsilon"] > budget:
        raise PrivacyBudgetError(
            f"the runs on these data have spent epsilon {round_up(figures['epsilon'])} at delta "
            f"{figures['delta']:.3g}, more than the budget of {budget:g}: use these data no further"
        )


def find_ledger(run: Path) -> Path:
    """Return the ledger of a run: its ledger.jsonl, or the file that its run.json names as "ledger".

    Raises:
        InputError: there is none.
    """
    from heinfer.errors import InputError

    if run.is_dir():
        if (run / "ledger.jsonl").exists():
            return run / "ledger.jsonl"
        run = run / "run.json"
        if not run.exists():
            raise InputError(f"{run.parent} has neither ledger.jsonl nor run.json")
    if run.name != "run.json":
        return run
    try:
        return run.parent / str(json_format.loads(run.read_text(encoding="utf-8"))["ledger"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f'{run} does not name a "ledger"') from error


def _figures(ledger: Ledger, delta: float | None, budget: float | None) -> dict[str, Any]:
    from heinfer.errors import ParameterError
    from heinfer.training.privacy.accounting import ACCOUNTANT_VERSION, ADJACENCY, compute_epsilon

    if budget is not None and not 0 < budget < float("inf"):
        raise ParameterError(f"expected a positive budget, found {budget}")
    runs = ledger.runs()
    if delta is None:
        delta = min((run.delta for run in runs.values()), default=1e-5)
    parts = []
    for run in runs:
        for purpose in ledger.purposes(run):
            taken = ledger.spent(run, purpose)
            times = sum(mechanism.count for mechanism in taken)
            parts.append({"run": run, "purpose": purpose, "times": times, "epsilon": compute_epsilon(taken, delta)})
    epsilon = compute_epsilon(ledger.spent(), delta)
    return {
        "data": ledger.fingerprint,
        "entries": ledger.head.entries,
        "head": ledger.head.sha256,
        "torn_line": ledger.torn_line,
        "parts": parts,
        "seeded": [name for name, run in runs.items() if run.settings.get("seeded")],
        "epsilon": epsilon,
        "delta": delta,
        "adjacency": ADJACENCY,
        "accountant": ACCOUNTANT_VERSION,
        "budget": budget,
        "left": None if budget is None else max(budget - epsilon, 0.0),
    }


def _show_ledger(ledger: Ledger, figures: dict[str, Any]) -> None:
    out.print(f"{ledger.path}: {figures['entries']:,} entries, chain intact; data {figures['data'] or 'unknown'}")
    if figures["torn_line"] is not None:
        err.print(f"line {figures['torn_line']} is incomplete: a crash while it was written, before anything was taken")
    rows = table("run", "purpose", "times", "epsilon", right=(2, 3))
    for part in figures["parts"]:
        rows.add_row(part["run"], part["purpose"], f"{part['times']:,}", round_up(part["epsilon"]))
    rows.add_row("all together", "", "", round_up(figures["epsilon"]))
    out.print(rows)
    if figures["seeded"]:
        err.print(
            f"seeded: {', '.join(figures['seeded'])}. Anybody can compute the noise of a seeded run: if anything of it "
            "was handed on, its epsilon is infinite, whatever stands above"
        )
    left = ""
    if figures["budget"] is not None:
        left = f"; {figures['left']:.3f} of a budget of {figures['budget']:g} is left"
    out.print(f"at delta {figures['delta']:.3g}, add or remove one record, by {figures['accountant']}{left}")
