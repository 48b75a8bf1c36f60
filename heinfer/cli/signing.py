"""heinfer sign, and what other commands show of signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from heinfer.cli.screen import JsonOption, out, write_json

TrustedKeyOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--trusted-key", metavar="SIGNER.pub", help="Take nothing that this key has not signed; may be repeated."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sign")(sign_command)


def sign_command(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="A whole bundle.")] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="SIGNING.pem", help="The private key.")] = None,
    new_key: Annotated[
        Path | None, typer.Option("--new-key", metavar="FOLDER", help="Make a pair of keys there instead.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Sign a bundle, so that parties can refuse what somebody else has made or changed."""
    from heinfer.plan.signing import fingerprint
    from partitioner.signing import make_keys, read_signing_key, sign_bundle

    if new_key is not None:
        if bundle is not None or key is not None:
            raise typer.BadParameter("--new-key takes neither BUNDLE nor --key")
        made = make_keys(new_key)
        out.print(f"Wrote {made.private}, to be kept secret, and {made.public}, for --trusted-key")
        signer = made.key
    else:
        if bundle is None or key is None:
            raise typer.BadParameter("expected BUNDLE and --key SIGNING.pem, or --new-key FOLDER")
        signer = sign_bundle(bundle, read_signing_key(key))
        out.print(f"Signed {bundle}, server/ and node/: bundle.sig in each")
    out.print(f"Fingerprint {fingerprint(signer)}")
    write_json(json, {"fingerprint": fingerprint(signer)})


def show_signer(bundle: Path, figures: dict[str, Any]) -> None:
    """Print who signed a bundle, and add it to the figures: a fingerprint, or None."""
    from heinfer.plan.signing import find_signer, fingerprint

    signer = find_signer(bundle)
    figures["signed_by"] = None if signer is None else fingerprint(signer)
    if signer is None:
        out.print("Unsigned: nothing says who made it")
    else:
        out.print(f"Signed by {fingerprint(signer)}; --trusted-key takes no other signer's")
