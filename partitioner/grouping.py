"""Group placed operators into blocks and rounds.

    requires  a side for every node
    ensures   blocks (connected server operators, and those that read the same value in the same round) and node steps,
              each with its round; no block waits for itself

Operators of one block share an upload, one secret and one input scale. A block runs in the first round in which all its
inputs are there; node operators run as early as they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
import onnx_ir as ir

from partitioner.lowering import Lowered
from partitioner.placement import Side


class CyclicBlock(Exception):  # noqa: N818 - a signal between passes, not an error
    """A block would wait for itself; `nodes` are the free operators that tie it together."""

    def __init__(self, nodes: Iterable[ir.Node]) -> None:
        self.nodes = tuple(nodes)
        super().__init__("a block would wait for itself")


@dataclass(frozen=True, slots=True)
class Group:
    """Operators that run together.

    Attributes:
        nodes: in topological order.
        on_server: whether this is a block.
        round: rounds that have ended before it runs.
    """

    nodes: tuple[ir.Node, ...]
    on_server: bool
    round: int


def group(model: ir.Model, lowered: Mapping[ir.Node, Lowered], sides: Mapping[ir.Node, Side]) -> list[Group]:
    """Return blocks and node groups in the order in which they run.

    Raises:
        CyclicBlock: an operator must move to the node first.
    """
    order = {node: position for position, node in enumerate(model.graph)}
    owner = _components(model, lowered, sides)
    rounds = _rounds(owner, lowered, sides, order)
    merged: dict[tuple[int, bool, object], list[ir.Node]] = {}
    shared = _share_uploads(owner, rounds, sides, lowered)
    for node in model.graph:
        on_server = sides[node].on_server
        key = (rounds[owner[node]], on_server, shared[owner[node]] if on_server else None)
        merged.setdefault(key, []).append(node)
    groups = [Group(tuple(nodes), on_server, number) for (number, on_server, _), nodes in merged.items()]
    return sorted(groups, key=lambda g: (g.round, g.on_server, order[g.nodes[0]]))


def _components(
    model: ir.Model, lowered: Mapping[ir.Node, Lowered], sides: Mapping[ir.Node, Side]
) -> dict[ir.Node, int]:
    """Number the connected server operators; every node operator is alone."""
    graph: nx.Graph[Any] = nx.Graph()
    graph.add_nodes_from(model.graph)
    for node in model.graph:
        for producer in _encrypted_producers(node, lowered, sides):
            graph.add_edge(node, producer)
    return {node: number for number, nodes in enumerate(nx.connected_components(graph)) for node in nodes}


def _encrypted_producers(
    node: ir.Node, lowered: Mapping[ir.Node, Lowered], sides: Mapping[ir.Node, Side]
) -> list[ir.Node]:
    """Return the operators whose results a server operator reads without a way through the node."""
    reads = {Side.AFTER_WEIGHTS: (Side.AFTER_WEIGHTS, Side.WEIGHTED)}
    accepted = reads.get(sides[node], (Side.BEFORE_WEIGHTS,)) if sides[node].on_server else ()
    producers = [value.producer() for value in lowered[node].sources]
    return [p for p in producers if p is not None and sides[p] in accepted]


def _rounds(
    owner: Mapping[ir.Node, int],
    lowered: Mapping[ir.Node, Lowered],
    sides: Mapping[ir.Node, Side],
    order: Mapping[ir.Node, int],
) -> dict[int, int]:
    """Return for every component how many rounds must have ended before it."""
    on_server = {owner[node] for node, side in sides.items() if side.on_server}
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_nodes_from(owner.values())
    for node in order:
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and (
                owner[producer] != owner[node] or _decrypted_between(sides[producer], sides[node])
            ):
                graph.add_edge(owner[producer], owner[node])
    for cycle in nx.strongly_connected_components(graph):
        first = next(iter(cycle))
        if len(cycle) > 1 or graph.has_edge(first, first):
            ties = [n for n in order if owner[n] in cycle and sides[n].on_server]
            sums = [n for n in ties if lowered[n].joins]
            raise CyclicBlock(sums or [n for n in ties if sides[n] is not Side.WEIGHTED])
    rounds: dict[int, int] = {}
    for component in nx.topological_sort(graph):
        rounds[component] = max((rounds[p] + (p in on_server) for p in graph.predecessors(component)), default=0)
    return rounds


def _decrypted_between(producer: Side, reader: Side) -> bool:
    """Whether a value goes through the node between two server operators."""
    return producer in (Side.WEIGHTED, Side.AFTER_WEIGHTS) and reader in (Side.WEIGHTED, Side.BEFORE_WEIGHTS)


def _share_uploads(
    owner: Mapping[ir.Node, int],
    rounds: Mapping[int, int],
    sides: Mapping[ir.Node, Side],
    lowered: Mapping[ir.Node, Lowered],
) -> dict[int, int]:
    """Join blocks of one round that read the same value; return the joint number of every component."""
    graph: nx.Graph[Any] = nx.Graph()
    graph.add_nodes_from(rounds)
    first_reader: dict[tuple[int, int], int] = {}
    for node, side in sides.items():
        if side not in (Side.WEIGHTED, Side.BEFORE_WEIGHTS):
            continue
        for value in lowered[node].sources:
            producer = value.producer()
            if producer is None or owner[producer] != owner[node]:
                key = (rounds[owner[node]], id(value))
                graph.add_edge(owner[node], first_reader.setdefault(key, owner[node]))
    return {c: number for number, joined in enumerate(nx.connected_components(graph)) for c in joined}
