"""Nodes and constants that take the place of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

#: Constants up to this many elements are kept once per replaced node.
_SHARED_SIZE = 16


class Emitter:
    """Collects what replaces a node, then puts it in the node's place.

    Args:
        node: the node to replace; the names of all that is emitted start with its name.
    """

    def __init__(self, node: ir.Node) -> None:
        self._node = node
        self._tape = ir.tape.Tape()
        self._shared: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def emit(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Append a node of the standard domain; return its only output."""
        name = f"{self._node.name}.{len(self._tape.nodes)}"
        return self._tape.op(operator, inputs, attributes, name=name)

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """Return an initialiser that holds the array."""
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size <= _SHARED_SIZE else None
        if key is not None and key in self._shared:
            return self._shared[key]
        name = f"{self._node.name}.constant_{len(self._tape.initializers)}"
        value = self._tape.initializer(ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=name))
        if key is not None:
            self._shared[key] = value
        return value

    def number(self, value: float) -> ir.Value:
        """Return a float32 constant without axes."""
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> ir.Value:
        """Return an int64 constant with one axis."""
        return self.constant(np.array(values, np.int64))

    def slice(self, value: ir.Value | None, *ranges: tuple[int, int, int]) -> ir.Value:
        """Cut a value; every range is (axis, start, end)."""
        axes, starts, ends = zip(*ranges, strict=True)
        return self.emit("Slice", value, self.integers(*starts), self.integers(*ends), self.integers(*axes))

    def join(self, values: Sequence[ir.Value | None], axis: int) -> ir.Value | None:
        """Concatenate values along an axis; a single one is returned as it is."""
        return values[0] if len(values) == 1 else self.emit("Concat", *values, axis=axis)

    def replace(self, *results: ir.Value | None) -> None:
        """Put all that was emitted in the node's place.

        Args:
            results: what takes the place of each of the node's outputs; None for one that nothing reads.
        """
        graph = self._node.graph
        assert isinstance(graph, ir.Graph)  # the nodes of a model's graph
        for value in self._tape.initializers:
            graph.register_initializer(value)
        pairs = [(old, new) for old, new in zip(self._node.outputs, results, strict=False) if new is not None]
        olds, news = [old for old, _ in pairs], [new for _, new in pairs]
        ir.convenience.replace_nodes_and_values(graph, self._node, [self._node], self._tape.nodes, olds, news)


def is_read(value: ir.Value) -> bool:
    """Whether a node or the caller of the model reads a value."""
    return bool(value.uses()) or value.is_graph_output()
