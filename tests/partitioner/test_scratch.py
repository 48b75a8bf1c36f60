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

from heinfer.errors import UnsupportedModelError
from heinfer.operators import plain, transposed
from heinfer.operators.program import Program
from heinfer.operators.steps import Conv, MatMul, Window
from heinfer.operators.transposed import apply_transpose
from heinfer.processes import child_environment
from heinfer.ring import RingParameters
from partitioner import scratch
from partitioner.importing import import_model
from partitioner.scaling import quantise_program
from partitioner.scratch import LARGE_BYTES, Scratch
from tests.small_models import product_model

#: Weights of the layer whose memory is watched: 128 MB in float32.
WIDE = (4096, 8192)
MB = 10**6


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LARGE_BYTES", 1)


@pytest.mark.usefixtures("everything_is_large")
def test_keep_returns_the_array_read_only(tmp_path: Path) -> None:
    disk = Scratch(tmp_path)
    for array in (np.arange(7, dtype=np.float32), np.arange(6.0).reshape(2, 3).T):
        kept = disk.keep(array)
        assert kept.dtype == array.dtype
        assert not kept.flags.writeable
        np.testing.assert_array_equal(kept, array)
    assert not list(tmp_path.iterdir()), "the file has a name"


def test_small_arrays_stay_in_memory(tmp_path: Path) -> None:
    before, disk = open_files(), Scratch(tmp_path)
    small = np.arange(7)
    assert disk.keep(small) is small
    assert open_files() == before


@pytest.mark.usefixtures("everything_is_large")
def test_arrays_outlive_their_scratch_and_leave_nothing_open(tmp_path: Path) -> None:
    before = open_files()
    kept = Scratch(tmp_path).keep(np.arange(1000))
    gc.collect()
    np.testing.assert_array_equal(kept, np.arange(1000))
    del kept
    gc.collect()
    assert open_files() == before


def test_scratch_takes_the_closest_folder_that_is_there(tmp_path: Path) -> None:
    Scratch(tmp_path / "not" / "yet").keep(np.ones(LARGE_BYTES))
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("opset", [13, 21])  # converted, and taken as it is
def test_import_keeps_large_constants_on_disk(tmp_path: Path, opset: int) -> None:
    weights = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    model = import_model(product_model(tmp_path / "model.onnx", weights, opset), scratch=tmp_path)
    value = model.model.graph.initializers["only.w"]
    assert value.const_value is not None
    found = value.const_value.numpy()
    np.testing.assert_array_equal(found, weights)
    assert not found.flags.writeable, "it is a copy in memory"
    assert [v.name for v in model.model.graph.inputs] == ["x"]
    assert model.original.tobytes() == (tmp_path / "model.onnx").read_bytes()


def test_large_constants_of_one_name_are_refused(tmp_path: Path) -> None:
    model = onnx.load(product_model(tmp_path / "model.onnx", np.ones((512, 1024))))
    model.graph.initializer.append(model.graph.initializer[0])
    onnx.save(model, tmp_path / "twice.onnx")
    with pytest.raises(UnsupportedModelError, match=r"only\.w"):
        import_model(tmp_path / "twice.onnx")


def test_partition_of_a_wide_layer_takes_a_few_times_its_bytes(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal(WIDE, np.float32)
    product_model(tmp_path / "model.onnx", weights)
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
