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
    """Secrets of the node.

    Attributes:
        scale: s_x, shape (samples,).
        peak: max |x| over all values of the upload, shape (samples,).
        values: the upload's tensors, shape (samples, *shape) each; not copied.
    """

    scale: NDArray[np.float64]
    peak: NDArray[np.float64]
    values: tuple[NDArray[Any], ...]

    def error_bound(self, norms: RowNorms, outputs: NDArray[Any]) -> NDArray[np.float64]:
        """Return the bounds of the outputs of the leading samples; shapes as `RowNorms.error_bound` has them."""
        leading = len(outputs)
        parts = [np.abs(x[:leading].reshape(leading, -1)).sum(axis=1, dtype=np.float64) for x in self.values]
        magnitude = np.sum(parts, axis=0)  # ||x||_1 over all values
        return norms.error_bound(self.scale[:leading], self.peak[:leading], magnitude, outputs.astype(np.float64))


def sample_peaks(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return max |x| of every sample, shape (samples,): not finite exactly where the sample is not."""
    flat = x.reshape(len(x), -1)
    if not flat.shape[1]:
        return np.zeros(len(x))
    return np.asarray(np.maximum(flat.max(axis=1), -flat.min(axis=1)), np.float64)


def scale_samples(values: Sequence[NDArray[Any]], row_sum: int, parameters: RingParameters) -> SampleScales:
    """Choose the scales of an upload.

    Args:
        values: its tensors, finite, shape (samples, *shape) each.
        row_sum: L of the block.
        parameters: ring.
    """
    peak = np.max([sample_peaks(x) for x in values], axis=0) if len(values) > 1 else sample_peaks(values[0])
    return SampleScales(input_scale(peak, row_sum, parameters), peak, tuple(values))
