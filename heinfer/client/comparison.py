"""How close an evaluation came: outputs beside the plain model's, blocks beside float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.client.report import BlockCosts, BlockReport, DeepRing, Disagreement, bound_condition
from heinfer.plan import NodeBundle, Plan, Reference
from heinfer.plan.deep import DeepBlock
from heinfer.plan.execution import plain_deep


def compare_outputs(plain: NDArray[Any], encrypted: NDArray[Any], labels: NDArray[Any] | None) -> dict[str, Any]:
    """Compare outputs.

    Args:
        plain: of the original model, samples first.
        encrypted: encrypted or simulated, same shape.
        labels: the true classes, where they are known.

    Returns:
        The fields of `Report` that come of it.
    """
    want, got = (a.reshape(len(a), -1).astype(np.float64) for a in (plain, encrypted))
    error = np.abs(got - want)
    figures: dict[str, Any] = {"max_abs_error": float(error.max()), "mean_abs_error": float(error.mean())}
    if want.shape[1] < 2:
        return {**figures, "agreement": None, "disagreements": [], "accuracy_plain": None, "accuracy_encrypted": None}
    top_plain, top_encrypted = want.argmax(axis=1), got.argmax(axis=1)
    different = np.flatnonzero(top_plain != top_encrypted)
    figures["agreement"] = 1 - len(different) / len(want)
    figures["disagreements"] = [
        Disagreement(
            sample=int(i),
            plain=int(top_plain[i]),
            encrypted=int(top_encrypted[i]),
            gap=float(want[i, top_plain[i]] - want[i, top_encrypted[i]]),
            label=None if labels is None else int(labels[i]),
        )
        for i in different
    ]
    figures["accuracy_plain"] = None if labels is None else float(np.mean(top_plain == labels))
    figures["accuracy_encrypted"] = None if labels is None else float(np.mean(top_encrypted == labels))
    return figures


def report_block(
    plan: Plan, index: int, costs: BlockCosts | None, reference: Reference, trace: dict[str, NDArray[Any]]
) -> BlockReport:
    """Compare a block's traced outputs with a float64 evaluation on the traced inputs.

    Args:
        plan: the plan.
        index: of the block.
        costs: over all samples; None in a simulation.
        reference: the real weights.
        trace: as `trusted_node.engine.Engine.infer` names it.
    """
    block = plan.blocks[index]
    inputs = [trace[f"trace/{index}/input/{i}"].astype(np.float64) for i in range(len(block.inputs))]
    expected = reference.evaluate_block(index, inputs)
    measured = bounded = quotient = 0.0
    for position, want in enumerate(expected):
        error = np.abs(trace[f"trace/{index}/output/{position}"] - want)
        bound = trace[f"trace/{index}/bound/{position}"].astype(np.float64)
        measured, bounded = max(measured, float(error.max())), max(bounded, float(bound.max()))
        quotient = max(quotient, float((error / np.maximum(bound, np.finfo(np.float64).tiny)).max()))
    return BlockReport(
        block=index,
        operators=list(block.operators),
        costs=costs,
        measured_error=measured,
        error_bound=bounded,
        error_to_bound=quotient,
    )


def report_deep_block(
    node: NodeBundle,
    index: int,
    costs: BlockCosts | None,
    reference: Reference,
    trace: dict[str, NDArray[Any]],
    astray: bool,
) -> BlockReport:
    """Compare a deep block's traced outputs with its own polynomials in float64, on the traced inputs.

    The comparison has the weights that the server has, rounded; the bound covers that rounding too.

    Args:
        node: the node's folder, calibrated or not as the run was.
        index: of the deep block.
        costs: over all samples; None in a simulation.
        reference: the server's arrays.
        trace: as `trusted_node.engine.Engine.infer` names it; deep blocks count after the others.
        astray: whether inputs of the run lie outside of the calibrated ranges, which leaves the bounds of other samples
            of the same upload conditional.
    """
    block, number = node.plan.deep[index], len(node.plan.blocks) + index
    inputs = {t.name: trace[f"trace/{number}/input/{i}"] for i, t in enumerate(block.inputs)}
    expected = plain_deep(block, reference.arrays, node.deep[index], inputs)
    measured = bounded = quotient = 0.0
    within: NDArray[np.bool_] = np.zeros(0, np.bool_)
    for position, spec in enumerate(block.outputs):
        error = np.abs(trace[f"trace/{number}/output/{position}"].astype(np.float64) - expected[spec.name])
        bound = trace[f"trace/{number}/bound/{position}"].astype(np.float64)
        within = np.asarray(np.isfinite(bound.reshape(len(bound), -1)).all(axis=1))  # the same samples in every output
        measured = max(measured, float(error.max()))
        bounded = max(bounded, float(bound[within].max(initial=0.0)))
        quotient = max(quotient, float((error[within] / bound[within]).max(initial=0.0)))
    stated = bounded if within.any() else None
    return BlockReport(
        block=number,
        operators=list(block.operators),
        costs=costs,
        measured_error=measured,
        error_bound=stated,
        error_to_bound=quotient if within.any() else None,
        deep=DeepRing(**deep_figures(block), exact=node.deep[index].exact),
        unbounded=int(np.count_nonzero(~within)),
        error_bound_condition=bound_condition(stated, astray or not node.deep[index].always),
    )


def deep_figures(block: DeepBlock) -> dict[str, int]:
    """Return N, log2 of all moduli, security bits, layers and activations of a deep block."""
    chain = block.chain.parameters
    return {
        "degree": chain.degree,
        "log2_q": chain.bits,
        "security_bits": chain.security_bits,
        "layers": len(block.layers),
        "activations": sum(layer.activation != "none" for layer in block.layers),
    }
