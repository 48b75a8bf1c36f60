"""Traces: one tree across client, node and server; nothing for the server unless it was allowed; nothing when off."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from heinfer.client import connect
from heinfer.errors import InputError, RemoteProtocolError
from heinfer.processes import child_environment
from heinfer.spans import NO_TRACER, SILENT, SpanName, TraceContext
from heinfer.traces import Traces
from heinfer.wire import Address, QueryFailedError
from heinfer.wire.proto import heinfer_pb2 as pb
from tests.captured_traffic import Proxy, messages
from tests.interfaces.small_node import MODEL, small_node
from tests.parties import REPOSITORY, start
from trusted_node.modes import ModeChoice
from trusted_node.serving.interface import Channel, Outcome, Query
from trusted_node.serving.tracing import QueryTracer, start_tracing

X = np.array([[0.3, 0.4, 0.5]], np.float32)
#: All that spans may say.
KEYS = {"model", "mode", "samples", "block", "bytes_up", "bytes_down", "seconds"}
#: Names of a span and of the one above it, in a query of two blocks in two rounds.
TREE = Counter(
    {
        ("client:query", ""): 1,
        ("node:query", "client:query"): 1,
        ("node:queue", "node:query"): 1,
        ("node:run", "node:query"): 1,
        ("node:round", "node:run"): 2,
        ("node:block", "node:round"): 2,
        ("server:request", "node:block"): 2,
        ("server:evaluate", "server:request"): 2,
    }
)


class Kept:
    """A tracer whose spans stay in memory."""

    def __init__(self, share: bool = False, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = Traces(self.provider, share)

    def spans(self, count: int = 0) -> Sequence[ReadableSpan]:
        """Return the spans that have ended; wait until there are that many, since answers come before spans end."""
        deadline = time.monotonic() + 10
        while len(found := self.exporter.get_finished_spans()) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return found


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What a client's program does that sets a provider, which goes once a process."""
    kept = Kept()
    monkeypatch.setattr("opentelemetry.trace.get_tracer", kept.provider.get_tracer)
    return kept


def edges(**parties: Sequence[ReadableSpan]) -> Counter[tuple[str, str]]:
    """Return how often which kind of span is below which one."""
    names = {
        s.context.span_id: f"{party}:{s.name.removeprefix('heinfer.')}" for party, own in parties.items() for s in own
    }
    return Counter(
        (names[s.context.span_id], "" if s.parent is None else names.get(s.parent.span_id, "?"))
        for own in parties.values()
        for s in own
    )


@pytest.mark.parametrize("mode", [ModeChoice.STANDARD, ModeChoice.PREPARED])
def test_a_query_is_one_tree_across_client_node_and_server(dense_bundle: Path, client: Kept, mode: ModeChoice) -> None:
    node, server = Kept(share=True), Kept()
    with (
        small_node(dense_bundle, mode=mode, tracer=node.traces, server_tracer=server.traces) as both,
        connect(both.node.address) as model,
    ):
        server.exporter.clear()  # requests of warming up, which are nobody's query
        model.predict(X)
        found = {"client": client.spans(1), "node": node.spans(7), "server": server.spans(4)}
    assert edges(**found) == TREE
    everything = [span for spans in found.values() for span in spans]
    assert len({span.context.trace_id for span in everything}) == 1
    for span in everything:
        assert {key.removeprefix("heinfer.") for key in span.attributes} <= KEYS
        assert span.status.is_ok or span.status.description is None
        assert not span.events
    by_name = {span.name: span.attributes for span in found["node"]}
    assert by_name["heinfer.query"] == {"heinfer.model": MODEL, "heinfer.samples": 1}
    assert by_name["heinfer.round"] == {"heinfer.mode": mode.value, "heinfer.samples": 1}
    blocks = [span.attributes for span in found["node"] if span.name == "heinfer.block"]
    requests = {
        span.attributes["heinfer.block"]: span.attributes for span in found["server"] if span.name == "heinfer.request"
    }
    assert [block["heinfer.block"] for block in blocks] == [0, 1]
    for block in blocks:
        for key in ("heinfer.bytes_up", "heinfer.bytes_down"):
            assert block[key] == requests[block["heinfer.block"]][key] > 0
        assert block["heinfer.seconds"] == pytest.approx(requests[block["heinfer.block"]]["heinfer.seconds"])


@pytest.mark.parametrize("share", [False, True])
def test_the_server_is_told_of_traces_only_where_that_is_allowed(dense_bundle: Path, client: Kept, share: bool) -> None:
    node = Kept(share)
    with ExitStack() as stack:
        between: list[Proxy] = []

        def through(address: Address) -> Address:
            between.append(stack.enter_context(Proxy(address)))
            return between[0].address

        both = stack.enter_context(small_node(dense_bundle, tracer=node.traces, through=through))
        stack.enter_context(connect(both.node.address)).predict(X)
        names = {span.context.span_id.to_bytes(8) for span in node.spans(7) if span.name == "heinfer.block"}
        trace_id = node.spans()[0].context.trace_id.to_bytes(16)
    told = [message.request.trace for up in between[0].connections for message in requests(bytes(up.up))]
    assert len(told) >= 2
    if share:
        assert {trace for trace in told if trace} == {trace_id + name for name in names}
    else:
        assert set(told) == {b""}
        assert trace_id not in between[0].up


def requests(up: bytes) -> list[Any]:
    """Return the requests that a node sent over a connection."""
    found = [pb.NodeMessage.FromString(envelope) for envelope, _ in messages(up)]
    return [message for message in found if message.WhichOneof("kind") == "request"]


def test_a_trace_that_is_not_sampled_is_neither_recorded_nor_told(dense_bundle: Path) -> None:
    node = Kept(share=True, sampler=ALWAYS_OFF)
    query = Query({"x": X}, Channel.HTTP, "q")
    span = QueryTracer(MODEL, node.traces).submitted(query, 1).query
    assert span.shared == b""
    with small_node(dense_bundle, tracer=node.traces) as both:
        both.models.get(MODEL).submit(query).result(10)
    assert not node.spans()


def test_a_query_continues_the_trace_of_its_traceparent_and_others_begin_one(dense_bundle: Path) -> None:
    node = Kept()
    above = TraceContext(bytes(range(16)), bytes(range(1, 9)))
    texts = {
        "ours": above.to_traceparent(),
        "none": "",
        "wrong": "00-xyz",
        "unsampled": above.to_traceparent()[:-1] + "0",
    }
    with small_node(dense_bundle, tracer=node.traces) as both:
        for text in texts.values():
            both.models.get(MODEL).submit(Query({"x": X}, Channel.HTTP, "q", traceparent=text)).result(10)
        queries = [span for span in node.spans(3 * 7) if span.name == "heinfer.query"]
    assert len(queries) == 3
    parents = [span.parent for span in queries]
    assert [p.span_id.to_bytes(8) for p in parents if p is not None] == [above.span_id]
    assert sum(span.context.trace_id.to_bytes(16) == above.trace_id for span in queries) == 1


def test_queries_that_run_together_share_a_run_that_is_linked_to_all_of_them() -> None:
    kept = Kept()
    tracer = QueryTracer("m", kept.traces)
    waiting = [tracer.submitted(Query({"x": X}, Channel.GRPC, str(n)), n) for n in (1, 2, 3)]
    run = tracer.started(waiting, 6)
    run.end()
    for trace, outcome in zip(waiting, (Outcome.OK, Outcome.DATA, Outcome.OK), strict=True):
        trace.end(outcome)
        trace.end(Outcome.FAILED)  # only the first call counts
    spans = {(s.name, s.context.span_id): s for s in kept.spans()}
    assert Counter(name for name, _ in spans) == {"heinfer.query": 3, "heinfer.queue": 3, "heinfer.run": 1}
    (shared,) = (s for s in spans.values() if s.name == "heinfer.run")
    contexts = [trace.query.context for trace in waiting]
    assert shared.parent is not None
    assert shared.parent.span_id.to_bytes(8) == contexts[0].span_id
    assert [link.context.span_id.to_bytes(8) for link in shared.links] == [c.span_id for c in contexts[1:]]
    failed = [
        s.attributes["heinfer.samples"]
        for s in spans.values()
        if not s.status.is_ok and s.status.status_code.name == "ERROR"
    ]
    assert failed == [2]


def test_spans_of_a_query_whose_server_is_gone_have_failed(dense_bundle: Path) -> None:
    node = Kept()
    with small_node(dense_bundle, mode=ModeChoice.PREPARED, tracer=node.traces) as both:
        both.server.stop(0.0)
        with pytest.raises(RemoteProtocolError):
            both.models.get(MODEL).submit(Query({"x": X}, Channel.HTTP, "q")).result(30)
        spans = node.spans(5)
    failed = {span.name: span.status.status_code.name == "ERROR" for span in spans}
    expected = {"query": True, "queue": False, "run": True, "round": True, "block": True}
    assert failed == {f"heinfer.{name}": value for name, value in expected.items()}
    assert not any(span.events or span.status.description for span in spans)


def test_an_error_of_a_client_leaves_its_span_failed_and_its_message_out(dense_bundle: Path, client: Kept) -> None:
    with small_node(dense_bundle) as both, connect(both.node.address) as model, pytest.raises(QueryFailedError):
        model.predict(np.full((1, 3), np.nan, np.float32))
    (span,) = client.spans(1)
    assert span.status.status_code.name == "ERROR"
    assert span.status.description is None
    assert not span.events


# -- across processes -------------------------------------------------------------------------------------------------


class Receiver:
    """A receiver of OTLP over HTTP: keeps the spans that come, by service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {a.key: a.value.string_value for a in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        outer.spans += [(names["service.name"], span) for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_CLIENT = """
import sys
import numpy as np
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
import heinfer

provider = TracerProvider(resource=Resource.create({"service.name": "hospital"}))
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
with heinfer.connect(sys.argv[1]) as model, trace.get_tracer("hospital").start_as_current_span("ward"):
    model.predict(np.array([[0.3, 0.4, 0.5]], np.float32))
"""


@pytest.mark.slow
def test_a_query_is_one_tree_across_processes(
    dense_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        with (
            start(
                tmp_path / "server", "serve", f"{dense_bundle}/server", "--listen", "127.0.0.1:0", "--traces"
            ) as server,
            start(
                tmp_path / "node", "node", f"{dense_bundle}/node", "--listen", "127.0.0.1:0", "--prepared", "0",
                "--server", server.address, "--traces", "--trace-server",
            ) as node,
        ):  # fmt: skip
            subprocess.run(
                [sys.executable, "-c", _CLIENT, node.address], check=True, cwd=REPOSITORY, env=child_environment()
            )
        said = server.said() + node.said()
    assert not said, said
    above = {span.span_id: (service, span.name) for service, span in receiver.spans}
    (trace_id,) = {span.trace_id for service, span in receiver.spans if service == "hospital"}
    tree = Counter(
        (service, span.name.removeprefix("heinfer."), *above.get(span.parent_span_id, ("", "")))
        for service, span in receiver.spans
        if span.trace_id == trace_id
    )
    client, ours, theirs = "hospital", "heinfer-node", "heinfer-server"
    assert tree == {
        (client, "ward", "", ""): 1,
        (client, "query", client, "ward"): 1,
        (ours, "query", client, "heinfer.query"): 1,
        (ours, "queue", ours, "heinfer.query"): 1,
        (ours, "run", ours, "heinfer.query"): 1,
        (ours, "round", ours, "heinfer.run"): 2,
        (ours, "block", ours, "heinfer.round"): 2,
        (theirs, "request", ours, "heinfer.block"): 2,
        (theirs, "evaluate", theirs, "heinfer.request"): 2,
    }


# -- contexts, and what is off ----------------------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=16).filter(any), st.binary(min_size=8, max_size=8).filter(any), st.booleans())
def test_a_context_comes_back_from_both_of_its_forms(trace_id: bytes, span_id: bytes, sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, sampled)
    assert TraceContext.from_traceparent(context.to_traceparent()) == context
    assert TraceContext.from_bytes(context.to_bytes()) == TraceContext(trace_id, span_id)


_GOOD = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (f"00-{_GOOD}-01", True),
        (f"00-{_GOOD}-03", True),  # a flag that is not ours
        (f"cc-{_GOOD}-01-what-will-be", True),  # a later version
        (f"00-{_GOOD}-01-what-will-be", False),
        (f"ff-{_GOOD}-01", False),
        (f"00-{_GOOD.upper()}-01", False),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", False),
        (f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01", False),
        (f"00-{_GOOD}-1", False),
        (f"00-{_GOOD}-01\n", False),
        ("", False),
        ("0" * 100_000, False),
    ],
)
def test_a_traceparent_is_read_as_the_standard_has_it(text: str, good: bool) -> None:
    context = TraceContext.from_traceparent(text)
    assert (context is not None) == good
    if context is not None:
        assert context.trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
        assert context.span_id.hex() == "00f067aa0ba902b7"
        assert context.sampled


@pytest.mark.parametrize("data", [b"", bytes(24), b"x" * 23, b"x" * 25, bytes(16) + b"x" * 8, b"x" * 16 + bytes(8)])
def test_what_a_node_sends_that_is_no_context_names_no_span(data: bytes) -> None:
    assert TraceContext.from_bytes(data) is None


def test_a_party_that_stops_does_not_wait_for_a_receiver_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("heinfer.traces.CLOSE_S", 0.2)
    traces = start_tracing()
    traces.start(SpanName.QUERY, None).end()
    started = time.monotonic()
    traces.close()
    assert time.monotonic() - started < 2  # where nobody gives up: six


def test_traces_without_the_extra_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "heinfer.traces", raising=False)
    monkeypatch.delattr("heinfer.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InputError, match=r"^traces need opentelemetry: pip install 'heinfer\[traces\]'$"):
        start_tracing()


def test_nobody_imports_opentelemetry_unasked() -> None:
    program = (
        "import sys, heinfer.server.service, trusted_node.serving.repository, trusted_node.service\n"
        "from heinfer.client.tracing import client_span\n"
        "with client_span('m', 1) as traceparent: assert traceparent == ''\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, env=child_environment())


def test_traces_that_are_off_cost_less_than_a_hundredth_of_a_query_of_lenet5() -> None:
    """LeNet-5 has five rounds of a block each and takes 6 ms."""
    tracer = QueryTracer("lenet5", NO_TRACER)
    query = Query({"x": X}, Channel.FRAMES, "q")

    def tell() -> float:
        started = time.perf_counter()
        trace = tracer.submitted(query, 1)
        with tracer.started([trace], 1) as run:
            for block in range(5):
                with run.child(SpanName.ROUND, mode="prepared", samples=1) as trip:
                    upload = trip.child(SpanName.BLOCK, block=block)
                    assert upload.shared == b""
                    upload.end(bytes_up=1, bytes_down=1, seconds=0.1)
        trace.end(Outcome.OK)
        return time.perf_counter() - started

    assert min(tell() for _ in range(200)) < 60e-6
    assert SILENT.context is None
