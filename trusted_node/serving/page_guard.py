"""Who may talk to the node's page: requests by a name that is the node's, from the page itself, with a token if wanted.

    GET  http://rebound.example/page/status     421: the name is not one of ours (DNS rebinding)
    POST /page/infer, Origin: http://elsewhere  403: another site's page asks (cross-site request forgery)
    POST /page/infer, no or a wrong token       401: the same words for both

The page stores nothing, so nothing is sent along by a browser of its own accord but a certificate, where TLS wants
one; the checks of origin are there for that, and for pages on loopback, which have no other protection.
Sources: Fetch Metadata Request Headers (W3C), Origin header (RFC 6454), HTTP 421 (RFC 9110, 15.5.20).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from heinfer.wire import TokenFile
from trusted_node.serving.access import holder, is_other_origin

_LOCAL: Final = "localhost"
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})


class Refusal(Exception):  # noqa: N818 -- an answer, no fault of ours
    """A request is answered with this instead of what it asked for.

    Attributes:
        status: of HTTP.
        kind: one word for the page's script.
        message: for the person who looks at the page.
        retry_s: seconds after which it may be tried again; 0: nothing is said.
    """

    def __init__(self, status: int, kind: str, message: str, retry_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True)
class PageGuard:
    """Checks requests by their headers.

    Attributes:
        hosts: names and addresses by which the node is reached, beside loopback, in lower case. Where it listens on
            all addresses ("0.0.0.0", "::") every address is allowed and names have to be listed: a page of another
            site can point its own name at us, never an address.
        tokens: clients that are served; None: whoever may connect.
    """

    hosts: frozenset[str]
    tokens: TokenFile | None = None

    @classmethod
    def of(cls, hosts: Iterable[str], tokens: TokenFile | None = None) -> PageGuard:
        """Make a guard for hosts in any spelling."""
        return cls(frozenset(_plain(host) for host in hosts), tokens)

    def check_host(self, request: Request) -> None:
        """Raise Refusal unless the request names this node."""
        host = _host_of(request.headers.get("host", ""))
        if host is None or not self._is_ours(host):
            raise Refusal(
                421,
                "host",
                "this node is not reached by that name: use its address, or name it with --page-host",
            )

    def check_read(self, request: Request) -> None:
        """Raise Refusal unless the page itself, or a person, may read with this request."""
        self.check_host(request)
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise _foreign()
        self._check_token(request)

    def check_write(self, request: Request) -> None:
        """Raise Refusal unless the page itself sent this JSON."""
        self.check_host(request)
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site is None and origin is None:
            raise Refusal(403, "origin", "this is for the node's own page; programs ask /v2/models/{name}/infer")
        if site not in (None, "same-origin"):
            raise _foreign()
        if origin is not None and is_other_origin(origin, request.headers["host"]):
            raise _foreign()
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "type", "expected application/json")
        self._check_token(request)

    def _is_ours(self, host: str) -> bool:
        if host == _LOCAL or host in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or bool(self.hosts & _WILDCARDS)

    def _check_token(self, request: Request) -> None:
        if self.tokens is None:
            return
        if holder(self.tokens, request.headers.get("authorization", "")) is None:
            raise Refusal(401, "token", "this node wants a token of its clients: ask whoever runs it for one")


def _plain(host: str) -> str:
    return host.strip().lower().removesuffix(".").removeprefix("[").removesuffix("]")


def _host_of(header: str) -> str | None:
    """Return the host of a Host header without its port, None where it is none."""
    try:
        parts = urlsplit(f"//{header}")
        host, _ = parts.hostname, parts.port  # a port that is no number is refused here
    except ValueError:
        return None
    return _plain(host) if host and parts.netloc == header and "@" not in header else None


def _foreign() -> Refusal:
    return Refusal(403, "origin", "the request came from another site's page and was not answered")
