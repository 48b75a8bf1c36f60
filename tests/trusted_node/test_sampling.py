"""What the node draws: its distribution, its independence, its source. Chi-square tests reject at 1e-7."""

from __future__ import annotations

import os
from math import comb, sqrt

import numpy as np
import pytest

from heinfer.errors import ParameterError
from heinfer.ring import NOISE_LIMIT
from trusted_node import sampling
from trusted_node.sampling import draw_noise, draw_ternary, keystream, wipe


def chi_square_limit(freedom: int) -> float:
    """Above this a chi-square is expected once in ten million (Wilson and Hilferty, z = 5.2).

    With two degrees of freedom it is 31.4, where the exact quantile, -2 ln 1e-7, is 32.2: once in seven million.
    """
    return freedom * (1 - 2 / (9 * freedom) + 5.2 * sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def noise_probabilities() -> np.ndarray:
    """Of -21 ... 21, by convolving two binomials of 21 fair bits."""
    binomial = np.array([comb(NOISE_LIMIT, k) for k in range(NOISE_LIMIT + 1)], np.float64) / 2.0**NOISE_LIMIT
    return np.convolve(binomial, binomial[::-1])


class Source:
    """Counts calls of os.urandom and can repeat them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, constant: bool = False) -> None:
        self.sizes: list[int] = []
        self._constant = constant
        self._real = os.urandom
        monkeypatch.setattr(sampling.os, "urandom", self)

    def __call__(self, size: int) -> bytes:
        self.sizes.append(size)
        return bytes(size) if self._constant else self._real(size)


def test_ternary_is_uniform_also_in_pairs_and_per_digit_of_a_byte() -> None:
    found = draw_ternary(512, 2048).ravel()[: 5 * 200_000]
    counts = np.bincount(found + 1, minlength=3)
    assert len(counts) == 3
    assert chi_square(counts, np.full(3, found.size / 3)) < chi_square_limit(2)
    by_digit = found.reshape(-1, 5) + 1  # five digits come from a byte
    words = by_digit @ 3 ** np.arange(5)
    assert chi_square(np.bincount(words, minlength=243), np.full(243, words.size / 243)) < chi_square_limit(242)
    pairs = 3 * by_digit[:-1, 4] + by_digit[1:, 0]
    assert chi_square(np.bincount(pairs, minlength=9), np.full(9, pairs.size / 9)) < chi_square_limit(8)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("degree", [2048, 32768])
def test_ternary_shape_and_range(count: int, degree: int) -> None:
    found = draw_ternary(count, degree)
    assert (found.dtype, found.shape) == (np.int8, (count, degree))
    assert set(np.unique(found).tolist()) == ({-1, 0, 1} if count else set())


def test_ternary_digits_of_every_byte_are_those_of_division_and_others_are_rejected() -> None:
    stream = np.arange(256, dtype=np.uint8)
    digits = np.full(5 * 256, 99, np.int8)
    assert sampling._ternary_digits(stream, digits, 0) == 5 * 243
    expected = [[byte // 3**k % 3 - 1 for k in range(5)] for byte in range(243)]
    assert digits[: 5 * 243].reshape(243, 5).tolist() == expected


def test_ternary_rejected_bytes_leave_no_trace_and_output_may_end_within_a_byte() -> None:
    stream = np.array([242, 255, 0, 243, 121, 5], np.uint8)
    digits = np.full(13, 99, np.int8)
    assert sampling._ternary_digits(stream, digits, 0) == 13
    assert digits.tolist() == [1] * 5 + [-1] * 5 + [0] * 3


def test_ternary_short_streams_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampling.keystream
    monkeypatch.setattr(sampling, "keystream", lambda size: real(min(size, 100)))
    found = draw_ternary(4, 2048)
    assert chi_square(np.bincount(found.ravel() + 1), np.full(3, found.size / 3)) < chi_square_limit(2)


def test_noise_follows_the_exact_centred_binomial() -> None:
    found = draw_noise(2_000_000)
    assert np.abs(found).max() <= NOISE_LIMIT
    expected = noise_probabilities() * found.size
    counts = np.bincount(found.astype(np.int64) + NOISE_LIMIT, minlength=2 * NOISE_LIMIT + 1).astype(np.float64)
    usual = expected >= 10  # the tails, where a chi-square does not hold, are one cell
    cells = [np.append(values[usual], values[~usual].sum()) for values in (counts, expected)]
    assert usual.sum() > 25
    assert chi_square(*cells) < chi_square_limit(int(usual.sum()))


def test_noise_neighbours_are_uncorrelated() -> None:
    found = draw_noise(1_000_000).astype(np.float64)
    for distance in (1, 2, sampling._NOISE_CHUNK):
        correlation = (found[distance:] * found[:-distance]).mean() / (NOISE_LIMIT / 2)
        assert abs(correlation) < 6 / sqrt(found.size - distance)


def test_noise_counts_every_one_of_42_bits_and_no_other() -> None:
    words = np.concatenate(
        [np.array([0, 2**42 - 1, 2**64 - 1], np.uint64), np.uint64(1) << np.arange(64, dtype=np.uint64)]
    )
    noise = np.empty(words.size, np.int8)
    sampling._count_bits(words, noise)
    assert noise.tolist() == [-21, 21, 21] + [-20] * 42 + [-21] * 22


@pytest.mark.parametrize("count", [0, 1, sampling._NOISE_CHUNK, sampling._NOISE_CHUNK + 1])
def test_noise_shape(count: int) -> None:
    found = draw_noise(count)
    assert (found.dtype, found.shape) == (np.int8, (count,))


def test_keystream_is_uniform_in_bytes() -> None:
    found = keystream(1_000_000)
    assert chi_square(np.bincount(found, minlength=256), np.full(256, found.size / 256)) < chi_square_limit(255)


def test_keystream_is_aes_256_in_counter_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    Source(monkeypatch, constant=True)
    # AES-256 of the zero block under the zero key: H of test case 13 in McGrew and Viega, The Galois/Counter Mode.
    found = keystream(40)
    assert found[:16].tobytes().hex() == "dc95c078a2408989ad48a21492842087"
    assert keystream(16).tobytes() == found[:16].tobytes()
    assert keystream(0).size == 0


@pytest.mark.parametrize("draw", [lambda: keystream(64), lambda: draw_noise(64), lambda: draw_ternary(1, 64)])
def test_draw_asks_the_system_for_a_key_and_a_counter_every_time(monkeypatch: pytest.MonkeyPatch, draw: object) -> None:
    source = Source(monkeypatch)
    draws = [draw().tobytes() for _ in range(5)]  # type: ignore[operator]
    assert source.sizes == [32, 16] * 5
    assert len(set(draws)) == 5


def test_draws_are_a_function_of_the_system_s_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # No state of ours lives between draws: the same bytes from the system give the same draw.
    Source(monkeypatch, constant=True)
    first = draw_noise(100)
    draw_ternary(2, 2048)
    np.testing.assert_array_equal(draw_noise(100), first)


def test_draws_are_independent_of_each_other() -> None:
    first, second = (draw_noise(200_000).astype(np.float64) for _ in range(2))
    assert abs((first * second).mean()) / (NOISE_LIMIT / 2) < 6 / sqrt(first.size)
    left, right = draw_ternary(2, 32768).astype(np.int64)
    assert chi_square(np.bincount(3 * left + right + 4, minlength=9), np.full(9, left.size / 9)) < chi_square_limit(8)


def test_streams_are_wiped_after_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[np.ndarray] = []
    real = sampling.keystream

    def remember(size: int) -> np.ndarray:
        lent.append(real(size))
        return lent[-1]

    monkeypatch.setattr(sampling, "keystream", remember)
    draw_noise(100)
    draw_ternary(1, 2048)
    assert len(lent) == 2
    assert not any(stream.any() for stream in lent)


def test_wipe_overwrites_arrays_of_any_kind_and_bytearrays_in_place() -> None:
    secret, wide, buffer = draw_ternary(3, 64), np.full((4, 6), np.nan), bytearray(b"secret")
    view = memoryview(buffer)
    wipe(secret, wide[:, ::2], buffer)
    assert not secret.any()
    assert not wide[:, ::2].any()
    assert np.isnan(wide[:, 1::2]).all()
    assert bytes(view) == bytes(6)
    wipe()


def test_wipe_of_what_cannot_be_overwritten_is_an_error() -> None:
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        wipe(frozen)


def test_keystream_negative_size_is_refused() -> None:
    with pytest.raises(ParameterError, match="keystream: expected"):
        keystream(-1)
