"""One query from values to results: cut into groups of samples, each group through the plan's steps.

    samples --> groups --> [node step --> upload of every block of a round]* --> results

A group has at most N samples in standard mode, and as many as fit into memory prepared in prepared mode.

While one group waits for the server, others encrypt and decrypt. A failure that the data cause does not show outside:
the group goes on with encrypted zeros to the end and only the client is told (design note, rule 5).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import HeinferError, InputError
from heinfer.plan import NodeBundle, Plan, RoundStep
from heinfer.plan.execution import NodeStepError, PlanRunner, Tensors
from heinfer.plan.forecast import GROUP_BYTES as PREPARED_BYTES
from heinfer.plan.forecast import GROUP_SAMPLES as PREPARED_SAMPLES
from heinfer.plan.forecast import GROUPS_IN_FLIGHT, answer_bytes
from heinfer.processes import core_count
from heinfer.units import size as readable
from heinfer.wire import Limits, MemoryBudget, Mode
from heinfer.wire.budget import DEFAULT_SHARE, machine_memory
from trusted_node.batches import BatchMaterials, BatchUpload
from trusted_node.delivery import Delivery
from trusted_node.integrity import AnswerChecks
from trusted_node.link import ServerLink
from trusted_node.modes import NAMES, ModeChoice, choose_mode
from trusted_node.pool import PreparedPool, Taken
from trusted_node.prepared_uploads import PreparedUpload
from trusted_node.replicas import Replicas
from trusted_node.scaling import sample_peaks
from trusted_node.statistics import QueryStatistics
from trusted_node.uploads import Upload
from trusted_node.workers import CryptoPool

#: Uploads of one group under way at once; each holds a session, of which a server serves a limited number.
UPLOADS_IN_FLIGHT = 4
_WARM_UPS = 3
#: What a node gives to queries, half of the machine's memory where nothing is said, is shared out in three: values and
#: results, uploads that may have to be sent again, and answers, which are held until all of them has been checked.
MEMORY_SHARES = 3
#: Seconds after its making at which a mask may not be used any more: what is in memory for long is there to be stolen,
#: and a server could draw a group's rounds out.
MASK_LIFETIME_S = 1800.0

AnyUpload = Upload | PreparedUpload | BatchUpload


class DataError(InputError):
    """The data made a value that is not finite. The client is told; the server can't tell."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Outputs by name, statistics, and traced tensors by name where they were asked for."""

    outputs: dict[str, NDArray[Any]]
    statistics: QueryStatistics
    trace: dict[str, NDArray[Any]]


def check_inputs(plan: Plan, inputs: Mapping[str, NDArray[Any]]) -> int:
    """Check a query against the plan; return the number of samples.

    Raises:
        InputError: an input is missing, unknown, of another shape or type, or holds NaN or infinity.
    """
    expected = {t.name: t for t in plan.inputs}
    if set(inputs) != set(expected):
        raise InputError(f"expected inputs {sorted(expected)}, found {sorted(inputs)}")
    samples = {len(x) if x.ndim else -1 for x in inputs.values()}
    for name, x in inputs.items():
        shape = ("samples", *expected[name].shape)
        if x.ndim == 0 or x.shape[1:] != expected[name].shape:
            raise InputError(f"input {name!r}: expected shape {shape}, found {x.shape}")
        if x.dtype != expected[name].dtype:
            raise InputError(f"input {name!r}: expected {expected[name].dtype}, found {x.dtype}; convert it")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise InputError(f"input {name!r} holds NaN or infinity; nothing was sent")
    if len(samples) != 1 or samples == {0}:
        raise InputError("expected at least one sample, and as many in every input")
    return samples.pop()


def default_share() -> int:
    """Return the bytes of one of a node's shares of memory where nothing is said."""
    return int(DEFAULT_SHARE * machine_memory()) // MEMORY_SHARES


class Engine:
    """Runs queries; safe to use from several threads.

    Args:
        bundle: the node's folder.
        servers: connections to the servers, or to the only one.
        pool: processes for encryption and decryption in standard mode.
        limits: sizes on the wire.
        prepared: prepared queries; needed where the plan has prepared mode and the choice is not standard.
        choice: which mode queries run in.
        check: whether answers are checked before they are used; without, the server must be trusted to be honest.
        kept_bytes: memory for uploads that may have to be sent again; None: a sixth of the machine's.
        answer_bytes: memory for answers of standard mode and of batches; likewise.

    Raises:
        InputError: prepared mode is asked for, and the plan has none.
    """

    def __init__(
        self,
        bundle: NodeBundle,
        servers: Replicas | ServerLink,
        pool: CryptoPool,
        limits: Limits,
        prepared: PreparedPool | None = None,
        choice: ModeChoice = ModeChoice.AUTO,
        check: bool = True,
        kept_bytes: int | None = None,
        answer_bytes: int | None = None,
    ) -> None:
        self.bundle = bundle
        self.replicas = servers if isinstance(servers, Replicas) else Replicas([servers])
        self.pool = pool
        self.limits = limits
        self.prepared = prepared
        self.choice = choice
        self._kept = MemoryBudget(kept_bytes or default_share())
        # Who has waited for all of a query's time would not get far with the room.
        self._answers = MemoryBudget(answer_bytes or default_share(), wait_s=limits.query_s)
        self._checks = AnswerChecks(bundle) if check else None
        if choose_mode(bundle.plan, choice, 1) is Mode.PREPARED and prepared is None:
            raise InputError("prepared mode needs a pool of prepared queries")
        hints = bundle.hints if choice is not ModeChoice.STANDARD else None
        self._batches = BatchMaterials(bundle) if hints is not None and hints.batch is not None else None
        self.runner = PlanRunner(bundle.plan, bundle.submodels, core_count())
        self._threads = ThreadPoolExecutor(GROUPS_IN_FLIGHT, thread_name_prefix="heinfer-group")

    def warm_up(self) -> None:
        """Run a query of zeros, so that the first real one finds kernels, sub-models and connections ready.

        What zeros do to the model does not matter; a server that is not there is found by the first real query.
        """
        specs = self.bundle.plan.inputs
        with suppress(HeinferError):
            for _ in range(_WARM_UPS):
                self.infer({t.name: np.zeros((1, *t.shape), t.dtype) for t in specs})

    def close(self) -> None:
        """Wait for what runs, then stop."""
        self._threads.shutdown(cancel_futures=True)

    def infer(self, inputs: Mapping[str, NDArray[Any]], trace_samples: int = 0) -> QueryResult:
        """Run a query.

        Args:
            inputs: one array a model input, shape (samples, *shape).
            trace_samples: leading samples whose values around every block are returned too.

        Raises:
            InputError: inputs don't fit, or hold NaN or infinity, or an answer would not fit into memory; nothing was
                sent.
            DataError: a value inside the model is not finite.
            RemoteProtocolError: the server failed.
            IntegrityError: the server computed something else, now or too often before.
        """
        plan = self.bundle.plan
        samples = check_inputs(plan, inputs)
        mode = choose_mode(plan, self.choice, samples, self._batches is not None)
        size = self._group_size(mode)
        self._check_room(mode, min(samples, size))
        statistics = QueryStatistics.empty(len(plan.blocks), plan.rounds)
        statistics.mode = mode.name.lower()
        if mode is Mode.PREPARED and self.prepared is not None:
            statistics.background_s = self.prepared.preparation_s
        groups: list[tuple[_Group, dict[str, NDArray[Any]]]] = []
        for start in range(0, samples, size):
            traced = max(0, min(trace_samples - start, size, samples - start))
            part = {name: x[start : start + size] for name, x in inputs.items()}
            groups.append((_Group(self, statistics, traced, mode), part))
        results = self._run(groups, mode)
        names = [t.name for t in plan.outputs]
        traces = [group.trace for group, _ in groups if group.trace]
        trace = {name: np.concatenate([t[name] for t in traces]) for name in (traces[0] if traces else ())}
        return QueryResult({n: np.concatenate([r[n] for r in results]) for n in names}, statistics, trace)

    def _run(self, groups: list[tuple[_Group, dict[str, NDArray[Any]]]], mode: Mode) -> list[dict[str, NDArray[Any]]]:
        """Run groups, a few at a time; a single prepared one runs in the caller's thread, which is the fastest."""
        if len(groups) == 1 and mode is Mode.PREPARED:
            group, part = groups[0]
            return [group.run(part)]
        futures = [self._threads.submit(group.run, part) for group, part in groups]
        results: list[dict[str, NDArray[Any]]] = []
        failures: list[DataError] = []
        try:
            for future in futures:
                try:
                    results.append(future.result())
                except DataError as error:  # the server must see the other groups all the same
                    failures.append(error)
        finally:
            for future in futures:
                future.cancel()
        if failures:
            raise failures[0]
        return results

    def start_delivery(self, last_moment: float) -> Delivery:
        """Make what carries one upload, whose time is over then (`time.monotonic`)."""
        return Delivery(self.replicas, self.limits, self._kept, last_moment)

    def answer_room(self, blocks: Sequence[int], mode: Mode, samples: int) -> AbstractContextManager[None]:
        """Hold room for the largest answer of a round: a group reads them one after the other, each as a whole.

        It is taken before a request is opened, by who holds no other, so nobody waits for ever. Prepared samples take
        more than their answers and are bounded by themselves.

        Raises:
            RefusedError: there was no room in time.
        """
        needed = self._answer_bytes(blocks, mode, samples)
        return self._answers.room(needed) if needed else nullcontext()

    def start_upload(
        self, block: int, delivery: Delivery, mode: Mode, taken: Taken | None, statistics: QueryStatistics
    ) -> AnyUpload:
        """Make an upload of a block in a mode; `taken` are prepared queries for it."""
        check = self._checks.of(block) if self._checks is not None else None
        if taken is not None:
            return PreparedUpload(self.bundle, block, delivery, taken.queries, statistics, check)
        if mode is Mode.BATCH:
            assert self._batches is not None  # the mode is chosen only where there are hints
            return BatchUpload(self.bundle, block, delivery, self._batches, statistics, self.limits, check)
        return Upload(self.bundle, block, delivery, self.pool, statistics, self.limits, check)

    def _answer_bytes(self, blocks: Iterable[int], mode: Mode, samples: int) -> int:
        if mode is Mode.PREPARED:
            return 0
        plan = self.bundle.plan
        return max(answer_bytes(plan, plan.blocks[block], NAMES[mode], samples) for block in blocks)

    def _check_room(self, mode: Mode, samples: int) -> None:
        """Refuse a query of which an answer would not fit, before anything is sent."""
        needed = self._answer_bytes(range(len(self.bundle.plan.blocks)), mode, samples)
        if needed > self._answers.total:
            raise InputError(
                f"a block's answer in {NAMES[mode]} mode has {readable(needed)}, which are held until all of it has "
                f"been checked, and {readable(self._answers.total)} are there for answers: raise --memory, of which "
                f"they have one part in {MEMORY_SHARES}, or send fewer samples at a time"
            )

    def _group_size(self, mode: Mode) -> int:
        if mode is not Mode.PREPARED or self.prepared is None:
            return self.bundle.plan.ring.degree
        return max(1, min(PREPARED_SAMPLES, PREPARED_BYTES // max(1, self.prepared.preparer.query_bytes)))


class _Group:
    """One group of samples on its way through the plan."""

    def __init__(self, engine: Engine, statistics: QueryStatistics, traced: int, mode: Mode) -> None:
        self._engine = engine
        self._plan = engine.bundle.plan
        self._statistics = statistics
        self._traced = traced
        self._mode = mode
        self._samples = 0
        self._taken: Taken | None = None
        self.trace: dict[str, NDArray[Any]] = {}
        self._failure: DataError | None = None
        self._last_moment = math.inf
        self._away_s = 0.0

    def run(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """Run all steps; raise what the data caused only when the server has seen all rounds."""
        self._last_moment = time.monotonic() + self._engine.limits.query_s
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
                self._fail(f"output {name!r} holds NaN or infinity")
        if self._failure is not None:
            raise self._failure
        return outputs

    def _run_steps(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        try:
            return self._engine.runner.run(inputs, self._round)
        except NodeStepError as error:
            self._fail(f"the model's own operators failed on these data: {error}")
            self._finish_with_zeros(error.position)
            return {}

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or DataError(reason)

    def _finish_with_zeros(self, position: int) -> None:
        """Run the rounds after a step on zeros, so that the server sees what it always sees."""
        for step in self._plan.steps[position + 1 :]:
            if isinstance(step, RoundStep):
                specs = [t for b in step.blocks for t in self._plan.blocks[b].inputs]
                self._round(step, {t.name: np.zeros((self._samples, *t.shape), np.float32) for t in specs})

    def _round(self, step: RoundStep, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Send the blocks of a round, each by a delivery of its own, and receive them, a few at a time."""
        with self._engine.answer_room(step.blocks, self._mode, self._samples):
            return self._exchange(step, tensors)

    def _exchange(self, step: RoundStep, tensors: Tensors) -> dict[str, NDArray[Any]]:
        made: dict[str, NDArray[Any]] = {}
        pending: deque[tuple[int, Delivery, AnyUpload]] = deque()
        try:
            for index in step.blocks:
                if len(pending) == UPLOADS_IN_FLIGHT:
                    made.update(self._receive(pending))
                self._send(index, tensors, pending)
            while pending:
                made.update(self._receive(pending))
        finally:
            for _, delivery, upload in pending:  # none where all went well
                delivery.close()
                upload.wipe()
        return made

    def _send(self, index: int, tensors: Tensors, pending: deque[tuple[int, Delivery, AnyUpload]]) -> None:
        engine = self._engine
        delivery = engine.start_delivery(self._last_moment)
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
        self._fail(f"tensor {name!r} holds NaN or infinity for sample {int(np.argmax(bad))} of its group")
        clean = values.copy()
        clean[bad] = 0
        return clean, np.where(bad, 0.0, peaks)

    def _record(self, block: int, kind: str, arrays: list[NDArray[Any]]) -> None:
        if self._traced:
            for position, array in enumerate(arrays):
                name = f"trace/{block}/{kind}/{position}"
                self.trace[name] = array[: self._traced].astype(np.float32)
