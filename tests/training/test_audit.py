"""The audit: its canaries against arithmetic, trainers sound and broken, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from typer.testing import CliRunner

from heinfer.cli.main import app
from heinfer.errors import IntegrityError, ParameterError
from heinfer.training.auditing.audit import Audit, AuditOptions, Verdict, cut_plan
from heinfer.training.auditing.bound import bound_epsilon
from heinfer.training.auditing.canaries import AuditedRun, Canaries
from heinfer.training.auditing.controls import CONTROLS, Clamped, Noiseless
from heinfer.training.auditing.power import Power, Setting, forecast_power, simulate_scores
from heinfer.training.datasets.loading import load_dataset
from heinfer.training.losses import cross_entropy
from heinfer.training.privacy.accounting import compute_epsilon
from heinfer.training.privacy.clipping import Adaptive, Automatic, Flat, PerLayer
from heinfer.training.privacy.ledger import EntryKind, Ledger
from heinfer.training.privacy.mechanisms import SampledGaussian
from heinfer.training.privacy.planning import Level, PrivacyPlan, plan_training
from heinfer.training.privacy.randomness import KeyedRandomness
from heinfer.training.private_trainer import Mechanics
from heinfer.training.recipe import parse_recipe
from heinfer.training.runs import RunFolder, RunRecord
from heinfer.training.settings import Decay, Optimiser, OptimiserName

RECIPE = {
    "name": "digits",
    "architecture": "mlp",
    "network": {"hidden": [400]},
    "epochs": 3,
    "batch_size": 150,
    "accuracy_floor": 0.0,
    "data": {"set": "digits"},
    "privacy": {"target_epsilon": 1.5, "clip_norm": 0.5},
    "optimiser": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.5},
}


def quiet(phase, done, total):
    pass


# Canaries


def make_run(kind, clipping, canaries, batch=40, steps=3, layer_noise=()):
    """A run over points in the plane that all take part where the batch is 40."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))
    inputs, labels = torch.randn(40, 2), torch.arange(40) % 3

    class Points:
        augmented = False

        def __len__(self):
            return 40

        def select(self, indices, seed):
            return inputs[indices], labels[indices]

    plan = PrivacyPlan(40, batch, steps, 1e-3, None, (Level(0.9, steps),), (), 1.0, 1.0)  # of no consequence here
    optimiser = Optimiser(name=OptimiserName.SGD, learning_rate=0.1, decay=Decay.CONSTANT)
    mechanics = Mechanics(clipping, optimiser, cross_entropy, layer_noise)
    weights = sum(parameter.numel() for parameter in network.parameters())
    made = Canaries.draw(canaries, weights)
    return kind(network, Points(), plan, mechanics, KeyedRandomness.from_seed(5), made), made


class Free:
    def charge(self, step, mechanism):
        pass


@pytest.mark.parametrize(
    ("clipping", "layer_noise"),
    [(Flat(0.7), ()), (Automatic(0.7), ()), (PerLayer((0.3, 0.9)), ()), (PerLayer((0.3, 0.9)), (0.7, 1.2))],
)
def test_noiseless_score_is_the_likelihood_of_a_gradient_of_the_whole_sensitivity(clipping, layer_noise):
    noiseless = type("Quiet", (Noiseless,), {})
    run, canaries = make_run(noiseless, clipping, 8, layer_noise=layer_noise)
    while not run.finished:
        run.advance(Free())
    # Every step takes everyone: a canary that is in moves the sum by C, |c| = 1 / 0.9 in units of the noise.
    expected = 3 / (2 * 0.9**2)
    assert run.scores == pytest.approx(np.where(canaries.included, expected, -expected), rel=2e-3)


def test_adaptive_threshold_counts_canaries_as_clipped_records():
    clipping = Adaptive(0.5, 0.5, 0.2, 1e3)
    run, canaries = make_run(Noiseless, clipping, 30)
    report = run.advance(Free())
    assert report.records == 40 + canaries.included.sum()
    expected = 1 / (
        2 * 0.9**2
    )  # of the gradients alone nearly all of the noise multiplier: the count has so much noise
    assert run.scores == pytest.approx(np.where(canaries.included, expected, -expected), rel=2e-3)


def test_canaries_are_sampled_with_the_plans_probability_and_only_those_included():
    run, canaries = make_run(Noiseless, Flat(1.0), 200, batch=10, steps=40)
    joined = np.zeros(200)
    real = run._add_canaries
    run._add_canaries = lambda sums, sampled: (np.add.at(joined, sampled.numpy(), 1), real(sums, sampled))
    while not run.finished:
        run.advance(Free())
    assert not joined[~canaries.included].any()
    count, inside = joined.sum(), canaries.included.sum() * 40
    assert abs(count - inside / 4) < 5 * math.sqrt(inside * 3 / 16)
    assert (run.scores[joined > 0].min()) > run.scores[joined == 0].max()


def test_canaries_have_directions_of_their_own_over_all_weights():
    canaries = Canaries.draw(30, 100)
    assert canaries.places.shape == (30, 3)
    assert len(canaries.places.unique()) == 90
    assert set(canaries.signs.unique().tolist()) == {-1.0, 1.0}
    many = Canaries.draw(4000, 4000)
    assert abs(int(many.included.sum()) - 2000) < 5 * math.sqrt(1000)
    assert (many.included != Canaries.draw(4000, 4000).included).any()
    with pytest.raises(ParameterError, match="101 canaries need directions of their own"):
        Canaries.draw(101, 100)


def test_clamp_leaves_a_canary_as_long_as_it_has_coordinates():
    run, canaries = make_run(type("Loud", (Clamped, Noiseless), {}), Flat(0.7), 8, steps=1)
    width = canaries.places.shape[1]
    run.advance(Free())
    expected = (math.sqrt(width) - 0.5) / 0.9**2
    assert run.scores[canaries.included] == pytest.approx(expected, rel=2e-3)


# Audits


@pytest.fixture(scope="module")
def digits():
    recipe = parse_recipe({**RECIPE, "optimiser": {**RECIPE["optimiser"], "decay": "constant"}})
    return recipe, load_dataset(recipe.data)


@pytest.fixture(scope="module")
def audit(digits):
    return Audit(*digits, AuditOptions(canaries=1000))


def test_audit_of_a_sound_trainer_stays_below_the_claim(audit):
    finding = audit.run(quiet)
    assert finding.verdict is Verdict.CONSISTENT
    assert finding.lower_bound < audit.claim == pytest.approx(1.5, abs=2e-3)


@pytest.mark.parametrize("name", CONTROLS)
def test_audit_catches_a_broken_trainer(audit, name):
    finding = audit.run(quiet, name, CONTROLS[name])
    assert finding.verdict is Verdict.VIOLATED
    assert audit.claim < finding.lower_bound <= audit.ceiling


def test_audit_scores_correlate_with_the_coins_as_the_simulation_says(audit):
    """Noise and clipping of the real loop give the accuracy that the simulation of the bare mechanism has."""

    class Halved(AuditedRun):
        def _deviations(self, noise_multiplier):
            return [deviation / 2 for deviation in super()._deviations(noise_multiplier)]

    plan, random = audit.plan, np.random.default_rng(2)
    setting = Setting(plan.levels, plan.sampling_probability, 1000, plan.delta, 0.95, audit.claim)
    simulated = []
    for _ in range(20):
        included = random.random(1000) < 0.5
        scores = simulate_scores(setting, 0.5, included, random)
        simulated.append(bound_epsilon(scores, included, plan.delta, 0.95, random)[3].correct)
    real = audit.run(quiet, kind=Halved).guesses[3].correct
    assert 0.6 < np.mean(simulated) / 900 < 0.9
    assert abs(real - np.mean(simulated)) < 6 * np.std(simulated)


def test_audit_of_the_first_steps_claims_what_these_cost(digits):
    recipe, data = digits
    whole = plan_training(samples=1438, batch=150, epochs=3, noise_multiplier=2.0, shape="steps:0.8,1.0,1.2")
    first = cut_plan(whole, 15)
    steps = [whole.mechanism(step) for step in range(15)]
    assert first.steps == 15
    assert [first.mechanism(step) for step in range(15)] == steps
    assert first.epsilon_pld == pytest.approx(compute_epsilon(steps, whole.delta))
    assert first.epsilon_pld < whole.epsilon_pld
    assert first.target_epsilon is None
    with pytest.raises(ParameterError, match="expected 1 to 28 steps, as the recipe has, found 29"):
        Audit(recipe, data, AuditOptions(steps=29))


def test_audit_that_could_never_refute_is_refused(digits):
    with pytest.raises(ParameterError, match=r"cannot refute the claim of 1\.50: take more canaries, or fewer steps"):
        Audit(*digits, AuditOptions(canaries=20))


def test_forecast_rises_with_the_true_epsilon_and_says_what_is_noticed():
    claim = compute_epsilon([SampledGaussian(2.0, 0.1, 28)], 1e-5)
    setting = Setting((Level(2.0, 28),), 0.1, 1000, 1e-5, 0.95, claim)
    power = forecast_power(setting, np.random.default_rng(0))
    assert [row.true_epsilon / claim for row in power.forecasts] == pytest.approx([1, 2, 4, 8], rel=0.02)
    bounds = [row.bound for row in power.forecasts]
    assert bounds == sorted(bounds)
    assert power.forecasts[0].noticed == 0
    assert all(row.bound <= row.true_epsilon for row in power.forecasts)
    assert claim < power.noticed_above < 40 * claim
    unseen = forecast_power(replace(setting, claim=6.0), np.random.default_rng(0))  # beyond its ceiling
    assert unseen.noticed_above is None


# The command


def test_command_audits_a_run_writes_a_statement_and_a_note_and_never_repeats_itself(digits, tmp_path):
    recipe, data = digits
    run, ledger = RunFolder(tmp_path / "run"), tmp_path / "ledger.jsonl"
    run.create()
    run.write(RunRecord("digits-1", json.loads(json.dumps(asdict(recipe))), data.private_fingerprint(), str(ledger)))
    Ledger(ledger, data.private_fingerprint()).open_run("digits-1", delta=1e-5, settings={})
    arguments = ["privacy", "audit", str(tmp_path / "run"), "--threads", "1", "--steps", "5", "--canaries", "200"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "copy.json")])
    assert result.exit_code == 0, result.output
    assert "consistent with the claim" in result.output
    assert "not proof" in result.output
    statement = json.loads((tmp_path / "run-audit" / "audit.json").read_text())
    assert statement == json.loads((tmp_path / "copy.json").read_text())
    assert [path.name for path in (tmp_path / "run-audit").iterdir()] == ["audit.json"]
    assert statement["steps"] == 5
    assert statement["released"] == "nothing"
    assert statement["confidence"] == 0.95
    assert 0 <= statement["lower_bound"] <= statement["claim"] < 1.5
    assert not Ledger(ledger).spent()
    (note,) = [line for line in ledger.read_text().splitlines() if f'"{EntryKind.NOTE}"' in line]
    assert "audit with 200 canaries, 5 steps: nothing is released" in note
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code != 0
    assert "repeating an audit until it passes" in str(again.exception)


def test_command_fails_where_a_control_passes_or_the_claim_is_refuted(digits, tmp_path, monkeypatch):
    settings = tmp_path / "tiny.toml"
    settings.write_text(
        'name = "tiny"\narchitecture = "mlp"\nepochs = 1\nbatch_size = 150\naccuracy_floor = 0.0\n'
        'learning_rate = 0.5\nschedule = "constant"\n[data]\nset = "digits"\n[privacy]\ntarget_epsilon = 1.5\n'
    )
    arguments = ["privacy", "audit", str(settings), "--threads", "1", "--canaries", "300", "--controls"]
    monkeypatch.setattr("heinfer.training.auditing.audit.CONTROLS", {"a sound one": AuditedRun})
    monkeypatch.setattr("heinfer.training.auditing.audit.Audit.forecast", lambda audit: Power((), None, 0))
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, IntegrityError)
    assert "a sound one" in str(result.exception)
    monkeypatch.setattr(AuditedRun, "_deviations", Noiseless._deviations)
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "second")])
    assert isinstance(result.exception, IntegrityError)
    assert "the claim is VIOLATED" in str(result.exception)
    assert "VIOLATED" in (tmp_path / "second" / "audit.json").read_text()
