"""Error bound of one encrypted block, against a float64 evaluation of that block on the same input.

For a row with ||W_int||_2 = 2**17, ||W_int||_1 = 2**19, s_x = 2**29 and s_w = 2**15 the encryption noise is at most
(2**17 * 25.9 + 2**18) / 2**44 = 2e-7; with inputs up to 1 and 25 weights, rounding of the weights adds
0.5 * 25 / 2**15 = 4e-4 and dominates.

    |err_j| <= [ ||W_int,j||_2 * 3.24 * z  +  0.5 * ||W_int,j||_1 ] / (s_x * s_w[j])     noise and input rounding
             + 0.5 * min(paths_j * max|x|, multiplicity_j * ||x||_1) / s_w[j]             weight rounding
             + 2**-24 |y_j|                                                               cast to float32

The noise is sub-Gaussian of deviation 3.24, so that the first term fails with probability below 2 exp(-z**2 / 2), which
is 2.5e-14 for z = 8. The rest is certain. Paths are the weights that reach an output; the multiplicity is how many of
them may belong to one input (1 for a plain layer, the size of the window where pooling follows it).
Source: design note "Encrypted linear algebra"; the path count is a sharper form of its ||x||_1 for convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heinfer.ring.parameters import NOISE_DEVIATION

#: Deviations of the noise that the bound allows for.
NOISE_QUANTILE = 8.0
#: Relative error of one cast to float32.
FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True, slots=True)
class RowNorms:
    """What the bound needs to know of the rows of a block's integer matrix; all arrays broadcast to the output's shape.

    Attributes:
        scale: s_w, integers per unit of output and per unit of s_x; may be negative, never 0.
        l1: ||W_int,j||_1, weights that meet padding included: padding is uploaded in prepared mode, and carries noise.
        l2: ||W_int,j||_2 likewise, or an upper bound of it.
        paths: weights that reach the output.
        multiplicity: how many of these weights may multiply the same input.
    """

    scale: NDArray[np.float64]
    l1: NDArray[np.float64]
    l2: NDArray[np.float64]
    paths: NDArray[np.float64]
    multiplicity: NDArray[np.float64]

    def error_bound(
        self,
        input_scale: NDArray[np.float64],
        peak: NDArray[np.float64],
        magnitude: NDArray[np.float64],
        outputs: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the bound of every output of every sample.

        Args:
            input_scale: s_x of each sample, shape (samples,).
            peak: max |x| of each sample, shape (samples,).
            magnitude: ||x||_1 of each sample, shape (samples,).
            outputs: decrypted outputs, shape (samples, *shape).

        Returns:
            Absolute error bounds, shape (samples, *shape).
        """
        samples = (-1, *([1] * (outputs.ndim - 1)))
        scale = np.abs(self.scale)[None]
        noise = (self.l2 * (NOISE_DEVIATION * NOISE_QUANTILE) + 0.5 * self.l1)[None]
        weights = np.minimum(
            self.paths[None] * peak.reshape(samples), self.multiplicity[None] * magnitude.reshape(samples)
        )
        return (
            noise / (input_scale.reshape(samples) * scale) + 0.5 * weights / scale + FLOAT32_ROUNDING * np.abs(outputs)
        )

    def unit_bound(self, room: float) -> float:
        """Return the largest bound of any output for inputs of magnitude 1, float32 rounding of outputs aside.

        Args:
            room: s_x for a peak of 1.
        """
        scale = np.abs(self.scale)
        noise = (self.l2 * (NOISE_DEVIATION * NOISE_QUANTILE) + 0.5 * self.l1) / (room * scale)
        return float(np.max(noise + 0.5 * self.paths / scale, initial=0.0))
