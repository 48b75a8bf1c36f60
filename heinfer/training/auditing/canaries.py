"""Canaries: made-up records with gradients of their own, in the real private loop.

The parameters are divided at random into one block of coordinates a canary. A canary's gradient has one size and a
random sign in every coordinate of its block, far above the clip norm, and zero elsewhere. So canaries are orthogonal;
clipping by the norm brings each to the clip norm, while clamping each coordinate leaves it sqrt(width) times too long.
(A gradient in a single coordinate, the Dirac canary, could not tell the two apart.)

`AuditedRun` is `PrivateRun` with more records: canaries are sampled by the run's own sampler as if they stood after the
last real record, clipped and summed by the run's own code, and noise, optimiser and plan are the run's. Source: Nasr et
al. 2023, "Tight auditing of differentially private machine learning", section 4 (white-box adversary).

The auditor sees what accounting assumes an adversary sees: every noisy sum. It also knows the real records and when
they take part, and subtracts them; the guarantee of a canary rests on the secrecy of its own sampling alone. What is
left in a canary's direction is noise, plus its clipped gradient where it took part. Its score is the sum over the steps
of the log-likelihood ratio log(1 - q + q e^l) with l = <r, c> - |c|^2 / 2, r and c divided by the noise's deviation.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heinfer.errors import ParameterError
from heinfer.training.privacy.clipping import PerLayer
from heinfer.training.privacy.layers import Dense, Layout
from heinfer.training.privacy.planning import PrivacyPlan
from heinfer.training.privacy.randomness import KeyedRandomness
from heinfer.training.private_trainer import Mechanics, PrivateRun, Records

#: A canary's gradient in each of its coordinates, as a multiple of the sensitivity.
EXCESS = 10.0
#: Bytes of canaries' gradients at a time.
_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Canaries:
    """Directions in parameter space, and which of them are in the training.

    Attributes:
        included: the coins, shape (canaries,).
        places: coordinates of each canary in the concatenated parameters, int64, shape (canaries, width).
        signs: float32, 1 or -1, the same shape.
    """

    included: NDArray[np.bool_]
    places: Tensor
    signs: Tensor

    def __len__(self) -> int:
        """Return how many there are, in or out."""
        return len(self.included)

    @classmethod
    def draw(cls, count: int, weights: int) -> Canaries:
        """Draw canaries by the operating system's randomness.

        Args:
            count: how many, at most one a weight.
            weights: number of trainable weights.

        Raises:
            ParameterError: more canaries than weights.
        """
        if not 1 <= count <= weights:
            raise ParameterError(
                f"{count:,} canaries need directions of their own, and the network trains {weights:,} weights: take "
                f"1 to {weights:,}"
            )
        generator = system_generator()
        width = weights // count
        places = generator.permutation(weights)[: count * width].reshape(count, width)
        signs = 2 * generator.integers(2, size=places.shape) - 1
        return cls(flip_coins(count), torch.from_numpy(places), torch.from_numpy(signs.astype(np.float32)))


class AuditedRun(PrivateRun):
    """A private run with canaries among its records.

    Args:
        network: as in `PrivateRun`.
        records: the real ones.
        plan: for the real records; canaries join with its sampling probability.
        mechanics: as in `PrivateRun`.
        randomness: of records, canaries and noise.
        canaries: made for the network's trainable weights.

    Attributes:
        scores: of the canaries after the steps taken so far, shape (canaries,).
    """

    def __init__(
        self,
        network: nn.Module,
        records: Records,
        plan: PrivacyPlan,
        mechanics: Mechanics,
        randomness: KeyedRandomness,
        canaries: Canaries,
    ) -> None:
        super().__init__(network, records, plan, mechanics, randomness)
        self.scores = np.zeros(len(canaries))
        self._canaries = canaries
        self._sizes = [parameter.numel() for parameter in self._parameters]
        layers = torch.tensor(self._gradients.layer_of).repeat_interleave(torch.tensor(self._sizes))
        self._layers = layers[canaries.places]  # of each coordinate, shape (canaries, width)
        self._real: list[Tensor] = []

    def _sum_gradients(self) -> tuple[Any, int]:
        found, records = super()._sum_gradients()
        self._real = [total.clone() for total in found.sums]
        everyone = self._randomness.sample_mask(
            self.step, len(self._records) + len(self._canaries), self._plan.sampling_probability
        )
        sampled = np.flatnonzero(everyone[len(self._records) :] & self._canaries.included)
        at_once = max(1, _BYTES // (4 * sum(self._sizes)))
        for start in range(0, len(sampled), at_once):
            self._add_canaries(found.sums, torch.from_numpy(sampled[start : start + at_once]))
        return found, records + len(sampled)

    def _add_canaries(self, sums: list[Tensor], sampled: Tensor) -> None:
        """Clip the sampled canaries' gradients and add them, as is done with real ones."""
        parts = self._gradients_of(sampled)
        layouts = [Layout(total.shape) for total in sums]
        found = [Dense(part, layout) for part, layout in zip(parts, layouts, strict=True)]
        self._gradients.add_clipped([*found], self._clipping, sums)

    def _gradients_of(self, sampled: Tensor) -> Sequence[Tensor]:
        """Gradients before clipping: one tensor (sampled, size) a trainable parameter."""
        rows = torch.zeros(len(sampled), sum(self._sizes))
        values = EXCESS * self._clipping.sensitivity * self._canaries.signs[sampled]
        rows.scatter_(1, self._canaries.places[sampled], values)
        device = self._parameters[0].device
        return [part.contiguous().to(device) for part in rows.split_with_sizes(self._sizes, dim=1)]

    def _set_gradients(self, sums: Sequence[Tensor], noise_multiplier: float) -> None:
        super()._set_gradients(sums, noise_multiplier)
        left = [
            (parameter.grad * self._plan.expected_batch - real).flatten().double().cpu()
            for parameter, real in zip(self._parameters, self._real, strict=True)
            if parameter.grad is not None
        ]
        self._score(torch.cat(left), noise_multiplier)

    def _score(self, residual: Tensor, noise_multiplier: float) -> None:
        """Add this step's log-likelihood ratios, by the noise that the plan claims."""
        claimed = PrivateRun._deviations(self, noise_multiplier)
        deviations = torch.tensor(claimed, dtype=torch.float64).repeat_interleave(torch.tensor(self._sizes))
        expected = self._clipped() / deviations[self._canaries.places]
        seen = (residual / deviations)[self._canaries.places]
        likelihood = ((seen * expected).sum(dim=1) - expected.square().sum(dim=1) / 2).numpy()
        probability = self._plan.sampling_probability
        absent = math.log1p(-probability) if probability < 1 else -math.inf
        self.scores += np.logaddexp(absent, math.log(probability) + likelihood)

    def _clipped(self) -> Tensor:
        """What each canary adds to the sum by its clipping's definition: float64, shape (canaries, width)."""
        if not isinstance(self._clipping, PerLayer):
            return self._canaries.signs.double() * self._clipping.sensitivity / math.sqrt(self._layers.shape[1])
        norms = torch.tensor(self._clipping.clip_norms, dtype=torch.float64)
        one_hot = torch.zeros(len(self._canaries), len(norms), dtype=torch.float64)
        counts = one_hot.scatter_add_(1, self._layers, torch.ones(self._layers.shape, dtype=torch.float64))
        return self._canaries.signs.double() * (norms / counts.clamp_min(1).sqrt()).gather(1, self._layers)


def flip_coins(count: int) -> NDArray[np.bool_]:
    """Return independent fair coins of the operating system's."""
    bits = np.unpackbits(np.frombuffer(os.urandom(-(-count // 8)), dtype=np.uint8))
    return bits[:count].astype(np.bool_)


def system_generator() -> np.random.Generator:
    """Return a generator with a seed from the operating system: for all that need not be secret."""
    return np.random.default_rng(int.from_bytes(os.urandom(16), "big"))
