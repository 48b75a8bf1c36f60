"""Small ONNX models, and the comparison of a partitioned model with its original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import numpy_helper

from heinfer.operators import ResidueProgram
from heinfer.plan import (
    Block,
    NodeBundle,
    Plan,
    Reference,
    RoundStep,
    ServerBundle,
    load_node,
    load_reference,
    load_server,
)
from heinfer.plan.execution import PlanRunner, open_original
from heinfer.ring import NOISE_LIMIT, input_scale
from partitioner import partition

SAMPLES = 5
#: Two float32 evaluations in different orders, relative to the largest output; what `partitioner.verification` grants.
FLOAT32_ORDER = 1e-4


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    """Return weights about as large as an initialised layer's."""
    values = np.random.default_rng([seed, *shape]).normal(size=shape) / np.sqrt(max(1, np.prod(shape[1:])))
    return values.astype(np.float32)


def graph(
    text: str, constants: Mapping[str, np.ndarray] | None = None, opset: int = 17, ir: int = 8
) -> onnx.ModelProto:
    """Build a model from onnx's textual syntax; outputs may leave out their shapes."""
    proto = onnx.ModelProto(ir_version=ir, opset_import=[onnx.helper.make_opsetid("", opset)])
    proto.graph.CopyFrom(onnx.parser.parse_graph(text))
    for name, array in (constants or {}).items():
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
        if ir < 4:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape))
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(proto)


@dataclass(frozen=True)
class Partitioned:
    """A bundle, loaded the way each party loads it."""

    model: onnx.ModelProto
    folder: Path
    plan: Plan
    server: ServerBundle
    node: NodeBundle
    reference: Reference

    @property
    def on_server(self) -> list[list[str]]:
        """Operator types, block by block."""
        return [_types(block.operators) for block in self.plan.blocks]

    @property
    def on_node(self) -> list[list[str]]:
        """Operator types, node step by node step."""
        return [_types(step.operators) for step in self.plan.steps if not isinstance(step, RoundStep)]

    @property
    def server_operators(self) -> list[str]:
        """Operator types of all blocks."""
        return [name for block in self.on_server for name in block]

    @property
    def node_operators(self) -> list[str]:
        """Operator types of all node steps."""
        return [name for step in self.on_node for name in step]

    @property
    def rounds(self) -> list[tuple[int, ...]]:
        """Blocks, round by round."""
        return [step.blocks for step in self.plan.steps if isinstance(step, RoundStep)]


def partitioned(model: onnx.ModelProto, tmp_path: Path, **options: Any) -> Partitioned:
    """Partition a model, with the partitioner's own options, and load the bundle."""
    path = tmp_path / "example.onnx"
    path.write_bytes(model.SerializeToString())
    folder = tmp_path / "bundle"
    partition(path, folder, **options)
    node = load_node(folder / "node")
    return Partitioned(
        model, folder, node.plan, load_server(folder / "server"), node, load_reference(folder, node.plan)
    )


def check(model: onnx.ModelProto, tmp_path: Path, scale: float = 1.0, **options: Any) -> Partitioned:
    """Partition a model and compare it with its original.

    The blocks are evaluated on residues with worst-case noise drawn at random; every block's error must be within its
    bound, and the network with exact blocks must give what onnxruntime gives for the original, sample by sample.
    """
    found = partitioned(model, tmp_path, **options)
    session = open_original(model.SerializeToString())
    assert [t.name for t in found.plan.inputs] == [i.name for i in session.get_inputs()]
    assert [t.name for t in found.plan.outputs] == [o.name for o in session.get_outputs()]
    generator = np.random.default_rng(1)
    inputs = {t.name: (scale * generator.normal(size=(SAMPLES, *t.shape))).astype(t.dtype) for t in found.plan.inputs}
    expected = one_by_one(session, inputs)
    runner = PlanRunner(found.plan, found.node.submodels)
    results = runner.run(inputs, lambda step, tensors: run_round(found, step, tensors, generator))
    for name, want in expected.items():
        assert results[name].shape == want.shape
        assert results[name].dtype == want.dtype
        tolerance = FLOAT32_ORDER * np.max(np.abs(want), initial=0.0)
        np.testing.assert_allclose(results[name], want, rtol=0, atol=tolerance)
    return found


def one_by_one(session: onnxruntime.InferenceSession, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a model on every sample alone."""
    names = [o.name for o in session.get_outputs()]
    samples = len(next(iter(inputs.values())))
    rows = [session.run(names, {n: x[i : i + 1] for n, x in inputs.items()}) for i in range(samples)]
    return {name: np.concatenate(parts) for name, parts in zip(names, zip(*rows, strict=True), strict=True)}


def run_round(
    found: Partitioned, step: RoundStep, tensors: Mapping[str, Any], generator: np.random.Generator
) -> dict[str, np.ndarray]:
    made = {}
    for index in step.blocks:
        block = found.plan.blocks[index]
        inputs = [np.asarray(tensors[t.name], np.float64) for t in block.inputs]
        exact = found.reference.evaluate_block(index, inputs)
        encrypted, bounds = evaluate_residues(found, index, inputs, generator)
        for spec, want, got, bound in zip(block.outputs, exact, encrypted, bounds, strict=True):
            assert got.shape == want.shape == (len(want), *spec.shape)
            assert np.all(np.abs(got - want) <= bound), f"block {index}, output {spec.name}"
            made[spec.name] = want.astype(np.float32)
    return made


def evaluate_residues(
    found: Partitioned, index: int, inputs: Sequence[np.ndarray], generator: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Evaluate a block on residues, as under encryption; return results as float32 and their error bounds."""
    block: Block = found.plan.blocks[index]
    parameters = found.plan.ring.parameters
    q = parameters.modulus
    flat = np.concatenate([x.reshape(len(x), -1) for x in inputs], axis=1)
    peak, magnitude = np.abs(flat).max(axis=1, initial=0.0), np.abs(flat).sum(axis=1)
    scale = input_scale(peak, block.row_sum, parameters)
    uploads = []
    for x in inputs:
        noise = centred_binomial(generator, x.shape)
        scaled = np.rint(x * scale.reshape(-1, *([1] * (x.ndim - 1)))).astype(np.int64)
        uploads.append((scaled + noise) % q)
    values, bounds = [], []
    answers = ResidueProgram(block.program, found.server.arrays, parameters).evaluate(uploads)
    for terms, answer in zip(found.node.terms[index], answers, strict=True):
        centred = np.where(answer > q // 2, answer - q, answer).astype(np.float64)
        samples = (-1, *([1] * (answer.ndim - 1)))
        values.append(centred / (scale.reshape(samples) * terms.norms.scale[None]) + terms.bias[None])
        bounds.append(terms.norms.error_bound(scale, peak, magnitude, values[-1]))
    firsts = range(0, len(values), block.digits)  # the digits of an output follow each other
    results = [np.sum(values[i : i + block.digits], axis=0).astype(np.float32) for i in firsts]
    return results, [np.sum(bounds[i : i + block.digits], axis=0) for i in firsts]


def centred_binomial(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw noise as SEAL does: the difference of two sums of 21 bits."""
    return generator.binomial(NOISE_LIMIT, 0.5, shape) - generator.binomial(NOISE_LIMIT, 0.5, shape)


def _types(operators: Sequence[str]) -> list[str]:
    return [name.rpartition("(")[2].rstrip(")") for name in operators]
