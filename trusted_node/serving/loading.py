"""A model from its folder: everything that answers its queries, made in order and taken down in reverse.

    folder --> bundle --> links to the servers, one of which must agree --> engine, and a pool that fills --> scheduler

Models of one node share what costs memory or processes: the budgets for uploads and answers, and the processes that
encrypt in standard mode.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from heinfer.cards import read_card
from heinfer.errors import InputError, PlanError, RemoteProtocolError
from heinfer.operators.copies import Copies
from heinfer.plan import NodeBundle, load_node
from heinfer.plan.files import PLAN_FILE, read_plan
from heinfer.plan.hints import LIFETIME_S
from heinfer.plan.signing import TrustedKeys
from heinfer.ring import RingParameters
from heinfer.spans import NO_TRACER, Tracer
from heinfer.wire import Address, FailureCode, Limits, MemoryBudget, RefusedError, block_shapes
from heinfer.wire.security import PlainText, Security
from trusted_node.deep_workers import DeepPool
from trusted_node.engine import Engine, QueryResult, default_share
from trusted_node.link import ServerLink
from trusted_node.modes import ModeChoice, choose_mode
from trusted_node.pool import PreparedPool
from trusted_node.preparation import Preparer
from trusted_node.replicas import Replicas
from trusted_node.serving.interface import Channel, ModelNotReadyError, ModelStatus, Observer, Query, ServerStatus
from trusted_node.serving.scheduling import MAX_SAMPLES, QueueLimits, Scheduler
from trusted_node.workers import CryptoPool

if TYPE_CHECKING:
    from heinfer.operators.torch_device import TorchDevice

logger = logging.getLogger(__name__)
#: Seconds that a node waits for its servers to come up.
SERVER_WAIT_S: Final = 20.0
#: Seconds that a pool is filled at most before a model answers.
POOL_WAIT_S: Final = 10.0
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a node's models are run.

    Attributes:
        servers: where untrusted servers listen, each of which serves all models.
        limits: sizes and times towards them.
        towards_server: TLS with them, or where plain text is allowed.
        mode: which mode queries run in.
        workers: processes that encrypt in standard mode; None: the cores.
        prepared: queries that each model keeps prepared; None: 16, or what 2 GiB hold.
        checked: whether answers are checked.
        memory: bytes for uploads that may have to be sent again, and as many for answers, of all models together;
            None: a sixth of the machine's.
        trusted: keys, one of which must have signed each folder; None: no signature is asked for.
        calibrated: whether outputs of deep blocks are calibrated.
        device: where queries are prepared; None: natively.
        copies: keeps transformed hints, of all models.
        queue: what may wait for each model.
        tracer: is told of spans.
    """

    servers: Sequence[Address]
    limits: Limits = field(default_factory=Limits)
    towards_server: Security = PlainText.ON_LOOPBACK
    mode: ModeChoice = ModeChoice.AUTO
    workers: int | None = None
    prepared: int | None = None
    checked: bool = True
    memory: int | None = None
    trusted: TrustedKeys | None = None
    calibrated: bool = True
    device: TorchDevice | None = None
    copies: Copies = field(default_factory=Copies)
    queue: QueueLimits = field(default_factory=QueueLimits)
    tracer: Tracer = NO_TRACER


class Commons:
    """What all models of a node share; made once, closed last."""

    def __init__(self, settings: ModelSettings) -> None:
        size = settings.memory or default_share()
        self.kept = MemoryBudget(size)
        self.answers = MemoryBudget(size, wait_s=settings.limits.query_s)
        self._workers = settings.workers
        self._pools: dict[RingParameters, CryptoPool] = {}
        self.deep = DeepPool(settings.workers)
        self._lock = threading.Lock()

    def pool(self, parameters: RingParameters) -> CryptoPool:
        """Return the processes for a ring; they start when they are first needed."""
        with self._lock:
            if parameters not in self._pools:
                self._pools[parameters] = CryptoPool(parameters, self._workers)
            return self._pools[parameters]

    def close(self) -> None:
        """Stop the processes."""
        self.deep.close()
        for pool in self._pools.values():
            pool.close()


@dataclass(frozen=True, slots=True)
class Teller:
    """Who is told what the operator should know while a model is loaded.

    Attributes:
        say: takes a line.
        progress: takes a phase, what is done, and what there is to do.
    """

    say: Callable[[str], None] = logger.warning
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None


class LoadedModel:
    """A model that answers; see `trusted_node.serving.interface.ServedModel`.

    Args:
        name: as clients call it.
        folder: the node's part of its bundle.
        settings: how it is run.
        commons: what it shares with other models.
        observer: is told of queries that end.
        teller: is told how loading goes.

    Raises:
        PlanError: the folder is incomplete, edited, or not signed by anybody trusted.
        RemoteProtocolError: no server answers, or one refuses us.
        TransportError: this is no way to connect to a server.
        InputError: prepared mode is asked for, and the plan has none.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: ModelSettings,
        commons: Commons,
        observer: Observer | None = None,
        teller: Teller | None = None,
    ) -> None:
        teller = teller or Teller()
        bundle = load_node(folder, settings.trusted)
        bundle = bundle if settings.calibrated else bundle.uncalibrated()
        self.name = name
        self.plan, self.plan_hash = bundle.plan, bundle.plan_hash
        self.max_samples = MAX_SAMPLES
        self.card = find_card(folder, bundle.plan_hash, teller)
        self._hints_end = None if bundle.hints is None else bundle.hints.created + LIFETIME_S
        self._successor: LoadedModel | None = None
        choose_mode(bundle.plan, settings.mode, 1)
        with ExitStack() as stack:
            self._replicas = _connect(bundle, settings)
            stack.callback(self._replicas.close)
            await_servers(self._replicas, teller.say)
            self._pool = _start_pool(bundle, settings, teller)
            if self._pool is not None:
                stack.callback(_close_pool, self._pool)
            crypto = commons.pool(bundle.plan.ring.parameters)
            if self._pool is None and bundle.plan.blocks:
                crypto.start()
            shared = commons.kept, commons.answers, commons.deep
            self._engine = Engine(
                bundle, self._replicas, crypto, settings.limits, self._pool, settings.mode, settings.checked, *shared
            )
            stack.callback(self._engine.close)
            if self._pool is not None:
                if not bundle.plan.deep:  # which would take minutes
                    self._engine.warm_up()
                _fill(self._pool, teller)
            self._scheduler = Scheduler(self._engine, name, settings.queue, observer, settings.tracer)
            stack.pop_all()

    @property
    def in_quarantine(self) -> bool:
        """Whether all its servers gave dishonest answers too often."""
        return self._replicas.in_quarantine

    def submit(self, query: Query) -> Future[QueryResult]:
        """Queue a query; where the model was replaced in the meantime, its successor's is the queue."""
        if self._successor is not None:
            return self._successor.submit(query)
        try:
            return self._scheduler.submit(query)
        except ModelNotReadyError:  # unless it was replaced at this very moment
            if self._successor is None:
                raise
            return self._successor.submit(query)

    def check_queue(self, channel: Channel, request_id: str) -> None:
        """Refuse a query before it is read, where its queue is full; see `submit`."""
        if self._successor is not None:
            self._successor.check_queue(channel, request_id)
            return
        try:
            self._scheduler.check_queue(channel, request_id)
        except ModelNotReadyError:
            if self._successor is None:
                raise
            self._successor.check_queue(channel, request_id)

    def status(self) -> ModelStatus:
        """Return what it is doing."""
        load, pool = self._scheduler.load(), self._pool
        return ModelStatus(
            queued_queries=load.queued_queries,
            queued_samples=load.queued_samples,
            running_queries=load.running_queries,
            pool_ready=0 if pool is None else pool.ready,
            pool_size=0 if pool is None else pool.size,
            latencies_ms=load.latencies_ms,
            servers=tuple(self._server_status(link) for link in self._replicas.links),
            hints_days_left=None if self._hints_end is None else (self._hints_end - time.time()) / _DAY_S,
        )

    def replace_by(self, successor: LoadedModel) -> None:
        """Send who still comes here to another one."""
        self._successor = successor

    def hurry(self, grace_s: float) -> None:
        """Let a `stop` that goes on without an end come to one within a grace."""
        self._scheduler.close(grace_s)
        self._replicas.close()

    def stop(self, grace_s: float | None = None) -> None:
        """Take no more queries, let what waits and runs end, and wipe what was prepared.

        Args:
            grace_s: seconds that it may take; then what still waits for a server fails at once. None: no end.
        """
        self._scheduler.close(grace_s)
        self._replicas.close()
        self._scheduler.close()
        self._engine.close()
        if self._pool is not None:
            _close_pool(self._pool)

    def _server_status(self, link: ServerLink) -> ServerStatus:
        conduct, replicas = link.conduct, self._replicas
        return ServerStatus(
            name=conduct.name,
            resting=replicas.is_resting(link),
            in_quarantine=conduct.in_quarantine,
            failures=replicas.failures(link),
            forgeries=conduct.failures,
            repetitions=replicas.repetitions(link),
        )


def find_card(folder: Path, plan_hash: bytes, teller: Teller) -> Mapping[str, Any] | None:
    """Return the card in a node's folder, or beside it where that is still part of its bundle; None without one."""
    try:
        if (card := read_card(folder)) is not None:
            return card
        beside = folder.resolve().parent
        if (beside / PLAN_FILE).is_file() and read_plan(beside)[1] == plan_hash:
            return read_card(beside)
    except (InputError, PlanError) as error:
        teller.say(f"the model's card is left out: {error}")
    return None


def _connect(bundle: NodeBundle, settings: ModelSettings) -> Replicas:
    shapes, limits = block_shapes(bundle.plan), settings.limits
    return Replicas(
        [ServerLink(a, bundle.plan_hash, shapes, limits, settings.towards_server) for a in settings.servers]
    )


def _start_pool(bundle: NodeBundle, settings: ModelSettings, teller: Teller) -> PreparedPool | None:
    if bundle.hints is None or settings.mode is ModeChoice.STANDARD:
        return None
    if bundle.hints.expired:
        teller.say("seed and hints are older than 30 days: renew them with `heinfer partition --rotate`")
    preparer = Preparer(bundle, settings.device, settings.copies)
    try:
        return PreparedPool(preparer, settings.prepared)
    except BaseException:
        preparer.close()
        raise


def _close_pool(pool: PreparedPool) -> None:
    """Wipe what was prepared, and drop the copies that it was made with: other models share their budget."""
    pool.close()
    pool.preparer.close()


def _fill(pool: PreparedPool, teller: Teller) -> None:
    """Wait until the pool is full, or for `POOL_WAIT_S`: a model answers without as well."""
    deadline = time.monotonic() + POOL_WAIT_S
    while not pool.wait_full(0.1) and time.monotonic() < deadline:
        teller.progress("preparing", pool.ready, pool.size)


def await_servers(replicas: Replicas, say: Callable[[str], None]) -> None:
    """Wait until a server is there and agrees on the plan; what is wrong with the others is told.

    Raises:
        RemoteProtocolError: none came, or one refuses us.
    """
    deadline = time.monotonic() + SERVER_WAIT_S
    told: set[str] = set()
    while True:
        found = False
        for link in replicas.links:
            name = link.conduct.name
            try:
                with link.session():
                    found = True
            except RemoteProtocolError as error:
                if isinstance(error, RefusedError) and error.code not in (FailureCode.BUSY, FailureCode.STOPPING):
                    raise
                if time.monotonic() > deadline:
                    raise RemoteProtocolError(
                        f"no server answers at {name} within {SERVER_WAIT_S:g} s: {error}"
                    ) from error
                if name not in told:
                    say(f"waiting for the server at {name}: {error}")
                    told.add(name)
        if found:
            return
        time.sleep(0.2)
