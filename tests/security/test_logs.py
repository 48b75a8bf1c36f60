"""What the parties write while they work, at the most verbose setting of the command line."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import connect
from heinfer.errors import RemoteProtocolError
from heinfer.wire import QueryFailedError
from partitioner import partition
from tests.parties import WatchedPool, parties, start
from tests.small_models import logarithm_model
from trusted_node import preparation, prepared_uploads, results, uploads
from trusted_node.modes import ModeChoice
from trusted_node.sampling import draw_ternary
from trusted_node.scaling import SampleScales, scale_samples

#: Every line that may appear: ids, shapes, milliseconds, kinds of errors.
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) "
RECORDS = (
    r"heinfer\.server\.service: session [0-9a-f]{8}, block \d+: \d+ rows in, \d+ out, \d+\.\d ms",
    r"trusted_node\.serving\.query_log: query [0-9a-f]{16} of \w+ by frames: [a-z]+, \d+ samples of \d+ in \d+\.\d ms "
    r"\(queue \d+\.\d(, (prepare|node|encrypt|decrypt|check|server|wire) \d+\.\d)*\)",
    r"heinfer\.wire\.(listener|query_service): (session|query) ended by [A-Za-z]+",
)
ALLOWED = tuple(STAMP + record for record in RECORDS)


@pytest.mark.parametrize("mode", ["standard", "prepared"])
def test_logs_hold_ids_shapes_and_milliseconds_only(tmp_path: Path, mode: str) -> None:
    partition(logarithm_model(tmp_path / "logarithm.onnx"), tmp_path / "bundle")
    values = np.array([[0.3, 0.4, 0.5], [123456.7, 98765.4, 4321.9], [1e-9, 2e-9, 3e-9]], np.float32)
    with (
        start(tmp_path / "server", "-v", "serve", f"{tmp_path}/bundle/server", "--listen", "127.0.0.1:0") as server,
        start(
            tmp_path / "node", "-v", "node", str(tmp_path / "bundle" / "node"), "--listen", "127.0.0.1:0",
            "--server", server.address, "--allow-trace", "--mode", mode,
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
    warm_ups = 0 if mode == "standard" else 3
    assert sum("rows in" in line for line in said["server"]) == 3 * (2 + warm_ups)  # three blocks, twice
    assert sum("samples of" in line for line in said["node"]) == 3
    assert sum("query ended by" in line for line in said["node"]) == 2


@pytest.mark.parametrize("mode", [ModeChoice.STANDARD, ModeChoice.PREPARED])
def test_log_records_at_the_lowest_level_hold_no_values_scales_bounds_or_secrets(
    tmp_path: Path, pool: WatchedPool, caplog: pytest.LogCaptureFixture, mode: ModeChoice
) -> None:
    """Arguments of records count too: a handler may keep them."""
    partition(logarithm_model(tmp_path / "logarithm.onnx"), tmp_path / "bundle")
    known: list[np.ndarray] = []  # what must not be said: extrema, scales, bounds

    def scale(*arguments: object) -> SampleScales:
        made = scale_samples(*arguments)  # type: ignore[arg-type]
        known.extend([made.scale, made.peak, *(np.abs(x).sum(axis=1, dtype=np.float64) for x in made.values)])
        return made

    def step(bound: np.ndarray) -> np.ndarray:
        known.append(bound.ravel())
        return results_step(bound)

    secrets: list[np.ndarray] = []

    def draw(count: int, degree: int) -> np.ndarray:
        drawn = draw_ternary(count, degree)
        secrets.append(drawn.copy())
        return drawn

    results_step = results.rounding_step
    values = np.array([[0.3, 0.4, 0.5], [123456.7, 98765.4, 4321.9], [1e-9, 2e-9, 3e-9]], np.float32)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.DEBUG):
        for module in (prepared_uploads, uploads):
            patch.setattr(module, "scale_samples", scale)
        patch.setattr(results, "rounding_step", step)
        patch.setattr(preparation, "draw_ternary", draw)
        with parties(tmp_path / "bundle", pool, mode=mode, ready=2) as both, connect(both.node.address) as model:
            for name in ("heinfer", "trusted_node"):
                assert logging.getLogger(name).getEffectiveLevel() == logging.DEBUG
            model.query(values, statistics=True, trace_samples=3)
            with pytest.raises(QueryFailedError):
                model.predict(np.full((1, 3), -7.25, np.float32))  # NaN inside the model
            if mode is ModeChoice.PREPARED:
                assert both.evaluator.prepared is not None
                both.evaluator.prepared.evaluate = None  # type: ignore[method-assign, assignment]
            both.evaluator.fail = True
            with pytest.raises(RemoteProtocolError):
                both.engine.infer({"x": values})
    ours = [r for r in caplog.records if r.name.partition(".")[0] in ("heinfer", "trusted_node", "partitioner")]
    assert len(ours) >= 6 + 1
    said = ""
    for record in ours:
        assert record.exc_info is None
        assert any(re.fullmatch(p, f"{record.name}: {record.getMessage()}") for p in RECORDS), record.getMessage()
        arguments = record.args if isinstance(record.args, tuple) else (record.args,)
        assert all(isinstance(argument, int | float | str) for argument in arguments)
        said += f"{record.getMessage()} {arguments!r}\n"
    assert len(known) >= 3 * 3
    assert bool(secrets) == (mode is ModeChoice.PREPARED)
    numbers = {float(found) for found in re.findall(r"-?\d+\.?\d*(?:e[-+]?\d+)?", said)}
    hidden = {float(number) for number in np.unique(np.concatenate(known))}
    hidden = {number for number in hidden if len(repr(number)) > 8}  # 0.5 may be milliseconds too
    assert len(hidden) > 6
    assert not hidden & numbers
    assert "array" not in said
