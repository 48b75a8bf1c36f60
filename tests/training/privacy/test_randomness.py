"""The keystream against published vectors, the distributions against scipy, the independence of streams."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from scipy import stats

from heinfer.errors import ParameterError
from heinfer.training.privacy import randomness
from heinfer.training.privacy.randomness import KeyedRandomness, Purpose

#: Probability that a sound generator fails one of the statistical tests; their draws are fixed by a seed.
P = 1e-6


def keystream(key: bytes, purpose: int, step: int, size: int) -> bytes:
    """The stream by its definition: encrypted counter blocks, each by AES alone."""
    encrypt = Cipher(AES(key), ECB()).encryptor().update
    blocks = (
        purpose.to_bytes(2, "big") + step.to_bytes(6, "big") + n.to_bytes(8, "big") for n in range(-(-size // 16))
    )
    return b"".join(encrypt(block) for block in blocks)[:size]


def test_the_keystream_is_that_of_nist_sp_800_38a() -> None:
    """Vector F.5.5, CTR-AES256.Encrypt."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    expected = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    stream = randomness._keystream(key, bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"))
    assert stream.update(plain) == expected


@pytest.mark.parametrize("step", [0, 1, 255, 2**32, 2**48 - 1])
@pytest.mark.parametrize("purpose", Purpose)
def test_a_stream_is_aes_of_purpose_step_and_block_number(purpose: Purpose, step: int) -> None:
    generator = KeyedRandomness.from_seed(3)
    stream = keystream(generator.key, purpose, step, 80)
    assert generator._stream(purpose, step).update(bytes(80)) == stream
    assert generator.seed(purpose, step) == int.from_bytes(stream[:8], "big")


def test_a_mask_compares_exact_53_bit_uniforms_with_the_probability() -> None:
    generator = KeyedRandomness.from_seed(0)
    stream = keystream(generator.key, Purpose.SAMPLING, 7, 8 * 1000)
    integers = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") >> 11 for i in range(1000)]
    uniforms = randomness._uniforms(generator._stream(Purpose.SAMPLING, 7), 1000)
    assert [int(u * 2**53) for u in uniforms] == integers  # the product is exact, and so is each uniform
    assert all(u == i / 2**53 for u, i in zip(uniforms, integers, strict=True))
    probability = integers[500] / 2**53  # a tie: the record is left out, since u < q fails
    assert generator.sample_mask(7, 1000, probability).tolist() == [i < integers[500] for i in integers]


def test_normal_numbers_are_half_the_sum_of_four_box_muller_numbers() -> None:
    generator = KeyedRandomness.from_seed(0)
    size = 5
    uniforms = randomness._uniforms(generator._stream(Purpose.NOISE, 2), 2 * 4 * 3).reshape(2, 4, 3)
    expected = []
    for turn in (np.cos, np.sin):
        for column in range(3):
            pairs = [(uniforms[0, j, column] + 2.0**-53, uniforms[1, j, column]) for j in range(4)]
            expected.append(sum(np.sqrt(-2 * np.log(u)) * turn(2 * np.pi * v) for u, v in pairs) / 2)
    np.testing.assert_allclose(generator.normal(Purpose.NOISE, 2, size), expected[:size], rtol=1e-12)


@pytest.mark.parametrize("size", [0, 1, 2, 3, randomness._NORMALS_AT_A_TIME + 3])
def test_any_number_of_normal_numbers_can_be_drawn(size: int) -> None:
    values = KeyedRandomness.from_seed(0).normal(Purpose.NOISE, 0, size)
    assert values.shape == (size,)
    assert np.isfinite(values).all()


def test_normal_numbers_are_standard_normal() -> None:
    values = KeyedRandomness.from_seed(1).normal(Purpose.NOISE, 0, 1_000_000)
    assert stats.kstest(values, "norm").pvalue > P
    squares = float(values @ values)
    low, high = stats.chi2(len(values)).ppf([P / 2, 1 - P / 2])
    assert low < squares < high
    assert abs(values.mean()) * 1000 < stats.norm.isf(P / 2)
    # Tails, which a test of the whole distribution barely sees.
    for threshold in (3.0, 4.0):
        expected = 2 * stats.norm.sf(threshold) * len(values)
        low, high = stats.poisson(expected).ppf([P / 2, 1 - P / 2])
        assert low <= np.count_nonzero(np.abs(values) > threshold) <= high


def test_cosine_and_sine_halves_are_uncorrelated() -> None:
    values = KeyedRandomness.from_seed(1).normal(Purpose.NOISE, 0, 60_000).reshape(2, -1)
    bound = stats.norm.isf(P / 2) / np.sqrt(values.shape[1])
    assert abs(np.corrcoef(values)[0, 1]) < bound
    assert abs(np.corrcoef(values**2)[0, 1]) < bound * 1.5


def test_records_are_sampled_at_the_rate_and_independently() -> None:
    generator = KeyedRandomness.from_seed(2)
    steps, records, probability = 4000, 40, 0.3
    masks = np.stack([generator.sample_mask(step, records, probability) for step in range(steps)])
    # Inclusion rate of each record, two-sided and for all of them at once.
    low, high = stats.binom(steps, probability).ppf([P / 2 / records, 1 - P / 2 / records])
    assert ((low <= masks.sum(axis=0)) & (masks.sum(axis=0) <= high)).all()
    # Correlation of each pair of records, and of each record with itself one step later.
    pairs = np.corrcoef(masks.T)[np.triu_indices(records, 1)]
    assert np.abs(pairs).max() < stats.norm.isf(P / 2 / len(pairs)) / np.sqrt(steps)
    later = [np.corrcoef(masks[:-1, i], masks[1:, i])[0, 1] for i in range(records)]
    assert np.abs(later).max() < stats.norm.isf(P / 2 / records) / np.sqrt(steps)
    # Batch sizes have the binomial's mean and variance N q (1 - q): a shuffled batch would have none.
    sizes, variance = masks.sum(axis=1), records * probability * (1 - probability)
    low, high = stats.chi2(steps - 1).ppf([P / 2, 1 - P / 2])
    assert low < (steps - 1) * sizes.var(ddof=1) / variance < high
    assert stats.chisquare(*_binned(sizes, records, probability)).pvalue > P


def _binned(sizes: np.ndarray, records: int, probability: float) -> tuple[np.ndarray, np.ndarray]:
    """Observed and expected numbers of batch sizes, tails merged so that every bin expects at least ten."""
    expected = stats.binom(records, probability).pmf(np.arange(records + 1)) * len(sizes)
    inside = np.flatnonzero(expected >= 10)
    first, last = inside[0], inside[-1]
    observed = np.bincount(np.clip(sizes, first, last), minlength=records + 1)[first : last + 1]
    merged = expected[first : last + 1].copy()
    merged[0] += expected[:first].sum()
    merged[-1] += expected[last + 1 :].sum()
    return observed, merged


def test_streams_of_different_purposes_and_steps_are_uncorrelated() -> None:
    generator, size = KeyedRandomness.from_seed(4), 20_000
    streams = [generator.normal(purpose, step, size) for purpose in (Purpose.NOISE, Purpose.COUNT) for step in range(3)]
    streams.append(KeyedRandomness.from_seed(5).normal(Purpose.NOISE, 0, size))
    pairs = np.corrcoef(streams)[np.triu_indices(len(streams), 1)]
    assert np.abs(pairs).max() < stats.norm.isf(P / 2 / len(pairs)) / np.sqrt(size)


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 0), (1.0, 100)])
def test_probabilities_zero_and_one_take_nothing_and_everything(probability: float, expected: int) -> None:
    assert KeyedRandomness.from_seed(0).sample_mask(0, 100, probability).sum() == expected


def test_a_seed_gives_the_same_numbers_and_marks_the_run() -> None:
    first, second, other = (KeyedRandomness.from_seed(seed) for seed in (9, 9, 10))
    assert first.seeded
    assert first == second
    assert first.key != other.key
    np.testing.assert_array_equal(first.normal(Purpose.NOISE, 3, 10), second.normal(Purpose.NOISE, 3, 10))
    np.testing.assert_array_equal(first.sample_mask(3, 99, 0.5), second.sample_mask(3, 99, 0.5))


def test_the_systems_key_is_fresh_not_seeded_and_not_shown() -> None:
    first, second = KeyedRandomness.from_system(), KeyedRandomness.from_system()
    assert first.key != second.key
    assert not first.seeded
    assert first.key.hex() not in repr(first)
    assert repr(first.key) not in repr(first)


@pytest.mark.parametrize("step", [-1, 2**48])
def test_a_step_outside_the_counter_is_refused(step: int) -> None:
    with pytest.raises(ParameterError, match="2\\^48"):
        KeyedRandomness.from_seed(0).normal(Purpose.NOISE, step, 1)


def test_other_wrong_arguments_are_refused() -> None:
    for probability in (-0.1, 1.1, float("nan")):
        with pytest.raises(ParameterError, match="between 0 and 1"):
            KeyedRandomness.from_seed(0).sample_mask(0, 1, probability)
    with pytest.raises(ParameterError, match="32 bytes, found 16"):
        KeyedRandomness(bytes(16), seeded=False)
