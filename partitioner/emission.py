"""Write a bundle: plan, one folder for each party, the reference.

requires  groups and built blocks
ensures   a bundle that `heinfer.plan` loads, written as a whole or not at all, with the model's card if it has one
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.cards import CARD_FILE
from heinfer.errors import Offence, UnsupportedModelError
from heinfer.plan import Digests, ModelInfo, NodeStep, OutputTerms, Plan, Reference, RingInfo, RoundStep, TensorSpec
from heinfer.plan.bundle import (
    BLOCK_ARRAYS_FILE,
    BLOCKS_FILE,
    MODEL_FILE,
    PROGRAMS,
    SCALES_FILE,
    WEIGHTS_FILE,
    pack_terms,
)
from heinfer.plan.checks import write_checks
from heinfer.plan.deep_terms import pack_deep_terms
from heinfer.plan.files import PLAN_FILE, atomic_folder, folder_digest, read_plan, write_arrays, write_plan
from heinfer.plan.hints import write_hints
from heinfer.ring import RingParameters
from partitioner.blocks import BuiltBlock
from partitioner.deep.built import BuiltDeep
from partitioner.grouping import Group
from partitioner.importing import BATCH, Imported
from partitioner.shapes import Shape, infer_types

_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class Draft:
    """A partitioned model in memory: the plan without digests, and all that goes into the folders."""

    plan: Plan
    blocks: tuple[BuiltBlock, ...]
    submodels: Mapping[str, bytes]
    card: Mapping[str, Any] | None = None
    deep: tuple[BuiltDeep, ...] = ()

    def reference(self, original: bytes = b"") -> Reference:
        """Return the original model, where it is given, and every block with its real weights."""
        arrays = {name: array for built in self.blocks for name, array in built.real.items()}
        for built in self.deep:
            arrays.update(built.arrays)
        arrays.update(self.deep_terms())
        return Reference(
            original, tuple(built.full for built in self.blocks), arrays, tuple(built.terms for built in self.deep)
        )

    def deep_terms(self) -> dict[str, NDArray[Any]]:
        """Return the node's arrays of deep blocks."""
        arrays: dict[str, NDArray[Any]] = {}
        for index, built in enumerate(self.deep):
            arrays.update(pack_deep_terms(index, built.terms))
        return arrays


def draft(
    imported: Imported,
    groups: Sequence[Group],
    blocks: Sequence[BuiltBlock],
    shapes: Mapping[str, Shape],
    parameters: RingParameters,
    reasons: Mapping[ir.Node, str],
) -> Draft:
    """Put the steps in order and cut out the node's sub-models.

    Raises:
        UnsupportedModelError: a result of the model has no batch axis in front.
    """
    types = infer_types(imported.model)
    submodels: dict[str, bytes] = {}
    steps: list[NodeStep | RoundStep] = []
    rounds: dict[int, list[int]] = {}
    block_index = 0
    for group in groups:
        if group.on_server:
            if group.round not in rounds:
                rounds[group.round] = []
                steps.append(RoundStep(()))
            rounds[group.round].append(block_index)
            steps[-1] = RoundStep(tuple(rounds[group.round]))
            block_index += 1
        else:
            name = f"node_{group.round}.onnx"
            step, submodels[name] = _cut_submodel(name, group, imported.model, types, shapes, reasons)
            steps.append(step)
    plan = Plan(
        model=ModelInfo(imported.name, imported.sha256),
        ring=RingInfo(parameters.degree, parameters.modulus),
        inputs=tuple(_spec(v, types, shapes) for v in imported.model.graph.inputs),
        outputs=tuple(_spec(v, types, shapes) for v in imported.model.graph.outputs),
        steps=tuple(steps),
        blocks=tuple(built.block for built in blocks),
        digests=Digests(_NO_DIGEST, _NO_DIGEST),
    )
    return Draft(plan, tuple(blocks), submodels, imported.card)


def emit(result: Draft, original: NDArray[np.uint8], target: Path, reference: bool, batch_hints: bool = False) -> Plan:
    """Write the bundle; return the plan with its digests.

    Args:
        result: the partitioned model.
        original: the original model, serialised.
        target: folder to write.
        reference: whether to write reference/.
        batch_hints: whether to make hints for batches.

    Raises:
        PlanError: `target` holds something else, or can't be written.
    """
    with atomic_folder(target) as work:
        server, node = work / "server", work / "node"
        server.mkdir()
        node.mkdir()
        integers = {n: a for built in result.blocks for n, a in built.integers.items()}
        for deep in result.deep:
            integers.update(deep.arrays)
        write_arrays(server / WEIGHTS_FILE, integers)
        terms = {**_term_arrays([built.terms for built in result.blocks]), **result.deep_terms()}
        write_arrays(node / SCALES_FILE, terms)
        for name, model in result.submodels.items():
            (node / name).write_bytes(model)
        _write_card(node / CARD_FILE, result.card)
        plan = Plan(
            **{
                name: getattr(result.plan, name)
                for name in ("model", "ring", "inputs", "outputs", "steps", "blocks", "deep")
            },
            digests=Digests(folder_digest(server), folder_digest(node)),
        )
        for folder in (work, server, node):
            write_plan(folder / PLAN_FILE, plan)
        _, plan_hash = read_plan(node)
        write_hints(node, plan, plan_hash, integers, batch_hints)
        write_checks(node, plan, plan_hash, integers)
        _write_card(work / CARD_FILE, result.card)
        if reference:
            _write_reference(work / "reference", result.reference(), original)
    return plan


def _write_card(path: Path, card: Mapping[str, Any] | None) -> None:
    if card is not None:
        path.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def _write_reference(folder: Path, reference: Reference, original: NDArray[np.uint8]) -> None:
    folder.mkdir()
    (folder / MODEL_FILE).write_bytes(original.data)
    (folder / BLOCKS_FILE).write_bytes(PROGRAMS.dump_json(reference.programs))
    write_arrays(folder / BLOCK_ARRAYS_FILE, reference.arrays)


def _term_arrays(terms: Sequence[Sequence[OutputTerms]]) -> dict[str, NDArray[np.float64]]:
    arrays: dict[str, NDArray[np.float64]] = {}
    for index, outputs in enumerate(terms):
        for position, output in enumerate(outputs):
            arrays.update(pack_terms(index, position, output))
    return arrays


def _cut_submodel(
    name: str,
    group: Group,
    model: ir.Model,
    types: Mapping[str, int],
    shapes: Mapping[str, Shape],
    reasons: Mapping[ir.Node, str],
) -> tuple[NodeStep, bytes]:
    """Return the step and the ONNX model of the node's operators of one round."""
    inside = set(group.nodes)
    made = dict.fromkeys(v for n in group.nodes for v in n.outputs)
    read = {v: None for n in group.nodes for v in n.inputs if v is not None and v not in made}
    inputs = [str(v.name) for v in read if v.const_value is None]
    outputs = [str(v.name) for v in made if v.is_graph_output() or any(u.node not in inside for u in v.uses())]
    graph = onnx.helper.make_graph(
        [ir.serde.serialize_node(n) for n in group.nodes],
        name,
        [_value_info(n, types, shapes) for n in inputs],
        [_value_info(n, types, shapes) for n in outputs],
        [_initialiser(v) for v in read if v.const_value is not None],
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    cut = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    operators = tuple(f"{n.name} ({n.op_type})" for n in group.nodes)
    why = tuple(reasons[n] for n in group.nodes)
    return NodeStep(name, tuple(inputs), tuple(outputs), operators, why), cut.SerializeToString()


def _value_info(name: str, types: Mapping[str, int], shapes: Mapping[str, Shape]) -> onnx.ValueInfoProto:
    shape = shapes.get(name)
    return onnx.helper.make_tensor_value_info(
        name, types.get(name, onnx.TensorProto.FLOAT), None if shape is None else [BATCH, *shape]
    )


def _initialiser(value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None  # the caller has looked
    proto = ir.serde.serialize_tensor(value.const_value)
    proto.name = str(value.name)
    return proto


def _spec(value: ir.Value, types: Mapping[str, int], shapes: Mapping[str, Shape]) -> TensorSpec:
    name = str(value.name)
    if value.const_value is not None:
        raise UnsupportedModelError(
            "the model's results must depend on its inputs:", [Offence(name, "output", "it is a constant")]
        )
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(types[name])).name
    shape = shapes.get(name)
    if shape is None and value.shape is not None and all(isinstance(d, int) for d in list(value.shape)[1:]):
        shape = tuple(int(d) for d in list(value.shape)[1:])  # type: ignore[arg-type]
    if shape is None:
        raise UnsupportedModelError(
            "the model's inputs and outputs must have samples first and fixed sizes:",
            [Offence(name, "input or output", "its shape stays dynamic, or the batch does not lead it")],
        )
    return TensorSpec(name, shape, dtype)
