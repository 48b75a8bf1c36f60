"""The private step as a mechanism: what one record can move, and what the noise hides.

Neighbouring data sets D and D' = D without one record go through the real clipped sum with the same noise; the
distance of the two releases is the sensitivity that was really had. Records are adversarial: huge, not finite, of
cancelling positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from heinfer.training.privacy.clipping import Adaptive, Automatic, Clipping, Flat, PerLayer
from heinfer.training.privacy.gradients import ClippedGradients
from heinfer.training.privacy.randomness import KeyedRandomness, Purpose

P = 1e-6
RECORDS, CLASSES = 12, 4
Release = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.LayerNorm(8),
        nn.Linear(8, CLASSES),
    )


def build_raw_network() -> nn.Module:
    """Nothing tames the inputs: gradients grow with them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(36, CLASSES))


def adversarial_records(generator: torch.Generator) -> dict[str, Tensor]:
    noise = torch.randn(1, 7, 7, generator=generator)
    return {
        "ordinary": noise,
        "zero": torch.zeros(1, 7, 7),
        "large": noise * 1e3,
        "huge": noise * 1e15,
        "beyond float32": noise * 1e30,
        "tiny": noise * 1e-20,
        "nan": noise.clone().fill_(math.nan),
        "one nan": noise.clone().index_fill_(1, torch.tensor([3]), math.nan),
        "infinite": noise.clone().index_fill_(1, torch.tensor([3]), math.inf),
        "cancelling": noise.sign() * 1e6 * (1 + 1e-6 * noise),
    }


ADVERSARIES = list(adversarial_records(torch.Generator()))


def data(copies: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Ordinary records (n, copies, 1, 7, 7), labels, and adversarial records (copies, 1, 7, 7)."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(RECORDS, copies, 1, 7, 7, generator=generator)
    labels = torch.randint(0, CLASSES, (RECORDS + 1,), generator=generator)
    adversaries = {
        name: torch.cat([record[None], torch.randn(copies - 1, 1, 7, 7, generator=generator)])
        for name, record in adversarial_records(generator).items()
    }
    return inputs, labels, adversaries


def private_release(network: nn.Module, clipping: Clipping, physical_batch: int | None, step: int = 0) -> Release:
    """The noisy sum, as a trainer releases it; the noise does not depend on the data."""
    gradients = ClippedGradients(network, cross_entropy, physical_batch)
    randomness = KeyedRandomness.from_seed(1)

    def release(inputs: Tensor, labels: Tensor) -> Tensor:
        total = gradients.sum(inputs, labels, clipping, augmented=True).sums
        flat = torch.cat([value.flatten() for value in total]).double()
        noise = torch.from_numpy(randomness.normal(Purpose.NOISE, step, len(flat)))
        return flat + 0.5 * clipping.sensitivity * noise

    return release


def moved(release: Release, inputs: Tensor, labels: Tensor, record: Tensor, place: int, without: Tensor) -> float:
    """L2 distance of the releases with and without the record, which stands at `place`; its label is the last."""
    more = torch.cat([inputs[:place], record[None], inputs[place:]])
    labels = torch.cat([labels[:place], labels[-1:], labels[place:-1]])
    return float((release(more, labels) - without).norm())


#: The sums of D and D' round differently: each of up to 13 additions of a vector no longer than the sum so far, 13 C.
def rounding(clipping: Clipping) -> float:
    return 2 * (RECORDS + 1) ** 2 * 2.0**-24 * clipping.sensitivity


CLIPPINGS: dict[str, Callable[[int], Clipping]] = {
    "flat": lambda layers: Flat(0.1),
    "flat, loose": lambda layers: Flat(30.0),
    "per layer": lambda layers: PerLayer(tuple(0.05 * (layer + 1) for layer in range(layers))),
    "automatic": lambda layers: Automatic(0.1),
    "adaptive": lambda layers: Adaptive(0.1, 0.5, 0.2, 1.0),
}


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("network", [build_network, build_raw_network])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_one_record_moves_the_released_sum_by_at_most_the_sensitivity(
    name: str, network: Callable[[], nn.Module], copies: int
) -> None:
    built = network()
    inputs, labels, adversaries = data(copies)
    layers = len(ClippedGradients(built, cross_entropy).layers)
    clipping = CLIPPINGS[name](layers)
    distances = {}
    for physical_batch in (None, 5):
        release = private_release(built, clipping, physical_batch)
        without = release(inputs, labels[:-1])
        for adversary, record in adversaries.items():
            for place in (0, RECORDS // 2):
                distance = moved(release, inputs, labels, record, place, without)
                assert distance <= clipping.sensitivity + rounding(clipping), adversary
                distances[adversary] = max(distance, distances.get(adversary, 0.0))
    # The bound is met, so that a smaller one would have failed; what is not finite counts as nothing.
    if name in ("flat", "automatic", "adaptive"):
        assert distances["large"] > 0.98 * clipping.sensitivity
    assert distances["nan"] <= rounding(clipping)
    assert distances["infinite"] <= rounding(clipping)


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_one_record_moves_the_centred_count_by_half_at_most(adversary: str) -> None:
    inputs, labels, adversaries = data(1)
    adaptive = Adaptive(1.0, 0.5, 0.2, 1.0)
    gradients = ClippedGradients(build_raw_network(), cross_entropy)
    more = gradients.sum(torch.cat([inputs, adversaries[adversary][None]]), labels, adaptive, augmented=True)
    fewer = gradients.sum(inputs, labels[:-1], adaptive, augmented=True)
    count = Adaptive.centred_count(more.below, len(more.norms)) - Adaptive.centred_count(fewer.below, len(fewer.norms))
    assert abs(count) == Adaptive.COUNT_SENSITIVITY


def clamped_release(threshold: float) -> Release:
    """What the trainer never does: clamp each element of each record's gradient."""
    network = build_raw_network()
    parameters = list(network.parameters())

    def release(inputs: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
        for record, label in zip(inputs, labels, strict=True):
            loss = cross_entropy(network(record), label.expand(len(record))).mean()
            gradient = torch.autograd.grad(loss, parameters)
            total += torch.cat([g.flatten() for g in gradient]).clamp(-threshold, threshold)
        return total

    return release


def test_elementwise_clamping_moves_by_c_times_root_d_and_would_be_caught() -> None:
    inputs, labels, adversaries = data(1)
    threshold = 0.1
    release = clamped_release(threshold)
    distance = moved(release, inputs, labels, adversaries["huge"], 0, release(inputs, labels[:-1]))
    assert distance > threshold + rounding(Flat(threshold))  # the bound of the test above does not hold
    # All but a few of the elements that the record's gradient reaches saturate: C sqrt(d).
    network = build_raw_network()
    loss = cross_entropy(network(adversaries["huge"]), labels[-1:]).sum()
    reached = sum(int(g.count_nonzero()) for g in torch.autograd.grad(loss, list(network.parameters())))
    assert reached > 100
    assert distance == pytest.approx(threshold * math.sqrt(reached), rel=0.02)


def test_clipping_the_batch_mean_would_be_caught() -> None:
    """One micro-batch, one clipped mean: a record moves the direction of the whole."""
    inputs, labels, adversaries = data(1)
    network, threshold = build_raw_network(), 0.1
    parameters = list(network.parameters())

    def release(inputs: Tensor, labels: Tensor) -> Tensor:
        gradient = torch.autograd.grad(cross_entropy(network(inputs.flatten(0, 1)), labels).mean(), parameters)
        flat = torch.cat([g.flatten() for g in gradient]).double()
        return flat * min(1.0, threshold / float(flat.norm())) * len(labels)

    distance = moved(release, inputs, labels, adversaries["large"], 0, release(inputs, labels[:-1]))
    assert distance > threshold + rounding(Flat(threshold))


@pytest.mark.parametrize("clipping", [Flat(0.3), PerLayer((0.1, 0.2)), Automatic(0.3)], ids=repr)
def test_the_noise_of_the_release_has_the_stated_deviation(clipping: Clipping) -> None:
    """Chi-square over many steps: the squares of (release - sum) / (sigma C), two-sided."""
    network = build_raw_network()
    inputs, labels, _ = data(1)
    gradients = ClippedGradients(network, cross_entropy)
    exact = torch.cat([v.flatten() for v in gradients.sum(inputs, labels[:-1], clipping, augmented=True).sums]).double()
    deviation, draws = 0.5 * clipping.sensitivity, []
    for step in range(100):
        release = private_release(network, clipping, None, step)
        draws.append(((release(inputs, labels[:-1]) - exact) / deviation).numpy())
    values = np.concatenate(draws)
    low, high = stats.chi2(len(values)).ppf([P / 2, 1 - P / 2])
    assert low < values @ values < high
    assert stats.kstest(values, "norm").pvalue > P
    # An understated sigma would be caught: 10 % less leaves the interval.
    assert not low < (0.9**2) * (values @ values) < high


def test_the_same_step_with_the_same_noise_releases_the_same_and_another_step_another() -> None:
    network = build_raw_network()
    inputs, labels, _ = data(1)
    first, again, other = (private_release(network, Flat(0.1), None, step)(inputs, labels[:-1]) for step in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
