"""A model behind a node: what it says when there is no node to speak of."""

from __future__ import annotations

import pytest

from heinfer.client import connect
from heinfer.errors import RemoteProtocolError
from heinfer.wire import (
    PROTOCOL_VERSION,
    Address,
    Description,
    FrameServer,
    Limits,
    QueryFailedError,
    serve_queries,
    serve_sessions,
)

LOOPBACK = Address("127.0.0.1", 0)


class Node:
    """Describes itself, and nothing else."""

    def __init__(self, version: int) -> None:
        self.version = version

    def describe(self) -> Description:
        return Description(bytes(32), (), (), 1, protocol_version=self.version)


def serve(version: int = PROTOCOL_VERSION, connections: int = 2) -> FrameServer:
    return serve_queries(LOOPBACK, Node(version), Limits(), 1, connections)  # type: ignore[arg-type]


def test_node_of_another_version_is_refused() -> None:
    server = serve(PROTOCOL_VERSION + 1)
    with pytest.raises(RemoteProtocolError, match=f"speaks version {PROTOCOL_VERSION + 1} .* expected"):
        connect(str(server.address))
    server.stop(0)


def test_node_that_is_busy_is_said_to_be() -> None:
    server = serve(connections=1)
    with connect(str(server.address)), pytest.raises(QueryFailedError, match="busy"):
        connect(str(server.address))
    server.stop(0)


def test_server_in_place_of_a_node_is_no_node() -> None:
    server = serve_sessions(LOOPBACK, lambda events: iter(()), Limits(), 1)
    with pytest.raises(RemoteProtocolError, match=f"no node answers at {server.address}"):
        connect(str(server.address))
    server.stop(0)
