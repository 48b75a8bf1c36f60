"""Evaluate a bundle on a data set: plain beside encrypted, in three processes over real sockets.

x --> onnxruntime, the original model -----------------------> plain outputs -+
x --> node --> server --> node, in full batches -------------> outputs -------+--> Report
                    values around every block, first samples ----> errors, bounds +

Or plain beside simulated: the same integers and the same noise in this process, nothing encrypted, no costs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.client.comparison import compare_outputs, report_block, report_deep_block
from heinfer.client.data import fit
from heinfer.client.environment import machine_name, versions
from heinfer.client.journal import FinishedChunk, Journal, Task, open_journal, sample_hash
from heinfer.client.local import LocalModel, local, read_memory
from heinfer.client.remote import RemoteModel
from heinfer.client.report import BlockCosts, BlockReport, Costs, Polynomials, Report, bound_condition
from heinfer.errors import InputError
from heinfer.plan import (
    NodeBundle,
    Plan,
    Reference,
    ServerBundle,
    load_node,
    load_reference,
    load_server,
    read_bundle_plan,
)
from heinfer.plan.execution import PlanRunner, open_original, plain_rounds
from heinfer.plan.forecast import prepared_bytes
from heinfer.plan.signing import read_trusted_keys
from heinfer.processes import core_count
from trusted_node.modes import ModeChoice
from trusted_node.simulation import Simulator, estimate_error

#: Queries in flight: the node works on as many groups.
QUERIES_IN_FLIGHT = 3
#: Queries of one sample whose median is the latency; fewer where they take long.
LATENCY_QUERIES = {"standard": 5, "prepared": 50}
LATENCY_BUDGET_S = 10.0
#: Pause between them, in times of preparing one: the node prepares in the background.
LATENCY_PAUSE = 2.0
TRACED_SAMPLES = 32
Progress = Callable[[str, int, int], None]


def evaluate(
    bundle: str | Path,
    x: NDArray[Any],
    labels: NDArray[Any] | None = None,
    *,
    reference: Reference | None = None,
    mode: str = "auto",
    simulate: bool = False,
    trusted_keys: Sequence[str | Path] = (),
    through: RemoteModel | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    calibrated: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Evaluate a bundle.

    Args:
        bundle: folder written by `partition`.
        x: samples first, then the model's input shape.
        labels: one class a sample.
        reference: the original model; read from the bundle where None.
        mode: "auto", "standard" or "prepared".
        simulate: encrypt nothing: run the same integer arithmetic with sampled noise in this process.
        trusted_keys: files of public keys, one of which must have signed the bundle; none: no signature is asked for.
        through: a node of this bundle that runs already, with --allow-trace; its mode is its own. None: server and node
            are started for the evaluation.
        journal: a file for finished chunks of samples, which a run that was cut off need not evaluate again.
        resume: go on with what the journal holds; without, one that holds chunks is refused.
        calibrated: whether outputs of deep blocks are calibrated; with `through`, whether that node does so.
        progress: called with (phase, done, total) as work advances.

    Raises:
        PlanError: the bundle is incomplete, has no reference, or is not signed by anybody trusted.
        InputError: the data don't fit, what is simulated makes a value that is not finite, the journal is not this
            evaluation's, or the node is not this bundle's.
        QueryFailedError: node or server failed.
        OSError: the journal can't be written.
    """
    if simulate and (through is not None or journal is not None):
        raise InputError("a simulation has neither a node nor a journal")
    folder = Path(bundle)
    plan = read_bundle_plan(folder, read_trusted_keys([Path(path) for path in trusted_keys]))
    reference = reference or load_reference(folder, plan)
    if len(plan.inputs) != 1:
        raise InputError(f"evaluation takes models with one input, this one has {len(plan.inputs)}")
    if labels is not None and np.shape(labels) != (len(x),):
        raise InputError(f"expected {len(x)} labels, found shape {np.shape(labels)}")
    x, _ = fit(np.asarray(x), plan.inputs[0])
    tell = progress or (lambda phase, done, total: None)
    started = time.perf_counter()
    plain = run_reference(reference.model, x, lambda done: tell("plain", done, len(x)))
    plain_s = time.perf_counter() - started
    traced = x[:TRACED_SAMPLES]
    tell("estimate", 0, 1)
    node, server = load_node(folder / "node"), load_server(folder / "server")
    estimate = None  # what noise does; polynomials do more
    if not plan.deep:
        estimate = estimate_error(node, server, reference, {plan.inputs[0].name: traced})
    tell("estimate", 1, 1)
    as_run = node if calibrated else node.uncalibrated()
    if simulate:
        run = _run_simulated(as_run, server, x, ModeChoice(mode), tell)
    else:
        if through is not None and through.description.plan_hash != node.plan_hash:
            raise InputError(f"the node at {through.address} serves another bundle than {folder}")
        with ExitStack() as stack:
            asked = mode if calibrated else f"{mode}, not calibrated"
            task = Task(node.plan_hash.hex(), sample_hash(x), len(x), asked, chunk_samples(plan))
            kept = None if journal is None else stack.enter_context(open_journal(Path(journal), task, resume))
            model = through or stack.enter_context(
                local(folder, allow_trace=True, mode=mode, trusted_keys=trusted_keys, calibrated=calibrated)
            )
            run = _run_encrypted(model, plan, x, kept, tell)
    return Report(
        model=plan.model.name,
        mode=run.mode,
        simulated=simulate,
        samples=len(x),
        **compare_outputs(plain, run.outputs, labels),
        error_bound=run.bound.stated,
        error_estimate=estimate,
        plain_s=plain_s,
        costs=run.costs,
        rounds=plan.rounds,
        blocks=_report_blocks(as_run, run, reference),
        traced_samples=len(traced),
        parameters=ring_figures(plan),
        versions=versions(),
        machine=machine_name(),
        cores=core_count(),
        polynomials=_compare_polynomials(node, reference, calibrated, plain, traced, run) if plan.deep else None,
        fitted=run.bound.fitted,
        unbounded=run.bound.unbounded,
        error_bound_condition=bound_condition(run.bound.stated, run.bound.conditional),
    )


def chunk_samples(plan: Plan) -> int:
    """Return how many samples share uploads: N; where there are deep blocks, the slots of the smallest of them."""
    if plan.deep:
        return plan.deep_slots
    return plan.ring.degree


def _report_blocks(node: NodeBundle, run: _Run, reference: Reference) -> list[BlockReport]:
    linear = len(node.plan.blocks)
    return [
        report_block(node.plan, index, costs, reference, run.trace)
        if index < linear
        else report_deep_block(node, index - linear, costs, reference, run.trace, astray=run.outside[0] > 0)
        for index, costs in enumerate(run.blocks)
    ]


def _compare_polynomials(
    node: NodeBundle, reference: Reference, calibrated: bool, plain: NDArray[Any], traced: NDArray[Any], run: _Run
) -> Polynomials:
    """Say what deep blocks did to the outputs, and evaluate the traced samples with and without their calibration."""
    plan, runner = node.plan, PlanRunner(node.plan, node.submodels)
    errors = []
    for terms in (node.deep, node.uncalibrated().deep):
        evaluate_round = plain_rounds(plan, replace(reference, deep=terms))
        found = runner.run({plan.inputs[0].name: traced}, evaluate_round)[plan.outputs[0].name]
        error = np.abs(found.astype(np.float64) - plain[: len(traced)])
        errors.append((float(error.max()), float(error.mean())))
    samples = len(plain)
    return Polynomials(
        calibrated=calibrated,
        calibrated_error=errors[0],
        uncalibrated_error=errors[1],
        inputs=samples * sum(block.input_count for block in plan.deep),
        inputs_outside=run.outside[0],
        outputs=samples * sum(block.output_count for block in plan.deep),
        outputs_outside=run.outside[1],
    )


@dataclass(frozen=True, slots=True)
class _Bound:
    """The error bound of last blocks, as `trusted_node.statistics.QueryStatistics` has it."""

    largest: float
    fitted: bool
    conditional: bool
    unbounded: int

    @property
    def stated(self) -> float | None:
        """The largest bound; None where samples are without, and none has one."""
        return None if self.unbounded and not self.largest else self.largest

    @classmethod
    def of(cls, statistics: Sequence[Mapping[str, Any]]) -> _Bound:
        """Join those of several queries."""
        return cls(
            largest=max(s["error_bound"] for s in statistics),
            fitted=any(s["fitted"] for s in statistics),
            conditional=any(s["conditional"] for s in statistics),
            unbounded=sum(s["unbounded"] for s in statistics),
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """Outputs and trace of all samples; `costs` and those of `blocks` are None in a simulation.

    `outside` counts inputs and outputs of deep blocks beyond what calibration data showed.
    """

    outputs: NDArray[Any]
    mode: str
    bound: _Bound
    costs: Costs | None
    blocks: Sequence[BlockCosts | None]
    trace: dict[str, NDArray[Any]]
    outside: tuple[int, int]


def _run_simulated(node: NodeBundle, server: ServerBundle, x: NDArray[Any], choice: ModeChoice, tell: Progress) -> _Run:
    plan = node.plan
    tell("simulated", 0, len(x))
    result = Simulator(node, server, choice).run(
        {plan.inputs[0].name: x}, TRACED_SAMPLES, lambda done: tell("simulated", done, len(x))
    )
    statistics = result.statistics
    outputs = result.outputs[plan.outputs[0].name]
    blocks = [None] * len(statistics.blocks)
    outside = statistics.inputs_outside, statistics.outputs_outside
    bound = _Bound(statistics.error_bound, statistics.fitted, statistics.conditional, statistics.unbounded)
    return _Run(outputs, statistics.mode, bound, None, blocks, result.trace, outside)


def _run_encrypted(model: RemoteModel, plan: Plan, x: NDArray[Any], journal: Journal | None, tell: Progress) -> _Run:
    queries = _run_queries(model, plan, x, journal, tell)
    if plan.deep and len(x) <= chunk_samples(plan):  # they were one query, which takes as long for a single sample
        latency = _Latency(queries.seconds, queries.mode, None)
    else:
        latency = _measure_deep_latency(model, x[:1], tell) if plan.deep else _measure_latency(model, x[:1], tell)
    memory: dict[str, int | None] = {"server": None, "node": None}
    start_s = 0.0
    if isinstance(model, LocalModel):
        server_role, node_role = model.roles
        memory = {"server": server_role.peak_memory_bytes(), "node": node_role.peak_memory_bytes()}
        start_s = model.start_s
    memory["client"] = own_peak_memory_bytes()
    blocks = [_block_costs(totals) for totals in queries.blocks]
    costs = Costs(
        seconds=queries.seconds,
        images_per_s=len(x) / queries.seconds,
        latency_s=latency.seconds,
        latency_mode=latency.mode,
        preparation_s=latency.preparation_s,
        prepared_query_bytes=prepared_bytes(plan) if latency.mode == "prepared" else None,
        start_s=start_s,
        bytes_up=sum(block.bytes_up for block in blocks),
        bytes_down=sum(block.bytes_down for block in blocks),
        node_operators_s=queries.node_s,
        peak_memory_bytes=memory,
    )
    return _Run(queries.outputs, queries.mode, queries.bound, costs, blocks, queries.trace, queries.outside)


def _block_costs(totals: dict[str, Any]) -> BlockCosts:
    names = ("server_s", "wire_s", "ciphertexts_up", "ciphertexts_down", "bytes_up", "bytes_down")
    return BlockCosts(node_s=totals["encrypt_s"] + totals["decrypt_s"], **{name: totals[name] for name in names})


@dataclass(frozen=True, slots=True)
class _Queries:
    """Answers to all queries, and what they cost together."""

    outputs: NDArray[Any]
    mode: str
    seconds: float
    bound: _Bound
    node_s: float
    blocks: list[dict[str, Any]]
    trace: dict[str, NDArray[Any]]
    outside: tuple[int, int]


def _run_queries(model: RemoteModel, plan: Plan, x: NDArray[Any], journal: Journal | None, tell: Progress) -> _Queries:
    """Send all samples, a full batch at a time, several queries in flight; the first also traces its leading samples.

    Chunks that the journal holds are not sent, and every other one is in the journal before it counts.
    """
    size, name = chunk_samples(plan), plan.outputs[0].name
    starts = range(0, len(x), size)
    finished = dict(journal.chunks) if journal is not None else {}
    earlier_s = max((chunk.elapsed_s for chunk in finished.values()), default=0.0)
    done = sum(len(chunk.outputs) for chunk in finished.values())
    tell("encrypted", done, len(x))
    started = time.perf_counter()
    with ThreadPoolExecutor(QUERIES_IN_FLIGHT) as pool:
        futures = {
            pool.submit(model.query, x[s : s + size], statistics=True, trace_samples=0 if s else TRACED_SAMPLES): s
            for s in starts
            if s not in finished
        }
        try:
            for future in as_completed(futures):
                answer, start = future.result(), futures[future]
                elapsed_s = earlier_s + time.perf_counter() - started
                chunk = FinishedChunk(start, answer.outputs[name], answer.statistics, answer.trace, elapsed_s)
                if journal is not None:
                    journal.append(chunk)
                finished[start] = chunk
                done += len(chunk.outputs)
                tell("encrypted", done, len(x))
        finally:
            for future in futures:
                future.cancel()
    return _sum_up([finished[s] for s in starts], len(plan.blocks) + len(plan.deep))


def _sum_up(chunks: list[FinishedChunk], blocks: int) -> _Queries:
    """Join chunks, in the order of their samples, and add up what they cost."""
    totals: list[dict[str, Any]] = [{} for _ in range(blocks)]
    for chunk in chunks:
        for total, costs in zip(totals, chunk.statistics["blocks"], strict=True):
            for name, amount in costs.items():
                total[name] = total.get(name, 0) + amount
    return _Queries(
        outputs=np.concatenate([chunk.outputs for chunk in chunks]),
        mode=chunks[0].statistics["mode"],
        seconds=max(chunk.elapsed_s for chunk in chunks),
        bound=_Bound.of([chunk.statistics for chunk in chunks]),
        node_s=sum(chunk.statistics["node_s"] for chunk in chunks),
        blocks=totals,
        trace=chunks[0].trace,
        outside=(
            sum(chunk.statistics["inputs_outside"] for chunk in chunks),
            sum(chunk.statistics["outputs_outside"] for chunk in chunks),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Latency:
    seconds: float
    mode: str
    preparation_s: float | None


def _measure_latency(model: RemoteModel, x: NDArray[Any], tell: Progress) -> _Latency:
    """Return the median of single queries; in prepared mode the pool has time to fill between them."""
    statistics = model.query(x, statistics=True).statistics
    mode, preparation_s = statistics["mode"], statistics["background_s"]
    count = LATENCY_QUERIES[mode]
    pause = LATENCY_PAUSE * (preparation_s or 0.0)
    times: list[float] = []
    tell("latency", 0, count)
    while len(times) < count and sum(times) < LATENCY_BUDGET_S:
        time.sleep(pause)
        started = time.perf_counter()
        model.predict(x)
        times.append(time.perf_counter() - started)
        tell("latency", len(times), count)
    tell("latency", count, count)
    return _Latency(float(np.median(times)), mode, preparation_s)


def _measure_deep_latency(model: RemoteModel, x: NDArray[Any], tell: Progress) -> _Latency:
    """Return the time of one query: it takes as long as a full batch, minutes perhaps."""
    tell("latency", 0, 1)
    started = time.perf_counter()
    mode = model.query(x, statistics=True).statistics["mode"]
    seconds = time.perf_counter() - started
    tell("latency", 1, 1)
    return _Latency(seconds, mode, None)


def run_reference(content: bytes, x: NDArray[Any], advance: Callable[[int], None]) -> NDArray[Any]:
    """Run the original model under onnxruntime, one sample at a time where its batch is fixed at 1."""
    session = open_original(content, core_count())
    source = session.get_inputs()[0]
    step = 1 if isinstance(source.shape[0], int) else 256
    name = session.get_outputs()[0].name
    parts = []
    for start in range(0, len(x), step):
        try:
            parts.append(session.run([name], {source.name: x[start : start + step]})[0])
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise InputError(f"the original model fails from sample {start} on: {error}") from error
        if start % 256 == 0:
            advance(min(start + 256, len(x)))
    return np.concatenate(parts)


def ring_figures(plan: Plan) -> dict[str, int]:
    """Return N, log2 q and the security level in bits."""
    parameters = plan.ring.parameters
    return {"N": parameters.degree, "log2_q": parameters.modulus_bits, "security_bits": parameters.security_bits}


def own_peak_memory_bytes() -> int | None:
    """Return the peak resident memory of this process, without its children: server and node may be among these."""
    try:
        return read_memory(os.getpid(), "VmHWM")
    except OSError:
        return None
