from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from heinfer.errors import InputError, UnsupportedModelError
from heinfer.plan import Plan, RoundStep
from partitioner import partition
from tests.partitioner.examples import graph, weights


def network() -> onnx.ModelProto:
    model = graph(
        "g (float[n,4,6,6] x) => (float y) { a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Relu (a) "
        "c = GlobalAveragePool (b) d = Flatten (c) y = Gemm (d, m) }",
        {"w": weights(4, 4, 3, 3), "m": weights(4, 3)},
    )
    for node, name in zip(model.graph.node, ["first", "relu", "pool", "flat", "head"], strict=True):
        node.name = name
    return model


def pinned(tmp_path: Path, on_node: list[str], on_server: list[str], model: onnx.ModelProto | None = None) -> Plan:
    path = tmp_path / "example.onnx"
    path.write_bytes((model or network()).SerializeToString())
    return partition(path, tmp_path / "bundle", on_node=on_node, on_server=on_server).plan


def reasons(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return side and reason of every operator."""
    found = {}
    for step in plan.steps:
        held = [plan.blocks[i] for i in step.blocks] if isinstance(step, RoundStep) else [step]
        for holder in held:
            side = "server" if isinstance(step, RoundStep) else "node"
            for operator, reason in zip(holder.operators, holder.reasons, strict=True):
                found[operator.partition(" ")[0]] = (side, reason)
    return found


def test_every_operator_has_a_reason_for_its_place(tmp_path: Path) -> None:
    found = reasons(pinned(tmp_path, [], []))
    assert set(found) == {"first", "relu", "pool", "flat", "head"}
    assert found["first"] == ("server", "has learned weights")
    assert found["relu"][1].startswith("is not linear")
    assert found["pool"] == ("node", "free, on the node: fewest values cross (144 in, 4 out)")


@pytest.mark.parametrize("pattern", ["head", "he*", "Gemm"])
def test_operator_with_weights_that_is_pinned_to_the_node_runs_there(pattern: str, tmp_path: Path) -> None:
    plan = pinned(tmp_path, [pattern], [])
    assert len(plan.blocks) == 1
    assert reasons(plan)["head"] == ("node", "pinned to the node, its weights with it")


def test_free_operator_that_is_pinned_to_the_server_runs_there(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,4,6,6] x) => (float y) { a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Pad (a, p) y = Relu (b) }",
        {"w": weights(4, 4, 3, 3), "p": np.array([0, 0, 2, 2, 0, 0, 2, 2])},
    )
    for node, name in zip(model.graph.node, ["first", "bigger", "relu"], strict=True):
        node.name = name
    assert reasons(pinned(tmp_path, [], [], model))["bigger"][0] == "node"
    assert reasons(pinned(tmp_path, [], ["bigger"], model))["bigger"] == ("server", "pinned to the server")


@pytest.mark.parametrize(
    ("on_node", "on_server", "message"),
    [
        (["haed"], [], "no operator's name or type is 'haed'; did you mean 'head'"),
        (["pool"], ["po*"], "pinned to both sides: pool"),
    ],
)
def test_pins_that_name_nothing_or_both_sides_are_refused(
    on_node: list[str], on_server: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        pinned(tmp_path, on_node, on_server)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("on_node", "on_server", "message"),
    [
        ([], ["relu"], "can't be pinned to the server"),
        ([], ["pool"], "need values that only the node has"),
        (["Conv", "Gemm"], [], "nothing is left to encrypt"),
    ],
)
def test_pins_that_can_not_be_kept_are_refused(
    on_node: list[str], on_server: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        pinned(tmp_path, on_node, on_server)
