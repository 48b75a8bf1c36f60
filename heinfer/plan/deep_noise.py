"""How far ciphertexts of a deep block may be from what its integers and polynomials give in the clear.

    encryption, rescaling, relinearisation --> standard deviation of every value --> layers, |f'| --> outputs

Worked example. At N = 16384 a rescaling to 2**32 leaves sqrt(N / 2 * N / 18) / 2**32 = 6.4e-7 of a range in a slot.

Each source of noise is independent of the others, and of another element's of its own kind; so at the first layer that
reads it, standard deviations add in squares. What two rows of a layer read in common makes their noise dependent: from
there on it is added as if it were all of one sign, which no dependence exceeds (Minkowski). An activation multiplies
noise by |f'| at most, which is bounded on [-1, 1] alone: the bound holds for samples whose values all lie within the
ranges of calibration, and tells nothing of others.

`TAIL`. Rounding is multiplied by the secret, whose value in a slot is close to complex normal: in the worst of N / 2
slots it is sqrt(ln(N / 2) + 7) times the usual, save for a chance of 0.001; beyond six standard deviations of the rest
is what less than one of 5e8 values reaches. Sources: J. Cheon, A. Kim, M. Kim, Y. Song, Homomorphic Encryption for
Arithmetic of Approximate Numbers (2017), section 3 for the noise of each operation; A. Kim et al., Approximate
Homomorphic Encryption with Reduced Approximation Error (2022), for its size in slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.polynomials import levels
from heinfer.plan.deep import DeepBlock, Layer, layer_matrix

Floats = NDArray[np.float64]
#: Of SEAL's noise; and the variance of what rounding to integers leaves.
_NOISE: Final = 3.2
_ROUNDING: Final = 1 / 12
#: Standard deviations of a normal distribution.
_NORMAL: Final = 6.0
#: Points at which |f'| is looked at.
_GRID: Final = 513
#: What decoding in float64 leaves, of values of 2**52 in 74 bits.
_DECODING: Final = 2.0**-40


def deep_error_bounds(block: DeepBlock, arrays: Mapping[str, NDArray[Any]]) -> list[Floats]:
    """Return how far each element of every output may be from what `evaluate_deep` gives, in the units of its layer.

    Args:
        block: the block.
        arrays: of its layers.

    Returns:
        One array an output, of its shape. They hold for samples whose values stay within the ranges of calibration.
    """
    degree = block.chain.degree
    tail = _NORMAL * sqrt(log(degree / 2) + 7)
    values = [_Noise(np.full(int(np.prod(t.shape)), _encryption(degree) / block.input_scale)) for t in block.inputs]
    scales = [block.input_scale] * len(values)
    for layer in block.layers:
        noise = _after_matrix(layer, layer_matrix(layer, arrays), values, scales)
        if layer.activation != "none":
            slope = _largest_slope(layer, arrays)
            noise = _Noise(np.full(layer.rows, _activation(block, layer)), {o: slope * s for o, s in noise.old.items()})
        values.append(noise)
        scales.append(layer.scale if layer.activation == "none" else block.activation_scale)
    return [
        tail * values[r].total.reshape(t.shape) + _DECODING for r, t in zip(block.results, block.outputs, strict=True)
    ]


class _Noise:
    """Standard deviations of a value's elements: of noise of its own, and of noise that came with what it was made of.

    Attributes:
        fresh: independent from element to element.
        old: by the number of the value that it comes from.
    """

    def __init__(self, fresh: Floats, old: Mapping[int, Floats] | None = None) -> None:
        self.fresh = fresh
        self.old = dict(old or {})

    @property
    def total(self) -> Floats:
        """All together."""
        return np.asarray(np.sqrt(sum((s**2 for s in self.old.values()), start=self.fresh**2)))


def _after_matrix(layer: Layer, matrix: Floats, values: list[_Noise], scales: list[float]) -> _Noise:
    """Return the noise of a layer's result; nothing is added to what its sources have, since integers are exact."""
    found: dict[int, Floats] = {}
    start = 0
    for source in layer.sources:
        noise = values[source]
        weights = matrix[:, start : start + len(noise.fresh)] * (scales[source] / layer.scale)
        start += len(noise.fresh)
        parts = {o: np.abs(weights) @ s for o, s in noise.old.items()}
        parts[source] = np.sqrt(weights**2 @ noise.fresh**2)
        for origin, part in parts.items():
            found[origin] = found.get(origin, np.zeros(layer.rows)) + part
    return _Noise(np.zeros(layer.rows), found)


def _largest_slope(layer: Layer, arrays: Mapping[str, NDArray[Any]]) -> Floats:
    """Return the largest |f'(v)| of every row, |v| <= 1."""
    if layer.activation == "square":
        return np.asarray(2 * (1 + np.abs(arrays[f"{layer.name}.shift"])))
    coefficients = arrays[f"{layer.name}.coefficients"]
    derivative = coefficients[:, 1:] * np.arange(1, layer.degree + 1)
    powers = np.linspace(-1, 1, _GRID)[:, None] ** np.arange(layer.degree)
    return np.asarray(np.abs(derivative @ powers.T).max(axis=1))


def _slots(variance: float, degree: int) -> float:
    """Return the standard deviation in a slot of noise with a variance in every coefficient."""
    return sqrt(degree / 2 * variance)


def _encryption(degree: int) -> float:
    return _slots(_NOISE**2 + _ROUNDING, degree)


def _rescaling(degree: int) -> float:
    """Both polynomials are rounded; the second is multiplied by a secret of which two thirds are not zero."""
    return _slots(_ROUNDING * (1 + 2 * degree / 3), degree)


def _activation(block: DeepBlock, layer: Layer) -> float:
    """Return what an activation adds: rescalings to about its scale, factors' rounding, and switching keys."""
    degree, target = block.chain.degree, block.activation_scale
    rescalings = 1 if layer.activation == "square" else 2 ** (levels(layer.degree) - 1)
    rounding = sqrt(rescalings) * _rescaling(degree) / target
    factors = 0.0 if layer.activation == "square" else (layer.degree + 1) / target
    moduli = np.array(block.chain.primes[: layer.primes], np.float64) / block.chain.special
    switching = _slots(degree * _NOISE**2 * _ROUNDING * float(np.sum(moduli**2)) + 2 * degree / 3, degree)
    dropped = block.chain.primes[layer.primes_left]  # of the last rescaling, before which keys are switched
    return rounding + factors + sqrt(rescalings) * switching / (target * dropped)
