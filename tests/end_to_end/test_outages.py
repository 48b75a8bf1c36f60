"""Servers that die, stop, cheat or fall silent, and networks that cut and damage: no sample is lost, none is wrong."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heinfer.client import connect, evaluate
from heinfer.client.journal import read_journal
from heinfer.client.remote import RemoteModel
from heinfer.client.report import Report
from heinfer.errors import InputError, IntegrityError, RemoteProtocolError
from heinfer.plan import load_node, load_server
from heinfer.ring import packed_bytes
from heinfer.server.service import EvaluatorService
from heinfer.wire import Address, Limits, QueryFailedError, QueryFailureCode, RefusedError, block_shapes, parse_address
from heinfer.wire.codec import decode_node_event
from heinfer.wire.messages import BlockRequest, FailureCode
from partitioner import partition
from tests.captured_traffic import Proxy
from tests.meddling import Meddler, cut, cut_number, damage
from tests.parties import LOOPBACK, Process, WatchedEvaluator, WatchedPool, parties, serving, start
from tests.small_models import dense_model
from trusted_node.engine import Engine
from trusted_node.link import ServerLink
from trusted_node.modes import ModeChoice
from trusted_node.pool import PreparedPool, Taken
from trusted_node.preparation import Preparer
from trusted_node.replicas import Replicas

X = np.ones((2, 3), np.float32)
PATIENT = Limits(retry_s=20.0)
MODES = [ModeChoice.STANDARD, ModeChoice.PREPARED]


# --- one upload, one outage ------------------------------------------------------------------------------------------


@contextmanager
def replicated(
    bundle: Path,
    pool: WatchedPool,
    addresses: list[Address],
    limits: Limits = PATIENT,
    mode: ModeChoice = ModeChoice.STANDARD,
    **options: Any,
) -> Iterator[Engine]:
    """A node's engine in this process, in front of several servers."""
    node = load_node(bundle / "node")
    shapes = block_shapes(node.plan)
    replicas = Replicas([ServerLink(address, node.plan_hash, shapes, limits) for address in addresses])
    with ExitStack() as stack:
        ready = None if mode is ModeChoice.STANDARD else stack.enter_context(PreparedPool(Preparer(node), 2))
        engine = Engine(node, replicas, pool, limits, ready, mode, **options)
        stack.callback(engine.close)
        stack.callback(replicas.close)
        yield engine


@contextmanager
def servers(bundle: Path, count: int, limits: Limits = PATIENT) -> Iterator[list[tuple[WatchedEvaluator, Any]]]:
    """Servers of one bundle, each watched."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            evaluator = WatchedEvaluator(load_server(bundle / "server"))
            server = EvaluatorService(evaluator, LOOPBACK, limits)
            stack.callback(server.stop, 0)
            made.append((evaluator, server))
        yield made


def requests_of(meddler: Meddler) -> list[tuple[BlockRequest, list[bytes]]]:
    """Every request that went up whole or in part, with the frames' payloads that belong to it."""
    found: list[tuple[BlockRequest, list[bytes]]] = []
    for passed in meddler.passed:
        for frame in passed.up:
            middle = 16 + int.from_bytes(frame[:4], "little")
            event = decode_node_event(frame[16:middle], frame[middle:])
            if isinstance(event, BlockRequest):
                found.append((event, []))
            if len(frame) > middle:
                found[-1][1].append(frame[middle:])
    return found


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_upload_that_was_cut_is_sent_again_with_the_same_bytes(
    dense_bundle: Path, pool: WatchedPool, mode: ModeChoice, direction: str
) -> None:
    # Up there are a greeting and a request a block, the rows of standard mode apart; down a greeting and an answer.
    meddlers: list[Meddler] = []

    def between(address: Address) -> Address:
        numbers = cut_number(3) if direction == "up" else cut_number(2, 5)
        meddlers.append(Meddler(address, **{direction: numbers}))
        return meddlers[0].address

    with parties(dense_bundle, pool, between, mode, ready=2, limits=PATIENT) as both:
        before = len(pool.secrets)
        found = both.engine.infer({"x": X}).outputs["y"]
        assert len(pool.secrets) - before == (2 if mode is ModeChoice.STANDARD else 0)  # encrypted once a block
        calm = both.engine.infer({"x": X}).outputs["y"]
    assert np.abs(found - calm).max() < 1e-3
    meddlers[0].__exit__()
    assert meddlers[0].meddled == (1 if direction == "up" else 2)
    by_block: dict[int, list[tuple[int, bytes]]] = {0: [], 1: []}
    for request, payloads in requests_of(meddlers[0]):
        by_block[request.block].append((request.attempt, b"".join(payloads)))
    resent = 0
    for attempts in by_block.values():
        for (_, first), (attempt, second) in itertools.pairwise(attempts):
            if attempt:
                resent += 1
                assert second.startswith(first)  # the first may have been cut in the middle
                assert len(second) > 0
    assert resent == (1 if direction == "up" else 2)


def test_server_that_fails_a_block_is_not_asked_again_but_another_is(dense_bundle: Path, pool: WatchedPool) -> None:
    with servers(dense_bundle, 2) as ((first, one), (second, two)):
        first.fail = True
        with replicated(dense_bundle, pool, [one.address, two.address]) as engine:
            for _ in range(3):
                assert engine.infer({"x": X}).outputs["y"].shape == (2, 2)
            assert 1 <= len(first.requests) <= 6
            assert [block for block, _ in second.requests] == [0, 1] * 3
            second.fail = True
            with pytest.raises(RefusedError) as caught:
                engine.infer({"x": X})
            assert caught.value.code is FailureCode.FAILED


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_forged_answer_is_asked_for_elsewhere_and_its_server_is_left_in_the_end(
    dense_bundle: Path, pool: WatchedPool, mode: ModeChoice
) -> None:
    with servers(dense_bundle, 2) as ((cheat, one), (_, two)):
        asked = forge(cheat)
        addresses = [one.address, two.address]
        with replicated(dense_bundle, pool, addresses, mode=mode) as engine:
            bad, good = (link.conduct for link in engine.replicas.links)
            for _ in range(200):
                if bad.in_quarantine:
                    break
                assert engine.infer({"x": X}).outputs["y"].shape == (2, 2)
                engine.replicas.record_success(engine.replicas.links[0])  # it is asked again, as after a long time
            assert bad.failures == 16
            assert good.failures == 0
            asked.clear()
            for _ in range(4):
                engine.infer({"x": X})
            assert not asked
        with replicated(dense_bundle, pool, addresses[:1], mode=mode) as engine:
            with pytest.raises(IntegrityError):
                engine.infer({"x": X})
            assert len(asked) == 1  # it is not given a second try


def forge(evaluator: WatchedEvaluator) -> list[int]:
    """Make a server add one to all residues; returns the blocks that it will be asked for."""
    asked: list[int] = []
    assert evaluator.prepared is not None
    q = evaluator.bundle.plan.ring.modulus
    honest, honest_run = evaluator.evaluate, evaluator.prepared._run

    def lie(block: int, x: np.ndarray) -> np.ndarray:
        asked.append(block)
        return (honest(block, x) + 1) % q

    def lie_prepared(block: int, x: np.ndarray) -> np.ndarray:
        asked.append(block)
        return (honest_run(block, x) + 1) % q

    evaluator.evaluate = lie  # type: ignore[method-assign]
    evaluator.prepared._run = lie_prepared
    return asked


def test_damage_is_never_taken_for_forgery(dense_bundle: Path, pool: WatchedPool) -> None:
    meddlers: list[Meddler] = []

    def between(address: Address) -> Address:
        meddlers.append(Meddler(address, damage(0.2), damage(0.2)))
        return meddlers[0].address

    with parties(dense_bundle, pool, between, ModeChoice.PREPARED, limits=PATIENT) as both:
        for _ in range(30):
            assert both.engine.infer({"x": X}).outputs["y"].shape == (2, 2)
        assert both.engine.replicas.links[0].conduct.failures == 0
    assert meddlers[0].meddled > 10
    meddlers[0].__exit__()


def test_upload_that_there_is_no_memory_to_keep_is_not_sent_again(dense_bundle: Path, pool: WatchedPool) -> None:
    with (
        servers(dense_bundle, 1) as ((_, server),),
        Meddler(server.address, down=cut_number(2)) as meddler,
        replicated(dense_bundle, pool, [meddler.address], kept_bytes=100) as engine,
    ):
        with pytest.raises(RemoteProtocolError):
            engine.infer({"x": X})
        assert engine.infer({"x": X}).outputs["y"].shape == (2, 2)
        assert engine._kept.used == 0


def test_what_is_kept_is_let_go(dense_bundle: Path, pool: WatchedPool) -> None:
    with (
        servers(dense_bundle, 1) as ((evaluator, server),),
        Meddler(server.address, down=cut_number(2, 4)) as meddler,
        replicated(dense_bundle, pool, [meddler.address]) as engine,
    ):
        engine.infer({"x": X})
        assert engine._kept.used == 0
        evaluator.fail = True
        with pytest.raises(RefusedError):
            engine.infer({"x": X})
        assert engine._kept.used == 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_server_that_is_away_for_a_while_is_waited_for_and_no_longer(
    dense_bundle: Path, pool: WatchedPool, mode: ModeChoice
) -> None:
    limits = Limits(retry_s=3.0)
    with parties(dense_bundle, pool, mode=mode, ready=2, limits=limits) as both:
        both.engine.infer({"x": X})
        address = both.server.address
        both.server.stop(0)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(both.engine.infer, {"x": X})
            time.sleep(0.7)
            assert not asked.done()
            again = EvaluatorService(both.evaluator, address, limits)
            try:
                assert asked.result(20).outputs["y"].shape == (2, 2)
            finally:
                again.stop(0)
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError):
            both.engine.infer({"x": X})
        assert 1 < time.monotonic() - started < 8  # less than `retry_s` by the last rest, which would go beyond it


def test_closing_ends_a_wait_for_a_server(dense_bundle: Path, pool: WatchedPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
    with replicated(dense_bundle, pool, [address]) as engine, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(engine.infer, {"x": X})
        time.sleep(0.3)
        started = time.monotonic()
        engine.replicas.close()
        with pytest.raises(RemoteProtocolError):
            asked.result(20)
        assert time.monotonic() - started < 2


# --- memory and time that a server can take --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small dense model with hints for batches."""
    folder = tmp_path_factory.mktemp("batch")
    partition(dense_model(folder / "dense.onnx"), folder / "bundle", batch_hints=True)
    return folder / "bundle"


@pytest.fixture(params=["standard", "batch"])
def row_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModeChoice:
    """The modes in which a row is a value of all samples; small batches too are taken as batches."""
    monkeypatch.setattr("trusted_node.modes.forecast_batch", lambda plan, samples: 0.0)
    return ModeChoice.STANDARD if request.param == "standard" else ModeChoice.PREPARED


def largest_answer(mode: ModeChoice, samples: int) -> int:
    """Of the dense model's blocks: four rows."""
    return 4 * (packed_bytes(samples) + (packed_bytes(2048) if mode is ModeChoice.STANDARD else 0))


def test_answers_wait_for_room_before_they_are_asked_for(
    batch_bundle: Path, pool: WatchedPool, row_mode: ModeChoice
) -> None:
    room = largest_answer(row_mode, len(X))
    lock = threading.Lock()
    with (
        servers(batch_bundle, 1) as ((evaluator, server),),
        replicated(batch_bundle, pool, [server.address], mode=row_mode, answer_bytes=room) as engine,
        ThreadPoolExecutor(3) as threads,
    ):
        honest, under_way, most = evaluator.evaluate, [0], [0]

        def evaluate_slowly(block: int, x: np.ndarray) -> np.ndarray:
            rows = len(honest(block, x))
            with lock:
                under_way[0] += rows
                most[0] = max(most[0], under_way[0])
            time.sleep(0.1)
            with lock:
                under_way[0] -= rows
            return honest(block, x)

        evaluator.evaluate = evaluate_slowly  # type: ignore[method-assign]
        asked = [threads.submit(engine.infer, {"x": X}) for _ in range(3)]
        for answer in asked:
            assert answer.result(30).outputs["y"].shape == (2, 2)
        assert most == [4]  # there is no room for more rows
        assert engine._answers.used == 0
        evaluator.evaluate = honest  # type: ignore[method-assign]
        evaluator.fail = True
        with pytest.raises(RefusedError):
            engine.infer({"x": X})
        assert engine._answers.used == 0


def test_answer_that_would_not_fit_alone_is_refused_before_anything_is_sent(
    batch_bundle: Path, pool: WatchedPool, row_mode: ModeChoice
) -> None:
    room = largest_answer(row_mode, 1)
    with (
        servers(batch_bundle, 1) as ((evaluator, server),),
        replicated(batch_bundle, pool, [server.address], mode=row_mode, answer_bytes=room) as engine,
    ):
        found = engine.infer({"x": X[:1]})
        assert max(block.bytes_down for block in found.statistics.blocks) == room
        asked = len(evaluator.requests)
        with pytest.raises(InputError, match=r"a block's answer in \w+ mode has .* raise --memory"):
            engine.infer({"x": np.ones((33, 3), np.float32)})
        assert len(evaluator.requests) == asked


def test_answer_that_holds_no_residues_is_asked_for_elsewhere_without_a_check_too(
    batch_bundle: Path, pool: WatchedPool, row_mode: ModeChoice
) -> None:
    with servers(batch_bundle, 2) as ((bad, one), (_, two)):
        q = bad.bundle.plan.ring.modulus
        honest = bad.evaluate
        bad.evaluate = lambda block, x: np.full_like(honest(block, x), q)  # type: ignore[method-assign]
        with replicated(batch_bundle, pool, [one.address, two.address], mode=row_mode, check=False) as engine:
            assert engine.infer({"x": X}).outputs["y"].shape == (2, 2)
            assert [link.conduct.failures > 0 for link in engine.replicas.links] == [True, False]


def test_answer_that_keeps_coming_ends_with_the_time_of_its_query(dense_bundle: Path, pool: WatchedPool) -> None:
    limits = Limits(chunk_bytes=26_000, query_s=1.0)  # a row a frame; there would be time to send it again

    def late(_: random.Random, frame: bytes) -> bytes:
        time.sleep(0.45)
        return frame

    with (
        servers(dense_bundle, 1, limits) as ((evaluator, server),),
        Meddler(server.address, down=late) as meddler,
        replicated(dense_bundle, pool, [meddler.address], limits) as engine,
    ):
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="the time for this upload is over"):
            engine.infer({"x": np.ones((2048, 3), np.float32)})
        assert time.monotonic() - started < 3
        assert len(evaluator.requests) == 1


def test_session_does_not_outlive_the_time_of_its_upload(dense_bundle: Path) -> None:
    node = load_node(dense_bundle / "node")
    with servers(dense_bundle, 1) as ((_, server),):
        link = ServerLink(server.address, node.plan_hash, block_shapes(node.plan), PATIENT)
        session = link.acquire()
        session.ends_at = time.monotonic()
        link.release(session)
        again = link.acquire()
        assert again is session
        again.open_request(0, 1)  # another upload, of which nothing was said
        again.ends_at = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="the time for this upload is over"):
            again.send_rows(1, 0, 1, bytes(13_000))
        link.close()


def test_group_whose_masks_are_too_old_fails_and_wipes_them(
    dense_bundle: Path, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Taken] = []
    take = PreparedPool.take

    def watched(self: PreparedPool, samples: int) -> Taken:
        taken.append(take(self, samples))
        return taken[-1]

    monkeypatch.setattr(PreparedPool, "take", watched)
    with (
        servers(dense_bundle, 1) as ((evaluator, server),),
        replicated(dense_bundle, pool, [server.address], mode=ModeChoice.PREPARED) as engine,
    ):
        assert engine.infer({"x": X}).outputs["y"].shape == (2, 2)
        assert evaluator.prepared is not None
        run = evaluator.prepared._run

        def run_slowly(block: int, x: np.ndarray) -> np.ndarray:
            time.sleep(0.6)
            return run(block, x)

        evaluator.prepared._run = run_slowly
        assert engine.prepared is not None
        engine.prepared.empty()  # fresh masks
        monkeypatch.setattr("trusted_node.groups.MASK_LIFETIME_S", 0.5)
        started = time.monotonic()
        with pytest.raises(RemoteProtocolError, match="the time for this upload is over"):
            engine.infer({"x": X})
        assert time.monotonic() - started < 5
        assert not any(query._masks or query._corrections for query in taken[-1].queries)


# --- stopping, idling, dribbling -------------------------------------------------------------------------------------


def slow(evaluator: WatchedEvaluator, seconds: float) -> threading.Event:
    """Make the evaluations of a server take long; the event is set when one has begun."""
    honest, begun = evaluator.evaluate, threading.Event()

    def evaluate_slowly(block: int, x: np.ndarray) -> np.ndarray:
        begun.set()
        time.sleep(seconds)
        return honest(block, x)

    evaluator.evaluate = evaluate_slowly  # type: ignore[method-assign]
    return begun


def test_server_that_stops_ends_its_answer_and_the_rest_goes_to_another(dense_bundle: Path, pool: WatchedPool) -> None:
    with servers(dense_bundle, 2) as ((first, one), (second, two)):
        begun = slow(first, 0.8)
        with replicated(dense_bundle, pool, [one.address, two.address]) as engine, ThreadPoolExecutor(2) as threads:
            asked = threads.submit(engine.infer, {"x": X})
            assert begun.wait(10)
            stopping = threads.submit(one.stop, 10)
            time.sleep(0.2)
            node = load_node(dense_bundle / "node")
            link = ServerLink(one.address, node.plan_hash, block_shapes(node.plan), PATIENT)
            with pytest.raises(RefusedError) as caught:
                link.acquire()
            assert caught.value.code is FailureCode.STOPPING
            assert asked.result(20).outputs["y"].shape == (2, 2)
            stopping.result(20)
        assert (len(first.requests), len(second.requests)) == (1, 1)  # the answer that ran was not lost


def test_node_that_stops_ends_its_query_and_tells_other_clients(dense_bundle: Path, pool: WatchedPool) -> None:
    with parties(dense_bundle, pool) as both, ThreadPoolExecutor(2) as threads:
        begun = slow(both.evaluator, 0.6)
        with connect(both.node.address) as model:
            asked = threads.submit(model.predict, X)
            assert begun.wait(10)
            stopping = threads.submit(both.node.stop, 10)
            time.sleep(0.2)
            with pytest.raises(QueryFailedError, match="stopping") as caught:
                connect(both.node.address)
            assert caught.value.code is QueryFailureCode.STOPPING
            assert asked.result(20).shape == (2, 2)
            stopping.result(20)


def test_idle_sessions_are_ended_and_made_anew_without_a_word(dense_bundle: Path, pool: WatchedPool) -> None:
    limits = replace(PATIENT, max_idle_s=0.3)
    with parties(dense_bundle, pool, limits=limits) as both:
        assert both.engine.infer({"x": X}).outputs["y"].shape == (2, 2)
        deadline = time.monotonic() + 10
        while both.server._server._serving and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not both.server._server._serving
        assert both.engine.infer({"x": X}).outputs["y"].shape == (2, 2)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_peer_that_dribbles_is_given_up(dense_bundle: Path, pool: WatchedPool, direction: str) -> None:
    """Frames that come one by one just in time, for ever, are too slow together."""
    patient = Limits(chunk_bytes=26_000, slowest_bytes_s=1e9, retry_s=0.0)  # a row a frame
    impatient = replace(patient, reply_s=0.9)

    def late(_: random.Random, frame: bytes) -> bytes:
        time.sleep(0.5)
        return frame

    x = np.ones((2048, 3), np.float32)
    reason = {"up": "FAILED", "down": "dribbles"}[direction]
    with (
        servers(dense_bundle, 1, impatient if direction == "up" else patient) as ((_, server),),
        Meddler(server.address, **{direction: late}) as meddler,
        replicated(dense_bundle, pool, [meddler.address], patient if direction == "up" else impatient) as engine,
        pytest.raises(RemoteProtocolError, match=reason),
    ):
        engine.infer({"x": x})


#: A server whose evaluation of a block takes a minute, and says when it has begun.
SLOW_SERVER = """
import sys, time
from heinfer.cli.main import main
from heinfer.server.evaluation import BlockEvaluator

def evaluate(self, block, residues):
    print("evaluating", file=sys.stderr, flush=True)
    time.sleep(60)

BlockEvaluator.evaluate = evaluate
main()
"""


def test_sigterm_ends_a_server_with_0_and_a_second_one_at_once(
    dense_bundle: Path, pool: WatchedPool, tmp_path: Path
) -> None:
    serve = ("serve", str(dense_bundle / "server"), "--listen", "127.0.0.1:0", "--grace", "30s")
    with start(tmp_path / "first", *serve) as role:
        role.process.send_signal(signal.SIGTERM)
        assert role.process.wait(20) == 0
        assert "Traceback" not in role.said()
    with (
        start(tmp_path / "second", *serve, command=(sys.executable, "-c", SLOW_SERVER)) as role,
        replicated(dense_bundle, pool, [parse_address(role.address)], Limits(retry_s=0.0)) as engine,
        ThreadPoolExecutor(1) as thread,
    ):
        query = thread.submit(engine.infer, {"x": X})
        until = time.monotonic() + 20
        while "evaluating" not in role.said() and time.monotonic() < until:
            time.sleep(0.02)
        role.process.send_signal(signal.SIGTERM)  # an answer that is being made holds the server up for its grace
        with pytest.raises(subprocess.TimeoutExpired):
            role.process.wait(0.5)
        role.process.send_signal(signal.SIGTERM)
        assert role.process.wait(20) == -signal.SIGTERM
        with pytest.raises(RemoteProtocolError):
            query.result(20)


def test_node_starts_with_one_of_two_servers_says_so_and_ends_with_0(dense_bundle: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        absent = f"127.0.0.1:{taken.getsockname()[1]}"
    with (
        servers(dense_bundle, 1) as ((_, server),),
        start_node(dense_bundle, tmp_path, [absent, str(server.address)]) as node,
    ):
        with connect(node.address) as model:
            assert model.predict(X).shape == (2, 2)
        assert f"waiting for the server at {absent}" in node.said()
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(20) == 0
        assert "Traceback" not in node.said()


# --- evaluations under fire ------------------------------------------------------------------------------------------


def start_node(bundle: Path, folder: Path, addresses: list[str], *options: str) -> Any:
    named = [word for address in addresses for word in ("--server", address)]
    arguments = ("node", str(bundle / "node"), *named, "--listen", "127.0.0.1:0", "--allow-trace", *options)
    return start(folder / "node", *arguments)


class Mortal:
    """A server process that is killed again and again, and started again on its port."""

    def __init__(self, bundle: Path, folder: Path, seed: int) -> None:
        self._arguments = ("-v", "serve", str(bundle / "server"), "--listen")
        self._folder = folder
        self._random = random.Random(seed)
        self._stack = ExitStack()
        self._process: Process = self._stack.enter_context(start(folder / "0", *self._arguments, "127.0.0.1:0"))
        self.address = self._process.address
        self.kills = 0

    def kill(self, times: int, uptime_s: float, stop: threading.Event) -> None:
        """Kill that often, each time a random while after the server has begun to answer."""
        answered = len(self._process.said().splitlines())
        while self.kills < times:
            while len(self._process.said().splitlines()) <= answered:  # it logs its answers
                if stop.wait(0.02):
                    return
            time.sleep(self._random.uniform(0.0, uptime_s))
            os.kill(self._process.process.pid, signal.SIGKILL)
            self._process.process.wait()
            self.kills += 1
            name = self._folder / str(self.kills)
            self._process = self._stack.enter_context(start(name, *self._arguments, self.address))
            answered = 0

    def close(self) -> None:
        self._stack.close()


def ask_all(model: RemoteModel, x: np.ndarray, chunk: int) -> np.ndarray:
    """Ask for all samples, a few queries at a time."""
    with ThreadPoolExecutor(3) as threads:
        return np.concatenate(list(threads.map(model.predict, (x[i : i + chunk] for i in range(0, len(x), chunk)))))


def under_fire(model: RemoteModel, x: np.ndarray, mortal: Mortal, kills: int, uptime_s: float) -> np.ndarray:
    """Ask for all samples while a server is killed."""
    stop = threading.Event()
    killer = threading.Thread(target=mortal.kill, args=(kills, uptime_s, stop))
    killer.start()
    try:
        return ask_all(model, x, 250)
    finally:
        stop.set()
        killer.join(60)


def check_equal(found: np.ndarray, calm: np.ndarray, limit: float) -> None:
    assert found.shape == calm.shape
    assert np.array_equal(found.argmax(axis=1), calm.argmax(axis=1))
    assert np.abs(found - calm).max() <= limit


#: End-to-end estimate of LeNet-5's error (`heinfer evaluate`); the long tests take the evaluation's own.
LENET_ESTIMATE = 2.3e-3


@pytest.mark.slow
def test_server_killed_twice_loses_no_sample(
    lenet_bundle: Path, lenet_samples: dict[str, np.ndarray], tmp_path: Path
) -> None:
    x = np.concatenate([lenet_samples["x"]] * 2)
    mortal = Mortal(lenet_bundle, tmp_path, seed=3)
    try:
        with (
            start_node(lenet_bundle, tmp_path, [mortal.address], "--retry", "60s") as node,
            connect(node.address) as model,
        ):
            calm = ask_all(model, x, 250)
            found = under_fire(model, x, mortal, 2, 0.1)
            assert "Traceback" not in node.said()
    finally:
        mortal.close()
    assert mortal.kills == 2
    check_equal(found, calm, LENET_ESTIMATE)


@pytest.mark.slow
def test_bad_network_loses_no_sample(lenet_bundle: Path, lenet_samples: dict[str, np.ndarray], tmp_path: Path) -> None:
    x = lenet_samples["x"]
    serve = ("serve", str(lenet_bundle / "server"), "--listen", "127.0.0.1:0")
    with (
        start(tmp_path / "server", *serve) as server,
        Meddler(parse_address(server.address)) as meddler,
        start_node(lenet_bundle, tmp_path, [str(meddler.address)]) as node,
        connect(node.address) as model,
    ):
        calm = ask_all(model, x, 250)
        for meddling in (cut(0.05), damage(0.05)):
            meddler.up = meddler.down = meddling
            before = meddler.meddled
            check_equal(ask_all(model, x, 50), calm, LENET_ESTIMATE)
            assert meddler.meddled - before >= 3
        assert "not what the model computes" not in node.said()
        assert "Traceback" not in node.said() + server.said()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", ["killed", "cut", "damaged"])
def test_evaluation_of_10000_images_under_fire_equals_the_undisturbed_one(
    lenet_bundle: Path, lenet_samples: dict[str, np.ndarray], tmp_path: Path, fault: str
) -> None:
    x, y = np.concatenate([lenet_samples["x"]] * 10), np.concatenate([lenet_samples["y"]] * 10)

    begun, over = threading.Event(), threading.Event()

    def tell(phase: str, *_: int) -> None:
        if phase == "encrypted":
            begun.set()

    def run(address: str, name: str) -> tuple[Report, np.ndarray]:
        begun.clear()
        with start_node(lenet_bundle, tmp_path, [address], "--retry", "60s") as node, connect(node.address) as model:
            report = evaluate(lenet_bundle, x, y, through=model, journal=tmp_path / name, progress=tell)
            assert "not what the model computes" not in node.said()
            assert "Traceback" not in node.said()
        chunks = read_journal(tmp_path / name)
        assert sum(len(chunk.outputs) for chunk in chunks.values()) == len(x)
        return report, np.concatenate([chunks[start].outputs for start in sorted(chunks)])

    mortal = Mortal(lenet_bundle, tmp_path, seed=5)
    try:
        calm_report, calm = run(mortal.address, "calm")
        if fault == "killed":

            def kill() -> None:
                begun.clear()
                begun.wait()
                mortal.kill(20, 0.3, over)

            killer = threading.Thread(target=kill)
            killer.start()
            report, found = run(mortal.address, "killed")
            faults = mortal.kills
            over.set()
            killer.join(60)
            assert faults == 20
        else:
            meddling = {"cut": cut(0.05), "damaged": damage(0.05)}[fault]
            with Meddler(parse_address(mortal.address), meddling, meddling) as meddler:
                report, found = run(str(meddler.address), fault)
            faults = meddler.meddled
            assert faults > 10
    finally:
        mortal.close()
    print(
        f"{fault}: {faults} faults, {report.costs and report.costs.seconds:.1f} s instead of "
        f"{calm_report.costs and calm_report.costs.seconds:.1f}, largest difference {np.abs(found - calm).max():.1e}, "
        f"estimate {report.error_estimate:.1e}, agreement with the plain model {report.agreement:.4%}"
    )
    check_equal(found, calm, report.error_estimate)
    assert report.accuracy_encrypted == calm_report.accuracy_encrypted


def test_proxy_that_only_listens_changes_nothing(dense_bundle: Path, pool: WatchedPool) -> None:
    """The tests' own proxies are as good as none where they meddle with nothing."""
    with servers(dense_bundle, 1) as ((_, server),), Proxy(server.address) as plain, Meddler(plain.address) as meddler:
        with replicated(dense_bundle, pool, [meddler.address]) as engine:
            found = engine.infer({"x": X}).outputs["y"]
        assert meddler.frames > 4
        assert meddler.meddled == 0
    assert found.shape == (2, 2)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_server_lets_requests_in_as_memory_allows_and_none_is_lost(dense_bundle: Path, pool: WatchedPool) -> None:
    evaluator = WatchedEvaluator(load_server(dense_bundle / "server"))
    # Standard mode, two samples: 2 * 8 * 7 * 2050 bytes in block 0, as many less in block 1. One request at a time.
    server = EvaluatorService(evaluator, LOOPBACK, PATIENT, memory=250_000)
    begun = slow(evaluator, 0.05)
    try:
        with replicated(dense_bundle, pool, [server.address]) as engine, ThreadPoolExecutor(6) as threads:
            asked = [threads.submit(engine.infer, {"x": X}) for _ in range(6)]
            assert begun.wait(10)
            most = 0
            while not all(future.done() for future in asked):
                most = max(most, server._memory.used)
                time.sleep(0.002)
            assert all(future.result().outputs["y"].shape == (2, 2) for future in asked)
        assert 0 < most <= 250_000
        assert server._memory.used == 0
        assert len(evaluator.requests) == 12
    finally:
        server.stop(0)


def test_request_that_no_memory_would_do_for_is_refused_at_once(dense_bundle: Path, pool: WatchedPool) -> None:
    server = EvaluatorService(WatchedEvaluator(load_server(dense_bundle / "server")), LOOPBACK, PATIENT, memory=10_000)
    try:
        with replicated(dense_bundle, pool, [server.address]) as engine:
            with pytest.raises(RefusedError) as caught:
                engine.infer({"x": X})
            assert caught.value.code is FailureCode.FAILED
        assert server._memory.used == 0
    finally:
        server.stop(0)


def test_memory_of_a_request_whose_peer_went_away_is_given_back(dense_bundle: Path, pool: WatchedPool) -> None:
    with (
        servers(dense_bundle, 1) as ((_, server),),
        Meddler(server.address, up=cut_number(3)) as meddler,
        replicated(dense_bundle, pool, [meddler.address]) as engine,
    ):
        engine.infer({"x": X})
        deadline = time.monotonic() + 10
        while server._memory.used and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server._memory.used == 0


def test_query_larger_than_the_node_s_memory_is_refused_before_it_is_read(
    dense_bundle: Path, pool: WatchedPool
) -> None:
    with (
        parties(dense_bundle, pool) as both,
        serving(both.engine, Limits(), memory=10_000) as node,
        connect(node.address) as model,
    ):
        assert model.predict(X).shape == (2, 2)
        with pytest.raises(QueryFailedError, match="raise --memory") as caught:
            model.predict(np.ones((5000, 3), np.float32))
        assert caught.value.code is QueryFailureCode.INPUT
        assert model.predict(X).shape == (2, 2)
