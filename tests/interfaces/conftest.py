"""What several files here share: processes, which take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parties import Process, start


@pytest.fixture(scope="session")
def dense_node(dense_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A node of the command line with the small dense model, over frames, HTTP and gRPC, and its server."""
    folder, loopback = tmp_path_factory.mktemp("node"), "127.0.0.1:0"
    with (
        start(folder / "server.log", "serve", str(dense_bundle / "server"), "--listen", loopback) as server,
        start(
            folder / "node.log", "node", str(dense_bundle / "node"),
            "--server", server.address, "--listen", loopback, "--http", loopback, "--grpc", loopback,
        ) as party,
    ):  # fmt: skip
        yield party
