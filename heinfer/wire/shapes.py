"""What a plan says about the sizes of its blocks on the wire, for both ends: its deep blocks come last."""

from __future__ import annotations

from heinfer.plan import Plan
from heinfer.wire.transfers import BlockShape


def block_shapes(plan: Plan) -> list[BlockShape]:
    """Return what the wire must know of a plan's blocks."""
    shapes = []
    for block in plan.blocks:
        prepared = block.prepared
        up, down = (prepared.values_up, prepared.values_down) if prepared is not None else (0, 0)
        shapes.append(BlockShape(block.input_rows, block.output_rows, plan.ring.degree, up, down))
    for deep in plan.deep:
        shapes.append(BlockShape(deep.rows_up, deep.rows_down, deep.chain.degree, deep=True))
    return shapes
