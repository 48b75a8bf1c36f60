"""The scale of each sample of an upload, and what its error bound needs: found once, used by uploads and simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.ring import RingParameters, RowNorms, input_scale


@dataclass(frozen=True, slots=True)
class SampleScales:
    """Secrets of the node, each of shape (samples,).

    Attributes:
        scale: s_x.
        peak: max |x| over all values of the upload.
        magnitude: ||x||_1 over all values of the upload.
    """

    scale: NDArray[np.float64]
    peak: NDArray[np.float64]
    magnitude: NDArray[np.float64]

    def error_bound(self, norms: RowNorms, outputs: NDArray[Any]) -> NDArray[np.float64]:
        """Return the bounds of the outputs of the leading samples; shapes as `RowNorms.error_bound` has them."""
        leading = len(outputs)
        return norms.error_bound(
            self.scale[:leading], self.peak[:leading], self.magnitude[:leading], outputs.astype(np.float64)
        )


def scale_samples(values: Sequence[NDArray[Any]], row_sum: int, parameters: RingParameters) -> SampleScales:
    """Choose the scales of an upload.

    Args:
        values: its tensors, finite, shape (samples, *shape) each.
        row_sum: L of the block.
        parameters: ring.
    """
    flat = [x.reshape(len(x), -1) for x in values]
    peak = np.max([np.abs(x).max(axis=1, initial=0.0) for x in flat], axis=0).astype(np.float64)
    magnitude = np.sum([np.abs(x).sum(axis=1, dtype=np.float64) for x in flat], axis=0)
    return SampleScales(input_scale(peak, row_sum, parameters), peak, magnitude)
