"""Metrics, logs and traces say the same whatever the data are, and hold none of what the data say.

The same queries, once with other data: scaled by 2**20 and negated, so that other units of the ReLU are zero.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from heinfer.cli.logs import JsonFormatter
from heinfer.client import connect
from heinfer.exposition import render
from heinfer.server.metrics import ServerMetrics
from tests.interfaces.small_node import small_node
from tests.interfaces.test_metrics import Series, series, settled
from tests.interfaces.test_traces import Kept
from trusted_node import prepared_uploads, results, uploads
from trusted_node.modes import ModeChoice
from trusted_node.scaling import SampleScales, scale_samples
from trusted_node.serving.interface import Channel
from trusted_node.serving.metrics import NodeMetrics
from trusted_node.statistics import QueryStatistics

X = np.array([[0.3173, 0.4519, 0.5231], [0.9871, -0.7673, 0.0137], [1.5717e-9, 2.2319e-9, 3.8713e-9]], np.float32)
OTHER = -X * np.float32(2**20)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
#: What depends on time, on chance, or on the process and not on the query.
_TIMES = re.compile(r"process_.*|.*_(seconds|days_left)(_bucket|_sum|_total)?")
_SESSIONS = re.compile(r"heinfer_(node_connections|server_sessions)")


@dataclass
class Run:
    """What was told of a run, and what must not be."""

    node: Series = field(default_factory=dict)
    server: Series = field(default_factory=dict)
    text: str = ""
    records: list[logging.LogRecord] = field(default_factory=list)
    spans: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)


@contextmanager
def noting(run: Run) -> Iterator[None]:
    """Keep values, extrema, scales and bounds of all blocks."""

    def scale(*arguments: object) -> SampleScales:
        made = scale_samples(*arguments)  # type: ignore[arg-type]
        run.hidden += [made.scale, made.peak, *made.values]
        return made

    def finish(bundle, index, scales, values, bounded, statistics):  # type: ignore[no-untyped-def]
        made = finish_outputs(bundle, index, scales, values, bounded, statistics)
        run.hidden += [values, *made.outputs, *made.bounds]
        return made

    def step(bound: np.ndarray) -> np.ndarray:
        made = rounding_step(bound)
        run.hidden += [bound, made]
        return made

    def raise_bounds(self: QueryStatistics, bound: float, step: float) -> None:
        run.hidden.append(np.array([bound, step]))
        raising(self, bound, step)

    finish_outputs, rounding_step, raising = results.finish_outputs, results.rounding_step, QueryStatistics.raise_bounds
    with pytest.MonkeyPatch.context() as patch:
        for module in (prepared_uploads, uploads):
            patch.setattr(module, "scale_samples", scale)
            patch.setattr(module, "finish_outputs", finish)
        patch.setattr(results, "rounding_step", step)
        patch.setattr(QueryStatistics, "raise_bounds", raise_bounds)
        yield


def observe(bundle: Path, x: np.ndarray, mode: ModeChoice, caplog: pytest.LogCaptureFixture) -> Run:
    """Run the same queries on data; return all that was told."""
    run = Run(hidden=[x])
    node, server = NodeMetrics(), ServerMetrics()
    ours, theirs = Kept(share=True), Kept()
    caplog.clear()
    with (
        caplog.at_level(logging.DEBUG),
        small_node(
            bundle, mode=mode, observer=node, tracer=ours.traces, server_observer=server, server_tracer=theirs.traces
        ) as both,
        connect(both.node.address) as model,
        noting(run),
    ):  # fmt: skip
        node.watch(both.models)
        node.watch_connections(Channel.FRAMES, both.node.connections)
        server.watch_sessions(both.server.connections)
        server.watch_memory(both.server.memory)
        if both.evaluator.prepared is not None:
            server.watch_model("dense", both.evaluator.prepared)
        theirs.exporter.clear()
        model.query(x, statistics=True, trace_samples=2)
        for sample in x:
            run.hidden.append(model.predict(sample[None]))
        run.node = settled(node, "heinfer_node_queries_total", 4)
        run.text = render(node.registry, "text/plain")[0].decode() + render(server.registry, "text/plain")[0].decode()
        ours.spans(4 * 7)
        theirs.spans(4 * 4)
        while both.server.memory.used:
            time.sleep(0.01)
        run.server = series(server.registry)
        run.records = [r for r in caplog.records if r.name.partition(".")[0] in ("heinfer", "trusted_node")]
    for party, kept in (("node", ours), ("server", theirs)):
        run.spans += [(party, span.name, dict(span.attributes or {})) for span in kept.spans()]
    return run


def without_times(found: Series) -> Series:
    """Return the series that must be equal; each run has its own server."""
    return {
        (name, tuple((key, "*" if key == "server" else value) for key, value in labels)): number
        for (name, labels), number in found.items()
        if not _TIMES.fullmatch(name) and not _SESSIONS.match(name)
    }


def shape(record: logging.LogRecord) -> str:
    """Return a record's line without what depends on time or chance."""
    line = JsonFormatter().format(record)
    line = re.sub(r'"time": "[^"]*", ', "", line)
    line = re.sub(r"\d+\.\d+( ms)?|\b[0-9a-f]{8,16}\b|127\.0\.0\.1:\d+", "*", line)
    return re.sub(r'_?ms": \d+', 'ms": *', line)


def numbers(text: str) -> set[float]:
    return {float(found) for found in _NUMBER.findall(text)}


@pytest.mark.parametrize("mode", [ModeChoice.STANDARD, ModeChoice.PREPARED])
def test_what_is_told_is_the_same_whatever_the_data_are_and_holds_nothing_of_them(
    dense_bundle: Path, mode: ModeChoice, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (observe(dense_bundle, x, mode, caplog) for x in (X, OTHER))

    assert without_times(one.node) == without_times(other.node)
    assert without_times(one.server) == without_times(other.server)
    assert Counter(name for name, _ in one.node) == Counter(name for name, _ in other.node)  # those of times too
    assert Counter(name for name, _ in one.server) == Counter(name for name, _ in other.server)
    kept = {name for name, _ in without_times(one.node) | without_times(one.server)}
    assert {"heinfer_node_bytes_total", "heinfer_node_run_samples_bucket", "heinfer_server_samples_total"} <= kept

    assert Counter(map(shape, one.records)) == Counter(map(shape, other.records))
    assert sum("trusted_node.serving.query_log" in shape(record) for record in one.records) == 4

    def attributes(run: Run) -> Counter[str]:
        return Counter(str((party, name, {**a, "heinfer.seconds": 0})) for party, name, a in run.spans)

    assert attributes(one) == attributes(other)
    assert len(one.spans) == 4 * (7 + 4)

    for run in (one, other):
        hidden = {float(value) for array in run.hidden for value in np.asarray(array, np.float64).ravel()}
        hidden |= {float(np.float32(value)) for value in hidden} | {-value for value in hidden}
        hidden |= {1e3 * value for value in hidden}  # as if they were seconds, told in milliseconds
        hidden = {value for value in hidden if len(repr(value)) > 8}  # 0.5 and 3.0 may be seconds and counts too
        assert len(hidden) > 60
        told = run.text + "".join(JsonFormatter().format(r) + f"{r.args!r} {r.__dict__!r}" for r in run.records)
        told += repr(run.spans)
        assert not hidden & numbers(told)
        assert "array" not in told


def test_the_comparison_finds_what_it_looks_for() -> None:
    leak = {("heinfer_node_error_bound", ()): 1.0}
    assert without_times(leak) == leak
    assert without_times({("heinfer_node_query_seconds_sum", ()): 1.0, ("process_open_fds", ()): 4.0}) == {}
    assert without_times({("heinfer_node_query_seconds_count", ()): 1.0}) != {}
    assert numbers("at most 1.1234567e-03, x=-2.5") == {1.1234567e-03, -2.5}
    record = logging.LogRecord("heinfer.x", logging.INFO, "", 0, "bound %s of 3 rows in %.1f ms", ("big", 1.25), None)
    assert shape(record) == '{"level": "INFO", "logger": "heinfer.x", "message": "bound big of 3 rows in *"}'
