"""From steps of a plan to the layers of a deep block, in real numbers.

    [round, node step, round, ...] --> inputs (atoms) --> layer: affine map, function --> atom --> ... --> results

requires  a draft, and positions of steps of which every node step can be taken apart (`partitioner.deep.functions`)
ensures   layers in order, each affine in atoms made before; results affine in atoms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from heinfer.errors import Offence, UnsupportedModelError
from heinfer.operators import evaluate_plain
from heinfer.plan import NodeStep, RoundStep
from partitioner.blocks import BuiltBlock
from partitioner.deep.affine import Affine, LinearMap, find_linear
from partitioner.deep.functions import POOLING, Anatomy, Function, LinearNode, dissect
from partitioner.emission import Draft

Floats = NDArray[np.float64]
#: Sums for every value that is summed up, at most, where equal weights are what says so.
_MOST_SUMS = 0.5


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """A layer in real numbers: y = affine(atoms), and f(y) where there is a function.

    Attributes:
        kind: "weighted", or "sum".
        affine: of atoms; for a sum, of the one that it adds up, with weights 0 and 1.
        function: of every element, None where nothing follows.
        depth: activations on the longest way to it.
        label: for people.
    """

    kind: Literal["weighted", "sum"]
    affine: Affine
    function: Function | None
    depth: int
    label: str


@dataclass(slots=True)
class DraftBlock:
    """A deep block in the making.

    Attributes:
        inputs: names of the tensors that it reads, with shapes.
        layers: layer i makes atom len(inputs) + i.
        results: names of the tensors that it makes for others, and the numbers of their atoms.
        operators: what it holds, for people.
    """

    inputs: dict[str, tuple[int, ...]]
    layers: list[DraftLayer] = field(default_factory=list)
    results: dict[str, int] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Activations on the longest way through."""
        return max((layer.depth + (layer.function is not None) for layer in self.layers), default=0)

    def shape(self, atom: int) -> tuple[int, ...]:
        """Return an atom's shape."""
        if atom < len(self.inputs):
            return list(self.inputs.values())[atom]
        return self.layers[atom - len(self.inputs)].affine.shape

    def depth_of(self, atom: int) -> int:
        """Return how many activations lead to an atom."""
        if atom < len(self.inputs):
            return 0
        layer = self.layers[atom - len(self.inputs)]
        return layer.depth + (layer.function is not None)


def draft_block(result: Draft, positions: Sequence[int], known: dict[str, LinearMap] | None = None) -> DraftBlock:
    """Make one block of several steps.

    Args:
        result: the partitioned model.
        positions: of the steps, which follow each other.
        known: linear maps of the same model by tensor; what is found is added, so that a longer block is found sooner.
    """
    return _Drafting(result, positions, {} if known is None else known).run()


def inputs_of(result: Draft, positions: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that steps read from outside, with shapes.

    Raises:
        UnsupportedModelError: one is not float32, or its shape is not known: it can't be encrypted.
    """
    plan = result.plan
    shapes = {t.name: t.shape for t in plan.inputs}
    shapes.update({t.name: t.shape for block in plan.blocks for t in (*block.inputs, *block.outputs)})
    made: set[str] = set()
    read: dict[str, tuple[int, ...]] = {}
    for position in positions:
        step = plan.steps[position]
        if isinstance(step, RoundStep):
            for index in step.blocks:
                read.update({t.name: t.shape for t in plan.blocks[index].inputs if t.name not in made})
                made.update(t.name for t in plan.blocks[index].outputs)
        elif isinstance(step, NodeStep):
            outside = [name for name in step.inputs if name not in made]
            missing = [name for name in outside if name not in shapes]
            shapes.update(_declared(result.submodels[step.model], missing))
            read.update({name: shapes[name] for name in outside})
            made.update(step.outputs)
    return read


def _declared(submodel: bytes, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a step's sub-model declares of its inputs, batch aside."""
    if not names:
        return {}
    found = {}
    for value in onnx.load_model_from_string(submodel).graph.input:
        tensor = value.type.tensor_type
        shape = tuple(d.dim_value for d in tensor.shape.dim[1:])
        if tensor.elem_type == onnx.TensorProto.FLOAT and tensor.shape.dim and all(shape):
            found[value.name] = shape
    reason = "is not float32, or its shape is not known"
    unknown = [Offence(name, "tensor", reason) for name in names if name not in found]
    if unknown:
        raise UnsupportedModelError("not everything that a block reads can be encrypted:", unknown)
    return {name: found[name] for name in names}


def outputs_of(result: Draft, positions: Sequence[int]) -> list[str]:
    """Return the tensors that steps make and others read, or the model returns."""
    plan, inside = result.plan, set(positions)
    wanted = {t.name for t in plan.outputs}
    for position, step in enumerate(plan.steps):
        if position in inside:
            continue
        if isinstance(step, NodeStep):
            wanted.update(step.inputs)
        elif isinstance(step, RoundStep):
            wanted.update(t.name for b in step.blocks for t in plan.blocks[b].inputs)
    made: list[str] = []
    for position in positions:
        step = plan.steps[position]
        if isinstance(step, NodeStep):
            made += step.outputs
        elif isinstance(step, RoundStep):
            made += [t.name for b in step.blocks for t in plan.blocks[b].outputs]
    return [name for name in made if name in wanted]


class _Drafting:
    def __init__(self, result: Draft, positions: Sequence[int], known: dict[str, LinearMap]) -> None:
        self._known = known
        self._result = result
        self._positions = positions
        self._block = DraftBlock(inputs_of(result, positions))
        self._tensors: dict[str, Affine] = {}
        self._blocks: dict[str, tuple[BuiltBlock, int]] = {}
        self._parts: dict[str, tuple[Anatomy, Function | LinearNode]] = {}

    def run(self) -> DraftBlock:
        block = self._block
        for number, (name, shape) in enumerate(block.inputs.items()):
            self._tensors[name] = Affine.of_atom(number, shape)
        for position in self._positions:
            step = self._result.plan.steps[position]
            if isinstance(step, RoundStep):
                for index in step.blocks:
                    built = self._result.blocks[index]
                    block.operators += built.block.operators
                    self._blocks.update({t.name: (built, i) for i, t in enumerate(built.block.outputs)})
            elif isinstance(step, NodeStep):
                block.operators += step.operators
                anatomy = dissect(self._result.submodels[step.model])
                for name, part in anatomy.parts.items():
                    if isinstance(part, Function | LinearNode):
                        self._parts[name] = (anatomy, part)
        for name in outputs_of(self._result, self._positions):
            block.results[name] = self._result_atom(name)
        return block

    def _result_atom(self, name: str) -> int:
        affine = self._need(name)
        return self._add("weighted", affine, None, name)

    def _add(self, kind: Literal["weighted", "sum"], affine: Affine, function: Function | None, label: str) -> int:
        if kind == "weighted":
            affine = self._pooled(affine, label)
        depth = max((self._block.depth_of(atom) for atom in affine.matrices), default=0)
        self._block.layers.append(DraftLayer(kind, affine, function, depth, label))
        return len(self._block.inputs) + len(self._block.layers) - 1

    def _pooled(self, affine: Affine, label: str) -> Affine:
        """Add up values of an activation that have the same weight everywhere, as where pooling comes before a layer.

        Sums come nearly for nothing, and what is summed up before it is relinearised costs a part of what it would.
        """
        made = dict(affine.matrices)
        for atom, matrix in affine.matrices.items():
            if atom < len(self._block.inputs) or self._block.layers[atom - len(self._block.inputs)].function is None:
                continue
            columns: dict[bytes, list[int]] = {}
            for column, weights in enumerate(np.ascontiguousarray(matrix.T)):
                columns.setdefault(weights.tobytes(), []).append(column)
            columns.pop(np.zeros(len(matrix)).tobytes(), None)
            if not columns or len(columns) > _MOST_SUMS * sum(map(len, columns.values())):
                continue
            summed = np.zeros((len(columns), matrix.shape[1]))
            for row, members in enumerate(columns.values()):
                summed[row, members] = 1
            del made[atom]
            number = self._add("sum", Affine((len(columns),), {atom: summed}, np.zeros(len(columns))), None, label)
            made[number] = matrix[:, [members[0] for members in columns.values()]]
        return Affine(affine.shape, made, affine.constant)

    def _linear(
        self, name: str, run: Callable[[dict[str, NDArray[Any]]], NDArray[Any]], operands: Mapping[str, Affine]
    ) -> Affine:
        if name not in self._known:
            self._known[name] = find_linear(name, run, {key: x.shape for key, x in operands.items()})
        return self._known[name].apply(operands)

    def _need(self, name: str) -> Affine:
        """Return a tensor, making layers for what leads to it."""
        if name not in self._tensors:
            if name in self._blocks:
                self._tensors[name] = self._of_block(name)
            else:
                anatomy, part = self._parts[name]
                self._tensors[name] = (
                    self._of_function(name, part)
                    if isinstance(part, Function)
                    else self._of_linear(name, anatomy, part)
                )
        return self._tensors[name]

    def _of_block(self, name: str) -> Affine:
        built, output = self._blocks[name]
        names = [t.name for t in built.block.inputs]
        operands = {n: self._need(n) for n in dict.fromkeys(names)}

        def run(arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
            return evaluate_plain(built.full, built.real, [arrays[n] for n in names])[output]

        return self._linear(name, run, operands)

    def _of_function(self, name: str, function: Function) -> Affine:
        base = self._need(function.source)
        line = function.polynomial(base.shape)
        if line is not None and line.shape[1] <= 2:
            return base.scaled(line[:, 1] if line.shape[1] == 2 else np.zeros(len(line)), line[:, 0])
        atom = self._add("weighted", base, function, name)
        return Affine.of_atom(atom, base.shape)

    def _of_linear(self, name: str, anatomy: Anatomy, part: LinearNode) -> Affine:
        operands = {n: self._need(n) for n in part.sources}
        made = self._linear(name, lambda arrays: anatomy.run_linear(part, arrays), operands)
        source = next(iter(operands.values())).atom
        if part.node.op_type in POOLING and source is not None and source >= len(self._block.inputs):
            matrix = made.matrices[source]
            weight = float(matrix.max())
            if weight > 0 and not made.constant.any() and _is_pooling(matrix, weight):
                summed = Affine(made.shape, {source: (matrix > 0).astype(np.float64)}, made.constant)
                atom = self._add("sum", summed, None, name)
                size = prod(made.shape)
                return Affine.of_atom(atom, made.shape).scaled(np.full(size, weight), np.zeros(size))
        return made


def _is_pooling(matrix: Floats, weight: float) -> bool:
    """Whether every entry is 0 or the weight, every value is in one sum at most, and no sum is empty."""
    members = matrix != 0
    equal = np.allclose(matrix[members], weight, rtol=1e-6)
    return bool(equal and members.sum(axis=0).max() <= 1 and members.any(axis=1).all())


def evaluate_draft(block: DraftBlock, inputs: Mapping[str, Floats]) -> list[Floats]:
    """Evaluate a block with its real functions.

    Args:
        block: the block.
        inputs: by name, shape (samples, *shape).

    Returns:
        For every layer y before its function, shape (samples, elements).
    """
    atoms = [inputs[name].reshape(len(inputs[name]), -1).astype(np.float64) for name in block.inputs]
    found = []
    for layer in block.layers:
        y = layer.affine.constant + sum(
            (atoms[atom] @ matrix.T for atom, matrix in layer.affine.matrices.items()), start=0.0
        )
        found.append(y)
        atoms.append(y if layer.function is None else layer.function.evaluate(y, layer.affine.shape))
    return found
