"""What clients may ask of a node, before their values are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import connect
from heinfer.client.evaluation import TRACED_SAMPLES
from heinfer.errors import InputError
from heinfer.wire import Limits, QueryFailedError, QueryHeader, TensorSpec
from tests.parties import Parties, WatchedPool, parties, serving
from trusted_node.service import MAX_TRACED_SAMPLES

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
