"""What the parties write while they work, at the most verbose setting of the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import connect
from heinfer.wire import QueryFailedError
from partitioner import partition
from tests.parties import start
from tests.small_models import logarithm_model

#: Every line that may appear: ids, shapes, milliseconds, kinds of errors.
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) "
ALLOWED = (
    STAMP + r"heinfer\.server\.service: block \d+: \d+ rows in, \d+ out, \d+\.\d ms",
    STAMP + r"trusted_node\.service: query: \d+ samples in \d+\.\d ms",
    STAMP + r"heinfer\.wire\.services: (session|query) ended by [A-Za-z]+",
)


def test_logs_hold_ids_shapes_and_milliseconds_only(tmp_path: Path) -> None:
    partition(logarithm_model(tmp_path / "logarithm.onnx"), tmp_path / "bundle")
    values = np.array([[0.3, 0.4, 0.5], [123456.7, 98765.4, 4321.9], [1e-9, 2e-9, 3e-9]], np.float32)
    with (
        start(tmp_path / "server", "-v", "serve", f"{tmp_path}/bundle/server", "--listen", "127.0.0.1:0") as server,
        start(
            tmp_path / "node", "-v", "node", str(tmp_path / "bundle" / "node"), "--listen", "127.0.0.1:0",
            "--server", server.address, "--allow-trace",
        ) as node,
        connect(node.address) as model,
    ):  # fmt: skip
        model.query(values, statistics=True, trace_samples=3)
        with pytest.raises(QueryFailedError):
            model.predict(np.full((1, 3), -7.25, np.float32))  # NaN inside the model
        with pytest.raises(QueryFailedError):
            model.predict(np.full((1, 3), np.nan, np.float32))
    said = {party.errors.name: party.said().splitlines() for party in (server, node)}
    for lines in said.values():
        for line in lines:
            assert any(re.fullmatch(pattern, line) for pattern in ALLOWED), line
    assert sum("rows in" in line for line in said["server"]) == 6  # three blocks, twice
    assert sum("samples in" in line for line in said["node"]) == 1
    assert sum("query ended by" in line for line in said["node"]) == 2
