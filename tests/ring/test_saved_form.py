"""SEAL's saved form, read and written without SEAL: SEAL itself must agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tenseal.sealapi as sealapi

from heinfer.errors import CiphertextError, ParameterError
from heinfer.ring.chain import ChainParameters, choose_chain
from heinfer.ring.saved_form import MemoryFile, format_ciphertext, parse_ciphertext, parse_keys, read_body
from heinfer.ring.seal_chain import SealChain


@pytest.fixture(scope="module")
def parameters() -> ChainParameters:
    return choose_chain((50, 24, 34, 34))


@pytest.fixture(scope="module")
def chain(parameters: ChainParameters) -> SealChain:
    return SealChain(sealapi, parameters)


def test_ciphertexts_go_through_arrays(chain: SealChain, parameters: ChainParameters) -> None:
    secret = sealapi.KeyGenerator(chain.context).secret_key()
    encryptor, encoder = sealapi.Encryptor(chain.context, secret), sealapi.CKKSEncoder(chain.context)
    plain, cipher = sealapi.Plaintext(), sealapi.Ciphertext()
    values = np.linspace(-1, 1, parameters.slots)
    encoder.encode(values.tolist(), 2.0**32, plain)
    encryptor.encrypt_symmetric(plain, cipher)
    residues = chain.dump(cipher)
    assert residues.shape == (2, len(parameters.primes), parameters.degree)
    assert all(0 <= residues[:, i].min() <= residues[:, i].max() < p for i, p in enumerate(parameters.primes))
    again = chain.load(residues, 2.0**32)
    assert again.scale == 2.0**32
    sealapi.Decryptor(chain.context, secret).decrypt(again, plain)
    assert np.allclose(encoder.decode_double(plain), values, atol=1e-6)


def test_residues_above_their_prime_are_refused(chain: SealChain, parameters: ChainParameters) -> None:
    residues = np.ones((2, len(parameters.primes), parameters.degree), np.int64)
    assert chain.load(residues, 1.0).size() == 2
    residues[1, 2, 5] = parameters.primes[2]
    with pytest.raises(CiphertextError):
        chain.load(residues, 1.0)


def test_keys_go_through_arrays(chain: SealChain, parameters: ChainParameters) -> None:
    keys = sealapi.RelinKeys()
    sealapi.KeyGenerator(chain.context).create_relin_keys(keys)
    residues = chain.dump_keys(keys)
    primes = len(parameters.primes)
    assert residues.shape == (primes, 2, primes + 1, parameters.degree)
    assert np.array_equal(chain.dump_keys(chain.load_keys(residues)), residues)
    bad = residues.copy()
    bad[0, 0, primes, 0] = parameters.special
    with pytest.raises(CiphertextError):
        chain.load_keys(bad)
    with pytest.raises(CiphertextError):
        chain.load_keys(residues[:, :, :-1])


def test_descriptors_do_not_grow(parameters: ChainParameters) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(20):
        with SealChain(sealapi, parameters):
            assert count() == before + 1
        MemoryFile()  # whose last user is gone at once
    assert count() == before


def test_a_closed_file_in_memory_is_nobody_elses() -> None:
    with MemoryFile() as file:
        file.write(b"content")
        path = file.path
        assert file.read() == b"content"
    file.close()  # once more is no harm
    other = MemoryFile()
    assert other.path == path  # its number is given again, so the closed one must not name it
    for use in (lambda: file.path, file.read, file.clear, lambda: file.write(b"x")):
        with pytest.raises(ParameterError, match="closed"):
            use()
    assert other.read() == b""


def test_what_is_no_saved_form_is_refused(chain: SealChain) -> None:
    file = MemoryFile()
    sealapi.Ciphertext(chain.context).save(file.path)
    saved = file.read()
    for damaged in (b"", saved[:10], b"\0" + saved[1:]):
        with pytest.raises(CiphertextError):
            read_body(damaged)
    with pytest.raises(CiphertextError):
        parse_ciphertext(saved[:-8] if saved[5] == 0 else b"".join(format_ciphertext(*parse_ciphertext(saved)))[:-8])
    with pytest.raises(CiphertextError):
        parse_keys(b"".join(format_ciphertext(*parse_ciphertext(saved)))[:40])
