"""A server that computes something else is caught before its answer is decrypted; an honest one never.

Uploads of every mode talk to a server in this process that evaluates honestly and then cheats: no sockets, so that
thousands of trials take seconds.
"""

from __future__ import annotations

import logging
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import heinfer
import tests.parties
import trusted_node.workers as workers
from heinfer.errors import CiphertextError, IntegrityError, PlanError
from heinfer.plan import NodeBundle, load_node, load_server
from heinfer.plan.files import CHECKS_FILE, read_plan
from heinfer.plan.sealed import write_sealed
from heinfer.ring import RingParameters, pack, packed_bytes, unpack
from heinfer.server.evaluation import BlockEvaluator, pack_rows
from heinfer.server.evaluation import Upload as Arriving
from heinfer.wire import BlockAnswer, Chunk, Limits, Mode
from partitioner.rotation import rotate
from tests.parties import Parties, WatchedEvaluator, WatchedPool, parties
from tests.small_models import save_model
from trusted_node.batches import BatchMaterials, BatchUpload
from trusted_node.engine import AnyUpload, Engine
from trusted_node.integrity import ATTEMPTS, AnswerChecks, BlockCheck
from trusted_node.modes import ModeChoice
from trusted_node.preparation import PreparedQuery, Preparer
from trusted_node.prepared_uploads import PreparedUpload
from trusted_node.scaling import sample_peaks
from trusted_node.seal import SealContext, SecretContext
from trusted_node.statistics import QueryStatistics
from trusted_node.uploads import Upload
from trusted_node.workers import CryptoPool

Residues = np.ndarray
#: From (residues of all uploads so far: rows or samples first, answer) to the answer that is sent.
Attack = Callable[["CheatingSession", Residues], Residues]
SAMPLES = 2
#: In an ordinary run, and in a long one.
TRIALS, MANY_TRIALS = 150, 1000


class CheatingSession:
    """The server's end of a session: takes an upload, evaluates the block, and lets an attack change the answer."""

    def __init__(self, evaluators: list[BlockEvaluator], generator: np.random.Generator) -> None:
        self.evaluators = evaluators
        self.generator = generator
        self.attack: Attack = honest
        self.block, self.samples, self.mode = 0, 0, Mode.STANDARD
        self.sent = b""
        self.residues = np.empty(0)
        self.last: dict[tuple[int, Mode], Residues] = {}

    @property
    def modulus(self) -> int:
        return self.evaluators[0].bundle.plan.ring.modulus

    # -- what uploads call ----------------------------------------------------------------------------------------

    def open_request(self, block: int, samples: int, mode: Mode = Mode.STANDARD) -> None:
        self.block, self.samples, self.mode, self.sent = block, samples, mode, b""

    def send_rows(self, first_row: int, rows: int, data: bytes) -> None:
        self.sent += data

    def send(self, block: int, samples: int, mode: Mode, rows: Any) -> None:
        self.open_request(block, samples, mode)
        self.sent = bytes(rows)

    def accept(self, read: Callable[[BlockAnswer, Iterator[Chunk]], Any]) -> Any:
        data, rows = self.answer_bytes()
        return read(BlockAnswer(1, rows, 0.0), iter([Chunk(1, 0, rows, data)]))

    # -- what the server does -------------------------------------------------------------------------------------

    def evaluate(self, residues: Residues, evaluator: int = 0) -> Residues:
        """Evaluate the block honestly, with the right weights or with wrong ones."""
        found = self.evaluators[evaluator]
        if self.mode is Mode.PREPARED:
            assert found.prepared is not None
            packed = found.prepared.evaluate(self.block, pack(residues))
            return unpack(packed.reshape(len(residues), -1), found.prepared.values(self.block)[1], self.modulus)
        return found.evaluate(self.block, residues)

    def answer_bytes(self) -> tuple[bytes, int]:
        degree = self.evaluators[0].bundle.plan.ring.degree
        if self.mode is Mode.PREPARED:
            prepared = self.evaluators[0].prepared
            assert prepared is not None
            up = prepared.values(self.block)[0]
            packed = np.frombuffer(self.sent, np.uint8).reshape(self.samples, -1)
            self.residues = unpack(packed, up, self.modulus)
        elif self.mode is Mode.BATCH:
            packed = np.frombuffer(self.sent, np.uint8).reshape(-1, packed_bytes(self.samples))
            self.residues = unpack(packed, self.samples, self.modulus)
        else:
            rows = len(self.sent) // (packed_bytes(self.samples) + packed_bytes(degree))
            arriving = Arriving(rows, self.samples, degree, self.modulus)
            arriving.add(0, rows, self.sent)
            self.residues = arriving.residues
        right = self.evaluate(self.residues)
        given = self.attack(self, right.copy())
        self.last[self.block, self.mode] = right
        if self.mode is Mode.STANDARD:
            return b"".join(data for _, _, data in pack_rows(given, self.samples, len(given))), len(given)
        return pack(given).tobytes(), len(given)


# -- attacks ------------------------------------------------------------------------------------------------------


def honest(_: CheatingSession, answer: Residues) -> Residues:
    return answer


def wrong_weights(session: CheatingSession, _: Residues) -> Residues:
    return session.evaluate(session.residues, 1)


def one_flipped_output(session: CheatingSession, answer: Residues) -> Residues:
    place = tuple(session.generator.integers(0, n) for n in answer.shape)
    answer[place] = (answer[place] + session.generator.integers(1, session.modulus)) % session.modulus
    return answer


def opposite_errors(session: CheatingSession, answer: Residues) -> Residues:
    """+d in one sample and -d in another, at the same output: their sum is right."""
    d = session.generator.integers(1, session.modulus)
    samples = answer if session.mode is Mode.PREPARED else answer.T
    output = session.generator.integers(0, samples.shape[1])
    samples[0, output] = (samples[0, output] + d) % session.modulus
    samples[1, output] = (samples[1, output] - d) % session.modulus
    return answer


def stale(session: CheatingSession, _: Residues) -> Residues:
    return session.last[session.block, session.mode]


def zeros(_: CheatingSession, answer: Residues) -> Residues:
    return 0 * answer


def another_block(session: CheatingSession, answer: Residues) -> Residues:
    """The honest answer of the other block, which has the same sizes."""
    own, session.block = session.block, 1 - session.block
    other = session.evaluate(session.residues)
    session.block = own
    assert other.shape == answer.shape
    return other


def too_large(session: CheatingSession, answer: Residues) -> Residues:
    place = tuple(session.generator.integers(0, n) for n in answer.shape)
    answer[place] = session.generator.integers(session.modulus, 2**50)
    return answer


def transparent(session: CheatingSession, answer: Residues) -> Residues:
    """a = 0 and b = 1: a ciphertext that SEAL refuses to decrypt."""
    answer[:] = 0
    answer[:, : session.samples] = 1
    return answer


MODES = ("prepared", "batch", "standard")
ATTACKS = [wrong_weights, one_flipped_output, opposite_errors, stale, zeros, another_block, too_large]


# -- the node's end -----------------------------------------------------------------------------------------------


class LocalPool(CryptoPool):
    """Works in this process: thousands of small tasks are not worth handing over."""

    def __init__(self, parameters: RingParameters) -> None:
        super().__init__(parameters, 1)
        self._context = SealContext(parameters)

    def _submit(self, function: Callable[..., Any], *arguments: object) -> Any:
        future: Future[Any] = Future()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers, "_seal", [self._context])
            try:
                future.set_result(function(*arguments))
            except CiphertextError as error:
                future.set_exception(error)
        return future


@dataclass
class Bench:
    """A node and a server of one model, and what they need to talk without sockets."""

    node: NodeBundle
    session: CheatingSession
    checks: AnswerChecks
    preparer: Preparer
    materials: BatchMaterials
    pool: CryptoPool

    def run(self, mode: str, block: int, attack: Attack, samples: int = SAMPLES) -> None:
        """Send one upload of random values and receive its answer."""
        statistics = QueryStatistics.empty(len(self.node.plan.blocks), self.node.plan.rounds)
        values = [
            self.session.generator.normal(size=(samples, *t.shape)).astype(np.float32)
            for t in self.node.plan.blocks[block].inputs
        ]
        self.session.attack = attack
        upload = self.upload(mode, block, samples, statistics, self.checks.of(block))
        try:
            upload.send(values, [sample_peaks(x) for x in values])
            upload.receive(0)
        finally:
            upload.wipe()

    def upload(
        self, mode: str, block: int, samples: int, statistics: QueryStatistics, check: BlockCheck | None
    ) -> AnyUpload:
        session: Any = self.session
        if mode == "prepared":
            return PreparedUpload(self.node, block, session, [self.preparer.prepare(samples)], statistics, check)
        if mode == "batch":
            return BatchUpload(self.node, block, session, self.materials, statistics, Limits(), check)
        return Upload(self.node, block, session, self.pool, statistics, Limits(), check)


def square_model(path: Path, scale: float = 1.0) -> Path:
    """x (4) -> Gemm -> Relu -> Gemm -> y (4): two blocks of the same sizes."""
    generator = np.random.default_rng(6)
    first, second = scale * generator.normal(size=(2, 4, 4)).astype(np.float32)
    return save_model(
        path,
        [
            helper.make_node("MatMul", ["x", "first"], ["h"], name="one"),
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("MatMul", ["r", "second"], ["y"], name="two"),
        ],
        {"x": [4]},
        {"y": [4]},
        {"first": first, "second": second},
    )


@pytest.fixture(scope="module")
def square_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("square")
    heinfer.partition(square_model(folder / "right.onnx"), folder / "right", batch_hints=True)
    return folder / "right"


@pytest.fixture(scope="module")
def bench(square_bundle: Path) -> Bench:
    right = BlockEvaluator(load_server(square_bundle / "server"))
    arrays = dict(right.bundle.arrays)
    name = next(n for n, a in arrays.items() if a.ndim == 2)
    arrays[name] = arrays[name].copy()
    arrays[name][1, 2] += 1  # one weight, by one unit
    other = next(n for n, a in arrays.items() if a.ndim == 2 and n != name)
    arrays[other] = arrays[other].copy()
    arrays[other][0, 0] -= 1
    wrong = BlockEvaluator(type(right.bundle)(right.bundle.plan, right.bundle.plan_hash, arrays, right.bundle.forms))
    node = load_node(square_bundle / "node")
    session = CheatingSession([right, wrong], np.random.default_rng(11))
    return Bench(
        node, session, AnswerChecks(node), Preparer(node), BatchMaterials(node), LocalPool(node.plan.ring.parameters)
    )


@pytest.fixture
def no_decryption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever decrypts fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("an answer was decrypted before it was checked")

    monkeypatch.setattr(PreparedQuery, "decrypt", refuse)
    monkeypatch.setattr(SecretContext, "decrypt", refuse)
    monkeypatch.setattr(BatchUpload, "_decrypt", refuse)


CASES = [*((mode, attack) for mode in MODES for attack in ATTACKS), ("standard", transparent)]


def catch(bench: Bench, mode: str, attack: Attack, trials: int) -> None:
    """Forge answers of both blocks in turn; every one must be caught, and none decrypted."""
    for block in (0, 1):  # something to be stale
        with pytest.raises(AssertionError, match="decrypted"):
            bench.run(mode, block, honest)
    for trial in range(trials):
        with pytest.raises(CiphertextError if attack is too_large else IntegrityError):
            bench.run(mode, trial % 2, attack)


def name_of(part: str | Attack) -> str:
    return part if isinstance(part, str) else part.__name__


@pytest.mark.parametrize(("mode", "attack"), CASES, ids=name_of)
@pytest.mark.usefixtures("no_decryption")
def test_every_forgery_is_caught_before_it_is_decrypted(bench: Bench, mode: str, attack: Attack) -> None:
    catch(bench, mode, attack, TRIALS)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "attack"), CASES, ids=name_of)
@pytest.mark.usefixtures("no_decryption")
def test_each_of_1000_forgeries_is_caught(bench: Bench, mode: str, attack: Attack) -> None:
    catch(bench, mode, attack, MANY_TRIALS)


@pytest.mark.parametrize("mode", MODES)
def test_an_honest_server_is_never_refused(bench: Bench, mode: str) -> None:
    for trial in range(TRIALS):
        bench.run(mode, trial % 2, honest, 1 + trial % 3)


@pytest.mark.long
def test_an_honest_server_is_never_refused_in_100000_evaluations(bench: Bench) -> None:
    done, trial = 0, 0
    while done < 100_000:  # one comparison a sample
        samples = 1 + trial % 64
        bench.run("prepared", trial % 2, honest, samples)
        done, trial = done + samples, trial + 1


# -- what becomes of it ------------------------------------------------------------------------------------------


class CheatingEvaluator(WatchedEvaluator):
    """Answers with anything."""

    def evaluate(self, block: int, residues: Residues) -> Residues:
        answer = super().evaluate(block, residues)
        return np.random.default_rng(3).integers(0, self.bundle.plan.ring.modulus, answer.shape)


@contextmanager
def cheated(bundle: Path, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parties]:
    monkeypatch.setattr(tests.parties, "WatchedEvaluator", CheatingEvaluator)
    with parties(bundle, pool) as both:
        yield both


def test_a_server_is_not_asked_after_sixteen_forgeries(
    square_bundle: Path, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = {"x": np.ones((1, 4), np.float32)}
    with cheated(square_bundle, pool, monkeypatch) as both, caplog.at_level(logging.DEBUG):
        for count in range(ATTEMPTS):
            with pytest.raises(IntegrityError, match="block 0 is not what the model computes"):
                both.engine.infer(x)
            assert both.engine.replicas.links[0].conduct.failures == count + 1
        asked = len(both.evaluator.requests)
        with pytest.raises(IntegrityError, match="quarantine"):
            both.engine.infer(x)
        assert len(both.evaluator.requests) == asked == ATTEMPTS
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == ATTEMPTS
    assert told[-1].endswith("its answer to block 0 is not what the model computes (16 of 16)")


def test_without_checks_the_forgery_goes_through(
    square_bundle: Path, pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack is a real one: what the check prevents is a wrong result that looks right."""
    x = {"x": np.ones((1, 4), np.float32)}
    with parties(square_bundle, pool) as both:
        right = both.engine.infer(x).outputs["y"]
    with cheated(square_bundle, pool, monkeypatch) as both:
        engine = Engine(
            both.engine.bundle, both.engine.replicas, pool, Limits(), None, ModeChoice.STANDARD, check=False
        )
        wrong = engine.infer(x).outputs["y"]
        engine.close()
    assert np.isfinite(wrong).all()
    assert not np.array_equal(right, wrong)


# -- where the secrets are ---------------------------------------------------------------------------------------


def test_checks_are_the_owners_alone_and_renewed(square_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(square_bundle, copy)
    path = copy / "node" / CHECKS_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list((copy / "server").glob("*check*"))
    before = load_node(copy / "node").checks
    rotate(copy)
    after = load_node(copy / "node").checks
    assert before is not None
    assert after is not None
    assert before.seed != after.seed
    assert not any(np.array_equal(a, b) for a, b in zip(before.packed, after.packed, strict=True))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["missing", "cut", "another plan's", "too few values", "open to others"])
def test_damaged_checks_are_refused(square_bundle: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(square_bundle, copy)
    path = copy / "node" / CHECKS_FILE
    plan, plan_hash = read_plan(copy / "node")
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "open to others":
        path.chmod(0o640)
    elif damage == "another plan's":
        heinfer.partition(square_model(tmp_path / "other.onnx", 2.0), tmp_path / "other")
        shutil.copy(tmp_path / "other" / "node" / CHECKS_FILE, path)
    else:
        write_sealed(path, bytes(32), plan_hash, {str(b): np.zeros(3, np.uint8) for b in range(len(plan.blocks))})
    with pytest.raises(PlanError, match=CHECKS_FILE):
        load_node(copy / "node")
