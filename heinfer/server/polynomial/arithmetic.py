"""Ciphertexts of deep blocks: the one module of the server that imports SEAL. No key but those that relinearise.

    x (scale s, primes l) --multiply--> x x (s s, l) --rescale: relinearise, drop p--> x x (s s / p, l - 1)

A value goes with the scale that the plan gives it; SEAL's own is set to the same number, up to what floats round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import tenseal.sealapi as sealapi

from heinfer.operators.polynomials import Track
from heinfer.ring.chain import ChainParameters
from heinfer.ring.seal_chain import SealChain

_POLYNOMIALS: Final = 2


def open_chain(parameters: ChainParameters) -> SealChain:
    """Return SEAL set up for a chain, without any key.

    Raises:
        ParameterError: SEAL refuses it.
    """
    return SealChain(sealapi, parameters)


@dataclass(frozen=True, slots=True)
class Cipher:
    """A ciphertext of SEAL with the scale that the plan gives it."""

    value: Any
    primes: int
    scale: float


class SealArithmetic:
    """Operations on ciphertexts for `heinfer.operators.polynomials`."""

    def __init__(self, chain: SealChain, keys: Any) -> None:
        self._chain = chain
        self._keys = keys
        self._evaluator = sealapi.Evaluator(chain.context)
        self._encoder = sealapi.CKKSEncoder(chain.context)

    def track(self, value: Cipher) -> Track:
        """Return primes and scale of a value."""
        return Track(value.primes, value.scale)

    def multiply(self, left: Cipher, right: Cipher) -> Cipher:
        """Multiply; `rescale` relinearises."""
        result = sealapi.Ciphertext()
        if left is right:
            self._evaluator.square(left.value, result)
        else:
            self._evaluator.multiply(left.value, right.value, result)
        return self._as(result, left.primes, left.scale * right.scale)

    def scale_by(self, value: Cipher, factor: float, scale: float) -> Cipher:
        """Multiply by a constant; one that is rounded to 0 is 1 unit, since SEAL makes no ciphertexts of nothing."""
        result = sealapi.Ciphertext()
        if round(factor * scale) == 0:
            factor = 1 / scale
        self._evaluator.multiply_plain(value.value, self._encode(factor, value.primes, scale), result)
        return self._as(result, value.primes, value.scale * scale)

    def add(self, left: Cipher, right: Cipher) -> Cipher:
        """Add two values of one scale, which may differ by what floats round; SEAL wants it equal for that moment."""
        result = sealapi.Ciphertext()
        own = right.value.scale
        right.value.scale = left.value.scale
        try:
            self._evaluator.add(left.value, right.value, result)
        finally:
            right.value.scale = own
        return self._as(result, left.primes, left.scale)

    def shift(self, value: Cipher, constant: float) -> Cipher:
        """Add a constant."""
        result = sealapi.Ciphertext()
        self._evaluator.add_plain(value.value, self._encode(constant, value.primes, value.value.scale), result)
        return self._as(result, value.primes, value.scale)

    def rescale(self, value: Cipher) -> Cipher:
        """Relinearise where there is a product, drop the last prime and divide by it."""
        if value.value.size() > _POLYNOMIALS:
            self._evaluator.relinearize_inplace(value.value, self._keys)
        result = sealapi.Ciphertext()
        self._evaluator.rescale_to_next(value.value, result)
        dropped = self._chain.parameters.primes[value.primes - 1]
        return self._as(result, value.primes - 1, value.scale / dropped)

    def lower(self, value: Cipher, primes: int) -> Cipher:
        """Drop last primes."""
        if primes == value.primes:
            return value
        result = sealapi.Ciphertext()
        self._evaluator.mod_switch_to(value.value, self._chain.name(primes), result)
        return self._as(result, primes, value.scale)

    def _encode(self, constant: float, primes: int, scale: float) -> Any:
        plain = sealapi.Plaintext()
        self._encoder.encode(float(constant), self._chain.name(primes), float(scale), plain)
        return plain

    @staticmethod
    def _as(cipher: Any, primes: int, scale: float) -> Cipher:
        cipher.scale = scale
        return Cipher(cipher, primes, scale)
