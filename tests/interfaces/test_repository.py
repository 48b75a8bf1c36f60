"""Several models on one node and one server: names, loading, unloading, replacing, readiness; and clients by frames."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import connect
from heinfer.errors import InputError, PlanError, RemoteProtocolError
from heinfer.plan import load_node, load_server, read_plan
from heinfer.server.evaluation import BlockEvaluator
from heinfer.server.prepared import shared_merger
from heinfer.server.service import EvaluatorService
from heinfer.wire import FailureCode, Limits, QueryFailedError, QueryFailureCode, RefusedError, block_shapes
from partitioner import partition
from tests.interfaces.test_scheduling import Notes
from tests.parties import IMPATIENT, LOOPBACK
from tests.small_models import dense_model
from trusted_node.integrity import ATTEMPTS
from trusted_node.link import ServerLink
from trusted_node.modes import ModeChoice
from trusted_node.service import NodeService
from trusted_node.serving.interface import (
    Channel,
    ModelNotReadyError,
    ModelState,
    Outcome,
    Query,
    UnknownModelError,
)
from trusted_node.serving.loading import ModelSettings, Teller, find_card
from trusted_node.serving.repository import ModelFolder, ModelRepository, parse_model_folders

WAIT_S = 30.0
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
MODELS = {"first": 1, "second": 2}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of the same shape and other weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in MODELS.items():
        partition(dense_model(folder / f"{name}.onnx", seed=seed), folder / name)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def server(bundles: dict[str, Path]) -> Iterator[EvaluatorService]:
    """One server of both plans."""
    merger = shared_merger()
    service = EvaluatorService(
        [BlockEvaluator(load_server(bundle / "server"), merger) for bundle in bundles.values()], LOOPBACK, IMPATIENT
    )
    yield service
    service.stop(0)


@dataclass
class Node:
    """A repository whose folders are the test's own."""

    models: ModelRepository
    folders: dict[str, Path]

    def ask(self, name: str) -> np.ndarray:
        return self.models.get(name).submit(Query({"x": X}, Channel.HTTP, "r")).result(WAIT_S).outputs["y"]


@pytest.fixture
def node(bundles: dict[str, Path], server: EvaluatorService, tmp_path: Path) -> Iterator[Node]:
    folders = {name: Path(shutil.copytree(bundle / "node", tmp_path / name)) for name, bundle in bundles.items()}
    settings = ModelSettings([server.address], IMPATIENT, mode=ModeChoice.PREPARED, prepared=2)
    models = ModelRepository([ModelFolder(name, folder) for name, folder in folders.items()], settings)
    models.load_all()
    yield Node(models, folders)
    models.close(0)


def expected(bundle: Path) -> np.ndarray:
    from onnxruntime import InferenceSession

    return InferenceSession(bundle / "reference" / "model.onnx").run(None, {"x": X})[0]


def states(models: ModelRepository) -> dict[str, ModelState]:
    return {entry.name: entry.state for entry in models.entries()}


def test_models_of_one_node_and_one_server_answer_each_by_its_own_weights(node: Node, bundles: dict[str, Path]) -> None:
    answers = {name: node.ask(name) for name in MODELS}
    for name, bundle in bundles.items():
        assert np.abs(answers[name] - expected(bundle)).max() < 2e-2
    assert np.abs(answers["first"] - answers["second"]).max() > 0.1
    assert states(node.models) == dict.fromkeys(MODELS, ModelState.READY)
    assert node.models.ready
    model = node.models.get("second", "1")
    assert (model.name, model.plan_hash) == ("second", read_plan(node.folders["second"])[1])


def test_names_and_versions_that_are_not_there_are_refused(node: Node) -> None:
    with pytest.raises(UnknownModelError, match="expected one of"):
        node.models.get("third")
    with pytest.raises(UnknownModelError, match="version 1 only"):
        node.models.get("first", "2")
    for change in (node.models.load, node.models.unload):
        with pytest.raises(UnknownModelError):
            change("third")


def test_nothing_is_ready_before_it_is_loaded(bundles: dict[str, Path], server: EvaluatorService) -> None:
    folders = [ModelFolder(name, bundle / "node") for name, bundle in bundles.items()]
    models = ModelRepository(folders, ModelSettings([server.address], mode=ModeChoice.PREPARED, prepared=0))
    assert not models.ready
    assert states(models) == dict.fromkeys(MODELS, ModelState.UNAVAILABLE)
    with pytest.raises(ModelNotReadyError, match="not loaded yet"):
        models.get("first")
    models.load("first")
    assert not models.ready  # the second one was named too
    models.load("second")
    assert models.ready
    models.close(0)
    assert not models.ready


def test_unloaded_model_is_gone_and_wiped_and_the_other_answers(node: Node) -> None:
    model = node.models.get("first")
    assert model._pool is not None
    assert model._pool.wait_full(WAIT_S)
    secret = [array for prepared in model._pool._ready for array in prepared.material(0)]
    assert len(secret) == 4
    assert all(array.any() for array in secret)
    node.models.unload("first")
    assert model.status().pool_ready == 0
    assert not any(array.any() for array in secret)
    assert states(node.models) == {"first": ModelState.UNAVAILABLE, "second": ModelState.READY}
    assert node.models.ready  # nobody wants it any more
    with pytest.raises(ModelNotReadyError, match="it was unloaded"):
        node.models.get("first")
    with pytest.raises(ModelNotReadyError, match="being unloaded"):
        model.submit(Query({"x": X}, Channel.HTTP, "r"))
    node.ask("second")
    node.models.unload("first")  # again: nothing happens
    node.models.load("first")
    assert node.models.ready
    node.ask("first")


def test_model_is_replaced_without_a_gap(node: Node) -> None:
    stop, failures, answered = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                model = node.models.get("first")
                answered.append(model.submit(Query({"x": X}, Channel.HTTP, "r")).result(WAIT_S).outputs["y"])
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = node.models.get("first")
    for _ in range(2):
        node.models.load("first")
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    assert len(answered) > 4
    assert node.models.get("first") is not before
    assert before.submit(Query({"x": X}, Channel.HTTP, "r")).result(WAIT_S)  # its successor's queue


def test_query_that_comes_to_a_replaced_model_is_told_of_once(
    bundles: dict[str, Path], server: EvaluatorService
) -> None:
    notes = Notes()
    settings = ModelSettings([server.address], IMPATIENT, mode=ModeChoice.PREPARED, prepared=0)
    models = ModelRepository([ModelFolder("first", bundles["first"] / "node")], settings, notes)
    models.load_all()
    before = models.get("first")
    models.load("first")
    before.check_queue(Channel.HTTP, "r")
    assert before.submit(Query({"x": X}, Channel.HTTP, "r")).result(WAIT_S)
    models.close(0)
    assert notes.outcomes() == [Outcome.OK]


@pytest.mark.parametrize("change", ["load", "unload"])
def test_node_that_stops_waits_for_no_model_that_is_being_drained(
    node: Node, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = node.models.get("first")
    begun = threading.Event()

    def run(requests: object, *_: object) -> None:
        begun.set()
        while not before._replicas.closed:  # a server that says nothing for long
            time.sleep(0.01)
        raise RemoteProtocolError("the connection was closed")

    monkeypatch.setattr(before._engine, "infer_joined", run)
    future = before.submit(Query({"x": X}, Channel.HTTP, "r"))
    assert begun.wait(WAIT_S)
    changing = threading.Thread(target=getattr(node.models, change), args=("first",))
    changing.start()
    deadline = time.monotonic() + WAIT_S
    while node.models._places["first"].draining is not before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    closing = threading.Thread(target=node.models.close, args=(0.0,))
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    changing.join(WAIT_S)
    with pytest.raises(RemoteProtocolError):
        future.result(0)


def test_loading_again_that_fails_leaves_the_loaded_model_as_it_was(node: Node) -> None:
    before = node.models.get("first")
    (node.folders["first"] / "scales.safetensors").write_bytes(b"damaged")
    with pytest.raises(PlanError, match="not what was partitioned"):
        node.models.load("first")
    assert node.models.get("first") is before
    node.ask("first")
    entry = next(entry for entry in node.models.entries() if entry.name == "first")
    assert entry.state is ModelState.READY
    assert "not what was partitioned" in entry.reason
    node.models.unload("first")
    with pytest.raises(PlanError):
        node.models.load("first")
    assert states(node.models)["first"] is ModelState.UNAVAILABLE
    assert not node.models.ready  # it is wanted


def test_model_is_not_ready_while_all_its_servers_are_in_quarantine(node: Node) -> None:
    (link,) = node.models.get("first")._replicas.links
    for _ in range(ATTEMPTS):
        link.conduct.record_failure(0)
    assert states(node.models) == {"first": ModelState.UNAVAILABLE, "second": ModelState.READY}
    assert not node.models.ready
    (status,) = node.models.get("first").status().servers
    assert (status.in_quarantine, status.forgeries) == (True, ATTEMPTS)
    node.models.load("first")  # what an operator does
    assert node.models.ready


def test_status_tells_of_pool_servers_and_hints(node: Node, server: EvaluatorService) -> None:
    node.ask("first")
    model = node.models.get("first")
    assert model._pool is not None
    model._pool.wait_full(WAIT_S)
    status = model.status()
    assert (status.pool_ready, status.pool_size) == (2, 2)
    assert (status.queued_queries, status.queued_samples) == (0, 0)
    assert len(status.latencies_ms) == 1
    assert [found.name for found in status.servers] == [str(server.address)]
    assert not status.servers[0].resting
    assert status.hints_days_left is not None
    assert 29 < status.hints_days_left <= 30


def test_models_share_the_room_for_uploads_and_answers(node: Node) -> None:
    engines = [node.models.get(name)._engine for name in MODELS]
    assert engines[0]._kept is engines[1]._kept
    assert engines[0]._answers is engines[1]._answers


def test_names_come_from_plans_or_from_the_command_line(bundles: dict[str, Path]) -> None:
    first, second = (str(bundles[name] / "node") for name in MODELS)
    assert [f.name for f in parse_model_folders([first, second])] == ["first", "second"]
    assert [f.name for f in parse_model_folders([first, f"first-2={first}"])] == ["first", "first-2"]
    with pytest.raises(InputError, match="give one another name, as in first-2="):
        parse_model_folders([first, first])
    with pytest.raises(InputError, match="both models named 'second'"):
        parse_model_folders([f"second={first}", second])
    with pytest.raises(InputError, match="letters, digits"):
        parse_model_folders([f"a/b={first}"])
    with pytest.raises(PlanError, match="is missing"):
        parse_model_folders([first + "-absent"])


def test_card_is_the_folder_s_or_its_own_bundle_s(bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(bundles["first"], tmp_path / "bundle"))
    folder, plan_hash = bundle / "node", load_node(bundle / "node").plan_hash
    said: list[str] = []
    assert find_card(folder, plan_hash, Teller(said.append)) is None
    (bundle / "card.json").write_text(json.dumps({"epsilon": 3}))
    assert find_card(folder, plan_hash, Teller(said.append)) == {"epsilon": 3}
    assert find_card(folder, b"another plan", Teller(said.append)) is None  # who knows whose card that is
    (folder / "card.json").write_text(json.dumps({"epsilon": 2}))
    assert find_card(folder, plan_hash, Teller(said.append)) == {"epsilon": 2}
    assert said == []
    (folder / "card.json").write_text("{")
    assert find_card(folder, plan_hash, Teller(said.append)) is None
    assert "damaged" in said[0]


# -- the server -------------------------------------------------------------------------------------------------------


def test_server_refuses_a_plan_that_it_does_not_serve(server: EvaluatorService, dense_bundle: Path) -> None:
    bundle = load_node(dense_bundle / "node")
    link = ServerLink(server.address, bundle.plan_hash, block_shapes(bundle.plan), Limits())
    with pytest.raises(RefusedError) as caught, link.session():
        pass
    assert caught.value.code is FailureCode.PLAN
    link.close()


def test_plans_of_one_server_share_slots_and_keep_their_requests_apart(bundles: dict[str, Path]) -> None:
    merger = shared_merger()
    blocks = [BlockEvaluator(load_server(bundle / "server"), merger).prepared for bundle in bundles.values()]
    assert blocks[0] is not None
    assert blocks[1] is not None
    rows = np.random.default_rng(0).integers(0, 2**40, (3, blocks[0].values(0)[0]))
    made = [prepared._merger.evaluate((prepared, 0), rows) for prepared in blocks if prepared is not None]
    assert not np.array_equal(made[0], made[1])
    assert all(prepared is not None and prepared._merger is merger for prepared in blocks)
    assert [prepared.products for prepared in blocks if prepared is not None] == [1, 1]


# -- by frames --------------------------------------------------------------------------------------------------------


@pytest.fixture
def frames(node: Node) -> Iterator[NodeService]:
    service = NodeService(node.models, "first", LOOPBACK, Limits(), allow_trace=False)
    yield service
    service.stop(0)


def test_client_gets_the_model_that_it_names_or_the_first(frames: NodeService, bundles: dict[str, Path]) -> None:
    for name, found in (("", "first"), ("first", "first"), ("second", "second")):
        with connect(frames.address, model=name) as model:
            assert model.description.model == found
            assert np.abs(model.predict(X) - expected(bundles[found])).max() < 2e-2


def test_client_that_names_an_unknown_model_is_told_which_there_are(frames: NodeService) -> None:
    with pytest.raises(QueryFailedError, match="'third' here: expected one of") as caught:
        connect(frames.address, model="third")
    assert caught.value.code is QueryFailureCode.INPUT


def test_client_of_a_model_that_was_unloaded_is_told_and_answered_when_it_is_back(
    frames: NodeService, node: Node
) -> None:
    with connect(frames.address, model="second") as model:
        model.predict(X)
        node.models.unload("second")
        with pytest.raises(QueryFailedError, match="not ready") as caught:
            model.predict(X)
        assert caught.value.code is QueryFailureCode.BUSY
        node.models.load("second")
        model.predict(X)


@pytest.mark.parametrize("ask", [lambda model: model.query(X, statistics=True), lambda model: model.predict(X)])
def test_many_clients_by_frames_are_all_answered(frames: NodeService, ask: Callable[[object], object]) -> None:
    with connect(frames.address) as model:
        threads = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                for _ in range(3):
                    ask(model)
            except Exception as error:
                failures.append(error)

        for _ in range(40):
            threads.append(threading.Thread(target=run))
            threads[-1].start()
        for thread in threads:
            thread.join(WAIT_S)
        assert failures == []
