"""Place every operator on the side where fewest values cross, by a minimum cut.

    requires  a `Lowered` for every node
    ensures   a `Side` for every node; no value flows from the node to a server operator that follows weights, and none
              from a server operator in front of weights back to the node

A value flows through three places in this order: after the weights of one block (still encrypted), on the node, in
front of the weights of the next block (encrypted again). A weighted operator reads in the third and writes in the
first; a free operator sits in one of the three. So each operator has two binary variables, "at or after the node" and
"in front of weights", and each value costs its size when it crosses from 0 to 1 of the first (download) or of the
second (upload), once however many read it. That is a minimum cut: 0 is the source's side, an edge u -> v costs its
capacity where u is 0 and v is 1, and an edge without capacity forbids that.

Operators that meet on the server run in one block, in the round of the last. A projection that its sum makes wait reads
again what others have read rounds before, under another secret: such an upload is charged to the sum, padding included
(`partitioner.uploads`). In prepared mode what goes up is what the weights read, on whichever side movements in front of
them are; so the padding of all other uploads is the same for all placements, and left out.

Example: the sum of two convolutions belongs on the server, which then answers one value instead of two; average pooling
after a nonlinearity belongs on the node, which then uploads fewer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from math import prod
from typing import Any

import networkx as nx
import onnx_ir as ir

from heinfer.errors import Offence, UnsupportedModelError
from partitioner.costs import DOWN, UP
from partitioner.lowering import Lowered, Placement
from partitioner.shapes import Shape
from partitioner.uploads import values_up


class Side(Enum):
    """Where an operator runs: on the server after or before weights (WEIGHTED is both), or on the node."""

    AFTER_WEIGHTS = "server, after weights"
    NODE = "node"
    BEFORE_WEIGHTS = "server, before weights"
    WEIGHTED = "server, weighted"

    @property
    def on_server(self) -> bool:
        """Whether the operator runs under encryption."""
        return self is not Side.NODE


_SOURCE, _SINK = "source", "sink"
_Vertex = tuple[str, int, str]


def place(
    model: ir.Model,
    lowered: Mapping[ir.Node, Lowered],
    shapes: Mapping[str, Shape],
    on_node: Collection[ir.Node] = (),
    on_server: Collection[ir.Node] = (),
) -> dict[ir.Node, Side]:
    """Return where each node runs.

    Args:
        model: the graph.
        lowered: what each node may do.
        shapes: shapes per sample; values without one are never encrypted.
        on_node: nodes that later passes have found to belong on the node.
        on_server: free operators that the user has pinned to the server.

    Raises:
        UnsupportedModelError: an operator that is pinned to the server reads values of the node behind weights.
    """
    index = {node: i for i, node in enumerate(model.graph)}
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))
    for node in model.graph:
        kind = Placement.NODE if node in on_node else lowered[node].placement
        if kind is not Placement.WEIGHTED:
            makes_result = any(value.is_graph_output() for value in node.outputs)
            _add_operator(graph, index[node], kind, makes_result, node in on_server)
    for charges in _late_uploads(model, lowered, shapes).values():
        _add_late(graph, {index[node]: values for node, values in charges.items() if node not in on_node})
    for value in _values(model):
        shape = shapes.get(str(value.name))
        if shape is not None:
            _add_value(graph, value, prod(shape), index, lowered)
    try:
        _, (zero, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    except nx.NetworkXUnbounded as error:
        offences = [
            Offence(str(node.name), node.op_type, "pinned to the server, where it has no place") for node in on_server
        ]
        raise UnsupportedModelError(
            "operators that are pinned to the server need values that only the node has:", offences
        ) from error
    sides = {}
    for node in model.graph:
        if lowered[node].placement is Placement.WEIGHTED:
            sides[node] = Side.WEIGHTED
        elif _variable(index[node], "node") in zero:
            sides[node] = Side.AFTER_WEIGHTS
        elif _variable(index[node], "before") in zero:
            sides[node] = Side.NODE
        else:
            sides[node] = Side.BEFORE_WEIGHTS
    return sides


def _variable(node: int, name: str) -> _Vertex:
    return ("operator", node, name)


def _add_operator(graph: nx.DiGraph[Any], node: int, kind: Placement, makes_result: bool, on_server: bool) -> None:
    after, before = _variable(node, "node"), _variable(node, "before")
    graph.add_edge(after, before)  # never 0 and 1: in front of weights implies at or after the node
    if on_server:
        graph.add_edge(before, after)  # both or none: never between the two
    if kind is Placement.NODE:
        graph.add_edge(after, _SINK)
    if kind is Placement.MOVEMENT and not makes_result:
        graph.add_edge(_SOURCE, before, capacity=1)
    else:
        graph.add_edge(_SOURCE, before)


def _add_late(graph: nx.DiGraph[Any], charges: Mapping[int, int]) -> None:
    """Charge one late upload once, however many operators make others wait for it: the largest that any of them needs.

    What is fewer than nothing is charged to the operator that does not wait.
    """
    before = 0
    waiting = sorted(charges, key=lambda node: charges[node])
    for position, node in enumerate(waiting):
        more = charges[node] - max(before, 0)
        before = charges[node]
        if more < 0:
            graph.add_edge(_SOURCE, _variable(node, "node"), capacity=-more * UP)
        elif more > 0:
            charge: _Vertex = ("late", node, "charge")
            graph.add_edge(charge, _SINK, capacity=more * UP)
            graph.add_edges_from((_variable(other, "node"), charge) for other in waiting[position:])


def _add_value(
    graph: nx.DiGraph[Any], value: ir.Value, size: int, index: Mapping[ir.Node, int], lowered: Mapping[ir.Node, Lowered]
) -> None:
    """Charge a value once for its download and once for its upload, and keep the flow in order."""
    producer = value.producer()
    readers = {use.node for use in value.uses()}
    weighted = [r for r in readers if lowered[r].placement is Placement.WEIGHTED]
    for name, cost in (("node", size * DOWN), ("before", size * UP)):
        charge: _Vertex = (name, id(value), "charge")
        if producer is None:  # a query's input is on the node
            made: _Vertex | str = _SINK if name == "node" else _SOURCE
        elif lowered[producer].placement is Placement.WEIGHTED:
            made = _SOURCE
        else:
            made = _variable(index[producer], name)
        graph.add_edge(made, charge, capacity=cost)
        for reader in readers:
            if reader in weighted:
                graph.add_edge(charge, _SINK)
                continue
            read = _variable(index[reader], name)
            graph.add_edge(charge, read)
            graph.add_edge(read, made)  # nothing flows backwards
    if value.is_graph_output():  # a result is on the node
        graph.add_edge(("node", id(value), "charge"), _SINK)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph:
        yield from node.outputs


def _late_uploads(
    model: ir.Model, lowered: Mapping[ir.Node, Lowered], shapes: Mapping[str, Shape]
) -> dict[tuple[ir.Value, int], dict[ir.Node, int]]:
    """Return the values that go up once more where free operators wait for one another on the server.

    Args:
        model: the graph.
        lowered: what each node may do.
        shapes: shapes per sample.

    Returns:
        By what is read again, and the round: operators that make weighted ones in front of them wait, and how many
        values more go up for these in a block of their own than in one with others that read the same; negative where
        it is fewer. Each weighted operator is charged to the first that makes it wait.
    """
    rounds = _earliest_rounds(model, lowered)
    behind: dict[ir.Value, frozenset[ir.Node]] = {}  # weighted operators that a value follows, still encrypted
    found: dict[tuple[ir.Value, int], dict[ir.Node, int]] = {}
    charged: set[ir.Node] = set()
    for node in model.graph:
        if lowered[node].placement is Placement.WEIGHTED:
            behind[node.outputs[0]] = frozenset((node,))
            continue
        sources = lowered[node].sources
        if lowered[node].placement is Placement.NODE or not all(behind.get(value) for value in sources):
            continue
        met = frozenset().union(*(behind[value] for value in sources))
        behind.update(dict.fromkeys(node.outputs, met))
        last = max((rounds[n] for n in met), default=0)
        late: dict[ir.Value, list[ir.Node]] = {}
        for waiting in met - charged:
            if rounds[waiting] < last:
                charged.add(waiting)
                late.setdefault(lowered[waiting].sources[0], []).append(waiting)
        for value, readers in late.items():
            found.setdefault((value, last), {})[node] = _read_again(value, readers, met, lowered, shapes)
    return found


def _earliest_rounds(model: ir.Model, lowered: Mapping[ir.Node, Lowered]) -> dict[ir.Node, int]:
    """Return how many rounds end before a node can run, for weighted ones."""
    made: dict[ir.Value, int] = {}
    found: dict[ir.Node, int] = {}
    for node in model.graph:
        first = max((made.get(value, 0) for value in node.inputs if value is not None), default=0)
        weighted = lowered[node].placement is Placement.WEIGHTED
        if weighted:
            found[node] = first
        made.update(dict.fromkeys(node.outputs, first + weighted))
    return found


def _read_again(
    value: ir.Value,
    late: Collection[ir.Node],
    met: Collection[ir.Node],
    lowered: Mapping[ir.Node, Lowered],
    shapes: Mapping[str, Shape],
) -> int:
    """Return how many values more go up where weighted operators read one in a later round than others do.

    Fewer where together they need more: two strides without a common step take all positions.
    """
    readers = dict.fromkeys(use.node for use in value.uses() if lowered[use.node].placement is Placement.WEIGHTED)
    early = [node for node in readers if node not in met]
    shape = shapes.get(str(value.name))
    if not early or shape is None:
        return 0
    apart, of_others, together = (
        values_up(shape, [emit for node in nodes if (emit := lowered[node].emit) is not None])
        for nodes in (late, early, (*late, *early))
    )
    return apart + of_others - together
