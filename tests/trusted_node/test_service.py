"""What clients may ask of a node, before their values are read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import connect
from heinfer.client.evaluation import TRACED_SAMPLES
from heinfer.errors import InputError, RemoteProtocolError
from heinfer.wire import (
    Limits,
    QueryClient,
    QueryFailedError,
    QueryHeader,
    TensorSpec,
    describe_tensors,
    iterate_tensor_chunks,
)
from tests.interfaces.fakes import CLASSES, DIGIT, fake_models
from tests.parties import LOOPBACK, Parties, WatchedPool, parties, serving
from tests.waiting import soon
from trusted_node.service import MAX_TRACED_SAMPLES, NodeService

#: Values of the dense model's two blocks: 3 in, 4 out and their bounds; 4 in, 2 out and their bounds.
BLOCK_VALUES = 3 + 4 + 4 + 4 + 2 + 2


@pytest.fixture(scope="module")
def both(dense_bundle: Path, pool: WatchedPool) -> Iterator[Parties]:
    with parties(dense_bundle, pool) as made:
        yield made


def asked(samples: int, traced: int) -> QueryHeader:
    return QueryHeader(1, (TensorSpec("x", "float32", (samples, 3)),), False, traced, None)


@pytest.mark.parametrize(("samples", "traced", "counted"), [(100, 0, 0), (100, 7, 7), (5, 256, 5), (5, 2**32 - 1, 5)])
def test_query_takes_room_for_the_values_that_it_traces(both: Parties, samples: int, traced: int, counted: int) -> None:
    assert both.node.queries.needs(asked(samples, traced)) == 2 * 4 * (samples * (3 + 2) + counted * BLOCK_VALUES)


def test_query_may_trace_so_many_samples(both: Parties) -> None:
    both.node.queries.check(asked(10, MAX_TRACED_SAMPLES))
    with pytest.raises(InputError, match=f"{MAX_TRACED_SAMPLES} samples a query, found {MAX_TRACED_SAMPLES + 1}"):
        both.node.queries.check(asked(10, MAX_TRACED_SAMPLES + 1))
    assert TRACED_SAMPLES <= MAX_TRACED_SAMPLES


def test_trace_larger_than_the_node_s_memory_is_refused_before_anything_is_read(both: Parties) -> None:
    x = np.ones((10, 3), np.float32)
    with serving(both.engine, Limits(), memory=1000) as node, connect(node.address) as model:
        assert model.query(x, trace_samples=2).outputs["y"].shape == (10, 2)
        before = len(both.evaluator.requests)
        with pytest.raises(QueryFailedError, match="raise --memory"):
            model.query(x, trace_samples=10)
        assert len(both.evaluator.requests) == before


def test_client_that_goes_away_takes_its_waiting_query_with_it() -> None:
    models = fake_models()
    model = models["digits"]
    model.hold()
    node = NodeService(models, "digits", LOOPBACK, Limits(), allow_trace=False)
    client = QueryClient(node.address, Limits())
    image = {"x": np.zeros((1, *DIGIT), np.float32)}
    chunks = iterate_tensor_chunks(image, Limits())
    header = QueryHeader(1, describe_tensors(image), first=next(chunks, None))
    with ThreadPoolExecutor(1) as thread:
        query = thread.submit(client.ask, header, chunks)
        assert soon(lambda: model.pending == 1)
        client.close()
        assert soon(lambda: model.pending == 0), "the query waits for nobody"
        with pytest.raises(RemoteProtocolError):
            query.result(20)
    model.release()
    with connect(node.address) as other:
        assert other.predict(image["x"]).shape == (1, CLASSES)
    node.stop(0)
