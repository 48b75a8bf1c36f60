from __future__ import annotations

import hashlib
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import ParameterError
from heinfer.ring import RingParameters, expand_uniform, is_prime
from heinfer.ring import expansion as module

RING = RingParameters.default()
SEED, CONTEXT = bytes(range(32)), bytes(range(100, 132))
#: The first and last residues for SEED, CONTEXT, block 3, ciphertext 7, and a hash of all. They must never change.
KNOWN = {
    2048: (863856467898801, 91461519086245, "0e8932d24596d2f2"),
    4096: (815521027741181, 296201816954194, "faf48b97336f49fc"),
    8192: (1112432370402998, 1065622402212823, "6d8c6e926356ad46"),
    16384: (916107183685957, 1005190772501762, "23fe7796a60353c3"),
    32768: (317572321820, 464709404385372, "8ce9d153384fd15f"),
}
CELLS = 256
#: Above this a chi-square of 255 degrees of freedom is expected once in ten million (Wilson and Hilferty, z = 5.2).
CHI_SQUARE_LIMIT = 255 * (1 - 2 / (9 * 255) + 5.2 * sqrt(2 / (9 * 255))) ** 3


def half_refused() -> RingParameters:
    """The smallest 50-bit modulus: nearly every other word is refused."""
    candidate = 2**49 + 1
    while not is_prime(candidate):
        candidate += 4096
    return RingParameters(2048, candidate)


def expand_by_the_letter(block: int, ciphertext: int, ring: RingParameters) -> list[int]:
    """The documented format, one word at a time, from far more output than is needed."""
    text = b"heinfer uniform polynomial 1" + ring.degree.to_bytes(4, "little") + ring.modulus.to_bytes(8, "little")
    text += SEED + CONTEXT + block.to_bytes(8, "little") + ciphertext.to_bytes(8, "little")
    output = hashlib.shake_128(text).digest(32 * ring.degree)
    words = (int.from_bytes(output[i : i + 8], "little") % 2**50 for i in range(0, len(output), 8))
    return [word for word in words if word < ring.modulus][: ring.degree]


@pytest.mark.parametrize("degree", [2048, 4096, 8192, 16384, 32768])
def test_expand_known_answer(degree: int) -> None:
    found = expand_uniform(SEED, CONTEXT, 3, 7, RingParameters.default(degree))
    digest = hashlib.sha256(found.astype("<i8").tobytes()).hexdigest()
    assert (int(found[0]), int(found[-1]), digest[:16]) == KNOWN[degree]


@pytest.mark.parametrize("ring", [RING, half_refused(), RingParameters.default(32768)], ids=str)
@pytest.mark.parametrize("index", [(0, 0), (3, 7), (2**64 - 1, 2**64 - 1)])
def test_expand_is_what_the_format_says_and_in_range(ring: RingParameters, index: tuple[int, int]) -> None:
    found = expand_uniform(SEED, CONTEXT, *index, ring)
    assert (found.dtype, found.shape) == (np.int64, (ring.degree,))
    assert found.min() >= 0
    assert found.max() < ring.modulus
    assert found.tolist() == expand_by_the_letter(*index, ring)
    assert found.flags.writeable


@pytest.mark.parametrize("spare", [1, 7, 5000])
def test_expand_does_not_depend_on_how_much_is_requested_at_once(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    ring = half_refused()
    expected = expand_uniform(SEED, CONTEXT, 1, 2, ring)
    monkeypatch.setattr(module, "_SPARE_WORDS", spare)
    np.testing.assert_array_equal(expand_uniform(SEED, CONTEXT, 1, 2, ring), expected)


@given(st.integers(0, 31), st.integers(0, 7), st.sampled_from(["seed", "context", "block", "ciphertext"]))
def test_expand_one_bit_of_any_input_changes_everything(byte: int, bit: int, field: str) -> None:
    inputs = {"seed": SEED, "context": CONTEXT, "block": 5, "ciphertext": 5}
    value = inputs[field]
    if isinstance(value, bytes):
        flipped = bytes(b ^ (1 << bit if i == byte else 0) for i, b in enumerate(value))
        other = {**inputs, field: flipped}
    else:
        other = {**inputs, field: value ^ 1 << (byte + bit)}
    same = expand_uniform(**inputs, parameters=RING) == expand_uniform(**other, parameters=RING)  # type: ignore[arg-type]
    assert same.sum() <= 1


def test_expand_fields_are_not_confused_with_each_other() -> None:
    calls = [(SEED, CONTEXT, 1, 2), (SEED, CONTEXT, 2, 1), (CONTEXT, SEED, 1, 2), (SEED, CONTEXT, 12, 0)]
    found = [expand_uniform(*call, RING)[:8].tolist() for call in calls]
    assert len({tuple(values) for values in found}) == len(calls)
    assert expand_uniform(*calls[0], RingParameters.default(4096))[:8].tolist() not in found


@pytest.mark.parametrize("ring", [RING, half_refused()], ids=str)
def test_expand_is_uniform_by_chi_square_in_high_and_low_bits(ring: RingParameters) -> None:
    residues = np.concatenate([expand_uniform(SEED, CONTEXT, 0, c, ring) for c in range(100)])
    for cells in ((residues * np.float64(CELLS) / ring.modulus).astype(np.int64), residues % CELLS):
        counts = np.bincount(cells, minlength=CELLS)
        assert len(counts) == CELLS
        expected = cells.size / CELLS
        assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_LIMIT


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", bytes(31)), ("seed", bytes(33)), ("context", b""), ("block", -1), ("ciphertext", 2**64)],
)
def test_expand_wrong_fields_are_refused(field: str, value: object) -> None:
    inputs = {"seed": SEED, "context": CONTEXT, "block": 0, "ciphertext": 0, "parameters": RING, field: value}
    with pytest.raises(ParameterError, match=f"{field}: expected"):
        expand_uniform(**inputs)  # type: ignore[arg-type]
