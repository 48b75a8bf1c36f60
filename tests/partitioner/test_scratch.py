"""Large constants lie on disk while a model is partitioned, and no layer is in memory several times as float64."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from heinfer.errors import PlanError
from heinfer.operators import plain, transposed
from heinfer.operators.program import Program
from heinfer.operators.steps import Conv, MatMul, Window
from heinfer.operators.transposed import apply_transpose
from heinfer.processes import child_environment
from heinfer.ring import RingParameters
from partitioner.importing import import_model
from partitioner.scaling import quantise_program
from partitioner.scratch import LARGE_BYTES, Scratch

#: Weights of the layer whose memory is watched: 128 MB in float32.
WIDE = (4096, 8192)
MB = 10**6


def dense(path: Path, weights: np.ndarray, opset: int = 21) -> Path:
    """Write a model of one product, its weights transposed as exporters write them."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="layer", transB=1)],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", weights.shape[1]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", weights.shape[0]])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.zeros(len(weights), np.float32), "b")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_keep_returns_the_array_read_only(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    arrays = [np.arange(7, dtype=np.float32), np.arange(6.0).reshape(2, 3).T, np.empty((0, 3), np.float32)]
    for array in arrays:
        kept = scratch.keep(array)
        assert kept.dtype == array.dtype
        np.testing.assert_array_equal(kept, array)
    assert not scratch.keep(arrays[0]).flags.writeable
    assert not list(tmp_path.iterdir()), "the file has a name"


def test_arrays_outlive_their_scratch_and_leave_nothing_open(tmp_path: Path) -> None:
    before = open_files()
    kept = Scratch(tmp_path).keep(np.arange(1000))
    gc.collect()
    np.testing.assert_array_equal(kept, np.arange(1000))
    del kept
    gc.collect()
    assert open_files() == before


def test_scratch_takes_the_closest_folder_that_is_there(tmp_path: Path) -> None:
    Scratch(tmp_path / "not" / "yet")
    assert not (tmp_path / "not").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_with_what_it_is_for(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), scratch._descriptor)
    with pytest.raises(PlanError, match="room for the model's weights"):
        scratch.keep(np.ones(LARGE_BYTES))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cant_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PlanError, match="can't write to"):
        Scratch(tmp_path)


@pytest.mark.parametrize("opset", [13, 21])  # converted, and taken as it is
def test_import_keeps_large_constants_on_disk(tmp_path: Path, opset: int) -> None:
    weights = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    model = import_model(dense(tmp_path / "model.onnx", weights, opset), scratch=tmp_path)
    value = model.model.graph.initializers["w"]
    assert value.const_value is not None
    found = value.const_value.numpy()
    np.testing.assert_array_equal(found, weights)
    assert not found.flags.writeable, "it is a copy in memory"
    assert [v.name for v in model.model.graph.inputs] == ["x"]
    assert model.original.tobytes() == (tmp_path / "model.onnx").read_bytes()


def test_partition_of_a_wide_layer_takes_a_few_times_its_bytes(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal(WIDE, np.float32)
    dense(tmp_path / "model.onnx", weights)
    program = """
import sys, threading, time
peak, ended = 0, False
def watch():
    global peak
    while not ended:
        lines = open("/proc/self/status").read().splitlines()
        peak = max(peak, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))
        time.sleep(0.002)
watching = threading.Thread(target=watch)
watching.start()
import heinfer
heinfer.partition(sys.argv[1], sys.argv[2])
ended = True
watching.join()
print(1024 * peak)
"""
    command = [sys.executable, "-c", program, tmp_path / "model.onnx", tmp_path / "bundle"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=120, check=True)
    used = int(done.stdout) - 250 * MB  # Python and its libraries, kernels compiled
    assert used < 4 * weights.nbytes, f"{used / MB:.0f} MB for weights of {weights.nbytes / MB:.0f} MB"


def test_tiles_change_no_weight_and_no_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    window = Window((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (5, 5))
    steps = [
        (Program(((11,),), (MatMul(0, "w", (7,)),), (1,)), rng.normal(size=(11, 7))),
        (Program(((3, 5, 5),), (Conv(0, "w", window, 1, (6, 5, 5)),), (1,)), rng.normal(size=(6, 3, 3, 3))),
        (Program(((4, 5, 5),), (Conv(0, "w", window, 2, (6, 5, 5)),), (1,)), rng.normal(size=(6, 2, 3, 3))),
    ]
    for program, weights in steps:
        for digits in (1, 2):
            whole = quantise_program(program, {"w": weights}, digits)
            with monkeypatch.context() as patch:
                patch.setattr(plain, "TILE_WEIGHTS", 20)
                tiled = quantise_program(program, {"w": weights}, digits)
            assert tiled.row_sum == whole.row_sum
            for name, array in whole.arrays.items():
                np.testing.assert_array_equal(tiled.arrays[name], array)
            for ours, theirs in zip(tiled.norms[0], whole.norms[0], strict=True):
                for field in ("scale", "l1", "l2", "rounding", "input_rounding"):
                    np.testing.assert_allclose(getattr(ours, field), getattr(theirs, field), rtol=1e-14)


def test_tiles_change_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, parameters = np.random.default_rng(0), RingParameters.default()
    weights = rng.integers(-32767, 32768, (11, 7)).astype(np.int16)
    program = Program(((11,),), (MatMul(0, "w", (7,)),), (1,))
    outputs = rng.integers(0, parameters.modulus, 7)
    x = rng.normal(size=(3, 11))
    back = apply_transpose(program, {"w": weights}, [outputs], parameters)[0]
    monkeypatch.setattr(transposed, "TILE_WEIGHTS", 20)
    monkeypatch.setattr(plain, "TILE_WEIGHTS", 20)
    np.testing.assert_array_equal(apply_transpose(program, {"w": weights}, [outputs], parameters)[0], back)
    np.testing.assert_allclose(plain.evaluate_plain(program, {"w": weights}, [x])[0], x @ weights, rtol=1e-14)
