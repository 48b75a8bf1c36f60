"""Measured error against the bound that the node states, block by block and element by element."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import LocalModel, local
from heinfer.plan import load_reference, read_plan
from partitioner import partition
from tests.small_models import convolution_model, two_sided_model

KINDS = ["random", "sparse", "constant", "zero", "huge", "tiny"]
MODES = ["standard", "prepared"]


def inputs(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Samples of one kind; every sample differs where the kind allows it."""
    generator = np.random.default_rng(KINDS.index(kind))
    x = generator.normal(size=shape)
    match kind:
        case "sparse":
            x *= generator.random(shape) < 0.05
        case "constant":
            x = np.full(shape, 0.37)
        case "zero":
            x = np.zeros(shape)
        case "huge":
            x *= 1e6
        case "tiny":
            x *= 1e-9
    return x.astype(np.float32)


def check_blocks(
    model: LocalModel, bundle: Path, query: np.ndarray | dict[str, np.ndarray], samples: int, mode: str
) -> float:
    """Compare every traced block with float64 on the traced inputs; return the largest error over its bound."""
    plan, _ = read_plan(bundle)
    reference = load_reference(bundle, plan)
    answer = model.query(query, trace_samples=samples, statistics=True)
    assert answer.statistics["mode"] == mode
    trace = answer.trace
    largest = 0.0
    for index, block in enumerate(plan.blocks):
        values = [trace[f"trace/{index}/input/{i}"].astype(np.float64) for i in range(len(block.inputs))]
        for position, want in enumerate(reference.evaluate_block(index, values)):
            found = trace[f"trace/{index}/output/{position}"]
            # The node states bounds in float64, the trace carries them in float32.
            bound = trace[f"trace/{index}/bound/{position}"].astype(np.float64) * (1 + 2.0**-23)
            error = np.abs(found - want)
            assert found.shape == want.shape == bound.shape == (samples, *block.outputs[position].shape)
            assert (error <= bound).all(), (index, float(error.max()), float(bound.max()))
            largest = max(largest, float((error / np.maximum(bound, 1e-300)).max()))
    return largest


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def convolution(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalModel, Path]]:
    folder = tmp_path_factory.mktemp("convolution")
    partition(convolution_model(folder / "convolution.onnx"), folder / "bundle")
    with local(folder / "bundle", allow_trace=True, mode=mode) as model:
        yield model, folder / "bundle"


@pytest.fixture(scope="module")
def lenet_in_mode(mode: str, lenet_bundle: Path) -> Iterator[LocalModel]:
    """The released LeNet-5 behind processes of its own that run this mode."""
    with local(lenet_bundle, allow_trace=True, mode=mode) as model:
        yield model


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_a_small_convolution_with_zero_rows_is_below_the_bound(
    convolution: tuple[LocalModel, Path], kind: str, mode: str
) -> None:
    model, bundle = convolution
    largest = check_blocks(model, bundle, inputs(kind, (16, 2, 6, 6)), 16, mode)
    assert largest > 1e-3 or kind in ("zero", "constant")  # the bound is not vacuous


def test_error_of_samples_of_all_kinds_in_one_query_is_below_the_bound_of_each(
    convolution: tuple[LocalModel, Path], mode: str
) -> None:
    model, bundle = convolution
    check_blocks(model, bundle, np.concatenate([inputs(kind, (2, 2, 6, 6)) for kind in KINDS]), 12, mode)


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_lenet_is_below_the_bound(lenet_in_mode: LocalModel, lenet_bundle: Path, kind: str, mode: str) -> None:
    check_blocks(lenet_in_mode, lenet_bundle, inputs(kind, (4, 1, 28, 28)), 4, mode)


def test_error_of_lenet_on_digits_is_below_the_bound(
    lenet_in_mode: LocalModel, lenet_bundle: Path, lenet_samples: dict[str, np.ndarray], mode: str
) -> None:
    largest = check_blocks(lenet_in_mode, lenet_bundle, lenet_samples["x"][:32], 32, mode)
    assert largest > 1e-3


def test_error_of_blocks_with_two_inputs_is_below_the_bound(tmp_path: Path, mode: str) -> None:
    partition(two_sided_model(tmp_path / "two.onnx"), tmp_path / "bundle")
    with local(tmp_path / "bundle", allow_trace=True, mode=mode) as model:
        query = {"u": inputs("huge", (5, 3)), "v": inputs("tiny", (5, 2))}
        check_blocks(model, tmp_path / "bundle", query, 5, mode)
