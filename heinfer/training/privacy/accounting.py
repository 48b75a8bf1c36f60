"""What mechanisms cost: epsilon at a given delta, from Google's dp-accounting.

Ten epochs over 50,000 records with Poisson samples of 256 expected records and a noise multiplier of 1.3 are
floor(10 * 50,000 / 256) = 1,953 steps and cost epsilon 0.775 at delta = 1e-5:

    compute_epsilon([SampledGaussian(1.3, 256 / 50_000, 1953)], delta=1e-5)

Adjacency is the presence or absence of one record (add-or-remove-one). The number that is printed everywhere comes
from privacy loss distributions (PLD; Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022, "Connect the dots"), an
upper bound whose grid has a width of 1e-4. Rényi accounting (RDP; Mironov, Talwar and Zhang 2019) gives a second,
looser upper bound by other means, as a cross-check: 0.877 for the example.

Formal guarantee: for mechanisms whose noise multipliers and sampling probabilities were fixed in advance, in any
order, the whole is (epsilon, delta)-differentially private. No closed form for epsilon is used anywhere.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from heinfer.errors import HeinferError, ParameterError
from heinfer.training.privacy.mechanisms import Mechanism

try:
    import dp_accounting  # type: ignore[import-untyped]
    from dp_accounting.pld import privacy_loss_distribution  # type: ignore[import-untyped]
    from dp_accounting.rdp import RdpAccountant  # type: ignore[import-untyped]
except ImportError as missing:
    raise HeinferError(f"privacy accounting needs {missing.name}: pip install 'heinfer[train]'") from missing

ACCOUNTANT_VERSION = f"dp-accounting {version('dp-accounting')}"
ADJACENCY = "add-or-remove-one"
#: Width of the grid on which privacy losses are rounded up: the default of dp-accounting.
INTERVAL = 1e-4
#: Coarser grids first. Each contains the next one's upper bound, so its epsilon is a valid bound too, just larger; it
#: takes a tenth of the time.
INTERVALS = (1e-2, 1e-3, INTERVAL)
#: Below, rounding in the Fourier transforms (1e-16 per cell and 1e-15 of truncated mass) begins to show in delta.
LEAST_DELTA = 1e-12

_Terms = tuple[tuple[float, float, int], ...]  # (noise multiplier, sampling probability, count), sorted


class Accountant(Enum):
    """How epsilon is bounded."""

    PLD = "pld"  #: privacy loss distributions: tight, the number that is reported
    RDP = "rdp"  #: Rényi divergences: looser, for comparison


def compute_epsilon(
    mechanisms: Iterable[Mechanism], delta: float, accountant: Accountant = Accountant.PLD, interval: float = INTERVAL
) -> float:
    """Return an upper bound on epsilon of all mechanisms together.

    Equal mechanisms are added up and the rest is sorted first, so the order makes no difference, not even in the last
    bit. Results and single-step distributions are cached.

    Args:
        mechanisms: what was or will be taken from the same data.
        delta: in [1e-12, 1).
        accountant: which bound.
        interval: width of the PLD grid; a coarser one is faster and gives a larger bound.

    Raises:
        ParameterError: delta is out of range.
    """
    check_delta(delta)
    terms = _terms(mechanisms)
    if not terms:
        return 0.0
    return _pld_epsilon(terms, delta, interval) if accountant is Accountant.PLD else _rdp_epsilon(terms, delta)


def fits(mechanisms: Sequence[Mechanism], delta: float, target_epsilon: float) -> bool:
    """Say whether all mechanisms together stay at or below an epsilon; coarse grids settle most cases quickly."""
    return any(compute_epsilon(mechanisms, delta, interval=interval) <= target_epsilon for interval in INTERVALS)


def check_delta(delta: float) -> None:
    """Refuse a delta that is no number in [1e-12, 1).

    Raises:
        ParameterError: as said.
    """
    if not isinstance(delta, float) or not LEAST_DELTA <= delta < 1:
        raise ParameterError(f"expected delta in [{LEAST_DELTA:g}, 1), found {delta!r}")


def default_delta(samples: int) -> float:
    """Return min(1e-5, 1 / (10 N)): well below 1 / N, where publishing one record in full would pass as private."""
    if samples < 1:
        raise ParameterError(f"expected at least 1 record, found {samples}")
    return min(1e-5, 1 / (10 * samples))


def effective_multiplier(clip_norms: Sequence[float], noise_deviations: Sequence[float]) -> float:
    """Return the noise multiplier of one joint Gaussian whose blocks are clipped and noised separately.

    Dividing block l by its deviation s_l turns the noise into a standard normal and the sensitivity into
    sqrt(sum_l C_l^2 / s_l^2); the multiplier is one over that (McMahan et al. 2018, "A general approach to adding
    differential privacy to iterative training procedures", section 3).

    Args:
        clip_norms: C_l > 0 of each block, a layer for example.
        noise_deviations: s_l > 0, standard deviation of the noise on the block's sum.

    Raises:
        ParameterError: the two are empty, differ in number, or hold something that is no positive number.
    """
    values = [*clip_norms, *noise_deviations]
    if len(clip_norms) != len(noise_deviations) or not values:
        raise ParameterError(
            f"expected one noise deviation a clip norm, found {len(noise_deviations)} and {len(clip_norms)}"
        )
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ParameterError(f"expected positive clip norms and noise deviations, found {values}")
    ratios = (norm / deviation for norm, deviation in zip(clip_norms, noise_deviations, strict=True))
    return 1 / math.hypot(*ratios)


def split_adaptive(noise_multiplier: float, count_deviation: float) -> float:
    """Return the multiplier left for the gradients when a noisy count is released beside them.

    Andrew, Thakkar, McMahan and Ramaswamy 2021, "Differentially private learning with adaptive clipping", theorem 1:
    z_grad = (z^-2 - (2 sigma_b)^-2)^(-1/2). The count adds b_i - 1/2 of each record, so its sensitivity is 1/2.

    Args:
        noise_multiplier: z that both together shall have.
        count_deviation: sigma_b, standard deviation of the noise on the count; must exceed z / 2.

    Raises:
        ParameterError: the count alone costs as much as both may, or a value is no positive number.
    """
    if not all(math.isfinite(value) and value > 0 for value in (noise_multiplier, count_deviation)):
        raise ParameterError(f"expected positive deviations, found {noise_multiplier!r} and {count_deviation!r}")
    if 2 * count_deviation <= noise_multiplier:
        raise ParameterError(
            f"a count with noise of deviation {count_deviation:g} uses up a noise multiplier of {noise_multiplier:g}; "
            f"take more than {noise_multiplier / 2:g}"
        )
    return float((noise_multiplier**-2 - (2 * count_deviation) ** -2) ** -0.5)


def _terms(mechanisms: Iterable[Mechanism]) -> _Terms:
    """Add up equal mechanisms and sort them."""
    counts: Counter[tuple[float, float]] = Counter()
    for mechanism in mechanisms:
        counts[float(mechanism.noise_multiplier), float(mechanism.sampling_probability)] += mechanism.count
    return tuple(sorted((*key, count) for key, count in counts.items()))


@lru_cache(maxsize=40)  # up to 10 MB each
def _single_step(multiplier: float, probability: float, interval: float) -> Any:
    return privacy_loss_distribution.from_gaussian_mechanism(
        multiplier, value_discretization_interval=interval, sampling_prob=probability
    )


@lru_cache(maxsize=4096)
def _pld_epsilon(terms: _Terms, delta: float, interval: float) -> float:
    parts = [_single_step(z, q, interval).self_compose(count) for z, q, count in terms if q < 1]
    # Unsampled Gaussians compose to one Gaussian exactly: their squared mu = 1 / sigma add up (Dong et al. 2022).
    precision = math.fsum(count / z**2 for z, q, count in terms if q == 1)
    if precision > 0:
        parts.append(_single_step(precision**-0.5, 1.0, interval))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part)
    return float(whole.get_epsilon_for_delta(delta))


@lru_cache(maxsize=4096)
def _rdp_epsilon(terms: _Terms, delta: float) -> float:
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _quiet_orders():
        for multiplier, probability, count in terms:
            event = dp_accounting.GaussianDpEvent(multiplier)
            if probability < 1:
                event = dp_accounting.PoissonSampledDpEvent(probability, event)
            accountant.compose(event, count)
        return float(accountant.get_epsilon(delta))


@contextmanager
def _quiet_orders() -> Iterator[None]:
    """Keep dp-accounting from warning of each Rényi order that it leaves out, which is harmless: it takes the best."""
    logger = logging.getLogger("absl")

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
