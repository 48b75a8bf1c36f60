"""The node's service towards its clients, who are in the same domain of trust.

    greeting (model "digits") --> ModelQueries("digits") --Query--> Models.get("digits").submit --> result, or why not

A connection is about one model, which its greeting names; without a name it is the node's only or first one. A model is
looked up at every question, so that one which is loaded anew is the next question's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError, RemoteProtocolError
from heinfer.plan import Plan
from heinfer.wire import (
    Address,
    Description,
    Limits,
    MemoryBudget,
    PlainText,
    QueryFailedError,
    QueryFailureCode,
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
from heinfer.wire.listener import ConnectionCounts
from heinfer.wire.query_service import MAX_CONNECTIONS
from trusted_node.engine import QueryResult, default_share
from trusted_node.serving.interface import (
    Channel,
    DeadlineError,
    ModelNotReadyError,
    Models,
    Query,
    QueueFullError,
    ServedModel,
)

#: Samples of one query whose values inside the model may be asked for: reports take 32.
MAX_TRACED_SAMPLES = 256
#: How often a query that waits looks whether its client is still there.
_LOOK_S = 0.5


class NodeService:
    """Serves queries until stopped.

    Args:
        models: run them.
        model: the one that clients get who name none.
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
        models: Models,
        model: str,
        address: Address,
        limits: Limits,
        allow_trace: bool,
        security: Security = PlainText.ON_LOOPBACK,
        tokens: TokenFile | None = None,
        memory: int | None = None,
    ) -> None:
        self._models = models
        self._limits = limits
        self._allow_trace = allow_trace
        self.queries = self.about(model)
        budget = MemoryBudget(memory or default_share(), limits.room_s)
        self._server = serve_queries(
            address,
            self.queries,
            limits,
            MAX_CONNECTIONS,  # what waits is the models' queues' business
            security=security,
            tokens=tokens,
            memory=budget,
            about=self.about,
        )
        self.address = self._server.address

    def about(self, model: str) -> ModelQueries:
        """Return who answers queries about a model.

        Raises:
            UnknownModelError: there is none of that name.
        """
        return ModelQueries(self._models, model, self._limits, self._allow_trace)

    def connections(self) -> ConnectionCounts:
        """Return what has become of clients' connections."""
        return self._server.connections()

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new queries, let running ones end within the grace, then stop."""
        self._server.stop(grace_s)


class ModelQueries:
    """Answers queries about one model; see `heinfer.wire.query_service.QueryHandler`.

    Args:
        models: run them.
        name: of the model.
        limits: sizes.
        allow_trace: whether clients may ask for values inside the model.
    """

    def __init__(self, models: Models, name: str, limits: Limits, allow_trace: bool) -> None:
        self._models = models
        self._name = name
        self._limits = limits
        self._allow_trace = allow_trace

    def describe(self) -> Description:
        """Return what this model takes and gives."""
        model = self._model()
        inputs, outputs = _specs(model.plan)
        return Description(model.plan_hash, inputs, outputs, model.max_samples, model=model.name)

    def answer(
        self, header: QueryHeader, tensors: dict[str, NDArray[Any]], gone: Callable[[], bool]
    ) -> Iterator[ResultEvent]:
        """Run a query and yield its result; one that still waits when its client has gone is dropped."""
        result = self._run(header, tensors, gone)
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
        plan = self._model().plan
        one = sum(prod(t.shape) * np.dtype(t.dtype).itemsize for t in (*plan.inputs, *plan.outputs))
        values = sum(prod(t.shape) for block in plan.blocks for t in (*block.inputs, *block.outputs, *block.outputs))
        return 2 * (samples * one + min(header.trace_samples, samples) * values * np.dtype(np.float32).itemsize)

    def check(self, header: QueryHeader) -> None:
        """Refuse a query by its announcement, before its values are read.

        Raises:
            InputError: it does not fit the model, has too many samples, or asks for what this node does not give.
        """
        model = self._model()
        expected = {t.name: t for t in model.plan.inputs}
        for spec in header.tensors:
            known = expected.get(spec.name)
            if known is None:
                raise InputError(f"input {spec.name!r} is unknown: expected {sorted(expected)}")
            if spec.shape[1:] != known.shape or not spec.shape or spec.dtype != known.dtype:
                shape = ("samples", *known.shape)
                raise InputError(
                    f"input {spec.name!r}: expected {known.dtype} {shape}, found {spec.dtype} {spec.shape}"
                )
            if (spec.shape[0] or 0) > model.max_samples:
                raise InputError(
                    f"a query may have {model.max_samples} samples, found {spec.shape[0]}; send several queries"
                )
        if header.trace_samples and not self._allow_trace:
            raise InputError("this node does not return values inside the model; start it with --allow-trace")
        if header.trace_samples > MAX_TRACED_SAMPLES:
            raise InputError(
                f"values inside the model can be asked for of {MAX_TRACED_SAMPLES} samples a query, found "
                f"{header.trace_samples}; send several queries"
            )

    def _model(self) -> ServedModel:
        try:
            return self._models.get(self._name)
        except ModelNotReadyError as error:
            raise QueryFailedError(QueryFailureCode.BUSY, str(error)) from None

    def _run(self, header: QueryHeader, tensors: dict[str, NDArray[Any]], gone: Callable[[], bool]) -> QueryResult:
        """Wait for a query's result; what it costs is told of it alone, so where that is asked for it runs alone."""
        query = Query(
            tensors,
            Channel.FRAMES,
            secrets.token_hex(8),
            trace_samples=header.trace_samples,
            alone=header.want_statistics,
            traceparent=header.traceparent,
        )
        try:
            return _wait(self._model().submit(query), gone)
        except (QueueFullError, ModelNotReadyError, DeadlineError) as error:
            raise QueryFailedError(QueryFailureCode.BUSY, str(error)) from None


def _wait(future: Future[QueryResult], gone: Callable[[], bool]) -> QueryResult:
    """Wait for a result for as long as somebody wants it; what has not begun by then never does.

    Raises:
        RemoteProtocolError: the client is gone.
    """
    while True:
        try:
            return future.result(_LOOK_S)
        except TimeoutError:
            if future.done():
                return future.result()  # it has just come, or the error was its own
            if gone():
                future.cancel()
                raise RemoteProtocolError("the client went away before its query was answered") from None


def _specs(plan: Plan) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    inputs = tuple(TensorSpec(t.name, t.dtype, (None, *t.shape)) for t in plan.inputs)
    outputs = tuple(TensorSpec(t.name, t.dtype, (None, *t.shape)) for t in plan.outputs)
    return inputs, outputs
