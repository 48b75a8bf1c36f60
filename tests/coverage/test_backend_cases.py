"""onnx's own node tests, with the operator on the encrypted side.

Every block is evaluated on residues with worst-case noise; with exact blocks, the whole must give the numbers that onnx
expects. Operators that are free to run on either side are placed behind weights on the server, whatever the cut says.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import UnsupportedModelError
from heinfer.plan import NodeBundle, ServerBundle
from heinfer.plan.execution import PlanRunner
from heinfer.ring import RingParameters
from partitioner import rewriting
from partitioner.batching import free_batch
from partitioner.blocks import build_block
from partitioner.catalogue import LEFT_OUT, REWRITTEN, describe, why_left_out
from partitioner.classification import RULES, classify
from partitioner.emission import Draft, draft
from partitioner.folding import fold
from partitioner.grouping import group
from partitioner.importing import import_model
from partitioner.pipeline import partition_in_memory
from partitioner.placement import Side, place
from partitioner.rewriting import rewrite_composites
from partitioner.shapes import infer_shapes
from partitioner.simplification import simplify
from partitioner.verification import verify
from tests.conftest import REPOSITORY
from tests.coverage.backend_cases import NodeCase, NotSampledError, SampledModel, node_cases
from tests.partitioner.examples import FLOAT32_ORDER, Partitioned, run_round

CASES = node_cases()
#: What is left on the node of an operator with weights: moving the batch, adding and scaling an activation.
BESIDE_WEIGHTS = {"Add", "Mul", "Transpose"}


@pytest.mark.parametrize("case", [case for case in CASES if why_left_out(str(case)) is None], ids=str)
def test_node_test_on_the_server_gives_what_onnx_expects(case: NodeCase, tmp_path: Path) -> None:
    sampled = case.sampled()
    found = place_on_server(sampled, tmp_path)
    assert found.plan.blocks
    if sampled.free:
        assert found.node_operators == []
    elif sampled.operator in RULES:
        assert set(found.node_operators) <= BESIDE_WEIGHTS
    else:
        assert sampled.operator not in found.node_operators
    whole = {name: len(samples) // 3 for name, samples in sampled.feeds.items()}
    for samples in (1, 3):
        feeds = {name: x[: samples * whole[name]] for name, x in sampled.feeds.items()}
        expected = {name: y[: samples * len(y) // 3] for name, y in sampled.expected.items()}
        check_results(found, feeds, expected)


@pytest.mark.parametrize("case", [case for case in CASES if why_left_out(str(case)) is not None], ids=str)
def test_node_test_that_is_left_out_is_refused_or_on_the_node(case: NodeCase, tmp_path: Path) -> None:
    try:
        sampled = case.sampled()
        found = place_on_server(sampled, tmp_path)
    except (NotSampledError, UnsupportedModelError):
        return
    assert sampled.operator in found.node_operators


def test_every_reason_has_tests() -> None:
    unused = [p for left_out in LEFT_OUT for p in left_out.tests if not any(_leaves_out(p, case) for case in CASES)]
    assert unused == []


def test_catalogue_knows_all_rewritten_operators() -> None:
    assert set(REWRITTEN) == {*rewriting._COMPOSITES, *rewriting._QUANTISED, "DequantizeLinear"}


def test_operators_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "operators.md").read_text(encoding="utf-8")
    assert page == describe(), "run `make docs`"


def place_on_server(sampled: SampledModel, folder: Path) -> Partitioned:
    """Partition a model in memory, with a free operator on the server.

    Raises:
        UnsupportedModelError: it can't be partitioned.
    """
    path = folder / "case.onnx"
    path.write_bytes(sampled.model.SerializeToString())
    parameters = RingParameters.default()
    result = follow_weights(path, parameters) if sampled.free else partition_in_memory(path, parameters)[1]
    plan = result.plan
    arrays = {name: array for built in result.blocks for name, array in built.integers.items()}
    terms = tuple(built.terms for built in result.blocks)
    server, node = ServerBundle(plan, b"", arrays, ()), NodeBundle(plan, b"", terms, result.submodels, None)
    return Partitioned(sampled.model, folder, plan, server, node, result.reference(b""))


def follow_weights(path: Path, parameters: RingParameters) -> Draft:
    """Run the passes, with all operators that can follow weights on the server."""
    imported = import_model(path)
    model = imported.model
    rewrite_composites(model)
    simplify(model)
    free_batch(model)
    fold(model)
    shapes = infer_shapes(model)
    lowered = classify(model, shapes)
    sides = place(model, lowered, shapes)
    for node in model.graph:
        producers = [value.producer() for value in lowered[node].sources]
        encrypted = [p is not None and sides[p] in (Side.WEIGHTED, Side.AFTER_WEIGHTS) for p in producers]
        if lowered[node].emit is not None and not lowered[node].placement.pinned_to_server and all(encrypted):
            sides[node] = Side.AFTER_WEIGHTS
    groups, blocks = group(model, lowered, sides), []
    reasons = dict.fromkeys(model.graph, "placed by this test")
    for found in groups:
        if found.on_server:
            blocks.append(build_block(len(blocks), found, lowered, sides, shapes, parameters, reasons))
    result = draft(imported, groups, blocks, shapes, parameters, reasons)
    verify(result, imported.original)
    return result


def check_results(found: Partitioned, feeds: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Run a plan: errors of blocks within their bounds, results as expected; quantised ones up to one level."""
    generator = np.random.default_rng(1)
    runner = PlanRunner(found.plan, found.node.submodels)
    results = runner.run(dict(feeds), lambda step, tensors: run_round(found, step, tensors, generator))
    for name, want in expected.items():
        assert results[name].shape == want.shape
        assert results[name].dtype == want.dtype
        wide = want.astype(np.float64)
        tolerance = FLOAT32_ORDER * np.max(np.abs(wide), initial=0.0) if want.dtype.kind == "f" else 1.0
        np.testing.assert_allclose(results[name].astype(np.float64), wide, rtol=0, atol=tolerance)


def _leaves_out(pattern: str, case: NodeCase) -> bool:
    return fnmatchcase(str(case) if "-" in pattern else case.name, pattern)
