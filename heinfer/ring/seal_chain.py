"""SEAL's ciphertexts of a chain of moduli, as arrays and back.

Node and server both need this, and neither may get SEAL from the other, nor from here: they pass the binding in.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import CiphertextError, ParameterError
from heinfer.ring.chain import ChainParameters
from heinfer.ring.saved_form import (
    Fields,
    MemoryFile,
    format_ciphertext,
    format_keys,
    parse_ciphertext,
    parse_keys,
)

Residues = NDArray[np.int64]


class SealChain:
    """SEAL set up for a chain, without any key; use from one thread. A context manager that closes its file in memory.

    Args:
        seal: SEAL's binding: who may have it, brings it.
        parameters: the chain.

    Raises:
        ParameterError: SEAL refuses it.
    """

    def __init__(self, seal: Any, parameters: ChainParameters) -> None:
        literal = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        literal.set_poly_modulus_degree(parameters.degree)
        literal.set_coeff_modulus([seal.Modulus(p) for p in (*parameters.primes, parameters.special)])
        self.parameters = parameters
        self._seal = seal
        self.context = seal.SEALContext(literal, True, seal.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():
            raise ParameterError(f"SEAL refuses the chain: {self.context.parameters_error_message()}")
        self._names: dict[int, tuple[int, int, int, int]] = {}
        data = self.context.first_context_data()
        while data is not None:
            self._names[data.chain_index() + 1] = tuple(data.parms_id())
            data = data.next_context_data()
        self._key_name: tuple[int, int, int, int] = tuple(self.context.key_context_data().parms_id())
        self._file = MemoryFile()

    def __enter__(self) -> Self:
        """Return the chain."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give its file in memory back; nothing is loaded or dumped any more."""
        self._file.close()

    def clear(self) -> None:
        """Drop what its file in memory holds: the last ciphertext that was loaded or dumped."""
        self._file.clear()

    def name(self, primes: int) -> list[int]:
        """Return SEAL's name of the level with so many primes."""
        return list(self._names[primes])

    def load(self, residues: Residues, scale: float) -> Any:
        """Make a ciphertext of residues, shape (2, primes, N), transformed.

        Raises:
            CiphertextError: SEAL refuses them.
        """
        size, primes, degree = residues.shape
        if size != 2 or primes not in self._names or degree != self.parameters.degree:
            raise CiphertextError(f"a ciphertext of shape {residues.shape} is none of the chain")
        fields = Fields(self._names[primes], True, size, degree, primes, scale)
        self._file.write(*format_ciphertext(fields, np.ascontiguousarray(residues)))
        cipher = self._seal.Ciphertext()
        try:
            cipher.load(self.context, self._file.path)
        except (RuntimeError, ValueError) as error:  # what SEAL's binding raises
            raise CiphertextError("SEAL refuses a ciphertext: expected residues of its chain") from error
        return cipher

    def dump(self, cipher: Any) -> Residues:
        """Return the residues of a ciphertext, shape (2, primes, N)."""
        cipher.save(self._file.path)
        return parse_ciphertext(self._file.read())[1]

    def load_keys(self, residues: Residues) -> Any:
        """Make relinearisation keys of residues, shape (primes, 2, primes and P, N), transformed.

        Raises:
            CiphertextError: SEAL refuses them.
        """
        primes = len(self.parameters.primes)
        expected = (primes, 2, primes + 1, self.parameters.degree)
        if residues.shape != expected:  # SEAL does not look, and would read beyond the end of keys that are too few
            raise CiphertextError(f"relinearisation keys: expected shape {expected}, found {residues.shape}")
        self._file.write(*format_keys(self._key_name, residues))
        keys = self._seal.RelinKeys()
        try:
            keys.load(self.context, self._file.path)
        except (RuntimeError, ValueError) as error:  # as above
            raise CiphertextError("SEAL refuses relinearisation keys: expected residues of its chain") from error
        finally:
            self._file.clear()
        return keys

    def dump_keys(self, keys: Any) -> Residues:
        """Return the residues of relinearisation keys, shape (primes, 2, primes and P, N)."""
        keys.save(self._file.path)
        return parse_keys(self._file.read())
