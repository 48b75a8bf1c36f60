"""What TLS costs a query: LeNet-5 in prepared mode, one digit at a time, over loopback with and without, interleaved.

    python benchmarks/transport.py [--queries 200] [--json benchmarks/results/transport.json]

Connections are kept, so no handshake is in the times; both links are encrypted, client to node and node to server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import heinfer
from heinfer.client import RemoteModel
from heinfer.client.environment import machine_name
from heinfer.client.local import Role
from heinfer.processes import core_count
from heinfer.wire.authority import Use, open_authority, write_identity

REPOSITORY = Path(__file__).resolve().parent.parent
HERE = ("127.0.0.1",)
WARM_UP = 10
#: Between queries, so that each finds masks ready.
PAUSE_S = 0.02


def identities(folder: Path) -> None:
    """Make a certificate for each end of both links."""
    for link, accepts, connects in (("inner", "server", "node-inner"), ("outer", "node-outer", "client")):
        authority = open_authority(folder / link, link)
        write_identity(folder / accepts, authority, accepts, HERE, Use.ACCEPT, 1)
        write_identity(folder / connects, authority, connects, (), Use.CONNECT, 1)


def started(stack: ExitStack, bundle: Path, certs: Path | None) -> RemoteModel:
    """Start a server and a node, and connect to the node."""

    def options(*pairs: tuple[str, str]) -> list[str]:
        return [] if certs is None else [word for option, name in pairs for word in (option, str(certs / name))]

    server = Role("server", ["serve", str(bundle / "server"), *options(("--tls", "server"))])
    stack.callback(server.stop)
    arguments = ["node", str(bundle / "node"), "--server", server.wait_ready(), "--mode", "prepared"]
    node = Role("node", [*arguments, *options(("--tls", "node-inner"), ("--client-tls", "node-outer"))])
    stack.callback(node.stop)
    address = node.wait_ready()
    return stack.enter_context(heinfer.connect(address, tls=None if certs is None else certs / "client"))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = REPOSITORY / "models/released/mnist_lenet5"
    with np.load(folder / "samples.npz") as archive:
        x = archive["x"][:1]
    seconds: dict[str, list[float]] = {"plain": [], "tls": []}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        bundle, certs = Path(scratch) / "bundle", Path(scratch) / "certs"
        heinfer.partition(folder / "model.onnx", bundle)
        identities(certs)
        models = {"plain": started(stack, bundle, None), "tls": started(stack, bundle, certs)}
        for number in range(WARM_UP + arguments.queries):
            for name, model in models.items():
                begun = time.perf_counter()
                model.predict(x)
                if number >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begun)
                time.sleep(PAUSE_S)
    figures = {f"{name}_s": statistics.median(found) for name, found in seconds.items()}
    figures |= {f"{name}_fastest_tenth_s": sorted(found)[len(found) // 10] for name, found in seconds.items()}
    for kind, what in (("", "median"), ("_fastest_tenth", "fastest tenth")):
        plain, tls = (1e3 * figures[f"{name}{kind}_s"] for name in ("plain", "tls"))
        print(f"one LeNet-5 query, {what}: plain {plain:.1f} ms, TLS {tls:.1f} ms, {tls - plain:+.1f} ms")
    print(f"{arguments.queries} each ({machine_name()}, {core_count()} cores)")
    if arguments.json is not None:
        content = {**figures, "queries": arguments.queries, "machine": machine_name(), "cores": core_count()}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
