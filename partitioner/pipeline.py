"""All passes in order, from a file to a bundle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import onnx_ir as ir

from heinfer.errors import HeinferError, Offence, ParameterError, UnsupportedModelError
from heinfer.plan import Plan
from heinfer.ring import RingParameters
from partitioner.averages import average_first
from partitioner.batching import free_batch
from partitioner.blocks import BuiltBlock, MoveToNode, build_block
from partitioner.classification import classify
from partitioner.composition import compose_convolutions
from partitioner.deep.built import FittedActivation
from partitioner.deep.deepening import DeepOptions, deepen
from partitioner.emission import Draft, draft, emit
from partitioner.explanation import MOVED, explain
from partitioner.folding import fold
from partitioner.grouping import CyclicBlock, Group, group
from partitioner.homogeneous import move_gains
from partitioner.importing import Imported, import_model
from partitioner.lowering import Lowered
from partitioner.normalisation import fuse_normalisations
from partitioner.pinning import PinnedNodes, Pins, find_pinned, named, without_pinned
from partitioner.placement import place
from partitioner.precision import check_precision
from partitioner.rewriting import rewrite_composites
from partitioner.shapes import Shape, infer_shapes
from partitioner.simplification import restore_results, simplify
from partitioner.strides import stride_early
from partitioner.verification import verify


@dataclass(frozen=True, slots=True)
class Partition:
    """What came out.

    Attributes:
        plan: the plan that was written.
        bundle: where.
        difference: largest difference from the original in the clear, relative to the largest output; with exact
            activations.
        activations: those that became polynomials.
    """

    plan: Plan
    bundle: Path
    difference: float
    activations: tuple[FittedActivation, ...] = ()


def partition(
    model: str | Path,
    output: str | Path,
    *,
    reference: bool = True,
    parameters: RingParameters | None = None,
    batch_hints: bool = False,
    dimensions: Mapping[str, int] | None = None,
    on_node: Sequence[str] = (),
    on_server: Sequence[str] = (),
    precision: float | None = None,
    deep: DeepOptions | None = None,
) -> Partition:
    """Partition an ONNX model into a bundle.

    Args:
        model: ONNX file.
        output: folder to write; an existing bundle is replaced.
        reference: whether to keep the model in the bundle, for `evaluate`.
        parameters: ring; the default has degree 2048 and one 50-bit prime.
        batch_hints: whether to make hints for batches, 12.8 KB for every value that comes back to the node.
        dimensions: sizes of symbolic axes other than the batch, by name: `{"sequence": 64}`.
        on_node: operators to run on the node, by name or type, with patterns as in a shell: `["head.*", "Gemm"]`. The
            weights of those that have some are then given to the node.
        on_server: operators without weights to run under encryption, likewise.
        precision: what every block's error bound for inputs of magnitude 1 must be at most (docs/parameters.md); None:
            what weights of 15 bits give.
        deep: which activations become polynomials inside larger blocks (docs/block-depth.md); None: all stay exact.

    Returns:
        The plan, where it was written, and how close it is to the original in the clear.

    Raises:
        UnsupportedModelError: the model can't be partitioned, or not with that precision; lists every offending node or
            block.
        ParameterError: `precision` is not a finite number above 0.
        InputError: a pattern names no operator.
        PlanError: `output` holds something else, or can't be written.
    """
    if precision is not None and not 0 < precision < inf:
        raise ParameterError(f"precision: expected a finite error bound above 0, such as 1e-5, found {precision}")
    parameters = parameters or RingParameters.default()
    pins = Pins(tuple(on_node), tuple(on_server))
    imported, result, difference = partition_in_memory(
        Path(model), parameters, dimensions, pins, precision, Path(output).absolute().parent
    )
    if deep is not None:
        result = deepen(result, deep)
    plan = emit(result, imported.original, Path(output), reference, batch_hints)
    return Partition(plan, Path(output), difference, tuple(a for built in result.deep for a in built.activations))


def partition_in_memory(
    model: Path,
    parameters: RingParameters,
    dimensions: Mapping[str, int] | None = None,
    pins: Pins | None = None,
    precision: float | None = None,
    scratch: Path | None = None,
) -> tuple[Imported, Draft, float]:
    """Run all passes but the last, which writes; `scratch` is the folder that holds weights meanwhile."""
    placed = prepare(model, parameters, dimensions, pins, precision, scratch)
    check_precision([built.block for built in placed.blocks], precision)
    result = draft(placed.imported, placed.groups, placed.blocks, placed.shapes, parameters, placed.reasons)
    return placed.imported, result, verify(result, placed.imported.original)


@dataclass(frozen=True, slots=True)
class Placed:
    """A model whose operators have their places.

    Attributes:
        imported: the model.
        shapes: shapes per sample.
        groups: blocks and steps of the node, in the order in which they run.
        blocks: one for each group on the server.
        reasons: why each operator is where it is.
    """

    imported: Imported
    shapes: Mapping[str, Shape]
    groups: Sequence[Group]
    blocks: Sequence[BuiltBlock]
    reasons: Mapping[ir.Node, str]


def prepare(
    model: Path,
    parameters: RingParameters,
    dimensions: Mapping[str, int] | None = None,
    pins: Pins | None = None,
    precision: float | None = None,
    scratch: Path | None = None,
) -> Placed:
    """Import a model, place its operators and build its blocks."""
    pins = pins or Pins()
    imported = import_model(model, dimensions, scratch)
    fuse_normalisations(imported.model)
    rewrite_composites(imported.model)
    simplify(imported.model)
    free_batch(imported.model)
    fold(imported.model)
    save_values(imported.model, named(imported.model, pins))
    restore_results(imported.model, imported.results)
    shapes = infer_shapes(imported.model)
    lowered = classify(imported.model, shapes)
    pinned = find_pinned(imported.model, lowered, pins)
    groups, blocks, reasons = _settle(imported.model, lowered, pinned, shapes, parameters, precision)
    return Placed(imported, shapes, groups, blocks, reasons)


def save_values(model: ir.Model, pinned: Collection[ir.Node]) -> None:
    """Move linear operators through others, where the same results take fewer values or rounds; not pinned ones."""
    move_gains(model, pinned)
    compose_convolutions(model, pinned)
    average_first(model, pinned)
    stride_early(model, pinned)


def _settle(
    model: ir.Model,
    lowered: Mapping[ir.Node, Lowered],
    pinned: PinnedNodes,
    shapes: Mapping[str, Shape],
    parameters: RingParameters,
    precision: float | None,
) -> tuple[list[Group], list[BuiltBlock], dict[ir.Node, str]]:
    """Place operators and build blocks, moving to the node what can't be in a block, until all fits."""
    allowed = without_pinned(lowered, pinned)
    on_node: set[ir.Node] = set()
    while True:
        sides = place(model, allowed, shapes, on_node, pinned.on_server)
        reasons = explain(lowered, sides, shapes, pinned, on_node)
        try:
            groups = group(model, allowed, sides)
            blocks: list[BuiltBlock] = []
            for found in groups:
                if found.on_server:
                    built = build_block(len(blocks), found, allowed, sides, shapes, parameters, reasons, precision)
                    blocks.append(built)
        except CyclicBlock as cycle:
            moved = set(cycle.nodes)
        except MoveToNode as conflict:
            moved = {conflict.node}
        else:
            return groups, blocks, reasons
        offences = [Offence(str(n.name), n.op_type, MOVED) for n in moved & pinned.on_server]
        if offences:
            raise UnsupportedModelError("operators can't be pinned to the server:", offences)
        if moved <= on_node:
            raise HeinferError("placement does not settle; please report this model")
        on_node |= moved
