"""heinfer evaluate."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heinfer.cli.screen import BundleArgument, JsonOption, ModeOption, out, progress, table, write_json
from heinfer.cli.signing import TrustedKeyOption
from heinfer.cli.transport import (
    CaOption,
    CertificateOption,
    KeyOption,
    ModelNameOption,
    PlainTextOption,
    TlsOption,
    TokenOption,
    security,
    token_of,
)
from heinfer.units import duration, rate, size

if TYPE_CHECKING:
    from heinfer.client.report import BlockReport, Costs, Report
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
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Encrypt nothing: the same integers and noise, for studies of precision.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write the report as a page for a browser.")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="HOST:PORT", help="A running node of this bundle, started with --allow-trace."),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option("--journal", metavar="FILE", help="Keep finished samples, N at a time, in a file.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the journal holds.")] = False,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration/--no-calibration",
            help="Calibrate outputs of deep blocks; with --node: whether that node does.",
        ),
    ] = True,
    trusted_key: TrustedKeyOption = None,
    tls: TlsOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertificateOption = None,
    tls_key: KeyOption = None,
    insecure_plain_text: PlainTextOption = False,
    token_file: TokenOption = None,
    model_name: ModelNameOption = "",
    json: JsonOption = None,
) -> None:
    """Compare a model under encryption with the same model in the clear: accuracy, error, time, bytes."""
    if resume and journal is None:
        raise typer.BadParameter("--resume goes with --journal")
    if node is None and any((tls, tls_ca, tls_cert, tls_key, insecure_plain_text, token_file, model_name)):
        raise typer.BadParameter("options of transport go with --node; without, all stays on this machine")
    from heinfer.client import evaluate
    from heinfer.client.data import load_data
    from heinfer.client.remote import RemoteModel
    from heinfer.plan import read_bundle_plan
    from heinfer.plan.signing import read_trusted_keys

    trusted = trusted_key or ()
    plan = read_bundle_plan(bundle, read_trusted_keys(trusted))
    loaded = load_data(data, plan.inputs[0], x_key=x, y_key=y, divide=divide, samples=samples)
    for note in loaded.notes:
        out.print(note)
    reference = None if model is None else _reference_of(model, plan)
    with ExitStack() as stack:
        tell = stack.enter_context(progress())
        through = None
        if node is not None:
            towards_node = security(tls, tls_ca, tls_cert, tls_key, insecure_plain_text)
            asked = RemoteModel(node, security=towards_node, token=token_of(token_file), model=model_name)
            through = stack.enter_context(asked)
        report = evaluate(
            bundle,
            loaded.x,
            loaded.y,
            reference=reference,
            mode=mode,
            simulate=simulate,
            trusted_keys=trusted,
            through=through,
            journal=journal,
            resume=resume,
            calibrated=calibration,
            progress=tell,
        )
    show(report)
    if html is not None:
        from heinfer.client.page import write_page

        write_page(html, report, plan)
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
    if plan.deep:
        raise PlanError(
            "a bundle with deep blocks is evaluated with the model that it keeps: partition again with --reference"
        )
    if imported.sha256 != plan.model.sha256 or draft.plan.blocks != plan.blocks:
        raise PlanError(
            f"{model} is not the model of this bundle ({plan.model.name}, sha256 {plan.model.sha256[:16]}...)"
        )
    return draft.reference(imported.original.tobytes())


def show(report: Report) -> None:
    """Print a report."""
    costs, other = report.costs, "simulated" if report.simulated else "encrypted"
    figures = table("", "plain", other, title=f"{report.model}: {report.samples} samples", right=(1, 2))
    if report.accuracy_plain is not None and report.accuracy_encrypted is not None:
        figures.add_row("accuracy", f"{report.accuracy_plain:.2%}", f"{report.accuracy_encrypted:.2%}")
    if costs is not None:
        figures.add_row("seconds", f"{report.plain_s:.2f}", f"{costs.seconds:.2f}")
    if figures.row_count:
        out.print(figures)
    if report.agreement is not None:
        out.print(f"agreement {report.agreement:.2%} ({len(report.disagreements)} samples differ in top-1)")
    for found in report.disagreements[:10]:
        out.print(f"  sample {found.sample}: plain {found.plain}, {other} {found.encrypted}, gap {found.gap:.1e}")
    out.print(
        f"error: largest {report.max_abs_error:.1e}, mean {report.mean_abs_error:.1e}, end-to-end estimate "
        f"{report.estimate_text}, bound of the last block {report.bound_text}"
    )
    if report.polynomials is not None:
        for sentence in report.polynomials.sentences(report.traced_samples):
            out.print(sentence)
    if costs is None:
        out.print(f"simulated, nothing was encrypted: {report.mode} mode, {report.rounds} rounds")
    else:
        _show_costs(report, costs)
    out.print(_block_table(report))
    ring = report.parameters
    out.print(f"N = {ring['N']}, log2 q = {ring['log2_q']}, at least {ring['security_bits']} bits of security")
    for block in report.blocks:
        if block.deep is not None:
            out.print(
                f"deep block {block.block}: N = {block.deep.degree}, log2 q = {block.deep.log2_q}, at least "
                f"{block.deep.security_bits} bits of security, {block.deep.activations} activations as polynomials, "
                f"bound: distance from the {'model' if block.deep.exact else 'same polynomials'}"
                + (f", if {block.error_bound_condition}" if block.error_bound_condition else "")
            )
    if costs is not None:
        peaks = costs.peak_memory_bytes.items()
        memory = ", ".join(f"{name} {size(peak)}" for name, peak in peaks if peak is not None)
        out.print(f"peak memory: {memory or 'unknown'}; {report.machine}, {report.cores} cores")


def _show_costs(report: Report, costs: Costs) -> None:
    out.print(
        f"{rate(costs.images_per_s)} samples/s in {report.mode} mode, {report.rounds} rounds, "
        f"{size(costs.bytes_up)} up, {size(costs.bytes_down)} down"
    )
    prepared = "" if costs.preparation_s is None else f", prepared before in {duration(costs.preparation_s)}"
    out.print(f"one query: {duration(costs.latency_s)} in {costs.latency_mode} mode{prepared}")


def _block_table(report: Report) -> object:
    columns = ["block", "operators"]
    if report.costs is not None:
        columns += ["node s", "server s", "wire s", "up", "down"]
    columns += ["error", "bound"]
    title = f"\nBlocks (errors on {report.traced_samples} samples)"
    blocks = table(*columns, title=title, right=tuple(range(2, len(columns))))
    for block in report.blocks:
        errors = (f"{block.measured_error:.1e}", block.bound_text)
        blocks.add_row(str(block.block), ", ".join(block.operators), *_cost_cells(block), *errors)
    return blocks


def _cost_cells(block: BlockReport) -> tuple[str, ...]:
    costs = block.costs
    if costs is None:
        return ()
    seconds = (f"{amount:.2f}" for amount in (costs.node_s, costs.server_s, costs.wire_s))
    return (*seconds, size(costs.bytes_up), size(costs.bytes_down))
