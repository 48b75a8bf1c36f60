"""Error bounds of deep blocks: what rounding weights does in the clear, and norms of matrices."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import heinfer.plan.deep_noise as deep_noise
from heinfer.errors import PlanError
from heinfer.plan.deep import evaluate_deep
from heinfer.plan.deep_noise import Spread, deep_error_bounds, largest_values, spread_of_rounding
from heinfer.plan.deep_terms import DeepOutput, DeepTerms, pack_deep_terms, read_deep_terms
from tests.server.test_polynomial import SCALE, make_block

#: Samples at the corners of the box of inputs, and a part of the bound that their largest errors exceed.
SAMPLES, VACUOUS = 4000, 1e-3


@pytest.mark.parametrize(("activation", "degree"), [("square", 2), ("polynomial", 3), ("polynomial", 7)])
def test_rounding_of_weights_stays_within_its_bound(activation: str, degree: int) -> None:
    """Weights that rounding gives these integers, at random: what both make of the same inputs differs by less."""
    block, arrays = make_block(activation, degree)
    rng = np.random.default_rng(3)
    real, rounded = dict(arrays), {}
    largest = [np.ones(20)]
    for layer in block.layers:
        read = np.concatenate([largest[s] for s in layer.sources])
        largest.append(largest_values(layer, arrays, read))
        if layer.kind == "sum":
            continue
        integers = arrays[f"{layer.name}.weights"]
        real[f"{layer.name}.weights"] = integers - rng.uniform(-0.5, 0.5, integers.shape)
        difference = {f"{layer.name}.{n}": arrays[f"{layer.name}.{n}"] for n in ("indptr", "indices")}
        difference[f"{layer.name}.weights"] = integers - real[f"{layer.name}.weights"]
        matrix = deep_noise.layer_matrix(layer, difference) * SCALE / layer.scale
        rounded[layer.name] = spread_of_rounding(matrix, read)
    x = np.sign(rng.normal(size=(SAMPLES, 20)))
    error = np.abs(evaluate_deep(block, arrays, [x])[0] - evaluate_deep(block, real, [x])[0]).max(axis=0)
    bound = deep_error_bounds(block, arrays, rounded)[0] - deep_error_bounds(block, arrays)[0]
    assert np.all(error < bound)
    assert np.all(error > VACUOUS * bound)


@pytest.mark.parametrize("largest", [0, 100], ids=["bounded", "computed"])
def test_a_matrix_does_no_more_to_errors_than_their_spread_says(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_noise, "_LARGEST_GRAM", largest)
    rng = np.random.default_rng(4)
    weights = rng.normal(size=(30, 50))
    errors = rng.normal(size=(50, 1000))
    spread = Spread(np.abs(errors).max(axis=1), float(np.linalg.norm(errors, axis=0).max()))
    after, found = spread.through(deep_noise._Matrix(weights)), weights @ errors
    assert np.all(np.abs(found) <= after.elements[:, None])
    assert np.linalg.norm(found, axis=0).max() <= after.length
    assert np.all(after.elements < np.abs(weights) @ spread.elements)  # lengths tell more here
    _, sizes, right = np.linalg.svd(weights)
    worst = Spread(np.abs(right[0]), 1.0).through(deep_noise._Matrix(weights))
    assert sizes[0] <= worst.length <= (1 + 1e-5 if largest else 10) * sizes[0]


def output(error: float) -> DeepOutput:
    ones: NDArray[np.float64] = np.ones(3)
    return DeepOutput(40 * ones, 1.1 * ones, ones, -ones, ones, error * ones)


def test_bounds_of_an_output_are_calibrated_and_cast_like_it() -> None:
    bound = output(40e-5).error_bound(np.full((2, 3), -30, np.float32))
    np.testing.assert_allclose(bound, 40e-5 * 1.1 + 30 * 2.0**-24)


@pytest.mark.parametrize("missing", ["0.error", "exact"])
def test_terms_without_a_bound_are_refused(missing: str) -> None:
    block, _ = make_block("square", 2)
    arrays = pack_deep_terms(0, DeepTerms((1.0,), (output(1e-5),), exact=True))
    assert read_deep_terms(arrays, 0, block).exact
    del arrays[f"deep.0.{missing}"]
    with pytest.raises(PlanError, match="partition again"):
        read_deep_terms(arrays, 0, block)


@pytest.mark.parametrize("error", [0.0, -1.0, np.nan])
def test_a_bound_that_is_none_is_refused(error: float) -> None:
    block, _ = make_block("square", 2)
    with pytest.raises(PlanError, match="partition again"):
        read_deep_terms(pack_deep_terms(0, DeepTerms((1.0,), (output(error),), exact=False)), 0, block)
