"""What becomes of a block's decrypted answer, in either mode: outputs of their shapes, rounded, with error bounds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from heinfer.plan import NodeBundle
from trusted_node.rounding import round_to_step, rounding_step
from trusted_node.scaling import SampleScales
from trusted_node.statistics import QueryStatistics

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Outputs of a block, float32 of shape (samples, *shape), and error bounds for the leading samples asked for."""

    outputs: list[NDArray[np.float32]]
    bounds: list[Floats]


def finish_outputs(
    bundle: NodeBundle,
    index: int,
    scales: SampleScales,
    values: NDArray[np.float32],
    bounded: int,
    statistics: QueryStatistics,
) -> BlockResult:
    """Cut decrypted values into outputs; round those of a last block.

    Args:
        bundle: the node's folder.
        index: the block.
        scales: of the upload.
        values: biases added, shape (samples, values of all outputs), C-contiguous.
        bounded: leading samples whose error bounds are wanted.
        statistics: takes the bounds of last blocks.
    """
    block = bundle.plan.blocks[index]
    outputs, bounds = [], []
    first = 0
    for spec, terms in zip(block.outputs, bundle.terms[index], strict=True):
        count = prod(spec.shape)
        part = np.ascontiguousarray(values[:, first : first + count]).reshape(len(values), *spec.shape)
        first += count
        leading = len(values) if block.final else bounded
        if not leading:
            outputs.append(part)
            bounds.append(np.zeros((0, *spec.shape)))
            continue
        bound = scales.error_bound(terms.norms, part[:leading])
        if block.final:
            step = rounding_step(bound)
            part = round_to_step(part, step)
            bound = bound + step.reshape(-1, *([1] * len(spec.shape))) / 2
            statistics.raise_bounds(float(bound.max(initial=0.0)), float(step.max(initial=0.0)))
        outputs.append(part)
        bounds.append(bound[:bounded])
    return BlockResult(outputs, bounds)


def row_terms(bundle: NodeBundle, block: int) -> tuple[Floats, Floats]:
    """Return output scale and bias of every value of a block's outputs, joined."""
    specs, terms = bundle.plan.blocks[block].outputs, bundle.terms[block]
    scale = [np.broadcast_to(t.norms.scale, s.shape).ravel() for t, s in zip(terms, specs, strict=True)]
    bias = [np.broadcast_to(t.bias, s.shape).ravel() for t, s in zip(terms, specs, strict=True)]
    return np.concatenate(scale), np.concatenate(bias)
