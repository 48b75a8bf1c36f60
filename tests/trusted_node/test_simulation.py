"""A simulated run has the errors of an encrypted one, in either mode, and makes neither keys nor processes."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from scipy.stats import ks_2samp

from heinfer.client import LocalModel, evaluate
from heinfer.client.evaluation import run_reference
from heinfer.client.report import BlockCosts, Costs
from heinfer.errors import InputError
from heinfer.operators import evaluate_plain
from heinfer.plan import NodeBundle, ServerBundle, load_node, load_reference, load_server, read_bundle_plan
from partitioner import partition
from tests.partitioner.examples import graph, weights
from tests.small_models import convolution_model, logarithm_model, padded_model, two_sided_model
from trusted_node import simulation
from trusted_node.engine import DataError
from trusted_node.modes import ModeChoice
from trusted_node.sampling import draw_noise
from trusted_node.scaling import scale_samples
from trusted_node.simulation import Simulator

SAMPLES, OUTPUTS = 256, 16
#: Equal distributions are told apart with this probability, twice the noise with all but certainty.
LEVEL, CONTROL = 1e-6, 1e-12
Trace = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def roles(lenet_bundle: Path) -> tuple[NodeBundle, ServerBundle]:
    return load_node(lenet_bundle / "node"), load_server(lenet_bundle / "server")


def loud_corner(shape: tuple[int, ...]) -> np.ndarray:
    """One value sets the scale and the rest is small, so that casts to float32 do not hide the noise."""
    x = 1e-4 * np.random.default_rng(0).normal(size=(SAMPLES, *shape))
    x[:, :, 0, 0] = 1e3
    return x.astype(np.float32)


def noise_errors(roles: tuple[NodeBundle, ServerBundle], trace: Trace, index: int) -> np.ndarray:
    """Return errors of some outputs of a block against its integer weights, in deviations of the noise."""
    node, server = roles
    block, terms = node.plan.blocks[index], node.terms[index][0]
    x = [trace[f"trace/{index}/input/0"].astype(np.float64)]
    y = evaluate_plain(block.program, server.arrays, x)[0]
    scale = scale_samples(x, block.row_sum, node.plan.ring.parameters).scale.reshape(-1, *([1] * (y.ndim - 1)))
    error = trace[f"trace/{index}/output/0"] - (y / terms.norms.scale + terms.bias)
    deviations = (error * scale * terms.norms.scale / terms.norms.l2).reshape(SAMPLES, -1)
    chosen = np.random.default_rng(index).permuted(np.tile(np.arange(deviations.shape[1]), (SAMPLES, 1)), axis=1)
    return np.take_along_axis(deviations, chosen[:, :OUTPUTS], axis=1).ravel()


def test_simulated_errors_have_the_distribution_of_encrypted_ones_and_twice_the_noise_has_not(
    lenet: LocalModel, roles: tuple[NodeBundle, ServerBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, _ = roles
    spec = node.plan.inputs[0]
    query = {spec.name: loud_corner(spec.shape)}
    answer = lenet.query(query, trace_samples=SAMPLES, statistics=True)
    simulator = Simulator(*roles, ModeChoice(answer.statistics["mode"]))
    simulated = simulator.run(query, SAMPLES).trace
    monkeypatch.setattr(simulation, "draw_noise", lambda count: 2 * draw_noise(count))
    louder = simulator.run(query, SAMPLES).trace
    blocks = [index for index, block in enumerate(node.plan.blocks) if not block.final]  # the last one is rounded
    assert len(blocks) == 4
    for index in blocks:
        real, same, other = (noise_errors(roles, trace, index) for trace in (answer.trace, simulated, louder))
        assert ks_2samp(real, same).pvalue > LEVEL, index
        assert ks_2samp(real, other).pvalue < CONTROL, index


@pytest.mark.parametrize("model", [convolution_model, lambda path: padded_model(path, 1, 0.5), two_sided_model])
def test_simulation_without_noise_gives_the_integer_program_in_either_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    node, server = bundle_of(model(tmp_path / "model.onnx"))
    generator = np.random.default_rng(5)
    query = {t.name: generator.normal(size=(6, *t.shape)).astype(np.float32) for t in node.plan.inputs}
    monkeypatch.setattr(simulation, "draw_noise", lambda count: np.zeros(count, np.int8))
    trace, other = (
        Simulator(node, server, mode).run(query, 6).trace for mode in (ModeChoice.STANDARD, ModeChoice.PREPARED)
    )
    assert set(trace) == set(other)
    assert all(np.array_equal(trace[name], other[name]) for name in trace)
    for index, block in enumerate(node.plan.blocks):
        x = [trace[f"trace/{index}/input/{i}"].astype(np.float64) for i in range(len(block.inputs))]
        scales = scale_samples(x, block.row_sum, node.plan.ring.parameters)
        for position, y in enumerate(evaluate_plain(block.program, server.arrays, x)):
            norms = node.terms[index][position].norms
            want = y / norms.scale + node.terms[index][position].bias
            unit = np.abs(scales.scale.reshape(-1, *([1] * (y.ndim - 1))) * norms.scale)
            allowed = 0.5 * norms.l1 / unit + 2.0**-23 * np.abs(want)
            if block.final:
                allowed = allowed + trace[f"trace/{index}/bound/{position}"]  # half a step is less
            assert (np.abs(trace[f"trace/{index}/output/{position}"] - want) <= allowed).all(), (index, position)


@pytest.mark.parametrize("choice", [ModeChoice.STANDARD, ModeChoice.PREPARED])
def test_simulated_noise_is_on_padding_in_prepared_mode_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: ModeChoice
) -> None:
    node, server = bundle_of(padded_model(tmp_path / "model.onnx", 1, 0.5))
    x = np.zeros((1, 2, 6, 6), np.float32)
    x[0, 0, 3, 3] = 1e3
    simulator = Simulator(node, server, choice)
    outputs = []
    for noise in (0, 100):
        monkeypatch.setattr(simulation, "draw_noise", lambda count, noise=noise: np.full(count, noise, np.int8))
        outputs.append(simulator.run({"x": x}, 1).trace["trace/0/output/0"].astype(np.float64))
    block, norms = node.plan.blocks[0], node.terms[0][0].norms
    scale = scale_samples([x], block.row_sum, node.plan.ring.parameters).scale[0] * norms.scale
    found = ((outputs[1] - outputs[0]) * scale)[0, :, 0, 0] / 100  # in the corner, far from the loud value
    ones = evaluate_plain(block.program, server.arrays, [np.ones((1, 2, 6, 6))])[0][0]
    inside, whole = ones[:, 0, 0], ones[:, 2, 2]
    assert (np.abs(inside - whole) > 1000).all()
    assert np.abs(found - (whole if choice is ModeChoice.PREPARED else inside)).max() < 100


def bundle_of(model: Path) -> tuple[NodeBundle, ServerBundle]:
    """Partition a model; return both parties' folders."""
    bundle = model.parent / "bundle"
    partition(model, bundle)
    return load_node(bundle / "node"), load_server(bundle / "server")


def test_simulated_evaluation_reports_what_an_encrypted_one_does_but_costs(
    dense_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a simulation starts no process and opens no socket")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    x = np.random.default_rng(3).normal(size=(300, 3)).astype(np.float32)
    labels = run_reference(load_reference(dense_bundle, read_bundle_plan(dense_bundle)).model, x, lambda done: None)
    labels = labels.argmax(axis=1)
    labels[:30] = 1 - labels[:30]
    phases: set[str] = set()
    report = evaluate(dense_bundle, x, labels, simulate=True, progress=lambda phase, done, total: phases.add(phase))
    assert phases == {"plain", "estimate", "simulated"}
    assert report.simulated
    assert report.mode == "prepared"
    assert report.accuracy_plain == pytest.approx(0.9)
    found = report.to_dict()
    assert abs(found["accuracy_encrypted"] - found["accuracy_plain"]) <= 1 - found["agreement"] + 1e-12
    assert all(found[field.name] is None for field in fields(Costs))
    assert 0 < found["mean_abs_error"] < found["max_abs_error"] < 3 * found["error_estimate"]
    for block in found["blocks"]:
        assert all(block[field.name] is None for field in fields(BlockCosts))
        assert 0 < block["measured_error"] <= block["error_bound"]


def test_simulation_of_samples_in_several_groups_is_that_of_each(
    roles: tuple[NodeBundle, ServerBundle], lenet_samples: dict[str, np.ndarray]
) -> None:
    node, _ = roles
    done: list[int] = []
    result = Simulator(*roles).run({node.plan.inputs[0].name: lenet_samples["x"]}, 300, done.append)
    assert len(done) > 1
    assert done[-1] == 1000
    outputs = result.outputs[node.plan.outputs[0].name]
    assert outputs.shape == (1000, 10)
    assert (outputs.argmax(axis=1) == lenet_samples["y"]).mean() > 0.98
    assert {len(array) for array in result.trace.values()} == {300}


def test_simulation_of_prepared_mode_where_there_is_none_is_refused_and_auto_takes_the_other(tmp_path: Path) -> None:
    text = "wide (float[b,1,3,9000] x) => (float y) { y = Conv<kernel_shape=[3,3]>(x, w) }"
    onnx.save(graph(text, {"w": weights(1, 1, 3, 3)}), tmp_path / "wide.onnx")
    folders = bundle_of(tmp_path / "wide.onnx")
    with pytest.raises(InputError, match="no prepared mode"):
        Simulator(*folders, ModeChoice.PREPARED)
    assert Simulator(*folders).mode.name == "STANDARD"


def test_simulation_data_that_make_nan_are_refused(tmp_path: Path) -> None:
    simulator = Simulator(*bundle_of(logarithm_model(tmp_path / "model.onnx")))
    with pytest.raises(DataError, match="NaN or infinity"):
        simulator.run({"x": np.full((2, 3), -5, np.float32)})
