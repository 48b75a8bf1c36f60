"""One group of a query's samples on its way through the plan.

    values --> [node step --> upload of every block of a round, four under way at once --> answers]* --> outputs

Samples may be of several requests. What the data of one make fail is noted, and the group goes on with zeros in place
of what can't be sent: the server sees all rounds, of all samples, whatever happens.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import HeinferError, InputError
from heinfer.plan import DeepStep, NodeStep, RoundStep
from heinfer.plan.execution import NodeStepError, Tensors
from heinfer.spans import Span, SpanName
from heinfer.wire import Mode
from trusted_node.batches import BatchUpload
from trusted_node.deep_uploads import DeepUpload
from trusted_node.delivery import Delivery, Watch
from trusted_node.modes import NAMES
from trusted_node.pool import Taken
from trusted_node.prepared_uploads import PreparedUpload
from trusted_node.scaling import sample_peaks
from trusted_node.statistics import QueryStatistics
from trusted_node.uploads import Upload

if TYPE_CHECKING:
    from trusted_node.engine import Engine

#: Uploads of one group under way at once; each holds a session, of which a server serves a limited number.
UPLOADS_IN_FLIGHT = 4
#: Seconds after its making at which a mask may not be used any more: what is in memory for long is there to be stolen,
#: and a server could draw a group's rounds out.
MASK_LIFETIME_S = 1800.0

AnyUpload = Upload | PreparedUpload | BatchUpload


class DataError(InputError):
    """The data made a value that is not finite. The client is told; the server can't tell."""


def spans_of(counts: Sequence[int], start: int, end: int) -> dict[int, slice]:
    """Return which samples of a group are whose; requests of 2, 3 and 1 samples and group [4, 6): {1: 0:1, 2: 1:2}."""
    spans, first = {}, 0
    for request, count in enumerate(counts):
        low, high = max(first, start), min(first + count, end)
        if low < high:
            spans[request] = slice(low - start, high - start)
        first += count
    return spans


class Group:
    """One group of samples on its way through the plan.

    Attributes:
        failures: by request, what its data made fail first.
        trace: values around every block.
    """

    def __init__(
        self,
        engine: Engine,
        statistics: QueryStatistics,
        traced: int,
        mode: Mode,
        spans: dict[int, slice],
        watch: Watch | None,
        span: Span,
    ) -> None:
        self._engine = engine
        self._plan = engine.bundle.plan
        self._statistics = statistics
        self._traced = traced
        self._mode = mode
        self._samples = 0
        self._taken: Taken | None = None
        self._spans = spans
        self._watch = watch
        self._span = span
        self.trace: dict[str, NDArray[Any]] = {}
        self.failures: dict[int, DataError] = {}
        self._last_moment = math.inf
        self._away_s = 0.0

    def run(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """Run all steps; the outputs of requests that failed are of no use."""
        limits = self._engine.limits
        self._last_moment = time.monotonic() + limits.query_s + len(self._plan.deep) * limits.deep_s
        if self._mode is not Mode.PREPARED:
            return self._run_watched(inputs)
        pool = self._engine.prepared
        assert pool is not None  # prepared mode is chosen only where there is one
        with pool.online():
            self._taken = pool.take(len(next(iter(inputs.values()))))
            self._statistics.add_preparation(self._taken.pooled, self._taken.seconds)
            self._last_moment = min(self._last_moment, self._taken.made_at + MASK_LIFETIME_S)
            try:
                return self._run_watched(inputs)
            finally:
                self._taken.wipe()
                self._taken = None  # groups outlive their run, masks should not

    def _run_watched(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        started = time.perf_counter()
        self._samples = len(next(iter(inputs.values())))
        try:
            outputs = self._run_steps(inputs)
        except BrokenProcessPool as error:
            raise HeinferError("a process that encrypts died; the query was dropped, ask again") from error
        self._statistics.add_group(time.perf_counter() - started - self._away_s)
        for name, values in outputs.items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                bad = ~np.isfinite(values.reshape(self._samples, -1)).all(axis=1)
                self._fail(self._requests_of(bad), f"output {name!r} holds NaN or infinity")
        return outputs

    def _run_steps(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        try:
            return self._engine.runner.run(inputs, self._round, self._repeat_step)
        except NodeStepError as error:
            self._fail(self._spans, _refused(error))
            self._finish_with_zeros(error.position)
            return {t.name: np.zeros((self._samples, *t.shape), t.dtype) for t in self._plan.outputs}

    def _repeat_step(self, step: NodeStep, tensors: Tensors, error: NodeStepError) -> dict[str, NDArray[Any]]:
        """Run a step that failed once more for every request by itself; those that fail again go on as zeros.

        Raises:
            NodeStepError: it fails for all of them.
        """
        feeds = {name: tensors[name] for name in step.inputs}
        if len(self._spans) == 1 or any(x.shape[:1] != (self._samples,) for x in feeds.values()):
            raise error
        made: dict[int, dict[str, NDArray[Any]]] = {}
        for request, span in self._spans.items():
            own = {name: x[span] for name, x in feeds.items()}
            try:
                made[request] = self._engine.runner.run_step(error.position, step, own)
            except NodeStepError as again:
                self._fail([request], _refused(again))
        lengths = {request: span.stop - span.start for request, span in self._spans.items()}
        if not made or any(y.shape[:1] != (lengths[r],) for r, own in made.items() for y in own.values()):
            raise error  # nobody's alone, or what it makes is not by sample
        likes = next(iter(made.values())).items()
        outputs = {name: np.zeros((self._samples, *like.shape[1:]), like.dtype) for name, like in likes}
        for request, own in made.items():
            for name, values in own.items():
                outputs[name][self._spans[request]] = values
        return outputs

    def _fail(self, requests: Iterable[int], reason: str) -> None:
        for request in requests:
            self.failures.setdefault(request, DataError(reason))

    def _requests_of(self, bad: NDArray[np.bool_]) -> list[int]:
        return [request for request, span in self._spans.items() if bad[span].any()]

    def _finish_with_zeros(self, position: int) -> None:
        """Run the rounds after a step on zeros, so that the server sees what it always sees."""
        for step in self._plan.steps[position + 1 :]:
            if isinstance(step, NodeStep):
                continue
            blocks = (
                [self._plan.deep[step.block]]
                if isinstance(step, DeepStep)
                else map(self._plan.blocks.__getitem__, step.blocks)
            )
            specs = [t for block in blocks for t in block.inputs]
            self._round(step, {t.name: np.zeros((self._samples, *t.shape), np.float32) for t in specs})

    def _round(self, step: RoundStep | DeepStep, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Send the blocks of a round, each by a delivery of its own, and receive them, a few at a time.

        A plan with deep blocks has larger groups, which other blocks take in parts of N samples.
        """
        if isinstance(step, DeepStep):
            with self._span.child(SpanName.ROUND, mode="deep", samples=self._samples) as span:
                return self._deep_round(step.block, tensors, span)
        with (
            self._engine.answer_room(step.blocks, self._mode, self._samples),
            self._span.child(SpanName.ROUND, mode=NAMES[self._mode], samples=self._samples) as span,
        ):
            degree = self._plan.ring.degree
            if self._mode is Mode.PREPARED or self._samples <= degree:
                return self._exchange(step, tensors, span)
            names = {t.name for b in step.blocks for t in self._plan.blocks[b].inputs}
            parts = []
            for first in range(0, self._samples, degree):
                part = {name: tensors[name][first : first + degree] for name in names}
                parts.append(self._exchange(step, part, span))
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _deep_round(self, index: int, tensors: Tensors, span: Span) -> dict[str, NDArray[Any]]:
        """Send a deep block and receive it."""
        engine, block = self._engine, self._plan.deep[index]
        number = len(self._plan.blocks) + index
        assert engine.deep is not None  # the constructor has looked
        waits_since = time.perf_counter()
        with ExitStack() as held:
            held.enter_context(engine.deep_turn(self._last_moment))
            self._away_s += time.perf_counter() - waits_since
            delivery = engine.start_delivery(self._last_moment, self._watch, span.child(SpanName.BLOCK, block=number))
            held.callback(delivery.close)
            upload = DeepUpload(engine.bundle, index, delivery, engine.deep, self._statistics, engine.limits)
            held.callback(upload.wipe)
            values = [self._finite(tensors[t.name], t.name)[0] for t in block.inputs]
            upload.send(values)
            result = upload.receive(self._traced)
        self._away_s += upload.waited_s
        self._record(number, "input", values)
        self._record(number, "output", result.outputs)
        self._record(number, "bound", result.bounds)
        return {t.name: y for t, y in zip(block.outputs, result.outputs, strict=True)}

    def _exchange(self, step: RoundStep, tensors: Tensors, span: Span) -> dict[str, NDArray[Any]]:
        made: dict[str, NDArray[Any]] = {}
        pending: deque[tuple[int, Delivery, AnyUpload]] = deque()
        try:
            for index in step.blocks:
                if len(pending) == UPLOADS_IN_FLIGHT:
                    made.update(self._receive(pending))
                self._send(index, tensors, pending, span)
            while pending:
                made.update(self._receive(pending))
        finally:
            for _, delivery, upload in pending:  # none where all went well
                delivery.close()
                upload.wipe()
        return made

    def _send(self, index: int, tensors: Tensors, pending: deque[tuple[int, Delivery, AnyUpload]], span: Span) -> None:
        engine = self._engine
        delivery = engine.start_delivery(self._last_moment, self._watch, span.child(SpanName.BLOCK, block=index))
        upload = engine.start_upload(index, delivery, self._mode, self._taken, self._statistics)
        pending.append((index, delivery, upload))
        checked = [self._finite(tensors[t.name], t.name) for t in self._plan.blocks[index].inputs]
        values = [x for x, _ in checked]
        upload.send(values, [peak for _, peak in checked])
        self._record(index, "input", values)

    def _receive(self, pending: deque[tuple[int, Delivery, AnyUpload]]) -> dict[str, NDArray[Any]]:
        index, _, upload = pending[0]
        result = upload.receive(self._traced)
        pending.popleft()
        self._away_s += upload.waited_s
        self._record(index, "output", result.outputs)
        self._record(index, "bound", result.bounds)
        specs = self._plan.blocks[index].outputs
        return {t.name: y for t, y in zip(specs, result.outputs, strict=True)}

    def _finite(self, values: NDArray[Any], name: str) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return the values, zeros for every sample that holds something not finite, and max |x| of each sample."""
        peaks = sample_peaks(values)
        bad = ~np.isfinite(peaks)
        if not bad.any():
            return values, peaks
        for request in self._requests_of(bad):
            first = int(np.argmax(bad[self._spans[request]]))
            self._fail([request], f"tensor {name!r} holds NaN or infinity for sample {first} of its group")
        clean = values.copy()
        clean[bad] = 0
        return clean, np.where(bad, 0.0, peaks)

    def _record(self, block: int, kind: str, arrays: list[NDArray[Any]]) -> None:
        if self._traced:
            for position, array in enumerate(arrays):
                name = f"trace/{block}/{kind}/{position}"
                self.trace[name] = array[: self._traced].astype(np.float32)


def _refused(error: NodeStepError) -> str:
    return f"the model's own operators failed on these data: {error}"
