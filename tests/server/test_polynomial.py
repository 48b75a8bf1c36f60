"""Deep blocks under encryption give what their integers and polynomials give in the clear."""

from __future__ import annotations

import dataclasses
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import heinfer.server.polynomial.arithmetic as arithmetic
from heinfer.errors import CiphertextError, PlanError
from heinfer.operators.polynomials import levels
from heinfer.plan.deep import ChainInfo, DeepBlock, Layer, evaluate_deep
from heinfer.plan.deep_noise import deep_error_bounds
from heinfer.plan.tensors import TensorSpec
from heinfer.ring.chain import choose_chain
from heinfer.server.polynomial import units
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.server.polynomial.resources import DeepResources
from trusted_node.deep import DeepContext, DeepSecret

SCALE = 2.0**32
RESULT = 2.0**52


def make_block(activation: str, degree: int) -> tuple[DeepBlock, dict[str, NDArray[Any]]]:
    """20 inputs, 16 values with an activation, sums of four, 3 results that read the sums and an input's copy."""
    square = activation == "square"
    chain = choose_chain((50, 24, *((34, 34) if square else (50,) * levels(degree))))
    scale = sqrt(SCALE * chain.primes[2] * chain.primes[3]) if square else 2.0**50
    layers = (
        Layer("deep.0.0", (0,), 16, 20, "weighted", len(chain.primes), scale, activation, degree),  # type: ignore[arg-type]
        Layer("deep.0.1", (1,), 4, 16, "sum", 2, SCALE),
        Layer("deep.0.2", (2, 0), 3, 24, "weighted", 2, RESULT),
    )
    info = ChainInfo(chain.degree, chain.primes, chain.special)
    block = DeepBlock(info, (TensorSpec("x", (20,)),), (TensorSpec("y", (3,)),), SCALE, SCALE, layers, (3,))
    rng = np.random.default_rng(degree)
    first = rng.normal(size=(16, 20)) / 10 * (rng.random((16, 20)) < 0.6)
    first = np.rint(first / np.maximum(1, 1.4 * np.abs(first).sum(axis=1, keepdims=True)) * scale / SCALE)
    first[:, 0] = 1
    last = np.rint(rng.normal(size=(3, 24)) / 20 * RESULT / SCALE)
    arrays = {"deep.0.0.bias": rng.uniform(-0.2, 0.2, 16), "deep.0.2.bias": rng.normal(size=3) / 10}
    for name, matrix in (("0", first), ("1", np.kron(np.eye(4), np.ones((1, 4)))), ("2", last)):
        rows, columns = np.nonzero(matrix)
        arrays[f"deep.0.{name}.indptr"] = np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int32)
        arrays[f"deep.0.{name}.indices"] = columns.astype(np.int32)
        arrays[f"deep.0.{name}.weights"] = matrix[rows, columns].astype(np.int32)
    if square:
        arrays["deep.0.0.shift"] = rng.normal(size=16) / 4
    else:
        arrays["deep.0.0.coefficients"] = rng.normal(size=(16, degree + 1))
    return block, arrays


def new_secret(block: DeepBlock) -> DeepSecret:
    context = DeepContext(block.chain.parameters)
    return context.open(context.generate_secret())


def run(block: DeepBlock, arrays: dict[str, NDArray[Any]], workers: int) -> float:
    """Return the largest error as a part of its bound."""
    x = np.random.default_rng(1).uniform(-1, 1, (block.chain.parameters.slots, 20))
    secret = new_secret(block)
    resources = DeepResources(workers=workers)
    try:
        evaluator = DeepEvaluator(block, arrays, resources)
        answer = evaluator.evaluate(secret.encrypt(x.T, SCALE), secret.make_keys())
    finally:
        resources.stop()
    found = secret.decrypt(answer, RESULT, len(x)).T
    errors = np.abs(found - evaluate_deep(block, arrays, [x])[0]).max(axis=0)
    return float((errors / deep_error_bounds(block, arrays).outputs[0]).max())


@pytest.mark.parametrize(("activation", "degree"), [("square", 2), *(("polynomial", d) for d in (1, 2, 3, 4, 7))])
def test_ciphertexts_give_what_the_plain_evaluation_gives(activation: str, degree: int) -> None:
    """Largest errors of thousands of slots are below the bound, and not far below."""
    assert 0.02 < run(*make_block(activation, degree), workers=0) < 1


def test_processes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 2**22)  # several units
    assert run(*make_block("square", 2), workers=2) < 1


def test_a_value_that_others_read_too_is_kept_beside_its_sums() -> None:
    block, arrays = make_block("square", 2)
    last = dataclasses.replace(block.layers[2], sources=(2, 0, 1), columns=40)
    block = dataclasses.replace(block, layers=(*block.layers[:2], last))
    assert run(block, arrays, workers=0) < 1


def test_keys_of_another_chain_are_refused() -> None:
    block, arrays = make_block("square", 2)
    secret = new_secret(block)
    with pytest.raises(CiphertextError):
        DeepEvaluator(block, arrays, DeepResources(workers=0)).evaluate(
            secret.encrypt(np.zeros((20, 1)), SCALE), secret.make_keys()[:-1]
        )


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    block, arrays = make_block("square", 2)
    secret = new_secret(block)
    evaluator = DeepEvaluator(block, arrays, DeepResources(tmp_path, workers=0))
    evaluator.evaluate(secret.encrypt(np.zeros((20, 1)), SCALE), secret.make_keys())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "value"),
    [("weights", None), ("indices", 24), ("indptr", 10**6), ("bias", np.nan), ("coefficients", np.inf)],
)
def test_damaged_arrays_are_refused(change: str, value: float | None) -> None:
    block, arrays = make_block("polynomial", 3)
    name = f"deep.0.0.{change}"
    if value is None:
        del arrays[name]
    else:
        arrays[name] = arrays[name].copy()
        arrays[name].reshape(-1)[1] = value
    with pytest.raises(PlanError):
        DeepEvaluator(block, arrays)


def test_addition_leaves_its_operands_as_they_are() -> None:
    """SEAL adds equal scales only; those of two values may differ by what floats round."""
    block, _ = make_block("square", 2)
    secret = new_secret(block)
    with arithmetic.open_chain(block.chain.parameters) as chain:
        seal = arithmetic.SealArithmetic(chain, chain.load_keys(secret.make_keys()))
        near = np.nextafter(SCALE, np.inf)
        scales = [SCALE, near]
        left, right = (
            arithmetic.Cipher(
                chain.load(secret.encrypt(np.full((1, 1), 0.25), SCALE)[0], s), len(chain.parameters.primes), s
            )
            for s in scales
        )
        total = seal.add(left, right)
        assert [left.value.scale, right.value.scale, left.scale, right.scale] == [*scales, *scales]
        assert total.value.scale == SCALE
        assert np.allclose(secret.decrypt(chain.dump(total.value)[None], SCALE, 1), 0.5, atol=1e-4)
