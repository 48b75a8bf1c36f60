"""Plans whose values would outgrow their primes, or drown in noise, are refused before anything is encrypted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import sqrt
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from heinfer.errors import PlanError
from heinfer.operators.polynomials import levels
from heinfer.plan.deep import ChainInfo, DeepBlock, Layer
from heinfer.plan.deep_terms import LARGEST_INPUT
from heinfer.plan.headroom import LARGEST_VALUE
from heinfer.plan.tensors import TensorSpec
from heinfer.ring.chain import choose_chain

SCALE, RESULT = 2.0**32, 2.0**52
Arrays = dict[str, NDArray[Any]]


def make_block(activation: Literal["square", "polynomial"] = "square", degree: int = 2) -> tuple[DeepBlock, Arrays]:
    """4 inputs, 4 values with an activation, 1 sum of them, 2 results."""
    chain = choose_chain((50, 24, *((34, 34) if activation == "square" else (50,) * levels(degree))))
    scale = sqrt(SCALE * chain.primes[2] * chain.primes[3]) if activation == "square" else 2.0**50
    layers = (
        Layer("first", (0,), 4, 4, "weighted", len(chain.primes), scale, activation, degree),
        Layer("pooled", (1,), 1, 4, "sum", 2, SCALE),
        Layer("last", (2,), 2, 1, "weighted", 2, RESULT),
    )
    info = ChainInfo(chain.degree, chain.primes, chain.special)
    block = DeepBlock(info, (TensorSpec("x", (4,)),), (TensorSpec("y", (2,)),), SCALE, SCALE, layers, (3,))
    arrays: Arrays = {"first.bias": np.full(4, 0.1), "last.bias": np.full(2, 0.1)}
    for name, matrix in (("first", np.eye(4) * 2**16), ("pooled", np.ones((1, 4))), ("last", np.full((2, 1), 2**18))):
        rows, columns = np.nonzero(matrix)
        arrays[f"{name}.indptr"] = np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int32)
        arrays[f"{name}.indices"] = columns.astype(np.int32)
        arrays[f"{name}.weights"] = matrix[rows, columns].astype(np.int32)
    if activation == "square":
        arrays["first.shift"] = np.full(4, 0.25)
    else:
        arrays["first.coefficients"] = np.full((4, degree + 1), 1 / (degree + 1))
    return block, arrays


def replaced(block: DeepBlock, number: int, **changes: Any) -> DeepBlock:
    layers = list(block.layers)
    layers[number] = dataclasses.replace(layers[number], **changes)
    return dataclasses.replace(block, layers=tuple(layers))


def test_values_may_go_as_far_as_the_node_lets_inputs() -> None:
    assert LARGEST_VALUE == LARGEST_INPUT


@pytest.mark.parametrize("degree", range(2, 8))
def test_plans_as_they_are_made_have_room(degree: int) -> None:
    for activation in ("square", "polynomial") if degree == 2 else ("polynomial",):
        block, arrays = make_block(activation, degree)  # type: ignore[arg-type]
        block.check_arrays(arrays)


SCALES: dict[str, tuple[Callable[[DeepBlock], object], str]] = {
    "result raised": (lambda b: replaced(b, 2, scale=2.0**72), "layer 'last': values up to 2"),
    "result lowered": (lambda b: replaced(b, 2, scale=2.0**20), "layer 'last': expected a scale of"),
    "input raised": (lambda b: dataclasses.replace(b, input_scale=2.0**140), "inputs: values up to 2"),
    "input lowered": (lambda b: dataclasses.replace(b, input_scale=1.0), "inputs: expected a scale of"),
    "a prime less for the result": (lambda b: replaced(b, 2, primes=1), "layer 'last': values up to 2"),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_that_does_not_fit_is_refused_by_the_plan_itself(name: str) -> None:
    tamper, message = SCALES[name]
    with pytest.raises(PlanError, match=message):
        tamper(make_block()[0])


def test_a_chain_that_lost_a_prime_is_refused() -> None:
    block, _ = make_block("polynomial", 3)
    chain = dataclasses.replace(block.chain, primes=block.chain.primes[:1] + block.chain.primes[2:])
    layers = tuple(dataclasses.replace(layer, primes=layer.primes - 1) for layer in block.layers)
    with pytest.raises(PlanError, match=r"need .* bits, and 1 primes have"):
        dataclasses.replace(block, chain=chain, layers=layers)


def test_a_polynomial_whose_factors_would_round_to_nothing_is_refused() -> None:
    block, _ = make_block("polynomial", 3)
    with pytest.raises(PlanError, match="a factor's scale would be"):
        replaced(block, 0, scale=2.0**70)


def changed(name: str, value: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][..., -1] = value

    return change


VALUES: dict[str, tuple[Literal["square", "polynomial"], Callable[[Arrays], None], str]] = {
    "coefficient": ("polynomial", changed("first.coefficients", 2.0**50), "the polynomial of layer 'first'"),
    "shift": ("square", changed("first.shift", 2.0**25), "the square of layer 'first'"),
    "bias": ("square", changed("last.bias", 2.0**21), "layer 'last': values up to"),
    "weight": ("square", changed("last.weights", 2.0**28 - 1), "layer 'last': values up to"),
}


@pytest.mark.parametrize("name", VALUES)
def test_weights_and_coefficients_that_outgrow_the_primes_are_refused(name: str) -> None:
    activation, tamper, message = VALUES[name]
    block, arrays = make_block(activation, 2 if activation == "square" else 3)
    if name == "weight":  # sums that are as large as inputs may be are what makes a large weight too large
        arrays["first.shift"] = np.full(4, 60.0)
    block.check_arrays(arrays)
    tamper(arrays)
    with pytest.raises(PlanError, match=message):
        block.check_arrays(arrays)


@pytest.mark.parametrize("bits", range(15, 30))
def test_what_is_refused_is_what_wraps_around(bits: int) -> None:
    """A bias that grows bit by bit, against the product of the primes as an integer."""
    block, arrays = make_block()
    arrays["last.bias"] = np.full(2, 2.0**bits)
    product = block.chain.primes[0] * block.chain.primes[1]
    read = 4 * int(SCALE) * 25 / 16  # four squares of up to (1 + 1 / 4)**2
    largest = 2**18 * read + 2**bits * int(RESULT)
    if 4 * largest > product:
        with pytest.raises(PlanError):
            block.check_arrays(arrays)
    else:
        block.check_arrays(arrays)
