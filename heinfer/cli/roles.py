"""heinfer serve, heinfer node: the two parties, each with its own folder."""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from heinfer.cli.screen import ModeOption, err, progress

if TYPE_CHECKING:
    from trusted_node.link import ServerLink
    from trusted_node.pool import PreparedPool

#: Seconds that a node waits for its server to come up.
SERVER_WAIT_S = 20.0
#: Seconds that a node fills its pool at most before it answers.
POOL_WAIT_S = 10.0

ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
]
ParentOption = Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when standard input closes.")]


class Service(Protocol):
    """What both parties' services offer."""

    address: Any

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("serve")(serve_command)
    app.command("node")(node_command)


def serve_command(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE/server", help="The server's part of a bundle.")],
    listen: ListenOption = "127.0.0.1:7700",
    with_parent: ParentOption = False,
) -> None:
    """Run the untrusted server: integer weights, ciphertexts, no keys."""
    from heinfer.plan import load_server
    from heinfer.server.evaluation import BlockEvaluator
    from heinfer.server.service import EvaluatorService
    from heinfer.wire import Limits, parse_address

    address = parse_address(listen)
    bundle = load_server(folder)
    evaluator = BlockEvaluator(bundle)
    with progress() as tell:
        evaluator.warm_up(lambda done, total: tell("compiling", done, total))
    service = EvaluatorService(evaluator, address, Limits())
    _run(service, f"serving {bundle.plan.model.name}", with_parent)


def node_command(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE/node", help="The node's part of a bundle.")],
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the untrusted server listens.")],
    listen: ListenOption = "127.0.0.1:7800",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that encrypt in standard mode; the cores where not given.")
    ] = None,
    mode: ModeOption = "auto",
    prepared: Annotated[
        int | None,
        typer.Option(
            "--prepared", min=0, max=4096, help="Queries to keep prepared, between queries; 16, or what 2 GiB hold."
        ),
    ] = None,
    allow_trace: Annotated[
        bool, typer.Option("--allow-trace", help="Let clients ask for values inside the model, for reports.")
    ] = False,
    with_parent: ParentOption = False,
) -> None:
    """Run the trusted node: keys, encryption, nonlinear operators."""
    from heinfer.plan import load_node
    from heinfer.wire import Limits, block_shapes, parse_address
    from trusted_node.engine import Engine
    from trusted_node.link import ServerLink
    from trusted_node.modes import ModeChoice, choose_mode
    from trusted_node.pool import PreparedPool
    from trusted_node.preparation import Preparer
    from trusted_node.service import NodeService
    from trusted_node.workers import CryptoPool

    listening, serving, limits = parse_address(listen), parse_address(server), Limits()
    bundle = load_node(folder)
    link = ServerLink(serving, bundle.plan_hash, block_shapes(bundle.plan), limits)
    _await_server(link, server)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold secrets and masks
    choice = ModeChoice(mode)
    choose_mode(bundle.plan, choice, 1)
    with ExitStack() as stack:
        pool = stack.enter_context(CryptoPool(bundle.plan.ring.parameters, workers))
        ready = None
        if bundle.hints is not None and choice is not ModeChoice.STANDARD:
            ready = stack.enter_context(PreparedPool(Preparer(bundle), prepared))
            if bundle.hints.expired:
                err.print("seed and hints are older than 30 days: renew them with `heinfer partition --rotate`")
        else:
            pool.start()
        engine = Engine(bundle, link, pool, limits, ready, choice)
        if ready is not None:
            engine.warm_up()
            _fill(ready)
        try:
            service = NodeService(engine, listening, limits, allow_trace)
            _run(service, f"node for {bundle.plan.model.name}, server {serving}", with_parent)
        finally:
            link.close()  # first: what waits for the server fails at once
            engine.close()


def _fill(pool: PreparedPool) -> None:
    """Wait until the pool is full, or for `POOL_WAIT_S`: a node answers without as well."""
    deadline = time.monotonic() + POOL_WAIT_S
    with progress() as tell:
        while not pool.wait_full(0.1) and time.monotonic() < deadline:
            tell("preparing", pool.ready, pool.size)


def _await_server(link: ServerLink, server: str) -> None:
    """Wait until the server is there and agrees on the plan.

    Raises:
        RemoteProtocolError: it did not come, or refuses us.
    """
    from heinfer.errors import RemoteProtocolError
    from heinfer.wire import RefusedError

    deadline = time.monotonic() + SERVER_WAIT_S
    told = False
    while True:
        try:
            with link.session():
                return
        except RefusedError:
            raise
        except RemoteProtocolError as error:
            if time.monotonic() > deadline:
                raise RemoteProtocolError(
                    f"no server answers at {server} within {SERVER_WAIT_S:g} s: {error}"
                ) from error
            if not told:
                err.print(f"waiting for the server at {server}")
                told = True
            time.sleep(0.2)


def _run(service: Service, what: str, with_parent: bool) -> None:
    """Say where the service listens, then wait for a signal or for the parent to go."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if with_parent:
        threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
        print(json.dumps({"listening": str(service.address)}), flush=True)
    else:
        err.print(f"{what}, listening on {service.address}; stop with Ctrl-C")
    stop.wait()
    service.stop()


def _watch_parent(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()
