"""Queries with hints for batches: many samples of one query under one secret, b alone on the wire."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import LocalProtocolError, PlanError
from heinfer.plan import batch_polynomials, load_node, load_reference, load_server, public_polynomials, read_plan
from heinfer.plan.hints import has_batch_hints
from heinfer.ring import NOISE_LIMIT, packed_bytes
from heinfer.wire import Mode
from partitioner import partition, rotate
from tests.parties import Parties, WatchedPool, parties
from tests.plan.test_hints import resealed
from tests.small_models import convolution_model, logarithm_model, two_sided_model
from trusted_node import batches
from trusted_node.batches import BatchMaterials, BatchUpload
from trusted_node.engine import DataError
from trusted_node.modes import ModeChoice, choose_mode
from trusted_node.sampling import draw_ternary
from trusted_node.simulation import estimate_error

SAMPLES = 40
MODELS = {
    "convolution": (convolution_model, {"x": (2, 6, 6)}, -1.0),
    "two_sided": (two_sided_model, {"u": (3,), "v": (2,)}, -1.0),
    "logarithm": (logarithm_model, {"x": (3,)}, 0.1),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (build, _, _) in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        partition(build(made[name] / "model.onnx"), made[name] / "bundle", batch_hints=True)
    return made


@pytest.fixture(autouse=True)
def always_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches too are taken as batches."""
    monkeypatch.setattr("trusted_node.modes.forecast_batch", lambda plan, samples: 0.0)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[np.ndarray]]:
    """Copies of the secrets that are drawn for batches."""
    drawn: list[np.ndarray] = []

    def draw(count: int, degree: int) -> np.ndarray:
        made = draw_ternary(count, degree)
        drawn.append(made.copy())
        return made

    monkeypatch.setattr(batches, "draw_ternary", draw)
    return drawn


def inputs(name: str, samples: int = SAMPLES, seed: int = 0) -> dict[str, np.ndarray]:
    _, shapes, low = MODELS[name]
    generator = np.random.default_rng(seed)
    return {n: generator.uniform(low, 1, (samples, *shape)).astype(np.float32) for n, shape in shapes.items()}


def watch(both: Parties) -> list[tuple[int, np.ndarray]]:
    """Keep what the server evaluates, (block, residues (rows, samples)); it still evaluates it."""
    found: list[tuple[int, np.ndarray]] = []
    honest = both.evaluator.evaluate

    def evaluate(block: int, residues: np.ndarray) -> np.ndarray:
        found.append((block, residues.copy()))
        return honest(block, residues)

    both.evaluator.evaluate = evaluate  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("samples", [1, SAMPLES, 2048 + 5])
def test_batch_agrees_with_standard_mode_within_the_estimate(
    name: str, samples: int, folders: dict[str, Path], pool: WatchedPool
) -> None:
    bundle, x = folders[name] / "bundle", inputs(name, samples)
    plan, _ = read_plan(bundle)
    few = {key: value[:64] for key, value in x.items()}
    node, server = load_node(bundle / "node"), load_server(bundle / "server")
    estimate = estimate_error(node, server, load_reference(bundle, plan), few)
    with parties(bundle, pool) as both:
        standard = both.engine.infer(x)
    with parties(bundle, pool, mode=ModeChoice.PREPARED) as both:
        batch = both.engine.infer(x)
    assert (standard.statistics.mode, batch.statistics.mode) == ("standard", "batch")
    assert batch.statistics.groups == -(-samples // 2048)
    for key, want in standard.outputs.items():
        assert batch.outputs[key].shape == want.shape
        assert np.abs(batch.outputs[key] - want).max() <= 2 * estimate + 1e-5 * np.abs(want).max()


def test_batch_sends_b_alone_and_each_coefficient_with_noise(
    folders: dict[str, Path], pool: WatchedPool, secrets: list[np.ndarray]
) -> None:
    bundle = folders["convolution"] / "bundle"
    node = load_node(bundle / "node")
    q, degree = node.plan.ring.modulus, node.plan.ring.degree
    zeros = {"x": np.zeros((SAMPLES, 2, 6, 6), np.float32)}
    with parties(bundle, pool, mode=ModeChoice.PREPARED) as both:
        found = watch(both)
        statistics = both.engine.infer(zeros).statistics
    assert len(secrets) == len(found) == len(node.plan.blocks)
    assert len({secret.tobytes() for secret in secrets}) == len(secrets)
    assert node.hints is not None
    for cost, block in zip(statistics.blocks, node.plan.blocks, strict=True):
        assert cost.bytes_up == block.input_rows * packed_bytes(SAMPLES)
        assert cost.bytes_down == block.output_rows * packed_bytes(SAMPLES)
    block, residues = found[0]
    public = batch_polynomials(node.plan, node.plan_hash, node.hints.seed, block)
    matrix = np.stack([negacyclic_row(secrets[0][0], j) for j in range(SAMPLES)])  # (samples, N): a @ it is a s
    noise = []
    for row, b in enumerate(residues):
        product = np.array([int(np.sum(public[row].astype(object) * line)) % q for line in matrix])
        centred = (b + product) % q
        noise.append(np.where(centred > q // 2, centred - q, centred))
    assert np.abs(noise).max() <= NOISE_LIMIT
    assert 2.9 < np.std(noise) < 3.6
    assert (np.abs(noise) > 0).mean() > 0.8
    assert residues.shape == (72, SAMPLES)
    assert degree == 2048


def negacyclic_row(secret: np.ndarray, coefficient: int) -> np.ndarray:
    """Return r with (a s)[coefficient] = sum_i a_i r_i."""
    index = coefficient - np.arange(len(secret))
    return np.where(index >= 0, 1, -1) * secret[index % len(secret)].astype(np.int64)


def test_batch_polynomials_are_not_those_of_single_samples(folders: dict[str, Path]) -> None:
    node = load_node(folders["convolution"] / "bundle" / "node")
    assert node.hints is not None
    seen: set[bytes] = set()
    for block in range(len(node.plan.blocks)):
        for make in (public_polynomials, batch_polynomials):
            for polynomial in make(node.plan, node.plan_hash, node.hints.seed, block):
                assert polynomial.tobytes() not in seen
                seen.add(polynomial.tobytes())


def test_batch_upload_wipes_its_secret_even_when_nothing_comes_back(folders: dict[str, Path]) -> None:
    node = load_node(folders["two_sided"] / "bundle" / "node")

    class Session:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("gone")

    upload = BatchUpload(node, 0, Session(), BatchMaterials(node), None, None, None)  # type: ignore[arg-type]
    values = [np.ones((2, *t.shape), np.float32) for t in node.plan.blocks[0].inputs]
    with pytest.raises(RuntimeError):
        upload.send(values, [np.ones(2) for _ in values])
    assert upload._lanes.any()
    with pytest.raises(LocalProtocolError):
        upload.send(values, [np.ones(2) for _ in values])
    upload.wipe()
    assert not upload._lanes.any()


def test_batch_upload_of_another_process_or_after_wipe_sends_nothing(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = load_node(folders["two_sided"] / "bundle" / "node")
    values = [np.ones((2, *t.shape), np.float32) for t in node.plan.blocks[0].inputs]
    for spoil in ("wipe", "process"):
        upload = BatchUpload(node, 0, None, BatchMaterials(node), None, None, None)  # type: ignore[arg-type]
        if spoil == "wipe":
            upload.wipe()
        else:
            monkeypatch.setattr(upload, "_owner", -1)
        with pytest.raises(LocalProtocolError):
            upload.send(values, [np.ones(2) for _ in values])


def test_batch_with_nan_inside_looks_the_same_to_the_server(folders: dict[str, Path], pool: WatchedPool) -> None:
    shapes = []
    for low in (0.5, -5.0):
        with parties(folders["logarithm"] / "bundle", pool, mode=ModeChoice.PREPARED) as both:
            found = watch(both)
            x = {"x": np.full((SAMPLES, 3), low, np.float32)}
            if low < 0:
                with pytest.raises(DataError):
                    both.engine.infer(x)
            else:
                both.engine.infer(x)
            shapes.append([(block, residues.shape) for block, residues in found])
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 3


def test_rotation_keeps_batch_hints_and_renews_them(folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(folders["two_sided"] / "bundle", bundle)
    before = load_node(bundle / "node").hints
    rotate(bundle)
    after = load_node(bundle / "node").hints
    assert before is not None
    assert after is not None
    assert before.batch is not None
    assert after.batch is not None
    assert all((one != two).any() for one, two in zip(before.batch, after.batch, strict=True))
    assert has_batch_hints(bundle / "node")


def test_batch_hints_are_made_on_request_only(dense_bundle: Path) -> None:
    hints = load_node(dense_bundle / "node").hints
    assert hints is not None
    assert hints.batch is None
    assert not has_batch_hints(dense_bundle / "node")


@pytest.mark.parametrize("edit", ["missing", "shape", "type"])
def test_batch_hints_that_do_not_fit_are_refused(edit: str, folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(folders["two_sided"] / "bundle", bundle)

    def change(content: dict[str, np.ndarray]) -> None:
        hint = content.pop("batch.0")
        if edit != "missing":
            content["batch.0"] = hint[:-1] if edit == "shape" else hint.astype(np.int16)

    resealed(bundle, change)
    with pytest.raises(PlanError, match="batch hint of block 0"):
        load_node(bundle / "node")


def test_auto_takes_batches_where_they_are_faster(lenet_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan, _ = read_plan(lenet_bundle)
    assert choose_mode(plan, ModeChoice.AUTO, 1, batch=True) is Mode.PREPARED
    assert choose_mode(plan, ModeChoice.AUTO, 2048, batch=True) is Mode.BATCH
    assert choose_mode(plan, ModeChoice.PREPARED, 2048, batch=True) is Mode.BATCH
    assert choose_mode(plan, ModeChoice.STANDARD, 2048, batch=True) is Mode.STANDARD
