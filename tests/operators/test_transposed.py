from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given

from heinfer.errors import ParameterError
from heinfer.operators import Program, ResidueProgram, apply_transpose
from heinfer.operators.steps import Conv, MatMul, Scale, Shift, Sum, Take, Window, WindowSum
from heinfer.ring import RingParameters
from tests.operators.test_programs import Arrays, integers, programs

PARAMETERS = RingParameters.default()
Q = PARAMETERS.modulus


def dot(left: list[np.ndarray], right: list[np.ndarray]) -> int:
    pairs = zip(left, right, strict=True)
    return sum(int(a) * int(b) for x, y in pairs for a, b in zip(x.ravel(), y.ravel(), strict=True)) % Q


def check(program: Program, arrays: Arrays, seed: int) -> list[np.ndarray]:
    """Compare r . P(b) with P^T r . b, both with Python's integers; return P^T r."""
    generator = np.random.default_rng(seed)
    b = [generator.integers(Q - 3 if seed % 2 else 0, Q, (1, *shape)) for shape in program.inputs]
    r = [generator.integers(0, Q, shape) for shape in program.output_shapes]
    y = ResidueProgram(program, arrays, PARAMETERS).evaluate(b)
    v = apply_transpose(program, arrays, r, PARAMETERS)
    assert [x.shape for x in v] == list(program.inputs)
    assert all(((x >= 0) & (x < Q)).all() for x in v)
    assert dot([x[0] for x in y], r) == dot([x[0] for x in b], v)
    return v


@given(programs())
def test_weighted_results_equal_weighted_inputs(drawn: tuple[Program, Arrays]) -> None:
    program, arrays = drawn
    check(program, arrays, prod(program.inputs[0]))


@pytest.mark.parametrize(
    ("window", "group"),
    [
        (Window((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (6, 5)), 1),
        (Window((3, 2), (2, 3), (1, 0, 1, 0), (1, 1), (3, 2)), 2),
        (Window((2, 2), (1, 1), (-1, -1, -1, -1), (2, 2), (2, 1)), 4),
        (Window((2, 2), (2, 2), (0, 0, 1, 1), (1, 1), (4, 4)), 1),  # the last windows reach beyond the plane
        (Window((1, 1), (4, 4), (0, 0, 0, 0), (1, 1), (2, 2)), 2),  # most of the plane is never read
    ],
)
def test_convolutions_and_window_sums(window: Window, group: int) -> None:
    generator = np.random.default_rng(1)
    shape = (4, *window.output)
    arrays = {"w": integers(generator, 4, 4 // group, *window.kernel)}
    if window.strides[0] * window.output[0] <= 6:  # a convolution's windows stay within its padding
        check(Program(((4, 6, 5),), (Conv(0, "w", window, group, shape),), (1,)), arrays, 2)
    steps = (Scale(0, "s", (4, 6, 5)), WindowSum(1, window, shape))
    check(Program(((4, 6, 5),), steps, (2,)), {"s": integers(generator, 4, 6, 5)}, 3)


def test_a_value_that_is_read_often_and_one_that_is_not_read() -> None:
    generator = np.random.default_rng(2)
    arrays = {"many": np.zeros(40_000, np.int32), "s": integers(generator, 3), "m": integers(generator, 3, 2)}
    steps = (
        Scale(0, "s", (3,)),
        Take((2,), "many", (40_000,)),
        MatMul(0, "m", (2,)),
        Sum((2, 2, 2), (1, -1, -1), (3,)),
    )
    v = check(Program(((3,), (2,)), steps, (2, 3, 4, 5)), arrays, 5)
    assert not v[1].any()


def test_a_step_of_the_node_is_refused() -> None:
    arrays = {"s": np.ones(3, np.int16), "c": np.zeros(3)}
    program = Program(((3,),), (Scale(0, "s", (3,)), Shift(1, "c", (3,))), (2,))
    with pytest.raises(ParameterError, match="belongs to the node"):
        apply_transpose(program, arrays, [np.ones(3, np.int64)], PARAMETERS)
