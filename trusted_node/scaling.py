"""The scale of each sample of an upload, and what its error bound needs: found once, used by uploads and simulation.

What is scaled are the block's inputs, joined; in prepared mode they pass through the block's front steps first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.operators import PreparedForm
from heinfer.operators.plain import evaluate_step
from heinfer.operators.prepared import Maps
from heinfer.ring import RingParameters, RowNorms, input_scale, kernel


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
    if flat.dtype == np.float32:
        bits = np.zeros(len(flat), np.uint32)
        _largest_bits(np.ascontiguousarray(flat).view(np.uint32), bits)
        return bits.view(np.float32).astype(np.float64)
    if not flat.shape[1]:
        return np.zeros(len(x))
    return np.asarray(np.maximum(flat.max(axis=1), -flat.min(axis=1)), np.float64)


@kernel
def _largest_bits(x: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
    """Write the largest magnitude of every row of float32 bit patterns.

    Without their signs, patterns are ordered as the magnitudes are, infinity above numbers and NaN above infinity; and
    a largest integer is found with vectors, which a largest float is not.
    """
    for sample in range(x.shape[0]):
        row = x[sample]
        largest = np.uint32(0)
        for i in range(row.size):
            largest = max(largest, row[i] & np.uint32(0x7FFFFFFF))
        out[sample] = largest


def scale_samples(
    values: Sequence[NDArray[Any]],
    row_sum: int,
    parameters: RingParameters,
    peaks: Sequence[NDArray[np.float64]] | None = None,
) -> SampleScales:
    """Choose the scales of an upload.

    Args:
        values: its tensors, finite, shape (samples, *shape) each.
        row_sum: L of the block.
        parameters: ring.
        peaks: their `sample_peaks`, where they are known.
    """
    found = [sample_peaks(x) for x in values] if peaks is None else peaks
    peak = np.max(found, axis=0) if len(found) > 1 else found[0]
    return SampleScales(input_scale(peak, row_sum, parameters), peak, tuple(values))


def join_values(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join the tensors of an upload, shape (samples, *shape) each, to one C-contiguous array (samples, elements)."""
    flat = [x.reshape(len(x), prod(x.shape[1:])) for x in values]
    return np.ascontiguousarray(flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1))


def prepared_values(form: PreparedForm, maps: Maps, scales: SampleScales) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Return what the values of a prepared upload are gathered from; the block's front steps run here.

    Args:
        form: how the block is cut.
        maps: index maps of the front steps.
        scales: of the upload.

    Returns:
        Values of shape (samples, elements), and what they are multiplied with before rounding, shape (samples,).
    """
    if not form.front:
        return join_values(scales.values), scales.scale
    # Sums of integers below q / 2 in magnitude: exact in float64.
    shaped = [scales.scale.reshape(-1, *([1] * (x.ndim - 1))) for x in scales.values]
    made = [np.rint(x.astype(np.float64) * scale) for x, scale in zip(scales.values, shaped, strict=True)]
    for step in form.front:
        made.append(evaluate_step(step, maps, made))
    return join_values([made[v] for v in form.gathered]), np.ones(len(scales.scale))
