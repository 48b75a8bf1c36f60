"""Many clients at a node: throughput beside one at a time, memory over 10,000 queries, and a minute of overload.

    python benchmarks/serving_load.py                         # all three, about ten minutes
    python benchmarks/serving_load.py throughput --channels http grpc --clients 100 --queries 20 --rounds 3
    python benchmarks/serving_load.py memory --total 10000
    python benchmarks/serving_load.py overload --times 10 --seconds 60

LeNet-5 in prepared mode; server, node and load are processes that share this machine's cores (serving_runs.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_channels import CHANNELS
from rich.console import Console
from rich.table import Table
from serving_measures import (
    OVERLOAD_BATCH,
    OVERLOAD_QUEUE,
    Memory,
    Overload,
    Throughput,
    memory,
    overload,
    throughput,
)
from serving_runs import Case, serving

import heinfer
from heinfer.client.environment import machine_name, versions
from heinfer.processes import core_count

MODEL = Path(__file__).resolve().parent.parent / "models/released/mnist_lenet5"
out = Console(highlight=False, width=120)


def show_throughput(measured: list[Throughput]) -> None:
    """Print a table."""
    table = Table("channel", title="answers per second", box=None, pad_edge=False)
    names = ("one at a time", "together", "ratio", "median ms", "95 % ms", "CPU ms", "wrong", "lost", "largest error")
    for name in names:
        table.add_column(name, justify="right")
    for found in measured:
        table.add_row(
            found.channel,
            f"{statistics.median(found.alone):,.0f}",
            f"{statistics.median(found.together):,.0f}",
            f"{found.ratio:.1f}",
            *(f"{ms:.0f}" for ms in found.latency_ms),
            " + ".join(f"{ms:.1f} {role}" for role, ms in found.cpu_ms.items()),
            str(sum(t.wrong for t in found.tallies)),
            str(sum(t.asked - t.answered for t in found.tallies)),
            f"{max(t.worst for t in found.tallies):.1e}",
        )
    out.print(table)


def show_memory(found: Memory) -> None:
    """Print a line for each role."""
    for role, sizes in found.bytes.items():
        shown = ", ".join(f"{size / 2**20:.0f}" for size in sizes)
        out.print(f"memory of the {role} over {found.total:,} queries: {shown} MiB, growth {found.growth[role]:+.1%}")
    wrong, missing = sum(t.wrong for t in found.tallies), sum(t.asked - t.answered for t in found.tallies)
    out.print(f"{wrong} wrong, {missing} not answered")


def show_overload(found: Overload) -> None:
    """Print a paragraph."""
    of, refused = found.found, ", ".join(f"{count:,} {kind}" for kind, count in found.found.refused.items())
    after = ", ".join(f"{ms:.0f}" for ms in found.after_ms)
    out.print(
        f"overload: {found.offered:,.0f} queries/s of {OVERLOAD_BATCH} samples offered, "
        f"capacity {found.capacity:,.0f}/s\n"
        f"  {of.asked:,} queries: {of.answered:,} answered ({of.wrong} wrong), refused {refused or 'none'}, "
        f"{of.lost} lost, {of.unsent:,} found no free connection\n"
        f"  at most {found.queue} waited; answers took {found.answered_ms[0]:.0f} ms, "
        f"95 % {found.answered_ms[1]:.0f} ms, "
        f"refusals {found.refused_ms[0]:.0f} ms, 95 % {found.refused_ms[1]:.0f} ms\n"
        f"  one at a time: {found.before_ms:.1f} ms before; {after} ms in the seconds after; "
        f"as before within {found.recovered_s} s"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("throughput", "memory", "overload")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all where none is named")
    parser.add_argument("--channels", nargs="+", choices=CHANNELS, default=["http", "grpc", "frames"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--queries", type=int, default=20, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--total", type=int, default=10_000, help="queries while memory is watched")
    parser.add_argument("--times", type=float, default=10.0, help="the capacity, in an overload")
    parser.add_argument("--seconds", type=float, default=60.0, help="that an overload lasts")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"expected parts of {', '.join(parts)}, found {', '.join(sorted(unknown))}")
    wanted = given.parts or parts
    figures: dict[str, Any] = {"machine": machine_name(), "cores": core_count(), "versions": versions()}
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        heinfer.partition(MODEL / "model.onnx", bundle)
        case = Case.of(bundle, MODEL / "samples.npz")
        out.print(f"{machine_name()}, {core_count()} cores, which the load shares; tolerance {case.tolerance:.1e}")
        if "throughput" in wanted:
            with serving(bundle) as running:
                measured = [
                    throughput(case, running, channel, given.clients, given.queries, given.rounds)
                    for channel in given.channels
                ]
            show_throughput(measured)
            figures["throughput"] = [asdict(found) for found in measured]
        if "memory" in wanted:
            with serving(bundle) as running:
                flat = memory(case, running, given.total)
            show_memory(flat)
            figures["memory"] = asdict(flat)
        if "overload" in wanted:
            with serving(bundle, "--queue", str(OVERLOAD_QUEUE)) as running:
                storm = overload(case, running, given.times, given.seconds)
            show_overload(storm)
            figures["overload"] = asdict(storm)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
