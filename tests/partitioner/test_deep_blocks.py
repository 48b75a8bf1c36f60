"""Deep blocks as the planner makes them: what is in them, what they give in the clear, what is refused and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from heinfer.errors import UnsupportedModelError
from heinfer.plan.execution import PlanRunner, plain_rounds
from heinfer.ring import RingParameters
from partitioner.deep.affine import find_linear
from partitioner.deep.building import FitOptions
from partitioner.deep.deepening import DeepOptions, Depth, deepen
from partitioner.emission import Draft
from partitioner.pipeline import partition_in_memory
from tests.partitioner.examples import graph, weights

SAMPLES = 60
#: Weights are rounded to 2**-18 of a range (partitioner.deep.building), in two or three layers.
ROUNDING = 1e-4
RELU = "a = Relu (h)"
#: How an activation of h is written, and its name.
ACTIVATIONS = {
    "relu": RELU,
    "leaky relu": "a = LeakyRelu <alpha = 0.2> (h)",
    "prelu": "a = PRelu (h, slope)",
    "hard sigmoid": "a = HardSigmoid <alpha = 0.1, beta = 0.5> (h)",
    "clip": "a = Clip (h, low, high)",
    "sigmoid": "a = Sigmoid (h)",
    "tanh": "a = Tanh (h)",
    "softplus": "a = Softplus (h)",
    "silu": "s = Sigmoid (h) a = Mul (h, s)",
    "gelu": "d = Div (h, root) e = Erf (d) f = Add (e, one) m = Mul (h, f) a = Mul (m, half)",
}
CONSTANTS = {
    "slope": np.full(5, 0.1, np.float32),
    "root": np.array(2**0.5, np.float32),
    "one": np.array(1, np.float32),
    "low": np.array(-3, np.float32),
    "high": np.array(3, np.float32),
    "half": np.array(0.5, np.float32),
    "eight": np.array(8, np.float32),
    "eleven": np.array(11, np.float32),
    "u": weights(5, 5),
}


def dense(middle: str) -> onnx.ModelProto:
    """x (6) -> Gemm -> h (5) -> ... -> a (5) -> Gemm -> y (4)."""
    used = {
        n: c for n, c in CONSTANTS.items() if n in middle.replace("(", " ").replace(")", " ").replace(",", " ").split()
    }
    return graph(
        f"g (float[n,6] x) => (float y) {{ h = Gemm (x, w, b) {middle} y = Gemm (a, v, c) }}",
        {"w": weights(6, 5) / 2, "b": weights(5), "v": weights(5, 4), "c": weights(4), **used},
    )


def image(middle: str, columns: int) -> onnx.ModelProto:
    """x (2, 6, 6) -> Conv -> h (3, 4, 4) -> ... -> a -> Flatten -> Gemm -> y (4)."""
    return graph(
        f"g (float[n,2,6,6] x) => (float y) {{ h = Conv (x, k, b) {middle} f = Flatten (a) y = Gemm (f, v, c) }}",
        {"k": weights(3, 2, 3, 3) / 4, "b": weights(3), "v": weights(columns, 4), "c": weights(4)},
    )


def deepened(
    model: onnx.ModelProto, tmp_path: Path, depth: Depth = "all", degree: int | None = None
) -> tuple[Draft, float]:
    """Return the deepened model, and how far it is from the exact one on calibration data, as a part of the largest."""
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    _, draft, _ = partition_in_memory(tmp_path / "model.onnx", RingParameters.default())
    rng = np.random.default_rng(0)
    data = {t.name: rng.normal(size=(SAMPLES, *t.shape)).astype(np.float32) for t in draft.plan.inputs}
    made = deepen(draft, DeepOptions(depth, data, FitOptions(degree)))
    exact, found = (
        PlanRunner(d.plan, d.submodels).run(data, plain_rounds(d.plan, d.reference())) for d in (draft, made)
    )
    return made, max(float(np.abs(found[name] - exact[name]).max() / np.abs(exact[name]).max()) for name in exact)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_becomes_one_polynomial(name: str, tmp_path: Path) -> None:
    made, error = deepened(dense(ACTIVATIONS[name]), tmp_path, degree=7)
    ((block,), (built,)) = made.plan.deep, made.deep
    assert [layer.degree for layer in block.layers] == [7, 0]
    assert [(a.degree, a.exact) for a in built.activations] == [(7, False)]
    assert built.activations[0].error < 0.1
    assert error < 0.1


@pytest.mark.parametrize(
    ("middle", "degree"),
    [("a = Mul (h, h)", 2), ("q = Mul (h, h) r = Mul (q, h) a = Add (r, h)", 3), ("q = Mul (h, h) a = Sub (q, h)", 2)],
)
def test_polynomials_are_exact(middle: str, degree: int, tmp_path: Path) -> None:
    made, error = deepened(dense(middle), tmp_path)
    assert [(a.degree, a.exact, a.error) for a in made.deep[0].activations] == [(degree, True, 0.0)]
    assert error < ROUNDING


def test_skip_connections_and_several_outputs_are_exact(tmp_path: Path) -> None:
    model = graph(
        """g (float[n,6] x) => (float y, float z) {
            h = Gemm (x, w, b) q = Mul (h, h) i = Gemm (q, u, b) s = Add (i, h) a = Mul (s, s)
            y = Gemm (a, v, c) z = Gemm (q, v, c) }""",
        {"w": weights(6, 5) / 4, "b": weights(5) / 4, "u": weights(5, 5) / 4, "v": weights(5, 4), "c": weights(4)},
    )
    made, error = deepened(model, tmp_path)
    assert len(made.plan.deep) == made.plan.rounds == 1
    assert error < ROUNDING


@pytest.mark.parametrize("pooling", ["AveragePool <kernel_shape = [2, 2], strides = [2, 2]>", "GlobalAveragePool"])
def test_pooling_is_a_sum(pooling: str, tmp_path: Path) -> None:
    made, error = deepened(image(f"q = Mul (h, h) a = {pooling} (q)", 12 if "kernel" in pooling else 3), tmp_path)
    kinds = [layer.kind for layer in made.plan.deep[0].layers]
    assert kinds == ["weighted", "sum", "weighted"]
    assert error < ROUNDING


def test_values_of_equal_weight_are_summed_up_in_front_of_a_layer(tmp_path: Path) -> None:
    """As where pooling is part of the linear operator itself."""
    model = image("a = Mul (h, h)", 48)
    pooled = np.repeat(weights(3, 4), 16, axis=0)  # equal for all positions of a channel
    constant = next(t for t in model.graph.initializer if t.name == "v")
    constant.CopyFrom(onnx.numpy_helper.from_array(pooled.astype(np.float32), "v"))
    made, error = deepened(model, tmp_path)
    assert [(layer.kind, layer.rows) for layer in made.plan.deep[0].layers] == [
        ("weighted", 48), ("sum", 3), ("weighted", 4),
    ]  # fmt: skip
    assert error < ROUNDING


def test_a_sum_across_channels_keeps_their_units(tmp_path: Path) -> None:
    """Squares would leave each channel's factor to their reader; a sum over channels has one reader for all."""
    model = graph(
        """g (float[n,2,6,6] x) => (float y) {
            h = Conv (x, k, b) q = Mul (h, h) a = ReduceMean <axes = [1]> (q) f = Flatten (a) y = Gemm (f, v, c) }""",
        {"k": weights(3, 2, 3, 3), "b": weights(3), "v": weights(16, 4), "c": weights(4)},
    )
    made, error = deepened(model, tmp_path)
    first, following = made.plan.deep[0].layers[:2]
    assert (first.activation, following.kind) == ("polynomial", "sum")
    assert error < ROUNDING


def test_a_number_ends_blocks_after_so_many_activations(tmp_path: Path) -> None:
    many = " ".join(f"t{i} = Tanh (h{i}) h{i + 1} = Gemm (t{i}, u, b)" for i in range(5))
    model = graph(
        f"g (float[n,6] x) => (float y) {{ h0 = Gemm (x, w, b) {many} a = Tanh (h5) y = Gemm (a, v, c) }}",
        {"w": weights(6, 5), "b": weights(5), "u": weights(5, 5), "v": weights(5, 4), "c": weights(4)},
    )
    made, _ = deepened(model, tmp_path, 2, degree=3)
    assert [sum(layer.degree > 0 for layer in block.layers) for block in made.plan.deep] == [2, 2]
    assert [step.kind for step in made.plan.steps] == ["deep", "node", "deep", "node", "round"]


#: Activations one after the other, and the depth that a refusal must name. Of 868 bits, 124 are taken; a square takes
#: 68, degree 7 takes 150.
TOO_DEEP = {
    "fitted": (["Tanh (h{i})"] * 5, 4),
    "fitted, then squares": (["Tanh (h{i})"] * 5 + ["Mul (h{i}, h{i})"] * 4, 4),  # the last seven would fit
    "squares, then fitted": (["Mul (h{i}, h{i})"] * 4 + ["Tanh (h{i})"] * 4, 7),  # of the last ones, six would
    "squares": (["Mul (h{i}, h{i})"] * 12, 10),
}


@pytest.mark.parametrize("name", TOO_DEEP)
def test_the_depth_that_a_refusal_names_is_the_largest_that_fits(name: str, tmp_path: Path) -> None:
    """Squares take fewer primes, so what fits depends on where blocks begin: they do so from the front."""
    activations, expected = TOO_DEEP[name]
    last = len(activations)
    many = " ".join(
        f"t{i} = {activation.format(i=i)} h{i + 1} = Gemm (t{i}, u, b)" for i, activation in enumerate(activations)
    )
    model = graph(
        f"g (float[n,6] x) => (float y) {{ h0 = Gemm (x, w, b) {many} y = Gemm (h{last}, v, c) }}",
        {"w": weights(6, 5) / 4, "b": weights(5) / 4, "u": weights(5, 5) / 4, "v": weights(5, 4), "c": weights(4)},
    )
    with pytest.raises(UnsupportedModelError, match=f"{last} activations in one block are too many") as caught:
        deepened(model, tmp_path, "all", degree=7)
    named = re.search(r"use --block-depth (\d+) or a smaller degree", str(caught.value))
    assert named is not None
    assert int(named[1]) == expected
    made, _ = deepened(model, tmp_path, expected, degree=7)
    assert max(sum(layer.degree > 0 for layer in block.layers) for block in made.plan.deep) == expected


def test_powers_above_degree_7_are_several_exact_activations(tmp_path: Path) -> None:
    made, error = deepened(dense("a = Pow (h, eight)"), tmp_path)
    assert [(a.degree, a.exact) for a in made.deep[0].activations] == [(4, True), (2, True)]
    assert error < ROUNDING


def test_a_prime_power_above_degree_7_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is a polynomial of degree 11, and 7 is the most"):
        deepened(dense("a = Pow (h, eleven)"), tmp_path)
    made, error = deepened(dense("q = Mul (h, h) i = Gemm (q, u, b) a = Pow (i, eleven)"), tmp_path, 3)
    assert [step.kind for step in made.plan.steps] == ["deep", "node", "round"]
    assert error < 100 * ROUNDING  # an eleventh power of what is rounded


def test_a_function_that_is_not_finite_everywhere_is_refused_by_name(tmp_path: Path) -> None:
    """Calibration shows values of both signs, so that a polynomial would have to stand for 1 / 0 as well."""
    with pytest.raises(UnsupportedModelError, match=r"a \(Div\): gives NaN or infinity"):
        deepened(dense("a = Div (one, h)"), tmp_path)


def test_a_linear_map_keeps_its_digits_beside_a_constant_a_billion_times_as_large() -> None:
    """As float32 computes it, 1e6 + 1e-3 is 1e6."""
    rng = np.random.default_rng(0)
    matrix = (rng.normal(size=(4, 6)) * 1e-3).astype(np.float32)
    constant = np.array([1e6, -1e6, 3.0, 0.0], np.float32)

    def run(arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
        return np.asarray(arrays["x"].astype(np.float32) @ matrix.T + constant, np.float32)

    found = find_linear("layer", run, {"x": (6,)})
    np.testing.assert_allclose(found.matrices["x"], matrix, rtol=2**-22)
    np.testing.assert_array_equal(found.constant, constant)


def test_the_largest_value_is_no_polynomial_and_ends_a_block(tmp_path: Path) -> None:
    model = graph(
        """g (float[n,2,6,6] x) => (float y) {
            h = Conv (x, k, b) q = Mul (h, h) i = Conv (q, l, b) m = MaxPool <kernel_shape = [2, 2]> (i)
            f = Flatten (m) d = Gemm (f, v, c) a = Mul (d, d) y = Gemm (a, u, c) }""",
        {"k": weights(3, 2, 3, 3), "b": weights(3), "l": weights(3, 3, 3, 3), "v": weights(3, 4), "c": weights(4),
         "u": weights(4, 4)},
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="end the block in front of it") as caught:
        deepened(model, tmp_path, "all")
    assert "--block-depth a number" in str(caught.value)
    made, _ = deepened(model, tmp_path, 3)
    assert [step.kind for step in made.plan.steps] == ["deep", "node", "deep"]


@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_activations_of_any_size_keep_their_precision(size: float, tmp_path: Path) -> None:
    """x**3 of values of a size: what travels is divided by the largest value, so that no level runs over."""
    model = dense("q = Mul (h, h) a = Mul (q, h)")
    for tensor in model.graph.initializer:
        if tensor.name in ("w", "b"):
            scaled = onnx.numpy_helper.to_array(tensor) * np.float32(size)
            tensor.CopyFrom(onnx.numpy_helper.from_array(scaled, tensor.name))
    made, error = deepened(model, tmp_path)
    arrays = made.deep[0].arrays
    coefficients = next(a for name, a in arrays.items() if name.endswith(".coefficients"))
    assert np.abs(coefficients).sum(axis=1).max() == pytest.approx(1, rel=1e-6)
    assert error < ROUNDING


def test_plans_with_deep_blocks_have_no_prepared_mode(tmp_path: Path) -> None:
    """Their groups are as large as a block's slots, and their evaluations outlive a mask."""
    model = graph(
        "g (float[n,6] x) => (float y) { h = Gemm (x, w, b) r = Relu (h) i = Gemm (r, u, b) s = Softmax (i) "
        "y = Gemm (s, v, c) }",
        {"w": weights(6, 5) / 2, "b": weights(5), "u": weights(5, 5), "v": weights(5, 4), "c": weights(4)},
    )
    made, _ = deepened(model, tmp_path, depth=1)
    assert [step.kind for step in made.plan.steps] == ["deep", "node", "round"]
    assert not made.plan.has_prepared_mode
