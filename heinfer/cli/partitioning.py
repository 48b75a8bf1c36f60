"""heinfer partition, heinfer inspect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heinfer.cli.deepening import (
    DEEP,
    CalibrationKeyOption,
    CalibrationOption,
    DegreeOption,
    DivideOption,
    FitOption,
    deep_block_figures,
    deep_options,
    read_calibration,
    read_depth,
    show_activations,
    show_deep_blocks,
    warn_of_calibration,
)
from heinfer.cli.screen import BundleArgument, JsonOption, out, size, table, write_json
from heinfer.cli.signing import TrustedKeyOption, show_signer

if TYPE_CHECKING:
    from heinfer.plan import Plan, PreparedInfo

#: Smallest degree N of each level of `--security`: the modulus stays, so 4096 leaves twice the room of the table.
DEGREES = {"standard": 2048, "long": 4096}
#: Error bound, relative to the largest output, from which on `partition` suggests a precision.
COARSE_BOUND = 1e-2


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("partition")(partition_command)
    app.command("inspect")(inspect_command)


def partition_command(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="ONNX model.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="BUNDLE", help="Folder to write.")] = None,
    reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Keep the model in the bundle, for `evaluate`.")
    ] = True,
    security: Annotated[
        Literal["standard", "long"],
        typer.Option("--security", help="long: N = 4096 at least, for data that must stay secret for decades."),
    ] = "standard",
    batch_hints: Annotated[
        bool,
        typer.Option("--batch-hints", help="Add hints for batches of up to N samples: large, and fast for thousands."),
    ] = False,
    dimensions: Annotated[
        list[str] | None,
        typer.Option(
            "--dimension", metavar="NAME=SIZE", help="Fix a symbolic axis other than the batch, such as sequence=64."
        ),
    ] = None,
    on_node: Annotated[
        list[str] | None,
        typer.Option("--on-node", metavar="NAME", help="Run an operator on the node: its name or type, or a pattern."),
    ] = None,
    on_server: Annotated[
        list[str] | None,
        typer.Option("--on-server", metavar="NAME", help="Run an operator without weights under encryption, likewise."),
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(
            "--precision",
            metavar="BOUND",
            help="Largest error bound of a block for inputs of magnitude 1, such as 1e-5: weights get more digits.",
        ),
    ] = None,
    block_depth: Annotated[
        str | None,
        typer.Option(
            "--block-depth",
            metavar="D|all",
            help="Let blocks hold up to D activations, as polynomials; all: the whole model.",
            rich_help_panel=DEEP,
        ),
    ] = None,
    calibration: CalibrationOption = None,
    x: CalibrationKeyOption = "x",
    divide: DivideOption = None,
    degree: DegreeOption = None,
    fit: FitOption = "least-squares",
    rotate: Annotated[
        Path | None,
        typer.Option(
            "--rotate", metavar="BUNDLE", help="Renew a bundle's seed and hints instead; do so every 30 days."
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="SIGNING.pem", help="For --rotate of a signed bundle: sign what is renewed."),
    ] = None,
    trusted_key: TrustedKeyOption = None,
    json: JsonOption = None,
) -> None:
    """Split a model into blocks for the server and steps for the node."""
    if rotate is not None:
        if model is not None or output is not None:
            raise typer.BadParameter("--rotate takes a bundle and no model")
        return _rotate(rotate, key, trusted_key or ())
    if key is not None or trusted_key:
        raise typer.BadParameter("--key and --trusted-key go with --rotate; sign a new bundle with `heinfer sign`")
    if model is None or output is None:
        raise typer.BadParameter("expected MODEL and -o BUNDLE, or --rotate BUNDLE")
    if precision is not None and not 0 < precision < inf:
        raise typer.BadParameter(f"--precision: expected a finite error bound above 0, such as 1e-5, found {precision}")
    if (block_depth is None) != (calibration is None):
        raise typer.BadParameter(
            "--block-depth goes with --calibration DATA.npz: ranges of polynomials come from training data"
        )
    if block_depth is None and degree is not None:
        raise typer.BadParameter("--degree goes with --block-depth")
    from heinfer.ring import RingParameters
    from partitioner import partition

    parameters = RingParameters.default(DEGREES[security])
    sizes = dict(map(_dimension, dimensions or []))
    deep = None
    if block_depth is not None and calibration is not None:
        deep = deep_options(
            read_depth(block_depth),
            read_calibration(model, sizes, calibration, x, divide, output.absolute().parent),
            degree,
            fit,
        )
    result = partition(
        model,
        output,
        reference=reference,
        parameters=parameters,
        batch_hints=batch_hints,
        dimensions=sizes,
        on_node=on_node or (),
        on_server=on_server or (),
        precision=precision,
        deep=deep,
    )
    show_steps(result.plan)
    if deep is not None:
        show_activations(result.plan, result.activations)
        warn_of_calibration(output)
    _show_precision(result.plan, asked=precision is not None)
    exactly = " with exact activations" if result.plan.deep else ""
    out.print(
        f"\nIn the clear, the parts give what the model gives{exactly}: largest relative difference "
        f"{result.difference:.1e}"
    )
    out.print(f"Wrote {output}: server/ for the untrusted server, node/ for the trusted node")
    figures = {"difference": result.difference, **describe(result.plan)}
    if deep is not None:
        figures["activations"] = [dataclasses.asdict(a) for a in result.activations]
    write_json(json, figures)


def _dimension(option: str) -> tuple[str, int]:
    """Read NAME=SIZE."""
    name, _, size = option.rpartition("=")
    if not name or not size.isascii() or not size.isdecimal():
        raise typer.BadParameter(f"--dimension: expected NAME=SIZE, such as sequence=64, found {option!r}")
    return name, int(size)


def _rotate(bundle: Path, key: Path | None, trusted_keys: Sequence[Path]) -> None:
    from heinfer.plan.signing import read_trusted_keys
    from partitioner import rotate
    from partitioner.signing import read_signing_key

    rotate(bundle, key=None if key is None else read_signing_key(key), trusted=read_trusted_keys(trusted_keys))
    out.print(f"Renewed seed and hints in {bundle / 'node'}: start the node again with them; the server stays as it is")


def inspect_command(bundle: BundleArgument, trusted_key: TrustedKeyOption = None, json: JsonOption = None) -> None:
    """Show steps, parameters, security level, bytes, rounds and error bounds of a bundle."""
    from heinfer.plan import load_node, load_server, read_bundle_plan
    from heinfer.plan.signing import read_trusted_keys

    plan = read_bundle_plan(bundle, read_trusted_keys(trusted_key or ()))
    parties = {"server": load_server, "node": load_node}
    for name, load in parties.items():
        if (bundle / name).exists():
            load(bundle / name)
    figures = describe(plan)
    show_signer(bundle, figures)
    show_card_line(bundle, figures)
    show_steps(plan)
    _show_reasons(plan)
    ring = figures["parameters"]
    out.print(
        f"\nParameters: N = {ring['N']}, log2 q = {ring['log2_q']}, at least {ring['security_bits']} bits of security "
        "(ternary secret, 2024 guidelines)"
    )
    keys = "relinearisation keys, one upload long" if plan.deep else "none"
    out.print(f"Rounds: {figures['rounds']}, keys on the server: {keys}")
    show_deep_blocks(plan)
    beside = ", beside deep blocks" if plan.deep else ""
    for samples, forecast in figures["bytes"].items() if plan.blocks else ():
        out.print(
            f"Standard mode, bytes for {samples} sample(s){beside}: {size(forecast['up'])} up, "
            f"{size(forecast['down'])} down"
        )
    _show_prepared(figures)
    if plan.blocks:
        _show_bounds(figures)
    write_json(json, figures)


def _show_bounds(figures: dict[str, Any]) -> None:
    title = "\nError bounds for inputs of magnitude 1"
    bounds = table("block", "error bound", "digits of weights", "operators", title=title, right=(0, 1, 2))
    for index, block in enumerate(figures["blocks"]):
        digits = f"{block['digits']} of {block['digit_bits']} bits"
        bounds.add_row(str(index), f"{block['unit_bound']:.1e}", digits, ", ".join(block["operators"]))
    out.print(bounds)


def show_card_line(bundle: Path, figures: dict[str, Any]) -> None:
    """Print what the model's card says of privacy and accuracy, and add it to the figures."""
    from heinfer.cards import privacy_line, read_card

    card = figures["card"] = read_card(bundle)
    if card is not None:
        accuracy = card.get("accuracy")
        shown = f", accuracy {accuracy:.2%}" if isinstance(accuracy, float) else ""
        out.print(f"Model: {card.get('name')}, trained on {card.get('dataset')}{shown}")
        out.print(f"Training records: {privacy_line(card)}")


def _show_prepared(figures: dict[str, Any]) -> None:
    prepared = figures["prepared"]
    if not figures["blocks"]:
        out.print("Prepared mode: none, all blocks are deep")
        return
    if prepared is None:
        out.print("Prepared mode: none, a block's planes are too wide")
        return
    out.print(
        f"Prepared mode: {size(prepared['bytes_up'])} up, {size(prepared['bytes_down'])} down for each sample; "
        f"{size(prepared['query_bytes'])} of the node's memory for one prepared sample, {size(prepared['hint_bytes'])} "
        "of hints"
    )
    hints = table("block", "hint", "N", "ciphertexts", "values up", "values down", "hints", right=(0, 2, 3, 4, 5, 6))
    for index, block in enumerate(figures["blocks"]):
        form = block["prepared"]
        hints.add_row(
            str(index), _hint_text(form), str(form["degree"]), str(form["ciphertexts"]),
            str(form["values_up"]), str(form["values_down"]), size(form["hint_bytes"]),
        )  # fmt: skip
    out.print(hints)


def show_steps(plan: Plan) -> None:
    """Print what runs where, in order."""
    from heinfer.plan import DeepStep, NodeStep

    steps = table(
        "where", "block", "operators", "values up", "values down", title=f"{plan.model.name}: steps", right=(3, 4)
    )
    for step in plan.steps:
        if isinstance(step, NodeStep):
            steps.add_row("node", "", ", ".join(step.operators), "", "")
            continue
        if isinstance(step, DeepStep):
            deep = plan.deep[step.block]
            steps.add_row(
                "server", f"deep {step.block}", ", ".join(deep.operators), str(deep.input_count), str(deep.output_count)
            )
            continue
        for index in step.blocks:
            block = plan.blocks[index]
            rows = (str(block.input_rows), str(block.output_rows))
            steps.add_row("server", str(index), ", ".join(block.operators), *rows)
    out.print(steps)


def _show_precision(plan: Plan, *, asked: bool) -> None:
    """Print which blocks have more than one digit; where nobody asked for a precision, which ones may need it."""
    several = [f"{i} ({b.digits} of {b.digit_bits} bits)" for i, b in enumerate(plan.blocks) if b.digits > 1]
    if several:
        out.print(f"\nMore than one digit of weights, and as many times the answer: block {', '.join(several)}")
    coarse = [f"{i} ({b.relative_bound:.0%})" for i, b in enumerate(plan.blocks) if b.relative_bound > COARSE_BOUND]
    if coarse and not asked:
        out.print(
            "\nError bounds above 1 % of a row's largest output, which --precision would lower: block "
            f"{', '.join(coarse)}"
        )


def _show_reasons(plan: Plan) -> None:
    """Print why every operator is where it is."""
    from heinfer.plan import DeepStep, NodeStep

    reasons = table("where", "operator", "why", title="\nWhy there")
    for step in plan.steps:
        if isinstance(step, DeepStep):
            for operator in plan.deep[step.block].operators:
                reasons.add_row("server", operator, "in a deep block: --block-depth")
            continue
        held = [("node", step)] if isinstance(step, NodeStep) else [("server", plan.blocks[i]) for i in step.blocks]
        for where, holder in held:
            for operator, reason in zip(holder.operators, holder.reasons, strict=True):
                reasons.add_row(where, operator, reason)
    out.print(reasons)


def describe(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan."""
    from heinfer.client.evaluation import ring_figures
    from heinfer.plan import DeepStep, NodeStep

    return {
        "model": plan.model.name,
        "sha256": plan.model.sha256,
        "parameters": ring_figures(plan),
        "rounds": plan.rounds,
        "deep": [deep_block_figures(block) for block in plan.deep],
        "prepared": _prepared_figures(plan) if plan.has_prepared_mode else None,
        "bytes": {str(samples): forecast_bytes(plan, samples) for samples in (1, plan.ring.degree)},
        "steps": [
            {"where": "node", "operators": list(s.operators), "reasons": list(s.reasons)}
            if isinstance(s, NodeStep)
            else {"where": "server", "deep": s.block}
            if isinstance(s, DeepStep)
            else {"where": "server", "blocks": list(s.blocks)}
            for s in plan.steps
        ],
        "blocks": [
            {
                "operators": list(b.operators),
                "reasons": list(b.reasons),
                "values_up": b.input_rows,
                "values_down": b.output_rows,
                "multiply_adds": b.program.multiply_adds(),
                "row_sum": b.row_sum,
                "unit_bound": b.unit_bound,
                "relative_bound": b.relative_bound,
                "digits": b.digits,
                "digit_bits": b.digit_bits,
                "prepared": None if b.prepared is None else _form_figures(b.prepared),
            }
            for b in plan.blocks
        ],
    }


def _hint_text(form: dict[str, Any]) -> str:
    """Say what kinds of hints a block has, and why where its cut is not the plainest."""
    kinds = ", ".join(dict.fromkeys(form["hints"]))
    return kinds + (" (few positions)" if form["dense"] else "") + (" (in bands)" if form["joined"] else "")


def _form_figures(form: PreparedInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(form), "hints": [kind.value for kind in form.hints]}


def _prepared_figures(plan: Plan) -> dict[str, int]:
    """Return the bytes of one sample in prepared mode: exact, not an estimate."""
    from heinfer.plan.forecast import prepared_bytes
    from heinfer.wire import Mode, block_shapes

    shapes = block_shapes(plan)
    return {
        "bytes_up": sum(s.rows_up(Mode.PREPARED, 1) * s.row_bytes(Mode.PREPARED, 1) for s in shapes),
        "bytes_down": sum(s.rows_down(Mode.PREPARED, 1) * s.row_bytes(Mode.PREPARED, 1) for s in shapes),
        "query_bytes": prepared_bytes(plan),
        "hint_bytes": sum(b.prepared.hint_bytes for b in plan.blocks if b.prepared is not None),
    }


def forecast_bytes(plan: Plan, samples: int) -> dict[str, int]:
    """Return the payload of a query of at most N samples in standard mode: exact, not an estimate."""
    from heinfer.wire import row_bytes

    row = row_bytes(samples, plan.ring.degree)
    return {
        "up": row * sum(b.input_rows for b in plan.blocks),
        "down": row * sum(b.output_rows for b in plan.blocks),
    }
