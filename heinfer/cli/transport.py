"""Options of the commands that listen or connect, and what they come to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heinfer.cli.screen import err

if TYPE_CHECKING:
    from heinfer.wire import Security, TokenFile

#: How long before its end a certificate is spoken of.
_SOON = timedelta(days=14)
_TLS_HELP = "Folder with ca.pem, cert.pem and key.pem, as `heinfer certs` writes it"
_PLAIN_HELP = (
    "Send everything unencrypted, for all on the way to read and change; for a network that encrypts by itself."
)


def _option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="Transport")


def _flag(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel="Transport")


TlsOption = Annotated[Path | None, _option("--tls", "DIR", f"{_TLS_HELP}.")]
CaOption = Annotated[Path | None, _option("--tls-ca", "FILE", "Instead of DIR/ca.pem: who signs the other side's.")]
CertificateOption = Annotated[Path | None, _option("--tls-cert", "FILE", "Instead of DIR/cert.pem: our certificate.")]
KeyOption = Annotated[Path | None, _option("--tls-key", "FILE", "Instead of DIR/key.pem: our key.")]
PlainTextOption = Annotated[bool, _flag("--insecure-plain-text", _PLAIN_HELP)]

ClientTlsOption = Annotated[Path | None, _option("--client-tls", "DIR", f"Towards clients. {_TLS_HELP}.")]
ClientCaOption = Annotated[Path | None, _option("--client-tls-ca", "FILE", "Who signs clients' certificates.")]
ClientCertificateOption = Annotated[
    Path | None, _option("--client-tls-cert", "FILE", "The node's certificate towards clients.")
]
ClientKeyOption = Annotated[Path | None, _option("--client-tls-key", "FILE", "Its key.")]
ClientPlainTextOption = Annotated[
    bool, _flag("--client-insecure-plain-text", f"Towards clients. {_PLAIN_HELP} Needs --tokens.")
]
TokensOption = Annotated[
    Path | None, _option("--tokens", "FILE", "Serve only clients with a token whose hash is here; see `heinfer token`.")
]
TokenOption = Annotated[
    Path | None, _option("--token-file", "FILE", "Our token, for a node that wants one; for our eyes only.")
]
ModelNameOption = Annotated[
    str, typer.Option("--model-name", metavar="NAME", help="Which of the node's models; its only or first one.")
]


def security(
    folder: Path | None,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    plain_text: bool,
    prefix: str = "--",
) -> Security:
    """Return what the options come to; say so where our certificate soon ends.

    Raises:
        BadParameter: they contradict each other.
        TransportError: files are missing or no use.
    """
    from heinfer.wire import PlainText, Tls
    from heinfer.wire.security import CA_FILE, CERTIFICATE_FILE, KEY_FILE

    names = {CA_FILE: ca, CERTIFICATE_FILE: certificate, KEY_FILE: key}
    if folder is None and not any(names.values()):
        return PlainText.ANYWHERE if plain_text else PlainText.ON_LOOPBACK
    if plain_text:
        raise typer.BadParameter(f"either certificates or {prefix}insecure-plain-text, not both")
    files = [path or (folder / name if folder is not None else None) for name, path in names.items()]
    complete = [path for path in files if path is not None]
    if len(complete) < len(files):
        raise typer.BadParameter(
            f"{prefix}tls-ca, {prefix}tls-cert and {prefix}tls-key go together; or {prefix}tls DIR"
        )
    tls = Tls.load(*complete)
    if tls.expires - datetime.now(UTC) < _SOON:
        err.print(f"{tls.source} expires on {tls.expires:%Y-%m-%d %H:%M} UTC: renew it and start again")
    return tls


def tokens_of(path: Path | None) -> TokenFile | None:
    """Return the clients of a node, None where it serves whoever connects."""
    from heinfer.wire import TokenFile

    return None if path is None else TokenFile(path)


def token_of(path: Path | None) -> str | None:
    """Return our token, if we have one."""
    from heinfer.wire import read_token

    return None if path is None else read_token(path)
