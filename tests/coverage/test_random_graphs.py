"""Random small graphs of all supported operators: encrypted against onnxruntime, block by block and end to end.

    residues    blocks on residues with noise, as in standard mode (`tests.partitioner.examples.check`)
    prepared    the node's and the server's own code for prepared mode, without a network in between
    parties     both modes under real encryption, over sockets

Blocks must be within their bounds. Free operators are placed in four ways (`Placing`), so that each of them comes to
run on the server, in front of weights or behind them.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings

from heinfer.errors import UnsupportedModelError
from heinfer.plan import RoundStep
from heinfer.plan.execution import PlanRunner, open_original
from heinfer.server.prepared import PreparedBlocks
from partitioner import pipeline, placement
from partitioner.classification import RULES
from partitioner.lowering import NOT_LEADING, Lowered
from partitioner.placement import Side, place
from partitioner.shapes import Shape
from tests.coverage.random_graphs import Placing, RandomGraph, graphs_with, mixed_graphs
from tests.coverage.random_operators import LINEAR, QUANTISED, REWRITTEN
from tests.parties import WatchedPool, parties
from tests.partitioner.examples import SAMPLES, Partitioned, check, one_by_one
from trusted_node.modes import ModeChoice
from trusted_node.preparation import Preparer
from trusted_node.prepared_uploads import PreparedUpload
from trusted_node.scaling import sample_peaks
from trusted_node.simulation import estimate_error
from trusted_node.statistics import QueryStatistics

#: Reasons for which a drawn graph may be refused.
LEGAL_REASONS = ("no operator has learned weights", NOT_LEADING)
#: Operators of which nothing is left when operators are placed.
REMOVED = frozenset({"Identity"})
#: Two float32 evaluations in different orders, relative to the largest output.
FLOAT32_ORDER = 1e-4
#: The estimate of the error is a sample itself.
ESTIMATE_SLACK = 2.0
PER_OPERATOR, MIXED, REAL = 8, 40, 3
_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


def examples(count: int, derandomize: bool = True) -> settings:
    """Return settings for the same examples in every run."""
    return settings(
        max_examples=count, derandomize=derandomize, database=None, deadline=None, suppress_health_check=_QUIET
    )


# -- placing ----------------------------------------------------------------------------------------------------------


@contextmanager
def placed(placing: Placing) -> Iterator[None]:
    """Let the partitioner take another placement: the cheapest one where values have other sizes."""

    def with_costs(
        model: ir.Model,
        lowered: Mapping[ir.Node, Lowered],
        shapes: Mapping[str, Shape],
        on_node: Collection[ir.Node] = (),
        on_server: Collection[ir.Node] = (),
    ) -> dict[ir.Node, Side]:
        values = [value.name for node in model.graph for value in node.outputs]
        order = {name: position for position, name in enumerate([*(v.name for v in model.graph.inputs), *values])}
        generator = np.random.default_rng(len(order))
        cost: Callable[[int], int] = {
            Placing.LATE: lambda position: 3 ** (len(order) - position),  # more than all later values together
            Placing.EARLY: lambda position: 3**position,
            Placing.RANDOM: lambda _: int(generator.integers(1, 100)),
        }[placing]
        return place(
            model, lowered, {name: (cost(order[name]),) for name in shapes if name in order}, on_node, on_server
        )

    with pytest.MonkeyPatch.context() as patch:
        if placing is not Placing.CHEAPEST:
            patch.setattr(pipeline, "place", with_costs)
            # Sizes that are made up are no shapes of which an upload could be cut.
            patch.setattr(placement, "_late_uploads", lambda *_: {})
        yield


# -- prepared mode without a network ----------------------------------------------------------------------------------


class Shortcut:
    """In place of a delivery to a server over sockets: hands an upload over at once."""

    def __init__(self, blocks: PreparedBlocks) -> None:
        self._blocks = blocks
        self._answer = b""

    def send(self, block: int, samples: int, mode: object, rows: memoryview) -> None:
        """Evaluate a block."""
        packed = np.frombuffer(rows, np.uint8).reshape(samples, -1)
        self._answer = self._blocks.evaluate(block, packed).tobytes()

    def accept(self, read: Callable[[Any, Iterator[Any]], np.ndarray]) -> np.ndarray:
        """Let the answer be read as it would arrive."""
        return read(SimpleNamespace(compute_s=0.0), iter([SimpleNamespace(data=self._answer)]))


Inputs = dict[str, np.ndarray]


def draw_inputs(found: Partitioned) -> Inputs:
    """Draw samples for a model."""
    generator = np.random.default_rng(2)
    return {t.name: generator.normal(size=(SAMPLES, *t.shape)).astype(t.dtype) for t in found.plan.inputs}


def infer_prepared(found: Partitioned, inputs: Inputs) -> Inputs:
    """Run a query in prepared mode; every block must be within its bound of what it gives in float64."""
    assert found.server.plan.has_prepared_mode
    query = Preparer(found.node).prepare(SAMPLES, 1)
    blocks = PreparedBlocks(found.server)
    statistics = QueryStatistics.empty(len(found.plan.blocks), found.plan.rounds)

    def run_round(step: RoundStep, tensors: Mapping[str, Any]) -> Inputs:
        made: Inputs = {}
        for index in step.blocks:
            block = found.plan.blocks[index]
            values = [np.ascontiguousarray(tensors[t.name]) for t in block.inputs]
            delivery: Any = Shortcut(blocks)
            upload = PreparedUpload(found.node, index, delivery, [query], statistics, check=None)
            upload.send(values, [sample_peaks(x) for x in values])
            result = upload.receive(SAMPLES)
            exact = found.reference.evaluate_block(index, [x.astype(np.float64) for x in values])
            for spec, want, got, bound in zip(block.outputs, exact, result.outputs, result.bounds, strict=True):
                assert got.shape == want.shape == bound.shape
                assert np.all(np.abs(got - want) <= bound), f"block {index}, output {spec.name}"
                made[spec.name] = got
        return made

    return PlanRunner(found.plan, found.node.submodels).run(inputs, run_round)


def check_results(graph: RandomGraph, found: Partitioned, inputs: Inputs, results: Inputs) -> None:
    """Compare a query's results with onnxruntime's for the original."""
    estimate = ESTIMATE_SLACK * estimate_error(found.node, found.server, found.reference, inputs)
    for name, want in one_by_one(open_original(graph.model.SerializeToString()), inputs).items():
        tolerance = estimate + graph.step + FLOAT32_ORDER * np.max(np.abs(want), initial=0.0)
        np.testing.assert_allclose(results[name], want, rtol=0, atol=tolerance)


def partition_legally(graph: RandomGraph, folder: Path) -> Partitioned | None:
    """Partition a graph and check its blocks on residues; None if it is refused for a legal reason."""
    try:
        with placed(graph.placing):
            return check(graph.model, folder)
    except UnsupportedModelError as error:
        if not any(reason in str(error) for reason in LEGAL_REASONS):
            raise
        return None


def check_graph(graph: RandomGraph) -> list[str]:
    """Check a graph on residues and in prepared mode; return the operators that ran on the server."""
    with tempfile.TemporaryDirectory() as folder:
        found = partition_legally(graph, Path(folder))
        if found is None:
            return []
        inputs = draw_inputs(found)
        check_results(graph, found, inputs, infer_prepared(found, inputs))
        return found.server_operators


def check_parties(graph: RandomGraph, pool: WatchedPool) -> None:
    """Check a graph under real encryption, in both modes."""
    with tempfile.TemporaryDirectory() as folder:
        found = partition_legally(graph, Path(folder))
        if found is None:
            return
        inputs = draw_inputs(found)
        for mode in (ModeChoice.STANDARD, ModeChoice.PREPARED):
            with parties(found.folder, pool, mode=mode) as both:
                answer = both.engine.infer(inputs, SAMPLES)
            check_trace(found, answer.trace)
            check_results(graph, found, inputs, answer.outputs)


def check_trace(found: Partitioned, trace: Inputs) -> None:
    """Check that what a node saw of every block is within the bound that it states."""
    for index, block in enumerate(found.plan.blocks):
        values = [trace[f"trace/{index}/input/{i}"].astype(np.float64) for i in range(len(block.inputs))]
        for position, want in enumerate(found.reference.evaluate_block(index, values)):
            got = trace[f"trace/{index}/output/{position}"]
            # The node states bounds in float64, the trace carries them in float32.
            bound = trace[f"trace/{index}/bound/{position}"].astype(np.float64) * (1 + 2.0**-23)
            assert got.shape == want.shape == bound.shape
            assert np.all(np.abs(got - want) <= bound), f"block {index}, output {position}"


# -- tests ------------------------------------------------------------------------------------------------------------


def test_every_operator_of_the_server_is_drawn() -> None:
    assert set(LINEAR) == set(RULES)
    assert {name for name, drawing in LINEAR.items() if drawing.weighted} == {n for n in RULES if RULES[n].weighted}


@pytest.mark.parametrize("operator", [*RULES, *REWRITTEN, *QUANTISED])
def test_graphs_of_an_operator_are_within_bounds_in_both_modes(operator: str) -> None:
    on_server: Counter[str] = Counter()
    drawing = (LINEAR | REWRITTEN | QUANTISED)[operator]

    @examples(PER_OPERATOR)
    @given(graphs_with(drawing))
    def hold(graph: RandomGraph) -> None:
        on_server.update(check_graph(graph))

    hold()
    assert on_server.total()
    if operator in RULES and operator not in REMOVED:
        assert on_server[operator], f"{operator} was on the node in every example"


def test_mixed_graphs_are_within_bounds_in_both_modes() -> None:
    on_server: list[bool] = []

    @examples(MIXED)
    @given(mixed_graphs())
    def hold(graph: RandomGraph) -> None:
        on_server.append(bool(check_graph(graph)))

    hold()
    assert np.mean(on_server) > 0.8  # few are refused


def test_mixed_graphs_are_within_bounds_under_real_encryption(pool: WatchedPool) -> None:
    @examples(REAL)
    @given(mixed_graphs())
    def hold(graph: RandomGraph) -> None:
        check_parties(graph, pool)

    hold()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operator", [*RULES, *REWRITTEN, *QUANTISED])
def test_many_graphs_of_an_operator_are_within_bounds_in_both_modes(operator: str) -> None:
    @examples(200, derandomize=False)
    @given(graphs_with((LINEAR | REWRITTEN | QUANTISED)[operator]))
    def hold(graph: RandomGraph) -> None:
        check_graph(graph)

    hold()


@pytest.mark.long
@pytest.mark.timeout(3600)
@examples(3000, derandomize=False)
@given(mixed_graphs())
def test_many_mixed_graphs_are_within_bounds_in_both_modes(graph: RandomGraph) -> None:
    check_graph(graph)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_mixed_graphs_are_within_bounds_under_real_encryption(pool: WatchedPool) -> None:
    @examples(100, derandomize=False)
    @given(mixed_graphs())
    def hold(graph: RandomGraph) -> None:
        check_parties(graph, pool)

    hold()
