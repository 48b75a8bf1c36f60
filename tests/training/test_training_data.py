"""Data files that cannot be trained on are refused with a message that says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.data import ImageData, as_unit_range, load_images
from heinfer.training.recipe import DataSource

SOURCE = DataSource(name="Synthetic", license="CC0", credit="nobody")
Arrays = dict[str, NDArray[np.generic]]


def make_arrays() -> Arrays:
    generator = np.random.default_rng(3)
    return {
        "train_images": generator.integers(0, 256, (6, 28, 28), dtype=np.uint8),
        "train_labels": np.arange(6, dtype=np.uint8),
        "test_images": generator.integers(0, 256, (4, 28, 28), dtype=np.uint8),
        "test_labels": np.arange(4, dtype=np.uint8),
    }


def write(folder: Path, arrays: Arrays) -> Path:
    path = folder / "data.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_load_images_complete_file_gives_its_arrays(tmp_path: Path) -> None:
    arrays = make_arrays()
    data = load_images(write(tmp_path, arrays), SOURCE)
    for name, expected in arrays.items():
        np.testing.assert_array_equal(getattr(data, name), expected)


def test_load_images_other_keys_follow_the_source(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["x"] = arrays.pop("train_images")
    data = load_images(
        write(tmp_path, arrays), DataSource(name="Synthetic", license="CC0", credit="nobody", train_images="x")
    )
    np.testing.assert_array_equal(data.train_images, arrays["x"])


def test_load_images_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.npz"):
        load_images(tmp_path / "absent.npz", SOURCE)


def test_load_images_missing_keys_names_them_and_those_present(tmp_path: Path) -> None:
    arrays = make_arrays()
    del arrays["test_images"], arrays["test_labels"]
    with pytest.raises(InputError, match=r"lacks test_images, test_labels; it holds train_images, train_labels"):
        load_images(write(tmp_path, arrays), SOURCE)


def test_load_images_not_an_archive_says_so(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(b"not an archive")
    with pytest.raises(InputError, match=r"not an \.npz file"):
        load_images(path, SOURCE)


def test_load_images_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["train_labels"] = np.array([{"a": 1}] * 6, dtype=object)
    with pytest.raises(InputError, match="plain arrays"):
        load_images(write(tmp_path, arrays), SOURCE)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train_images", np.zeros((6, 28, 28), np.float32), "train images: expected uint8"),
        ("test_images", np.zeros((4, 784), np.uint8), "test images: expected uint8 of shape"),
        ("train_labels", np.zeros(5, np.uint8), r"train labels: .*\(6,\)"),
        ("test_labels", np.zeros(4, np.int64), "test labels: expected uint8"),
        ("test_images", np.zeros((4, 32, 32), np.uint8), "expected one size"),
    ],
)
def test_load_images_unfit_array_is_refused(
    tmp_path: Path, name: str, array: NDArray[np.generic], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_images(write(tmp_path, {**make_arrays(), name: array}), SOURCE)


@pytest.mark.parametrize(
    ("image_shape", "classes", "held_out", "message"),
    [
        ((3, 32, 32), 10, 0, "takes images of shape"),
        ((1, 28, 28), 5, 0, "a label 5"),
        ((1, 28, 28), 10, 6, "held_out_images = 6"),
    ],
)
def test_require_network_that_does_not_fit_is_refused(
    image_shape: tuple[int, int, int], classes: int, held_out: int, message: str
) -> None:
    data = ImageData(**make_arrays())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        data.require(image_shape, classes, held_out)


def test_fingerprint_depends_on_content_not_on_storage(tmp_path: Path) -> None:
    arrays = make_arrays()
    plain = load_images(write(tmp_path, arrays), SOURCE).fingerprint()
    packed = tmp_path / "packed.npz"
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    assert load_images(packed, SOURCE).fingerprint() == plain

    changed = arrays["test_labels"].copy()
    changed[0] = 9
    assert load_images(write(tmp_path, {**arrays, "test_labels": changed}), SOURCE).fingerprint() != plain


def test_as_unit_range_every_pixel_value_is_recovered_exactly() -> None:
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    values = as_unit_range(pixels)
    assert values.shape == (1, 1, 16, 16)
    assert values.dtype == np.float32
    assert (values.min(), values.max()) == (0.0, 1.0)
    np.testing.assert_array_equal(np.rint(values * 255).astype(np.uint8)[:, 0], pixels)
