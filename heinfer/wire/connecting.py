"""Making a connection: to a server as its node, to a node as its client."""

from __future__ import annotations

import socket

from heinfer.errors import RemoteProtocolError
from heinfer.wire.address import Address
from heinfer.wire.connection import CONNECT_S, Connection
from heinfer.wire.frames import Framing
from heinfer.wire.limits import Limits
from heinfer.wire.security import PlainText, Security, Tls, check_connecting

#: A peer that does not let us in goes without a word.
_UNHEARD = {
    True: "the peer closed the connection before it said anything: it refuses our certificate, or is busy; see its log",
    False: "the peer closed the connection before it said anything: it expects TLS, or another protocol; see its log",
}


def connect(
    address: Address, limits: Limits, framing: Framing, security: Security = PlainText.ON_LOOPBACK
) -> Connection:
    """Connect to a server or a node, and say what we speak.

    Returns:
        The connection, to be closed by the caller.

    Raises:
        TransportError: plain text would leave the machine, or the server's certificate is not the one we want.
        RemoteProtocolError: nobody answers there, or the TLS handshake failed otherwise.
    """
    check_connecting(address, security)
    try:
        sock = socket.create_connection(address.endpoint, timeout=min(CONNECT_S, limits.reply_s))
    except OSError as error:
        raise RemoteProtocolError(f"no connection to {address}: {error.strerror or error}") from None
    connection = Connection(sock, limits, framing)
    try:
        if isinstance(security, Tls):
            connection.encrypt(security, address)
        connection.send_magic()
    except BaseException:
        connection.close()
        raise
    connection.unheard = _UNHEARD[isinstance(security, Tls)]
    return connection
