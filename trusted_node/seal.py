"""The one place that imports TenSEAL: keys, encryption and decryption as arrays of residues.

    x_int --(add to an encryption of zero)--> (b, a) --> server --> (W b, W a) --(decrypt)--> W x_int + W e

SEAL draws everything that is random, from the operating system. A message is added to the b-part of a symmetric
encryption of zero, which is what encrypting it means: b = x + e - a s. So integers reach the coefficients exactly,
with no encoder on the way and no limit on their size but q/2. Symmetric encryption is used throughout, since the error
bound counts on its small noise. SEAL has no interface for bytes: ciphertexts pass through a file in memory.
Source: SEAL 4 manual; the saved form is described in the design note "Encrypted linear algebra", TenSEAL facts.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import tenseal.sealapi as sealapi
from numpy.typing import NDArray

from heinfer.errors import CiphertextError, ParameterError
from heinfer.ring import RingParameters
from heinfer.ring.saved_form import Fields, MemoryFile, format_ciphertext, parse_ciphertext


class SealContext:
    """SEAL set up for one ring, and the bookkeeping to pass arrays in and out. Use from one thread.

    Args:
        parameters: ring; SEAL checks them against its own table as well.

    Raises:
        ParameterError: SEAL refuses the parameters.
    """

    def __init__(self, parameters: RingParameters) -> None:
        self.parameters = parameters
        literal = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.CKKS)
        literal.set_poly_modulus_degree(parameters.degree)
        literal.set_coeff_modulus([sealapi.Modulus(parameters.modulus)])
        self._context = sealapi.SEALContext(literal, True, sealapi.SEC_LEVEL_TYPE.TC128)
        if not self._context.parameters_set():
            raise ParameterError(f"SEAL refuses the ring: {self._context.parameters_error_message()}")
        self._evaluator = sealapi.Evaluator(self._context)
        self._encoder = sealapi.CKKSEncoder(self._context)
        self._file = MemoryFile()
        self._fields = self._template()

    def generate_secret(self) -> bytearray:
        """Return a fresh ternary secret key in SEAL's saved form."""
        key = sealapi.KeyGenerator(self._context).secret_key()
        key.save(self._file.path)
        secret = bytearray(self._file.read())
        self._file.clear()
        return secret

    def open(self, secret: bytes | bytearray) -> SecretContext:
        """Return a context that encrypts and decrypts under a secret made by `generate_secret`."""
        return SecretContext(self, self._load_secret(secret))

    def _load_secret(self, secret: bytes | bytearray) -> object:
        self._file.write(bytes(secret))
        key = sealapi.SecretKey()
        try:
            key.load(self._context, self._file.path)
        except (RuntimeError, ValueError) as error:  # what SEAL's binding raises
            raise CiphertextError("this is no secret key of this ring: expected one made by generate_secret") from error
        finally:
            self._file.clear()
        return key

    def _template(self) -> Fields:
        """Return the fields of any ciphertext of two polynomials in coefficient form."""
        throwaway = sealapi.Encryptor(self._context, sealapi.KeyGenerator(self._context).secret_key())
        cipher = sealapi.Ciphertext()
        throwaway.encrypt_zero_symmetric(cipher)
        self._evaluator.transform_from_ntt_inplace(cipher)
        return self._parse(cipher)[0]

    def _parse(self, cipher: object) -> tuple[Fields, NDArray[np.int64]]:
        """Return fields and residues, shape (2, 1, N), of a ciphertext."""
        cipher.save(self._file.path)  # type: ignore[attr-defined]
        return parse_ciphertext(self._file.read())


class SecretContext:
    """Encrypts and decrypts under one secret key."""

    def __init__(self, seal: SealContext, key: object) -> None:
        self._seal = seal
        self._encryptor = sealapi.Encryptor(seal._context, key)
        self._decryptor = sealapi.Decryptor(seal._context, key)

    def encrypt_zeros(self, count: int) -> NDArray[np.int64]:
        """Return encryptions of zero: residues (count, 2, N), b then a, coefficient form."""
        degree = self._seal.parameters.degree
        residues = np.empty((count, 2, degree), np.int64)
        cipher = sealapi.Ciphertext()
        for i in range(count):
            self._encryptor.encrypt_zero_symmetric(cipher)
            self._seal._evaluator.transform_from_ntt_inplace(cipher)
            residues[i] = self._seal._parse(cipher)[1][:, 0]
        return residues

    def encrypt(self, integers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Encrypt integers in the leading coefficients.

        Args:
            integers: |x| < q/2, shape (count, samples), samples <= N.

        Returns:
            Residues (count, 2, N), b then a.
        """
        residues = self.encrypt_zeros(len(integers))
        head = residues[:, 0, : integers.shape[1]]
        np.remainder(head + integers, self._seal.parameters.modulus, out=head)
        return residues

    def decrypt(self, residues: NDArray[np.int64]) -> NDArray[np.float64]:
        """Decrypt.

        Args:
            residues: int64 in [0, q), shape (count, 2, N), b then a, coefficient form.

        Returns:
            Centred coefficients as float64, shape (count, N); SEAL's decoder rounds by about 1, far below the noise.
        """
        seal = self._seal
        degree, modulus = seal.parameters.degree, seal.parameters.modulus
        bins = _slot_bins(degree)
        spectrum = np.zeros((len(residues), degree), np.complex128)
        transparent = np.all(residues[:, 1] == 0, axis=1)
        cipher, plain = sealapi.Ciphertext(seal._context), sealapi.Plaintext()
        for i, pair in enumerate(residues):
            if transparent[i]:
                continue  # SEAL refuses a = 0, the answer of a zero row; the message is b itself
            seal._file.write(*format_ciphertext(seal._fields, np.ascontiguousarray(pair[:, None])))
            cipher.load(seal._context, seal._file.path)
            seal._evaluator.transform_to_ntt_inplace(cipher)
            self._decryptor.decrypt(cipher, plain)
            slots = np.array(seal._encoder.decode_complex(plain))
            spectrum[i, bins[0]], spectrum[i, bins[1]] = slots, slots.conj()
        coefficients = (np.fft.fft(spectrum, axis=1) / degree * _twist(degree).conj()).real
        b = residues[transparent, 0]
        coefficients[transparent] = np.where(b > modulus // 2, b - modulus, b)
        return coefficients


@lru_cache
def _slot_bins(degree: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bins of the transform for the slots and their conjugates: slot j is m at zeta**(3**j), zeta = exp(i pi / N)."""
    exponents = np.array([pow(3, j, 2 * degree) for j in range(degree // 2)])
    return (exponents - 1) // 2, (2 * degree - exponents - 1) // 2


@lru_cache
def _twist(degree: int) -> NDArray[np.complex128]:
    return np.asarray(np.exp(1j * np.pi * np.arange(degree) / degree), np.complex128)
