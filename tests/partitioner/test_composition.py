"""Transposed convolutions that become one with the convolution behind them, and averages that move in front of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from partitioner import partition
from tests.partitioner.examples import check, graph, weights

#: Kernel and stride of the transposed convolution, its bias, kernel and padding of the convolution.
PAIRS = {
    "two_by_two": (2, 2, True, 3, "1, 1, 1, 1"),
    "overlapping": (3, 2, True, 3, "1, 1, 1, 1"),
    "without_bias": (2, 2, False, 3, "1, 1, 1, 1"),
    "uneven_padding": (2, 2, True, 3, "1, 0, 2, 1"),
    "no_padding": (4, 3, True, 3, "0, 0, 0, 0"),
    "gaps": (1, 3, True, 5, "2, 2, 2, 2"),
    "pointwise": (2, 2, True, 1, "0, 0, 0, 0"),
    "no_stride": (3, 1, True, 3, "1, 1, 1, 1"),
}
JOINS = {
    "alone": ("c = Identity (u)", 3),
    "behind": ("c = Concat <axis = 1> (k, u)", 5),
    "in_front": ("c = Concat <axis = -3> (u, k)", 5),
    "between": ("c = Concat <axis = 1> (k, u, k)", 7),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("pair", PAIRS)
def test_transposed_convolution_and_convolution_are_one_block(pair: str, join: str, tmp_path: Path) -> None:
    kernel, stride, bias, other, pads = PAIRS[pair]
    text, channels = JOINS[join]
    size = 4 * stride + kernel
    constants = {"w": weights(4, channels, other, other), "c1": weights(4), "t": weights(2, 3, kernel, kernel)}
    constants |= {"t1": weights(3)} if bias else {}
    model = graph(
        f"g (float[n,2,5,5] x, float[n,2,{size},{size}] z) => (float y) {{ b = Relu (x) k = Tanh (z) "
        f"u = ConvTranspose <strides = [{stride}, {stride}]> (b, t{', t1' if bias else ''}) {text} "
        f"y = Conv <pads = [{pads}]> (c, w, c1) }}",
        constants,
    )
    found = check(model, tmp_path)
    assert len(found.rounds) == 1
    assert "composed" in " ".join(found.plan.blocks[0].reasons)


@pytest.mark.parametrize("third", [False, True])
def test_all_transposed_convolutions_of_a_join_are_composed(third: bool, tmp_path: Path) -> None:
    """What is left of the join behind the first pair is the second."""
    more, joined = ("k = ConvTranspose <strides = [2, 2]> (b, s, s1)", "e, u, k") if third else ("", "e, u")
    constants = {name: weights(2, 3, 2, 2, seed=seed) for seed, name in enumerate("tqs"[: 2 + third])}
    constants |= {f"{name}1": weights(3) for name in constants}
    constants |= {"w": weights(4, 9 if third else 6, 3, 3), "c1": weights(4)}
    model = graph(
        "g (float[n,2,8,8] x) => (float y) { b = Relu (x) e = ConvTranspose <strides = [2, 2]> (b, t, t1) "
        f"u = ConvTranspose <strides = [2, 2]> (b, q, q1) {more} c = Concat <axis = 1> ({joined}) "
        "y = Conv <pads = [1, 1, 1, 1]> (c, w, c1) }",
        constants,
    )
    assert len(check(model, tmp_path).rounds) == 1


SEPARATE = {
    "cropped": "u = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (b, t) y = Conv <pads = [1, 1, 1, 1]> (u, w)",
    "nonlinear": "a = ConvTranspose <strides = [2, 2]> (b, t) u = Relu (a) y = Conv (u, w)",
    "read_twice": "u = ConvTranspose <strides = [2, 2]> (b, t) c = Conv (u, w) "
    "d = Conv (u, w) e = Relu (d) y = Add (c, e)",
    "strided": "u = ConvTranspose <strides = [2, 2]> (b, t) y = Conv <strides = [2, 2]> (u, w)",
    "dilated": "u = ConvTranspose <strides = [2, 2]> (b, t) y = Conv <dilations = [2, 2]> (u, w)",
    "more_padding_than_kernel": "u = ConvTranspose <strides = [2, 2]> (b, t) y = Conv <pads = [3, 3, 3, 3]> (u, w)",
    "grouped": "u = ConvTranspose <strides = [2, 2], group = 2> (b, q) y = Conv (u, w)",
}


@pytest.mark.parametrize("case", SEPARATE)
def test_what_does_not_compose_exactly_stays_in_two_rounds(case: str, tmp_path: Path) -> None:
    body = SEPARATE[case]
    kernels = {"t": weights(4, 4, 3, 3), "q": weights(4, 2, 3, 3), "w": weights(3, 4, 3, 3)}
    used = {name: kernel for name, kernel in kernels.items() if f", {name})" in body}
    model = graph(f"g (float[n,4,5,5] x) => (float y) {{ b = Relu (x) {body} }}", used)
    assert len(check(model, tmp_path).rounds) == 2


def test_pair_whose_product_is_larger_than_both_stays_in_two_rounds(tmp_path: Path) -> None:
    """One channel between many: composed, the kernel would have 64 times the weights."""
    model = graph(
        "g (float[n,512,4,4] x) => (float y) { b = Relu (x) u = ConvTranspose <strides = [2, 2]> (b, t) "
        "y = Conv <pads = [1, 1, 1, 1]> (u, w) }",
        {"t": weights(512, 1, 2, 2), "w": weights(512, 1, 3, 3)},
    )
    assert len(check(model, tmp_path).rounds) == 2


def test_pinned_convolution_is_not_composed(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,2,5,5] x) => (float y) { b = Relu (x) u = ConvTranspose <strides = [2, 2]> (b, t) "
        "y = Conv (u, w) }",
        {"t": weights(2, 3, 2, 2), "w": weights(4, 3, 3, 3)},
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    plan = partition(path, tmp_path / "bundle", on_node=["Conv"]).plan
    assert [len(block.operators) for block in plan.blocks] == [1]
    assert plan.blocks[0].reasons == ("has learned weights",)


POOLS = {
    "average": ("AveragePool <kernel_shape = [2, 2], strides = [2, 2]>", 9),
    "global": ("GlobalAveragePool", 1),
    "padded": ("AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>", 9),
    "ceiling": ("AveragePool <kernel_shape = [4, 4], strides = [4, 4], ceil_mode = 1>", 4),
}


@pytest.mark.parametrize("result", ["y", "a"])
@pytest.mark.parametrize("pool", POOLS)
def test_average_behind_a_pointwise_convolution_moves_in_front(pool: str, result: str, tmp_path: Path) -> None:
    text, positions = POOLS[pool]
    model = graph(
        f"g (float[n,4,6,6] x) => (float {result}) {{ r = Relu (x) c = Conv <group = 2> (r, w, b) a = {text} (c) "
        f"{'y = Tanh (a)' if result == 'y' else ''} }}",
        {"w": weights(6, 2, 1, 1), "b": weights(6)},
    )
    found = check(model, tmp_path)
    assert [block.input_rows for block in found.plan.blocks] == [4 * positions]
    assert "moved in front" in " ".join(r for s in found.plan.steps for r in getattr(s, "reasons", ()))


def test_average_moves_in_front_of_all_pointwise_convolutions_of_a_row(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,4,6,6] x) => (float y) { r = Relu (x) c = Conv (r, w) d = Conv (c, v, b) e = Conv (d, u) "
        "y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (e) }",
        {"w": weights(5, 4, 1, 1), "v": weights(3, 5, 1, 1), "b": weights(3), "u": weights(6, 3, 1, 1)},
    )
    found = check(model, tmp_path)
    assert [block.input_rows for block in found.plan.blocks] == [4 * 9, 5 * 9, 3 * 9]


KEPT = {
    "counted_padding": "c = Conv (r, w, b) "
    "y = AveragePool <kernel_shape = [3, 3], strides = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1> (c)",
    "kernel": "c = Conv (r, u, b) y = GlobalAveragePool (c)",
    "stride": "c = Conv <strides = [2, 2]> (r, w, b) y = GlobalAveragePool (c)",
    "padding": "c = Conv <pads = [1, 1, 1, 1]> (r, w, b) y = GlobalAveragePool (c)",
    "no_fewer_values": "c = Conv (r, w, b) y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c)",
    "read_twice": "c = Conv (r, w, b) p = GlobalAveragePool (c) y = Add (p, c)",
    "shared_upload": "c = Conv (r, w, b) p = GlobalAveragePool (c) d = Conv (r, w, b) e = Tanh (d) y = Add (p, e)",
}


@pytest.mark.parametrize("case", KEPT)
def test_average_that_does_not_commute_or_save_stays_behind(case: str, tmp_path: Path) -> None:
    body = KEPT[case]
    constants = {"w": weights(5, 4, 1, 1), "u": weights(5, 4, 3, 3), "b": weights(5)}
    used = {name: array for name, array in constants.items() if f", {name}" in body}
    model = graph(f"g (float[n,4,6,6] x) => (float y) {{ r = Relu (x) {body} }}", used)
    found = check(model, tmp_path)
    assert "moved in front" not in " ".join(r for s in found.plan.steps for r in getattr(s, "reasons", ()))
