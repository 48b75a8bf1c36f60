"""A run without encryption, in one process: the integers that the server would have found, and no keys.

    x --(scale, round)--> x_int --(+ e)--> W(x_int + e) mod q --(centre, scale back, bias)--> y       `Simulator`

The server's answer to b = x_int + e - a s, once the correction W(a s) is added, is W(x_int + e) modulo q, whatever a
and s are. So a = 0 gives what encryption gives, with the node's own kernels and the server's own `ResidueProgram`,
exact modulo q, and e drawn as it always is. Noise is where the mode has it: on padding too in prepared mode.

`estimate_error` says how large the error at the end will be. The worst case carried through a whole network is vacuous
(40 at logits of 38 where 1e-3 is measured). So blocks are evaluated twice in float64, with their real weights and as
the server has them: integers, digit by digit, inputs rounded, noise of the deviation that the cryptography adds, the
last blocks rounded. The difference at the outputs is a sample of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.operators import ResidueProgram, evaluate_plain
from heinfer.plan import DeepStep, NodeBundle, Reference, RoundStep, ServerBundle
from heinfer.plan.deep import evaluate_deep
from heinfer.plan.execution import NodeStepError, PlanRunner, Tensors, plain_deep, plain_rounds
from heinfer.plan.forecast import GROUP_BYTES, GROUP_SAMPLES
from heinfer.processes import core_count
from heinfer.ring import NOISE_DEVIATION, self_test
from heinfer.wire import Mode
from trusted_node.engine import DataError, QueryResult, check_inputs
from trusted_node.masking import add_to_masks, remove_corrections
from trusted_node.modes import ModeChoice, choose_mode
from trusted_node.results import BlockResult, finish_deep, finish_outputs, row_terms
from trusted_node.sampling import draw_noise
from trusted_node.scaling import SampleScales, join_values, prepared_values, sample_peaks, scale_samples
from trusted_node.statistics import QueryStatistics

#: Deviations between the spread of simulated errors and the estimate: one value in 5e8 of a Gaussian exceeds 6.
DEVIATIONS = 6.0
TRIALS = 4
#: Variance of rounding to integers.
_ROUNDING_VARIANCE = 1 / 12
_WORD_BYTES = 8


class Simulator:
    """Runs queries as an `Engine` does, without a server; for studies of precision.

    Args:
        node: the node's folder.
        server: the server's folder.
        choice: whose noise is simulated; `AUTO` is prepared mode where the plan has it. Batches have the noise of
            standard mode.

    Attributes:
        mode: what is simulated.

    Raises:
        InputError: prepared mode is asked for, and the plan has none.
        ParameterError: this machine's arithmetic is not exact.
    """

    def __init__(self, node: NodeBundle, server: ServerBundle, choice: ModeChoice = ModeChoice.AUTO) -> None:
        self._node = node
        self._server = server
        if choice is ModeChoice.AUTO and node.plan.has_prepared_mode:
            choice = ModeChoice.PREPARED
        self.mode = choose_mode(node.plan, choice, 1)
        self_test(node.plan.ring.parameters)
        self._blocks = [
            _SimulatedBlock(node, server, index, self.mode is Mode.PREPARED) for index in range(len(node.plan.blocks))
        ]
        self._runner = PlanRunner(node.plan, node.submodels, core_count())
        sample_bytes = _WORD_BYTES * max((block.values for block in self._blocks), default=1)
        self._group = max(1, min(GROUP_SAMPLES, GROUP_BYTES // sample_bytes))

    def run(
        self, inputs: Mapping[str, NDArray[Any]], trace_samples: int = 0, progress: Callable[[int], None] | None = None
    ) -> QueryResult:
        """Run a query.

        Args:
            inputs: one array a model input, shape (samples, *shape).
            trace_samples: leading samples whose values around every block are returned too.
            progress: called with the samples that are done.

        Returns:
            What `Engine.infer` returns; of its statistics those that time and bytes have no part in.

        Raises:
            InputError: inputs don't fit, or hold NaN or infinity.
            DataError: a value inside the model is not finite.
        """
        plan = self._node.plan
        samples = check_inputs(plan, inputs)
        statistics = QueryStatistics.empty(len(plan.blocks) + len(plan.deep), plan.rounds)
        statistics.mode = self.mode.name.lower()
        parts: list[dict[str, NDArray[Any]]] = []
        traces: list[dict[str, NDArray[Any]]] = []
        for start in range(0, samples, self._group):
            part = {name: x[start : start + self._group] for name, x in inputs.items()}
            traced = max(0, min(trace_samples - start, self._group, samples - start))
            outputs, trace = self._run_group(part, traced, statistics)
            parts.append(outputs)
            traces += [trace] if traced else []
            if progress is not None:
                progress(min(start + self._group, samples))
        joined = {t.name: np.concatenate([part[t.name] for part in parts]) for t in plan.outputs}
        trace = {name: np.concatenate([t[name] for t in traces]) for name in (traces[0] if traces else ())}
        return QueryResult(joined, statistics, trace)

    def _run_group(
        self, inputs: Tensors, traced: int, statistics: QueryStatistics
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        trace: dict[str, NDArray[Any]] = {}

        def run_round(step: RoundStep | DeepStep, tensors: Tensors) -> Tensors:
            if isinstance(step, DeepStep):
                return self._run_deep(step.block, tensors, traced, statistics, trace)
            made: dict[str, NDArray[Any]] = {}
            for index in step.blocks:
                block = self._node.plan.blocks[index]
                values = [_finite(tensors[t.name], t.name) for t in block.inputs]
                result = self._blocks[index].evaluate(values, traced, statistics)
                made.update({t.name: y for t, y in zip(block.outputs, result.outputs, strict=True)})
                if traced:
                    trace.update(_traced(index, traced, values, result))
            return made

        try:
            outputs = self._runner.run(inputs, run_round)
        except NodeStepError as error:
            raise DataError(f"the model's own operators failed on these data: {error}") from error
        return {name: _finite(values, name) for name, values in outputs.items()}, trace

    def _run_deep(
        self, index: int, tensors: Tensors, traced: int, statistics: QueryStatistics, trace: dict[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Evaluate a deep block's polynomials in the clear; the rest is what the node does."""
        deep, terms, arrays = self._node.plan.deep[index], self._node.deep[index], self._server.arrays
        inputs = [_finite(tensors[t.name], t.name) for t in deep.inputs]
        scaled = terms.scale(inputs)
        found = evaluate_deep(deep, arrays, scaled)
        result = finish_deep(self._node, index, terms.outside(scaled), found, traced, statistics)
        if traced:
            trace.update(_traced(len(self._node.plan.blocks) + index, traced, inputs, result))
        return {t.name: y for t, y in zip(deep.outputs, result.outputs, strict=True)}


def _traced(index: int, samples: int, values: list[NDArray[Any]], result: BlockResult) -> dict[str, NDArray[Any]]:
    """Name the values around a block as `Engine.infer` does."""
    kinds: dict[str, Sequence[NDArray[Any]]] = {"input": values, "output": result.outputs, "bound": result.bounds}
    return {
        f"trace/{index}/{kind}/{position}": array[:samples].astype(np.float32)
        for kind, arrays in kinds.items()
        for position, array in enumerate(arrays)
    }


def _finite(values: NDArray[Any], name: str) -> NDArray[Any]:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"tensor {name!r} holds NaN or infinity")
    return values


class _SimulatedBlock:
    """A block as the server runs it in one mode, between the two halves of the node's work on it."""

    def __init__(self, node: NodeBundle, server: ServerBundle, index: int, prepared: bool) -> None:
        self._node, self._index = node, index
        block, ring = node.plan.blocks[index], node.plan.ring.parameters
        self._ring, self._row_sum = ring, block.row_sum
        self._form = server.forms[index] if prepared else None
        self._arrays = server.arrays
        if self._form is None:
            self._gather = np.arange(block.input_rows, dtype=np.int32)
            self._program = ResidueProgram(block.program, server.arrays, ring)
        else:
            self._gather = self._form.gather
            self._program = ResidueProgram(self._form.program, {**server.arrays, **self._form.arrays}, ring)
        self._scale, self._bias = row_terms(node, index)

    @property
    def values(self) -> int:
        """Residues of one sample, up and down."""
        return self._gather.size + self._scale.size

    def evaluate(self, values: list[NDArray[np.float32]], bounded: int, statistics: QueryStatistics) -> BlockResult:
        """Evaluate the block.

        Args:
            values: its inputs, finite, shape (samples, *shape).
            bounded: leading samples whose error bounds are wanted.
            statistics: takes the bounds of last blocks.
        """
        scales = scale_samples(values, self._row_sum, self._ring, [sample_peaks(x) for x in values])
        answer = self._program.evaluate_joined(self._upload(scales))
        decrypted = np.empty(answer.shape, np.float32)
        nothing = np.zeros_like(answer)
        remove_corrections(answer, nothing, scales.scale, self._scale, self._bias, self._ring.modulus, decrypted)
        return finish_outputs(self._node, self._index, scales, decrypted, bounded, statistics)

    def _upload(self, scales: SampleScales) -> NDArray[np.int64]:
        """Return x_int + e mod q, shape (samples, values up)."""
        samples = len(scales.scale)
        noise = draw_noise(samples * self._gather.size).reshape(samples, -1)
        residues = np.remainder(noise, self._ring.modulus, dtype=np.int64)
        if self._form is None:
            x, scale = join_values(scales.values), scales.scale
        else:
            x, scale = prepared_values(self._form, self._arrays, scales)
        add_to_masks(x, scale, self._gather, self._ring.modulus, residues)
        return residues


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

    def noisy(step: RoundStep | DeepStep, tensors: Tensors) -> Tensors:
        if isinstance(step, DeepStep):
            return plain_deep(node.plan.deep[step.block], server.arrays, node.deep[step.block], tensors)
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
    rows = []
    for y, terms in zip(evaluate_plain(block.program, server.arrays, values), node.terms[index], strict=True):
        per_sample = scales.scale.reshape(-1, *([1] * (y.ndim - 1)))
        deviation = terms.norms.l2 * np.sqrt(NOISE_DEVIATION**2 + _ROUNDING_VARIANCE) / (per_sample * terms.norms.scale)
        noisy = y / terms.norms.scale + np.abs(deviation) * generator.standard_normal(y.shape) + terms.bias
        rows.append(noisy.reshape(len(y), -1).astype(np.float32))
    costs = QueryStatistics.empty(len(node.plan.blocks), node.plan.rounds)
    result = finish_outputs(node, index, scales, np.concatenate(rows, axis=1), 0, costs)
    return {t.name: y for t, y in zip(block.outputs, result.outputs, strict=True)}
