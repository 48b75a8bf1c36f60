"""The queue in front of an engine: what starts when, what is joined, refused, dropped, and heard no more."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import trusted_node.serving.scheduling as scheduling_module
from heinfer.errors import InputError, IntegrityError, RemoteProtocolError
from heinfer.plan import NodeStep
from heinfer.plan.execution import NodeStepError
from heinfer.plan.forecast import GROUPS_IN_FLIGHT
from heinfer.spans import SILENT
from heinfer.wire import FailureCode, Limits, Mode, RefusedError
from partitioner import partition
from tests.interfaces.fakes import fake_plan
from tests.parties import OnlyModel, WatchedPool, parties
from tests.waiting import wait_for
from trusted_node.engine import DataError, JoinedResult, QueryResult
from trusted_node.groups import Group
from trusted_node.modes import ModeChoice
from trusted_node.serving.interface import (
    Channel,
    DeadlineError,
    FinishedQuery,
    ModelNotReadyError,
    Outcome,
    Query,
    QueueFullError,
)
from trusted_node.serving.scheduling import QueueLimits, Scheduler, outcome_of
from trusted_node.statistics import QueryStatistics

WAIT_S = 10.0
#: A delay that no test waits for.
LONG = 60.0


class SlowEngine:
    """Doubles its input, one run at a time being let through; notes how many samples each run has."""

    def __init__(self, most: int = 8) -> None:
        from heinfer.plan import TensorSpec

        plan = fake_plan("doubles", [TensorSpec("x", (2,), "float32")], [TensorSpec("y", (2,), "float32")])
        self.bundle = SimpleNamespace(plan=plan)
        self.runs: list[list[int]] = []
        self.error: Exception | None = None
        self.bad_value: float | None = None
        self._most = most
        self._started = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)

    def most_joined(self, prepared: int) -> int:
        return min(prepared, self._most)

    def infer_joined(
        self, requests: Sequence[Mapping[str, np.ndarray]], trace_samples: int, watch: Any, span: Any
    ) -> JoinedResult:
        self.runs.append([len(inputs["x"]) for inputs in requests])
        self._started.release()
        assert self._gate.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        statistics = QueryStatistics.empty(0, 0)
        results = [self._result(inputs["x"], statistics) for inputs in requests]
        return JoinedResult(results, statistics)

    def _result(self, x: np.ndarray, statistics: QueryStatistics) -> QueryResult | DataError:
        if self.bad_value is not None and (x == self.bad_value).any():
            return DataError("NaN inside")
        return QueryResult({"y": 2 * x}, statistics, {})

    def await_run(self) -> None:
        assert self._started.acquire(timeout=WAIT_S)

    def let(self, runs: int = 1) -> None:
        for _ in range(runs):
            self._gate.release()


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[FinishedQuery] = []

    def finished(self, query: FinishedQuery) -> None:
        self.told.append(query)

    def outcomes(self) -> list[Outcome]:
        return [query.outcome for query in self.told]


@contextmanager
def scheduling(engine: SlowEngine, observer: Notes | None = None, **limits: Any) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, limits=QueueLimits(**limits), observer=observer)  # type: ignore[arg-type]
    try:
        yield scheduler
    finally:
        engine.let(100)
        scheduler.close(WAIT_S)


def query(value: float = 1.0, samples: int = 1, **options: Any) -> Query:
    return Query({"x": np.full((samples, 2), value, np.float32)}, Channel.HTTP, "an-id", **options)


def value_of(future: Future[QueryResult]) -> float:
    y = future.result(WAIT_S).outputs["y"]
    assert (y == y[0, 0]).all()
    return float(y[0, 0])


def test_query_starts_at_once_where_nothing_runs_however_long_the_delay() -> None:
    engine = SlowEngine()
    with scheduling(engine, max_delay_s=LONG) as scheduler:
        future = scheduler.submit(query(3))
        engine.await_run()
        engine.let()
        assert value_of(future) == 6


def test_queries_that_wait_run_as_one_and_each_gets_its_own_result() -> None:
    engine = SlowEngine()
    with scheduling(engine, runs=1) as scheduler:
        futures = [scheduler.submit(query(0))]
        engine.await_run()
        futures += [scheduler.submit(query(value, samples)) for value, samples in ((1, 1), (2, 3), (3, 2))]
        engine.let(2)
        assert [value_of(future) for future in futures] == [0, 2, 4, 6]
        assert [len(future.result().outputs["y"]) for future in futures] == [1, 1, 3, 2]
    assert engine.runs == [[1], [1, 3, 2]]


def test_query_waits_for_company_no_longer_than_the_delay() -> None:
    engine = SlowEngine()
    with scheduling(engine, max_delay_s=0.05, runs=2) as scheduler:
        scheduler.submit(query())
        engine.await_run()
        before = time.monotonic()
        scheduler.submit(query())
        time.sleep(0.01)
        scheduler.submit(query())
        engine.await_run()
        assert 0.04 < time.monotonic() - before < WAIT_S / 2
    assert engine.runs == [[1], [1, 1]]


def test_full_group_does_not_wait_and_the_rest_does() -> None:
    engine = SlowEngine(most=4)
    with scheduling(engine, max_delay_s=LONG, runs=3) as scheduler:
        scheduler.submit(query())
        engine.await_run()
        for _ in range(3):
            scheduler.submit(query(samples=2))
        engine.await_run()
        time.sleep(0.05)
        assert engine.runs == [[1], [2, 2]]
        assert scheduler.load().queued_queries == 1


def test_no_more_than_so_many_run_at_a_time() -> None:
    engine = SlowEngine()
    with scheduling(engine, max_delay_s=0.0, runs=2) as scheduler:
        for _ in range(2):
            scheduler.submit(query())
            engine.await_run()
        scheduler.submit(query())
        time.sleep(0.05)
        assert len(engine.runs) == 2
        assert scheduler.load().running_queries == 2
        engine.let()
        engine.await_run()


@pytest.mark.parametrize("options", [{"trace_samples": 1}, {"watch": lambda block, rows: None}, {"alone": True}])
def test_query_that_must_be_alone_is(options: dict[str, Any]) -> None:
    engine = SlowEngine()
    with scheduling(engine, runs=1) as scheduler:
        futures = [scheduler.submit(query())]
        engine.await_run()
        futures += [scheduler.submit(query(1)), scheduler.submit(query(2, **options)), scheduler.submit(query(3))]
        engine.let(3)
        assert [value_of(future) for future in futures] == [2, 2, 4, 6]
    assert engine.runs == [[1], [1, 1], [1]]  # the two others were joined around it


def test_large_and_small_queries_do_not_wait_for_each_other() -> None:
    engine = SlowEngine(most=4)
    with scheduling(engine, max_delay_s=0.0, runs=1, large_runs=1) as scheduler:
        scheduler.submit(query(samples=100))
        engine.await_run()
        scheduler.submit(query(samples=101))
        scheduler.submit(query(samples=1))
        engine.await_run()
        scheduler.submit(query(samples=2))
        time.sleep(0.05)
        assert engine.runs == [[100], [1]]
        assert scheduler.load().queued_samples == 103
        engine.let(4)
        engine.await_run()
        engine.await_run()
        assert sorted(engine.runs[2:]) == [[2], [101]]


def test_query_that_waits_for_company_is_not_forgotten_where_another_starts() -> None:
    engine = SlowEngine(most=4)
    with scheduling(engine, max_delay_s=0.05) as scheduler:
        scheduler.submit(query())
        engine.await_run()
        small = scheduler.submit(query(2))
        time.sleep(0.01)
        scheduler.submit(query(samples=100))
        for _ in range(2):
            engine.await_run()
        engine.let(3)
        assert value_of(small) == 4


def test_data_of_one_query_fail_it_alone() -> None:
    engine, notes = SlowEngine(), Notes()
    engine.bad_value = 7
    with scheduling(engine, notes, runs=1) as scheduler:
        scheduler.submit(query())
        engine.await_run()
        good, bad, other = (scheduler.submit(query(value)) for value in (1, 7, 2))
        engine.let(2)
        assert value_of(good) == 2
        assert value_of(other) == 4
        with pytest.raises(DataError, match="NaN inside"):
            bad.result(WAIT_S)
    assert engine.runs == [[1], [1, 1, 1]]  # nothing ran twice
    assert sorted(outcome.value for outcome in notes.outcomes()) == ["data", "ok", "ok", "ok"]


def test_failure_of_a_run_is_each_query_s() -> None:
    engine = SlowEngine()
    engine.error = RemoteProtocolError("gone")
    with scheduling(engine, runs=1) as scheduler:
        futures = [scheduler.submit(query())]
        engine.await_run()
        futures += [scheduler.submit(query()), scheduler.submit(query())]
        engine.let(2)
        for future in futures:
            with pytest.raises(RemoteProtocolError, match="gone"):
                future.result(WAIT_S)


def test_queries_that_do_not_fit_into_memory_together_run_one_by_one() -> None:
    engine = SlowEngine()
    whole = engine.infer_joined

    def infer(requests: Sequence[Mapping[str, np.ndarray]], *rest: Any) -> JoinedResult:
        if len(requests) > 1:
            raise InputError("too large")
        return whole(requests, *rest)

    engine.infer_joined = infer  # type: ignore[method-assign]
    with scheduling(engine, runs=1) as scheduler:
        futures = [scheduler.submit(query(value)) for value in (1, 2, 3)]
        engine.let(3)
        assert [value_of(future) for future in futures] == [2, 4, 6]


def test_error_that_nobody_expected_ends_its_queries_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    engine = SlowEngine()
    with scheduling(engine, runs=1) as scheduler:
        engine.error = ZeroDivisionError("secret 42")
        broken = scheduler.submit(query())
        engine.let()
        with pytest.raises(Exception, match="internal error") as caught:
            broken.result(WAIT_S)
        assert "42" not in str(caught.value)
        engine.error = None
        future = scheduler.submit(query(4))
        engine.let()
        assert value_of(future) == 8


@pytest.mark.parametrize(
    "limits", [{"queries": 2}, {"samples": 4}, {"values_bytes": 4 * 2 * 4}], ids=["queries", "samples", "bytes"]
)
def test_full_queue_refuses_at_once_and_recovers(limits: dict[str, int]) -> None:
    engine, notes = SlowEngine(), Notes()
    with scheduling(engine, notes, runs=1, **limits) as scheduler:
        running = scheduler.submit(query(samples=2))
        engine.await_run()
        waiting = [scheduler.submit(query(samples=2)), scheduler.submit(query(samples=2))]
        with pytest.raises(QueueFullError, match="2 queries of 4 samples"):
            scheduler.submit(query(samples=2))
        assert notes.outcomes() == [Outcome.BUSY]
        engine.let(2)
        for future in [running, *waiting]:
            assert value_of(future) == 2
        late = scheduler.submit(query(5))
        engine.let()
        assert value_of(late) == 10


def test_full_queue_refuses_what_has_not_been_read_and_says_so() -> None:
    engine, notes = SlowEngine(), Notes()
    with scheduling(engine, notes, queries=1, runs=1) as scheduler:
        first = scheduler.submit(query())
        engine.await_run()
        scheduler.check_queue(Channel.HTTP, "welcome")
        second = scheduler.submit(query())
        with pytest.raises(QueueFullError, match="ask again later"):
            scheduler.check_queue(Channel.HTTP, "unread")
        [refused] = notes.told
        assert (refused.request_id, refused.channel, refused.outcome) == ("unread", Channel.HTTP, Outcome.BUSY)
        engine.let(2)
        assert value_of(first) == value_of(second) == 2.0
        scheduler.check_queue(Channel.HTTP, "welcome again")
    with pytest.raises(ModelNotReadyError):
        scheduler.check_queue(Channel.GRPC, "late")


def test_query_larger_than_the_queue_is_let_in_where_nothing_waits() -> None:
    engine = SlowEngine()
    with scheduling(engine, samples=4) as scheduler:
        future = scheduler.submit(query(samples=100))
        engine.let()
        assert len(future.result(WAIT_S).outputs["y"]) == 100


def test_query_that_does_not_fit_the_model_is_refused_and_told() -> None:
    engine, notes = SlowEngine(), Notes()
    with scheduling(engine, notes) as scheduler:
        with pytest.raises(InputError, match="expected shape"):
            scheduler.submit(Query({"x": np.zeros((1, 3), np.float32)}, Channel.GRPC, "r"))
        with pytest.raises(InputError, match="NaN"):
            scheduler.submit(query(np.nan))
        with pytest.raises(InputError, match="send several"):
            scheduler.submit(query(samples=70_000))
    assert notes.outcomes() == [Outcome.INPUT] * 3
    assert engine.runs == []


def test_cancelled_query_leaves_the_queue_and_does_not_run() -> None:
    engine, notes = SlowEngine(), Notes()
    with scheduling(engine, notes, runs=1, queries=1) as scheduler:
        running = scheduler.submit(query())
        engine.await_run()
        waiting = scheduler.submit(query())
        assert waiting.cancel()
        assert scheduler.load().queued_queries == 0
        again = scheduler.submit(query(2))  # there is room for it
        assert not running.cancel()  # it has started, and ends unheard
        engine.let(2)
        assert value_of(again) == 4
        with pytest.raises(CancelledError):
            waiting.result(WAIT_S)
    assert engine.runs == [[1], [1]]
    assert notes.outcomes().count(Outcome.CANCELLED) == 1


def test_deadline_ends_a_query_that_waits_and_one_that_runs_at_its_moment() -> None:
    engine, notes = SlowEngine(), Notes()
    with scheduling(engine, notes, runs=1) as scheduler:
        moment = time.monotonic() + 0.1
        running = scheduler.submit(query(deadline=moment))
        engine.await_run()
        waiting = scheduler.submit(query(deadline=moment))
        for future in (running, waiting):
            with pytest.raises(DeadlineError):
                future.result(WAIT_S)
        assert time.monotonic() < moment + WAIT_S / 2
        assert scheduler.load().queued_queries == 0
        engine.let()  # the run goes on to its end
        after = scheduler.submit(query(3))
        engine.let()
        assert value_of(after) == 6
    assert engine.runs == [[1], [1]]
    assert sorted(outcome.value for outcome in notes.outcomes()) == ["deadline", "deadline", "ok"]


def test_cancelling_at_the_moment_of_the_deadline_stops_no_clock() -> None:
    engine, notes = SlowEngine(), Notes()
    with scheduling(engine, notes, runs=1) as scheduler:
        scheduler.submit(query())
        engine.await_run()
        waiting = scheduler.submit(query(deadline=time.monotonic() + 0.1))
        with scheduler._changed:  # the clock rings, and who cancels can't yet take the query out of the queue
            cancelling = threading.Thread(target=waiting.cancel)
            cancelling.start()
            wait_for(waiting.cancelled)
            scheduler._expire(scheduler._waiting[0])
        cancelling.join(WAIT_S)
        assert notes.outcomes() == [Outcome.CANCELLED]
        assert scheduler.load().queued_queries == 0
        with pytest.raises(DeadlineError):
            scheduler.submit(query(deadline=time.monotonic() + 0.1)).result(WAIT_S)


def test_deadline_that_fails_stops_no_clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    engine = SlowEngine()
    with scheduling(engine, runs=1) as scheduler:
        scheduler.submit(query())
        engine.await_run()
        ring, rung = scheduler._clock._ring, threading.Event()

        def fail(ticket: object) -> None:
            scheduler._clock._ring = ring  # type: ignore[method-assign]
            rung.set()
            raise ZeroDivisionError

        monkeypatch.setattr(scheduler._clock, "_ring", fail)
        scheduler.submit(query(deadline=time.monotonic()))
        assert rung.wait(WAIT_S)
        with pytest.raises(DeadlineError):
            scheduler.submit(query(deadline=time.monotonic())).result(WAIT_S)
    assert "a query's deadline failed" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_values_and_results_go_with_their_last_reader_not_when_cycles_are_looked_for(fails: bool) -> None:
    engine = SlowEngine()
    engine.let(100)
    engine.error = RemoteProtocolError("gone") if fails else None
    with scheduling(engine) as scheduler:
        gc.collect()
        gc.disable()
        try:
            asked = query()
            values = weakref.ref(asked.inputs["x"])
            future = scheduler.submit(asked)
            assert (future.exception(WAIT_S) is not None) == fails
            engine.error = None
            del asked, future
            value_of(scheduler.submit(query()))  # and who ran it has gone on
            wait_for(lambda: values() is None)
        finally:
            gc.enable()


def test_moments_of_queries_that_have_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_module, "_SWEEP", 20)
    engine = SlowEngine()
    engine.let(100)
    with scheduling(engine) as scheduler:
        for _ in range(100):
            value_of(scheduler.submit(query(deadline=time.monotonic() + 1000)))
        assert len(scheduler._clock._moments) <= 20


def test_closing_lets_what_waits_end_and_takes_no_more() -> None:
    engine = SlowEngine()
    with scheduling(engine, runs=1) as scheduler:
        futures = [scheduler.submit(query())]
        engine.await_run()
        futures.append(scheduler.submit(query(2)))
        closing = threading.Thread(target=scheduler.close)
        closing.start()
        wait_for(lambda: scheduler._closing)
        with pytest.raises(ModelNotReadyError, match="being unloaded"):
            scheduler.submit(query())
        engine.let(2)
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert [value_of(future) for future in futures] == [2, 4]


def test_closing_with_a_grace_fails_what_has_not_begun() -> None:
    engine = SlowEngine()
    with scheduling(engine, runs=1) as scheduler:
        scheduler.submit(query())
        engine.await_run()
        waiting = scheduler.submit(query())
        scheduler.close(0.05)
        with pytest.raises(ModelNotReadyError, match="before this query began"):
            waiting.result(WAIT_S)


def test_observer_is_told_times_and_company_and_load_has_latencies() -> None:
    engine, notes = SlowEngine(), Notes()
    with scheduling(engine, notes, runs=1) as scheduler:
        futures = [scheduler.submit(query())]
        engine.await_run()
        futures += [scheduler.submit(query()), scheduler.submit(query(samples=3))]
        time.sleep(0.02)
        engine.let(2)
        for future in futures:
            future.result(WAIT_S)
        wait_for(lambda: len(notes.told) == 3)
        assert len(scheduler.load().latencies_ms) == 3
    last = next(query for query in notes.told if query.samples == 3)
    assert (last.model, last.channel, last.request_id, last.joined) == ("doubles", Channel.HTTP, "an-id", 4)
    assert 0.02 <= last.queued_s <= last.seconds


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DataError("x"), Outcome.DATA),
        (InputError("x"), Outcome.INPUT),
        (IntegrityError("x"), Outcome.INTEGRITY),
        (RemoteProtocolError("x"), Outcome.SERVER),
        (RefusedError(FailureCode.BUSY, "x"), Outcome.BUSY),
        (RefusedError(FailureCode.FAILED, "x"), Outcome.SERVER),
        (QueueFullError("x"), Outcome.BUSY),
        (DeadlineError("x"), Outcome.DEADLINE),
        (ValueError("x"), Outcome.FAILED),
    ],
)
def test_every_error_has_an_outcome(error: Exception, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


@pytest.mark.parametrize(
    "wrong", [{"queries": 0}, {"runs": 0}, {"large_runs": 0}, {"joined": -1}, {"max_delay_s": -0.1}]
)
def test_limits_under_which_nothing_would_run_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="positive limits"):
        QueueLimits(**wrong)


# -- with cryptography ------------------------------------------------------------------------------------------------


def gathering_model(path: Path) -> Path:
    """x (3), i (2, int64) -> Gemm (4) -> Relu -> the elements that i names, or an error -> Gemm (2) -> y."""
    rng = np.random.default_rng(3)
    weights = {
        "a.w": rng.normal(size=(4, 3)),
        "a.b": rng.normal(size=4),
        "b.w": rng.normal(size=(2, 2)),
        "b.b": rng.normal(size=2),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "a.w", "a.b"], ["h"], name="first", transB=1),
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("GatherElements", ["r", "i"], ["g"], name="gather", axis=1),
            helper.make_node("Gemm", ["g", "b.w", "b.b"], ["y"], name="second", transB=1),
        ],
        "gathering",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3]),
            helper.make_tensor_value_info("i", TensorProto.INT64, ["batch", 2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def gathering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathering")
    partition(gathering_model(folder / "model.onnx"), folder / "bundle")
    return folder / "bundle"


@pytest.mark.parametrize("mode", [ModeChoice.STANDARD, ModeChoice.PREPARED])
def test_query_that_the_model_s_own_operators_refuse_fails_alone_without_more_traffic(
    gathering: Path, pool: WatchedPool, mode: ModeChoice
) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    index = np.array([[0, 1], [2, 3], [3, 3], [1, 0], [2, 2]])
    broken = index.copy()
    broken[1, 0] = 99
    spans = [slice(0, 1), slice(1, 3), slice(3, 5)]
    with parties(gathering, pool, mode=mode) as both:
        whole = both.engine.infer({"x": x, "i": index})
        seen: list[list[tuple[int, int]]] = []
        for indices in (index, broken):
            uploads: list[tuple[int, int]] = []
            joined = both.engine.infer_joined(
                [{"x": x[span], "i": indices[span]} for span in spans],
                watch=lambda block, rows, uploads=uploads: uploads.append((block, len(rows))),  # type: ignore[misc]
            )
            seen.append(uploads)
            kinds = [type(result) for result in joined.results]
            assert kinds == [QueryResult, DataError if indices is broken else QueryResult, QueryResult]
            for span, result in zip(spans, joined.results, strict=True):
                if isinstance(result, QueryResult):
                    bounds = whole.statistics.error_bound + result.statistics.error_bound
                    assert np.abs(result.outputs["y"] - whole.outputs["y"][span]).max() <= bounds
        assert seen[0] == seen[1]
        assert {block for block, _ in seen[0]} == {0, 1}


@pytest.mark.parametrize("mode", [ModeChoice.STANDARD, ModeChoice.PREPARED])
def test_many_clients_at_once_get_their_own_answers_in_few_runs(
    dense_bundle: Path, pool: WatchedPool, mode: ModeChoice
) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    with parties(dense_bundle, pool, mode=mode) as both:
        whole = both.engine.infer({"x": x})
        notes = Notes()
        model = OnlyModel(both.engine)
        model.scheduler.close()
        model.scheduler = Scheduler(both.engine, observer=notes)
        futures = [model.submit(Query({"x": x[n : n + 1]}, Channel.FRAMES, f"{n}")) for n in range(len(x))]
        results = [future.result(WAIT_S) for future in futures]
        model.scheduler.close(WAIT_S)
        bound = whole.statistics.error_bound + max(result.statistics.error_bound for result in results)
        y = np.concatenate([result.outputs["y"] for result in results])
        assert np.abs(y - whole.outputs["y"]).max() <= bound
        assert sum(1 / query.joined for query in notes.told) < 10  # runs


def test_small_query_in_standard_mode_is_not_behind_all_of_a_large_one(
    dense_bundle: Path, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    gate = threading.Semaphore(0)
    whole = Group.run

    def run(group: Group, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        begun.append(len(inputs["x"]))
        assert gate.acquire(timeout=WAIT_S)
        return whole(group, inputs)

    monkeypatch.setattr(Group, "run", run)
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    with parties(dense_bundle, pool, mode=ModeChoice.STANDARD) as both:
        monkeypatch.setattr(both.engine, "_group_size", lambda mode: 2)
        results: dict[int, QueryResult] = {}
        threads = [
            threading.Thread(target=lambda n=n: results.update({n: both.engine.infer({"x": x[:n]})})) for n in (20, 1)
        ]
        threads[0].start()
        wait_for(lambda: len(begun) == GROUPS_IN_FLIGHT)
        threads[1].start()
        wait_for(lambda: both.engine._threads._work_queue.qsize() == 1)
        for _ in range(11):
            gate.release()
        for thread in threads:
            thread.join(WAIT_S)
        assert begun[: GROUPS_IN_FLIGHT + 1] == [2, 2, 2, 1]
        assert len(begun) == 11
        assert np.abs(results[20].outputs["y"][0] - results[1].outputs["y"][0]).max() < 2e-2


def test_step_whose_results_are_not_by_sample_is_not_repeated_for_each_request() -> None:
    def run_step(position: int, step: object, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if (feeds["x"] == 7).any():
            raise NodeStepError(position, "refused")
        return {"y": feeds["x"], "shape": np.array([4, 4, 4, 4])}

    engine = SimpleNamespace(
        bundle=SimpleNamespace(plan=None), runner=SimpleNamespace(run_step=run_step), limits=Limits()
    )
    spans = {0: slice(0, 2), 1: slice(2, 3)}
    group = Group(engine, QueryStatistics.empty(0, 0), 0, Mode.PREPARED, spans, None, SILENT)  # type: ignore[arg-type]
    group._samples = 3
    error = NodeStepError(0, "refused")
    step = NodeStep("model.onnx", ("x",), ("y", "shape"), (), ())
    with pytest.raises(NodeStepError) as caught:  # then all of them go on as zeros, and no round is left out
        group._repeat_step(step, {"x": np.array([[1.0], [2.0], [7.0]])}, error)
    assert caught.value is error
