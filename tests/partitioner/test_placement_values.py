"""The minimum cut never moves more values than placements that do not look ahead, on random and on chosen graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import onnx_ir as ir
import pytest
from hypothesis import given

from heinfer.errors import UnsupportedModelError
from heinfer.ring import RingParameters
from partitioner import pipeline
from partitioner.placement import Side, place
from tests.coverage.random_graphs import RandomGraph, mixed_graphs
from tests.coverage.test_random_graphs import examples
from tests.partitioner.examples import graph, weights
from tests.partitioner.greedy import first_come, patient

CONV = "Conv <pads = [1, 1, 1, 1]>"
GRAPHS, MANY = 6, 1000
Place = Callable[..., dict[ir.Node, Side]]


def values(model: onnx.ModelProto, placement: Place, *, saves: bool = False) -> int:
    """Return the values that one sample sends up and down in prepared mode.

    Args:
        model: the model.
        placement: how operators are placed.
        saves: whether operators are moved through others before.
    """
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        patch.setattr(pipeline, "place", placement)
        if not saves:
            patch.setattr(pipeline, "save_values", lambda model, pinned: None)
        blocks = pipeline.prepare(path, RingParameters.default()).blocks
    forms = [built.block.prepared for built in blocks]
    assert all(form is not None for form in forms)
    return sum(form.values_up + form.values_down for form in forms if form is not None)


def compare(drawn: RandomGraph) -> bool:
    """Compare all placements of a graph; say whether the cut moves fewer values than the best of the others."""
    try:
        cut, product = values(drawn.model, place), values(drawn.model, place, saves=True)
    except UnsupportedModelError:
        return False
    greedy = min(values(drawn.model, placement) for placement in (first_come, patient))
    assert product <= cut <= greedy
    return product < greedy


def test_random_graphs_move_no_more_values_than_first_come() -> None:
    fewer: list[bool] = []

    @examples(GRAPHS)
    @given(mixed_graphs())
    def hold(drawn: RandomGraph) -> None:
        fewer.append(compare(drawn))

    hold()
    assert any(fewer)


@pytest.mark.long
@pytest.mark.timeout(3600)
@examples(MANY, derandomize=False)
@given(mixed_graphs())
def test_many_random_graphs_move_no_more_values_than_first_come(drawn: RandomGraph) -> None:
    compare(drawn)


def residual(inputs: int, outputs: int) -> onnx.ModelProto:
    """Return two convolutions beside a projection of what the first reads."""
    return graph(
        f"g (float[n,{inputs},6,6] x) => (float y) {{ r = Relu (x) a = {CONV} (r, v) b = Relu (a) c = {CONV} (b, w) "
        "s = Conv (r, p) d = Add (c, s) y = Relu (d) }",
        {"v": weights(3, inputs, 3, 3), "w": weights(outputs, 3, 3, 3), "p": weights(outputs, inputs, 1, 1)},
    )


def test_projection_to_more_channels_waits_for_its_sum() -> None:
    """Ten channels more come down, two go up once more."""
    model = residual(2, 12)
    assert values(model, place) == values(model, patient) < values(model, first_come)


def test_projection_to_fewer_channels_shares_the_upload() -> None:
    """Two channels more come down; waiting, twelve would go up once more."""
    model = residual(12, 2)
    assert values(model, place) == values(model, first_come) < values(model, patient)


def test_projection_that_alone_reads_a_value_waits() -> None:
    """Nothing else uploads what it reads: whenever it runs, that goes up once."""
    model = graph(
        f"g (float[n,8,6,6] x, float[n,4,6,6] z) => (float y) {{ a = {CONV} (z, v) b = Relu (a) c = {CONV} (b, w) "
        "s = Conv (x, p) d = Add (c, s) y = Relu (d) }",
        {"v": weights(3, 4, 3, 3), "w": weights(2, 3, 3, 3), "p": weights(2, 8, 1, 1)},
    )
    assert values(model, place) == values(model, patient) < values(model, first_come)


def test_strided_projection_uploads_only_what_it_reads() -> None:
    """A quarter of eight channels, two channels' worth, beside three more that would come down."""
    model = graph(
        "g (float[n,8,6,6] x) => (float y) { r = Relu (x) a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (r, v) "
        f"b = Relu (a) c = {CONV} (b, w) s = Conv <strides = [2, 2]> (r, p) d = Add (c, s) y = Relu (d) }}",
        {"v": weights(3, 8, 3, 3), "w": weights(10, 3, 3, 3), "p": weights(10, 8, 1, 1)},
    )
    assert values(model, place) == values(model, patient) < values(model, first_come)


#: Operators in front of y; outputs, kernels of v, w and p; what is best.
WAITING: dict[str, tuple[str, tuple[int, int, int, int], Place]] = {
    "padded": (
        f"a = {CONV} (r, v) b = Relu (a) c = {CONV} (b, w) s = {CONV} (r, p) d = Add (c, s)",
        (3, 3, 3, 3),
        first_come,
    ),
    "padded_more_than_what_it_shares": (
        f"a = Conv (r, v) b = Relu (a) c = {CONV} (b, w) s = {CONV} (r, p) d = Add (c, s)",
        (3, 1, 3, 3),
        patient,
    ),
    "steps_that_need_all_positions_together": (
        "a = Conv <strides = [3, 3]> (r, v) b = Relu (a) c = Conv <pads = [1, 1, 1, 1]> (b, w) "
        "s = Conv <strides = [2, 2]> (r, p) d = Concat <axis = 1> (c, s)",
        (3, 1, 2, 1),
        patient,
    ),
    "three_that_share_what_goes_up_again": (
        f"a = {CONV} (r, v) b = Relu (a) c = {CONV} (b, w) s = Conv (r, p) t = Conv (r, q) k = Conv (r, o) "
        "e = Add (c, s) f = Add (e, t) d = Add (f, k)",
        (1, 3, 3, 1),
        patient,
    ),
}


@pytest.mark.parametrize("case", WAITING)
def test_projection_waits_where_less_goes_up_again_than_comes_down(case: str) -> None:
    """Its own upload has its own padding; shared, that of all readers."""
    body, (outputs, first, second, own), best = WAITING[case]
    kernels = {"v": weights(3, 2, first, first), "w": weights(outputs, 3, second, second)}
    kernels |= {
        name: weights(outputs, 2, own, own, seed=seed) for seed, name in enumerate("pqo") if f", {name})" in body
    }
    model = graph(f"g (float[n,2,6,6] x) => (float y) {{ r = Relu (x) {body} y = Relu (d) }}", kernels)
    found = {placement: values(model, placement) for placement in (first_come, patient)}
    assert values(model, place) == found[best] == min(found.values())
    assert len(set(found.values())) == 2


@pytest.mark.parametrize("order", ["a, b", "b, a"])
def test_joined_branches_of_one_round_stay_together(order: str) -> None:
    model = graph(
        f"g (float[n,4,6,6] x) => (float y) {{ r = Relu (x) a = {CONV} (r, v) b = {CONV} (r, w) c = Add ({order}) "
        "y = Relu (c) }",
        {"v": weights(3, 4, 3, 3), "w": weights(3, 4, 3, 3, seed=1)},
    )
    assert values(model, place) == values(model, first_come) == values(model, patient) == 4 * 64 + 3 * 36
