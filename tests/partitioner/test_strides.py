"""Strides that move back to the convolution that makes the values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from partitioner import pipeline, strides
from partitioner.placement import place
from tests.partitioner.examples import Partitioned, check, graph, weights
from tests.partitioner.test_placement_values import values

KERNELS = {
    "w": weights(4, 4, 3, 3),
    "u": weights(4, 4, 3, 3, seed=1),
    "p": weights(6, 4, 1, 1),
    "m": weights(6, 4, 1, 1, seed=1),
    "v": weights(4, 6, 1, 1),
    "o": weights(4, 8, 1, 1),
    "k": weights(6, 4, 3, 3),
    "b": weights(4),
    "slope": weights(4, 1, 1),
    "border": weights(1, 4, 8, 8),
    "line": weights(8),
    "column": weights(8, 1),
    "low": np.float32(-0.5),
    "high": np.float32(0.5),
    "gain": np.array([1.5, 0.5, 2.0, 1.0], np.float32),
    "variance": np.array([0.5, 1.0, 2.0, 1.5], np.float32),
    "twos": np.array([2, 2]),
    "zeros": np.array([0, 0]),
    "ends": np.array([99, 99]),
    "one": np.array([1, 1]),
    "plane": np.array([2, 3]),
    "zero": np.array([0]),
    "end": np.array([99]),
    "two": np.array([2]),
    "rows": np.array([2]),
    "columns": np.array([3]),
}
#: A projection and a main path, both with the stride in a 1x1 convolution.
PAIR = "s = Conv <strides = [2, 2]> (r, p) t = Conv <strides = [2, 2]> (r, m) t1 = Relu (t) y = Add (s, t1)"
STRIDED, SLICED, MOVED = "makes only the rows", "takes the rows", "its stride is in"


def compare(
    body: str, tmp_path: Path, shape: str = "4,8,8", results: str = "float y", **options: object
) -> Partitioned:
    used = {name: array for name, array in KERNELS.items() if re.search(rf"[(,] ?{name}[,)]", body)}
    return check(graph(f"g (float[n,{shape}] x) => ({results}) {{ {body} }}", used), tmp_path, **options)  # type: ignore[arg-type]


def reasons(found: Partitioned) -> str:
    return " ".join(
        reason for part in (*found.plan.blocks, *found.plan.steps) for reason in getattr(part, "reasons", ())
    )


def down(found: Partitioned) -> int:
    return sum(block.prepared.values_down for block in found.plan.blocks if block.prepared is not None)


def down_unmoved(body: str, folder: Path, shape: str = "4,8,8", results: str = "float y") -> int:
    """Return the values that come down without the pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "stride_early", lambda model, pinned: None)
        return down(compare(body, folder, shape, results))


@pytest.mark.parametrize("shape", ["4,8,8", "4,7,9", "4,1,5", "4,6"])
def test_stride_of_a_pair_is_in_the_convolution_before_it(shape: str, tmp_path: Path) -> None:
    flat = shape == "4,6"
    pads, strides, kernel = ("1, 1", "2", "3") if flat else ("1, 1, 1, 1", "2, 2", "3, 3")
    body = (
        f"a = Conv <pads = [{pads}], kernel_shape = [{kernel}]> (x, w) r = Relu (a) "
        f"s = Conv <strides = [{strides}]> (r, p) t = Conv <strides = [{strides}]> (r, m) t1 = Relu (t) y = Add (s, t1)"
    )
    arrays = {name: KERNELS[name][..., 0] if flat else KERNELS[name] for name in ("w", "p", "m")}
    found = check(graph(f"g (float[n,{shape}] x) => (float y) {{ {body} }}", arrays), tmp_path)
    positions = int(np.prod([-(-int(size) // 2) for size in shape.split(",")[1:]]))
    assert down(found) == (4 + 6 + 6) * positions
    assert STRIDED in reasons(found)
    assert MOVED in reasons(found)


def test_residual_stage_slices_its_shortcut_and_strides_both_convolutions(tmp_path: Path) -> None:
    """The shortcut x is read in full by the 3x3 convolution, whose own result is read in steps by a 1x1 alone."""
    start = "f = Conv <pads = [1, 1, 1, 1]> (x, u) h = Relu (f) "
    block = "a = Conv <pads = [1, 1, 1, 1]> (h, w) b1 = Relu (a) c = Conv (b1, q) d = Add (c, h) r = Relu (d) "
    body = (start + block + PAIR).replace("(b1, q)", "(b1, n)")
    arrays = {name: KERNELS[name] for name in ("u", "w", "p", "m")} | {"n": weights(4, 4, 1, 1)}
    found = check(graph(f"g (float[n,4,8,8] x) => (float y) {{ {body} }}", arrays), tmp_path)
    assert down(found) == 4 * 64 + (4 + 4) * 16 + 12 * 16  # f in full; a and c in steps; the pair
    assert STRIDED in reasons(found)
    assert SLICED in reasons(found)


def test_two_stages_in_a_row_multiply_their_strides(tmp_path: Path) -> None:
    body = (
        "a = Conv <pads = [1, 1, 1, 1]> (x, w) q = Relu (a) s = Conv <strides = [2, 2]> (q, p) "
        "t = Conv <strides = [2, 2]> (q, m) t1 = Relu (t) e = Add (s, t1) f = Relu (e) "
        "g1 = Conv <strides = [2, 2]> (f, v) g2 = Relu (g1) y = Conv (g2, p)"
    )
    found = compare(body, tmp_path, "4,13,13")
    # Of 13 rows, 4 are read by the second stage: every fourth.
    assert down(found) == 16 * (4 + 6 + 6 + 4 + 6)


BETWEEN = {
    "batch_normalisation": "e = Sigmoid (a) r = BatchNormalization (e, gain, b, b, variance)",
    "slope_a_channel": "r = PRelu (a, slope)",
    "bounds": "r = Clip (a, low, high)",
    "constant_a_channel": "e = Add (a, slope) r = Relu (e)",
    "constant_plane": "e = Add (a, border) r = Relu (e)",
    "constant_row": "e = Sigmoid (a) f = Mul (e, line) r = Relu (f)",
    "constant_column": "e = Sigmoid (a) f = Mul (column, e) r = Relu (f)",
    "read_twice_on_the_way": "e = Sigmoid (a) r = Mul (a, e)",
    "twice_the_same": "e = Relu (a) r = Mul (e, e)",
    "two_convolutions": "c = Conv <pads = [2, 0, 0, 2]> (x, u) e = Sub (a, c) r = Relu (e)",
    "channels_joined": "c = Conv <pads = [1, 1, 1, 1]> (x, u) d = Concat <axis = -3> (c, a) e = Relu (d) "
    "r = Conv (e, o)",
    "gates": "e = GlobalAveragePool (x) c = Sigmoid (e) d = Relu (a) r = Mul (d, c)",
}


@pytest.mark.parametrize("case", BETWEEN)
def test_stride_moves_through_what_acts_position_by_position(case: str, tmp_path: Path) -> None:
    body = f"a = Conv <pads = [1, 1, 1, 1]> (x, w) {BETWEEN[case]} {PAIR}"
    found = compare(body, tmp_path)
    # Joined channels go on into a convolution; a product with a constant has learned weights, a sum comes down as one.
    made = {"channels_joined": 8 + 4, "constant_row": 4 + 4, "constant_column": 4 + 4}.get(case, 4)
    assert down(found) == 16 * (made + 12)
    assert STRIDED in reasons(found)


MAKERS = {
    "padding_above": "a = Conv <pads = [2, 2, 0, 0]> (x, w)",
    "same_upper": 'a = Conv <auto_pad = "SAME_UPPER"> (x, w)',
    "same_lower_strided": 'a = Conv <auto_pad = "SAME_LOWER", strides = [2, 2]> (x, w)',
    "valid": 'a = Conv <auto_pad = "VALID"> (x, w)',
    "dilated": "a = Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (x, w)",
    "grouped": "a = Conv <pads = [1, 1, 1, 1], group = 4> (x, d)",
    "strided_unevenly": "a = Conv <pads = [1, 1, 1, 1], strides = [1, 2]> (x, w)",
    "much_padding": "a = Conv <pads = [5, 5, 5, 5]> (x, w)",
    "with_bias": "a = Conv <pads = [1, 1, 1, 1]> (x, w, b)",
}


@pytest.mark.parametrize("shape", ["4,8,8", "4,9,11"])
@pytest.mark.parametrize("case", MAKERS)
def test_convolution_makes_every_second_position_whatever_its_window(case: str, shape: str, tmp_path: Path) -> None:
    body = f"{MAKERS[case].replace('(x, d)', '(x, slices)')} r = Relu (a) {PAIR}"
    arrays = {name: array for name, array in KERNELS.items() if f", {name}" in body} | {"slices": weights(4, 1, 3, 3)}
    found = check(graph(f"g (float[n,{shape}] x) => (float y) {{ {body} }}", arrays), tmp_path)
    assert STRIDED in reasons(found)


READERS = {
    "strides_with_a_common_step": ("y1 = Conv <strides = [2, 2]> (r, p) y2 = Conv <strides = [4, 4]> (r, m)", 16),
    "along_one_axis": ("y1 = Conv <strides = [1, 2]> (r, p) y2 = Conv <strides = [2, 2]> (r, m)", 32),
    "pooling": ("y1 = MaxPool <kernel_shape = [1, 1], strides = [2, 2]> (r) y2 = Conv <strides = [2, 2]> (r, m)", 16),
    "average": (
        "y1 = AveragePool <kernel_shape = [1, 1], strides = [2, 2]> (r) "
        "y2 = MaxPool <kernel_shape = [1, 1], strides = [4, 2]> (r)",
        16,
    ),
    "slice": ("y1 = Slice (r, zeros, ends, plane, twos) y2 = Conv <strides = [2, 2]> (r, m)", 16),
    "slices_one_by_one": (
        "z1 = Slice (r, zero, end, rows, two) y1 = Slice (z1, zero, end, columns, two) "
        "y2 = Conv <strides = [2, 2]> (r, m)",
        16,
    ),
}


@pytest.mark.parametrize("case", READERS)
def test_all_readers_go_on_from_the_positions_that_are_left(case: str, tmp_path: Path) -> None:
    text, positions = READERS[case]
    found = compare(
        f"a = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (a) {text}", tmp_path, results="float y1, float y2"
    )
    first = next(block for block in found.plan.blocks if STRIDED in " ".join(block.reasons))
    assert first.prepared is not None
    assert first.prepared.values_down == 4 * positions


ALONE = {
    "kernel": "s = Conv <strides = [2, 2]> (r, p) t = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (r, k) "
    "y = Add (s, t)",
    "other_stride": "s = Conv <strides = [2, 2]> (r, p) y1 = Relu (s) t = Conv <strides = [3, 3]> (r, m) y = Relu (t)",
    "in_full": "s = Conv <strides = [2, 2]> (r, p) y1 = Relu (s) t = Conv (r, m) y = Relu (t)",
    "padding_in_front": "y = Conv <strides = [2, 2], pads = [1, 1, 0, 0]> (r, p)",
    "padding_behind": "y = Conv <strides = [2, 2], pads = [0, 0, 1, 1]> (r, p)",
    "other_rows": "y = Slice (r, one, ends, plane, twos)",
    "unread_end": "y = Slice (r, zeros, twos, plane, twos)",
    "nonlinear_over_positions": "e = Softmax <axis = 3> (a) y = Conv <strides = [2, 2]> (e, p)",
    "pooled": "e = MaxPool <kernel_shape = [2, 2]> (a) y = Conv <strides = [2, 2]> (e, p)",
    "constant_alone": "e = Tanh (x) y = Conv <strides = [2, 2]> (e, p)",
}


@pytest.mark.parametrize("case", ALONE)
def test_what_is_read_otherwise_is_made_in_full(case: str, tmp_path: Path) -> None:
    body = f"a = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (a) {ALONE[case]}"
    results = "float y1, float y" if "y1" in body else "float y"
    (tmp_path / "unmoved").mkdir()
    found = compare(body, tmp_path, results=results)
    assert STRIDED not in reasons(found)
    assert MOVED not in reasons(found)
    assert down(found) == down_unmoved(body, tmp_path / "unmoved", results=results)


def test_result_of_the_model_is_made_in_full(tmp_path: Path) -> None:
    found = compare(f"a = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (a) {PAIR}", tmp_path, results="float y, float r")
    assert STRIDED not in reasons(found)


def test_result_on_the_way_is_sliced(tmp_path: Path) -> None:
    """What lies in front of a result is needed in full; a convolution beside it is not."""
    both = "a = Conv <pads = [1, 1, 1, 1]> (x, w) c = Conv <pads = [1, 1, 1, 1]> (x, u)"
    body = f"{both} h = Tanh (c) e = Add (a, h) r = Relu (e) {PAIR}"
    found = compare(body, tmp_path, results="float y, float h")
    assert down(found) == 4 * 64 + 4 * 16 + 12 * 16
    assert SLICED in reasons(found)


@pytest.mark.parametrize("pinned", ["first", "act", "second"])
def test_pinned_operators_stay_as_they_are(pinned: str, tmp_path: Path) -> None:
    proto = graph(
        f"g (float[n,4,8,8] x) => (float y) {{ a = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (a) {PAIR} }}",
        {name: KERNELS[name] for name in ("w", "p", "m")},
    )
    for node, name in zip(proto.graph.node, ("first", "act", "second"), strict=False):
        node.name = name
    found = check(proto, tmp_path, on_node=[pinned])
    assert STRIDED not in reasons(found)
    assert MOVED not in reasons(found)


UPLOADS = {
    # Planes that fit no ciphertext, in equal bands; every fourth position, of which every second is read.
    "bands_that_two_share": ("16,92,92", "", (2, 1)),
    "steps_that_two_share": ("16,12,12", "<strides = [2, 2]>", (2, 1)),
    "padding_that_one_shares": ("4,8,8", "", (2, 3)),
}


@pytest.mark.parametrize("case", UPLOADS)
def test_stride_moves_only_where_it_adds_no_more_uploads_than_it_saves(case: str) -> None:
    shape, own, (outputs, other) = UPLOADS[case]
    channels = int(shape.split(",")[0])
    kernels = {"v": weights(outputs, channels, 1, 1), "w": weights(2, outputs, 1, 1)}
    kernels["p"] = weights(outputs, channels, other, other)
    model = graph(
        f"g (float[n,{shape}] x) => (float y, float z) {{ r = Relu (x) a = Conv {own} (r, v) b = Relu (a) "
        f"y = Conv <strides = [2, 2]> (b, w) c = Conv {own} (r, p) z = Relu (c) }}",
        kernels,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strides, "_saves", lambda region, steps, shapes: bool(region.convolutions))
        always = values(model, place, saves=True)
    never, found = values(model, place), values(model, place, saves=True)
    assert found == min(never, always)
    assert (always < never) == (other == 3)
