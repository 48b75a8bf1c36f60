"""heinfer serve: the untrusted server; and what both parties' commands share. `heinfer.cli.node_role` is the other."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from heinfer.cli.screen import err, progress
from heinfer.cli.signing import TrustedKeyOption
from heinfer.cli.transport import (
    CaOption,
    CertificateOption,
    KeyOption,
    PlainTextOption,
    TlsOption,
    security,
)
from heinfer.errors import InputError
from heinfer.spans import NO_TRACER, Tracer

if TYPE_CHECKING:
    from heinfer.server.evaluation import BlockEvaluator
    from heinfer.server.metrics import ServerMetrics
    from heinfer.server.service import EvaluatorService
    from heinfer.wire import Address, Security

#: Seconds that running answers have when a role is told to stop.
GRACE_S = 10.0

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
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="Where products are made: native (NumPy), or PyTorch's cpu, cuda, cuda:0."
    ),
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option("--device-memory", metavar="SIZE", help="For weights and hints on the device; what is free there."),
]
CopiesOption = Annotated[
    str | None,
    typer.Option(
        "--weights-bytes",
        metavar="SIZE",
        help="Memory for copies of weights and hints that save time, as in 512MiB; the others are made again from the "
        "files each time. 1GiB where not given.",
    ),
]
ParentOption = Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when standard input closes.")]


class Service(Protocol):
    """What both parties' services offer."""

    def stop(self, grace_s: float) -> None:
        """Stop."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve_command)


def serve_command(
    folder: Annotated[
        list[Path],
        typer.Argument(metavar="BUNDLE/server...", help="The server's part of a bundle; several for several models."),
    ],
    listen: ListenOption = "127.0.0.1:7700",
    trusted_key: TrustedKeyOption = None,
    tls: TlsOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertificateOption = None,
    tls_key: KeyOption = None,
    insecure_plain_text: PlainTextOption = False,
    memory: MemoryOption = None,
    device: DeviceOption = "native",
    device_memory: DeviceMemoryOption = None,
    weights_bytes: CopiesOption = None,
    scratch: Annotated[
        Path | None,
        typer.Option(
            "--scratch",
            metavar="DIR",
            help="Where ciphertexts of deep blocks lie meanwhile, gigabytes; the system's folder for temporary files.",
        ),
    ] = None,
    scratch_bytes: Annotated[
        str | None,
        typer.Option(
            "--scratch-bytes",
            metavar="SIZE",
            help="What requests for deep blocks may take there together, as in 20GB; as much as the disk gives.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics there, under the same TLS."),
    ] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Export OpenTelemetry traces, as OTEL_* say.")] = False,
    grace: GraceOption = f"{GRACE_S:g}s",
    with_parent: ParentOption = False,
) -> None:
    """Run the untrusted server: integer weights, ciphertexts, no keys."""
    from heinfer.operators.backends import backend_on, open_device
    from heinfer.operators.copies import Copies
    from heinfer.plan import load_server
    from heinfer.plan.machine import parse_duration
    from heinfer.plan.signing import read_trusted_keys
    from heinfer.server.evaluation import BlockEvaluator
    from heinfer.server.polynomial.resources import DeepResources
    from heinfer.server.prepared import shared_merger
    from heinfer.server.service import EvaluatorService
    from heinfer.wire import Limits, parse_address, parse_size
    from heinfer.wire.security import check_listening

    address, grace_s = parse_address(listen), parse_duration(grace)
    room = None if memory is None else parse_size(memory)
    towards_nodes = security(tls, tls_ca, tls_cert, tls_key, insecure_plain_text)
    check_listening(address, towards_nodes)
    backend = backend_on(
        open_device(device, None if device_memory is None else parse_size(device_memory)),
        Copies(None if weights_bytes is None else parse_size(weights_bytes)),
    )
    trusted, merger = read_trusted_keys(trusted_key or ()), shared_merger(backend.slots)
    if scratch is not None and not scratch.is_dir():
        raise InputError(f"--scratch {scratch}: expected a folder that exists")
    deep = DeepResources(scratch, None if scratch_bytes is None else parse_size(scratch_bytes))
    evaluators = [BlockEvaluator(load_server(path, trusted), merger, deep, backend) for path in folder]
    for evaluator in evaluators:
        evaluator.check_room()
    names = ", ".join(evaluator.bundle.plan.model.name for evaluator in evaluators)
    with progress() as tell:
        for evaluator in evaluators:
            name = evaluator.bundle.plan.model.name
            evaluator.warm_up(partial(tell, f"compiling {name}" if len(evaluators) > 1 else "compiling"))
    with ExitStack() as stack:
        observer = None if metrics is None else _make_metrics()
        tracer = _start_tracing(stack) if traces else NO_TRACER
        service = EvaluatorService(evaluators, address, Limits(), towards_nodes, room, observer, tracer)
        addresses = {"listening": str(service.address)}
        if observer is not None and metrics is not None:
            place = parse_address(metrics)
            addresses["metrics"] = _serve_metrics(stack, observer, place, towards_nodes, service, evaluators)
        run_service(service, addresses, f"serving {names}", with_parent, grace_s)


def _make_metrics() -> ServerMetrics:
    try:
        from heinfer.server.metrics import ServerMetrics
    except ModuleNotFoundError as error:
        raise _missing("--metrics", error, "serve") from None
    return ServerMetrics()


def _serve_metrics(
    stack: ExitStack,
    metrics: ServerMetrics,
    address: Address,
    towards_nodes: Security,
    service: EvaluatorService,
    evaluators: Sequence[BlockEvaluator],
) -> str:
    """Serve a server's metrics until the stack closes; return where."""
    from heinfer.exposition import MetricsServer

    metrics.watch_sessions(service.connections)
    metrics.watch_memory(service.memory)
    for evaluator in evaluators:
        if evaluator.prepared is not None:
            metrics.watch_model(evaluator.bundle.plan.model.name, evaluator.prepared)
    server = MetricsServer(address, metrics.registry, towards_nodes)
    stack.callback(server.stop)
    return str(server.address)


def _start_tracing(stack: ExitStack) -> Tracer:
    try:
        from heinfer.traces import export_traces
    except ModuleNotFoundError as error:
        raise _missing("--traces", error, "traces") from None
    traces = export_traces("heinfer-server", False)
    stack.callback(traces.close)
    return traces


def _missing(option: str, error: ModuleNotFoundError, extra: str) -> InputError:
    """Return what to say where an extra is not installed; an error of another kind is raised again."""
    if (error.name or "").partition(".")[0] not in ("opentelemetry", "prometheus_client"):
        raise error
    return InputError(f"{option} needs {error.name}: pip install 'heinfer[{extra}]'")


def run_service(service: Service, addresses: Mapping[str, str], what: str, with_parent: bool, grace_s: float) -> None:
    """Say where the service listens, then wait for a signal or for the parent to go; a second signal ends at once.

    Args:
        service: to be stopped at the end.
        addresses: where it listens, by the kind of what is spoken there; "listening" is the first.
        what: it is.
        with_parent: whether it ends with its parent, which reads the addresses as JSON.
        grace_s: seconds that running answers have.
    """
    stop = threading.Event()

    def end(*_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in _SIGNALS:
        signal.signal(number, end)
    if with_parent:
        threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
        print(json.dumps(dict(addresses)), flush=True)
    else:
        further = "".join(f", {kind} on {address}" for kind, address in addresses.items() if kind != "listening")
        err.print(f"{what}, listening on {addresses['listening']}{further}; stop with Ctrl-C")
    stop.wait()
    service.stop(grace_s)


def _watch_parent(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not through Python's buffer, whose lock would be held when we exit
        pass
    stop.set()
