"""Negative controls: trainers that break the guarantee, which an audit must catch. For audits and tests only.

An audit that passes these finds nothing in a sound trainer either, so its verdict would mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from heinfer.training.auditing.canaries import AuditedRun

#: Noise of `Understated` over the noise that is accounted for. A thousand canaries find this out for claims of up to
#: about 4; a quarter of the noise is missed now and then.
UNDERSTATED_PART = 0.125


class Noiseless(AuditedRun):
    """Forgets the noise: the true epsilon is infinite."""

    def _deviations(self, noise_multiplier: float) -> list[float]:
        return [0.0] * len(self._parameters)


class Understated(AuditedRun):
    """Adds an eighth of the noise that is accounted for."""

    def _deviations(self, noise_multiplier: float) -> list[float]:
        return [UNDERSTATED_PART * deviation for deviation in super()._deviations(noise_multiplier)]


class Clamped(AuditedRun):
    """Clamps each coordinate of a canary to the clip norm, in place of its norm: its length is C sqrt(coordinates)."""

    def _add_canaries(self, sums: list[Tensor], sampled: Tensor) -> None:
        bound = self._clipping.sensitivity
        for total, gradients in zip(sums, self._gradients_of(sampled), strict=True):
            total += gradients.clamp(-bound, bound).sum(dim=0).view_as(total)


#: By the name that is reported.
CONTROLS: Mapping[str, type[AuditedRun]] = MappingProxyType(
    {"no noise": Noiseless, "element-wise clamp": Clamped, "an eighth of the noise": Understated}
)
