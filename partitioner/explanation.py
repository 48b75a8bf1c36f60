"""Why every operator runs where it runs, one line each.

requires  sides of all nodes
ensures   a reason for each of them
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import onnx_ir as ir

from partitioner.homogeneous import NOTE
from partitioner.lowering import Lowered, Placement
from partitioner.pinning import PinnedNodes
from partitioner.placement import Side
from partitioner.shapes import Shape

MOVED = "adds values of different scales, or would make a block wait for itself"


def explain(
    lowered: Mapping[ir.Node, Lowered],
    sides: Mapping[ir.Node, Side],
    shapes: Mapping[str, Shape],
    pinned: PinnedNodes,
    moved: Collection[ir.Node] = (),
) -> dict[ir.Node, str]:
    """Return a reason for every node.

    Args:
        lowered: what each node may do, pins apart.
        sides: where it runs.
        shapes: shapes per sample.
        pinned: what the user has pinned.
        moved: free operators that scales or cycles have moved to the node.
    """
    return {
        node: _noted(node, _reason(node, lowered[node], side, shapes, pinned, moved)) for node, side in sides.items()
    }


def _noted(node: ir.Node, reason: str) -> str:
    """Say first what a pass has noted of an operator."""
    note = node.meta.get(NOTE)
    return reason if note is None else f"{note}; {reason}"


def _reason(
    node: ir.Node,
    lowered: Lowered,
    side: Side,
    shapes: Mapping[str, Shape],
    pinned: PinnedNodes,
    moved: Collection[ir.Node],
) -> str:
    if node in pinned.on_node:
        weights = lowered.placement is Placement.WEIGHTED
        return "pinned to the node" + (", its weights with it" if weights else "")
    if node in pinned.on_server:
        return "pinned to the server"
    if lowered.placement is Placement.WEIGHTED:
        return "has learned weights"
    if lowered.placement is Placement.NODE:
        return "is not linear in float32 values, or the batch does not lead them"
    if node in moved:
        return MOVED
    crossing = _crossing(node, lowered, shapes)
    return {
        Side.AFTER_WEIGHTS: f"free, behind weights: fewest values come back ({crossing})",
        Side.NODE: f"free, on the node: fewest values cross ({crossing})",
        Side.BEFORE_WEIGHTS: f"free, in front of weights: fewest values go up ({crossing})",
        Side.WEIGHTED: "has learned weights",
    }[side]


def _crossing(node: ir.Node, lowered: Lowered, shapes: Mapping[str, Shape]) -> str:
    """Say how many values a sample an operator reads and makes."""
    reads = sum(prod(shapes[str(v.name)]) for v in dict.fromkeys(lowered.sources))
    makes = sum(prod(shapes[str(v.name)]) for v in node.outputs if str(v.name) in shapes)
    return f"{reads:,} in, {makes:,} out"
