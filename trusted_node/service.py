"""The node's service towards its clients, who are in the same domain of trust."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.plan import Plan
from heinfer.wire import (
    Address,
    Description,
    Limits,
    MemoryBudget,
    PlainText,
    QueryHeader,
    ResultEvent,
    ResultHeader,
    Security,
    Statistics,
    TensorSpec,
    TokenFile,
    describe_tensors,
    iterate_tensor_chunks,
    serve_queries,
)
from trusted_node.engine import Engine, default_share

logger = logging.getLogger(__name__)
#: Queries that are read, run or answered at once.
WORKERS = 16
#: Samples of one query: bounds what a query makes the node hold.
MAX_SAMPLES = 65_536
#: Samples of one query whose values inside the model may be asked for: reports take 32.
MAX_TRACED_SAMPLES = 256


class NodeService:
    """Serves queries until stopped.

    Args:
        engine: runs them.
        address: where to listen.
        limits: sizes and times.
        allow_trace: whether clients may ask for values inside the model, for reports.
        security: TLS with clients, or where plain text is allowed.
        tokens: the clients that are served; None: whoever connects.
        memory: bytes for all queries together; None: a sixth of the machine's.

    Raises:
        TransportError: the port is in use, or this is no way to listen there.
    """

    def __init__(
        self,
        engine: Engine,
        address: Address,
        limits: Limits,
        allow_trace: bool,
        security: Security = PlainText.ON_LOOPBACK,
        tokens: TokenFile | None = None,
        memory: int | None = None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._allow_trace = allow_trace
        budget = MemoryBudget(memory or default_share(), limits.room_s)
        self._server = serve_queries(address, self, limits, WORKERS, security=security, tokens=tokens, memory=budget)
        self.address = self._server.address

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new queries, let running ones end within the grace, then stop."""
        self._server.stop(grace_s)

    def describe(self) -> Description:
        """Return what this node serves."""
        bundle = self._engine.bundle
        inputs, outputs = _specs(bundle.plan)
        return Description(bundle.plan_hash, inputs, outputs, MAX_SAMPLES)

    def answer(self, header: QueryHeader, tensors: dict[str, NDArray[Any]]) -> Iterator[ResultEvent]:
        """Run a query and yield its result."""
        samples = max((len(x) for x in tensors.values()), default=0)
        started = time.perf_counter()
        result = self._engine.infer(tensors, header.trace_samples)
        logger.info("query: %d samples in %.1f ms", samples, 1e3 * (time.perf_counter() - started))
        outputs = {**result.outputs, **result.trace}
        chunks = iterate_tensor_chunks(outputs, self._limits)
        yield ResultHeader(header.request_id, describe_tensors(outputs), next(chunks, None))
        yield from chunks
        if header.want_statistics:
            yield Statistics(result.statistics.to_json())

    def needs(self, header: QueryHeader) -> int:
        """Return the bytes that a query and its result take: as they travel, and as arrays.

        Traced are inputs, outputs and the outputs' bounds of every block, in float32.
        """
        samples = max((spec.shape[0] or 0 for spec in header.tensors), default=0)
        plan = self._engine.bundle.plan
        one = sum(prod(t.shape) * np.dtype(t.dtype).itemsize for t in (*plan.inputs, *plan.outputs))
        values = sum(prod(t.shape) for block in plan.blocks for t in (*block.inputs, *block.outputs, *block.outputs))
        return 2 * (samples * one + min(header.trace_samples, samples) * values * np.dtype(np.float32).itemsize)

    def check(self, header: QueryHeader) -> None:
        """Refuse a query by its announcement, before its values are read.

        Raises:
            InputError: it does not fit the model, has too many samples, or asks for what this node does not give.
        """
        expected = {t.name: t for t in self._engine.bundle.plan.inputs}
        for spec in header.tensors:
            known = expected.get(spec.name)
            if known is None:
                raise InputError(f"input {spec.name!r} is unknown: expected {sorted(expected)}")
            if spec.shape[1:] != known.shape or not spec.shape or spec.dtype != known.dtype:
                shape = ("samples", *known.shape)
                raise InputError(
                    f"input {spec.name!r}: expected {known.dtype} {shape}, found {spec.dtype} {spec.shape}"
                )
            if (spec.shape[0] or 0) > MAX_SAMPLES:
                raise InputError(f"a query may have {MAX_SAMPLES} samples, found {spec.shape[0]}; send several queries")
        if header.trace_samples and not self._allow_trace:
            raise InputError("this node does not return values inside the model; start it with --allow-trace")
        if header.trace_samples > MAX_TRACED_SAMPLES:
            raise InputError(
                f"values inside the model can be asked for of {MAX_TRACED_SAMPLES} samples a query, found "
                f"{header.trace_samples}; send several queries"
            )


def _specs(plan: Plan) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    inputs = tuple(TensorSpec(t.name, t.dtype, (None, *t.shape)) for t in plan.inputs)
    outputs = tuple(TensorSpec(t.name, t.dtype, (None, *t.shape)) for t in plan.outputs)
    return inputs, outputs
