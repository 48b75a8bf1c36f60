"""Operators that the user has pinned to one side, by name or type.

    requires  a `Lowered` for every node
    ensures   what is pinned to the node has no other place; what is pinned to the server is known to run there

A pattern is one of a shell, such as "encoder.*" or "Conv", and is compared with the operator's name and its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import onnx_ir as ir

from heinfer.errors import InputError, Offence, UnsupportedModelError
from partitioner.lowering import ON_NODE, Lowered, Placement


@dataclass(frozen=True, slots=True)
class Pins:
    """Patterns for each side."""

    on_node: Sequence[str] = ()
    on_server: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PinnedNodes:
    """The nodes that patterns name."""

    on_node: frozenset[ir.Node] = field(default_factory=frozenset)
    on_server: frozenset[ir.Node] = field(default_factory=frozenset)


def named(model: ir.Model, pins: Pins) -> frozenset[ir.Node]:
    """Return the operators that any pattern names, for passes that must leave them as they are."""
    patterns = (*pins.on_node, *pins.on_server)
    return frozenset(node for node in model.graph if any(_matches(node, pattern) for pattern in patterns))


def find_pinned(model: ir.Model, lowered: Mapping[ir.Node, Lowered], pins: Pins) -> PinnedNodes:
    """Return the nodes that are pinned.

    Raises:
        InputError: a pattern names no operator, or an operator is pinned to both sides.
        UnsupportedModelError: an operator that is pinned to the server does not run under encryption; lists them all.
    """
    on_node, on_server = (frozenset(_matching(model, patterns)) for patterns in (pins.on_node, pins.on_server))
    both = sorted(str(node.name) for node in on_node & on_server)
    if both:
        raise InputError(f"pinned to both sides: {', '.join(both)}")
    offences = [
        Offence(str(node.name), node.op_type, "it does not run under encryption, here at least")
        for node in model.graph
        if node in on_server and lowered[node].placement is Placement.NODE
    ]
    if offences:
        raise UnsupportedModelError(f"{len(offences)} operators can't be pinned to the server:", offences)
    return PinnedNodes(on_node, on_server)


def without_pinned(lowered: Mapping[ir.Node, Lowered], pinned: PinnedNodes) -> dict[ir.Node, Lowered]:
    """Return what every node may do, those that are pinned to the node included.

    Raises:
        UnsupportedModelError: nothing with learned weights is left for the server.
    """
    found = {node: ON_NODE if node in pinned.on_node else each for node, each in lowered.items()}
    if not any(each.placement.pinned_to_server for each in found.values()):
        raise UnsupportedModelError(
            "all operators with learned weights are pinned to the node: nothing is left to encrypt"
        )
    return found


def _matching(model: ir.Model, patterns: Sequence[str]) -> list[ir.Node]:
    found: list[ir.Node] = []
    for pattern in patterns:
        matches = [n for n in model.graph if _matches(n, pattern)]
        if not matches:
            names = [name for n in model.graph for name in (str(n.name), n.op_type)]
            near = get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"no operator's name or type is {pattern!r}{hint}")
        found += matches
    return found


def _matches(node: ir.Node, pattern: str) -> bool:
    return fnmatchcase(str(node.name), pattern) or fnmatchcase(node.op_type, pattern)
