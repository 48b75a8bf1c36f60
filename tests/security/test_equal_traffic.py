"""What a server sees is the same for every query of a size, whatever the values and whatever becomes of them.

Sizes, kinds and order of all messages are compared, up and down, connection by connection. The model takes a
logarithm between two blocks, so negative queries make NaN inside it, and huge ones reach the limits of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import InputError
from heinfer.wire import BlockAnswer, BlockRequest, Chunk, NodeEvent, ServerEvent
from heinfer.wire.codec import decode_node_event, decode_server_event
from partitioner import partition
from tests.captured_traffic import MAGIC, Proxy, messages
from tests.parties import Parties, WatchedPool, parties
from tests.small_models import logarithm_model
from trusted_node.engine import DataError, QueryResult
from trusted_node.modes import ModeChoice

SAMPLES = 6
#: How a query is made of positive values, and whether it has a result.
QUERIES = {
    "usual": (lambda x: x, True),
    "again": (lambda x: x, True),
    "zero": (lambda x: 0 * x, True),
    "equal": (lambda x: np.full_like(x, 0.5), True),
    "tiny": (lambda x: x * 1e-38, True),
    "huge": (lambda x: x * 1e30, True),
    "one huge": (lambda x: np.where(np.arange(SAMPLES)[:, None] == 2, 1e37, x), True),
    "NaN inside one sample": (lambda x: np.where(np.arange(SAMPLES)[:, None] == 4, -x - 1, x), False),
    "NaN inside all samples": (lambda x: -x - 1, False),
    "infinity inside": (lambda x: np.full_like(x, 3e38), False),
}
Seen = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logarithm")
    partition(logarithm_model(folder / "model.onnx"), folder / "bundle")
    return folder / "bundle"


class Watch:
    """Node and server, and a proxy between them that has seen one query already."""

    def __init__(self, both: Parties, proxy: Proxy) -> None:
        self._both, self._proxy = both, proxy
        self.seen_by_server(np.ones((1, 3), np.float32), True)  # sessions are opened

    def seen_of_joined(self, requests: list[np.ndarray]) -> tuple[list[QueryResult | DataError], Seen]:
        """Run requests as one query; return their results, and what went over each connection meanwhile."""
        before = [(len(c.up), len(c.down)) for c in self._proxy.connections]
        results = self._both.engine.infer_joined([{"x": x} for x in requests]).results
        return results, self._since(before)

    def seen_by_server(self, x: np.ndarray, succeeds: bool) -> Seen:
        """Run one query; return what went over each connection meanwhile."""
        before = [(len(c.up), len(c.down)) for c in self._proxy.connections]
        if succeeds:
            assert np.isfinite(self._both.engine.infer({"x": x}).outputs["y"]).all()
        else:
            with pytest.raises(DataError):
                self._both.engine.infer({"x": x})
        return self._since(before)

    def _since(self, before: list[tuple[int, int]]) -> Seen:
        seen: Seen = [("connections", len(self._proxy.connections))]
        for connection, (up, down) in zip(self._proxy.connections, before, strict=False):
            ups = messages(MAGIC + bytes(connection.up[up:]))
            downs = messages(MAGIC + bytes(connection.down[down:]))
            events = [decode_node_event(*m) for m in ups], [decode_server_event(*m) for m in downs]
            first = min((e.request_id for e in events[0] if isinstance(e, BlockRequest)), default=0)
            seen += [("payloads", [len(payload) for _, payload in ups], [len(payload) for _, payload in downs])]
            seen += [describe(event, first) for event in (*events[0], *events[1])]
        return seen

    def sent(self) -> int:
        """Bytes that have gone up so far."""
        return len(self._proxy.up)


def describe(event: NodeEvent | ServerEvent, base: int) -> tuple[object, ...]:
    """Return all of an event but residues, session ids and times; request ids are counted from `base`."""
    match event:
        case BlockRequest():
            first = event.first and describe(event.first, base)
            numbers = (event.block, event.request_id - base, event.samples, event.rows, event.attempt, event.mode)
            return ("request", *numbers, first)
        case BlockAnswer():
            return ("answer", event.request_id - base, event.rows, event.first and describe(event.first, base))
        case Chunk():
            return ("chunk", event.request_id - base, event.first_row, event.rows, len(event.data))
    return (type(event).__name__,)


@pytest.fixture(scope="module", params=[ModeChoice.STANDARD, ModeChoice.PREPARED], ids=["standard", "prepared"])
def watch(bundle: Path, pool: WatchedPool, request: pytest.FixtureRequest) -> Iterator[Watch]:
    proxies: list[Proxy] = []

    def through(address: object) -> object:
        proxies.append(Proxy(address))  # type: ignore[arg-type]
        return proxies[0].address

    with parties(bundle, pool, through, mode=request.param) as both, proxies[0] as proxy:
        yield Watch(both, proxy)


def test_messages_and_replies_are_equal_for_every_query_of_a_size(watch: Watch) -> None:
    x = np.random.default_rng(0).uniform(0.1, 1, (SAMPLES, 3)).astype(np.float32)
    seen = {
        name: watch.seen_by_server(make(x).astype(np.float32), succeeds) for name, (make, succeeds) in QUERIES.items()
    }
    kinds = [description[0] for description in seen["usual"]]
    assert kinds.count("request") == kinds.count("answer") == 3  # blocks
    for name, found in seen.items():
        assert found == seen["usual"], name


@pytest.mark.parametrize("failing", [set(), {1}, {0, 2}, {0, 1, 2}], ids=str)
def test_requests_that_run_as_one_look_the_same_whichever_of_them_fail(watch: Watch, failing: set[int]) -> None:
    x = np.random.default_rng(1).uniform(0.1, 1, (SAMPLES, 3)).astype(np.float32)
    parts = [x[:1], x[1:4], x[4:]]
    for number in failing:
        parts[number] = parts[number].copy()
        parts[number][-1] *= -1  # NaN inside one of its samples
    results, seen = watch.seen_of_joined(parts)
    assert seen == watch.seen_by_server(x, True)
    (alone,), _ = watch.seen_of_joined([x])
    assert isinstance(alone, QueryResult)
    first = 0
    for number, (part, result) in enumerate(zip(parts, results, strict=True)):
        expected = alone.outputs["y"][first : first + len(part)]
        first += len(part)
        assert isinstance(result, DataError) == (number in failing)
        if isinstance(result, QueryResult):
            bounds = result.statistics.error_bound + alone.statistics.error_bound
            assert result.outputs["y"].shape == expected.shape
            assert np.abs(result.outputs["y"] - expected).max() <= bounds


def test_messages_differ_with_the_number_of_samples(watch: Watch) -> None:
    """The test above can fail: what is not hidden shows."""
    x = np.ones((SAMPLES, 3), np.float32)
    assert watch.seen_by_server(x[:-1], True) != watch.seen_by_server(x, True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_query_that_is_not_finite_itself_is_refused_and_nothing_sent(watch: Watch, value: float) -> None:
    x = np.ones((SAMPLES, 3), np.float32)
    x[3, 1] = value
    before = watch.sent()
    with pytest.raises(InputError, match="nothing was sent"):
        watch.seen_by_server(x, True)
    assert watch.sent() == before
