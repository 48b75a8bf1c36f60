"""One unit of a deep block: rows of a layer, what its activation makes of them, and the sum that follows.

rows of W x (residues) --load--> ciphertexts --polynomial--> --add, rescale--> dump --> rows of the result's file
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.polynomials import polynomial_terms
from heinfer.plan.deep import DeepBlock, Layer
from heinfer.ring.seal_chain import SealChain
from heinfer.server.polynomial.arithmetic import Cipher, SealArithmetic
from heinfer.server.polynomial.files import Store
from heinfer.server.polynomial.matrices import Matrix, multiply_group
from heinfer.server.polynomial.units import Unit

Residues = NDArray[np.int64]
_POLYNOMIALS: Final = 2


class DeepRunner:
    """Runs units of one request. One in every process.

    Args:
        block: the block.
        arrays: its layers' arrays.
        keys: for relinearisation: residues, shape (primes, 2, primes and P, N), transformed.
        chain: of the block.
        read_bytes: that a product may take for what it reads.

    Raises:
        CiphertextError: these are no keys of the chain.
    """

    def __init__(
        self, block: DeepBlock, arrays: Mapping[str, NDArray[Any]], keys: Residues, chain: SealChain, read_bytes: int
    ) -> None:
        self._block = block
        self._arrays = arrays
        self._chain = chain
        self._read_bytes = read_bytes
        self._primes = block.chain.primes
        self._matrices = [Matrix(layer, arrays) for layer in block.layers]
        self._arithmetic = SealArithmetic(self._chain, self._chain.load_keys(keys))

    def run(self, unit: Unit, sources: Sequence[Store], target: Store) -> None:
        """Compute the rows of a unit and write them to their store."""
        layer = self._block.layers[unit.layer]
        values = dict(zip(unit.rows, self._linear(unit.layer, unit.rows, [s.open() for s in sources]), strict=True))
        out = target.open("r+")
        if layer.activation == "none":
            for row, value in values.items():
                out[row] = value
        elif not unit.sums:
            for row, value in values.items():
                out[row] = self._finish(layer, self._terms(layer, row, value))
        else:
            for row in unit.sums:
                terms = (
                    self._terms(layer, int(c), values[int(c)]) for c in self._matrices[unit.layer + 1].columns(row)
                )
                out[row] = self._finish(layer, reduce(self._arithmetic.add, terms))

    def _linear(self, number: int, rows: Sequence[int], sources: Sequence[Residues]) -> Residues:
        layer, degree = self._block.layers[number], self._block.chain.degree
        out = np.empty((len(rows), _POLYNOMIALS, layer.primes, degree), np.int64)
        for group in self._matrices[number].group(rows):
            multiply_group(group, sources, self._primes[: layer.primes], self._read_bytes, out)
        if layer.kind == "weighted":
            constants = self._arrays[f"{layer.name}.bias"]
            if layer.activation == "square":
                constants = constants + self._arrays[f"{layer.name}.shift"]
            for position, row in enumerate(rows):
                constant = round(float(constants[row]) * layer.scale)
                for index, prime in enumerate(self._primes[: layer.primes]):
                    b = out[position, 0, index]
                    b += constant % prime
                    b[b >= prime] -= prime
        return out

    def _terms(self, layer: Layer, row: int, residues: Residues) -> Cipher:
        """Return what an activation makes of a value, not rescaled yet."""
        value = Cipher(self._chain.load(residues, layer.scale), layer.primes, layer.scale)
        if layer.activation == "square":  # its shift is in the bias
            return self._arithmetic.multiply(value, value)
        coefficients = self._arrays[f"{layer.name}.coefficients"][row].tolist()
        return polynomial_terms(self._arithmetic, value, coefficients, self._primes, self._block.activation_scale)

    def _finish(self, layer: Layer, terms: Cipher) -> Residues:
        while terms.primes > layer.primes_left:
            terms = self._arithmetic.rescale(terms)
        return self._chain.dump(terms.value)
