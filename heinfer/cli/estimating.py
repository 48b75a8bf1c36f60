"""heinfer estimate, heinfer bench."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heinfer.cli.screen import BundleArgument, JsonOption, ModeOption, duration, out, progress, size, table, write_json
from heinfer.cli.signing import TrustedKeyOption
from heinfer.errors import InputError

if TYPE_CHECKING:
    from heinfer.plan import Plan
    from heinfer.plan.deep_work import DeepWork
    from heinfer.plan.forecast import Forecast
    from heinfer.plan.machine import Link, Machine
    from heinfer.plan.signing import TrustedKeys


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("estimate")(estimate_command)
    app.command("bench")(bench_command)


def estimate_command(
    bundle: BundleArgument,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples of the query.")] = 1,
    mode: ModeOption = "auto",
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="RATE", help="Between node and server: 100Mbit, 1.5Gbit.")
    ] = None,
    rtt: Annotated[
        str | None, typer.Option("--rtt", metavar="TIME", help="Round trip between node and server: 200us, 1ms.")
    ] = None,
    trusted_key: TrustedKeyOption = None,
    json: JsonOption = None,
) -> None:
    """Forecast time, bytes, rounds and memory of a query, without running it."""
    from heinfer.plan import read_bundle_plan
    from heinfer.plan.machine import Link, parse_bandwidth, parse_duration, read_machine
    from heinfer.plan.signing import read_trusted_keys

    link = Link(None if bandwidth is None else parse_bandwidth(bandwidth), 0.0 if rtt is None else parse_duration(rtt))
    trusted = read_trusted_keys(trusted_key or ())
    plan = read_bundle_plan(bundle, trusted)
    machine, source = read_machine()
    found = _fastest(plan, bundle, mode, batch, machine, link, _count_deep(plan, bundle, machine.cores, trusted))
    disk = {party: _folder_bytes(bundle / party) for party in ("node", "server")}
    basis = describe_machine(machine, source)
    _show(plan, found, disk, basis)
    link_figures = {"bandwidth_bit_s": link.bandwidth, "rtt_s": link.rtt_s}
    totals = {name: getattr(found, name) for name in _TOTALS}
    content = {**dataclasses.asdict(found), **totals, "disk_bytes": disk, "link": link_figures}
    machine_figures = {**dataclasses.asdict(machine), "measured": source is not None}
    write_json(json, {"model": plan.model.name, **content, "machine": machine_figures})


def bench_command(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, in less than a minute, and keep the result.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PATH", help="Where to keep it, in place of the user's configuration."),
    ] = None,
) -> None:
    """Show the constants that forecasts rest on, or measure them."""
    from heinfer.plan.machine import machine_file, read_machine, write_machine

    if not calibrate:
        if output is not None:
            raise typer.BadParameter("-o goes with --calibrate")
        machine, source = read_machine()
        _show_machine(machine, describe_machine(machine, source))
        return
    from heinfer.cli.calibration import calibrate as measure

    with progress() as tell:
        machine = measure(tell)
    path = output or machine_file()
    write_machine(path, machine)
    _show_machine(machine, f"Measured on {machine.name}, {machine.cores} cores; wrote {path}")
    if path != machine_file():
        out.print(f"To use it, set HEINFER_MACHINE={path}")


_TOTALS = ("total_s", "node_s", "server_s", "wire_s", "bytes_up", "bytes_down")


def describe_machine(machine: Machine, source: Path | None) -> str:
    """Say in one line what forecasts rest on."""
    cores = f"{machine.cores} cores"
    if source is None:
        return f"Constants as shipped ({machine.name}), for {cores}; `heinfer bench --calibrate` measures this machine"
    return f"Constants measured on {machine.name}, {cores} ({source})"


def _count_deep(plan: Plan, bundle: Path, cores: int, trusted: TrustedKeys | None) -> list[DeepWork]:
    """Count what an upload of every deep block takes, from the server's arrays.

    Raises:
        InputError: the plan has deep blocks, and the server's folder is not here.
        PlanError: the folder is not whole.
    """
    if not plan.deep:
        return []
    folder = bundle / "server"
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not there: what deep blocks take follows from the server's weights; estimate where both "
            "folders are, as partition has written them"
        )
    from heinfer.plan import load_server
    from heinfer.plan.deep_work import deep_work
    from heinfer.plan.work import CHUNK_BYTES
    from heinfer.server.polynomial.counting import linear_work

    arrays = load_server(folder, trusted).arrays
    return [deep_work(block, linear_work(block, arrays, cores), CHUNK_BYTES) for block in plan.deep]


def _fastest(
    plan: Plan, bundle: Path, choice: str, samples: int, machine: Machine, link: Link, deep: Sequence[DeepWork]
) -> Forecast:
    """Forecast in the mode that a node would choose; the link, which a node does not know, counts as well.

    Raises:
        InputError: prepared mode is asked for, and the plan has none.
    """
    from heinfer.plan.forecast import forecast
    from heinfer.plan.hints import has_batch_hints
    from trusted_node.modes import NAMES, ModeChoice, candidates

    batch = choice != "standard" and has_batch_hints(bundle / "node")
    modes = [NAMES[mode] for mode in candidates(plan, ModeChoice(choice), batch)]
    return min((forecast(plan, mode, samples, machine, link, deep) for mode in modes), key=lambda found: found.total_s)


def _folder_bytes(folder: Path) -> int | None:
    """Return the bytes of a party's files, None where its folder is elsewhere."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) if folder.is_dir() else None


def _show(plan: Plan, found: Forecast, disk: dict[str, int | None], basis: str) -> None:
    blocks = table(
        "block", "operators", "node", "server", "wire", "preparation", "up", "down",
        title=f"{plan.model.name}: {found.samples} sample(s) in {found.mode} mode", right=(2, 3, 4, 5, 6, 7),
    )  # fmt: skip
    for index, block in enumerate(found.blocks):
        seconds = (block.node_s, block.server_s, block.wire_s, block.preparation_s)
        sizes = (block.bytes_up, block.bytes_down)
        rest = index - len(plan.blocks)
        label, operators = (str(index), plan.blocks[index].operators) if rest < 0 else (
            f"deep {rest}", plan.deep[rest].operators
        )  # fmt: skip
        blocks.add_row(label, ", ".join(operators), *map(duration, seconds), *map(size, sizes))
    out.print(blocks)
    prepared = "" if not found.preparation_s else f", prepared before in {duration(found.preparation_s)}"
    prepared += "" if not found.start_s else f", once worker processes have started in {duration(found.start_s)}"
    out.print(
        f"\nTime: {duration(found.online_s)} online{prepared}; node {duration(found.node_s)}, of which "
        f"{duration(found.operators_s)} the model's own operators, server {duration(found.server_s)}, "
        f"wire {duration(found.wire_s)}"
    )
    groups = "" if found.groups == 1 else f" for each of {found.groups} groups of samples"
    out.print(
        f"Traffic: {size(found.bytes_up)} up, {size(found.bytes_down)} down, about {size(found.framing_bytes)} of "
        f"framing; {found.rounds} rounds{groups}"
    )
    out.print(f"Memory: node {size(found.node_memory_bytes)}, server {size(found.server_memory_bytes)}")
    known = [f"{party} {size(amount)}" for party, amount in disk.items() if amount is not None]
    scratch = f"; the server's scratch files {size(found.scratch_bytes)} during a query" if found.scratch_bytes else ""
    if known or scratch:
        out.print(f"Disk: {', '.join(known)}{scratch}")
    out.print(basis)


def _show_machine(machine: Machine, basis: str) -> None:
    constants = table("constant", "nanoseconds", right=(1,))
    for name, value in dataclasses.asdict(machine).items():
        if name.endswith("_s"):
            constants.add_row(name.removesuffix("_s").replace("_", " "), f"{1e9 * value:,.3g}")
    out.print(constants)
    out.print(basis)
