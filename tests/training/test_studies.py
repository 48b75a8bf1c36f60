"""A study's claims are about arms that exist, its verdicts follow from its numbers, and it stops and goes on fairly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("dp_accounting")
pytest.importorskip("matplotlib")

from heinfer.errors import InputError, ParameterError  # noqa: E402
from heinfer.training.datasets.dataset import Dataset  # noqa: E402
from heinfer.training.experiments import Declining, SeededRuns  # noqa: E402
from heinfer.training.recipe import Privacy  # noqa: E402
from heinfer.training.studies import study  # noqa: E402
from heinfer.training.studies.arms import ARMS, EPSILON, Arm  # noqa: E402
from heinfer.training.studies.claims import CLAIMS, Claim, choose_claims, gather_arms  # noqa: E402
from heinfer.training.studies.report import Context, write_report  # noqa: E402
from heinfer.training.studies.samples import load_records, take_part  # noqa: E402
from heinfer.training.studies.study import Findings, Scale, choose_scale, run_study  # noqa: E402
from heinfer.training.studies.verdicts import Verdict  # noqa: E402
from heinfer.training.trials import Setup, Trial  # noqa: E402


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_records(None)


def privacy_of(arm: Arm) -> Privacy:
    privacy = arm.recipe().privacy
    assert privacy is not None
    return privacy


# --- arms and claims -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_arms_are_recipes_at_a_stated_epsilon(arm: Arm) -> None:
    privacy = arm.recipe().privacy
    assert (privacy is not None) == arm.private
    if privacy is not None:
        declared = arm.changes.get("privacy.target_epsilon", EPSILON)
        assert (privacy.target_epsilon, privacy.delta) == (declared, 1e-5)


def test_arms_per_layer_and_flat_have_one_sensitivity() -> None:
    for name in ("layers, equal noise", "layers, quiet features", "layers, quiet head"):
        assert np.hypot.reduce(privacy_of(ARMS[name]).clip_norms) == privacy_of(ARMS["base"]).clip_norm


def test_arms_differ_from_each_other() -> None:
    keys = Counter(arm.setup(10).key("data") for arm in ARMS.values())
    assert len(keys) == len(ARMS)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.name)
def test_claims_compare_arms_at_equal_epsilon(claim: Claim) -> None:
    """A contrast's weights sum to zero; without the claims about epsilon, all its private arms cost the same."""
    for contrast in claim.contrasts:
        assert sum(contrast.weights.values()) == pytest.approx(0)
        costs = {privacy_of(ARMS[name]).target_epsilon for name in contrast.weights if ARMS[name].private}
        assert len(costs) == 1 or claim.name in ("epsilon-curve", "public-pretraining")


def test_claims_every_arm_is_part_of_one() -> None:
    assert {arm.name for arm in gather_arms(CLAIMS.values())} == set(ARMS)


def test_choose_claims_names_the_nearest() -> None:
    assert choose_claims("all") == tuple(CLAIMS.values())
    assert [claim.name for claim in choose_claims("model-size, linear-decay,model-size")] == [
        "model-size",
        "linear-decay",
    ]
    with pytest.raises(InputError, match="did you mean 'model-size'"):
        choose_claims("model-siz")


# --- the study -------------------------------------------------------------------------------------------------------


class Clock:
    """Time that runs only while something is trained."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTraining:
    """Stands in for training: takes ten seconds of the clock; schedules gain three points, all else is chance."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: list[tuple[str, int]] = []

    def run(self, runs: SeededRuns, setup: Setup, seed: int, *_: Any) -> Trial:
        found = runs.find(setup, seed)
        if found is not None:
            return found
        self.clock.now += 10
        schedule = "constant" if setup.recipe.privacy is None else setup.recipe.privacy.noise_schedule
        self.calls.append((schedule, seed))
        accuracy = 0.9 + 0.001 * seed + (0.03 if schedule != "constant" else 0.0)
        trial = Trial(runs.key(setup), seed, accuracy, 3.0, 5, 10.0, None)
        assert runs._results is not None
        runs._results.append(trial)
        return trial


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    training = FakeTraining(Clock())
    monkeypatch.setattr(SeededRuns, "run", lambda self, *rest: training.run(self, *rest))
    monkeypatch.setattr(study, "_decide", lambda arms, seeds, data, *_: Scale(data.fingerprint(), 1300, 10, 10.0, 0.0))
    return training


SCHEDULES = choose_claims("steps-quiet-first,steps-loud-first,linear-decay")


def test_run_study_cut_off_leaves_arms_balanced_and_goes_on(data: Dataset, tmp_path: Path, fake: FakeTraining) -> None:
    first = run_study(SCHEDULES, data, tmp_path, budget_s=65, clock=fake.clock)
    assert not first.finished
    assert len(fake.calls) == 6  # of ten seconds each
    assert sorted(map(len, first.trials.values())) == [1, 1, 2, 2]
    second = run_study(SCHEDULES, data, tmp_path, budget_s=1000, clock=fake.clock)
    assert second.finished
    assert len(fake.calls) == len(set(fake.calls)) == 12  # nothing twice
    assert all(len(trials) == 3 for trials in second.trials.values())
    verdicts = [claim.judge(second.accuracies) for claim in SCHEDULES]
    assert verdicts == [Verdict.HOLDS, Verdict.HOLDS, Verdict.IN_PART]  # 3 points: of 1.5, of 1.5, of 3.5


def test_run_study_other_data_are_refused(data: Dataset, tmp_path: Path, fake: FakeTraining) -> None:
    run_study(SCHEDULES, data, tmp_path, budget_s=15, clock=fake.clock)
    other = replace(data, test=data.test.select(np.arange(100)))
    with pytest.raises(InputError, match="other data"):
        run_study(SCHEDULES, other, tmp_path, budget_s=15, clock=fake.clock)


def test_run_study_without_public_data_skips_what_needs_them(data: Dataset, tmp_path: Path, fake: FakeTraining) -> None:
    claims = choose_claims("public-pretraining")
    found = run_study(claims, data, tmp_path, budget_s=1000, clock=fake.clock)
    assert list(found.skipped) == ["pretrained, epsilon 0.5"]
    assert not found.finished
    assert claims[0].judge(found.accuracies) is Verdict.UNDECIDED


def test_run_study_refuses_no_time(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="positive budget"):
        run_study(SCHEDULES, data, tmp_path, budget_s=0)


@pytest.mark.parametrize("budget_s", [600.0, 3600.0, 36_000.0])
def test_choose_scale_fits_into_the_budget(budget_s: float) -> None:
    costs = [1.0] * 30 + [0.5] * 20
    scale = choose_scale("data", 60_000, 0.5, 1e-4, costs, budget_s)
    needed = sum(0.5 + 1e-4 * scale.records * scale.epochs * cost for cost in costs)
    assert needed <= budget_s
    assert needed > 0.6 * budget_s or scale.records == 60_000
    assert 1200 <= scale.records <= 60_000


def test_choose_scale_small_data_are_used_whole_and_longer() -> None:
    scale = choose_scale("data", 1438, 0.1, 1e-5, [1.0] * 6, 3600.0)
    assert (scale.records, scale.epochs) == (1438, 30)


# --- what is real ----------------------------------------------------------------------------------------------------


def test_load_records_digits_are_enlarged(data: Dataset) -> None:
    assert data.input_shape == (1, 28, 28)
    image = data.train.inputs[0, 0]
    assert (image[2:26:3, 2:26:3] == image[4:26:3, 4:26:3]).all()
    assert not image[:2].any()


def test_take_part_is_the_same_each_time(data: Dataset) -> None:
    part = take_part(data, 300)
    assert len(part.train) == 300
    assert part.private_fingerprint() == take_part(data, 300).private_fingerprint()
    assert take_part(data, 10**6) is data


def test_declining_threshold_moves_from_first_to_last() -> None:
    clipping = Declining(2.0, 1.0, 11)
    norms = torch.full((1, 2), 5.0)
    for step, expected in ((0, 2.0), (5, 1.5), (10, 1.0)):
        clipping.step = step
        assert clipping.sensitivity == pytest.approx(expected)
        clipped = torch.linalg.vector_norm(clipping.factors(norms) * norms)
        assert float(clipped) == pytest.approx(expected, rel=1e-3)
        assert float(clipped) <= expected


def test_study_trains_a_declining_threshold(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """One real run: the threshold of every step is the declared one."""
    seen: list[float] = []
    factors = Declining.factors

    def record(self: Declining, norms: Any) -> Any:
        seen.append(self.sensitivity)
        return factors(self, norms)

    monkeypatch.setattr(Declining, "factors", record)
    noise = {"privacy.target_epsilon": None, "privacy.noise_multiplier": 0.5, "batch_size": 100}
    arm = ARMS["C from 2 to 1"]
    setup = replace(arm, changes={**arm.changes, **noise}).setup(epochs=1)
    trial = SeededRuns(take_part(data, 300)).run(setup, 0)
    assert trial.steps == 3
    assert list(dict.fromkeys(seen)) == [2.0, 1.5, 1.0]


def make_findings(data: Dataset, accuracies: Mapping[str, Sequence[float]], finished: bool) -> Findings:
    trials = {
        arm: [Trial("key", seed, value, 3.0, 5, 1.0, None) for seed, value in enumerate(values)]
        for arm, values in accuracies.items()
    }
    return Findings(Scale(data.fingerprint(), 1300, 10, 0.1, 1e-4), trials, {}, finished)


def test_write_report_says_verdicts_numbers_and_circumstances(data: Dataset, tmp_path: Path) -> None:
    accuracies = {"base": [0.9, 0.901, 0.902], "linear": [0.94, 0.941, 0.942]}
    claims = choose_claims("linear-decay,model-size")
    path = tmp_path / "dp-claims.md"
    context = Context("heinfer study dp --claims all", data, None, 3)
    write_report(path, claims, make_findings(data, accuracies, finished=False), context)
    text = path.read_text()
    assert "| [linear-decay](#linear-decay) |" in text
    assert "**holds** |" in text
    assert "**undecided** |" in text  # nothing of the second was run
    assert "| linear - base | at least +3.5 | +4.00 ± 0.08 |" in text
    assert "94.10 ± 0.10 %" in text
    assert "not finished" in text
    for part in ("heinfer study dp --claims all", "1,300 of 1,438", "cores", data.fingerprint()):
        assert part in text
    assert str(tmp_path) not in text
    for name in ("overview", "linear-decay", "model-size"):
        assert (tmp_path / "dp-claims" / f"{name}.png").stat().st_size > 1000
        assert f"(dp-claims/{name}.png)" in text
