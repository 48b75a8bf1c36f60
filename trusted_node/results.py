"""What becomes of a block's decrypted answer, in either mode: outputs of their shapes, rounded, with error bounds.

    decrypted values, float32 --(add the digits of every output)--> outputs --(round those of a last block)--> outputs

    values of a deep block, float64 --(times range, gain, offset)--> outputs, bounds where all is within the ranges

An output of two digits of 15 bits comes as 1.5 (what the weights' first digits give, bias included) and 2.1e-5 (what
the second ones add). Each was cast to float32, and their sum is cast once more; the bounds of the digits add up.

Outputs of a deep block are not rounded to a grid. Their bounds come with the plan (`heinfer.plan.deep_noise`); a sample
of which an input or an output lies outside of the calibrated ranges has none, which is NaN. The others' are conditional
where the plan says so, and where a sample of the same upload has inputs outside: what that one makes inside the block
is bounded by nothing, and past what the primes hold it spoils the slots of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from heinfer.plan import NodeBundle
from heinfer.plan.deep_terms import Counts
from heinfer.ring import FLOAT32_ROUNDING
from trusted_node.rounding import round_to_step, rounding_step
from trusted_node.scaling import SampleScales
from trusted_node.statistics import QueryStatistics

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Outputs of a block, float32 of shape (samples, *shape), and error bounds for the leading samples asked for.

    A deep block has bounds of NaN for samples outside of the calibrated ranges.
    """

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
    """Cut decrypted values into outputs and add their digits; round those of a last block.

    Args:
        bundle: the node's folder.
        index: the block.
        scales: of the upload.
        values: biases added, shape (samples, values of all outputs of the block's program), C-contiguous.
        bounded: leading samples whose error bounds are wanted.
        statistics: takes the bounds of last blocks.
    """
    block = bundle.plan.blocks[index]
    outputs, bounds = [], []
    terms = iter(bundle.terms[index])
    first = 0
    for spec in block.outputs:
        digits = []
        for _ in range(block.digits):
            end = first + prod(spec.shape)
            digits.append(np.ascontiguousarray(values[:, first:end]).reshape(len(values), *spec.shape))
            first = end
        part, norms = _add_digits(digits), [next(terms).norms for _ in digits]
        leading = len(values) if block.final else bounded
        if not leading:
            outputs.append(part)
            bounds.append(np.zeros((0, *spec.shape)))
            continue
        bound = np.sum([scales.error_bound(n, d[:leading]) for n, d in zip(norms, digits, strict=True)], axis=0)
        if len(digits) > 1:
            bound += FLOAT32_ROUNDING * np.abs(part[:leading])
        if block.final:
            step = rounding_step(bound)
            part = round_to_step(part, step)
            bound = bound + step.reshape(-1, *([1] * len(spec.shape))) / 2
            statistics.raise_bounds(float(bound.max(initial=0.0)), float(step.max(initial=0.0)))
        outputs.append(part)
        bounds.append(bound[:bounded])
    return BlockResult(outputs, bounds)


def finish_deep(
    bundle: NodeBundle,
    index: int,
    inputs_outside: Counts,
    values: Sequence[Floats],
    bounded: int,
    statistics: QueryStatistics,
) -> BlockResult:
    """Make outputs of a deep block's values, count what lies outside of the calibrated ranges, and state bounds.

    Args:
        bundle: the node's folder.
        index: the deep block.
        inputs_outside: of every sample of an upload, how many inputs lie outside of the ranges.
        values: one array an output, as the server has it, shape (samples, *shape).
        bounded: leading samples whose error bounds are wanted.
        statistics: takes the bounds of last blocks, and counts.
    """
    terms, last = bundle.deep[index], index in bundle.plan.last_deep
    outside = np.sum([o.outside(v * o.range) for o, v in zip(terms.outputs, values, strict=True)], axis=0)
    statistics.add_outside(int(inputs_outside.sum()), int(outside.sum()))
    within = inputs_outside + outside == 0
    outputs, bounds, largest = [], [], 0.0
    for output, v in zip(terms.outputs, values, strict=True):
        part = output.finish(v).astype(np.float32)
        leading = len(part) if last else bounded
        bound = output.error_bound(part[:leading])
        largest = max(largest, float(bound[within[:leading]].max(initial=0.0)))
        bound[~within[:leading]] = np.nan
        outputs.append(part)
        bounds.append(bound[:bounded])
    if last:
        conditional = bool(within.any()) and (not terms.always or bool(inputs_outside.any()))
        statistics.add_deep_bounds(largest, int(np.count_nonzero(~within)), not terms.exact, conditional)
    return BlockResult(outputs, bounds)


def _add_digits(digits: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the sum of the digits of an output, cast once."""
    if len(digits) == 1:
        return digits[0]
    total = digits[0].astype(np.float64)
    for digit in digits[1:]:
        total += digit
    return total.astype(np.float32)


def row_terms(bundle: NodeBundle, block: int) -> tuple[Floats, Floats]:
    """Return output scale and bias of every value of the outputs of a block's program, joined: digit by digit."""
    shapes, terms = bundle.plan.blocks[block].program.output_shapes, bundle.terms[block]
    scale = [np.broadcast_to(t.norms.scale, s).ravel() for t, s in zip(terms, shapes, strict=True)]
    bias = [np.broadcast_to(t.bias, s).ravel() for t, s in zip(terms, shapes, strict=True)]
    return np.concatenate(scale), np.concatenate(bias)
