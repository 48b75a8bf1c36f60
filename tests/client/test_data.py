"""Data sets and queries from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from heinfer.client.data import fit, load_data, load_query
from heinfer.errors import InputError
from heinfer.plan import TensorSpec

IMAGES = TensorSpec("x", (1, 4, 4))
COUNTS = TensorSpec("x", (3,), "int64")


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


def test_load_data_reads_samples_and_labels(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((5, 1, 4, 4), np.float32)
    loaded = load_data(save(tmp_path / "d.npz", x=x, y=np.arange(5, dtype=np.uint8)), IMAGES)
    assert np.array_equal(loaded.x, x)
    assert loaded.y is not None
    assert loaded.y.tolist() == [0, 1, 2, 3, 4]
    assert loaded.notes == ()


def test_load_data_without_labels_has_none(tmp_path: Path) -> None:
    assert load_data(save(tmp_path / "d.npz", x=np.zeros((5, 1, 4, 4))), IMAGES).y is None


def test_load_data_takes_arrays_of_other_names_and_samples_from_the_front(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", images=np.arange(80.0).reshape(5, 1, 4, 4), classes=np.arange(5), y=np.zeros(5))
    loaded = load_data(path, IMAGES, x_key="images", y_key="classes", samples=2)
    assert loaded.x.shape == (2, 1, 4, 4)
    assert loaded.y is not None
    assert loaded.y.tolist() == [0, 1]
    assert loaded.x.dtype == np.float32


def test_load_data_more_samples_than_there_are_is_said(tmp_path: Path) -> None:
    loaded = load_data(save(tmp_path / "d.npz", x=np.zeros((2, 1, 4, 4)), y=np.zeros(2, int)), IMAGES, samples=9)
    assert len(loaded.x) == 2
    assert "9" in loaded.notes[0]


@pytest.mark.parametrize("keys", [{"x_key": "images"}, {"y_key": "classes"}])
def test_load_data_missing_array_is_refused_with_the_names_there_are(tmp_path: Path, keys: dict[str, str]) -> None:
    path = save(tmp_path / "d.npz", x=np.zeros((2, 1, 4, 4)), y=np.zeros(2, int))
    with pytest.raises(InputError, match=r"no array '(images|classes)', but \['x', 'y'\]"):
        load_data(path, IMAGES, **keys)


@pytest.mark.parametrize("labels", [np.zeros(3, int), np.zeros(2), np.zeros((2, 2), int), np.array(["a", "b"])])
def test_load_data_labels_that_are_not_one_integer_a_sample_are_refused(tmp_path: Path, labels: np.ndarray) -> None:
    path = save(tmp_path / "d.npz", x=np.zeros((2, 1, 4, 4)), y=labels)
    with pytest.raises(InputError, match="labels must be 2 integers"):
        load_data(path, IMAGES)


def test_load_data_labels_in_a_column_are_flattened(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", x=np.zeros((2, 1, 4, 4)), y=np.array([[3], [4]]))
    loaded = load_data(path, IMAGES)
    assert loaded.y is not None
    assert loaded.y.tolist() == [3, 4]


def broken_file(path: Path, kind: str) -> Path:
    """Write one of the files that are no data set."""
    whole = save(path.with_suffix(".whole.npz"), x=np.random.default_rng(0).random((20, 1, 4, 4))).read_bytes()
    match kind:
        case "missing":
            pass
        case "folder":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("x,y\n1,2\n")
        case "truncated":
            path.write_bytes(whole[: len(whole) // 2])
        case "damaged":
            at = len(whole) // 2
            path.write_bytes(whole[:at] + bytes(b ^ 0xFF for b in whole[at : at + 8]) + whole[at + 8 :])
        case "one array":
            np.save(path.with_suffix(".npy"), np.zeros((2, 1, 4, 4)))
            path.with_suffix(".npy").rename(path)
        case "objects":
            np.savez(path, x=np.array([{}, []], object), allow_pickle=True)
    return path


KINDS = ["missing", "folder", "empty", "text", "truncated", "damaged", "one array", "objects"]


@pytest.mark.parametrize("kind", KINDS)
def test_load_data_what_is_no_npz_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputError, match="npz"):
        load_data(broken_file(tmp_path / "d.npz", kind), IMAGES)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "one array"])
def test_load_query_what_is_no_npy_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputError, match="npy"):
        load_query(broken_file(tmp_path / "q.npy", kind), IMAGES)


def test_load_query_pickled_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", np.array([{}, 1], object), allow_pickle=True)
    with pytest.raises(InputError, match="npy"):
        load_query(tmp_path / "q.npy", IMAGES)


def test_load_query_header_that_announces_more_than_memory_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000000), }\n"
    (tmp_path / "q.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InputError, match="npy"):
        load_query(tmp_path / "q.npy", IMAGES)


def test_load_query_one_sample_gets_a_batch_axis(tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", np.ones((1, 4, 4), np.float32))
    loaded = load_query(tmp_path / "q.npy", IMAGES)
    assert loaded.x.shape == (1, 1, 4, 4)
    assert "one sample" in loaded.notes[0]


@pytest.mark.parametrize(("shape", "expected"), [((1, 4, 4), (4, 4)), ((4, 1, 3), (4, 3)), ((4, 3, 1), (4, 3))])
def test_fit_missing_axis_of_length_one_is_added_and_said(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).random((6, *expected), np.float32)
    fitted, notes = fit(x, TensorSpec("x", shape))
    assert np.array_equal(fitted, x.reshape(6, *shape))
    assert len(notes) == 1
    assert "axis" in notes[0]


@pytest.mark.parametrize("shape", [(), (6,), (6, 5, 4), (6, 1, 4, 5), (6, 2, 4, 4), (6, 1, 1, 4, 4)])
def test_fit_wrong_shape_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"expected shape \(samples, 1, 4, 4\), found \("):
        fit(np.zeros(shape, np.float32), IMAGES)


def test_fit_divide_scales_integers() -> None:
    fitted, _ = fit(np.full((2, 1, 4, 4), 51, np.uint8), IMAGES, divide=255)
    assert fitted.dtype == np.float32
    assert np.array_equal(fitted, np.full((2, 1, 4, 4), np.float32(0.2)))


@pytest.mark.parametrize("divide", [0, -1, np.nan, np.inf])
def test_fit_divisor_that_is_not_positive_is_refused(divide: float) -> None:
    with pytest.raises(InputError, match="divide"):
        fit(np.zeros((2, 1, 4, 4)), IMAGES, divide)


def test_fit_integers_for_a_float_model_are_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match="--divide"):
        fit(np.zeros((2, 1, 4, 4), np.uint8), IMAGES)


@pytest.mark.parametrize("dtype", ["U3", "complex64", "datetime64[s]"])
def test_fit_what_is_no_number_is_refused(dtype: str) -> None:
    with pytest.raises(InputError, match="expected numbers"):
        fit(np.zeros((2, 1, 4, 4), dtype), IMAGES)


def test_fit_float_samples_for_an_integer_model_are_refused() -> None:
    with pytest.raises(InputError, match="expected int64"):
        fit(np.zeros((2, 3)), COUNTS)


def test_fit_no_samples_are_refused() -> None:
    with pytest.raises(InputError, match="no samples"):
        fit(np.zeros((0, 1, 4, 4), np.float32), IMAGES)
