"""The adapter against SEAL itself: its encoder, its encryption, its decoder."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import tenseal.sealapi as sealapi
import zstandard

from heinfer.errors import CiphertextError
from heinfer.ring import NOISE_DEVIATION, RingParameters
from heinfer.ring.parameters import NOISE_LIMIT
from trusted_node.seal import SealContext

HEADER_BYTES, FIELDS_BYTES = 16, 97
#: Deviations that a sum of noise may reach: exceeded with probability below 2.5e-14.
DEVIATIONS = 8.0


class Oracle:
    """SEAL by itself, under one of the adapter's secrets; ciphertexts pass through files."""

    def __init__(self, parameters: RingParameters, secret: bytes, folder: Path) -> None:
        literal = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.CKKS)
        literal.set_poly_modulus_degree(parameters.degree)
        literal.set_coeff_modulus([sealapi.Modulus(parameters.modulus)])
        self.context = sealapi.SEALContext(literal, True, sealapi.SEC_LEVEL_TYPE.TC128)
        (folder / "secret").write_bytes(secret)
        key = sealapi.SecretKey()
        key.load(self.context, str(folder / "secret"))
        self.degree = parameters.degree
        self.encoder = sealapi.CKKSEncoder(self.context)
        self.encryptor = sealapi.Encryptor(self.context, key)
        self.decryptor = sealapi.Decryptor(self.context, key)
        self.evaluator = sealapi.Evaluator(self.context)
        self.path = folder / "cipher"

    def encrypt(self, slots: np.ndarray, scale: float) -> np.ndarray:
        """Encode and encrypt with SEAL; return residues (2, N)."""
        plain, cipher = sealapi.Plaintext(), sealapi.Ciphertext()
        self.encoder.encode([complex(v) for v in slots], scale, plain)
        self.encryptor.encrypt_symmetric(plain, cipher)
        return np.frombuffer(self._body(cipher), "<u8", offset=FIELDS_BYTES).reshape(2, -1).astype(np.int64)

    def decrypt(self, pair: np.ndarray) -> np.ndarray:
        """Decrypt and decode residues (2, N) with SEAL, at scale 1; return slots."""
        like = sealapi.Ciphertext()
        self.encryptor.encrypt_zero_symmetric(like)
        body = self._body(like)[:FIELDS_BYTES] + pair.astype("<u8").tobytes()
        self.path.write_bytes(struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 0, 0, HEADER_BYTES + len(body)) + body)
        cipher, plain = sealapi.Ciphertext(self.context), sealapi.Plaintext()
        cipher.load(self.context, str(self.path))
        self.evaluator.transform_to_ntt_inplace(cipher)
        self.decryptor.decrypt(cipher, plain)
        return np.array(self.encoder.decode_complex(plain))

    def _body(self, cipher: object) -> bytes:
        self.evaluator.transform_from_ntt_inplace(cipher)
        cipher.save(str(self.path))
        saved = self.path.read_bytes()
        return zstandard.ZstdDecompressor().decompressobj().decompress(saved[16:]) if saved[5] == 2 else saved[16:]


def slots_of(coefficients: np.ndarray) -> np.ndarray:
    """Evaluate m at zeta**(3**j), by Horner's rule, for the first eight slots."""
    degree = len(coefficients)
    roots = np.exp(1j * np.pi / degree * np.array([pow(3, j, 2 * degree) for j in range(8)], np.float64))
    return np.polyval(coefficients[::-1], roots)


@pytest.fixture(scope="module", params=[2048, 4096, 8192])
def seal(request: pytest.FixtureRequest) -> SealContext:
    return SealContext(RingParameters.default(request.param))


@pytest.fixture(scope="module")
def small() -> SealContext:
    return SealContext(RingParameters.default())


def test_encrypt_integers_are_what_seal_decrypts_and_decodes(seal: SealContext, tmp_path: Path) -> None:
    degree = seal.parameters.degree
    secret = bytes(seal.generate_secret())
    integers = np.random.default_rng(0).integers(-(2**30), 2**30, degree)
    pair = seal.open(secret).encrypt(integers[None])[0]
    found = Oracle(seal.parameters, secret, tmp_path).decrypt(pair)[:8]
    bound = DEVIATIONS * NOISE_DEVIATION * np.sqrt(degree)
    assert np.abs(found - slots_of(integers.astype(np.float64))).max() <= bound
    assert np.abs(found).max() > 1e3 * bound  # the message is far above the tolerance


def test_decrypt_takes_what_seal_encodes_and_encrypts(seal: SealContext, tmp_path: Path) -> None:
    degree, scale = seal.parameters.degree, 2.0**30
    secret = bytes(seal.generate_secret())
    generator = np.random.default_rng(1)
    slots = generator.uniform(-1, 1, degree // 2) + 1j * generator.uniform(-1, 1, degree // 2)
    pair = Oracle(seal.parameters, secret, tmp_path).encrypt(slots, scale)
    found = slots_of(seal.open(secret).decrypt(pair[None])[0]) / scale
    assert np.abs(found - slots[:8]).max() <= DEVIATIONS * np.hypot(NOISE_DEVIATION, 12**-0.5) * np.sqrt(degree) / scale


def test_encrypt_noise_has_the_deviation_and_the_limit_that_the_bound_counts_on(small: SealContext) -> None:
    secret = small.open(small.generate_secret())
    noise = secret.decrypt(secret.encrypt_zeros(64))
    exact = np.rint(noise)
    assert np.abs(noise - exact).max() < 1e-3
    assert 0 < np.abs(exact).max() <= NOISE_LIMIT
    # The deviation of n values is known to 1/sqrt(2 n) of itself: six times that.
    assert abs(exact.std() / np.sqrt(NOISE_LIMIT / 2) - 1) < 6 / np.sqrt(2 * exact.size)
    assert abs(exact.mean()) < 6 * NOISE_DEVIATION / np.sqrt(exact.size)


@pytest.mark.parametrize("shift", [1, 7, 2047])
def test_decrypt_ciphertext_times_a_power_of_x_is_the_message_shifted_with_its_sign(
    small: SealContext, shift: int
) -> None:
    degree, modulus = small.parameters.degree, small.parameters.modulus
    secret = small.open(small.generate_secret())
    integers = np.random.default_rng(2).integers(-(2**20), 2**20, degree)
    pair = secret.encrypt(integers[None])
    shifted = np.concatenate([(-pair[..., -shift:]) % modulus, pair[..., :-shift]], axis=-1)
    expected = np.concatenate([-integers[-shift:], integers[:-shift]])
    assert np.abs(secret.decrypt(shifted)[0] - expected).max() <= NOISE_LIMIT + 0.5


def test_decrypt_without_an_a_part_is_the_centred_b_part(small: SealContext) -> None:
    degree, modulus = small.parameters.degree, small.parameters.modulus
    secret = small.open(small.generate_secret())
    residues = np.zeros((3, 2, degree), np.int64)
    residues[1, 0, :4] = [0, 1, modulus - 1, modulus // 2 + 1]
    residues[2] = secret.encrypt(np.full((1, degree), 77))[0]
    found = secret.decrypt(residues)
    assert not found[0].any()
    assert found[1, :4].tolist() == [0, 1, -1, -(modulus // 2)]
    assert np.abs(found[2] - 77).max() <= NOISE_LIMIT + 0.5


def test_encrypt_integers_next_to_half_the_modulus_come_back(small: SealContext) -> None:
    degree, modulus = small.parameters.degree, small.parameters.modulus
    secret = small.open(small.generate_secret())
    largest = modulus // 2 - NOISE_LIMIT - 2
    integers = np.random.default_rng(3).choice([-largest, largest], (4, degree))
    found = secret.decrypt(secret.encrypt(integers))
    # SEAL's decoder works in float64: ten bits of rounding, at the very most, on values of 49 bits.
    assert np.abs(found - integers).max() <= NOISE_LIMIT + modulus * 2.0**-53 * 2**5
    assert (np.sign(found) == np.sign(integers)).all()


def test_decrypt_integer_combination_of_residues_is_the_combination_of_the_messages(small: SealContext) -> None:
    modulus = small.parameters.modulus
    secret = small.open(small.generate_secret())
    generator = np.random.default_rng(4)
    x = generator.integers(-(2**20), 2**20, (6, 100))
    weights = generator.integers(-(2**15) + 1, 2**15, (5, 6))
    weights[2] = 0
    residues = secret.encrypt(x).astype(object)
    answer = np.tensordot(weights.astype(object), residues, 1) % modulus
    found = secret.decrypt(answer.astype(np.int64))[:, :100]
    limit = np.abs(weights).sum(axis=1, keepdims=True) * NOISE_LIMIT + 1
    assert (np.abs(found - weights @ x) <= limit).all()
    assert not found[2].any()


def test_encrypt_twice_gives_unrelated_ciphertexts_under_one_secret(small: SealContext) -> None:
    secret = small.open(small.generate_secret())
    first, second = secret.encrypt(np.zeros((2, 8), np.int64))
    assert (first == second).mean() < 1e-3


@pytest.mark.parametrize("secret", [b"", b"garbage", bytes(64)])
def test_open_garbage_is_refused(small: SealContext, secret: bytes) -> None:
    with pytest.raises(CiphertextError, match="secret key"):
        small.open(secret)


def test_open_truncated_secret_is_refused_and_not_kept(small: SealContext) -> None:
    secret = bytes(small.generate_secret())
    with pytest.raises(CiphertextError, match="secret key"):
        small.open(secret[:-5])
    assert small._file.read() == b""


def test_open_another_secret_decrypts_to_nothing_like_the_message(small: SealContext) -> None:
    pair = small.open(small.generate_secret()).encrypt(np.zeros((1, 2048), np.int64))
    found = small.open(small.generate_secret()).decrypt(pair)
    assert np.abs(found).mean() > small.parameters.modulus / 5  # uniform: q/4
