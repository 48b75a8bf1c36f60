from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heinfer.errors import CiphertextError
from heinfer.ring.packing import high_limb, low_limb, pack, packed_bytes, split_into, unpack

Q = 1125899906826241
residue_arrays = hnp.arrays(
    np.int64,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=70),
    elements=st.integers(0, Q - 1) | st.sampled_from([0, 1, Q - 1, 2**25 - 1, 2**25, 2**49]),
)


def pack_with_python_integers(row: list[int]) -> bytes:
    return sum(value << (50 * index) for index, value in enumerate(row)).to_bytes(packed_bytes(len(row)), "little")


@given(residue_arrays)
def test_pack_matches_python_integers_and_unpack_inverts_it(residues: np.ndarray) -> None:
    packed = pack(residues)
    assert packed.dtype == np.uint8
    assert packed.shape == (residues.shape[0], packed_bytes(residues.shape[1]))
    assert [row.tobytes() for row in packed] == [pack_with_python_integers(row) for row in residues.tolist()]
    np.testing.assert_array_equal(unpack(packed, residues.shape[1], Q), residues)


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 200), (32, 200), (33, 400), (2048, 12800)])
def test_packed_bytes_rounds_up_to_groups(count: int, size: int) -> None:
    assert packed_bytes(count) == size


def test_packed_bytes_negative_count_is_refused() -> None:
    with pytest.raises(CiphertextError):
        packed_bytes(-1)


@given(st.integers(0, 2), st.integers(0, 39), st.sampled_from([Q, Q + 1, 2**50 - 1]))
def test_unpack_residue_not_below_the_modulus_is_refused(row: int, index: int, value: int) -> None:
    residues = np.full((3, 40), Q - 1, dtype=np.int64)
    residues[row, index] = value
    packed = pack(residues)
    with pytest.raises(CiphertextError, match=f"in row {row}"):
        unpack(packed, 40, Q)


@given(st.integers(40 * 50, 64 * 50 - 1))
def test_unpack_any_padding_bit_set_is_refused(bit: int) -> None:
    packed = pack(np.zeros((2, 40), dtype=np.int64))
    packed[1, bit // 8] |= 1 << (bit % 8)
    with pytest.raises(CiphertextError, match="in row 1"):
        unpack(packed, 40, Q)


@pytest.mark.parametrize(
    "packed",
    [
        np.zeros((2, 399), np.uint8),
        np.zeros((2, 401), np.uint8),
        np.zeros((2, 200), np.uint8),
        np.zeros((2, 0), np.uint8),
        np.zeros(400, np.uint8),
        np.zeros((2, 400), np.int8),
    ],
)
def test_unpack_wrong_size_or_type_is_refused(packed: np.ndarray) -> None:
    with pytest.raises(CiphertextError, match="packed residues: expected uint8"):
        unpack(packed, 40, Q)


@pytest.mark.parametrize("value", [-1, 2**50, np.iinfo(np.int64).min, np.iinfo(np.int64).max])
def test_pack_value_that_does_not_fit_is_refused(value: int) -> None:
    residues = np.zeros((2, 33), dtype=np.int64)
    residues[1, 32] = value
    with pytest.raises(CiphertextError, match="in row 1"):
        pack(residues)


@pytest.mark.parametrize("residues", [np.zeros(4, np.int64), np.zeros((2, 2), np.uint64), np.zeros((2, 2))])
def test_pack_wrong_shape_or_type_is_refused(residues: np.ndarray) -> None:
    with pytest.raises(CiphertextError, match="residues: expected int64"):
        pack(residues)


def test_unpack_read_only_unaligned_and_strided_input() -> None:
    residues = np.random.default_rng(1).integers(0, Q, (4, 50))
    packed = pack(residues)
    unaligned = np.frombuffer(b"?" + packed.tobytes(), np.uint8, offset=1).reshape(packed.shape)
    np.testing.assert_array_equal(unpack(unaligned, 50, Q), residues)
    np.testing.assert_array_equal(unpack(packed[::2], 50, Q), residues[::2])
    np.testing.assert_array_equal(unpack(np.asfortranarray(packed), 50, Q), residues)
    np.testing.assert_array_equal(pack(residues[::-1, ::2]), pack(residues[::-1, ::2].copy()))


@given(st.integers(0, 2**50 - 1))
def test_limbs_recompose_the_residue(residue: int) -> None:
    high, low = high_limb(residue), low_limb(residue)
    assert max(high, low) < 2**25
    assert int(high) * 2**25 + int(low) == residue


def test_split_into_puts_upper_limbs_first() -> None:
    residues = np.array([[1, 2 * 2**25 + 3, 4 * 2**25 + 5]])
    limbs = np.empty((1, 4))
    split_into(residues, 1, limbs)
    assert limbs.tolist() == [[2, 4, 3, 5]]
