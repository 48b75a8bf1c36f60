"""Files of a bundle that are wrong in ways that no careless tool makes; found by tests/fuzz."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from heinfer.errors import PlanError
from heinfer.operators import Program
from heinfer.operators.steps import LARGEST_VALUE, MatMul
from heinfer.plan import load_node
from heinfer.plan.files import read_arrays


def write_tensors(path: Path, kind: str, shape: list[int], size: int) -> Path:
    header = json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    return path


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F4", "I4", "none"])
def test_arrays_of_a_type_that_numpy_lacks_are_refused(kind: str, tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "a.safetensors", kind, [4], 4)
    with pytest.raises(PlanError, match="is not a safetensors file"):
        read_arrays(path)
    assert read_arrays(write_tensors(path, "U8", [4], 4))["a"].shape == (4,)


def test_hints_of_a_type_that_numpy_lacks_are_refused(dense_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dense_bundle / "node", tmp_path / "node"))
    write_tensors(folder / "hints.safetensors", "F8_E4M3", [4], 4)
    with pytest.raises(PlanError, match="is not a safetensors file"):
        load_node(folder)


@pytest.mark.parametrize("length", [LARGEST_VALUE + 1, 2**40, 2**63, 10**30])
def test_program_with_a_value_that_nobody_could_hold_is_refused(length: int) -> None:
    """Its tables of indices would be as large as it says, before one weight is read."""
    with pytest.raises(PlanError, match="is too large"):
        Program(((length, 3),), (MatMul(0, "w", (length, 2)),), (1,))
    with pytest.raises(PlanError, match="is too large"):
        Program(((0, length),), (MatMul(0, "w", (0, 2)),), (1,))
    Program(((LARGEST_VALUE // 4, 3),), (MatMul(0, "w", (LARGEST_VALUE // 4, 2)),), (1,))
