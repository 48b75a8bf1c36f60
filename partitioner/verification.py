"""Check a partitioned model against the original: at batch 3, sample by sample, in the clear.

requires  a draft
ensures   symbolic batch, folding, placement and lowering have changed nothing: the plan, with every block evaluated
          in float64, gives what onnxruntime gives for the original
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import PlanError, UnsupportedModelError
from heinfer.plan import Plan
from heinfer.plan.execution import PlanRunner, Tensors, open_original, plain_rounds
from partitioner.emission import Draft

SAMPLES = 3
#: Largest difference, relative to the largest value of the output: float32 sums in another order.
TOLERANCE = 1e-4


def verify(result: Draft, model: NDArray[np.uint8]) -> float:
    """Compare with the original model, serialised; return the largest difference relative to the largest value.

    Raises:
        UnsupportedModelError: the outputs differ, or one of the two does not run.
    """
    inputs = _random_inputs(result.plan)
    try:
        expected = _run_original(model, inputs)
    except Exception as error:  # whatever onnxruntime or numpy find wrong with the model
        raise UnsupportedModelError(
            f"the model does not run under onnxruntime, one sample at a time: {error}"
        ) from error
    try:
        found = _run_plain(result, inputs)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"the model can't take more than one sample: its batch axis could not be made symbolic ({error})"
        ) from error
    return max(
        _compare(spec.name, found[spec.name], want) for spec, want in zip(result.plan.outputs, expected, strict=True)
    )


def _compare(name: str, found: NDArray[Any], expected: NDArray[Any]) -> float:
    if found.shape != expected.shape:
        raise UnsupportedModelError(
            f"output {name!r} changes shape with the batch: expected {expected.shape}, found {found.shape}"
        )
    if not expected.size:
        return 0.0
    largest = float(np.max(np.abs(expected.astype(np.float64))))
    difference = float(np.max(np.abs(found.astype(np.float64) - expected.astype(np.float64))))
    if not difference <= TOLERANCE * max(largest, 1e-30):
        raise UnsupportedModelError(
            f"output {name!r} of three samples together differs from one by one: {difference:.3g} at values up to "
            f"{largest:.3g}; the model mixes samples or fixes its batch size"
        )
    return difference / max(largest, 1e-30)


def _random_inputs(plan: Plan) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(0)  # test data, not a secret
    inputs: dict[str, NDArray[Any]] = {}
    for spec in plan.inputs:
        dtype = np.dtype(spec.dtype)
        values = (
            generator.uniform(0, 1, (SAMPLES, *spec.shape))
            if dtype.kind == "f"
            else generator.integers(0, 2, (SAMPLES, *spec.shape))
        )
        inputs[spec.name] = values.astype(dtype)
    return inputs


def _run_original(model: NDArray[np.uint8], inputs: Tensors) -> list[NDArray[Any]]:
    """Return every output of the original, run sample by sample; its session is gone then."""
    original = open_original(model.tobytes())
    names = [o.name for o in original.get_outputs()]
    runs = [original.run(names, {n: x[i : i + 1] for n, x in inputs.items()}) for i in range(SAMPLES)]
    return [np.concatenate(parts) for parts in zip(*runs, strict=True)]


def _run_plain(result: Draft, inputs: Tensors) -> dict[str, NDArray[Any]]:
    try:
        runner = PlanRunner(result.plan, result.submodels)
    except PlanError as error:
        raise UnsupportedModelError(f"a sub-model does not load: {error}") from error
    return runner.run(inputs, plain_rounds(result.plan, result.reference()))
