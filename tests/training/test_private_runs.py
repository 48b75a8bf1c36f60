"""Private runs as a whole: what is charged, what a kill costs, what is refused before anything is spent."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import onnx
import torch
from typer.testing import CliRunner

from heinfer.cli.main import app
from heinfer.errors import InputError, IntegrityError, ParameterError, PrivacyBudgetError
from heinfer.training import private_release
from heinfer.training.account import RunAccount
from heinfer.training.assembly import make_clipping, make_networks, make_run, plan_run
from heinfer.training.checkpoint import read_checkpoint
from heinfer.training.datasets.dataset import Dataset, Examples
from heinfer.training.losses import cross_entropy
from heinfer.training.privacy.accounting import compute_epsilon, effective_multiplier, split_adaptive
from heinfer.training.privacy.clipping import Adaptive, Flat, PerLayer
from heinfer.training.privacy.gradients import ClippedGradients
from heinfer.training.privacy.ledger import Ledger
from heinfer.training.privacy.randomness import KeyedRandomness
from heinfer.training.private_release import RunOptions, train_privately
from heinfer.training.private_trainer import spread_noise
from heinfer.training.recipe import parse_recipe
from heinfer.training.release import AccuracyFloorError
from heinfer.training.runs import RunFolder

pytestmark = pytest.mark.usefixtures("operators_registered_once")

RECIPE = {
    "name": "tiny",
    "architecture": "mlp",
    "network": {"hidden": [8]},
    "epochs": 6,
    "batch_size": 40,
    "accuracy_floor": 0.0,
    "data": {"name": "blobs", "license": "none", "credit": "nobody", "normalise": "none"},
    "privacy": {"target_epsilon": 3.0, "clip_norm": 0.5, "delta": 1e-4},
    "optimiser": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.9, "ema": 0.9},
    "output": {"samples": 10},
}


def recipe(**changes):
    settings = json.loads(json.dumps(RECIPE))
    for place, value in changes.items():
        table = settings
        *path, last = place.split("__")
        for name in path:
            table = table.setdefault(name, {})
        table[last] = value
    return parse_recipe(settings)


def blobs(records=400, seed=0):
    """Three clouds of points in the plane, and as many for the test."""
    random = np.random.default_rng(seed)
    centres = np.array([[0, 2], [2, -1], [-2, -1]], np.float32)

    def draw(count):
        labels = np.arange(count) % 3
        inputs = centres[labels] + random.normal(0, 0.5, (count, 2))
        return Examples(inputs.astype(np.float32), labels.astype(np.int64))

    return Dataset("blobs", draw(records), draw(300), 3)


def weights(folder):
    model = onnx.load(folder / "model.onnx")
    return {w.name: onnx.numpy_helper.to_array(w) for w in model.graph.initializer}


def ledger_of(folder, data):
    return Ledger(Path(RunFolder(folder).read().ledger), data.private_fingerprint())


@pytest.fixture(autouse=True)
def no_page(request, monkeypatch):
    """Draw no curves, which takes a quarter of a run's time, but where a test says so: test_page.py is about them."""
    if "with_page" not in request.fixturenames:
        monkeypatch.setattr(private_release, "write_page", lambda *_: None)


@pytest.fixture
def with_page():
    """Write the page of a run too."""


@pytest.mark.usefixtures("with_page")
def test_run_learns_within_its_budget_and_leaves_no_key_behind(tmp_path):
    data, folder = blobs(), tmp_path / "run"
    card = train_privately(recipe(), data, folder)
    assert "<svg" in (folder / "report.html").read_text()
    assert 2.9 < card["epsilon"] <= 3.0 < card["epsilon_rdp"]
    assert card["accuracy"] > 0.9
    assert (card["steps"], card["seed"], card["sampler"]) == (60, None, "poisson")
    assert compute_epsilon(ledger_of(folder, data).spent(), 1e-4) == pytest.approx(card["epsilon"], abs=1e-9)
    assert not RunFolder(folder).checkpoint.exists()
    assert card["data_fingerprint"] is card["private_fingerprint"] is None, "the hash of private records was published"
    (metadata,) = onnx.load(folder / "model.onnx").metadata_props
    assert json.loads(metadata.value) == json.loads((folder / "card.json").read_text())
    assert list((folder / "private" / "tensorboard").iterdir())


def test_two_unseeded_runs_differ_and_two_seeded_ones_do_not(tmp_path):
    data = blobs()
    for name, seed in (("a", None), ("b", None), ("c", 5), ("d", 5)):
        card = train_privately(recipe(), data, tmp_path / name, RunOptions(seed=seed))
        assert (card["epsilon"] is None) == (seed is not None)
        assert ("Not private" in card["privacy"]) == (seed is not None)
    found = {name: weights(tmp_path / name) for name in "abcd"}
    assert any(not np.array_equal(found["a"][k], found["b"][k]) for k in found["a"])
    assert all(np.array_equal(found["c"][k], found["d"][k]) for k in found["c"])


class StopError(Exception):
    pass


class StopAt:
    """An observer that ends the process' work at a step, as a kill would."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report, epsilon):
        if report.step == self.step:
            raise StopError

    def on_accuracy(self, step, accuracy):
        pass

    def close(self):
        pass


def settings_of(clipping):
    return recipe(**({"privacy__clipping": "adaptive", "privacy__count_deviation": 4.0} if clipping != "flat" else {}))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights, and what was spent, of runs with seed 3 that nothing stopped, by clipping."""

    @cache
    def train(clipping):
        data, folder = blobs(), tmp_path_factory.mktemp(clipping)
        train_privately(settings_of(clipping), data, folder / "run", RunOptions(seed=3, ledger=folder / "l.jsonl"))
        return weights(folder / "run"), Ledger(folder / "l.jsonl", data.private_fingerprint()).spent()

    return train


@pytest.mark.parametrize(("clipping", "step"), [("flat", 0), ("flat", 6), ("adaptive", 29), ("flat", 59)])
def test_run_that_is_stopped_and_resumed_ends_with_the_same_weights_and_pays_once(
    tmp_path, undisturbed, step, clipping
):
    data, settings = blobs(), settings_of(clipping)
    whole, spent = undisturbed(clipping)
    folder, ledger = tmp_path / "cut", tmp_path / "cut.jsonl"
    with pytest.raises(StopError):
        train_privately(
            settings, data, folder, RunOptions(seed=3, ledger=ledger, checkpoint_every=7, observers=(StopAt(step),))
        )
    before = Ledger(ledger, data.private_fingerprint()).spent()
    assert sum(m.count for m in before) == step + 1
    card = train_privately(settings, data, folder, RunOptions(seed=3, resume=True, checkpoint_every=7))
    after = Ledger(ledger, data.private_fingerprint()).spent()
    assert after == spent
    assert sum(m.count for m in after) == card["steps"] == 60
    cut = weights(folder)
    assert all(np.array_equal(whole[name], cut[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.timeout(900)  # it waits for nothing but the runs, which a busy machine makes slow
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.long)])
def test_killed_process_resumes_without_loss_or_refund(tmp_path, monkeypatch, kills):
    """SIGKILL at several moments of one run; the ledger never shrinks and ends with every step once."""
    (tmp_path / "recipe.toml").write_text(TOML)
    command = [
        sys.executable,
        "-m",
        "heinfer.cli.main",
        "train",
        str(tmp_path / "recipe.toml"),
        "-o",
        str(tmp_path / "r"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    paid = 0
    for attempt in range(kills):
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, cwd=tmp_path) as process:
            wait_for_steps(tmp_path, paid + 5, process)
            process.send_signal(signal.SIGKILL)
        (ledger,) = tmp_path.glob("ledger-*.jsonl")
        now = sum(m.count for m in Ledger(ledger).spent())
        assert now >= paid + 5
        paid = now
        if attempt == 0:
            command.append("--resume")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command[3:])  # to its end in this process: to start another one takes longer
    assert done.exit_code == 0, done.output
    card = json.loads((tmp_path / "r" / "card.json").read_text())
    (mechanism,) = Ledger(ledger).spent()
    assert mechanism.count == card["steps"] == 179
    assert compute_epsilon([mechanism], card["delta"]) == pytest.approx(card["epsilon"], abs=1e-9)


TOML = """
name = "digits"
architecture = "mlp"
epochs = 1
batch_size = 8
accuracy_floor = 0.0
data = { set = "digits" }
privacy = { target_epsilon = 8.0, clip_norm = 0.5 }
optimiser = { name = "sgd", learning_rate = 0.1 }
"""


def wait_for_steps(folder, count, process):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        found = list(folder.glob("ledger-*.jsonl"))
        if found and found[0].read_bytes().count(b'"kind":"step"') >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"no {count} steps: {process.stderr.read().decode()[-2000:]}")


def test_resuming_with_other_data_recipe_or_seed_is_refused_and_spends_nothing(tmp_path):
    data, folder = blobs(), tmp_path / "run"
    with pytest.raises(StopError):
        train_privately(recipe(), data, folder, RunOptions(observers=(StopAt(9),)))
    spent = ledger_of(folder, data).spent()
    resume = RunOptions(resume=True)
    for settings, records, options, text in (
        (recipe(), blobs(seed=1), resume, "other data"),
        (recipe(privacy__clip_norm=1.0), data, resume, "another recipe .privacy"),
        (recipe(), data, RunOptions(resume=True, seed=1), "another seed"),
        (recipe(), data, RunOptions(resume=True, ledger=tmp_path / "x"), "leave --ledger out"),
        (recipe(), data, RunOptions(), "add --resume"),
    ):
        with pytest.raises(InputError, match=text):
            train_privately(settings, records, folder, options)
    assert ledger_of(folder, data).spent() == spent
    train_privately(recipe(), data, folder, resume)
    for options in (resume, RunOptions()):
        with pytest.raises(InputError, match="has ended"):
            train_privately(recipe(), data, folder, options)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"batch_size": 500}, ParameterError, "batch"),
        ({"privacy__delta": 0.01}, ParameterError, "1 / N"),
        ({"privacy__clipping": "per-layer", "privacy__clip_norms": [0.5]}, ParameterError, "2 layers"),
        ({"privacy__clipping": "adaptive", "privacy__count_deviation": 0.01}, ParameterError, "."),
        ({"architecture": "no_such"}, InputError, "unknown architecture"),
        ({"network": {"hiden": [8]}}, InputError, "hidden"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_spent(tmp_path, changes, error, text):
    with pytest.raises(error, match=text):
        train_privately(recipe(**changes), blobs(), tmp_path / "run")
    assert not list(tmp_path.glob("ledger*"))


def test_ledger_allowance_stops_a_run_one_step_short_of_passing_it(tmp_path):
    data = blobs()
    ledger = tmp_path / "ledger.jsonl"
    train_privately(recipe(), data, tmp_path / "a", RunOptions(ledger=ledger))
    allowance = 3.6
    card = train_privately(recipe(), data, tmp_path / "b", RunOptions(ledger=ledger, allowance=allowance))
    spent = Ledger(ledger, data.private_fingerprint()).spent()
    assert 0 < card["steps"] < 60
    assert compute_epsilon(spent, 1e-4) <= allowance
    (single,) = {m.times(1) for m in spent}
    assert compute_epsilon([*spent, single], 1e-4) > allowance
    assert card["epsilon"] < 3.0
    with pytest.raises(PrivacyBudgetError):
        train_privately(recipe(), data, tmp_path / "c", RunOptions(ledger=ledger, allowance=allowance))


def test_private_evaluation_is_paid_from_the_target(tmp_path):
    data = blobs()
    card = train_privately(recipe(privacy__evaluation_reserve=0.2), data, tmp_path / "run")
    assert card["test_noise"] > 0
    assert card["epsilon"] <= 3.0
    assert card["accuracy"] == pytest.approx(0.97, abs=0.03 + 6 * card["test_noise"])
    ledger = ledger_of(tmp_path / "run", data)
    assert set(ledger.purposes(next(iter(ledger.runs())))) == {"training", "evaluation"}
    assert compute_epsilon(ledger.spent(), 1e-4) == pytest.approx(card["epsilon"], abs=1e-9)
    assert not (tmp_path / "run" / "samples.npz").exists(), "private test records were handed on"


def test_noise_shares_keep_the_joint_multiplier():
    clipping = PerLayer((0.5, 1.0, 2.0))
    shares = spread_noise((0.7, 0.9, 1.2), clipping)
    assert effective_multiplier(clipping.clip_norms, shares) == pytest.approx(1.0, rel=1e-12)
    assert [s / c for s, c in zip(shares, clipping.clip_norms, strict=True)] == pytest.approx(
        [x * shares[0] / 0.5 / 0.7 for x in (0.7, 0.9, 1.2)]
    )
    with pytest.raises(ParameterError):
        spread_noise((1.0, 2.0), Flat(1.0))


PER_LAYER = {"clipping": "per-layer", "clip_norms": [0.3, 0.6], "layer_noise": [1.0, 3.0]}
ADAPTIVE = {"clipping": "adaptive", "clip_norm": 0.5, "count_deviation": 4.0}


@pytest.mark.parametrize("privacy", [{"clip_norm": 0.5}, PER_LAYER, ADAPTIVE], ids=["flat", "per-layer", "adaptive"])
@pytest.mark.parametrize("batch", [400, 100])
def test_noise_on_the_weights_is_what_is_accounted(privacy, batch):
    """One step of SGD moves the weights by -(clipped sum + noise) / B; taking the sum away leaves the noise."""
    settings = parse_recipe(
        {**RECIPE, "batch_size": batch, "network": {"hidden": [3000]},
         "optimiser": {"name": "sgd", "learning_rate": 1.0},
         "privacy": {"target_epsilon": 3.0, "delta": 1e-4, **privacy}}
    )  # fmt: skip
    data, randomness = blobs(), KeyedRandomness.from_seed(1)
    plan = plan_run(settings, 400)
    networks = make_networks(settings, data, randomness)
    run = make_run(settings, data, plan, networks, randomness)
    clipping = make_clipping(settings.privacy)
    gradients = ClippedGradients(networks.trained, cross_entropy)
    chosen = randomness.sample_mask(0, 400, batch / 400)
    inputs, labels = torch.tensor(data.train.inputs[chosen]), torch.tensor(data.train.labels[chosen])
    sums = gradients.sum(inputs, labels, clipping).sums
    before = [p.detach().clone() for p in networks.trained.parameters()]
    run.advance(Free())
    after = [p.detach() for p in networks.trained.parameters()]
    noise = [(new - old) * batch + s for old, new, s in zip(before, after, sums, strict=True)]
    sigma = plan.levels[0].noise_multiplier
    shares = spread_noise(settings.privacy.layer_noise, clipping)
    if shares is not None:
        expected = [sigma * shares[layer] for layer in gradients.layer_of]
    elif isinstance(clipping, Adaptive):
        expected = [split_adaptive(sigma, 4.0) * 0.5] * len(noise)
    else:
        expected = [sigma * 0.5] * len(noise)
    for part, deviation in zip(noise, expected, strict=True):
        tolerance = 6 / np.sqrt(2 * part.numel()) + 1e-3  # of a standard deviation's estimate, and float32's rounding
        if tolerance < 0.1:
            assert float(part.square().mean().sqrt()) == pytest.approx(deviation, rel=tolerance)
            assert abs(float(part.mean())) < 6 * deviation / np.sqrt(part.numel())
    assert sum(part.numel() for part in noise) > 15_000


class Free:
    def charge(self, step, mechanism):
        pass


def test_account_charges_the_gate_before_the_ledger(tmp_path):
    data = blobs()
    ledger = Ledger(tmp_path / "l.jsonl", data.private_fingerprint())
    plan = plan_run(recipe(), 400)
    ledger.open_run("r", delta=plan.delta, settings={})
    account = RunAccount(ledger, "r", plan)
    for step in range(plan.steps):
        account.charge(step, plan.mechanism(step))
    with pytest.raises(PrivacyBudgetError):
        account.charge(plan.steps, plan.mechanism(0))
    assert sum(m.count for m in ledger.spent()) == plan.steps
    account.charge(0, plan.mechanism(0))  # taken again after a kill: free
    assert sum(m.count for m in ledger.spent()) == plan.steps


def test_run_file_holds_nothing_secret(tmp_path):
    data, folder = blobs(), tmp_path / "run"
    with pytest.raises(StopError):
        train_privately(recipe(), data, folder, RunOptions(observers=(StopAt(9),)))
    key = read_checkpoint(RunFolder(folder).checkpoint).state["key"]
    assert len(bytes.fromhex(key)) == 32
    assert RunFolder(folder).checkpoint.stat().st_mode & 0o077 == 0
    others = [p for p in tmp_path.rglob("*") if p.is_file() and p != RunFolder(folder).checkpoint]
    assert all(key.encode() not in p.read_bytes() and bytes.fromhex(key) not in p.read_bytes() for p in others)
    assert dataclasses.asdict(RunFolder(folder).read())["finished"] is False


def interrupted(tmp_path, settings=None, step=29, **options):
    data, folder = blobs(), tmp_path / "run"
    with pytest.raises(StopError):
        train_privately(
            settings or recipe(), data, folder, RunOptions(checkpoint_every=7, observers=(StopAt(step),), **options)
        )
    return data, folder, Path(RunFolder(folder).read().ledger)


def test_resuming_with_a_ledger_that_was_lost_or_set_back_is_refused(tmp_path):
    data, folder, ledger = interrupted(tmp_path)
    head = ledger.with_name(ledger.name + ".head")
    now = ledger.read_bytes(), head.read_bytes()
    for path in (ledger, head):
        path.unlink()
    with pytest.raises(InputError, match="cannot read the ledger"):
        train_privately(recipe(), data, folder, RunOptions(resume=True))
    lines = now[0].splitlines(keepends=True)[:10]
    ledger.write_bytes(b"".join(lines))
    head.write_bytes(f"{10:020d} {json.loads(lines[-1])['sha256']}\n".encode())
    Ledger(ledger, data.private_fingerprint()).verify()  # sound by itself
    with pytest.raises(IntegrityError, match="no longer has entry"):
        train_privately(recipe(), data, folder, RunOptions(resume=True))
    ledger.write_bytes(now[0])
    head.write_bytes(now[1])
    assert train_privately(recipe(), data, folder, RunOptions(resume=True))["steps"] == 60


def test_resumed_run_keeps_the_allowance_that_it_was_begun_with(tmp_path):
    data, folder, ledger = interrupted(tmp_path, allowance=2.5)
    card = train_privately(recipe(), data, folder, RunOptions(resume=True))
    assert 29 < card["steps"] < 60
    assert card["epsilon"] <= 2.5
    assert sum(card["noise"]["steps"]) == card["steps"]
    assert compute_epsilon(Ledger(ledger).spent(), 1e-4) == pytest.approx(card["epsilon"], abs=1e-9)


def test_evaluation_is_paid_before_training_can_use_the_allowance_up(tmp_path):
    settings = recipe(privacy__evaluation_reserve=0.2)
    card = train_privately(settings, blobs(), tmp_path / "run", RunOptions(allowance=2.0))
    assert card["epsilon"] <= 2.0
    assert 0 < card["steps"] < 60
    assert card["test_noise"] > 0


def test_public_data_that_hold_private_records_are_refused(tmp_path):
    settings = recipe(
        pretraining={
            "epochs": 1, "batch_size": 40, "learning_rate": 0.01,
            "data": {"name": "public", "license": "none", "credit": "nobody", "normalise": "none"},
        }
    )  # fmt: skip
    with pytest.raises(InputError, match="400 private records are among the public data"):
        train_privately(settings, blobs(), tmp_path / "run", public=blobs())
    assert not list(tmp_path.iterdir())
    card = train_privately(settings, blobs(), tmp_path / "run", public=blobs(seed=9))
    assert card["public_data"] == ["public"]


def test_model_below_its_floor_stays_private_and_its_key_goes(tmp_path):
    data, folder = blobs(), tmp_path / "run"
    data.test.inputs[1] = data.test.inputs[0]  # of another class: nobody gets both right
    with pytest.raises(AccuracyFloorError, match="what was spent is spent"):
        train_privately(recipe(accuracy_floor=1.0), data, folder)
    assert not RunFolder(folder).checkpoint.exists()
    assert not (folder / "model.onnx").exists()
    assert (folder / "private" / "model.onnx").exists()
    assert RunFolder(folder).read().finished


def test_test_records_of_a_private_file_are_not_handed_on(tmp_path):
    card = train_privately(recipe(data__test_fraction=0.5), blobs(), tmp_path / "run")
    assert card["samples"] is None
    assert "private file" in card["test_data"]
    assert not (tmp_path / "run" / "samples.npz").exists()


def test_ledger_report_says_which_runs_were_seeded(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    for name, seed in (("a", None), ("b", 1)):
        train_privately(recipe(), blobs(), tmp_path / name, RunOptions(seed=seed, ledger=ledger))
    shown = CliRunner().invoke(app, ["privacy", "ledger", str(tmp_path / "a"), "--json", str(tmp_path / "l.json")])
    assert shown.exit_code == 0, shown.output
    (seeded,) = json.loads((tmp_path / "l.json").read_text())["seeded"]
    assert seeded == RunFolder(tmp_path / "b").read().run_id
