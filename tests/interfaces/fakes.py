"""A node's models without cryptography, for tests of its interfaces: they answer at once, slowly, with errors, or wait.

models = fake_models()                       # "digits" (1, 28, 28) -> (10,), "mixed" of several types, "simple"
models["digits"].hold()                      # queries wait until release()
models["digits"].failure = DataError("...")  # the next ones fail
np.allclose(result, expected(x))             # what it answers
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import HeinferError
from heinfer.plan import Digests, ModelInfo, NodeStep, Plan, RingInfo, TensorSpec
from heinfer.ring import RingParameters
from trusted_node.engine import QueryResult, check_inputs
from trusted_node.serving.interface import (
    VERSION,
    Channel,
    DeadlineError,
    FinishedQuery,
    ModelEntry,
    ModelNotReadyError,
    ModelState,
    ModelStatus,
    Outcome,
    Query,
    QueueFullError,
    ServerStatus,
    UnknownModelError,
)
from trusted_node.statistics import QueryStatistics

Tensors = Mapping[str, NDArray[Any]]
Answer = Callable[[Tensors], dict[str, NDArray[Any]]]
DIGIT = (1, 28, 28)
CLASSES = 10
_WEIGHTS = np.random.default_rng(7).normal(size=(CLASSES, 28 * 28)).astype(np.float32)


def fake_plan(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Plan:
    """A plan of one node step and no blocks."""
    ring = RingParameters.default()
    step = NodeStep(
        model="step.onnx",
        inputs=tuple(t.name for t in inputs),
        outputs=tuple(t.name for t in outputs),
        operators=("everything (Fake)",),
    )
    digest = "0" * 64
    return Plan(
        model=ModelInfo(name, digest),
        ring=RingInfo(ring.degree, ring.modulus),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        steps=(step,),
        blocks=(),
        digests=Digests(digest, digest),
    )


def digit_answer(inputs: Tensors) -> dict[str, NDArray[Any]]:
    """A linear map of the image."""
    x = inputs["x"]
    return {"y": x.reshape(len(x), -1) @ _WEIGHTS.T}


def mixed_answer(inputs: Tensors) -> dict[str, NDArray[Any]]:
    """Every input, shifted in its own type: outputs are named after inputs, with an o in front."""
    return {f"o{name}": ~x if x.dtype == bool else x + x.dtype.type(1) for name, x in inputs.items()}


class FakeModel:
    """A `ServedModel` that computes in the clear.

    Attributes:
        delay_s: seconds that an answer takes; 0: it is there when `submit` returns.
        failure: what queries fail with.
        refusal: what `submit` raises.
        capacity: queries that may wait, more are refused.
        submitted: the queries that were taken, in order.
        turned_away: channel and id of those that were refused before they were read.
        state: what the repository says of it.
    """

    def __init__(self, plan: Plan, answer: Answer, delay_s: float = 0.0, card: Mapping[str, Any] | None = None) -> None:
        self.name = plan.model.name
        self.plan = plan
        self.plan_hash = b"p" * 32
        self.card = card
        self.max_samples = 64
        self.delay_s = delay_s
        self.failure: BaseException | None = None
        self.refusal: HeinferError | None = None
        self.capacity = 1000
        self.submitted: list[Query] = []
        self.turned_away: list[tuple[Channel, str]] = []
        self.state = ModelState.READY
        self.latencies_ms: tuple[float, ...] = (5.0, 6.0, 5.5)
        self._answer = answer
        self._lock = threading.Lock()
        self._held: list[tuple[Query, Future[QueryResult]]] | None = None
        self._pending = 0

    def submit(self, query: Query) -> Future[QueryResult]:
        check_inputs(self.plan, query.inputs)
        if self.refusal is not None:
            raise self.refusal
        future: Future[QueryResult] = Future()
        with self._lock:
            if self._pending >= self.capacity:
                raise QueueFullError(f"{self._pending} queries wait already; ask again later")
            self._pending += 1
            self.submitted.append(query)
            future.add_done_callback(self._ended)
            if self._held is not None:
                self._held.append((query, future))
                return future
        wait = min(self.delay_s, query.deadline - time.monotonic())
        if wait <= 0:
            self._finish(query, future)
        else:
            timer = threading.Timer(wait, self._finish, (query, future))
            timer.daemon = True
            timer.start()
        return future

    def check_queue(self, channel: Channel, request_id: str) -> None:
        if self._pending >= self.capacity:
            self.turned_away.append((channel, request_id))
            raise QueueFullError(f"{self._pending} queries wait already; ask again later")

    def hold(self) -> None:
        """Let queries wait from now on."""
        with self._lock:
            self._held = []

    def release(self) -> None:
        """Answer those that wait, and the next ones as ever."""
        with self._lock:
            held, self._held = self._held or [], None
        for query, future in held:
            self._finish(query, future)

    @property
    def pending(self) -> int:
        """Queries that are not answered, nor cancelled."""
        return self._pending

    def status(self) -> ModelStatus:
        server = ServerStatus("127.0.0.1:7700", resting=False, in_quarantine=False, failures=0, forgeries=0)
        return ModelStatus(self._pending, self._pending, 0, 12, 16, self.latencies_ms, (server,), 29.5)

    def _ended(self, _: Future[QueryResult]) -> None:
        self._pending -= 1

    def _finish(self, query: Query, future: Future[QueryResult]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self.failure is not None:
            future.set_exception(self.failure)
        elif time.monotonic() > query.deadline:
            future.set_exception(DeadlineError("the time of the query was over before its result was there"))
        else:
            if query.watch is not None:
                query.watch(0, bytes(range(256)) * 16)
            outputs = self._answer(query.inputs)
            statistics = QueryStatistics.empty(0, 0)
            statistics.add_group(1e-3)
            future.set_result(QueryResult(outputs, statistics, {}))


class FakeModels:
    """`Models` in memory: `load` and `unload` change a model's state; `load_failure` makes loading fail."""

    def __init__(self, *models: FakeModel) -> None:
        self._models = {model.name: model for model in models}
        self.load_failure: HeinferError | None = None

    def __getitem__(self, name: str) -> FakeModel:
        return self._models[name]

    def get(self, name: str, version: str = "") -> FakeModel:
        if name not in self._models or version not in ("", VERSION):
            raise UnknownModelError(f"there is no model {name!r} of version {version or VERSION!r} on this node")
        model = self._models[name]
        if model.state is not ModelState.READY:
            raise ModelNotReadyError(f"model {name!r} is not loaded ({model.state.value})")
        return model

    def entries(self) -> list[ModelEntry]:
        return [
            ModelEntry(name, VERSION, model.state, "" if model.state is ModelState.READY else "unloaded")
            for name, model in sorted(self._models.items())
        ]

    def load(self, name: str) -> None:
        if name not in self._models:
            raise UnknownModelError(f"this node has no folder of a model {name!r}")
        if self.load_failure is not None:
            raise self.load_failure
        self._models[name].state = ModelState.READY

    def unload(self, name: str) -> None:
        if name not in self._models:
            raise UnknownModelError(f"this node has no folder of a model {name!r}")
        self._models[name].state = ModelState.UNAVAILABLE

    @property
    def ready(self) -> bool:
        return all(model.state is ModelState.READY for model in self._models.values())


class Notes:
    """An `Observer` that keeps what it is told."""

    def __init__(self) -> None:
        self.queries: list[FinishedQuery] = []

    def finished(self, query: FinishedQuery) -> None:
        self.queries.append(query)

    @property
    def outcomes(self) -> list[Outcome]:
        return [query.outcome for query in self.queries]


def digits_model(name: str = "digits", delay_s: float = 0.0) -> FakeModel:
    """x, float32 (1, 28, 28) -> y, float32 (10,)."""
    return FakeModel(fake_plan(name, [TensorSpec("x", DIGIT)], [TensorSpec("y", (CLASSES,))]), digit_answer, delay_s)


#: Name of an input of the model "mixed", and its element type.
MIXED = {
    "b": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16",
    "u32": "uint32", "u64": "uint64", "f16": "float16", "f32": "float32", "f64": "float64",
}  # fmt: skip


def mixed_model(name: str = "mixed") -> FakeModel:
    """An input (2, 3) of every element type -> the same plus one."""
    inputs = [TensorSpec(n, (2, 3), dtype) for n, dtype in MIXED.items()]
    outputs = [TensorSpec(f"o{t.name}", t.shape, t.dtype) for t in inputs]
    return FakeModel(fake_plan(name, inputs, outputs), mixed_answer)


def simple_model() -> FakeModel:
    """The model that Triton's examples ask for: INPUT0 and INPUT1, int32 (16) -> their sum and difference."""
    inputs = [TensorSpec(name, (16,), "int32") for name in ("INPUT0", "INPUT1")]
    outputs = [TensorSpec(name, (16,), "int32") for name in ("OUTPUT0", "OUTPUT1")]
    return FakeModel(
        fake_plan("simple", inputs, outputs),
        lambda x: {"OUTPUT0": x["INPUT0"] + x["INPUT1"], "OUTPUT1": x["INPUT0"] - x["INPUT1"]},
    )


def fake_models() -> FakeModels:
    """The models "digits", "mixed" and "simple", loaded."""
    return FakeModels(digits_model(), mixed_model(), simple_model())


def expected(x: NDArray[np.float32]) -> NDArray[Any]:
    """What the model "digits" answers."""
    return digit_answer({"x": x})["y"]
