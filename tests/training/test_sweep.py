"""A sweep runs every target with every seed once, says go only where the worst seed does well, and keeps no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("dp_accounting")
pytest.importorskip("matplotlib")

from torch import Tensor, nn  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from heinfer.cli.main import app  # noqa: E402
from heinfer.errors import InputError, ParameterError  # noqa: E402
from heinfer.training import records as records_module  # noqa: E402
from heinfer.training.datasets.dataset import Dataset, Examples  # noqa: E402
from heinfer.training.experiments import SeededRuns  # noqa: E402
from heinfer.training.recipe import Recipe, parse_recipe  # noqa: E402
from heinfer.training.records import FeatureCache  # noqa: E402
from heinfer.training.sweep import at_epsilon, check_targets, draw_sweep, run_sweep  # noqa: E402
from heinfer.training.trials import Setup, Trial, TrialFile, summarise  # noqa: E402

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "architecture": "mlp",
    "epochs": 3,
    "batch_size": 40,
    "accuracy_floor": 0.6,
    "network": {"hidden": [8]},
    "optimiser": {"name": "adam", "learning_rate": 0.05},
    "data": {"name": "made up", "license": "CC0", "credit": "nobody"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
}


def make_recipe(**changes: Any) -> Recipe:
    return parse_recipe({**SETTINGS, **changes})


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Two classes that the first feature tells apart."""
    generator = np.random.default_rng(3)

    def examples(count: int) -> Examples:
        labels = np.arange(count) % 2
        inputs = generator.normal(0, 0.3, (count, 4)).astype(np.float32)
        inputs[:, 0] += 2 * labels - 1
        return Examples(inputs, labels.astype(np.int64))

    return Dataset("made up", examples(400), examples(200), 2)


class Counted:
    """Stands in for training: accuracies by target and seed, and how often each was asked for."""

    def __init__(self, accuracies: dict[tuple[float, int], float]) -> None:
        self.accuracies = accuracies
        self.calls: list[tuple[float, int]] = []

    def run(self, runs: SeededRuns, setup: Setup, seed: int, *_: Any) -> Trial:
        assert setup.recipe.privacy is not None
        target = setup.recipe.privacy.target_epsilon
        assert target is not None
        self.calls.append((target, seed))
        plan = {"noise_multipliers": [1.0, 2.0], "delta": 1e-4}
        return Trial(runs.key(setup), seed, self.accuracies[target, seed], target, 10, 1.0, plan)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    fake = Counted({(0.5, 0): 0.9, (0.5, 1): 0.59, (8.0, 0): 0.6, (8.0, 1): 0.7})
    monkeypatch.setattr(SeededRuns, "run", lambda self, *rest: fake.run(self, *rest))
    return fake


def test_run_sweep_go_only_where_the_worst_seed_reaches_the_floor(
    data: Dataset, tmp_path: Path, counted: Counted
) -> None:
    sweep = run_sweep(make_recipe(), data, tmp_path, [8.0, 0.5, 8.0], seeds=2)
    assert sorted(counted.calls) == [(0.5, 0), (0.5, 1), (8.0, 0), (8.0, 1)]
    low, high = sweep.points
    assert (low.target, high.target) == (0.5, 8.0)
    assert low.accuracy.mean > sweep.floor > low.accuracy.worst
    assert not low.go
    assert high.go  # 0.6 reaches 0.6
    assert low.advice(sweep.floor).startswith("no-go")
    assert high.advice(sweep.floor).startswith("go: the worst of 2 seeds, 60.00%, reaches")
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content["private"] is False
    assert "not private" in content["note"] or "none of them is private" in content["note"]
    assert [point["go"] for point in content["points"]] == [False, True]
    assert content["points"][0]["accuracy"]["values"] == [0.9, 0.59]
    assert content["points"][0]["accuracy"]["spread"] == pytest.approx(np.std([0.9, 0.59], ddof=1))


def test_run_sweep_really_trains_and_goes_on(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep"
    sweep = run_sweep(make_recipe(), data, folder, [0.02, 3.0], seeds=2)
    weak, strong = sweep.points
    assert strong.accuracy.worst > 0.9  # the classes are far apart
    assert weak.accuracy.mean < strong.accuracy.mean
    assert weak.noise_multiplier[0] > strong.noise_multiplier[0]
    for point in sweep.points:
        assert point.target - 0.001 <= point.epsilon <= point.target
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["sweep", "sweep.json", "sweep.png", "trials.jsonl"]
    assert (folder / "sweep.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    monkeypatch.setattr(SeededRuns, "_train", lambda *_: pytest.fail("trained again"))
    assert run_sweep(make_recipe(), data, folder, [0.02, 3.0], seeds=2) == sweep


def test_seeded_runs_repeat_and_differ_by_seed(data: Dataset) -> None:
    setup = Setup(make_recipe(privacy={"noise_multiplier": 4.0, "delta": 1e-4}, epochs=1))
    one, again, other = (SeededRuns(data).run(setup, seed) for seed in (1, 1, 2))
    assert one.accuracy == again.accuracy
    assert one.plan == other.plan
    weights = [fitted_weights(data, setup, seed) for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def fitted_weights(data: Dataset, setup: Setup, seed: int) -> Tensor:
    """The weights that a seeded run measures."""
    kept: list[Tensor] = []

    class Keeping(SeededRuns):
        def _measure(self, recipe: Recipe, networks: Any, weights: dict[str, Tensor]) -> float:
            kept.append(torch.cat([tensor.flatten() for tensor in weights.values()]))
            return 0.0

    Keeping(data).run(setup, seed)
    return kept[0]


def test_seeded_runs_without_privacy_learns(data: Dataset) -> None:
    trial = SeededRuns(data).run(Setup(make_recipe(privacy=None, seed=0)), 0)
    assert trial.epsilon is None
    assert trial.plan is None
    assert trial.accuracy > 0.95
    assert trial.steps == 30


class Scaled(nn.Module):
    """Features that a buffer decides."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def test_feature_cache_computes_once_for_each_module_and_records(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compute = records_module.compute_features
    monkeypatch.setattr(records_module, "compute_features", lambda *given: calls.append(given[1]) or compute(*given))
    cache, device = FeatureCache(), torch.device("cpu")
    first = cache.compute(Scaled(2.0), data.train, device)
    assert cache.compute(Scaled(2.0), data.train, device) is first
    assert calls == [data.train]
    other = cache.compute(Scaled(3.0), data.train, device)
    assert torch.allclose(other, 1.5 * first)
    cache.compute(Scaled(2.0), data.test, device)
    assert len(calls) == 3


def test_seeded_runs_compute_scattering_features_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = Examples(
        np.random.default_rng(0).integers(0, 256, (24, 1, 16, 16), np.uint8), np.arange(24, dtype=np.int64) % 2
    )
    calls = []
    compute = records_module.compute_features
    monkeypatch.setattr(records_module, "compute_features", lambda *given: calls.append(given[1]) or compute(*given))
    recipe = make_recipe(architecture="scattering_linear", network={}, batch_size=8, epochs=1, features={})
    runs = SeededRuns(Dataset("noise", images, images.select(np.arange(8)), 2))
    for seed in range(2):
        runs.run(Setup(recipe), seed)
    assert [len(examples) for examples in calls] == [24, 8]


def test_trial_file_cut_line_is_left_out_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    trials = [Trial("a", seed, 0.5, 1.0, 3, 0.1, None) for seed in range(3)]
    file = TrialFile(path)
    file.append(trials[0])
    file.append(trials[1])
    path.write_text(path.read_text()[:-20])
    again = TrialFile(path)
    assert again.find("a", 0) == trials[0]
    assert again.find("a", 1) is None
    again.append(trials[2])
    assert len(TrialFile(path)) == 2
    path.write_text("no trial\n" + path.read_text())
    with pytest.raises(InputError, match="line 1"):
        TrialFile(path)


def test_setup_key_depends_on_what_is_trained_only() -> None:
    base = Setup(make_recipe())
    assert base.key("d") == Setup(make_recipe(name="other", accuracy_floor=0.1)).key("d")
    others = [Setup(make_recipe(epochs=4)), Setup(make_recipe(), last_clip_norm=0.5)]
    assert len({base.key("d"), base.key("e"), *(other.key("d") for other in others)}) == 4


@pytest.mark.parametrize("targets", [[], [0.0], [1.0, -2.0], [float("nan")], [float("inf")]])
def test_check_targets_refuses(targets: list[float]) -> None:
    with pytest.raises(ParameterError, match="positive targets"):
        check_targets(targets)


def test_at_epsilon_replaces_noise_and_needs_privacy() -> None:
    privacy = at_epsilon(make_recipe(), 2.0).privacy
    assert privacy is not None
    assert (privacy.target_epsilon, privacy.noise_multiplier, privacy.delta) == (2.0, None, 1e-4)
    with pytest.raises(InputError, match="asks for no privacy"):
        at_epsilon(make_recipe(privacy=None, seed=0), 2.0)


def test_summarise_single_seed_has_no_spread() -> None:
    assert summarise([0.5]).spread is None


def test_draw_sweep_marks_the_floor(data: Dataset, tmp_path: Path, counted: Counted) -> None:
    low = run_sweep(make_recipe(), data, tmp_path / "a", [0.5, 8.0], seeds=2)
    high = run_sweep(make_recipe(accuracy_floor=0.8), data, tmp_path / "b", [0.5, 8.0], seeds=2)
    draw_sweep(low, tmp_path / "low.png")
    draw_sweep(high, tmp_path / "high.png")
    assert (tmp_path / "low.png").read_bytes() != (tmp_path / "high.png").read_bytes()


def test_train_command_sweep_prints_go_and_refuses_a_ledger(tmp_path: Path, counted: Counted) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'name = "tiny"\narchitecture = "mlp"\nepochs = 1\nbatch_size = 40\naccuracy_floor = 0.6\n'
        'learning_rate = 0.1\nschedule = "constant"\n[data]\nset = "digits"\n[privacy]\ntarget_epsilon = 1.0\n'
    )
    command = ["train", str(recipe), "-o", str(tmp_path / "out"), "--sweep-epsilon", "0.5,8", "--seeds", "2"]
    result = CliRunner().invoke(app, [*command, "--threads", "1", "--json", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.output
    assert "epsilon 0.5: no-go" in result.output
    assert "epsilon 8: go" in result.output
    assert json.loads((tmp_path / "figures.json").read_text())["private"] is False
    refused = CliRunner().invoke(app, [*command, "--ledger", str(tmp_path / "ledger.jsonl")])
    assert isinstance(refused.exception, InputError)
