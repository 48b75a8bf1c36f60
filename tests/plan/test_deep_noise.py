"""Error bounds of deep blocks: what rounding weights does in the clear, norms of matrices, and how far values reach."""

from __future__ import annotations

import json
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import heinfer.plan.deep_noise as deep_noise
from heinfer.client.report import INNER_VALUES, bound_condition, describe_bound
from heinfer.errors import PlanError
from heinfer.plan.deep import ChainInfo, DeepBlock, Layer, evaluate_deep, layer_matrix
from heinfer.plan.deep_noise import RoundedWeights, Spread, deep_error_bounds, largest_values, spread_of_rounding
from heinfer.plan.deep_reach import Interval, block_reaches, largest_slope, layer_reach
from heinfer.plan.deep_terms import DeepOutput, DeepTerms, pack_deep_terms, read_deep_terms
from heinfer.plan.tensors import TensorSpec
from heinfer.ring.chain import choose_chain
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.server.polynomial.resources import DeepResources
from tests.server.test_polynomial import RESULT, SCALE, make_block, new_secret
from trusted_node.results import finish_deep
from trusted_node.statistics import QueryStatistics

#: Samples at the corners of the box of inputs, and a part of the bound that their largest errors exceed.
SAMPLES, VACUOUS = 4000, 1e-3


@pytest.mark.parametrize(("activation", "degree"), [("square", 2), ("polynomial", 3), ("polynomial", 7)])
def test_rounding_of_weights_stays_within_its_bound(activation: str, degree: int) -> None:
    """Weights that rounding gives these integers, at random: what both make of the same inputs differs by less."""
    block, arrays = make_block(activation, degree)
    rng = np.random.default_rng(3)
    real, rounded = dict(arrays), {}
    largest, reaches = [np.ones(20)], [Interval.around(np.ones(20))]
    for layer in block.layers:
        read = np.concatenate([largest[s] for s in layer.sources])
        reach = Interval.joined([reaches[s] for s in layer.sources])
        largest.append(largest_values(layer, arrays, read))
        if layer.kind == "sum":
            reaches.append(reach.through(layer_matrix(layer, arrays)))
            continue
        integers = arrays[f"{layer.name}.weights"]
        real[f"{layer.name}.weights"] = integers - rng.uniform(-0.5, 0.5, integers.shape)
        difference = {f"{layer.name}.{n}": arrays[f"{layer.name}.{n}"] for n in ("indptr", "indices")}
        difference[f"{layer.name}.weights"] = integers - real[f"{layer.name}.weights"]
        matrix = deep_noise.layer_matrix(layer, difference) * SCALE / layer.scale
        rounded[layer.name] = spread_of_rounding(matrix, read, reach.largest)
        units = SCALE / layer.scale
        reaches.append(layer_reach(layer, arrays, reach.through(layer_matrix(layer, real) * units)).after)
    x = np.sign(rng.normal(size=(SAMPLES, 20)))
    error = np.abs(evaluate_deep(block, arrays, [x])[0] - evaluate_deep(block, real, [x])[0]).max(axis=0)
    with_it, without = deep_error_bounds(block, arrays, rounded), deep_error_bounds(block, arrays)
    assert with_it.always
    assert without.always
    bound = with_it.outputs[0] - without.outputs[0]
    assert np.all(error < bound)
    assert np.all(error > VACUOUS * bound)


def wide_block(row_sum: float) -> tuple[DeepBlock, dict[str, NDArray[Any]]]:
    """x (2) -> v, a row that adds up to so many ranges -> v**7 -> y, below one range."""
    chain = choose_chain((50, 24, 50, 50, 50))
    scale = 2.0**50
    layers = (
        Layer("deep.0.0", (0,), 1, 2, "weighted", len(chain.primes), scale, "polynomial", 7),
        Layer("deep.0.1", (1,), 1, 1, "weighted", 2, RESULT),
    )
    info = ChainInfo(chain.degree, chain.primes, chain.special)
    block = DeepBlock(info, (TensorSpec("x", (2,)),), (TensorSpec("y", (1,)),), SCALE, SCALE, layers, (2,))
    arrays: dict[str, NDArray[Any]] = {"deep.0.0.coefficients": np.eye(1, 8, 7)}
    for name, weights in (("0", [row_sum / 2 * scale / SCALE] * 2), ("1", [RESULT / SCALE / 100])):
        arrays[f"deep.0.{name}.indptr"] = np.array([0, len(weights)], np.int32)
        arrays[f"deep.0.{name}.indices"] = np.arange(len(weights), dtype=np.int32)
        arrays[f"deep.0.{name}.weights"] = np.rint(weights).astype(np.int32)
        arrays[f"deep.0.{name}.bias"] = np.zeros(1)
    block.check_arrays(arrays)
    return block, arrays


def encrypted(block: DeepBlock, arrays: dict[str, NDArray[Any]], x: NDArray[np.float64]) -> NDArray[np.float64]:
    secret = new_secret(block)
    answer = DeepEvaluator(block, arrays, DeepResources(workers=0)).evaluate(
        secret.encrypt(x.T, SCALE), secret.make_keys()
    )
    return np.asarray(secret.decrypt(answer, RESULT, len(x)).T)


def test_the_bound_holds_where_inner_values_leave_their_ranges_unseen() -> None:
    """Inputs and outputs are within their ranges, what is raised to the seventh power is at 1.9 of its own."""
    block, arrays = wide_block(1.9)
    x = np.ones((block.chain.parameters.slots, 2))
    expected = evaluate_deep(block, arrays, [x])[0]
    assert np.abs(expected).max() < 1
    error = np.abs(encrypted(block, arrays, x) - expected).max(axis=0)
    bounds = deep_error_bounds(block, arrays)
    supposing = deep_noise._of_outputs(block, deep_noise._errors(block, arrays, {}, None))
    assert bounds.always
    assert np.all(error > supposing[0])
    assert np.all(error < bounds.outputs[0])
    assert np.all(error > 0.02 * bounds.outputs[0])


def test_a_bound_of_values_that_reach_too_far_is_conditional() -> None:
    block, arrays = wide_block(2.01)
    bounds = deep_error_bounds(block, arrays)
    supposing = deep_noise._of_outputs(block, deep_noise._errors(block, arrays, {}, None))
    assert not bounds.always
    np.testing.assert_array_equal(bounds.outputs, supposing)


@pytest.mark.parametrize("what", ["errors", "room"])
def test_a_bound_is_conditional_where_errors_go_too_far_or_a_sum_has_no_room(what: str) -> None:
    block, arrays = wide_block(1.9)
    rounded = {}
    if what == "errors":  # 1.9 and 0.2 are more than two ranges
        off = Spread(np.full(1, 0.2), 0.2)
        rounded["deep.0.0"] = RoundedWeights(off, off)
    else:  # what is left beside the bias is enough for 1**7 * 128, not for 1.9**7 * 128
        arrays["deep.0.1.weights"][:] = 2**27
        arrays["deep.0.1.bias"][:] = prod(map(float, block.chain.primes[:2])) / 4 / RESULT - 2**13
        block.check_arrays(arrays)
    assert not deep_error_bounds(block, arrays, rounded).always


@pytest.mark.parametrize(("activation", "degree"), [("square", 2), ("polynomial", 3), ("polynomial", 7)])
def test_no_input_within_its_range_takes_a_value_out_of_its_reach(activation: str, degree: int) -> None:
    block, arrays = make_block(activation, degree)
    rng = np.random.default_rng(8)
    matrix = layer_matrix(block.layers[0], arrays)
    x = np.concatenate([np.sign(matrix), -np.sign(matrix), rng.uniform(-1, 1, (SAMPLES, 20))])
    (result,) = block_reaches(block, arrays)[-1:]
    found = evaluate_deep(block, arrays, [x])[0]
    assert np.all(found > result.after.low)
    assert np.all(found < result.after.high)
    first = block_reaches(block, arrays)[0].before
    v = x @ matrix.T * SCALE / block.layers[0].scale + arrays["deep.0.0.bias"]
    np.testing.assert_allclose((v.min(axis=0), v.max(axis=0)), (first.low, first.high), rtol=1e-9)


@pytest.mark.parametrize(("activation", "degree"), [("square", 2), ("polynomial", 7)])
def test_slopes_are_those_within_the_interval_of_each_row(activation: str, degree: int) -> None:
    block, arrays = make_block(activation, degree)
    rng = np.random.default_rng(9)
    ends = np.sort(rng.uniform(-2, 2, (2, 16)), axis=0)
    points = ends[0] + (ends[1] - ends[0]) * np.linspace(0, 1, 2000)[:, None]
    if activation == "square":
        slopes = 2 * (points + arrays["deep.0.0.shift"])
    else:
        given = arrays["deep.0.0.coefficients"]
        slopes = sum(k * given[:, k] * points ** (k - 1) for k in range(1, degree + 1))
    found, largest = largest_slope(block.layers[0], arrays, Interval(*ends)), np.abs(slopes).max(axis=0)
    assert np.all(largest <= found * (1 + 1e-12))
    assert np.all(found < 1.002 * largest)


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


@pytest.mark.parametrize("missing", ["0.error", "exact", "always"])
def test_terms_without_a_bound_are_refused(missing: str) -> None:
    block, _ = make_block("square", 2)
    arrays = pack_deep_terms(0, DeepTerms((1.0,), (output(1e-5),), exact=True, always=False))
    found = read_deep_terms(arrays, 0, block)
    assert (found.exact, found.always) == (True, False)
    del arrays[f"deep.0.{missing}"]
    with pytest.raises(PlanError, match="partition again"):
        read_deep_terms(arrays, 0, block)


@pytest.mark.parametrize("error", [0.0, -1.0, np.nan])
def test_a_bound_that_is_none_is_refused(error: float) -> None:
    block, _ = make_block("square", 2)
    with pytest.raises(PlanError, match="partition again"):
        read_deep_terms(pack_deep_terms(0, DeepTerms((1.0,), (output(error),), exact=False, always=True)), 0, block)


@pytest.mark.parametrize(
    ("always", "outside", "conditional"),
    [(True, [0, 0], False), (False, [0, 0], True), (True, [0, 1], True), (False, [1, 1], False)],
    ids=["bound of all", "of calibrated values", "astray beside it", "none has one"],
)
def test_statistics_say_what_the_bound_of_an_upload_supposes(
    always: bool, outside: list[int], conditional: bool
) -> None:
    terms = DeepTerms((1.0,), (output(1e-5),), exact=True, always=always)
    bundle: Any = SimpleNamespace(deep=(terms,), plan=SimpleNamespace(last_deep=(0,)))
    statistics = QueryStatistics.empty(1, 1)
    finish_deep(bundle, 0, np.array(outside), [np.zeros((2, 3))], 2, statistics)
    assert statistics.conditional == conditional
    assert json.loads(statistics.to_json())["conditional"] == conditional


@pytest.mark.parametrize(("conditional", "words"), [(False, "1.0e-03"), (True, f"1.0e-03 (if {INNER_VALUES})")])
def test_a_conditional_bound_is_stated_with_its_condition(conditional: bool, words: str) -> None:
    condition = bound_condition(1e-3, conditional)
    assert describe_bound(1e-3, fitted=False, condition=condition, unbounded=0, samples=2) == words
    assert bound_condition(None, conditional) is None
