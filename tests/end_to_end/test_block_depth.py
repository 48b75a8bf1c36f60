"""Deep blocks from the command line: what partition, inspect, evaluate and infer say of them, simulated and encrypted.

Commands run in this process, which saves starting one for each; node and server are processes of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parties import inside, output_of, refusal
from tests.small_models import dense_model, tanh_model

#: What noise and rounding add to polynomials of values around 1 (partitioner.deep.building: 2**-18 of a range).
NOISE = 1e-4
#: Bounds are of the worst case.
USUAL = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two activations, calibration data, test data, and its bundle at d = all."""
    path = tmp_path_factory.mktemp("deep")
    tanh_model(path / "model.onnx")
    rng = np.random.default_rng(0)
    np.savez(path / "train.npz", x=rng.normal(size=(3000, 6)).astype(np.float32))
    x = rng.normal(size=(60, 6)).astype(np.float32)
    np.savez(path / "test.npz", x=x, y=rng.integers(0, 3, 60))
    np.save(path / "query.npy", x[:2])
    np.save(path / "far.npy", 50 * x[:2])
    said = partition(path, "all", path / "bundle", "--degree", "3", "--json", path / "partition.json")
    (path / "partition.txt").write_text(said)
    return path


def partition_words(folder: Path, depth: str, bundle: Path) -> tuple[object, ...]:
    data = folder / "train.npz"
    return ("partition", folder / "model.onnx", "-o", bundle, "--block-depth", depth, "--calibration", data)


def partition(folder: Path, depth: str, bundle: Path, *options: object) -> str:
    return output_of(*partition_words(folder, depth, bundle), *options)


def evaluate(folder: Path, *options: object) -> tuple[dict[str, Any], str]:
    figures = folder / "report.json"
    said = output_of("evaluate", folder / "bundle", "--data", folder / "test.npz", "--json", figures, *options)
    found = json.loads(figures.read_text())
    assert isinstance(found, dict)
    return found, said


def test_partition_shows_the_ring_and_every_activation(folder: Path) -> None:
    text, figures = (folder / "partition.txt").read_text(), json.loads((folder / "partition.json").read_text())
    assert "calibration: 2,000 of 3,000 samples, evenly taken" in text
    assert [a["degree"] for a in figures["activations"]] == [3, 3]
    assert all(0 < a["error"] < 0.2 for a in figures["activations"])
    (deep,) = figures["deep"]
    assert f"{deep['degree']}" in text
    assert figures["rounds"] == 1
    assert deep["slots"] == deep["degree"] // 2


def test_inspect_states_ring_and_bytes(folder: Path) -> None:
    text = output_of("inspect", folder / "bundle", "--json", folder / "inspect.json")
    (deep,) = json.loads((folder / "inspect.json").read_text())["deep"]
    assert deep["security_bits"] >= 128
    assert deep["levels"] == 2 * deep["activations"]  # a polynomial of degree 3 takes two
    assert 0 < deep["key_bytes"] < deep["bytes_up"]
    assert str(deep["degree"]) in text
    assert "Prepared mode: none, all blocks are deep" in text


def test_evaluate_encrypted_is_what_is_simulated(folder: Path) -> None:
    journal = folder / "journal"
    encrypted, text = evaluate(folder, "--html", folder / "page.html", "--journal", journal)
    simulated, _ = evaluate(folder, "--simulate")
    assert abs(encrypted["max_abs_error"] - simulated["max_abs_error"]) < NOISE
    assert 0 < encrypted["blocks"][0]["measured_error"] < NOISE < encrypted["max_abs_error"]
    assert simulated["blocks"][0]["measured_error"] < 1e-6
    (block,) = encrypted["blocks"]
    assert block["measured_error"] < block["error_bound"] <= encrypted["error_bound"] < NOISE * USUAL
    assert encrypted["error_estimate"] is None
    assert encrypted["fitted"]
    assert not encrypted["unbounded"]
    assert "distance from the same polynomials" in " ".join(text.split())
    output_of("inspect", folder / "bundle", "--json", folder / "inspect.json")
    (deep,) = json.loads((folder / "inspect.json").read_text())["deep"]
    assert (encrypted["bytes_up"], encrypted["bytes_down"]) == (deep["bytes_up"], deep["bytes_down"])
    page = (folder / "page.html").read_text()
    assert "none: polynomials" in page  # the estimate
    assert "(distance from the same polynomials" in page
    assert "Calibration (used)" in page
    options = ("--data", folder / "test.npz", "--journal", journal, "--resume", "--no-calibration")
    assert "another mode" in refusal("evaluate", folder / "bundle", *options)


def test_evaluate_without_calibration_is_farther_off_on_average(folder: Path) -> None:
    found = {c: evaluate(folder, "--simulate", f"--{c}")[0] for c in ("calibration", "no-calibration")}
    with_it, without = found["calibration"], found["no-calibration"]
    assert with_it["mean_abs_error"] < without["mean_abs_error"]
    figures = with_it["polynomials"]
    assert figures["calibrated_error"][1] < figures["uncalibrated_error"][1]
    assert figures["calibrated_error"] == without["polynomials"]["calibrated_error"]
    assert (figures["calibrated"], without["polynomials"]["calibrated"]) == (True, False)


def test_values_outside_of_the_calibrated_ranges_are_counted(folder: Path) -> None:
    near, _ = evaluate(folder, "--simulate")
    x = np.load(folder / "test.npz")["x"]
    np.savez(folder / "far.npz", x=50 * x)
    far, text = evaluate(folder, "--simulate", "--data", folder / "far.npz")
    assert near["polynomials"]["inputs_outside"] == 0
    assert far["polynomials"]["inputs_outside"] > far["polynomials"]["inputs"] / 2
    assert (far["unbounded"], far["error_bound"], far["blocks"][0]["error_bound"]) == (60, None, None)
    assert "none: outside of the calibrated ranges" in " ".join(text.split())
    assert 0 < far["polynomials"]["outputs_outside"] <= far["polynomials"]["outputs"] == 60 * 3
    assert f"{far['polynomials']['inputs_outside']:,} of {far['polynomials']['inputs']:,} inputs" in text


@pytest.mark.long
def test_node_leaves_the_calibration_out_where_told(folder: Path) -> None:
    simulated, _ = evaluate(folder, "--simulate", "--no-calibration")
    encrypted, text = evaluate(folder, "--no-calibration")
    assert abs(encrypted["mean_abs_error"] - simulated["mean_abs_error"]) < NOISE
    assert encrypted["blocks"][0]["measured_error"] < NOISE
    assert "switched off" in text


@pytest.mark.long
def test_infer_says_what_lies_outside_and_claims_no_bound_there(folder: Path) -> None:
    near = output_of("infer", folder / "query.npy", "--bundle", folder / "bundle", "--json", folder / "near.json")
    assert "distance from the same polynomials" in near
    assert 0 < json.loads((folder / "near.json").read_text())["error_bound"] < NOISE * USUAL
    far = output_of("infer", folder / "far.npy", "--bundle", folder / "bundle", "--json", folder / "far.json")
    assert json.loads((folder / "far.json").read_text())["error_bound"] is None
    assert "error bound none: outside of the calibrated ranges" in far
    assert "Outside of the ranges that calibration data showed" in far


def test_estimate_counts_a_deep_block_and_needs_the_servers_weights(folder: Path, tmp_path: Path) -> None:
    said = output_of("estimate", folder / "bundle", "--json", tmp_path / "estimate.json")
    assert "deep 0" in said
    assert "scratch files" in said
    figures = json.loads((tmp_path / "estimate.json").read_text())
    (deep,) = json.loads((folder / "partition.json").read_text())["deep"]
    assert (figures["bytes_up"], figures["bytes_down"]) == (deep["bytes_up"], deep["bytes_down"])
    assert 0 < figures["server_s"] < figures["total_s"]
    (tmp_path / "plan.json").write_bytes((folder / "bundle" / "plan.json").read_bytes())
    assert "what deep blocks take follows from the server's weights" in refusal("estimate", tmp_path)


def test_partition_refuses_what_does_not_go_together(folder: Path, tmp_path: Path) -> None:
    model, bundle = folder / "model.onnx", tmp_path / "bundle"
    usage = inside("partition", model, "-o", bundle, "--block-depth", "1")
    assert usage.code == 2
    assert "--calibration" in usage.err
    usage = inside(*partition_words(folder, "0", bundle))
    assert usage.code == 2
    assert "positive number or all" in usage.err
    np.savez(tmp_path / "short.npz", x=np.zeros((9, 5), np.float32))
    reason = refusal("partition", model, "-o", bundle, "--block-depth", "1", "--calibration", tmp_path / "short.npz")
    assert "(9, 5)" in reason
    assert not bundle.exists()


def study(folder: Path, output: Path, *options: object) -> tuple[dict[str, Any], str]:
    said = output_of(
        "study", "block-depth", folder / "model.onnx", "--data", folder / "test.npz", "--calibration",
        folder / "train.npz", "-o", output, *options,
    )  # fmt: skip
    found = json.loads((output / "study.json").read_text())
    assert isinstance(found, dict)
    return found, said


def test_study_compares_depths_and_goes_on_where_it_was(folder: Path) -> None:
    output = folder / "study"
    found, text = study(folder, output, "--degree", "3", "--depths", "0,1,2,all")
    rows = {row["depth"]: row for row in found["rows"]}
    assert [rows[d]["rounds"] for d in ("0", "1", "2", "all")] == [3, 2, 1, 1]
    assert rows["all"]["same_as"] == "2"
    assert rows["0"]["mean_error"] < rows["1"]["mean_error"] < rows["all"]["mean_error"]
    assert "all (as 2)" in text
    assert (output / "curve.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "all (as 2)" in (output / "study.html").read_text()
    before = {path: path.stat().st_mtime_ns for path in output.glob("depth-*/**/*") if path.is_file()}
    again, _ = study(folder, output, "--degree", "3", "--depths", "0,1,2,all")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again == found


def test_study_begins_anew_where_samples_changed(folder: Path) -> None:
    output = folder / "changed"
    first, _ = study(folder, output, "--depths", "0", "--samples", "50")
    second, _ = study(folder, output, "--depths", "0", "--samples", "40")
    assert (first["task"]["samples"], second["task"]["samples"]) == (50, 40)
    assert first["rows"][0]["mean_error"] != second["rows"][0]["mean_error"]


@pytest.mark.long
def test_study_under_encryption_measures_what_the_simulation_says(folder: Path) -> None:
    found = {}
    for kind in ("simulate", "encrypted"):
        found[kind] = study(folder, folder / kind, "--depths", "0,1,2", f"--{kind}")[0]["rows"]
    for plain, real in zip(found["simulate"], found["encrypted"], strict=True):
        assert abs(plain["mean_error"] - real["mean_error"]) < NOISE
        assert plain["batch_bytes_up"] == real["batch_bytes_up"]
        assert real["full_image_s"] <= real["image_s"]
        assert real["memory_bytes"]["server"] > 0
        assert plain["image_s"] is None


def test_exact_bundle_has_no_deep_figures(tmp_path: Path) -> None:
    model, bundle = dense_model(tmp_path / "dense.onnx"), tmp_path / "bundle"
    said = output_of("partition", model, "-o", bundle, "--json", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["deep"] == []
    assert "Deep blocks" not in said
