"""A node that hangs up while its deep block is evaluated: the server finds out, stops, and lets go of everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heinfer.plan import load_server
from heinfer.ring import pack
from heinfer.server.evaluation import BlockEvaluator
from heinfer.server.polynomial import units
from heinfer.server.polynomial.resources import DeepResources
from heinfer.server.polynomial.running import DeepRunner
from heinfer.server.service import EvaluatorService
from heinfer.wire import Limits, Mode, block_shapes
from tests.parties import LOOPBACK, refusal
from tests.partitioner.deep_examples import partition_square
from tests.waiting import wait_for
from trusted_node.deep import DeepContext
from trusted_node.link import ServerLink

END_S = 20.0
SAMPLES = 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x (3) -> Gemm -> square -> Gemm -> y (2), one deep block of 4 and 2 rows."""
    return partition_square(tmp_path_factory.mktemp("deep"))[0]


class Slow:
    """Units that wait until they may go on, and are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on, self.runs = threading.Event(), threading.Event(), 0
        monkeypatch.setattr(units, "UNIT_BYTES", 1)  # one row a unit
        run = DeepRunner.run

        def slow(*arguments: object) -> None:
            self.runs += 1
            self.begun.set()
            assert self.may_go_on.wait(END_S)
            run(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(DeepRunner, "run", slow)


class Serving:
    """A server of the bundle without processes, and what a node would upload."""

    def __init__(self, bundle: Path, folder: Path) -> None:
        self.resources = DeepResources(folder, workers=0)
        loaded = load_server(bundle / "server")
        self.service = EvaluatorService(BlockEvaluator(loaded, None, self.resources), LOOPBACK, Limits())
        (block,) = loaded.plan.deep
        context = DeepContext(block.chain.parameters)
        secret = context.open(context.generate_secret())
        inputs = secret.encrypt(np.zeros((block.input_count, SAMPLES)), block.input_scale)
        rows = [pack(r.reshape(-1, block.chain.degree)) for r in (secret.make_keys(), inputs)]
        self.rows, self.rows_down = np.concatenate(rows).tobytes(), block.rows_down
        self.link = ServerLink(self.service.address, loaded.plan_hash, block_shapes(loaded.plan), Limits())


@pytest.fixture
def serving(bundle: Path, tmp_path: Path) -> Iterator[Serving]:
    made = Serving(bundle, tmp_path)
    yield made
    made.link.close()
    made.service.stop(0)


def test_an_evaluation_ends_when_its_node_hangs_up(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    session = serving.link.acquire()
    session.send(0, SAMPLES, Mode.DEEP, serving.rows)
    assert slow.begun.wait(END_S)
    assert serving.resources.space.used > 0
    session.close()
    slow.may_go_on.set()
    wait_for(lambda: serving.service.connections().failed == 1)
    wait_for(lambda: serving.service.connections().served == 0)
    assert slow.runs == 1  # of six
    assert serving.resources.space.used == 0
    assert serving.service.memory.used == 0
    assert not list(tmp_path.iterdir())


def test_an_evaluation_goes_on_for_a_node_that_is_there_though_the_server_is_to_stop(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is told to stop hears no more, which must not look like a node that has gone."""
    slow = Slow(monkeypatch)
    session = serving.link.acquire()
    request = session.send(0, SAMPLES, Mode.DEEP, serving.rows)
    assert slow.begun.wait(END_S)
    stopping = threading.Thread(target=serving.service.stop, args=(END_S,))
    stopping.start()
    (connection,) = serving.service._server._serving
    wait_for(lambda: connection._input_ended)
    slow.may_go_on.set()
    answer, chunks = session.receive(request)
    assert sum(chunk.rows for chunk in chunks) == answer.rows == serving.rows_down
    session.close()
    stopping.join(END_S)
    assert not stopping.is_alive()
    assert slow.runs == 6


def test_a_server_whose_disk_can_never_hold_a_request_does_not_start(bundle: Path) -> None:
    message = refusal("serve", bundle / "server", "--listen", "127.0.0.1:0", "--scratch-bytes", "1MB")
    assert "deep block takes" in message
    assert "--scratch-bytes" in message
    assert "4GiB" in refusal("serve", bundle / "server", "--scratch-bytes", "much")
