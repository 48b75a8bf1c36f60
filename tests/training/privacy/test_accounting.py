"""Epsilon against published values, closed forms and the library's own accountants."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

dp_accounting = pytest.importorskip("dp_accounting")

from dp_accounting.pld import PLDAccountant  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from scipy.optimize import brentq  # noqa: E402
from scipy.stats import norm  # noqa: E402

from heinfer.errors import ParameterError  # noqa: E402
from heinfer.processes import child_environment  # noqa: E402
from heinfer.training.privacy import accounting, mechanisms  # noqa: E402
from heinfer.training.privacy.accounting import (  # noqa: E402
    INTERVAL,
    Accountant,
    compute_epsilon,
    default_delta,
    effective_multiplier,
    split_adaptive,
)
from heinfer.training.privacy.mechanisms import GaussianRelease, Mechanism, SampledGaussian, merge  # noqa: E402

REPOSITORY = Path(__file__).parents[3]


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism with sensitivity 1: Balle and Wang 2018, theorem 8."""

    def excess(epsilon: float) -> float:
        upper = norm.cdf(1 / (2 * sigma) - epsilon * sigma)
        return float(upper - math.exp(epsilon) * norm.cdf(-1 / (2 * sigma) - epsilon * sigma) - delta)

    return float(brentq(excess, 0, 100, xtol=1e-12))


@pytest.mark.parametrize(
    ("batch", "pld", "rdp"),
    [(256, 0.775, 0.877), (512, 1.154, 1.279), (1024, 1.734, 1.924), (2048, 2.618, 2.913)],
)
def test_compute_epsilon_ten_epochs_over_fifty_thousand_gives_the_known_values(
    batch: int, pld: float, rdp: float
) -> None:
    run = [SampledGaussian(1.3, batch / 50_000, 10 * 50_000 // batch)]
    assert compute_epsilon(run, 1e-5) == pytest.approx(pld, abs=6e-4)
    assert compute_epsilon(run, 1e-5, Accountant.RDP) == pytest.approx(rdp, abs=6e-4)


@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_compute_epsilon_one_release_gives_the_analytic_gaussian(sigma: float, delta: float) -> None:
    expected = gaussian_epsilon(sigma, delta)
    found = compute_epsilon([GaussianRelease(sigma)], delta)
    assert expected - 1e-9 <= found <= expected + INTERVAL


@pytest.mark.parametrize("count", [2, 9, 100])
def test_compute_epsilon_many_releases_are_one_with_less_noise(count: int) -> None:
    expected = gaussian_epsilon(6.0 / math.sqrt(count), 1e-6)
    assert compute_epsilon([GaussianRelease(6.0, count)], 1e-6) == pytest.approx(expected, abs=INTERVAL)
    assert compute_epsilon([SampledGaussian(6.0, 1.0, count)], 1e-6) == pytest.approx(expected, abs=INTERVAL)


def test_compute_epsilon_releases_with_different_noise_add_their_precisions() -> None:
    together = (1 / 3.0**2 + 2 / 5.0**2 + 1 / 8.0**2) ** -0.5
    taken = [GaussianRelease(3.0), GaussianRelease(5.0, 2), SampledGaussian(8.0, 1.0)]
    assert compute_epsilon(taken, 1e-6) == pytest.approx(gaussian_epsilon(together, 1e-6), abs=INTERVAL)


def test_compute_epsilon_mixture_agrees_with_the_librarys_accountant() -> None:
    taken = [SampledGaussian(2.1, 0.02, 100), GaussianRelease(12.0, 3), SampledGaussian(3.0, 0.05, 40)]
    accountant = PLDAccountant()
    for mechanism in taken:
        event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
        if isinstance(mechanism, SampledGaussian):
            event = dp_accounting.PoissonSampledDpEvent(mechanism.sampling_probability, event)
        accountant.compose(event, mechanism.count)
    assert compute_epsilon(taken, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_compute_epsilon_any_order_and_grouping_gives_the_very_same_number() -> None:
    taken: list[Mechanism] = [SampledGaussian(sigma, 0.03, 20) for sigma in (1.5, 2.2, 3.1)]
    taken += [GaussianRelease(9.0, 2), GaussianRelease(7.0), GaussianRelease(5.3)]
    pieces = [piece for m in taken for piece in [m.times(1)] * m.count]
    found = {accountant: set[float]() for accountant in Accountant}
    for seed in range(4):
        random.Random(seed).shuffle(pieces)
        for accountant, values in found.items():
            accounting._pld_epsilon.cache_clear()
            accounting._rdp_epsilon.cache_clear()
            values.add(compute_epsilon(pieces, 1e-5, accountant))
            values.add(compute_epsilon(merge(pieces), 1e-5, accountant))
    assert [len(values) for values in found.values()] == [1, 1]


@settings(max_examples=10)
@given(
    sigma=st.floats(1.5, 10),
    probability=st.floats(1e-3, 0.3),
    steps=st.integers(1, 100),
)
def test_compute_epsilon_coarser_grid_and_renyi_only_overstate(sigma: float, probability: float, steps: int) -> None:
    run = [SampledGaussian(sigma, probability, steps)]
    tight = compute_epsilon(run, 1e-5)
    assert tight <= compute_epsilon(run, 1e-5, interval=1e-3) <= compute_epsilon(run, 1e-5, interval=1e-2)
    # The grid overstates by less than its width times sqrt(steps); exact values lie below both bounds.
    assert tight <= compute_epsilon(run, 1e-5, Accountant.RDP) + INTERVAL * math.sqrt(steps)


def test_compute_epsilon_nothing_costs_nothing() -> None:
    assert compute_epsilon([], 1e-5) == 0.0


@pytest.mark.parametrize("delta", [0.0, -1e-5, 1.0, 2.0, float("nan"), float("inf"), 1e-13, "1e-5", True])
def test_compute_epsilon_impossible_delta_is_refused(delta: float) -> None:
    with pytest.raises(ParameterError, match="delta"):
        compute_epsilon([GaussianRelease(1.0)], delta)


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf"), 0.1, 1e7, "1", True, None])
def test_mechanisms_impossible_noise_is_refused(sigma: float) -> None:
    with pytest.raises(ParameterError, match="noise multiplier"):
        SampledGaussian(sigma, 0.1)
    with pytest.raises(ParameterError, match="noise multiplier"):
        GaussianRelease(sigma)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.1, float("nan"), True])
def test_mechanisms_impossible_sampling_is_refused(probability: float) -> None:
    with pytest.raises(ParameterError, match="sampling probability"):
        SampledGaussian(1.0, probability)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_mechanisms_impossible_count_is_refused(count: int) -> None:
    with pytest.raises(ParameterError, match="steps"):
        SampledGaussian(1.0, 0.1, count)
    with pytest.raises(ParameterError, match="releases"):
        GaussianRelease(1.0, count)


@pytest.mark.parametrize("mechanism", [SampledGaussian(1.1, 0.1 + 0.2, 7), GaussianRelease(1 / 3, 2)])
def test_mechanisms_json_gives_the_same_back(mechanism: Mechanism) -> None:
    content = json.loads(json.dumps(mechanisms.to_json(mechanism)))
    assert mechanisms.from_json(content) == mechanism
    for broken in ({**content, "kind": "laplace"}, {**content, "more": 1}, {"kind": content["kind"]}, []):
        with pytest.raises(ParameterError):
            mechanisms.from_json(broken)  # type: ignore[arg-type]


def test_effective_multiplier_is_what_the_layers_cost_together() -> None:
    norms, deviations = [1.0, 0.5, 2.0], [4.0, 3.0, 6.0]
    layers = [GaussianRelease(deviation / norm_) for norm_, deviation in zip(norms, deviations, strict=True)]
    accountant = PLDAccountant()  # independent Gaussians on the parts of one vector: composition without adaptivity
    for layer in layers:
        accountant.compose(dp_accounting.GaussianDpEvent(layer.noise_multiplier))
    joint = effective_multiplier(norms, deviations)
    assert gaussian_epsilon(joint, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), abs=5 * INTERVAL)
    assert effective_multiplier([2.0], [3.0]) == pytest.approx(1.5)


def test_split_adaptive_gradients_and_count_cost_what_was_meant() -> None:
    whole, count_deviation = 1.2, 5.0
    gradients = split_adaptive(whole, count_deviation)
    assert gradients > whole
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(gradients))
    accountant.compose(dp_accounting.GaussianDpEvent(count_deviation / 0.5))  # the count's sensitivity is 1/2
    assert gaussian_epsilon(whole, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), abs=5 * INTERVAL)


@pytest.mark.parametrize(
    "arguments", list(itertools.product([1.0, 0.0, -1.0, float("nan"), float("inf")], [0.5, 0.0, float("nan")]))
)
def test_split_adaptive_count_that_costs_everything_is_refused(arguments: tuple[float, float]) -> None:
    with pytest.raises(ParameterError):
        split_adaptive(*arguments)


@pytest.mark.parametrize(
    ("norms", "deviations"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [float("nan")]), ([1.0], [-1.0])]
)
def test_effective_multiplier_unusable_layers_are_refused(norms: list[float], deviations: list[float]) -> None:
    with pytest.raises(ParameterError):
        effective_multiplier(norms, deviations)


def test_default_delta_is_a_tenth_of_one_record_at_most() -> None:
    assert default_delta(100) == 1e-5
    assert default_delta(1_000_000) == pytest.approx(1e-7)
    with pytest.raises(ParameterError):
        default_delta(0)


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_without_the_extra_says_what_to_install_in_one_line() -> None:
    program = """
import sys
sys.modules["dp_accounting"] = None
from heinfer.errors import HeinferError
try:
    import heinfer.training.privacy.planning
except HeinferError as error:
    print(error)
"""
    assert run_python(program) == "privacy accounting needs dp_accounting: pip install 'heinfer[train]'\n"


def test_import_of_what_counts_costs_needs_no_torch() -> None:
    names = ["planning", "budget", "ledger"]
    imports = "\n".join(f"import heinfer.training.privacy.{name}" for name in names)
    assert run_python(f"import sys\n{imports}\nprint('torch' in sys.modules)") == "False\n"
