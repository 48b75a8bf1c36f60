"""Disks that are full and processes that die while they write: one line of reason, and what was there stays whole."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from heinfer.client import LocalModel
from heinfer.plan import load_node, load_server
from heinfer.processes import child_environment
from tests.parties import COMMAND, REPOSITORY, refusal
from tests.small_models import product_model

MODEL = REPOSITORY / "models" / "released" / "mnist_lenet5" / "model.onnx"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def limited(size: int) -> Callable[[], None]:
    """Let a process write files of so many bytes at most: what a full disk does, for this process alone."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def run_limited(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=REPOSITORY, check=False,
        env=child_environment(), preexec_fn=limited(size),
    )  # fmt: skip


@pytest.mark.parametrize("size", [1000, 100_000], ids=["plan", "weights"])
def test_partition_onto_a_full_disk_leaves_the_bundle_that_was_there(
    lenet_bundle: Path, tmp_path: Path, size: int
) -> None:
    bundle = Path(shutil.copytree(lenet_bundle, tmp_path / "bundle"))
    before = contents(bundle)
    done = run_limited(size, "partition", MODEL, "-o", bundle)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (reason,) = done.stderr.strip().splitlines()
    assert reason == f"heinfer: can't write {bundle}: File too large; what was there is left as it was"
    assert contents(bundle) == before
    assert os.listdir(tmp_path) == ["bundle"]


def test_partition_of_a_large_model_onto_a_full_disk_says_what_needs_the_room(tmp_path: Path) -> None:
    model = product_model(tmp_path / "model.onnx", np.ones((800, 800)))
    done = run_limited(100_000, "partition", model, "-o", tmp_path / "bundle")
    assert done.returncode == 1
    (reason,) = done.stderr.strip().splitlines()
    assert reason == f"heinfer: can't write to {tmp_path}: File too large; it needs room for the model's weights"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_rotation_onto_a_full_disk_leaves_the_hints_that_were_there(lenet_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(lenet_bundle, tmp_path / "bundle"))
    before = contents(bundle)
    done = run_limited(20_000, "partition", "--rotate", bundle)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr.strip().splitlines()[-1]
    assert contents(bundle) == before


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_partition_that_is_killed_leaves_the_bundle_that_was_there(
    lenet_bundle: Path, tmp_path: Path, delay_s: float
) -> None:
    bundle = Path(shutil.copytree(lenet_bundle, tmp_path / "bundle"))
    run = subprocess.Popen(
        [*COMMAND, "partition", str(MODEL), "-o", str(bundle)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=child_environment(), cwd=REPOSITORY,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while run.poll() is None and len(os.listdir(tmp_path)) == 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    run.send_signal(signal.SIGKILL)
    run.wait()
    load_server(bundle / "server")
    load_node(bundle / "node")


@pytest.mark.parametrize("written", ["result", "figures"])
def test_infer_onto_a_full_disk_names_the_file_and_leaves_an_earlier_one(
    dense: LocalModel, tmp_path: Path, written: str
) -> None:
    np.save(tmp_path / "query.npy", np.ones((2000, 3), np.float32))
    target = tmp_path / {"result": "result.npy", "figures": "figures.json"}[written]
    target.write_bytes(b"earlier")
    option = {"result": "-o", "figures": "--json"}[written]
    done = run_limited(4096, "infer", "--node", dense.address, tmp_path / "query.npy", option, target)
    assert done.returncode == 1
    assert done.stderr.strip() == f"heinfer: {target}: File too large"
    assert target.read_bytes() == b"earlier"
    assert sorted(os.listdir(tmp_path)) == sorted(["query.npy", target.name])


def test_device_that_is_full_is_named(dense: LocalModel, tmp_path: Path) -> None:
    np.save(tmp_path / "query.npy", np.ones((2, 3), np.float32))
    said = refusal("infer", "--node", dense.address, tmp_path / "query.npy", "-o", "/dev/full")
    assert said == "heinfer: /dev/full: No space left on device"
