"""Rounding of what leaves the trust domain.

A CKKS decryption carries noise that depends on the secret key. Results of a last block are therefore rounded to a grid
of about their error bound: a bound of 1.4e-3 gives steps of 2**-10. A step is at least half of the bound, which holds
eight deviations of the noise and mostly far more (rounding of weights dominates it or, where they have several digits,
of float32), so that what the noise adds disappears in the rounding. One step a sample, so that outputs of one sample
are compared on one grid.
Source: Li and Micciancio, EUROCRYPT 2021 (ePrint 2020/1533), on what decryptions give away.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rounding_step(bound: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the power of two at or below the largest bound of each sample; shape (samples,), 0 where that is 0."""
    largest = bound.reshape(len(bound), -1).max(axis=1, initial=0.0)
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1.0)))
    return np.where(largest > 0, np.exp2(exponent), 0.0)


def round_to_step(values: NDArray[np.float32], step: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round each sample, shape (samples, *shape), to multiples of its step; a step of 0 changes nothing."""
    shaped = np.where(step > 0, step, 1.0).reshape(-1, *([1] * (values.ndim - 1)))
    rounded = np.rint(values / shaped) * shaped
    return np.where(step.reshape(shaped.shape) > 0, rounded, values).astype(np.float32)
