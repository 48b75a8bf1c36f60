"""Encryption for deep blocks: samples in slots, a fresh secret and its relinearisation keys for every upload.

    values / range --(encode at the plan's scale, encrypt)--> ciphertexts + keys --> server --> ciphertexts --> values

The scale is fixed by the plan, so nothing about it depends on the query. Symmetric encryption, as everywhere. SEAL
draws secrets and noise, from the operating system.
"""

from __future__ import annotations

import numpy as np
import tenseal.sealapi as sealapi
from numpy.typing import NDArray

from heinfer.errors import CiphertextError
from heinfer.ring.chain import ChainParameters
from heinfer.ring.saved_form import MemoryFile
from heinfer.ring.seal_chain import SealChain

Residues = NDArray[np.int64]


class DeepContext:
    """SEAL set up for the node's side of one chain; use from one thread.

    Args:
        parameters: the chain.

    Raises:
        ParameterError: SEAL refuses it.
    """

    def __init__(self, parameters: ChainParameters) -> None:
        self._chain = SealChain(sealapi, parameters)
        self._file = MemoryFile()

    def generate_secret(self) -> bytearray:
        """Return a fresh ternary secret in SEAL's saved form."""
        key = sealapi.KeyGenerator(self._chain.context).secret_key()
        try:
            key.save(self._file.path)
            return bytearray(self._file.read())
        finally:
            self._file.clear()

    def open(self, secret: bytes | bytearray) -> DeepSecret:
        """Return what encrypts and decrypts under a secret made by `generate_secret`.

        Raises:
            CiphertextError: it is none of this chain.
        """
        key = sealapi.SecretKey()
        try:
            self._file.write(bytes(secret))
            key.load(self._chain.context, self._file.path)
        except (RuntimeError, ValueError) as error:  # what SEAL's binding raises
            raise CiphertextError(
                "this is no secret key of this chain: expected one made by generate_secret"
            ) from error
        finally:
            self._file.clear()
        return DeepSecret(self._chain, key)


class DeepSecret:
    """Encrypts and decrypts under one secret; use from one thread."""

    def __init__(self, chain: SealChain, key: object) -> None:
        self._chain = chain
        self._key = key
        self._encryptor = sealapi.Encryptor(chain.context, key)
        self._decryptor = sealapi.Decryptor(chain.context, key)
        self._encoder = sealapi.CKKSEncoder(chain.context)

    def make_keys(self) -> Residues:
        """Return relinearisation keys for the server: shape (primes, 2, primes and P, N), transformed."""
        keys = sealapi.RelinKeys()
        sealapi.KeyGenerator(self._chain.context, self._key).create_relin_keys(keys)
        return self._chain.dump_keys(keys)

    def encrypt(self, values: NDArray[np.float64], scale: float) -> Residues:
        """Encrypt.

        Args:
            values: shape (elements, samples), samples <= N / 2.
            scale: that values are multiplied by.

        Returns:
            Residues, shape (elements, 2, primes, N), transformed.
        """
        chain = self._chain.parameters
        out = np.empty((len(values), 2, len(chain.primes), chain.degree), np.int64)
        plain, cipher = sealapi.Plaintext(), sealapi.Ciphertext()
        for row, slots in zip(out, values, strict=True):
            self._encoder.encode(slots.tolist(), scale, plain)
            self._encryptor.encrypt_symmetric(plain, cipher)
            row[...] = self._chain.dump(cipher)
        return out

    def decrypt(self, residues: Residues, scale: float, samples: int) -> NDArray[np.float64]:
        """Decrypt.

        Args:
            residues: shape (elements, 2, primes, N), transformed.
            scale: that values were multiplied by.
            samples: of the upload.

        Returns:
            Values, shape (elements, samples).

        Raises:
            CiphertextError: these are no residues of the chain, or some that hide nothing.
        """
        out = np.empty((len(residues), samples))
        plain = sealapi.Plaintext()
        for row, pair in zip(out, residues, strict=True):
            if not pair[1].any():
                raise CiphertextError("a ciphertext hides nothing: its second polynomial is zero")
            self._decryptor.decrypt(self._chain.load(pair, scale), plain)
            row[...] = np.array(self._encoder.decode_double(plain))[:samples]
        return out
