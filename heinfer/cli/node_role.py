"""heinfer node: the trusted node, with its models and the ways in to them."""

from __future__ import annotations

import resource
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import typer

from heinfer.cli.roles import (
    GRACE_S,
    CopiesOption,
    DeviceMemoryOption,
    DeviceOption,
    GraceOption,
    ListenOption,
    MemoryOption,
    ParentOption,
    run_service,
)
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

_WAYS_IN = "Ways in"
_QUEUE = "Queue"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("node")(node_command)


def node_command(
    folder: Annotated[
        list[str],
        typer.Argument(
            metavar="BUNDLE/node...",
            help="The node's part of a bundle, or NAME=BUNDLE/node; several for several models.",
        ),
    ],
    server: Annotated[
        list[str],
        typer.Option("--server", metavar="HOST:PORT", help="Where an untrusted server listens; once for each replica."),
    ],
    listen: ListenOption = "127.0.0.1:7800",
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Serve the Open Inference Protocol over HTTP too.",
            rich_help_panel=_WAYS_IN,
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option("--grpc", metavar="HOST:PORT", help="The same over gRPC.", rich_help_panel=_WAYS_IN),
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Show a page at / of --http.", rich_help_panel=_WAYS_IN)] = False,
    page_host: Annotated[
        list[str] | None,
        typer.Option(
            "--page-host",
            metavar="NAME",
            help="A name by which browsers reach the page; once for each.",
            rich_help_panel=_WAYS_IN,
        ),
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Prometheus metrics at /metrics of --http.", rich_help_panel=_WAYS_IN)
    ] = False,
    traces: Annotated[
        bool,
        typer.Option("--traces", help="Export OpenTelemetry traces, as OTEL_* say.", rich_help_panel=_WAYS_IN),
    ] = False,
    trace_server: Annotated[
        bool,
        typer.Option(
            "--trace-server",
            help="With --traces: let the untrusted server know which request belongs to which query.",
            rich_help_panel=_WAYS_IN,
        ),
    ] = False,
    max_delay: Annotated[
        str,
        typer.Option(
            "--max-delay",
            metavar="TIME",
            help="How long a query waits for others, to share an upload, while something runs.",
            rich_help_panel=_QUEUE,
        ),
    ] = "2ms",
    queue: Annotated[
        int,
        typer.Option("--queue", min=1, help="Queries that wait for a model; more are refused.", rich_help_panel=_QUEUE),
    ] = 1024,
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
    calibration: Annotated[
        bool,
        typer.Option("--calibration/--no-calibration", help="Calibrate outputs of deep blocks (docs/block-depth.md)."),
    ] = True,
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
    device: DeviceOption = "native",
    device_memory: DeviceMemoryOption = None,
    weights_bytes: CopiesOption = None,
    grace: GraceOption = f"{GRACE_S:g}s",
    with_parent: ParentOption = False,
) -> None:
    """Run the trusted node: keys, encryption, nonlinear operators."""
    if (page or metrics or page_host) and http is None:
        raise typer.BadParameter("--page and --metrics are served over HTTP: give --http HOST:PORT too")
    if trace_server and not traces:
        raise typer.BadParameter("--trace-server goes with --traces")
    from heinfer.operators.backends import open_device
    from heinfer.operators.copies import Copies
    from heinfer.plan.machine import parse_duration
    from heinfer.plan.signing import read_trusted_keys
    from heinfer.wire import Limits, Tls, parse_address, parse_size
    from trusted_node.engine import MEMORY_SHARES
    from trusted_node.modes import ModeChoice
    from trusted_node.serving.interfaces import Interfaces, InterfaceSettings, make_metrics
    from trusted_node.serving.loading import ModelSettings, Teller
    from trusted_node.serving.repository import ModelRepository, parse_model_folders
    from trusted_node.serving.scheduling import QueueLimits
    from trusted_node.serving.tracing import start_tracing

    grace_s = parse_duration(grace)
    limits = Limits(retry_s=parse_duration(retry), reply_s=parse_duration(reply))
    room = None if memory is None else parse_size(memory) // MEMORY_SHARES
    serving = InterfaceSettings(
        frames=parse_address(listen),
        http=None if http is None else parse_address(http),
        grpc=None if grpc is None else parse_address(grpc),
        page=page,
        page_hosts=page_host or (),
        security=security(
            client_tls, client_tls_ca, client_tls_cert, client_tls_key, client_insecure_plain_text, "--client-"
        ),
        tokens=tokens_of(tokens),
        limits=limits,
        allow_trace=allow_trace,
        memory=room,
    )
    settings = ModelSettings(
        servers=[parse_address(address) for address in server],
        limits=limits,
        towards_server=security(tls, tls_ca, tls_cert, tls_key, insecure_plain_text),
        mode=ModeChoice(mode),
        workers=workers,
        prepared=prepared,
        checked=not unchecked,
        memory=room,
        trusted=read_trusted_keys(trusted_key or ()),
        calibrated=calibration,
        device=open_device(device, None if device_memory is None else parse_size(device_memory)),
        copies=Copies(None if weights_bytes is None else parse_size(weights_bytes)),
        queue=QueueLimits(queries=queue, values_bytes=room, max_delay_s=parse_duration(max_delay)),
    )
    serving.check()
    folders = parse_model_folders(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold secrets and masks
    if unchecked:
        err.print("answers are not checked: a server that computes something else is not noticed")
    with ExitStack() as stack:
        watching = make_metrics() if metrics else None
        if watching is not None and isinstance(settings.towards_server, Tls):
            watching.watch_certificate("servers", settings.towards_server)
        if traces:
            tracer = start_tracing(trace_server)
            stack.callback(tracer.close)
            settings = replace(settings, tracer=tracer)
        with progress() as tell:
            models = ModelRepository(folders, settings, watching, Teller(err.print, tell))
            stack.callback(models.close, 0.0)
            models.load_all()
        if not unchecked and any(models.get(name).plan.deep for name in models.names):
            err.print("answers of deep blocks are not checked: the server must be honest there (docs/threat-model.md)")
        ways_in = Interfaces(models, models.names[0], serving, watching)
        run_service(
            ways_in,
            ways_in.addresses,
            f"node for {', '.join(models.names)}, server {', '.join(server)}",
            with_parent,
            grace_s,
        )
