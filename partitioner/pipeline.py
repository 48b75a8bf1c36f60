"""All passes in order, from a file to a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from heinfer.errors import HeinferError
from heinfer.plan import Plan
from heinfer.ring import RingParameters
from partitioner.batching import free_batch
from partitioner.blocks import BuiltBlock, MoveToNode, build_block
from partitioner.classification import classify
from partitioner.emission import Draft, draft, emit
from partitioner.folding import fold
from partitioner.grouping import CyclicBlock, group
from partitioner.importing import Imported, import_model
from partitioner.normalisation import fuse_normalisations
from partitioner.placement import place
from partitioner.rewriting import rewrite_composites
from partitioner.shapes import infer_shapes
from partitioner.simplification import simplify
from partitioner.verification import verify


@dataclass(frozen=True, slots=True)
class Partition:
    """What came out.

    Attributes:
        plan: the plan that was written.
        bundle: where.
        difference: largest difference from the original in the clear, relative to the largest output.
    """

    plan: Plan
    bundle: Path
    difference: float


def partition(
    model: str | Path,
    output: str | Path,
    *,
    reference: bool = True,
    parameters: RingParameters | None = None,
    batch_hints: bool = False,
    dimensions: Mapping[str, int] | None = None,
) -> Partition:
    """Partition an ONNX model into a bundle.

    Args:
        model: ONNX file.
        output: folder to write; an existing bundle is replaced.
        reference: whether to keep the model in the bundle, for `evaluate`.
        parameters: ring; the default has degree 2048 and one 50-bit prime.
        batch_hints: whether to make hints for batches, 12.8 KB for every value that comes back to the node.
        dimensions: sizes of symbolic axes other than the batch, by name: `{"sequence": 64}`.

    Returns:
        The plan, where it was written, and how close it is to the original in the clear.

    Raises:
        UnsupportedModelError: the model can't be partitioned; lists every offending node.
        PlanError: `output` holds something else, or can't be written.
    """
    imported, result, difference = partition_in_memory(Path(model), parameters or RingParameters.default(), dimensions)
    plan = emit(result, imported.content, Path(output), reference, batch_hints)
    return Partition(plan, Path(output), difference)


def partition_in_memory(
    model: Path, parameters: RingParameters, dimensions: Mapping[str, int] | None = None
) -> tuple[Imported, Draft, float]:
    """Run all passes but the last, which writes."""
    imported = import_model(model, dimensions)
    fuse_normalisations(imported.model)
    rewrite_composites(imported.model)
    simplify(imported.model)
    free_batch(imported.model)
    fold(imported.model)
    shapes = infer_shapes(imported.model)
    lowered = classify(imported.model, shapes)
    on_node: set[ir.Node] = set()
    while True:
        sides = place(imported.model, lowered, shapes, on_node)
        try:
            groups = group(imported.model, lowered, sides)
            blocks: list[BuiltBlock] = []
            for found in groups:
                if found.on_server:
                    blocks.append(build_block(len(blocks), found, lowered, sides, shapes, parameters))
        except CyclicBlock as cycle:
            moved = set(cycle.nodes)
        except MoveToNode as conflict:
            moved = {conflict.node}
        else:
            break
        if moved <= on_node:
            raise HeinferError("placement does not settle; please report this model")
        on_node |= moved
    result = draft(imported, groups, blocks, shapes, parameters)
    return imported, result, verify(result, imported.content)
