"""Scales: how real numbers become integers without ever overflowing the modulus.

Weights get one scale per output row when a model is partitioned, values get one scale per sample when a query runs.
For weights of at most 1 in a row of 25 and inputs of at most 1, s_w = 32767 and L <= 25 * 32767, so that
s_x = (q/2 - 21.5 L - 2) / L is about 2**29: inputs keep 29 bits, weights 15.

The input scale is chosen from the values themselves. It is a secret of the node and never leaves it.
Source: design note "Encrypted linear algebra", section "Scales, and why nothing can overflow".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heinfer.ring.parameters import NOISE_LIMIT, WEIGHT_LIMIT, RingParameters


def weight_scale(largest: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the scale of each output row, such that its largest weight becomes `WEIGHT_LIMIT`.

    Args:
        largest: max |W_jk| over k, any shape, finite and >= 0.

    Returns:
        Scales > 0 of the same shape; 1 for a zero row.
    """
    largest = np.asarray(largest, np.float64)
    # A row of denormals would ask for an infinite scale; it is as good as zero.
    usable = largest > np.finfo(np.float64).tiny * WEIGHT_LIMIT
    return np.where(usable, WEIGHT_LIMIT / np.where(usable, largest, 1.0), 1.0)


def quantise(weights: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.int16]:
    """Return rint(weights * scale) as integers of magnitude <= `WEIGHT_LIMIT`; `scale` broadcasts."""
    return np.clip(np.rint(weights * scale), -WEIGHT_LIMIT, WEIGHT_LIMIT).astype(np.int16)


def input_scale(peak: NDArray[np.float64], row_sum: int, parameters: RingParameters) -> NDArray[np.float64]:
    """Return the scale of each sample's input values.

    With it |W (x_int + e)| < q/2 for every input and every noise |e| <= 21.

    Args:
        peak: max |x| of each sample over all values of the upload, finite and >= 0, any shape.
        row_sum: L, the largest sum of |W_int| over a row of the block.
        parameters: ring.

    Returns:
        Scales > 0 of the same shape; 1 where the row sum is 0.
    """
    peak = np.asarray(peak, np.float64)
    if row_sum == 0:
        return np.ones_like(peak)
    room = (parameters.modulus / 2 - (NOISE_LIMIT + 0.5) * row_sum - 2) / row_sum
    # Zeros fit at any scale. That of float32's smallest number is finite and makes their noise vanish; at a scale of 1
    # it would be about 10 times the weights.
    return room / np.maximum(peak, float(np.finfo(np.float32).smallest_subnormal))
