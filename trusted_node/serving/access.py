"""Who may ask the node over HTTP: holders of a token, and pages that the node itself has served.

    Authorization: Bearer vQ3...       looked up in the node's file of tokens, at every request
    Origin: https://elsewhere.example  a page of another site runs in a client's browser: refused
    Host: elsewhere.example            without tokens or TLS a name would do that an attacker points at this machine
                                       (DNS rebinding): an IP address or localhost is expected

Missing and wrong tokens get the same answer. What must be open to all, so that a prober sees that the node lives or a
page can ask for the token, is marked with `open_to_all`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from heinfer.wire.queries import MAX_TOKEN_CHARACTERS
from heinfer.wire.tokens import TokenFile

UNAUTHORISED = "this node serves holders of a token: send it as 'Authorization: Bearer TOKEN'"
OTHER_ORIGIN = "pages of other sites may not use this node"
OTHER_HOST = (
    "without tokens and TLS this node answers to an IP address or localhost only, and the request names another host"
)
_OPEN = "_heinfer_open_to_all"
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def open_to_all(endpoint: _Endpoint) -> _Endpoint:
    """Mark a route's endpoint as one that needs no token: it must say nothing of queries or models."""
    setattr(endpoint, _OPEN, True)
    return endpoint


def is_open_to_all(endpoint: object) -> bool:
    """Whether `open_to_all` marked it."""
    return getattr(endpoint, _OPEN, False)


def holder(tokens: TokenFile, authorization: str) -> str | None:
    """Return whose token an Authorization header holds, None if nobody's.

    Raises:
        InputError: the file of tokens is gone or damaged.
    """
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token.isascii() or not 0 < len(token) <= MAX_TOKEN_CHARACTERS:
        return None
    return tokens.name_of(token)


def is_from_here(client: tuple[str, int] | None) -> bool:
    """Whether a client's address is a loopback one."""
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def is_other_origin(origin: str, host: str) -> bool:
    """Whether an Origin header names another site than the Host header does."""
    return bool(origin) and origin.lower().partition("://")[2] != host.lower()


def is_rebindable(host: str) -> bool:
    """Whether a Host header holds a name that somebody may have pointed at this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, section 6.3: never leaves the machine
            return False
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return True
    return False
