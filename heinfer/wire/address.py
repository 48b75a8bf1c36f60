"""Where a service listens: host:port, with IPv6 addresses in brackets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from heinfer.errors import InputError, ProtocolError

#: One label of a host name: RFC 1123, section 2.1, and underscores, which container networks use.
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
#: What may stand in an IP address, an IPv6 zone included (RFC 6874 leaves its characters open; interfaces use these).
_IP = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]{1,32})?")
_PORT = re.compile(r"[0-9]{1,5}")
MAX_HOST_CHARACTERS = 253


class TransportError(ProtocolError):
    """A connection cannot be made or accepted as configured.

    A port in use, plain text beyond this machine, a certificate that is refused.
    """


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port.

    Attributes:
        host: a host name, or an IPv4 or IPv6 address without brackets.
        port: 0 to 65535; 0 asks the system for a free one when a server binds.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"port must be in [0, 65535], got {self.port}")
        if self._ip is None and not self._is_name:
            raise InputError(f"{self.host!r} is neither a host name nor an IP address")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether this never leaves the machine. Names are not looked up: `localhost` alone counts."""
        if self.host.lower() == "localhost":
            return True
        ip = self._ip
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return ip is not None and ip.is_loopback

    @property
    def endpoint(self) -> tuple[str, int]:
        """What a socket is given. `localhost` is 127.0.0.1: bound to both families it would hide a port in use."""
        return "127.0.0.1" if self.host.lower() == "localhost" else self.host, self.port

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        if not _IP.fullmatch(self.host):
            return None
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def _is_name(self) -> bool:
        labels = self.host.removesuffix(".").split(".")
        # A last label of digits alone would be an IPv4 address, and a wrong one (WHATWG URL, section 3.5).
        return (
            len(self.host) <= MAX_HOST_CHARACTERS
            and all(_LABEL.fullmatch(label) for label in labels)
            and not labels[-1].isdigit()
        )


def parse_address(text: str) -> Address:
    """Read `host:port`, `192.0.2.1:port` or `[2001:db8::1]:port`.

    Raises:
        InputError: anything else.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not _PORT.fullmatch(port) or (":" in host and not bracketed):
        raise InputError(f"expected host:port (IPv6 in brackets: [::1]:50051), got {text!r}")
    if bracketed:
        host = host[1:-1]
        if ":" not in host:
            raise InputError(f"only IPv6 addresses stand in brackets, got {text!r}")
    return Address(host, int(port))


def cannot_listen(address: Address) -> TransportError:
    """The error for an address that cannot be bound."""
    return TransportError(
        f"cannot listen on {address}: the port is in use, or the address is not this machine's. "
        "Stop the other process or choose another port; port 0 takes a free one"
    )
