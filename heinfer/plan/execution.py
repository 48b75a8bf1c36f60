"""Run a plan's steps in order, whoever evaluates the blocks.

The same loop serves the encrypted run (trusted node), the plain check after partitioning and the simulation behind the
error estimate: they differ in `run_round` alone. Sub-models run under onnxruntime, whose threads wait asleep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from heinfer.errors import HeinferError, PlanError
from heinfer.plan.bundle import Reference
from heinfer.plan.deep import DeepBlock, evaluate_deep
from heinfer.plan.deep_terms import DeepTerms
from heinfer.plan.schema import DeepStep, NodeStep, Plan, PlanStep, RoundStep

Tensors = Mapping[str, NDArray[Any]]
RunRound = Callable[[RoundStep | DeepStep, Tensors], Tensors]
RepeatStep = Callable[[NodeStep, Tensors, "NodeStepError"], Tensors]


#: Names in a serialised model that tell of quantised operators.
_QUANTISED = (b"QuantizeLinear", b"QLinear", b"ConvInteger", b"MatMulInteger")


def open_original(content: bytes, threads: int = 1) -> onnxruntime.InferenceSession:
    """Open a model as it came, to compare with.

    A quantised model runs operator by operator, as ONNX defines them: what onnxruntime makes of several at once rounds
    some values to the next level, and saturates sums of products at 16 bits on processors without VNNI.

    Raises:
        PlanError: onnxruntime refuses the model.
    """
    return open_session(content, threads, fuse=not any(name in content for name in _QUANTISED))


def open_session(model: bytes | str, threads: int = 1, *, fuse: bool = True) -> onnxruntime.InferenceSession:
    """Open an onnxruntime session whose threads do not spin.

    Args:
        model: serialised, or a path.
        threads: for one operator.
        fuse: whether onnxruntime may replace operators by others.

    Raises:
        PlanError: onnxruntime refuses the model.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if not fuse:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # its errors quote data; they reach us as exceptions all the same
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise PlanError(f"onnxruntime refuses a model: {error}") from error


def plain_rounds(plan: Plan, reference: Reference) -> RunRound:
    """Return a `run_round` that evaluates blocks in float64 with their real weights, nothing encrypted."""

    def run_round(step: RoundStep | DeepStep, tensors: Tensors) -> Tensors:
        if isinstance(step, DeepStep):
            return plain_deep(plan.deep[step.block], reference.arrays, reference.deep[step.block], tensors)
        made: dict[str, NDArray[Any]] = {}
        for index in step.blocks:
            block = plan.blocks[index]
            outputs = reference.evaluate_block(index, [np.asarray(tensors[t.name], np.float64) for t in block.inputs])
            made.update({t.name: y.astype(np.float32) for t, y in zip(block.outputs, outputs, strict=True)})
        return made

    return run_round


def plain_deep(
    block: DeepBlock, arrays: Mapping[str, NDArray[Any]], terms: DeepTerms, tensors: Tensors, calibrated: bool = True
) -> dict[str, NDArray[Any]]:
    """Evaluate a deep block with its polynomials and integer weights, nothing encrypted.

    Args:
        block: the block.
        arrays: the server's.
        terms: the node's.
        tensors: its inputs by name, shape (samples, *shape).
        calibrated: whether gain and offset are applied.

    Returns:
        Its outputs by name, float32.
    """
    values = evaluate_deep(block, arrays, terms.scale([tensors[t.name] for t in block.inputs]))
    return {
        t.name: output.finish(v, calibrated).astype(np.float32)
        for t, output, v in zip(block.outputs, terms.outputs, values, strict=True)
    }


class NodeStepError(HeinferError):
    """onnxruntime failed in a step, on these data.

    Attributes:
        position: position of the step in the plan.
    """

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        super().__init__(reason)


class PlanRunner:
    """Executes a plan; safe to use from several threads.

    Args:
        plan: the plan.
        submodels: serialised ONNX by file name.
        threads: onnxruntime's threads per sub-model.
    """

    def __init__(self, plan: Plan, submodels: Mapping[str, bytes], threads: int = 1) -> None:
        self._plan = plan
        self._sessions = {name: open_session(model, threads) for name, model in submodels.items()}
        self._last_use: dict[str, int] = {}
        for position, step in enumerate(plan.steps):
            for name in self._reads(step):
                self._last_use[name] = position
        self._last_use.update({t.name: len(plan.steps) for t in plan.outputs})

    def run(
        self, inputs: Tensors, run_round: RunRound, repeat_step: RepeatStep | None = None
    ) -> dict[str, NDArray[Any]]:
        """Run all steps.

        Args:
            inputs: the plan's inputs, shape (samples, *shape).
            run_round: evaluates the blocks of a round, given the tensors so far.
            repeat_step: makes the outputs of a step that failed, or raises its error.

        Returns:
            The plan's outputs, shape (samples, *shape).

        Raises:
            NodeStepError: onnxruntime failed in a step.
        """
        tensors: dict[str, NDArray[Any]] = dict(inputs)
        for position, step in enumerate(self._plan.steps):
            if isinstance(step, RoundStep | DeepStep):
                tensors.update(run_round(step, tensors))
            else:
                tensors.update(self._run_or_repeat(position, step, tensors, repeat_step))
            for name in [n for n in tensors if self._last_use.get(n, -1) <= position]:
                del tensors[name]
        return {t.name: np.asarray(tensors[t.name]) for t in self._plan.outputs}

    def _run_or_repeat(
        self, position: int, step: NodeStep, tensors: Tensors, repeat_step: RepeatStep | None
    ) -> Tensors:
        try:
            return self.run_step(position, step, tensors)
        except NodeStepError as error:
            if repeat_step is None:
                raise
            return repeat_step(step, tensors, error)

    def run_step(self, position: int, step: NodeStep, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Run one of the node's own steps.

        Raises:
            NodeStepError: onnxruntime failed.
        """
        try:
            feeds = {name: tensors[name] for name in step.inputs}
            results = self._sessions[step.model].run(list(step.outputs), feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise NodeStepError(position, f"step {position} ({step.model}): {error}") from error
        return dict(zip(step.outputs, results, strict=True))

    def _reads(self, step: PlanStep) -> list[str]:
        if isinstance(step, NodeStep):
            return list(step.inputs)
        if isinstance(step, DeepStep):
            return [t.name for t in self._plan.deep[step.block].inputs]
        return [t.name for b in step.blocks for t in self._plan.blocks[b].inputs]
