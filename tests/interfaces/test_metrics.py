"""Metrics of node and server: what they count, that the documentation lists all of them, and how they are served."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette

from heinfer.client import connect
from heinfer.errors import ParameterError, RemoteProtocolError
from heinfer.exposition import Family, MetricsServer, Readings, new_registry, render
from heinfer.plan import load_server
from heinfer.processes import child_environment
from heinfer.server.evaluation import BlockEvaluator
from heinfer.server.metrics import ServerMetrics
from heinfer.server.observing import AnsweredRequest
from heinfer.wire import Address, MemoryBudget, Mode, QueryFailedError, TransportError
from heinfer.wire.listener import ConnectionCounts
from tests.identities import Identities
from tests.interfaces.fakes import FakeModels, digits_model
from tests.interfaces.small_node import MODEL, small_node
from tests.parties import LOOPBACK, REPOSITORY
from trusted_node.modes import ModeChoice
from trusted_node.serving.interface import Channel, FinishedQuery, ModelState, Outcome, Query, ServerStatus
from trusted_node.serving.metrics import NodeMetrics
from trusted_node.statistics import QueryStatistics

X = np.array([[0.3, 0.4, 0.5], [0.1, -0.2, 0.7]], np.float32)
DOCUMENT = REPOSITORY / "docs" / "metrics.md"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(registry: CollectorRegistry) -> Series:
    """Return all series as they are exported, by name and labels."""
    text = render(registry, "text/plain")[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def total(found: Series, name: str, **labels: str) -> float:
    """Return the sum of the series of a name that have these labels."""
    return sum(v for (n, own), v in found.items() if n == name and set(labels.items()) <= set(own))


def finished(model: str = "digits", outcome: Outcome = Outcome.OK, **changes: object) -> FinishedQuery:
    given = {"samples": 1, "joined": 1, "queued_s": 0.001, "seconds": 0.01, "statistics": None} | changes
    return FinishedQuery(model, Channel.HTTP, "q", outcome=outcome, **given)  # type: ignore[arg-type]


def statistics() -> QueryStatistics:
    found = QueryStatistics.empty(2, 2)
    found.mode = "prepared"
    found.add(0, encrypt_s=0.1, server_s=0.25, bytes_up=100, bytes_down=30)
    found.add(1, encrypt_s=0.2, wire_s=0.5, bytes_up=11, bytes_down=5)
    found.add_group(0.125)
    found.add_preparation(2, 0.0625)
    return found


# -- the node ---------------------------------------------------------------------------------------------------------


def test_queries_that_ran_as_one_count_each_and_their_run_once() -> None:
    metrics = NodeMetrics()
    metrics.watch(FakeModels(digits_model()))
    shared = statistics()
    for samples in (1, 2, 3):
        metrics.finished(finished(samples=samples, joined=6, statistics=shared))
    metrics.finished(finished(outcome=Outcome.BUSY, joined=0))
    found = series(metrics.registry)
    assert (
        total(found, "heinfer_node_queries_total", outcome="ok", mode="prepared", channel="http", model="digits") == 3
    )
    assert total(found, "heinfer_node_queries_total", outcome="busy", mode="none") == 1
    assert total(found, "heinfer_node_samples_total", model="digits", mode="prepared") == 6
    assert total(found, "heinfer_node_query_seconds_count") == 3
    assert total(found, "heinfer_node_runs_total") == total(found, "heinfer_node_run_samples_count") == 1
    assert total(found, "heinfer_node_run_samples_sum") == 6
    assert total(found, "heinfer_node_rounds_total") == 2
    assert total(found, "heinfer_node_bytes_total", direction="up") == 111
    assert total(found, "heinfer_node_bytes_total", direction="down") == 35
    assert total(found, "heinfer_node_prepared_samples_total", source="pool") == 2
    assert total(found, "heinfer_node_prepared_samples_total", source="late") == 4
    parts = {part: total(found, "heinfer_node_part_seconds_sum", part=part) for part in ("encrypt", "server", "wire")}
    assert parts == pytest.approx({"encrypt": 0.3, "server": 0.25, "wire": 0.5})
    assert total(found, "heinfer_node_part_seconds_sum", part="node") == 0.125
    assert total(found, "heinfer_node_part_seconds_sum", part="prepare") == 0.0625
    assert total(found, "heinfer_node_part_seconds_sum", part="queue") == pytest.approx(0.004)


def test_a_name_that_a_client_made_up_is_no_label() -> None:
    metrics = NodeMetrics()
    metrics.finished(finished("digits"))  # before there are models
    metrics.watch(FakeModels(digits_model()))
    for name in ("digits", "x" * 100, 'evil"} 1\n', "digits2"):
        metrics.finished(finished(name))
    found = series(metrics.registry)
    assert {dict(labels)["model"] for name, labels in found if name == "heinfer_node_queries_total"} == {
        "digits",
        "unknown",
    }
    assert total(found, "heinfer_node_queries_total", model="unknown") == 4


def test_models_and_their_servers_are_asked_at_every_scrape() -> None:
    metrics, models = NodeMetrics(), FakeModels(digits_model("a"), digits_model("b"))
    metrics.watch(models)
    models["a"].hold()
    found = series(metrics.registry)
    assert found["heinfer_node_ready", ()] == 1
    assert total(found, "heinfer_node_pool_ready", model="a") == 12
    assert total(found, "heinfer_node_hints_days_left", model="b") == 29.5
    assert found["heinfer_node_server_resting", (("model", "a"), ("server", "127.0.0.1:7700"))] == 0
    models["b"].state = ModelState.UNLOADING
    found = series(metrics.registry)
    assert found["heinfer_node_ready", ()] == 0
    states = {
        dict(k[1])["state"]: v
        for k, v in found.items()
        if k[0] == "heinfer_node_model_state" and ("model", "b") in k[1]
    }
    assert {state for state, value in states.items() if value} == {"UNLOADING"}
    assert set(states) == {state.value for state in ModelState}
    assert not [labels for name, labels in found if name == "heinfer_node_pool_ready" and ("model", "b") in labels]


def test_a_node_counts_what_its_clients_asked_and_its_servers_did(dense_bundle: Path) -> None:
    metrics, server_metrics = NodeMetrics(), ServerMetrics()
    with (
        small_node(
            dense_bundle, mode=ModeChoice.PREPARED, observer=metrics, server_observer=server_metrics
        ) as both,
        connect(both.node.address) as model,
    ):  # fmt: skip
        metrics.watch(both.models)
        metrics.watch_connections(Channel.FRAMES, both.node.connections)
        server_metrics.watch_sessions(both.server.connections)
        server_metrics.watch_memory(both.server.memory)
        server_metrics.watch_model("dense", both.evaluator.prepared)
        warming = settled(server_metrics, "heinfer_server_requests_total", 6)  # three queries of zeros
        model.predict(X)
        model.predict(X[:1])
        connections = total(series(metrics.registry), "heinfer_node_connections", channel="frames")
        with pytest.raises(QueryFailedError):  # which may end the connection
            model.predict(np.full((1, 3), np.nan, np.float32))
        found = settled(metrics, "heinfer_node_queries_total", 3)
        settled(server_metrics, "heinfer_server_requests_total", 6 + 4)
        while both.server.memory.used:
            time.sleep(0.01)
        theirs = series(server_metrics.registry)
    assert total(found, "heinfer_node_queries_total", model=MODEL, channel="frames", outcome="ok", mode="prepared") == 2
    assert total(found, "heinfer_node_queries_total", outcome="input", mode="none") == 1
    assert total(found, "heinfer_node_samples_total") == 3
    assert total(found, "heinfer_node_rounds_total") == 4
    assert connections == 1
    for direction in ("up", "down"):
        sent = total(theirs, "heinfer_server_bytes_total", direction=direction)
        before = total(warming, "heinfer_server_bytes_total", direction=direction)
        assert sent - before == total(found, "heinfer_node_bytes_total", direction=direction) > 0
    for block in "01":
        before = total(warming, "heinfer_server_samples_total", block=block)
        assert total(theirs, "heinfer_server_samples_total", block=block, mode="prepared") - before == 3
    assert total(theirs, "heinfer_server_products_total") == total(theirs, "heinfer_server_requests_total")
    assert total(theirs, "heinfer_server_sessions") >= 1
    assert total(theirs, "heinfer_server_memory_bytes") == 0
    assert total(theirs, "heinfer_server_request_seconds_count") == total(theirs, "heinfer_server_requests_total")


def settled(metrics: NodeMetrics | ServerMetrics, name: str, count: float) -> Series:
    """Return the series once a counter is there: who asks has an answer a moment before it is counted."""
    deadline = time.monotonic() + 10
    while total(found := series(metrics.registry), name) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_uploads_that_are_sent_again_count_against_the_server_that_failed(dense_bundle: Path) -> None:
    metrics = NodeMetrics()
    with small_node(dense_bundle, mode=ModeChoice.PREPARED, observer=metrics) as both:
        metrics.watch(both.models)
        model = both.models.get(MODEL)
        before = series(metrics.registry)
        both.server.stop(0.0)
        with pytest.raises(RemoteProtocolError):
            model.submit(Query({"x": X}, Channel.PAGE, "q")).result(30)
        found = settled(metrics, "heinfer_node_queries_total", 1)
    assert total(before, "heinfer_node_server_repetitions_total") == 0
    assert total(found, "heinfer_node_server_repetitions_total", server=str(both.server.address)) >= 1
    assert total(found, "heinfer_node_server_failures") >= 1
    assert total(found, "heinfer_node_queries_total", outcome="server", channel="page") == 1


def test_a_server_that_forges_and_one_that_rests_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, models = NodeMetrics(), FakeModels(digits_model())
    servers = (
        ServerStatus("a:1", resting=False, in_quarantine=True, failures=0, forgeries=16),
        ServerStatus("b:1", resting=True, in_quarantine=False, failures=3, forgeries=1, repetitions=4),
    )
    status = replace(models["digits"].status(), servers=servers, hints_days_left=None)
    monkeypatch.setattr(models["digits"], "status", lambda: status)
    metrics.watch(models)
    found = series(metrics.registry)
    names = ("resting", "quarantined", "failures", "forgeries_total", "repetitions_total")
    told = {s.name: [total(found, f"heinfer_node_server_{name}", server=s.name) for name in names] for s in servers}
    assert told == {"a:1": [0, 1, 0, 16, 0], "b:1": [1, 0, 3, 1, 4]}
    assert not [labels for name, labels in found if name == "heinfer_node_hints_days_left"]


# -- how they are served ----------------------------------------------------------------------------------------------


def scrape(metrics: NodeMetrics, accept: str) -> httpx.Response:
    app = Starlette(routes=metrics.routes(FakeModels(digits_model())))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
            return await client.get("/metrics", headers={"Accept": accept})

    return asyncio.run(get())


def test_the_node_answers_in_the_format_that_is_asked_for() -> None:
    metrics = NodeMetrics()
    plain = scrape(metrics, "text/plain")
    assert plain.headers["Content-Type"].startswith("text/plain; version=")
    assert {family.name for family in parse_text(plain.text)} > {"heinfer_node_ready", "process_resident_memory_bytes"}
    modern = scrape(metrics, "application/openmetrics-text; version=1.0.0")
    assert modern.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert modern.text.endswith("# EOF\n")
    assert {family.name for family in parse_openmetrics(modern.text)} > {"heinfer_node_ready", "heinfer_build"}


def test_the_server_listens_in_plain_text_on_loopback_and_nowhere_else() -> None:
    registry = new_registry("server")
    server = MetricsServer(LOOPBACK, registry)
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
            assert b"heinfer_build_info{" in answer.read()
        with pytest.raises(TransportError, match="cannot listen"):
            MetricsServer(server.address, registry)
    finally:
        server.stop()
    with pytest.raises(TransportError, match="plain text is refused"):
        MetricsServer(Address("192.0.2.1", 0), registry)


def test_under_tls_the_servers_metrics_are_for_holders_of_a_certificate(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    server = MetricsServer(LOOPBACK, new_registry("server"), identities.load("server"))
    url = f"https://{server.address}/metrics"
    try:
        assert b"process_cpu" in fetch(url, identities["server"] / "ca.pem", identities["node to server"])
        for stranger in (None, identities["foreign client"]):
            with pytest.raises((OSError, http.client.HTTPException)):
                fetch(url, identities["server"] / "ca.pem", stranger)
    finally:
        server.stop()


def test_a_peer_that_is_silent_keeps_nobody_from_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("heinfer.exposition.SILENT_S", 0.3)
    identities = Identities(tmp_path)
    server = MetricsServer(LOOPBACK, new_registry("server"), identities.load("server"))
    stopping = threading.Thread(target=server.stop, daemon=True)
    with socket.create_connection(server.address.endpoint, timeout=5) as silent:
        url = f"https://{server.address}/metrics"
        assert b"process_cpu" in fetch(url, identities["server"] / "ca.pem", identities["node to server"])
        assert silent.recv(1) == b""  # given up
        with socket.create_connection(server.address.endpoint, timeout=5):
            stopping.start()
            stopping.join(5)
            assert not stopping.is_alive()
    assert "a request for metrics ended by" in caplog.text


def test_series_are_looked_up_once() -> None:
    counter = Counter("c", "Text.", ("a", "b"), registry=CollectorRegistry())
    family = Family(counter)
    assert family.of("1", "2") is family.of("1", "2")
    assert family.of("1", "2") is counter.labels("1", "2")
    assert family.of("1", "2") is not family.of("2", "1")


def fetch(url: str, ca: Path, identity: Path | None) -> bytes:
    context = ssl.create_default_context(cafile=ca)
    if identity is not None:
        context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
    with urllib.request.urlopen(url, context=context, timeout=5) as answer:
        return answer.read()


def test_readings_add_up_by_labels_and_keep_their_kind() -> None:
    registry = CollectorRegistry()
    readings = Readings(registry)
    readings.counter("c", "Text.", {"a": "1"}, lambda: 2)
    readings.counter("c", "Text.", {"a": "1"}, lambda: 3)
    readings.counter("c", "Text.", {"a": "2"}, lambda: 7)
    assert series(registry) == {("c_total", (("a", "1"),)): 5, ("c_total", (("a", "2"),)): 7}
    for labels in ({"b": "1"}, {}):
        with pytest.raises(ParameterError, match="has labels"):
            readings.counter("c", "Text.", labels, lambda: 0)
    with pytest.raises(ParameterError):
        readings.gauge("c", "Text.", {"a": "1"}, lambda: 0)


def test_a_party_without_metrics_needs_no_prometheus() -> None:
    program = (
        "import sys, heinfer.server.service, heinfer.cli.main, heinfer.cli.roles, trusted_node.service\n"
        "import trusted_node.serving.repository, trusted_node.serving.interfaces\n"
        "assert not [name for name in sys.modules if name.startswith(('prometheus', 'starlette', 'grpc'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, env=child_environment())


# -- the documentation ------------------------------------------------------------------------------------------------

_ROW = re.compile(
    r"\| `(?P<name>\w+)` \| (?P<kind>counter|gauge|histogram|info) \|(?P<labels>[^|]*)\| (?P<text>[^|]+) \|"
)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Return kind and labels of every metric in the document's tables."""
    rows = [match for line in DOCUMENT.read_text().splitlines() if (match := _ROW.fullmatch(line))]
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names))
    return {row["name"]: (row["kind"], frozenset(re.findall(r"`(\w+)`", row["labels"]))) for row in rows}


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, frozenset[str]]]:
    """Return kind and labels of every metric that a registry has; all of them must have a series."""
    found = {}
    for family in registry.collect():
        assert family.samples or family.type in ("counter", "histogram"), family.name
        name = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[family.name + name] = (family.type, frozenset(labels))
    return found


def test_the_documentation_lists_exactly_what_is_exported(tmp_path: Path, dense_bundle: Path) -> None:
    identities = Identities(tmp_path)
    node, server = NodeMetrics(), ServerMetrics()
    node.watch(FakeModels(digits_model()))
    node.watch_connections(Channel.FRAMES, ConnectionCounts)
    node.watch_certificate("clients", identities.load("node to clients"))
    node.finished(finished(statistics=statistics()))
    server.watch_sessions(ConnectionCounts)
    server.watch_memory(MemoryBudget(1000))
    server.watch_model("dense", BlockEvaluator(load_server(dense_bundle / "server")).prepared)
    server.answered(AnsweredRequest("dense", 0, Mode.PREPARED, 1, 10, 20, 0.1))
    assert documented() == exported(node.registry) | exported(server.registry)
    days = series(node.registry)["heinfer_node_certificate_days_left", (("towards", "clients"),)]
    assert 89 < days <= 90


def test_metrics_of_the_alert_rules_exist() -> None:
    rules = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    used = set(re.findall(r"\b(?:heinfer|process)_\w+", "".join(rules)))
    assert len(used) >= 8
    known = documented()
    for name in used:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert base in known, name
