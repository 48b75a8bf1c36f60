"""A server of sessions, towards nodes.

What a handler raises never leaks to the untrusted network: the node is told one of the fixed codes.
"""

from __future__ import annotations

from typing import TypeAlias

from heinfer.wire.address import Address
from heinfer.wire.codec import decode_node_event, encode_server_event
from heinfer.wire.frames import session_framing
from heinfer.wire.limits import Limits
from heinfer.wire.listener import Dialect, FrameServer, Handler
from heinfer.wire.messages import Failure, FailureCode, NodeEvent, ServerEvent, failure_code
from heinfer.wire.security import PlainText, Security

SessionHandler: TypeAlias = Handler[NodeEvent, ServerEvent]


def serve_sessions(
    address: Address,
    handler: SessionHandler,
    limits: Limits,
    workers: int,
    security: Security = PlainText.ON_LOOPBACK,
) -> FrameServer[NodeEvent, ServerEvent]:
    """Serve sessions until stopped.

    Args:
        address: where to listen; port 0 takes a free one.
        handler: holds one session, as `FrameServer` describes. What it raises ends the session with
            `Failure(failure_code(error))`.
        limits: bounds of both directions.
        workers: sessions served at the same time; the next one is told that the server is busy.
        security: TLS with nodes, or where plain text is allowed.

    Raises:
        ParameterError: workers is not positive.
        TransportError: the port is in use, the address is not this machine's, or this is no way to listen there.
    """
    dialect: Dialect[NodeEvent, ServerEvent] = Dialect(
        name="session",
        framing=session_framing(limits),
        decode=decode_node_event,
        encode=encode_server_event,
        busy=Failure(FailureCode.BUSY),
        stopping=Failure(FailureCode.STOPPING),
        failure=lambda error: Failure(failure_code(error)),
    )
    return FrameServer(address, dialect, handler, limits, workers, security)
