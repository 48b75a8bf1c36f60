"""Error bound of one encrypted block, against a float64 evaluation of that block on the same input.

For a row with ||W_int||_2 = 2**17, ||W_int||_1 = 2**19, s_x = 2**29 and s_w = 2**15 the encryption noise is at most
(2**17 * 25.9 + 2**18) / 2**44 = 2e-7; with inputs up to 1 and 25 weights, rounding of the weights adds about
0.25 * 25 / 2**15 = 2e-4 and dominates.

    |err_j| <= [ ||W_int,j||_2 * 3.24 * z  +  0.5 * ||W_int,j||_1 ] / (s_x * s_w[j])     noise and input rounding
             + min(||R_j||_1 * max|x|, ||R_j||_max * ||x||_1) / s_w[j]                    weight rounding
             + 2**-24 |y_j|                                                               cast to float32

The noise is sub-Gaussian of deviation 3.24, so that the first term fails with probability below 2 exp(-z**2 / 2), which
is 2.5e-14 for z = 8. The rest is certain. R = W s_w - W_int is what rounding did to the weights, known when a model is
partitioned: on average a quarter for each weight. Where weights have several digits, each digit has a row, the bounds
of the rows add up, and only the last digit's rounding counts: R is 0 for those before it.
Source: design note "Encrypted linear algebra"; known rounding is a sharper form of its 0.5 * ||x||_1.
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
        rounding: ||R_j||_1 over the weights that reach the output, or an upper bound of it.
        input_rounding: the most of this that multiplies one input, likewise.
    """

    scale: NDArray[np.float64]
    l1: NDArray[np.float64]
    l2: NDArray[np.float64]
    rounding: NDArray[np.float64]
    input_rounding: NDArray[np.float64]

    @property
    def gain(self) -> NDArray[np.float64]:
        """The largest output for inputs of magnitude 1, or an upper bound of it: ||W_j||_1."""
        return (self.l1 + self.rounding) / np.abs(self.scale)

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
            self.rounding[None] * peak.reshape(samples), self.input_rounding[None] * magnitude.reshape(samples)
        )
        return noise / (input_scale.reshape(samples) * scale) + weights / scale + FLOAT32_ROUNDING * np.abs(outputs)

    def unit_bounds(self, room: float) -> NDArray[np.float64]:
        """Return the bound of every output for inputs of magnitude 1, float32 rounding of outputs aside.

        Args:
            room: s_x for a peak of 1.
        """
        scale = np.abs(self.scale)
        noise = (self.l2 * (NOISE_DEVIATION * NOISE_QUANTILE) + 0.5 * self.l1) / (room * scale)
        return np.asarray(noise + self.rounding / scale)
