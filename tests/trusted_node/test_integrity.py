from __future__ import annotations

import numpy as np
import pytest

from heinfer.plan.checks import input_weights
from heinfer.ring import RingParameters
from tests.operators.test_cutting import CASES, cut_case
from trusted_node.integrity import RowSums, row_weights

RING = RingParameters.default()


@pytest.mark.parametrize("name", CASES)
def test_weights_of_rows_follow_from_those_of_prepared_uploads(name: str) -> None:
    """What the node derives, through padding, bands, copies and sums in front of weights, is P^T r of the block."""
    case = CASES[name]()
    form = cut_case(case)
    r = np.random.default_rng(1).integers(0, RING.modulus, form.values_down)
    up = input_weights(form.program, {**case.arrays, **form.arrays}, r, RING)
    assert len(up) == form.values_up
    expected = input_weights(case.program, case.arrays, r, RING)
    np.testing.assert_array_equal(row_weights(case.program, form, case.arrays, up, RING), expected)


def test_sums_made_elsewhere_and_sums_made_here_are_the_same() -> None:
    generator = np.random.default_rng(2)
    rows = generator.integers(0, RING.modulus, (7, 5))
    weights = generator.integers(0, RING.modulus, 7).astype(np.float64)
    here, there, parts = (RowSums(weights, 5, RING.modulus) for _ in range(3))
    here.add(0, rows)
    parts.add(3, rows[3:])
    parts.add(0, rows[:3])
    expected = [sum(int(w) * int(x) for w, x in zip(weights, column, strict=True)) % RING.modulus for column in rows.T]
    there.add_sums(np.array(expected))
    assert here.equals(there)
    assert here.equals(parts)
    assert there.weights(2, 3).tolist() == weights[2:5].tolist()
    there.add(0, rows[:1])
    assert not here.equals(there)
    assert not here.equals(None)
