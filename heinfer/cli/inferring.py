"""heinfer infer."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heinfer.cli.screen import JsonOption, duration, out, size, write_json
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

if TYPE_CHECKING:
    from heinfer.client.remote import RemoteModel
    from heinfer.wire import Security


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("infer")(infer_command)


def infer_command(
    query: Annotated[Path, typer.Argument(metavar="QUERY.npy", help="Samples first, or one sample.")],
    node: Annotated[str | None, typer.Option("--node", metavar="HOST:PORT", help="A running node.")] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="BUNDLE", help="A bundle: start all three roles for this query.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RESULT.npy", help="Where to write the first output.")
    ] = None,
    divide: Annotated[float | None, typer.Option(help="Divide the query by this; 255 for images.")] = None,
    mode: Annotated[
        Literal["auto", "standard", "prepared"], typer.Option("--mode", help="For --bundle; a node has its own.")
    ] = "auto",
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
    """Ask for a model's answer under encryption."""
    if (node is None) == (bundle is None):
        raise typer.BadParameter("give either --node or --bundle")
    if trusted_key and bundle is None:
        raise typer.BadParameter("--trusted-key goes with --bundle; a node has its own")
    if bundle is not None and any((tls, tls_ca, tls_cert, tls_key, insecure_plain_text, token_file)):
        raise typer.BadParameter("options of transport go with --node; --bundle stays on this machine")
    if bundle is not None and model_name:
        raise typer.BadParameter("--model-name goes with --node; a bundle holds one model")
    import numpy as np

    from heinfer.client.data import load_query
    from heinfer.plan import TensorSpec
    from heinfer.plan.files import write_file

    if not query.is_file():
        raise typer.BadParameter(f"{query} does not exist", param_hint="QUERY.npy")
    context: AbstractContextManager[RemoteModel]
    if node is not None:
        towards_node = security(tls, tls_ca, tls_cert, tls_key, insecure_plain_text)
        context = _connect(node, towards_node, token_of(token_file), model_name)
    else:
        context = _start(bundle or Path(), mode, trusted_key or ())
    with context as model:
        spec = model.description.inputs[0]
        data = load_query(query, TensorSpec(spec.name, tuple(d or 0 for d in spec.shape[1:]), spec.dtype), divide)
        for note in data.notes:
            out.print(note)
        figures = _ask(model, data.x)
    result = figures.pop("result")
    if output is not None:
        content = io.BytesIO()
        np.save(content, result)
        write_file(output, content.getvalue())
        out.print(f"Wrote {output}: {result.dtype} {result.shape}")
    _show(result, figures)
    write_json(json, {**figures, "output": result.tolist()})


def _connect(node: str, towards_node: Security, token: str | None, name: str) -> RemoteModel:
    from heinfer.client.remote import RemoteModel

    return RemoteModel(node, security=towards_node, token=token, model=name)


def _start(bundle: Path, mode: str, trusted_keys: Sequence[Path]) -> AbstractContextManager[RemoteModel]:
    from heinfer.client import local

    return local(bundle, mode=mode, prepared=1, trusted_keys=trusted_keys)


def _ask(model: RemoteModel, x: Any) -> dict[str, Any]:
    from heinfer.client.report import bound_condition

    started = time.perf_counter()
    answer = model.query(x, statistics=True)
    seconds = time.perf_counter() - started
    result = next(iter(answer.outputs.values()))
    blocks, unbounded = answer.statistics["blocks"], answer.statistics["unbounded"]
    bound: float | None = answer.statistics["error_bound"]
    if unbounded and not bound:  # 0 where no sample has one
        bound = None
    return {
        "result": result,
        "samples": len(x),
        "seconds": seconds,
        "bytes_up": sum(b["bytes_up"] for b in blocks),
        "bytes_down": sum(b["bytes_down"] for b in blocks),
        "mode": answer.statistics["mode"],
        "prepared_before": answer.statistics["pooled"],
        "preparation_s": answer.statistics["preparation_s"],
        "rounds": answer.statistics["rounds"],
        "error_bound": bound,
        "error_bound_condition": bound_condition(bound, answer.statistics["conditional"]),
        "fitted": answer.statistics["fitted"],
        "unbounded": unbounded,
        "inputs_outside": answer.statistics["inputs_outside"],
        "outputs_outside": answer.statistics["outputs_outside"],
    }


def _show(result: Any, figures: dict[str, Any], most: int = 10) -> None:
    from heinfer.client.report import describe_bound

    if result.ndim == 2 and result.shape[1] > 1:
        top = result.argmax(axis=1)
        for i, (row, best) in enumerate(zip(result[:most], top[:most], strict=True)):
            out.print(f"sample {i}: class {best} ({row[best]:.4g})")
    else:
        out.print(str(result[:most]))
    if len(result) > most:
        out.print(f"... and {len(result) - most} more")
    stated, condition = figures["error_bound"], figures["error_bound_condition"]
    bound = describe_bound(stated, figures["fitted"], condition, figures["unbounded"], figures["samples"])
    certain = stated is not None and condition is None
    error = f"last block's error at most {bound}" if certain else f"error bound of the last block {bound}"
    out.print(
        f"{figures['samples']} sample(s) in {duration(figures['seconds'])} in {figures['mode']} mode"
        f"{_preparation(figures)}, {figures['rounds']} rounds, "
        f"{size(figures['bytes_up'])} up, {size(figures['bytes_down'])} down, {error}"
    )
    outside = figures["inputs_outside"], figures["outputs_outside"]
    if any(outside):
        out.print(
            f"Outside of the ranges that calibration data showed: {outside[0]:,} inputs and {outside[1]:,} outputs of "
            "deep blocks; their polynomials may be far off"
        )


def _preparation(figures: dict[str, Any]) -> str:
    """Say what preparing cost, where it is part of the time."""
    if figures["mode"] != "prepared":
        return ""
    missing = figures["samples"] - figures["prepared_before"]
    if not missing:
        return " (prepared before)"
    return f" ({duration(figures['preparation_s'])} of it preparing {missing} of them)"
