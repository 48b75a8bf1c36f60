"""Whether what a deep block computes fits the primes that it has left: looked at before anything is encrypted.

    inputs, |x| <= 2 ranges --> sum of |weights| times what is read --> |v| <= 2 --> every product of the polynomial
                                                |                                          |
                                                +------ times its scale, below q / 4 ------+

A ciphertext holds numbers in (-q / 2, q / 2), q the product of its primes; beyond, they wrap around and decrypt to
something else. So the largest value of every step times its scale must be below half of that, and the other half is
room for noise. A slot's value bounds coefficients: these are means of slots, up to signs.

What values can be: inputs are cut to `LARGEST_VALUE` ranges (`heinfer.plan.deep_terms`). A layer may add up all that it
reads with the signs that make it largest, where what an activation makes is taken in the calibrated range, [-1, 1] in
the units of its layer. An activation may be led astray as far as inputs. No plan holds what is beyond: it is why values
outside of their ranges are counted.

Worked example. A result has the scale 2**52 and two primes, of 50 and 24 bits: 74 bits, less two, leave 20 bits for
values in ranges. A row of 400 weights of 2**18 units each that reads values of 2**32 needs 9 + 18 + 32 = 59 of 72 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError, PlanError
from heinfer.operators.polynomials import Track, polynomial_terms

if TYPE_CHECKING:
    from heinfer.plan.deep import DeepBlock, Layer

Floats = NDArray[np.float64]
#: How far values may go, in ranges: where the node cuts inputs off.
LARGEST_VALUE: Final = 2.0
#: A half for the sign, a half of the rest for noise.
_ROOM_BITS: Final = 2.0
#: Noise of a rescaling stays below N units (`heinfer.plan.deep_noise`); a range has so many bits above.
_LEAST_BITS: Final = 8.0
#: Points at which polynomials are looked at; between two of them they rise by less than a thousandth.
_GRID: Final = 257


@dataclass(frozen=True, slots=True)
class _Sized:
    """A value with the largest magnitude that it can have."""

    primes: int
    scale: float
    largest: float


class _Sizes:
    """Arithmetic on magnitudes, for `heinfer.operators.polynomials`; refuses what does not fit."""

    def __init__(self, name: str, moduli: Sequence[int]) -> None:
        self._name = name
        self._moduli = moduli

    def track(self, value: _Sized) -> Track:
        """Return primes and scale of a value."""
        return Track(value.primes, value.scale)

    def multiply(self, left: _Sized, right: _Sized) -> _Sized:
        """Multiply two values."""
        return self.checked(_Sized(left.primes, left.scale * right.scale, left.largest * right.largest))

    def scale_by(self, value: _Sized, factor: float, scale: float) -> _Sized:
        """Multiply by a constant; its rounding to an integer is counted as well."""
        size = value.largest * (abs(factor) + 1 / scale)
        return self.checked(_Sized(value.primes, value.scale * scale, size))

    def add(self, left: _Sized, right: _Sized) -> _Sized:
        """Add two values, as if both were of one sign."""
        return self.checked(_Sized(left.primes, left.scale, left.largest + right.largest))

    def shift(self, value: _Sized, constant: float) -> _Sized:
        """Add a constant, likewise."""
        return self.checked(_Sized(value.primes, value.scale, value.largest + abs(constant)))

    def rescale(self, value: _Sized) -> _Sized:
        """Drop the last prime and divide by it."""
        return self.checked(_Sized(value.primes - 1, value.scale / self._moduli[value.primes - 1], value.largest))

    def lower(self, value: _Sized, primes: int) -> _Sized:
        """Drop last primes without dividing."""
        return self.checked(_Sized(primes, value.scale, value.largest))

    def checked(self, value: _Sized) -> _Sized:
        """Return a value that fits.

        Raises:
            PlanError: it does not.
        """
        needed, left = _bits(value.scale, value.largest, self._moduli[: value.primes])
        if not needed <= left:
            raise PlanError(
                f"{self._name}: values up to {value.largest:.3g} at scale 2**{log2(value.scale):.1f} need "
                f"{needed:.1f} bits, and {value.primes} primes have {left:.1f}; partition the model again"
            )
        return value


def fits(largest: float, scale: float, moduli: Sequence[int]) -> bool:
    """Return whether values up to a size, at a scale, fit the primes that they have."""
    needed, left = _bits(scale, largest, moduli)
    return needed <= left


def _bits(scale: float, largest: float, moduli: Sequence[int]) -> tuple[float, float]:
    """Return the bits that values need, and those that their primes have."""
    return log2(max(largest, 2.0**-60)) + log2(scale) + _ROOM_BITS, sum(map(log2, moduli))


def check_scales(block: DeepBlock) -> None:
    """Check every scale of a block against the primes that values have there, whatever its weights are.

    Raises:
        PlanError: values up to `LARGEST_VALUE` don't fit, or noise would leave too little of them.
    """
    primes = block.chain.primes
    parts = [("inputs", len(primes), block.input_scale)]
    for layer in block.layers:
        parts.append((f"layer {layer.name!r}", layer.primes, layer.scale))
        if layer.activation != "none":
            parts.append((f"the activation of {layer.name!r}", layer.primes_left, block.activation_scale))
    parts += [(f"output {t.name!r}", block.result_primes, block.result_scale(n)) for n, t in enumerate(block.outputs)]
    least = _LEAST_BITS + log2(block.chain.degree)
    for name, count, scale in parts:
        if log2(scale) < least:
            raise PlanError(
                f"{name}: expected a scale of 2**{least:.0f} at least, since noise reaches N, found "
                f"2**{log2(scale):.1f}; partition the model again"
            )
        _Sizes(name, primes).checked(_Sized(count, scale, LARGEST_VALUE))
    for layer in block.layers:
        if layer.activation == "polynomial":
            _check_polynomial(block, layer, [0.0] * (layer.degree + 1))


def check_headroom(block: DeepBlock, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Check that sums and polynomials of a block fit, with the weights and coefficients that it has.

    Args:
        block: the block; `check_scales` holds.
        arrays: of its layers, which fit in shape and type.

    Raises:
        PlanError: something does not fit.
    """
    results = {r - len(block.inputs) for r in block.results}
    read = [np.full(prod(t.shape), LARGEST_VALUE) * block.input_scale for t in block.inputs]
    for number, layer in enumerate(block.layers):
        sums = _row_sums(layer, arrays, np.concatenate([read[s] for s in layer.sources]))
        sizes = sums / layer.scale
        if layer.kind == "weighted":
            sizes = sizes + np.abs(arrays[f"{layer.name}.bias"])
        primes = min(layer.primes, block.result_primes) if number in results else layer.primes
        arithmetic = _Sizes(f"layer {layer.name!r}", block.chain.primes)
        arithmetic.checked(_Sized(primes, layer.scale, float(sizes.max())))
        _check_activation(block, layer, arrays)
        if layer.kind == "sum":
            read.append(sums)
        else:
            scale = layer.scale if layer.activation == "none" else block.activation_scale
            read.append(_largest_values(layer, arrays) * scale)


def _row_sums(layer: Layer, arrays: Mapping[str, NDArray[Any]], read: Floats) -> Floats:
    """Return what the rows of a layer make at most of what they read, in units of ciphertexts."""
    weights, indices = arrays[f"{layer.name}.weights"], arrays[f"{layer.name}.indices"]
    products = np.abs(weights.astype(np.float64)) * read[indices]
    return np.asarray(np.add.reduceat(products, arrays[f"{layer.name}.indptr"][:-1]))


def _check_activation(block: DeepBlock, layer: Layer, arrays: Mapping[str, NDArray[Any]]) -> None:
    if layer.activation == "square":  # its shift is in the bias
        largest = LARGEST_VALUE + float(np.abs(arrays[f"{layer.name}.shift"]).max())
        arithmetic = _Sizes(f"the square of layer {layer.name!r}", block.chain.primes)
        value = arithmetic.checked(_Sized(layer.primes, layer.scale, largest))
        value = arithmetic.multiply(value, value)
        while value.primes > layer.primes_left:
            value = arithmetic.rescale(value)
    elif layer.activation == "polynomial":
        coefficients = np.abs(arrays[f"{layer.name}.coefficients"]).max(axis=0)
        _check_polynomial(block, layer, coefficients.tolist())


def _check_polynomial(block: DeepBlock, layer: Layer, coefficients: list[float]) -> None:
    """Check every operation of a polynomial, all of whose terms may be of one sign."""
    arithmetic = _Sizes(f"the polynomial of layer {layer.name!r}", block.chain.primes)
    value = _Sized(layer.primes, layer.scale, LARGEST_VALUE)
    try:
        terms = polynomial_terms(arithmetic, value, coefficients, block.chain.primes, block.activation_scale)
    except ParameterError as error:
        raise PlanError(f"layer {layer.name!r}: {error}; partition the model again") from error
    arithmetic.rescale(terms)


def _largest_values(layer: Layer, arrays: Mapping[str, NDArray[Any]]) -> Floats:
    """Return how large the elements of a layer's result can be while the layer itself is in [-1, 1]."""
    if layer.activation == "none":
        return np.ones(layer.rows)
    if layer.activation == "square":
        return np.asarray((1 + np.abs(arrays[f"{layer.name}.shift"])) ** 2)
    powers = np.linspace(-1, 1, _GRID)[:, None] ** np.arange(layer.degree + 1)
    kinds, of_row = np.unique(arrays[f"{layer.name}.coefficients"], axis=0, return_inverse=True)
    return np.asarray(np.abs(kinds @ powers.T).max(axis=1)[of_row.reshape(-1)])
