"""Our ring arithmetic against SEAL's, both ways and at every degree: the same secrets, the same ciphertexts.

Ours are the polynomials a, the noise, the ternary secrets and every product; SEAL judges them.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard

from heinfer.ring import (
    LANES,
    NOISE_LIMIT,
    RingParameters,
    Transform,
    expand_uniform,
    multiply_mod,
    multiply_mod_reference,
)
from trusted_node.sampling import draw_noise, draw_ternary
from trusted_node.seal import SealContext

HEADER = struct.Struct("<HBBBBHQ")
#: What SEAL's decoder, a complex transform in float64, may add to an integer below 2**40 that it decodes.
DECODER = 0.25
LARGEST = 2**30


def read_secret(saved: bytes | bytearray, degree: int) -> np.ndarray:
    """Return the residues of a secret key in SEAL's saved form: its evaluations, (N,)."""
    *_, compression, _, total = HEADER.unpack_from(saved)
    body = bytes(saved[HEADER.size :])
    assert total == len(saved)
    if compression == 2:
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return np.frombuffer(body[-8 * degree :], "<u8").astype(np.int64)


def write_secret(template: bytes | bytearray, evaluations: np.ndarray) -> bytes:
    """Return a secret key in SEAL's saved form: the fields of another, with these residues."""
    magic, size, major, minor, compression, reserved, _ = HEADER.unpack_from(template)
    body = bytes(template[HEADER.size :])
    if compression == 2:
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    body = body[: -8 * len(evaluations)] + evaluations.astype("<u8").tobytes()
    return HEADER.pack(magic, size, major, minor, 0, reserved, HEADER.size + len(body)) + body


class Ours:
    """Encryption and decryption by our own arithmetic, under a secret given as residues of its evaluations."""

    def __init__(self, parameters: RingParameters, secret: np.ndarray) -> None:
        self.parameters, self.transform = parameters, Transform.of(parameters)
        self._secret = secret.astype(np.float64)

    def times_secret(self, a: np.ndarray) -> np.ndarray:
        x = self.transform.forward(a)
        q, inverse = self.transform.modulus, self.transform.modulus_inverse
        for group in x:
            for k, w in enumerate(self._secret):
                for lane in range(min(LANES, len(a))):
                    group[k, lane] = multiply_mod(group[k, lane], w, q, inverse)
        return self.transform.inverse(x, len(a))

    def encrypt(self, messages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs (count, 2, N), b then a, and the noise that they hold."""
        count, degree = messages.shape
        a = np.stack([expand_uniform(bytes(32), bytes(32), 0, i, self.parameters) for i in range(count)])
        noise = draw_noise(count * degree).reshape(count, degree).astype(np.int64)
        b = (messages + noise - self.times_secret(a)) % self.parameters.modulus
        return np.stack([b, a], axis=1), noise

    def decrypt(self, pairs: np.ndarray) -> np.ndarray:
        q = self.parameters.modulus
        values = (pairs[:, 0] + self.times_secret(np.ascontiguousarray(pairs[:, 1]))) % q
        return np.where(values > q // 2, values - q, values)


@pytest.fixture(scope="module", params=[2048, 4096, 8192, 16384, 32768])
def seal(request: pytest.FixtureRequest) -> SealContext:
    return SealContext(RingParameters.default(request.param))


@pytest.fixture(scope="module")
def saved(seal: SealContext) -> bytes:
    return bytes(seal.generate_secret())


@pytest.fixture(scope="module")
def ours(seal: SealContext, saved: bytes) -> Ours:
    return Ours(seal.parameters, read_secret(saved, seal.parameters.degree))


def messages(count: int, degree: int, largest: int = LARGEST) -> np.ndarray:
    return np.random.default_rng(0).integers(-largest, largest + 1, (count, degree))


def test_secret_of_seal_is_ternary_under_our_inverse_transform(seal: SealContext, saved: bytes) -> None:
    degree, q = seal.parameters.degree, seal.parameters.modulus
    evaluations = np.zeros((1, degree, LANES))
    evaluations[0, :, 0] = read_secret(saved, degree)
    (secret,) = Transform.of(seal.parameters).inverse(evaluations, 1)
    assert set(np.unique(secret).tolist()) == {0, 1, q - 1}


def test_our_encryption_is_decrypted_by_seal_to_message_plus_noise(seal: SealContext, saved: bytes, ours: Ours) -> None:
    m = messages(2, seal.parameters.degree)
    pairs, noise = ours.encrypt(m)
    found = seal.open(saved).decrypt(pairs)
    assert np.abs(found - m).max() <= NOISE_LIMIT + DECODER
    assert np.abs(found - (m + noise)).max() <= DECODER
    assert noise.any()


def test_our_encryption_of_zeros_is_decrypted_by_seal_to_the_noise_in_every_coefficient(
    seal: SealContext, saved: bytes, ours: Ours
) -> None:
    pairs, noise = ours.encrypt(np.zeros((1, seal.parameters.degree), np.int64))
    np.testing.assert_array_equal(np.rint(seal.open(saved).decrypt(pairs)), noise)
    assert (noise != 0).mean() > 0.8  # P(e = 0) is 0.12


def test_encryption_of_seal_is_decrypted_by_us(seal: SealContext, saved: bytes, ours: Ours) -> None:
    m = messages(2, seal.parameters.degree, seal.parameters.modulus // 2 - NOISE_LIMIT)
    noise = ours.decrypt(seal.open(saved).encrypt(m)) - m
    assert 0 < np.abs(noise).max() <= NOISE_LIMIT
    assert abs(noise.var() / (NOISE_LIMIT / 2) - 1) < 0.2


def test_integer_map_of_our_ciphertexts_is_decrypted_by_seal_to_the_map_of_message_and_noise(
    seal: SealContext, saved: bytes, ours: Ours
) -> None:
    degree, q = seal.parameters.degree, seal.parameters.modulus
    m = messages(3, degree, 2**20)
    pairs, noise = ours.encrypt(m)
    weights = np.random.default_rng(1).integers(-(2**10), 2**10 + 1, (2, 3))
    mapped = multiply_mod_reference(weights, pairs.reshape(3, -1), q).reshape(2, 2, degree)
    found = seal.open(saved).decrypt(mapped)
    assert np.abs(found - weights @ (m + noise)).max() <= DECODER
    assert np.abs(weights @ noise).max() > NOISE_LIMIT  # the noise went through the map
    np.testing.assert_array_equal(ours.decrypt(mapped), weights @ (m + noise))


def test_our_ternary_secret_is_one_that_seal_encrypts_and_decrypts_under(seal: SealContext, saved: bytes) -> None:
    degree, q = seal.parameters.degree, seal.parameters.modulus
    secret = draw_ternary(1, degree)
    evaluations = Transform.of(seal.parameters).forward(secret)[0, :, 0].astype(np.int64) % q
    context = seal.open(write_secret(saved, evaluations))
    ours = Ours(seal.parameters, evaluations)
    m = messages(1, degree)
    assert np.abs(context.decrypt(context.encrypt(m)) - m).max() <= NOISE_LIMIT + DECODER
    assert np.abs(ours.decrypt(context.encrypt(m)) - m).max() <= NOISE_LIMIT
    pairs, noise = ours.encrypt(m)
    assert np.abs(context.decrypt(pairs) - (m + noise)).max() <= DECODER
    assert np.abs(seal.open(saved).decrypt(pairs) - m).mean() > q / 5  # another secret: uniform, q/4
