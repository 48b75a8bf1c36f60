"""One query from values to results: cut into groups of samples, each group through the plan's steps.

    samples --> groups --> [node step --> upload of every block of a round]* --> results

A group has at most N samples in standard mode, and as many as fit into memory prepared in prepared mode.

While one group waits for the server, others encrypt and decrypt. A failure that the data cause does not show outside:
the group goes on with encrypted zeros to the end and only the client is told (design note, rule 5).

Requests of several clients may run as one query (`trusted_node.serving.scheduling`). What the data of one make fail
fails it alone:

    requests of 1, 2 and 1 samples, the second makes NaN    its 2 samples go on as zeros, it gets a DataError
    the model's own operators refuse the third's data       they run once more for each request, on this node alone
    the server                                              sees 4 samples through all rounds, as always
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import HeinferError, InputError, RemoteProtocolError
from heinfer.plan import NodeBundle, Plan
from heinfer.plan.execution import PlanRunner
from heinfer.plan.forecast import GROUP_BYTES as PREPARED_BYTES
from heinfer.plan.forecast import GROUP_SAMPLES as PREPARED_SAMPLES
from heinfer.plan.forecast import GROUPS_IN_FLIGHT, answer_bytes
from heinfer.processes import core_count
from heinfer.spans import SILENT, Span
from heinfer.units import size as readable
from heinfer.wire import Limits, MemoryBudget, Mode
from heinfer.wire.budget import DEFAULT_SHARE, machine_memory
from trusted_node.batches import BatchMaterials, BatchUpload
from trusted_node.deep_workers import DeepPool
from trusted_node.delivery import Delivery, Watch
from trusted_node.groups import AnyUpload as AnyUpload
from trusted_node.groups import DataError as DataError
from trusted_node.groups import Group, spans_of
from trusted_node.integrity import AnswerChecks
from trusted_node.link import ServerLink
from trusted_node.modes import NAMES, ModeChoice, choose_mode
from trusted_node.pool import PreparedPool, Taken
from trusted_node.prepared_uploads import PreparedUpload
from trusted_node.replicas import Replicas
from trusted_node.statistics import QueryStatistics
from trusted_node.uploads import Upload
from trusted_node.workers import CryptoPool

_WARM_UPS = 3
#: What a node gives to queries, half of the machine's memory where nothing is said, is shared out in three: values and
#: results, uploads that may have to be sent again, and answers, which are held until all of them has been checked.
MEMORY_SHARES = 3


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Outputs by name, statistics, and traced tensors by name where they were asked for."""

    outputs: dict[str, NDArray[Any]]
    statistics: QueryStatistics
    trace: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class JoinedResult:
    """What several requests that ran as one query come to.

    Attributes:
        results: of every request, in their order, or why it has none. They share their statistics.
        statistics: of the query as a whole.
    """

    results: list[QueryResult | DataError]
    statistics: QueryStatistics


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


def _budget(size: int | MemoryBudget | None, wait_s: float = 0.0) -> MemoryBudget:
    return size if isinstance(size, MemoryBudget) else MemoryBudget(size or default_share(), wait_s)


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
        kept_bytes: memory for uploads that may have to be sent again; None: a sixth of the machine's. Several engines
            may share one budget.
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
        kept_bytes: int | MemoryBudget | None = None,
        answer_bytes: int | MemoryBudget | None = None,
        deep: DeepPool | None = None,
    ) -> None:
        self.bundle = bundle
        self.replicas = servers if isinstance(servers, Replicas) else Replicas([servers])
        self.pool = pool
        self.limits = limits
        self.prepared = prepared
        self.choice = choice
        self.deep = deep
        if bundle.plan.deep and deep is None:
            raise InputError("this plan has deep blocks, which need a pool of processes")
        self._kept = _budget(kept_bytes)
        # Who has waited for all of a query's time would not get far with the room.
        self._answers = _budget(answer_bytes, limits.query_s)
        self._checks = AnswerChecks(bundle) if check else None
        if choose_mode(bundle.plan, choice, 1) is Mode.PREPARED and prepared is None:
            raise InputError("prepared mode needs a pool of prepared queries")
        hints = bundle.hints if choice is not ModeChoice.STANDARD else None
        self._batches = BatchMaterials(bundle) if hints is not None and hints.batch is not None else None
        self.runner = PlanRunner(bundle.plan, bundle.submodels, core_count())
        self._threads = ThreadPoolExecutor(GROUPS_IN_FLIGHT, thread_name_prefix="heinfer-group")
        self._deep_turns = threading.BoundedSemaphore(len(self.replicas.links))

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
        check_inputs(self.bundle.plan, inputs)
        joined = self.infer_joined([inputs], trace_samples)
        result = joined.results[0]
        if isinstance(result, DataError):
            raise result
        return result

    def infer_joined(
        self,
        requests: Sequence[Mapping[str, NDArray[Any]]],
        trace_samples: int = 0,
        watch: Watch | None = None,
        span: Span = SILENT,
    ) -> JoinedResult:
        """Run requests as one query, so that they share uploads; what one's data make fail fails it alone.

        Args:
            requests: one array a model input each, as `check_inputs` lets them pass.
            trace_samples: leading samples whose values around every block are returned too, with the first request.
            watch: told what goes to the server.
            span: of the run, for those of its rounds.

        Raises:
            InputError: an answer would not fit into memory; nothing was sent.
            RemoteProtocolError: as `infer`, and then it is so for all of them.
            IntegrityError: likewise.
        """
        plan = self.bundle.plan
        counts = [len(next(iter(inputs.values()))) for inputs in requests]
        mode = choose_mode(plan, self.choice, sum(counts), self._batches is not None)
        size = self._group_size(mode)
        self._check_room(mode, min(sum(counts), size))
        statistics = QueryStatistics.empty(len(plan.blocks) + len(plan.deep), plan.rounds)
        statistics.mode = mode.name.lower()
        if mode is Mode.PREPARED and self.prepared is not None:
            statistics.background_s = self.prepared.preparation_s
        inputs = requests[0] if len(requests) == 1 else _join(requests)
        groups: list[tuple[Group, dict[str, NDArray[Any]]]] = []
        for start in range(0, sum(counts), size):
            part = {name: x[start : start + size] for name, x in inputs.items()}
            end = min(start + size, sum(counts))
            traced = max(0, min(trace_samples, end) - start)
            groups.append((Group(self, statistics, traced, mode, spans_of(counts, start, end), watch, span), part))
        results = self._run(groups, mode)
        return JoinedResult(self._split(groups, results, counts, statistics), statistics)

    def _split(
        self,
        groups: list[tuple[Group, dict[str, NDArray[Any]]]],
        results: list[dict[str, NDArray[Any]]],
        counts: Sequence[int],
        statistics: QueryStatistics,
    ) -> list[QueryResult | DataError]:
        """Give every request its outputs, copied where there are several, or what its data made fail first."""
        failures: dict[int, DataError] = {}
        for group, _ in groups:
            failures = {**group.failures, **failures}
        if len(failures) == len(counts):
            return [failures[request] for request in range(len(counts))]
        names = [t.name for t in self.bundle.plan.outputs]
        traces = [group.trace for group, _ in groups if group.trace]
        trace = {name: np.concatenate([t[name] for t in traces]) for name in (traces[0] if traces else ())}
        outputs = {n: np.concatenate([r[n] for r in results]) if len(results) > 1 else results[0][n] for n in names}
        if len(counts) == 1:
            return [QueryResult(outputs, statistics, trace)]
        split: list[QueryResult | DataError] = []
        start = 0
        for request, count in enumerate(counts):
            own = {name: y[start : start + count].copy() for name, y in outputs.items()}
            split.append(failures.get(request) or QueryResult(own, statistics, {} if request else trace))
            start += count
        return split

    def _run(self, groups: list[tuple[Group, dict[str, NDArray[Any]]]], mode: Mode) -> list[dict[str, NDArray[Any]]]:
        """Run groups, a few at a time; a single prepared one runs in the caller's thread, which is the fastest.

        What the data make fail is in `Group.failures`: the server must see the other groups all the same. No more wait
        for a thread than could run, so those of a small query are not behind all of a large one.
        """
        if len(groups) == 1 and mode is Mode.PREPARED:
            group, part = groups[0]
            return [group.run(part)]
        futures: list[Future[dict[str, NDArray[Any]]]] = []
        pending: set[Future[dict[str, NDArray[Any]]]] = set()
        try:
            for group, part in groups:
                if len(pending) == GROUPS_IN_FLIGHT:
                    ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in ended:
                        future.result()
                futures.append(self._threads.submit(group.run, part))
                pending.add(futures[-1])
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def most_joined(self, prepared: int) -> int:
        """Return how many samples are worth running as one: one group at most.

        Args:
            prepared: of prepared mode, where every sample costs; in standard mode N samples take as long as one.
        """
        mode = choose_mode(self.bundle.plan, self.choice, 1)
        size = self._group_size(mode)
        if mode is Mode.PREPARED:
            return min(size, prepared)
        while size > 1 and self._answer_bytes(range(len(self.bundle.plan.blocks)), mode, size) > self._answers.total:
            size //= 2
        return size

    def start_delivery(self, last_moment: float, watch: Watch | None = None, span: Span = SILENT) -> Delivery:
        """Make what carries one upload, whose time is over then (`time.monotonic`).

        `watch` is told what it sends, and `span` how much.
        """
        return Delivery(self.replicas, self.limits, self._kept, last_moment, watch, span)

    @contextmanager
    def deep_turn(self, last_moment: float) -> Iterator[None]:
        """Wait until there is a server for one more upload of a deep block, from its keys to its answer.

        A server evaluates one at a time, and may have room for no more: a second one would be encrypted for nothing.

        Raises:
            RemoteProtocolError: there was none until the last moment (`time.monotonic`).
        """
        if not self._deep_turns.acquire(timeout=max(0.0, last_moment - time.monotonic())):
            raise RemoteProtocolError("the time for this query is over: others had the servers for deep blocks")
        try:
            yield
        finally:
            self._deep_turns.release()

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
        together = min(samples, plan.ring.degree)
        return max((answer_bytes(plan, plan.blocks[b], NAMES[mode], together) for b in blocks), default=0)

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
        plan = self.bundle.plan
        if plan.deep:  # one upload of a deep block takes as long for one sample as for all slots
            return plan.deep_slots
        if mode is not Mode.PREPARED or self.prepared is None:
            return plan.ring.degree
        return max(1, min(PREPARED_SAMPLES, PREPARED_BYTES // max(1, self.prepared.preparer.query_bytes)))


def _join(requests: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([inputs[name] for inputs in requests]) for name in requests[0]}
