"""heinfer partition, heinfer inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heinfer.cli.screen import BundleArgument, JsonOption, out, size, table, write_json

if TYPE_CHECKING:
    from heinfer.plan import Plan


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("partition")(partition_command)
    app.command("inspect")(inspect_command)


def partition_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="ONNX model.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="BUNDLE", help="Folder to write.")],
    reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Keep the model in the bundle, for `evaluate`.")
    ] = True,
    json: JsonOption = None,
) -> None:
    """Split a model into blocks for the server and steps for the node."""
    from partitioner import partition

    result = partition(model, output, reference=reference)
    show_steps(result.plan)
    out.print(
        f"\nIn the clear, the parts give what the model gives: largest relative difference {result.difference:.1e}"
    )
    out.print(f"Wrote {output}: server/ for the untrusted server, node/ for the trusted node")
    write_json(json, {"difference": result.difference, **describe(result.plan)})


def inspect_command(bundle: BundleArgument, json: JsonOption = None) -> None:
    """Show steps, parameters, security level, bytes, rounds and error bounds of a bundle."""
    from heinfer.plan import load_node, load_server, read_bundle_plan

    plan = read_bundle_plan(bundle)
    parties = {"server": load_server, "node": load_node}
    for name, load in parties.items():
        if (bundle / name).exists():
            load(bundle / name)
    figures = describe(plan)
    show_steps(plan)
    ring = figures["parameters"]
    out.print(
        f"\nParameters: N = {ring['N']}, log2 q = {ring['log2_q']}, at least {ring['security_bits']} bits of security "
        "(ternary secret, 2024 guidelines)"
    )
    out.print(f"Rounds: {figures['rounds']}, keys on the server: none")
    for samples, forecast in figures["bytes"].items():
        out.print(f"Bytes for {samples} sample(s): {size(forecast['up'])} up, {size(forecast['down'])} down")
    bounds = table("block", "error bound", "operators", title="\nError bounds for inputs of magnitude 1", right=(0, 1))
    for index, block in enumerate(figures["blocks"]):
        bounds.add_row(str(index), f"{block['unit_bound']:.1e}", ", ".join(block["operators"]))
    out.print(bounds)
    write_json(json, figures)


def show_steps(plan: Plan) -> None:
    """Print what runs where, in order."""
    from heinfer.plan import NodeStep

    steps = table(
        "where", "block", "operators", "values up", "values down", title=f"{plan.model.name}: steps", right=(3, 4)
    )
    for step in plan.steps:
        if isinstance(step, NodeStep):
            steps.add_row("node", "", ", ".join(step.operators), "", "")
            continue
        for index in step.blocks:
            block = plan.blocks[index]
            rows = (str(block.input_rows), str(block.output_rows))
            steps.add_row("server", str(index), ", ".join(block.operators), *rows)
    out.print(steps)


def describe(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan."""
    from heinfer.client.evaluation import ring_figures
    from heinfer.plan import NodeStep

    return {
        "model": plan.model.name,
        "sha256": plan.model.sha256,
        "parameters": ring_figures(plan),
        "rounds": plan.rounds,
        "bytes": {str(samples): forecast_bytes(plan, samples) for samples in (1, plan.ring.degree)},
        "steps": [
            {"where": "node", "operators": list(s.operators)}
            if isinstance(s, NodeStep)
            else {"where": "server", "blocks": list(s.blocks)}
            for s in plan.steps
        ],
        "blocks": [
            {
                "operators": list(b.operators),
                "values_up": b.input_rows,
                "values_down": b.output_rows,
                "multiply_adds": b.program.multiply_adds(),
                "row_sum": b.row_sum,
                "unit_bound": b.unit_bound,
            }
            for b in plan.blocks
        ],
    }


def forecast_bytes(plan: Plan, samples: int) -> dict[str, int]:
    """Return the payload of a query of at most N samples in standard mode: exact, not an estimate."""
    from heinfer.wire import row_bytes

    row = row_bytes(samples, plan.ring.degree)
    return {
        "up": row * sum(b.input_rows for b in plan.blocks),
        "down": row * sum(b.output_rows for b in plan.blocks),
    }
