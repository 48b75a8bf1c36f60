"""How much of a record's gradient enters the sum, and the sensitivity that follows.

A record with a gradient of norm 5 under `Flat(1.0)` is scaled by 0.2; one of norm 0.5 is kept. The sum over all records
then moves by at most 1.0 when one record is added or removed.

Formal guarantees: for every strategy, sum_l (factor_l * norm_l)^2 <= sensitivity^2 for one record, whatever its
gradient; l runs over the layers. `sensitivity` is under adding or removing one record. Element-wise clamping is not
offered: it bounds each of d coordinates by C, so that its sensitivity is C sqrt(d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from heinfer.errors import ParameterError

#: A record over its threshold is scaled a little below it, so that the rounding of its float32 norm cannot lift it
#: above. Squares are summed in float32 in blocks of at most 4096, eight or more at a time: an error of at most
#: 512 * 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), half of that in the root, 2^-16.
ROUNDING_MARGIN = 2.0**-15


class Clipping(Protocol):
    """A rule that scales each record's gradient."""

    @property
    def sensitivity(self) -> float:
        """L2 norm by which the sum moves at most when one record is added or removed."""

    def factors(self, norms: Tensor) -> Tensor:
        """Factors of the layers' gradients.

        Args:
            norms: L2 norm of every record's gradient in every layer, finite, shape (records, layers).

        Returns:
            Factors at least 0, shape (records, layers).
        """

    def within(self, norms: Tensor) -> Tensor:
        """Which records are at or below the threshold: bool, shape (records,); `norms` as in `factors`."""


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ParameterError(f"{name} must be finite and above 0, found {value}")
    return float(value)


def _total(norms: Tensor) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(norms, dim=1, keepdim=True)
    return total


def _scale_to(threshold: float | Tensor, norms: Tensor) -> Tensor:
    """min(1, threshold / norm), a little less where it is below 1."""
    return torch.where(norms <= threshold * (1 - ROUNDING_MARGIN), 1.0, threshold * (1 - ROUNDING_MARGIN) / norms)


@dataclass(frozen=True, slots=True)
class Flat:
    """Scale the whole gradient to at most `clip_norm` (Abadi et al. 2016, algorithm 1)."""

    clip_norm: float

    def __post_init__(self) -> None:
        _positive("clip norm", self.clip_norm)

    @property
    def sensitivity(self) -> float:
        """The clip norm."""
        return self.clip_norm

    def factors(self, norms: Tensor) -> Tensor:
        """See `Clipping.factors`."""
        return _scale_to(self.clip_norm, _total(norms)).expand_as(norms)

    def within(self, norms: Tensor) -> Tensor:
        """See `Clipping.within`."""
        return _total(norms).squeeze(1) <= self.clip_norm


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Scale each layer's gradient to a threshold of its own (McMahan et al. 2018, section 3).

    Attributes:
        clip_norms: one for each layer, in the order of `ClippedGradients.layers`.
    """

    clip_norms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.clip_norms:
            raise ParameterError("clipping per layer needs a clip norm for each layer, found none")
        object.__setattr__(self, "clip_norms", tuple(_positive("clip norm of a layer", c) for c in self.clip_norms))

    @property
    def sensitivity(self) -> float:
        """Square root of the sum of squared thresholds."""
        return math.hypot(*self.clip_norms)

    def factors(self, norms: Tensor) -> Tensor:
        """See `Clipping.factors`.

        Raises:
            ParameterError: not as many layers as thresholds.
        """
        return _scale_to(self._thresholds(norms), norms)

    def within(self, norms: Tensor) -> Tensor:
        """Records at or below the threshold in every layer."""
        return (norms <= self._thresholds(norms)).all(dim=1)

    def _thresholds(self, norms: Tensor) -> Tensor:
        if norms.shape[1] != len(self.clip_norms):
            raise ParameterError(
                f"clipping per layer has {len(self.clip_norms)} clip norms, but the network has {norms.shape[1]} "
                "layers with trainable parameters; give one for each"
            )
        return torch.tensor(self.clip_norms, dtype=norms.dtype, device=norms.device)


@dataclass(frozen=True, slots=True)
class Automatic:
    """Scale every gradient to just below `clip_norm`, short ones too: C / (norm + gamma) (Bu et al. 2023, AUTO-S).

    Attributes:
        clip_norm: what the norms approach.
        gamma: keeps short gradients shorter than long ones; 0.01 as in the paper.
    """

    clip_norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _positive("clip norm", self.clip_norm)
        _positive("gamma", self.gamma)

    @property
    def sensitivity(self) -> float:
        """The clip norm: C norm / (norm + gamma) < C."""
        return self.clip_norm

    def factors(self, norms: Tensor) -> Tensor:
        """See `Clipping.factors`."""
        return (self.clip_norm * (1 - ROUNDING_MARGIN) / (_total(norms) + self.gamma)).expand_as(norms)

    def within(self, norms: Tensor) -> Tensor:
        """Records whose gradient is not longer than `clip_norm`."""
        return _total(norms).squeeze(1) <= self.clip_norm


@dataclass(slots=True)
class Adaptive:
    """Flat clipping with a threshold that follows a quantile of the norms, privately (Andrew et al. 2021).

    Each step releases two things of the same sample: the sum of clipped gradients, and how many records are within the
    threshold. A record counts +1/2 within and -1/2 above, so that the count's sensitivity is 1/2; it gets noise of
    deviation `count_deviation`. What the pair costs is `accounting.split_adaptive`'s business.

    Attributes:
        threshold: of the next step; the state that a checkpoint keeps.
        quantile: fraction of records that should be within the threshold.
        learning_rate: of the geometric update; 0.2 in the paper.
        count_deviation: standard deviation of the noise on the count, in records; expected batch / 20 in the paper.
    """

    threshold: float
    quantile: float
    learning_rate: float
    count_deviation: float

    #: Of the centred count under adding or removing one record.
    COUNT_SENSITIVITY = 0.5

    def __post_init__(self) -> None:
        _positive("initial threshold", self.threshold)
        _positive("learning rate of the threshold", self.learning_rate)
        _positive("noise deviation of the count", self.count_deviation)
        if not 0 < self.quantile < 1:
            raise ParameterError(f"the quantile of norms must be between 0 and 1, found {self.quantile}")

    @property
    def sensitivity(self) -> float:
        """The present threshold."""
        return self.threshold

    def factors(self, norms: Tensor) -> Tensor:
        """See `Clipping.factors`."""
        return Flat(self.threshold).factors(norms)

    def within(self, norms: Tensor) -> Tensor:
        """See `Clipping.within`."""
        return Flat(self.threshold).within(norms)

    @staticmethod
    def centred_count(within: int, records: int) -> float:
        """Sum over the sampled records of +1/2 (within the threshold) or -1/2. Private: noise goes on top."""
        return within - records / 2

    def noisy_fraction(self, within: int, records: int, expected_batch: int, normal: float) -> float:
        """Estimate of the fraction within the threshold, safe to release.

        Args:
            within: records of the sample at or below the threshold.
            records: records of the sample.
            expected_batch: the public expected size of a sample, the denominator.
            normal: one standard normal number from the run's secret generator.
        """
        count = self.centred_count(within, records) + self.count_deviation * normal
        return 0.5 + count / expected_batch

    def update(self, noisy_fraction: float) -> None:
        """Move the threshold: C <- C exp(-learning_rate (fraction - quantile)).

        Raises:
            ParameterError: the threshold left the range of numbers; nothing is changed then.
        """
        moved = self.threshold * math.exp(min(700.0, -self.learning_rate * (noisy_fraction - self.quantile)))
        self.threshold = _positive("adaptive threshold", moved)
