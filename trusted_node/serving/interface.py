"""What the node's interfaces, its models and those who watch them say to each other.

    frames (trusted_node.service), HTTP (http_app), gRPC (grpc_service), the page
        --Query--> ServedModel.submit --> a bounded queue; what waits together runs as one query --> Engine
        <-- Future[QueryResult]
                        |
                        +--FinishedQuery, refusals--> Observer (metrics, traces)

Who asks is in the node's domain of trust and is told why a query fails. Whoever watches learns times, sizes and counts,
and nothing that the data say: no value, extremum, scale or bound (`QueryStatistics` has two of these).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from heinfer.errors import HeinferError, InputError
from heinfer.plan import Plan
from trusted_node.engine import QueryResult
from trusted_node.statistics import QueryStatistics

#: The only version that a model has: a bundle is replaced by loading another one.
VERSION = "1"
#: Called with (block, packed rows) of an upload as it goes to the server: what the server sees anyway.
UploadWatcher: TypeAlias = Callable[[int, bytes], None]


class UnknownModelError(InputError):
    """There is no model of this name, or not in this version."""


class ModelNotReadyError(HeinferError):
    """The model is known and not loaded, or is being loaded or unloaded."""


class QueueFullError(HeinferError):
    """So many requests wait already that this one is refused; nothing was sent. Ask again later."""


class DeadlineError(HeinferError):
    """The request's time was over before its result was there."""


class ModelState(enum.Enum):
    """What a model is up to; values as the Open Inference Protocol's repository index has them."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Channel(enum.Enum):
    """How a query came."""

    FRAMES = "frames"
    HTTP = "http"
    GRPC = "grpc"
    PAGE = "page"


class Outcome(enum.Enum):
    """How a query ended; also the label of metrics, so the set is closed."""

    OK = "ok"
    INPUT = "input"  # it does not fit the model
    DATA = "data"  # the data made a value that is not finite
    SERVER = "server"  # the server failed, or is not there
    INTEGRITY = "integrity"  # the server's answer was not honest
    BUSY = "busy"  # the queue was full, or the server busy
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Query:
    """A query on its way to a model.

    Attributes:
        inputs: one array a model input, shape (samples, *shape).
        channel: how it came.
        request_id: for logs and traces; random or the client's, printable, never made from data.
        deadline: moment (`time.monotonic`) after which nobody waits for the result any more.
        trace_samples: leading samples whose values inside the model are returned too; such a query runs alone.
        watch: told what goes to the server; such a query runs alone.
        alone: run by itself, so that what its statistics say of costs and bounds is its own.
        traceparent: names the client's span, as W3C Trace Context has it (HTTP header, gRPC metadata, or the field of
            QueryHeader), unchecked; "": none. `trusted_node.serving.tracing` reads it.
    """

    inputs: Mapping[str, NDArray[Any]]
    channel: Channel
    request_id: str
    deadline: float = math.inf
    trace_samples: int = 0
    watch: UploadWatcher | None = None
    alone: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class FinishedQuery:
    """What may be told of a query that has ended.

    Attributes:
        model: name.
        channel: how it came.
        request_id: its id.
        samples: of the query alone.
        joined: samples of all queries that ran as one with it; 0 where it never ran.
        queued_s: seconds in the queue.
        seconds: from `submit` to the result.
        outcome: how it ended.
        statistics: of the run, which queries that ran together share; None where it never ran or failed. Its bounds
            and rounding steps depend on data and are not to be read.
    """

    model: str
    channel: Channel
    request_id: str
    samples: int
    joined: int
    queued_s: float
    seconds: float
    outcome: Outcome
    statistics: QueryStatistics | None


class Observer(Protocol):
    """Is told of every query that ends; called from several threads, must be quick, and raises nothing."""

    def finished(self, query: FinishedQuery) -> None:
        """Take note of a query that has ended, refused ones too."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One untrusted server of a model.

    Attributes:
        name: its address.
        resting: whether it failed of late and is left alone for now.
        in_quarantine: whether it gave dishonest answers too often and is not asked any more.
        failures: recent failures in a row.
        forgeries: answers that were not honest, since the model was loaded.
        repetitions: uploads that were sent again after it failed, since the model was loaded.
    """

    name: str
    resting: bool
    in_quarantine: bool
    failures: int
    forgeries: int
    repetitions: int = 0


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What a loaded model is doing.

    Attributes:
        queued_queries: that wait.
        queued_samples: that wait.
        running_queries: under way.
        pool_ready: prepared samples; 0 in standard mode.
        pool_size: samples that are kept prepared when it is idle.
        latencies_ms: of the last queries, oldest first, at most 256.
        servers: the untrusted servers that it may ask.
        hints_days_left: until seed and hints are to be renewed, negative afterwards; None without prepared mode.
    """

    queued_queries: int
    queued_samples: int
    running_queries: int
    pool_ready: int
    pool_size: int
    latencies_ms: tuple[float, ...]
    servers: tuple[ServerStatus, ...]
    hints_days_left: float | None


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of the repository's index: a model that is or could be loaded."""

    name: str
    version: str
    state: ModelState
    reason: str = ""


class ServedModel(Protocol):
    """A loaded model; safe to use from several threads.

    Attributes:
        name: as clients call it.
        plan: its plan.
        plan_hash: 32 bytes.
        card: what its makers say of it (`heinfer.cards`), None where there is none.
        max_samples: of one query.
    """

    name: str
    plan: Plan
    plan_hash: bytes
    card: Mapping[str, Any] | None
    max_samples: int

    def submit(self, query: Query) -> Future[QueryResult]:
        """Queue a query.

        `Future.cancel` drops one that still waits at once; what has started runs to its end unheard, since the server
        must not learn that anybody gave up. The future raises what `Engine.infer` raises, or DeadlineError.

        Raises:
            InputError: it does not fit the model; nothing was queued.
            QueueFullError: too much waits already.
            ModelNotReadyError: the model is being unloaded.
        """

    def check_queue(self, channel: Channel, request_id: str) -> None:
        """Refuse a query before it is read, where `submit` would whatever it holds; observers are told.

        Raises:
            QueueFullError: too much waits already.
            ModelNotReadyError: the model is being unloaded.
        """

    def status(self) -> ModelStatus:
        """Return what it is doing."""


class Models(Protocol):
    """All models of a node; safe to use from several threads."""

    def get(self, name: str, version: str = "") -> ServedModel:
        """Return a loaded model; version "" or `VERSION`.

        Raises:
            UnknownModelError: there is none of that name and version.
            ModelNotReadyError: it is not loaded.
        """

    def entries(self) -> Sequence[ModelEntry]:
        """Return the index, by name."""

    def load(self, name: str) -> None:
        """Load a model from its folder; one that is loaded already is read anew and replaced without a gap.

        Raises:
            UnknownModelError: the node has no folder of that name.
            HeinferError: what is wrong with the folder or its servers; a model that was loaded goes on.
        """

    def unload(self, name: str) -> None:
        """Take no more queries for a model, let what waits and runs end, and wipe what was prepared for it.

        Raises:
            UnknownModelError: the node has no folder of that name.
            ModelNotReadyError: it is being loaded or unloaded.
        """

    @property
    def ready(self) -> bool:
        """Whether every model that was named at the start or loaded since is ready."""
