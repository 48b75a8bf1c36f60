"""The commands that print figures: what they print, write and return."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import heinfer.cli.main as main_module
from heinfer.client import LocalModel
from heinfer.plan import read_plan
from partitioner import partition
from tests.parties import command, refusal, refused
from tests.small_models import convolution_model, dense_model, save_model

REPORT_KEYS = {
    "samples", "accuracy_plain", "accuracy_encrypted", "agreement", "max_abs_error", "mean_abs_error", "error_bound",
    "error_estimate", "seconds", "images_per_s", "latency_s", "bytes_up", "bytes_down", "rounds", "blocks",
    "parameters", "mode", "versions", "cores",
}  # fmt: skip
BLOCK_KEYS = {
    "node_s", "server_s", "wire_s", "ciphertexts_up", "ciphertexts_down", "bytes_up", "bytes_down", "measured_error",
    "error_bound",
}  # fmt: skip


@pytest.fixture(scope="module")
def query(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("query") / "query.npy"
    np.save(path, np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.npz"
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.savez(path, x=x, y=np.zeros(50, np.int64), counts=np.rint(x * 100).astype(np.int32))
    return path


def test_partition_writes_a_bundle_and_says_what_goes_where(tmp_path: Path) -> None:
    model = dense_model(tmp_path / "dense.onnx")
    done = command("partition", model, "-o", tmp_path / "bundle", "--json", tmp_path / "figures.json")
    assert done.code == 0, done.err
    assert "relu (Relu)" in done.out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert 0 <= figures["difference"] <= 1e-4
    assert figures["rounds"] == 2
    assert {p.name for p in (tmp_path / "bundle").iterdir()} == {"plan.json", "server", "node", "reference"}
    assert {p.name for p in tmp_path.iterdir()} == {"bundle", "dense.onnx", "figures.json"}  # nothing half-written


def test_partition_what_is_no_model_is_refused_and_nothing_written(tmp_path: Path) -> None:
    (tmp_path / "noise.onnx").write_bytes(b"\xff" * 100)
    assert "not an ONNX model" in refused(command("partition", tmp_path / "noise.onnx", "-o", tmp_path / "bundle"))
    assert "does not exist" in refusal("partition", tmp_path / "absent.onnx", "-o", tmp_path / "bundle")
    assert {p.name for p in tmp_path.iterdir()} == {"noise.onnx"}


@pytest.fixture(scope="module")
def inspection(dense_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What `inspect` prints of the dense model, and its figures."""
    path = tmp_path_factory.mktemp("inspection") / "figures.json"
    done = command("inspect", dense_bundle, "--json", path)
    assert done.code == 0, done.err
    return done.out, json.loads(path.read_text())


def test_inspect_shows_steps_parameters_bytes_rounds_and_bounds(
    dense_bundle: Path, inspection: tuple[str, dict[str, Any]]
) -> None:
    printed, figures = inspection
    plan, _ = read_plan(dense_bundle)
    assert figures["parameters"] == {"N": 2048, "log2_q": 50, "security_bits": 128}
    assert [b["unit_bound"] for b in figures["blocks"]] == [b.unit_bound for b in plan.blocks]
    assert [b["values_up"] for b in figures["blocks"]] == [3, 4]
    assert figures["bytes"]["1"] == {"up": 7 * 13000, "down": 6 * 13000}  # 2048 residues and a pack of 32
    for word in ("N = 2048", "128 bits", "Rounds: 2", "none", "Error bounds"):
        assert word in printed


def test_inspect_shows_what_prepared_mode_takes(dense_bundle: Path, inspection: tuple[str, dict[str, Any]]) -> None:
    printed, figures = inspection
    plan, _ = read_plan(dense_bundle)
    prepared = figures["prepared"]
    assert prepared["query_bytes"] == 8 * (3 + 4 + 4 + 2)  # a mask for every value up, a correction for every one down
    assert prepared["hint_bytes"] == (4 + 2) * 12800  # one row of 2048 residues an output
    assert (prepared["bytes_up"], prepared["bytes_down"]) == (2 * 200, 2 * 200)  # one pack of 32 a block
    for block, found in zip(plan.blocks, figures["blocks"], strict=True):
        assert found["prepared"] == {
            "degree": 2048,
            "dense": [],
            "hints": ["dense"],
            "rows": [block.output_rows],
            "ciphertexts": 1,
            "values_up": block.input_rows,
            "values_down": block.output_rows,
            "joined": 0,
            "hint_bytes": block.output_rows * 12800,
        }
    for word in ("Prepared mode: 400 B up, 400 B down", "104 B of the node's memory", "76.8 KB of hints", "dense"):
        assert word in printed


def test_inspect_of_a_model_without_prepared_mode_says_so(tmp_path: Path) -> None:
    model = save_model(
        tmp_path / "wide.onnx",
        [helper.make_node("Conv", ["x", "w"], ["y"], name="conv", kernel_shape=[1, 2])],
        {"x": [1, 2, 9000]},
        {"y": [1, 2, 8999]},
        {"w": np.ones((1, 1, 1, 2), np.float32)},
    )
    partition(model, tmp_path / "bundle")
    done = command("inspect", tmp_path / "bundle", "--json", tmp_path / "figures.json")
    assert done.code == 0, done.err
    assert "Prepared mode: none" in done.out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["prepared"] is None
    assert [b["prepared"] for b in figures["blocks"]] == [None]


def test_partition_for_long_security_takes_twice_the_degree(tmp_path: Path) -> None:
    model = convolution_model(tmp_path / "convolution.onnx")
    done = command("partition", model, "-o", tmp_path / "bundle", "--security", "long")
    assert done.code == 0, done.err
    done = command("inspect", tmp_path / "bundle", "--json", tmp_path / "figures.json")
    assert done.code == 0, done.err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["parameters"]["N"], figures["parameters"]["log2_q"]) == (4096, 50)
    found = [(b["prepared"]["hints"], b["prepared"]["degree"]) for b in figures["blocks"]]
    assert found == [(["polynomial"], 4096), (["dense"], 4096)]
    assert figures["prepared"]["hint_bytes"] == (3 + 5) * 25600  # one row of 4096 residues a channel or output
    for word in ("N = 4096", "polynomial", "dense", "204.8 KB of hints"):
        assert word in done.out


def test_partition_rotate_renews_hints_and_leaves_all_else(dense_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(dense_bundle, tmp_path / "bundle"))
    before = {p: p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    done = command("partition", "--rotate", bundle)
    assert done.code == 0, done.err
    for word in ("Renewed seed and hints", "start the node again", "server stays"):
        assert word in " ".join(done.out.split())
    after = {p: p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    assert after.keys() == before.keys()
    assert sorted(p for p in after if after[p] != before[p]) == [
        bundle / "node" / name for name in ("checks.safetensors", "hints.safetensors")
    ]


def test_partition_rotate_with_a_model_is_a_usage_error_and_changes_nothing(dense_bundle: Path) -> None:
    hints = (dense_bundle / "node" / "hints.safetensors").read_bytes()
    done = command("partition", "--rotate", dense_bundle, "model.onnx")
    assert done.code == 2, done
    assert "--rotate takes a bundle and no model" in " ".join(done.err.replace("│", " ").split())
    assert (dense_bundle / "node" / "hints.safetensors").read_bytes() == hints


def test_infer_at_a_node_writes_what_python_gets(dense: LocalModel, query: Path, tmp_path: Path) -> None:
    figures_path = tmp_path / "figures.json"
    done = command("infer", "--node", dense.address, query, "-o", tmp_path / "result.npy", "--json", figures_path)
    assert done.code == 0, done.err
    result = np.load(tmp_path / "result.npy")
    figures = json.loads(figures_path.read_text())
    assert result.dtype == np.float32
    assert {"samples", "seconds", "bytes_up", "bytes_down", "rounds", "error_bound", "output"} <= set(figures)
    assert np.array_equal(np.array(figures["output"], np.float32), result)
    assert (figures["samples"], figures["rounds"]) == (4, 2)
    # Two encrypted runs differ by their noise and by a step of rounding each.
    assert np.abs(result - dense.predict(np.load(query))).max() <= 4 * figures["error_bound"]
    assert "class" in done.out


def test_infer_at_a_bundle_starts_all_roles_and_ends_them(dense_bundle: Path, query: Path, tmp_path: Path) -> None:
    done = command("infer", "--bundle", dense_bundle, query, "-o", tmp_path / "result.npy")
    assert done.code == 0, done.err
    assert np.load(tmp_path / "result.npy").shape == (4, 2)


def test_infer_output_without_an_ending_is_written_under_that_very_name(
    dense: LocalModel, query: Path, tmp_path: Path
) -> None:
    done = command("infer", "--node", dense.address, query, "-o", tmp_path / "result")
    assert done.code == 0, done.err
    assert [p.name for p in tmp_path.iterdir()] == ["result"]
    assert np.load(tmp_path / "result").shape == (4, 2)


def test_infer_one_sample_of_integers_is_scaled_and_gets_its_axis(dense: LocalModel, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.array([10, 20, 30], np.uint8))
    done = command("infer", "--node", dense.address, tmp_path / "one.npy", "--divide", 10, "-o", tmp_path / "r.npy")
    assert done.code == 0, done.err
    assert "one sample" in done.out
    want = dense.predict(np.array([[1, 2, 3]], np.float32))
    assert np.abs(np.load(tmp_path / "r.npy") - want).max() < 0.05 * np.abs(want).max()


def test_evaluate_prints_a_table_and_writes_the_report(dense_bundle: Path, data: Path, tmp_path: Path) -> None:
    done = command("evaluate", dense_bundle, "--data", data, "--samples", 40, "--json", tmp_path / "report.json")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) >= REPORT_KEYS
    assert len(report["blocks"]) == 2
    assert all(set(block) >= BLOCK_KEYS for block in report["blocks"])
    assert report["samples"] == 40
    for word in ("accuracy", "agreement", "N = 2048", "peak memory", "Blocks"):
        assert word in done.out


def test_evaluate_names_arrays_and_divides(dense_bundle: Path, data: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--x", "counts", "--y", "y", "--divide", 100, "--samples", 5, "--json", report)
    done = command("evaluate", dense_bundle, "--data", data, *options)
    assert done.code == 0, done.err
    assert json.loads(report.read_text())["samples"] == 5


def test_evaluate_bundle_without_reference_takes_the_model_and_no_other(data: Path, tmp_path: Path) -> None:
    model = dense_model(tmp_path / "dense.onnx")
    other = dense_model(tmp_path / "other.onnx", seed=5)
    bundle = tmp_path / "bundle"
    assert command("partition", model, "-o", bundle, "--no-reference").code == 0
    assert not (bundle / "reference").exists()
    assert "--model" in refusal("evaluate", bundle, "--data", data)
    assert "not the model of this bundle" in refusal("evaluate", bundle, "--data", data, "--model", other)
    done = command("evaluate", bundle, "--data", data, "--model", model, "--samples", 5)
    assert done.code == 0, done.err
    assert "agreement" in done.out


@pytest.mark.slow
def test_demo_classifies_digits_plain_beside_encrypted(tmp_path: Path) -> None:
    done = command("demo", "--samples", 12, "--json", tmp_path / "report.json")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["samples"] == 12
    assert report["agreement"] == 1
    assert report["max_abs_error"] <= report["error_estimate"]
    assert "First digits" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["partition", "model.onnx"],
        ["evaluate", "bundle"],
        ["evaluate", "bundle", "--data", "d.npz", "--samples", "0"],
        ["node", "bundle/node"],
        ["infer", "absent.npy", "--node", "127.0.0.1:1"],
    ],
)
def test_usage_errors_end_with_two(arguments: list[str]) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_help_ends_with_zero() -> None:
    done = command("--help")
    assert done.code == 0
    for name in ("partition", "inspect", "serve", "node", "infer", "evaluate", "demo"):
        assert name in done.out


def test_too_little_memory_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted() -> None:
        raise MemoryError

    monkeypatch.setattr(main_module, "app", exhausted)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("heinfer: not enough memory")
