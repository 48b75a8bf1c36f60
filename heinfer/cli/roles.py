"""heinfer serve, heinfer node: the two parties, each with its own folder."""

from __future__ import annotations

import json
import os
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
from heinfer.cli.signing import TrustedKeyOption
from heinfer.cli.transport import (
    CaOption,
    CertificateOption,
    ClientCaOption,
    ClientCertificateOption,
    ClientKeyOption,
    ClientPlainTextOption,
    ClientTlsOption,
    KeyOption,
    PlainTextOption,
    TlsOption,
    TokensOption,
    security,
    tokens_of,
)

if TYPE_CHECKING:
    from trusted_node.pool import PreparedPool
    from trusted_node.replicas import Replicas

#: Seconds that a node waits for its server to come up.
SERVER_WAIT_S = 20.0
#: Seconds that running answers have when a role is told to stop.
GRACE_S = 10.0
#: Seconds that a node fills its pool at most before it answers.
POOL_WAIT_S = 10.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
]
GraceOption = Annotated[
    str, typer.Option("--grace", metavar="TIME", help="What running answers have to end, when told to stop: 10s.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="For all requests together, as in 4GiB; half of the machine's."),
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
    trusted_key: TrustedKeyOption = None,
    tls: TlsOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertificateOption = None,
    tls_key: KeyOption = None,
    insecure_plain_text: PlainTextOption = False,
    memory: MemoryOption = None,
    grace: GraceOption = f"{GRACE_S:g}s",
    with_parent: ParentOption = False,
) -> None:
    """Run the untrusted server: integer weights, ciphertexts, no keys."""
    from heinfer.plan import load_server
    from heinfer.plan.machine import parse_duration
    from heinfer.plan.signing import read_trusted_keys
    from heinfer.server.evaluation import BlockEvaluator
    from heinfer.server.service import EvaluatorService
    from heinfer.wire import Limits, parse_address, parse_size
    from heinfer.wire.security import check_listening

    address, grace_s = parse_address(listen), parse_duration(grace)
    room = None if memory is None else parse_size(memory)
    towards_nodes = security(tls, tls_ca, tls_cert, tls_key, insecure_plain_text)
    check_listening(address, towards_nodes)
    bundle = load_server(folder, read_trusted_keys(trusted_key or ()))
    evaluator = BlockEvaluator(bundle)
    with progress() as tell:
        evaluator.warm_up(lambda done, total: tell("compiling", done, total))
    service = EvaluatorService(evaluator, address, Limits(), towards_nodes, room)
    _run(service, f"serving {bundle.plan.model.name}", with_parent, grace_s)


def node_command(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE/node", help="The node's part of a bundle.")],
    server: Annotated[
        list[str],
        typer.Option("--server", metavar="HOST:PORT", help="Where an untrusted server listens; once for each replica."),
    ],
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
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not check the server's answers: it must then be honest.")
    ] = False,
    trusted_key: TrustedKeyOption = None,
    tls: TlsOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertificateOption = None,
    tls_key: KeyOption = None,
    insecure_plain_text: PlainTextOption = False,
    client_tls: ClientTlsOption = None,
    client_tls_ca: ClientCaOption = None,
    client_tls_cert: ClientCertificateOption = None,
    client_tls_key: ClientKeyOption = None,
    client_insecure_plain_text: ClientPlainTextOption = False,
    tokens: TokensOption = None,
    retry: Annotated[
        str, typer.Option("--retry", metavar="TIME", help="How long an upload that failed is sent again; 0s: never.")
    ] = "30s",
    reply: Annotated[
        str, typer.Option("--reply", metavar="TIME", help="How long a server may say nothing before it is given up.")
    ] = "300s",
    memory: MemoryOption = None,
    grace: GraceOption = f"{GRACE_S:g}s",
    with_parent: ParentOption = False,
) -> None:
    """Run the trusted node: keys, encryption, nonlinear operators."""
    from heinfer.plan import load_node
    from heinfer.plan.machine import parse_duration
    from heinfer.plan.signing import read_trusted_keys
    from heinfer.wire import Limits, block_shapes, parse_address, parse_size
    from heinfer.wire.query_service import check_serving
    from trusted_node.engine import MEMORY_SHARES, Engine
    from trusted_node.link import ServerLink
    from trusted_node.modes import ModeChoice, choose_mode
    from trusted_node.pool import PreparedPool
    from trusted_node.preparation import Preparer
    from trusted_node.replicas import Replicas
    from trusted_node.service import NodeService
    from trusted_node.workers import CryptoPool

    listening, serving, grace_s = parse_address(listen), [parse_address(s) for s in server], parse_duration(grace)
    limits = Limits(retry_s=parse_duration(retry), reply_s=parse_duration(reply))
    room = None if memory is None else parse_size(memory) // MEMORY_SHARES
    towards_server = security(tls, tls_ca, tls_cert, tls_key, insecure_plain_text)
    towards_clients = security(
        client_tls, client_tls_ca, client_tls_cert, client_tls_key, client_insecure_plain_text, "--client-"
    )
    known = tokens_of(tokens)
    check_serving(listening, towards_clients, known)
    bundle = load_node(folder, read_trusted_keys(trusted_key or ()))
    shapes = block_shapes(bundle.plan)
    replicas = Replicas([ServerLink(a, bundle.plan_hash, shapes, limits, towards_server) for a in serving])
    _await_servers(replicas)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold secrets and masks
    choice = ModeChoice(mode)
    choose_mode(bundle.plan, choice, 1)
    if unchecked:
        err.print("answers are not checked: a server that computes something else is not noticed")
    with ExitStack() as stack:
        pool = stack.enter_context(CryptoPool(bundle.plan.ring.parameters, workers))
        ready = None
        if bundle.hints is not None and choice is not ModeChoice.STANDARD:
            ready = stack.enter_context(PreparedPool(Preparer(bundle), prepared))
            if bundle.hints.expired:
                err.print("seed and hints are older than 30 days: renew them with `heinfer partition --rotate`")
        else:
            pool.start()
        engine = Engine(bundle, replicas, pool, limits, ready, choice, not unchecked, room, room)
        if ready is not None:
            engine.warm_up()
            _fill(ready)
        try:
            service = NodeService(engine, listening, limits, allow_trace, towards_clients, known, room)
            _run(service, f"node for {bundle.plan.model.name}, server {replicas}", with_parent, grace_s)
        finally:
            replicas.close()  # first: what waits for the server fails at once
            engine.close()


def _fill(pool: PreparedPool) -> None:
    """Wait until the pool is full, or for `POOL_WAIT_S`: a node answers without as well."""
    deadline = time.monotonic() + POOL_WAIT_S
    with progress() as tell:
        while not pool.wait_full(0.1) and time.monotonic() < deadline:
            tell("preparing", pool.ready, pool.size)


def _await_servers(replicas: Replicas) -> None:
    """Wait until a server is there and agrees on the plan; what is wrong with the others is told.

    Raises:
        RemoteProtocolError: none came, or one refuses us.
    """
    from heinfer.errors import RemoteProtocolError
    from heinfer.wire import FailureCode, RefusedError

    deadline = time.monotonic() + SERVER_WAIT_S
    told: set[str] = set()
    while True:
        found = False
        for link in replicas.links:
            name = link.conduct.name
            try:
                with link.session():
                    found = True
            except RemoteProtocolError as error:
                if isinstance(error, RefusedError) and error.code not in (FailureCode.BUSY, FailureCode.STOPPING):
                    raise
                if time.monotonic() > deadline:
                    raise RemoteProtocolError(
                        f"no server answers at {name} within {SERVER_WAIT_S:g} s: {error}"
                    ) from error
                if name not in told:
                    err.print(f"waiting for the server at {name}: {error}")
                    told.add(name)
        if found:
            return
        time.sleep(0.2)


def _run(service: Service, what: str, with_parent: bool, grace_s: float) -> None:
    """Say where the service listens, then wait for a signal or for the parent to go; a second signal ends at once."""
    stop = threading.Event()

    def end(*_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in _SIGNALS:
        signal.signal(number, end)
    if with_parent:
        threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
        print(json.dumps({"listening": str(service.address)}), flush=True)
    else:
        err.print(f"{what}, listening on {service.address}; stop with Ctrl-C")
    stop.wait()
    service.stop(grace_s)


def _watch_parent(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not through Python's buffer, whose lock would be held when we exit
        pass
    stop.set()
