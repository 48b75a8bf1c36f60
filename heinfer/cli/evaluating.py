"""heinfer evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heinfer.cli.screen import BundleArgument, JsonOption, ModeOption, duration, out, progress, size, table, write_json

if TYPE_CHECKING:
    from heinfer.client.report import Report
    from heinfer.plan import Plan, Reference


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("evaluate")(evaluate_command)


def evaluate_command(
    bundle: BundleArgument,
    data: Annotated[Path, typer.Option("--data", metavar="DATA.npz", help="Samples x and, if known, labels y.")],
    samples: Annotated[int | None, typer.Option(min=1, help="How many, from the front; all where not given.")] = None,
    x: Annotated[str, typer.Option("--x", metavar="KEY", help="Name of the samples in the file.")] = "x",
    y: Annotated[str | None, typer.Option("--y", metavar="KEY", help="Name of the labels in the file.")] = None,
    divide: Annotated[float | None, typer.Option(help="Divide the samples by this; 255 for images.")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="MODEL", help="The model, for a bundle made with --no-reference.")
    ] = None,
    mode: ModeOption = "auto",
    json: JsonOption = None,
) -> None:
    """Compare a model under encryption with the same model in the clear: accuracy, error, time, bytes."""
    from heinfer.client import evaluate
    from heinfer.client.data import load_data
    from heinfer.plan import read_plan

    plan, _ = read_plan(bundle)
    loaded = load_data(data, plan.inputs[0], x_key=x, y_key=y, divide=divide, samples=samples)
    for note in loaded.notes:
        out.print(note)
    reference = None if model is None else _reference_of(model, plan)
    with progress() as tell:
        report = evaluate(bundle, loaded.x, loaded.y, reference=reference, mode=mode, progress=tell)
    show(report)
    write_json(json, report.to_dict())


def _reference_of(model: Path, plan: Plan) -> Reference:
    """Partition the model again, in memory, and check that it is the bundle's.

    Raises:
        PlanError: it is another model.
    """
    from heinfer.errors import PlanError
    from partitioner.importing import given_dimensions
    from partitioner.pipeline import partition_in_memory

    dimensions = given_dimensions(model, {t.name: t.shape for t in plan.inputs})
    imported, draft, _ = partition_in_memory(model, plan.ring.parameters, dimensions)
    if imported.sha256 != plan.model.sha256 or draft.plan.blocks != plan.blocks:
        raise PlanError(
            f"{model} is not the model of this bundle ({plan.model.name}, sha256 {plan.model.sha256[:16]}...)"
        )
    return draft.reference(imported.content)


def show(report: Report) -> None:
    """Print a report."""
    figures = table("", "plain", "encrypted", title=f"{report.model}: {report.samples} samples", right=(1, 2))
    if report.accuracy_plain is not None and report.accuracy_encrypted is not None:
        figures.add_row("accuracy", f"{report.accuracy_plain:.2%}", f"{report.accuracy_encrypted:.2%}")
    figures.add_row("seconds", f"{report.plain_s:.2f}", f"{report.seconds:.2f}")
    out.print(figures)
    if report.agreement is not None:
        out.print(f"agreement {report.agreement:.2%} ({len(report.disagreements)} samples differ in top-1)")
    for found in report.disagreements[:10]:
        out.print(f"  sample {found.sample}: plain {found.plain}, encrypted {found.encrypted}, gap {found.gap:.1e}")
    out.print(
        f"error: largest {report.max_abs_error:.1e}, mean {report.mean_abs_error:.1e}, end-to-end estimate "
        f"{report.error_estimate:.1e}, bound of the last block {report.error_bound:.1e}"
    )
    out.print(
        f"{rate(report.images_per_s)} samples/s in {report.mode} mode, {report.rounds} rounds, "
        f"{size(report.bytes_up)} up, {size(report.bytes_down)} down"
    )
    prepared = "" if report.preparation_s is None else f", prepared before in {duration(report.preparation_s)}"
    out.print(f"one query: {duration(report.latency_s)} in {report.latency_mode} mode{prepared}")
    out.print(_block_table(report))
    ring = report.parameters
    memory = ", ".join(f"{name} {size(peak)}" for name, peak in report.peak_memory_bytes.items() if peak is not None)
    out.print(f"N = {ring['N']}, log2 q = {ring['log2_q']}, at least {ring['security_bits']} bits of security")
    out.print(f"peak memory: {memory or 'unknown'}; {report.machine}, {report.cores} cores")


def rate(per_second: float) -> str:
    """Return a rate with two digits at least."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _block_table(report: Report) -> object:
    blocks = table(
        "block", "operators", "node s", "server s", "wire s", "up", "down", "error", "bound",
        title=f"\nBlocks (errors on {report.traced_samples} samples)", right=(2, 3, 4, 5, 6, 7, 8),
    )  # fmt: skip
    for block in report.blocks:
        blocks.add_row(
            str(block.block),
            ", ".join(block.operators),
            f"{block.node_s:.2f}",
            f"{block.server_s:.2f}",
            f"{block.wire_s:.2f}",
            size(block.bytes_up),
            size(block.bytes_down),
            f"{block.measured_error:.1e}",
            f"{block.error_bound:.1e}",
        )
    return blocks
