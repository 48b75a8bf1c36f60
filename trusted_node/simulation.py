"""What the error at the end will be, without encrypting: an estimate of the statistical kind.

The worst case carried through a whole network is vacuous (40 at logits of 38 where 1e-3 is measured). So blocks are
evaluated twice in float64, with their real weights and as the server has them: integers, inputs rounded, noise of the
deviation that the cryptography adds, the last blocks rounded. The difference at the outputs is a sample of the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.operators import evaluate_plain
from heinfer.plan import NodeBundle, Reference, RoundStep, ServerBundle
from heinfer.plan.execution import PlanRunner, Tensors, plain_rounds
from heinfer.ring import NOISE_DEVIATION
from trusted_node.rounding import round_to_step, rounding_step
from trusted_node.scaling import scale_samples

#: Deviations between the spread of simulated errors and the estimate: one value in 5e8 of a Gaussian exceeds 6.
DEVIATIONS = 6.0
TRIALS = 4
#: Variance of rounding to integers.
_ROUNDING_VARIANCE = 1 / 12


def estimate_error(
    node: NodeBundle, server: ServerBundle, reference: Reference, inputs: Mapping[str, NDArray[Any]]
) -> float:
    """Return an estimate of the largest error of any output, end to end.

    Args:
        node: the node's folder.
        server: the server's folder.
        reference: the real weights.
        inputs: samples to run, shape (samples, *shape) each; a few dozen suffice.

    Returns:
        `DEVIATIONS` times the root mean square error of the worst output, over samples and trials.
    """
    runner = PlanRunner(node.plan, node.submodels)
    generator = np.random.default_rng()

    def noisy(step: RoundStep, tensors: Tensors) -> Tensors:
        made: dict[str, NDArray[Any]] = {}
        for index in step.blocks:
            made.update(_evaluate_noisy(node, server, index, tensors, generator))
        return made

    expected = runner.run(inputs, plain_rounds(node.plan, reference))
    largest = 0.0
    found = [runner.run(inputs, noisy) for _ in range(TRIALS)]
    for name, want in expected.items():
        if want.dtype.kind != "f":
            continue
        errors = np.stack([run[name].astype(np.float64) - want for run in found])
        largest = max(largest, float(np.sqrt(np.mean(errors**2, axis=(0, 1))).max(initial=0.0)))
    return DEVIATIONS * largest


def _evaluate_noisy(
    node: NodeBundle, server: ServerBundle, index: int, tensors: Tensors, generator: np.random.Generator
) -> dict[str, NDArray[Any]]:
    block = node.plan.blocks[index]
    values = [tensors[t.name].astype(np.float64) for t in block.inputs]
    scales = scale_samples(values, block.row_sum, node.plan.ring.parameters)
    made = {}
    outputs = evaluate_plain(block.program, server.arrays, values)
    for spec, y, terms in zip(block.outputs, outputs, node.terms[index], strict=True):
        per_sample = scales.scale.reshape(-1, *([1] * (y.ndim - 1)))
        deviation = terms.norms.l2 * np.sqrt(NOISE_DEVIATION**2 + _ROUNDING_VARIANCE) / (per_sample * terms.norms.scale)
        noisy = y / terms.norms.scale + np.abs(deviation) * generator.standard_normal(y.shape)
        result = (noisy + terms.bias).astype(np.float32)
        if block.final:
            result = round_to_step(result, rounding_step(scales.error_bound(terms.norms, result)))
        made[spec.name] = result
    return made
