"""Requests for deep blocks: what the server makes of wrong ones, full disks, nodes that go, and of its own end."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from heinfer.errors import CiphertextError, HeinferError, InputError, PlanError
from heinfer.plan.deep import DeepBlock, evaluate_deep
from heinfer.plan.deep_noise import deep_error_bounds
from heinfer.plan.mapping import MappedFile
from heinfer.ring import pack, packed_bytes, unpack
from heinfer.server.deep import DeepRequest
from heinfer.server.polynomial import files as deep_files
from heinfer.server.polynomial import units
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.server.polynomial.resources import MOST_REQUESTS, DeepResources
from heinfer.server.service import open_deep
from heinfer.wire import BlockRequest, Chunk, FailureCode, Limits, Mode, RefusedError
from heinfer.wire.messages import failure_code
from tests.server.test_polynomial import RESULT, SCALE, make_block, new_secret
from tests.waiting import wait_for
from trusted_node.deep import DeepSecret

ROWS = 50
#: Seconds in which a process starts on a busy machine, and in which one that is told to must end.
START_S, END_S = 60.0, 10.0


class Upload:
    """A good upload for a block of one square, and what its answer must be."""

    def __init__(self) -> None:
        self.block, self.arrays = make_block("square", 2)
        self.secret: DeepSecret = new_secret(self.block)
        self.x = np.random.default_rng(2).uniform(-1, 1, (50, 20))
        degree = self.block.chain.degree
        residues = [self.secret.make_keys(), self.secret.encrypt(self.x.T, SCALE)]
        self.rows = np.concatenate([pack(r.reshape(-1, degree)) for r in residues])

    def chunks(self, rows: np.ndarray | None = None) -> Iterator[Chunk]:
        held = self.rows if rows is None else rows
        for first in range(0, len(held), ROWS):
            part = held[first : first + ROWS]
            yield Chunk(1, first, len(part), part.tobytes())

    def check(self, chunks: Iterator[Chunk]) -> None:
        """Decrypt an answer and compare it."""
        block = self.block
        packed = np.frombuffer(b"".join(c.data for c in chunks), np.uint8).reshape(-1, packed_bytes(block.chain.degree))
        assert len(packed) == block.rows_down
        primes = block.chain.primes[: block.result_primes]
        rows = [unpack(row[None], block.chain.degree, primes[n % len(primes)])[0] for n, row in enumerate(packed)]
        residues = np.array(rows).reshape(block.output_count, 2, len(primes), -1)
        found = self.secret.decrypt(residues, RESULT, len(self.x)).T
        error = np.abs(found - evaluate_deep(block, self.arrays, [self.x])[0]).max(axis=0)
        assert np.all(error < deep_error_bounds(block, self.arrays).outputs[0])


@pytest.fixture(scope="module")
def upload() -> Upload:
    return Upload()


@pytest.fixture
def evaluator(upload: Upload, tmp_path: Path) -> DeepEvaluator:
    return DeepEvaluator(upload.block, upload.arrays, DeepResources(tmp_path, workers=0))


def open_request(evaluator: DeepEvaluator) -> DeepRequest:
    block: DeepBlock = evaluator.block
    request = BlockRequest(bytes(16), bytes(32), 0, 1, 50, block.rows_up, 0, Mode.DEEP)
    return DeepRequest(evaluator, request, Limits(), lambda: None)


def test_two_requests_at_once_take_turns_and_leave_nothing(
    upload: Upload, evaluator: DeepEvaluator, tmp_path: Path
) -> None:
    def answer(_: int) -> list[Chunk]:
        request = open_request(evaluator)
        for chunk in upload.chunks():
            request.add(chunk)
        rows, chunks = request.evaluate()
        assert rows == upload.block.rows_down
        return list(chunks)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(answer, range(2)))
    assert answers[0] == answers[1]
    upload.check(iter(answers[0]))
    assert not list(tmp_path.iterdir())


def test_weights_that_are_written_to_refuse_requests_and_the_answer_of_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, arrays = make_block("square", 2)
    path, scratch = tmp_path / "weights.safetensors", tmp_path / "scratch"
    scratch.mkdir()
    save_file(arrays, path)
    file = MappedFile(path)
    file.digest()
    bundle = SimpleNamespace(plan=SimpleNamespace(blocks=()), check_unchanged=file.check_unchanged)
    evaluator = DeepEvaluator(block, file.arrays(), DeepResources(scratch, workers=0))
    loaded = SimpleNamespace(bundle=bundle, deep=lambda index: evaluator)
    announced = BlockRequest(bytes(16), bytes(32), 0, 1, 50, block.rows_up, 0, Mode.DEEP)
    monkeypatch.setattr(evaluator, "evaluate_stored", lambda *_: [])
    first, second = (open_deep(loaded, announced, Limits()) for _ in range(2))  # type: ignore[arg-type]
    assert first.evaluate(lambda: False)[0] == block.rows_down
    first.close()

    def write_meanwhile(*_: object) -> list[deep_files.Store]:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        os.utime(path, ns=(1, 1))
        return []

    monkeypatch.setattr(evaluator, "evaluate_stored", write_meanwhile)
    with pytest.raises(PlanError, match="was written to"):
        second.evaluate(lambda: False)
    second.close()  # as the service does
    with pytest.raises(PlanError, match="was written to"):
        open_deep(loaded, announced, Limits())  # type: ignore[arg-type]
    assert not list(scratch.iterdir())


def test_a_third_request_is_told_to_come_again(evaluator: DeepEvaluator, tmp_path: Path) -> None:
    held = [open_request(evaluator) for _ in range(MOST_REQUESTS)]
    with pytest.raises(RefusedError) as refused:
        open_request(evaluator)
    assert refused.value.code is FailureCode.BUSY
    for request in held:
        request.close()
        request.close()  # once more is no harm
    open_request(evaluator).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("row", [0, -1], ids=["keys", "inputs"])
def test_rows_that_are_no_residues_are_refused(
    row: int, upload: Upload, evaluator: DeepEvaluator, tmp_path: Path
) -> None:
    rows = upload.rows.copy()
    rows[row] = 255
    request = open_request(evaluator)
    with pytest.raises(CiphertextError):
        deque(map(request.add, upload.chunks(rows)), maxlen=0)
    request.close()  # as the service does
    assert not list(tmp_path.iterdir())


def test_a_request_that_does_not_come_to_its_end_leaves_nothing(
    upload: Upload, evaluator: DeepEvaluator, tmp_path: Path
) -> None:
    request = open_request(evaluator)
    request.add(next(upload.chunks()))
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    request.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("files", [0, 1, 2, 3], ids=["keys", "inputs", "first value", "result"])
def test_a_full_disk_fails_one_request(
    files: int, upload: Upload, evaluator: DeepEvaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def allocate(descriptor: int, offset: int, size: int) -> None:
        made.append(size)
        if len(made) > files:
            raise OSError(errno.ENOSPC, "no space left on device")
        deep_files.os.ftruncate(descriptor, size)

    monkeypatch.setattr(deep_files.os, "posix_fallocate", allocate)
    if files < 2:
        with pytest.raises(OSError, match="no space"):
            open_request(evaluator)
    else:
        request = open_request(evaluator)
        deque(map(request.add, upload.chunks()), maxlen=0)
        with pytest.raises(OSError, match="no space"):
            request.evaluate()
        request.close()
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    request = open_request(evaluator)
    for chunk in upload.chunks():
        request.add(chunk)
    upload.check(request.evaluate()[1])


@pytest.mark.parametrize(("activation", "degree"), [("square", 2), ("polynomial", 3)])
def test_room_on_the_disk_is_computed_exactly(
    activation: str, degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the most that lies there at any time: measured whenever a file is made."""
    block, arrays = make_block(activation, degree)
    secret, seen = new_secret(block), list[int]()
    create = deep_files.Store.create

    def watched(store: deep_files.Store) -> np.ndarray:
        made = create(store)
        seen.append(sum(path.stat().st_size for path in store.path.parent.iterdir()))
        return made

    monkeypatch.setattr(deep_files.Store, "create", watched)
    evaluator = DeepEvaluator(block, arrays, DeepResources(tmp_path, workers=0))
    evaluator.evaluate(secret.encrypt(np.zeros((20, 1)), SCALE), secret.make_keys())
    assert evaluator.scratch_bytes == max(seen)


def test_a_request_waits_outside_while_others_hold_the_room(upload: Upload, tmp_path: Path) -> None:
    needs = DeepEvaluator(upload.block, upload.arrays).scratch_bytes
    resources = DeepResources(tmp_path, 2 * needs - 1, workers=0)
    evaluator = DeepEvaluator(upload.block, upload.arrays, resources)
    first = open_request(evaluator)
    assert resources.space.used == needs
    written = list(tmp_path.iterdir())
    for _ in range(MOST_REQUESTS):  # a refused one keeps neither room nor place
        with pytest.raises(RefusedError) as refused:
            open_request(evaluator)
        assert refused.value.code is FailureCode.BUSY
        assert "disk" in str(refused.value)
    assert list(tmp_path.iterdir()) == written
    first.close()
    assert resources.space.used == 0
    open_request(evaluator).close()


def test_a_request_that_never_fits_is_refused_for_good(
    upload: Upload, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs = DeepEvaluator(upload.block, upload.arrays).scratch_bytes
    for total, fits in ((needs, True), (needs - 1, False)):
        evaluator = DeepEvaluator(upload.block, upload.arrays, DeepResources(tmp_path, total, workers=0))
        if fits:
            open_request(evaluator).close()
        else:
            with pytest.raises(InputError, match="--scratch-bytes") as refused:
                open_request(evaluator)
            assert failure_code(refused.value) is FailureCode.FAILED  # which a node does not ask again
    assert "--scratch-bytes" in caplog.text
    assert not list(tmp_path.iterdir())


def test_files_are_made_of_blocks_not_of_holes(tmp_path: Path) -> None:
    store = deep_files.Store(tmp_path / "value", (3, 2, 2, 4096))
    store.create()
    found = store.path.stat()
    assert found.st_size == 8 * 3 * 2 * 2 * 4096
    assert found.st_blocks * 512 >= found.st_size


def test_processes_end_with_an_evaluation_that_is_stopped(
    upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 1)  # one row a unit
    evaluator = DeepEvaluator(upload.block, upload.arrays, DeepResources(tmp_path, workers=1))
    before = set(multiprocessing.active_children())
    request = open_request(evaluator)
    for chunk in upload.chunks():
        request.add(chunk)
    failed: list[BaseException] = []

    def evaluate() -> None:
        try:
            request.evaluate()
        except HeinferError as error:
            failed.append(error)
        request.close()

    thread = threading.Thread(target=evaluate)
    thread.start()
    wait_for(lambda: set(multiprocessing.active_children()) - before, within_s=START_S)
    evaluator.resources.stop()
    thread.join(END_S)
    assert failed
    assert "stopped" in str(failed[0])
    wait_for(lambda: not set(multiprocessing.active_children()) - before, within_s=END_S)
    assert not list(tmp_path.iterdir())
    with pytest.raises(HeinferError, match="stopped"):
        open_request(evaluator).evaluate()
