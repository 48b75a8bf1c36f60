"""Scales: how real numbers become integers without ever overflowing the modulus.

Weights get one scale per output row when a model is partitioned, values get one scale per sample when a query runs.
For weights of at most 1 in a row of 25 and inputs of at most 1, s_w = 32767 and L <= 25 * 32767, so that
s_x = (q/2 - 21.5 L - 2) / L is about 2**29: inputs keep 29 bits, weights 15.

Where 15 bits are too few, weights are written in digits: what the first digit leaves, at most half a unit, times
2**bits is rounded again, and so on. Two digits of 15 bits leave 2**-31 of a row's largest weight. Digits are rows of
their own, at the scales s_w, 2**bits s_w, ..., and the node adds what they give.

The input scale is chosen from the values themselves. It is a secret of the node and never leaves it.
Source: design note "Encrypted linear algebra", section "Scales, and why nothing can overflow".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.ring.parameters import NOISE_LIMIT, WEIGHT_LIMIT, RingParameters

#: Most bits of an integer weight's magnitude.
WEIGHT_BITS: Final = WEIGHT_LIMIT.bit_length()
#: Most bits of all digits of a weight: beyond, the float64 product of weight and scale is no better.
PRECISION_BITS: Final = 45
#: Relative error of one float64 product.
_FLOAT64_ROUNDING: Final = 2.0**-53


def weight_scale(largest: NDArray[np.float64], bits: int = WEIGHT_BITS) -> NDArray[np.float64]:
    """Return the scale of each output row, such that its largest weight becomes 2**bits - 1.

    Args:
        largest: max |W_jk| over k, any shape, finite and >= 0.
        bits: of the first digit.

    Returns:
        Scales > 0 of the same shape; 1 for a zero row.
    """
    largest = np.asarray(largest, np.float64)
    # A row of denormals would ask for an infinite scale, at its last digit at least; it is as good as zero.
    usable = largest > np.finfo(np.float64).tiny * 2.0**PRECISION_BITS
    return np.where(usable, (2**bits - 1) / np.where(usable, largest, 1.0), 1.0)


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of some weights, and what it leaves.

    Attributes:
        integers: the digit, of the weights' shape, magnitude < 2**bits.
        rest: |weights - this digit - those before it| at the digit's scale, or a little more: > 0 where a weight is not
            0.
    """

    integers: NDArray[np.int16]
    rest: NDArray[np.float64]


def split_digits(
    weights: NDArray[Any], scale: NDArray[np.float64], digits: int = 1, bits: int = WEIGHT_BITS
) -> list[Digit]:
    """Write weights in digits.

    Differences and powers of two are exact in float64, so that the product with the scale alone adds to what is left.

    Args:
        weights: real, any shape.
        scale: of the first digit (`weight_scale`), broadcasts; digit d, counted from 0, has `scale` * 2**(bits * d).
        digits: how many.
        bits: of each.
    """
    limit = 2**bits - 1
    real = np.asarray(weights, np.float64)
    # In place: a layer's weights may fill a gigabyte. Without `out`, arrays without axes would become numbers.
    rest = np.multiply(real, scale, out=np.empty(real.shape))
    inexact = np.abs(rest, out=np.empty_like(rest))
    inexact *= _FLOAT64_ROUNDING
    found = []
    for _ in range(digits):
        whole = np.rint(rest, out=np.empty_like(rest))
        np.clip(whole, -limit, limit, out=whole)
        rest -= whole
        integers = whole.astype(np.int16)
        np.abs(rest, out=whole)
        whole += inexact
        found.append(Digit(integers, whole))
        rest *= 2.0**bits
        inexact *= 2.0**bits
    return found


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
