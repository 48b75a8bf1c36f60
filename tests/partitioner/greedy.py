"""Placements without looking ahead, to compare the minimum cut with: every operator in the order of the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from partitioner.lowering import Lowered, Placement
from partitioner.placement import Side
from partitioner.shapes import Shape


def first_come(
    model: ir.Model,
    lowered: Mapping[ir.Node, Lowered],
    shapes: Mapping[str, Shape],
    on_node: Collection[ir.Node] = (),
    on_server: Collection[ir.Node] = (),
) -> dict[ir.Node, Side]:
    """Run every operator as soon as what it reads is there.

    Weighted ones run in the first round in which the node has their input. Free ones run on the server where all that
    they read is made there in the same round, else on the node.
    """
    return _greedy(model, lowered, on_node, waits=False)


def patient(
    model: ir.Model,
    lowered: Mapping[ir.Node, Lowered],
    shapes: Mapping[str, Shape],
    on_node: Collection[ir.Node] = (),
    on_server: Collection[ir.Node] = (),
) -> dict[ir.Node, Side]:
    """Leave free operators on the server where all that they read is encrypted, though one may wait for another."""
    return _greedy(model, lowered, on_node, waits=True)


def _greedy(
    model: ir.Model, lowered: Mapping[ir.Node, Lowered], on_node: Collection[ir.Node], *, waits: bool
) -> dict[ir.Node, Side]:
    sides: dict[ir.Node, Side] = {}
    made: dict[ir.Value, int] = {}  # round in which the server makes an encrypted value
    ready: dict[ir.Value, int] = {}  # rounds that have ended when the node has a value
    for node in model.graph:
        sources = lowered[node].sources
        first = max((ready.get(value, 0) for value in node.inputs if value is not None), default=0)
        together = bool(sources) and all(value in made for value in sources)
        together = together and (waits or len({made[value] for value in sources}) == 1)
        if lowered[node].placement is Placement.WEIGHTED:
            sides[node] = Side.WEIGHTED
            encrypted: int | None = first
        elif lowered[node].placement is not Placement.NODE and node not in on_node and together:
            sides[node] = Side.AFTER_WEIGHTS
            encrypted = max(made[value] for value in sources)
        else:
            sides[node] = Side.NODE
            encrypted = None
        for value in node.outputs:
            ready[value] = first if encrypted is None else encrypted + 1
            if encrypted is not None:
                made[value] = encrypted
    return sides
