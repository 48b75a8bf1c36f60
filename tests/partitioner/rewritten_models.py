"""A model before and after `rewrite_composites`, compared under onnxruntime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxruntime
from onnxscript import optimizer

from partitioner.rewriting import rewrite_composites

BATCH = "batch"
#: Two float32 evaluations in different orders, relative to the largest output.
FLOAT32_ORDER = 1e-5


def imported(model: onnx.ModelProto) -> ir.Model:
    """Return the model as the pass gets it: its batch is 1, constants are folded, every node has a name."""
    fixed = ir.from_proto(model)
    for value in (*fixed.graph.inputs, *fixed.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([1 if str(size) == BATCH else size for size in value.shape])
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(fixed)
    optimizer.fold_constants_ir(fixed)
    common_passes.NameFixPass()(fixed)
    return fixed


def rewritten(model: onnx.ModelProto) -> ir.Model:
    """Rewrite a model at a batch of 1; then free the batch where the original has it."""
    result = imported(model)
    rewrite_composites(result)
    for value, original in zip(result.graph.inputs, model.graph.input, strict=True):
        value.shape = ir.Shape([d.dim_param or d.dim_value for d in original.type.tensor_type.shape.dim])
    for value in result.graph.outputs:
        value.shape = None
    for node in result.graph:
        for value in node.outputs:
            value.shape = None
    return result


def operators(model: ir.Model) -> Counter[str]:
    """Count operators by type."""
    return Counter(node.op_type for node in model.graph)


def run(model: onnx.ModelProto | ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model under onnxruntime, operator by operator: its optimisation quantises float weights anew."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results: list[Any] = session.run(None, dict(feeds))
    return results


def compare(
    original: onnx.ModelProto, changed: ir.Model, feeds: Mapping[str, np.ndarray], tolerance: float = FLOAT32_ORDER
) -> None:
    """Assert that two models give the same, up to a share of the largest output."""
    expected, found = run(original, feeds), run(changed, feeds)
    assert [o.name for o in changed.graph.outputs] == [o.name for o in original.graph.output]
    for want, got in zip(expected, found, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.max(np.abs(want), initial=0.0))
