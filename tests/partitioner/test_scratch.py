"""Large constants lie on disk while a model is partitioned, and no layer is in memory several times as float64."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from heinfer.errors import HeinferError, PlanError, UnsupportedModelError
from heinfer.operators import plain, transposed
from heinfer.operators.program import Program
from heinfer.operators.steps import Conv, MatMul, Scale, Sum, Take, Window
from heinfer.operators.transposed import apply_transpose
from heinfer.processes import child_environment
from heinfer.ring import RingParameters
from partitioner import scratch
from partitioner.importing import import_model
from partitioner.scaling import quantise_program
from partitioner.scratch import Scratch
from tests.small_models import product_model

#: Weights of the layer whose memory is watched: 128 MB in float32.
WIDE = (4096, 8192)
MB = 10**6


def open_files() -> int:
    gc.collect()
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
    assert open_files() == before


@pytest.mark.usefixtures("everything_is_large")
def test_many_constants_take_few_descriptors(tmp_path: Path) -> None:
    proto = onnx.ModelProto()
    arrays = {f"w{i}": np.full(100 + i, i, np.float32) for i in range(50)}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    before, disk = open_files(), Scratch(tmp_path)
    taken = disk.take_weights(proto)
    assert open_files() <= before + 2
    for name, array in arrays.items():
        np.testing.assert_array_equal(taken[name], array)


@pytest.mark.usefixtures("everything_is_large")
def test_scratch_takes_the_closest_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    make = tempfile.TemporaryFile

    def record(*, dir: Path, buffering: int) -> object:
        folders.append(dir)
        return make(dir=dir, buffering=buffering)

    monkeypatch.setattr(tempfile, "TemporaryFile", record)
    Scratch(tmp_path / "not" / "yet").keep(np.ones(3))
    Scratch(tmp_path).keep(np.ones(3))
    Scratch().keep(np.ones(3))
    assert folders == [tmp_path, tmp_path, Path(tempfile.gettempdir())]
    assert not (tmp_path / "not").exists()


@pytest.mark.usefixtures("everything_is_large")
def test_a_folder_that_cant_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(PlanError, match=f"can't write to {tmp_path}: Permission denied; the model's weights"):
        Scratch(tmp_path).keep(np.ones(3))


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


def copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(proto.SerializeToString())


def spoilt(model: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
    """Models that onnx refuses for what they say of a constant."""
    twice, nameless, both, old, sparse = (copied(model) for _ in range(5))
    twice.graph.initializer.append(model.graph.initializer[0])
    nameless.graph.initializer[0].name = ""
    both.graph.initializer[0].float_data.extend([1.0, 2.0])
    old.ir_version = 3  # initialisers are inputs as well, then
    del old.opset_import[:]
    old.opset_import.append(helper.make_opsetid("", 8))
    values = helper.make_tensor("only.w", TensorProto.FLOAT, [1], [1.0])
    places = helper.make_tensor("places", TensorProto.INT64, [1], [0])
    sparse.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [512 * 1024]))
    return {"twice": twice, "nameless": nameless, "both": both, "old": old, "sparse": sparse}


@pytest.mark.parametrize("case", ["twice", "nameless", "both", "old", "sparse"])
def test_large_constants_are_refused_as_small_ones_are(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = product_model(tmp_path / "model.onnx", np.ones((512, 1024)))
    onnx.save(spoilt(onnx.load(path))[case], path)
    reasons = []
    for limit in (2**30, 2**20):
        monkeypatch.setattr(scratch, "LARGE_BYTES", limit)
        with pytest.raises(UnsupportedModelError) as refusal:
            import_model(path)
        reasons.append(str(refusal.value))
    assert reasons[0] == reasons[1]


def test_large_constant_with_a_segment_stays_where_it_is(tmp_path: Path) -> None:
    path = product_model(tmp_path / "model.onnx", np.ones((512, 1024)))
    model = onnx.load(path)
    model.graph.initializer[0].segment.end = 3
    assert Scratch(tmp_path).take_weights(model) == {}


def test_large_constant_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    path = product_model(tmp_path / "model.onnx", np.ones((512, 1024)))
    path.write_bytes(path.read_bytes().replace(b"only.w", b"\xff\xfe\xff\xfe\xff\xff"))
    with pytest.raises(UnsupportedModelError, match="not a valid ONNX model"):
        import_model(path)


@pytest.mark.usefixtures("everything_is_large")
def test_flipped_bytes_of_a_model_on_disk_are_an_error_of_ours_or_nothing(tmp_path: Path) -> None:
    path = product_model(tmp_path / "model.onnx", np.ones((4, 3)))
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 0xFF
        path.write_bytes(changed)
        with suppress(HeinferError):
            import_model(path)


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
watching = threading.Thread(target=watch, daemon=True)
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


def tiled_programs() -> dict[str, tuple[Program, dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    window = Window((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (5, 5))
    same = Take((0,), "t", (11,))
    conv, rows = rng.normal(size=(6, 3, 3, 3)), rng.normal(size=(11, 7))
    return {
        "matrix": (Program(((11,),), (MatMul(0, "w", (7,)),), (1,)), {"w": rows}),
        "rows": (Program(((3, 11),), (MatMul(0, "w", (3, 7)),), (1,)), {"w": rows.astype(np.float32)}),
        "transposed": (Program(((7,),), (MatMul(0, "w", (11,)),), (1,)), {"w": rows.T}),
        "repeated": (
            Program(((6,),), (same, MatMul(1, "w", (7,))), (2,)),
            {"w": rows, "t": np.arange(11, dtype=np.int32) % 6},
        ),
        "sums": (
            Program(((11,), (11,)), (Sum((0, 1), (1, -1), (11,)), MatMul(2, "w", (7,))), (3,)),
            {"w": rows},
        ),
        "convolution": (Program(((3, 5, 5),), (Conv(0, "w", window, 1, (6, 5, 5)),), (1,)), {"w": conv}),
        "groups": (Program(((6, 5, 5),), (Conv(0, "w", window, 2, (6, 5, 5)),), (1,)), {"w": conv}),
        "elements": (Program(((5,),), (Scale(0, "w", (5,)),), (1,)), {"w": rng.normal(size=5)}),
        "number": (Program(((),), (Scale(0, "w", ()),), (1,)), {"w": np.array(0.3)}),
    }


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("name", tiled_programs())
def test_tiles_change_no_weight_and_no_norm(name: str, digits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, arrays = tiled_programs()[name]
    whole = quantise_program(program, arrays, digits)
    monkeypatch.setattr(plain, "TILE_WEIGHTS", 20)
    tiled = quantise_program(program, arrays, digits)
    assert tiled.row_sum == whole.row_sum
    for key, array in whole.arrays.items():
        np.testing.assert_array_equal(tiled.arrays[key], array)
    for ours, theirs in zip(tiled.norms[0], whole.norms[0], strict=True):
        for field in ("scale", "l1", "l2", "rounding", "input_rounding"):
            np.testing.assert_allclose(getattr(ours, field), getattr(theirs, field), rtol=1e-13)  # sums of 12 terms


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
    room = 11 * np.finfo(np.float64).eps * (np.abs(x) @ np.abs(weights))
    assert np.all(np.abs(plain.evaluate_plain(program, {"w": weights}, [x])[0] - x @ weights) <= room)
