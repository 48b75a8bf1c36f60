"""Gains of normalisations that move through positively homogeneous operators into the weights behind them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from heinfer.plan import RoundStep
from partitioner import partition
from tests.partitioner.examples import Partitioned, check, graph, weights

CONV = "Conv <pads = [1, 1, 1, 1]>"
Arrays = dict[str, np.ndarray]


def normalisation(channels: int, seed: int = 0, gains: list[float] | None = None) -> Arrays:
    """Return the parameters of a normalisation, gains of both signs and of sizes that differ by a thousand."""
    rng = np.random.default_rng([seed, channels])
    sizes = 10 ** rng.uniform(-1.5, 1.5, channels)
    drawn = rng.choice([-1, 1], channels) * sizes if gains is None else gains
    arrays = (drawn, rng.normal(size=channels), rng.normal(size=channels), rng.uniform(0.1, 4, channels))
    return {name: np.asarray(a, np.float32) for name, a in zip(("s", "b", "m", "v"), arrays, strict=True)}


def normalised(body: str, constants: Arrays, gains: list[float] | None = None) -> onnx.ModelProto:
    """Return x -> Tanh -> normalisation -> p -> `body` -> y."""
    text = f"g (float[n,4,6,6] x) => (float y) {{ t = Tanh (x) p = BatchNormalization (t, s, b, m, v) {body} }}"
    return graph(text, normalisation(4, gains=gains) | constants)


def is_moved(found: Partitioned) -> bool:
    return "BatchNormalization" in found.node_operators


W = {"w": weights(5, 4, 3, 3)}
TOO_LARGE, SMALL = np.full((4, 1, 1), 3e38, np.float32), weights(5, 4, 3, 3) * np.float32(1e-30)
CHAINS: dict[str, tuple[str, Arrays]] = {
    "relu": (f"q = Relu (p) y = {CONV} (q, w)", W),
    "nothing_between": ("y = ConvTranspose (p, k)", {"k": weights(4, 3, 2, 2)}),
    "leaky_relu": (f"q = LeakyRelu <alpha = 0.1> (p) y = {CONV} (q, w)", W),
    "prelu": (f"q = PRelu (p, a) y = {CONV} (q, w)", W | {"a": weights(4, 1, 1)}),
    "absolute_value": (f"q = Abs (p) r = Neg (q) y = {CONV} (r, w)", W),
    "max_pool": (f"q = Relu (p) r = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (q) y = {CONV} (r, w)", W),
    "average_pool": (f"q = Relu (p) r = AveragePool <kernel_shape = [2, 2]> (q) y = {CONV} (r, w)", W),
    "pad": (f"q = Relu (p) r = Pad (q, a) y = {CONV} (r, w)", W | {"a": np.array([0, 0, 1, 0, 0, 0, 2, 1])}),
    "grouped": ("q = Relu (p) y = Conv <group = 2> (q, w)", {"w": weights(6, 2, 3, 3)}),
    "flatten_gemm": ("q = Relu (p) r = Flatten (q) y = Gemm (r, w)", {"w": weights(144, 3)}),
    "reshape_matmul": (
        "q = Relu (p) r = Reshape (q, a) y = MatMul (r, w)",
        {"w": weights(144, 3), "a": np.array([0, -1])},
    ),
    "global_pool": (
        "q = Relu (p) r = GlobalAveragePool (q) u = Flatten (r) y = Gemm <transB = 1> (u, w)",
        {"w": weights(3, 4)},
    ),
    "mean": ("q = Relu (p) r = ReduceMean <axes = [2, 3], keepdims = 0> (q) y = Gemm (r, w)", {"w": weights(4, 3)}),
    "concat": (f"q = Relu (p) r = Concat <axis = 1> (t, q) y = {CONV} (r, w)", {"w": weights(5, 8, 3, 3)}),
    "several_readers": (
        f"q = Relu (p) c = {CONV} (q, w) d = {CONV} (q, u) y = Add (c, d)",
        W | {"u": weights(5, 4, 3, 3, seed=1)},
    ),
    "shared_weights": (f"q = Relu (p) c = {CONV} (q, w) d = {CONV} (t, w) e = Tanh (d) y = Add (c, e)", W),
    "shift_behind": (f"o = Add (p, a) q = Relu (o) y = {CONV} (q, w)", W | {"a": weights(4, 1, 1)}),
    "shift_subtracted": (f"o = Sub (p, a) q = Relu (o) y = {CONV} (q, w)", W | {"a": np.float32(0.3)}),
    "caffe_scale": (
        f"c = Mul (p, z) o = Add (c, a) q = Relu (o) y = {CONV} (q, w)",
        W | {"z": weights(4, 1, 1), "a": weights(4, 1, 1)},
    ),
}


@pytest.mark.parametrize(
    "gains", [None, [2.0, 0.0, -0.5, 3.0], [0.0, 0.0, 0.0, 0.0]], ids=["signs", "zeros", "all_zero"]
)
@pytest.mark.parametrize("chain", CHAINS)
def test_gains_in_front_of_homogeneous_operators_take_no_round(
    chain: str, gains: list[float] | None, tmp_path: Path
) -> None:
    found = check(normalised(*CHAINS[chain], gains), tmp_path)
    assert len(found.rounds) == 1
    assert is_moved(found)


LEFT: dict[str, tuple[str, Arrays]] = {
    "sigmoid": (f"q = Sigmoid (p) y = {CONV} (q, w)", W),
    "one_reader_is_a_sigmoid": (f"q = Relu (p) r = Sigmoid (q) c = {CONV} (q, w) d = {CONV} (r, w) y = Add (c, d)", W),
    "read_by_a_sum_of_activations": (f"q = Relu (p) r = Add (q, t) y = {CONV} (r, w)", W),
    "made_a_result": ("y = Relu (p) z = GlobalAveragePool (y) u = Flatten (z) k = Gemm (u, w)", {"w": weights(4, 3)}),
    "padded_with_ones": (
        f"q = Relu (p) r = Pad (q, a, o) y = {CONV} (r, w)",
        W | {"a": np.array([0, 0, 1, 0, 0, 0, 2, 1]), "o": np.float32(1)},
    ),
    "shift_along_a_row": (f"o = Add (p, a) q = Relu (o) y = {CONV} (q, w)", W | {"a": weights(6)}),
    "features_are_no_channels": ("q = Relu (p) y = MatMul (q, w)", {"w": weights(6, 6)}),
}


@pytest.mark.parametrize("case", LEFT)
def test_gains_in_front_of_anything_else_stay_under_encryption(case: str, tmp_path: Path) -> None:
    found = check(normalised(*LEFT[case]), tmp_path)
    assert "BatchNormalization" in found.server_operators
    assert not is_moved(found)


def test_node_holds_signs_powers_of_two_and_biases_and_no_gains(tmp_path: Path) -> None:
    model = normalised(*CHAINS["relu"], gains=[3.0, -0.3, 0.7, 100.0])
    found = check(model, tmp_path)
    (content,) = [c for c in found.node.submodels.values() if b"BatchNormalization" in c]
    inner = onnx.load_model_from_string(content).graph
    (node,) = [n for n in inner.node if n.op_type == "BatchNormalization"]
    scales = {i.name: onnx.numpy_helper.to_array(i) for i in inner.initializer}[node.input[1]]
    assert np.all(np.frexp(np.abs(scales))[0] == 0.5)
    assert list(np.sign(scales)) == [1, -1, 1, 1]
    reason = next(r for s in found.plan.steps if not isinstance(s, RoundStep) for r in s.reasons if "gains" in r)
    assert "signs, powers of two and biases" in reason


@pytest.mark.parametrize(
    "pins", [{"on_server": ["BatchNormalization"]}, {"on_node": ["Conv_0"]}, {"on_node": ["Batch*"]}]
)
def test_pinned_operators_keep_their_gains(pins: dict[str, list[str]], tmp_path: Path) -> None:
    model = normalised(f"q = Relu (p) c = {CONV} (q, w) y = {CONV} (c, u)", W | {"u": weights(3, 5, 3, 3)})
    for number, node in enumerate(n for n in model.graph.node if n.op_type == "Conv"):
        node.name = f"Conv_{number}"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    free, pinned = (partition(path, tmp_path / name, **which) for name, which in (("free", {}), ("pinned", pins)))
    noted = [
        [r for s in found.plan.steps if not isinstance(s, RoundStep) for r in s.reasons if "its gains" in r]
        for found in (free, pinned)
    ]
    assert [len(reasons) for reasons in noted] == [1, 0]


def test_precision_does_not_suffer_from_gains_of_different_sizes(tmp_path: Path) -> None:
    """Weights of one row share a scale: without the powers of two, those of small gains would have few bits left."""
    wide = check(normalised(*CHAINS["relu"], gains=[1e-3, 1.0, -1e3, 30.0]), tmp_path).plan
    even = check(normalised(*CHAINS["relu"], gains=[1.0, 1.0, -1.0, 1.0]), tmp_path).plan
    assert wide.blocks[0].unit_bound < 2 * even.blocks[0].unit_bound


def test_gains_stay_where_what_is_added_would_leave_float32(tmp_path: Path) -> None:
    """1.42 is 2 x 0.71, and 3e38 divided by 0.71 is no float32."""
    found = check(
        normalised(f"o = Add (p, a) q = Relu (o) y = {CONV} (q, w)", {"a": TOO_LARGE, "w": SMALL}, [1.42] * 4), tmp_path
    )
    assert "BatchNormalization" in found.server_operators
    assert not is_moved(found)


@pytest.mark.parametrize("pinned", ["between", "behind"])
def test_gains_do_not_pass_a_pinned_operator(pinned: str, tmp_path: Path) -> None:
    """Its numbers are what the model says: a Relu on the way, a convolution that would take the gains."""
    model = normalised(f"q = Relu (p) r = LeakyRelu (q) y = {CONV} (r, w)", W)
    model.graph.node[3].name, model.graph.node[-1].name = "between", "behind"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    free, kept = (partition(path, tmp_path / name, on_node=on_node) for name, on_node in (("a", []), ("b", [pinned])))
    assert [len(found.plan.blocks) for found in (free, kept)] == [1, 2 if pinned == "between" else 1]
    assert ["BatchNormalization" in " ".join(f.plan.blocks[0].operators) for f in (free, kept)] == [False, True]
