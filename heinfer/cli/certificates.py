"""heinfer certs, heinfer token: what parties show each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from heinfer.cli.screen import out, table

DAYS = 90
#: Two authorities, so that what is good for one kind of connection is good for nothing in the other.
SERVER_LINK, CLIENT_LINK = "node-server", "client-node"
TO_SERVER, TO_CLIENTS = "to-server", "to-clients"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("certs")(certs_command)
    app.command("token")(token_command)


def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; may hold earlier ones.")],
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="HOST[,HOST]", help="An untrusted server, by the names nodes connect to."),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="HOST[,HOST]", help="A trusted node, by the names clients connect to."),
    ] = None,
    client: Annotated[list[str] | None, typer.Option("--client", metavar="NAME", help="A client.")] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = DAYS,
) -> None:
    """Make a private certificate authority and certificates for a trial; again with the same names: renew them."""
    from heinfer.wire.authority import Use, open_authority, write_identity
    from heinfer.wire.tokens import check_name

    servers, nodes = ([_hosts(given) for given in many or []] for many in (server, node))
    clients = client or []
    for name in clients:
        check_name(name)
    if not servers and not nodes and not clients:
        raise typer.BadParameter("name at least one --server, --node or --client")
    links = {
        SERVER_LINK: open_authority(folder / "ca" / SERVER_LINK, "heinfer: nodes and servers"),
        CLIENT_LINK: open_authority(folder / "ca" / CLIENT_LINK, "heinfer: clients and nodes"),
    }
    made = table("folder", "for", "until (UTC)")
    for wanted in _wanted(servers, nodes, clients):
        place = folder / wanted.place
        use = Use.ACCEPT if wanted.hosts else Use.CONNECT
        until = write_identity(place, links[wanted.link], wanted.name, wanted.hosts, use, days)
        made.add_row(str(place), wanted.role, f"{until:%Y-%m-%d %H:%M}")
    out.print(made)
    out.print(
        f"Each machine gets its own folder only. Keep {folder / 'ca'} offline, away from all of them: whoever has it "
        "can pass for any of them."
    )


def token_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is.")],
    tokens: Annotated[
        Path, typer.Option("--tokens", metavar="FILE", help="The node's file of hashes; a line is added.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The client's token; NAME.token if not given.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the name's earlier token out of the file.")] = False,
) -> None:
    """Make a token by which a node knows a client; a node keeps its hash only."""
    from heinfer.plan.files import write_file
    from heinfer.wire import TokenFile, make_token, token_line
    from heinfer.wire.authority import write_private
    from heinfer.wire.tokens import without_tokens

    token = make_token()
    line = token_line(token, name)
    path = output or Path(f"{name}.token")
    if path.exists():
        raise typer.BadParameter(f"{path} exists: move it away first, or choose another file", param_hint="--output")
    known, earlier = "", 0
    if tokens.exists():
        TokenFile(tokens)  # nothing is added to what is none
        known, earlier = without_tokens(tokens.read_text(), name)
    if earlier and not replace:
        raise typer.BadParameter(
            f"{tokens} has a token of {name} already, and a name has one, so that taking its line out ends all that it "
            "may do: choose another name, or add --replace to take the earlier one out",
            param_hint="NAME",
        )
    write_private(path, f"{token}\n".encode())
    try:
        write_file(tokens, (known + line).encode())
    except OSError:
        path.unlink()  # a token that no node knows
        raise
    out.print(f"Wrote {path}, for {name} only, and its hash to {tokens}, for the node. Take the line out to end it.")
    if earlier:
        out.print(f"An earlier token of {name} is no longer in {tokens}: the next connection with it is refused.")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A certificate to make: where, for what, of which authority, for whom; without hosts for a side that connects."""

    place: Path
    role: str
    link: str
    name: str
    hosts: tuple[str, ...] = ()


def _wanted(servers: list[tuple[str, ...]], nodes: list[tuple[str, ...]], clients: list[str]) -> Iterator[_Wanted]:
    for hosts in servers:
        yield _Wanted(Path("servers", hosts[0]), "a server, towards nodes", SERVER_LINK, hosts[0], hosts)
    for hosts in nodes:
        place, name = Path("nodes", hosts[0]), hosts[0]
        yield _Wanted(place / TO_SERVER, "a node, towards its server", SERVER_LINK, name)
        yield _Wanted(place / TO_CLIENTS, "a node, towards clients", CLIENT_LINK, name, hosts)
    for name in clients:
        yield _Wanted(Path("clients", name), "a client", CLIENT_LINK, name)


def _hosts(given: str) -> tuple[str, ...]:
    """Names and addresses of one machine, which is called by the first."""
    from heinfer.wire import Address

    hosts = tuple(host.strip().removeprefix("[").removesuffix("]") for host in given.split(","))
    for host in hosts:
        Address(host, 0)  # refuses what is neither name nor address
    return hosts
