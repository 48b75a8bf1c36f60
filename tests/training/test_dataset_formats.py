"""Every format is read as it is meant, and what is not of the format is refused. On files made up here."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.datasets.loading import load_dataset
from heinfer.training.recipe import DataSource, Normalisation

Arrays = dict[str, NDArray[Any]]
GENERATOR = np.random.default_rng(3)


def source(**settings: Any) -> DataSource:
    return DataSource(**{"name": "Synthetic", "license": "CC0", "credit": "nobody", **settings})


def make_arrays(shape: tuple[int, ...] = (28, 28)) -> Arrays:
    arrays: Arrays = {}
    for part, count in (("train", 6), ("val", 4), ("test", 3)):
        arrays[f"{part}_images"] = GENERATOR.integers(0, 256, (count, *shape), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count, dtype=np.uint8) % 3
    return arrays


def write_archive(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> Path:
    path = folder / "data.npz"
    np.savez(path, **dict(arrays))  # type: ignore[arg-type]
    return path


# ---- .npz


def test_archive_of_grey_images_gives_its_arrays(tmp_path: Path) -> None:
    arrays = make_arrays()
    data = load_dataset(source(), write_archive(tmp_path, arrays))
    np.testing.assert_array_equal(data.train.inputs[:, 0], arrays["train_images"])
    np.testing.assert_array_equal(data.test.labels, arrays["test_labels"])
    assert data.classes == 3
    assert len(data.train) == 6  # without the validation part


def test_archive_validation_part_is_merged_on_request(tmp_path: Path) -> None:
    arrays = make_arrays()
    data = load_dataset(source(merge_validation=True), write_archive(tmp_path, arrays))
    np.testing.assert_array_equal(data.train.inputs[6:, 0], arrays["val_images"])
    np.testing.assert_array_equal(data.train.labels[6:], arrays["val_labels"])
    del arrays["val_labels"]
    with pytest.raises(InputError, match="lacks val_labels"):
        load_dataset(source(merge_validation=True), write_archive(tmp_path, arrays))


@pytest.mark.parametrize("channels_first", [False, True])
def test_archive_of_colour_images_brings_channels_first(tmp_path: Path, channels_first: bool) -> None:
    arrays = make_arrays((16, 12, 3))
    expected = arrays["train_images"].transpose(0, 3, 1, 2)
    if channels_first:
        arrays = {k: v.transpose(0, 3, 1, 2) if v.ndim == 4 else v for k, v in arrays.items()}
    data = load_dataset(source(), write_archive(tmp_path, arrays))
    np.testing.assert_array_equal(data.train.inputs, expected)
    assert data.input_shape == (3, 16, 12)


def test_archive_other_keys_and_label_columns_are_found(tmp_path: Path) -> None:
    arrays = make_arrays()
    renamed = {
        "x_train": arrays["train_images"],
        "y_train": arrays["train_labels"][:, np.newaxis],  # as MedMNIST has them
        "x_test": arrays["test_images"],
        "y_test": arrays["test_labels"][:, np.newaxis],
    }
    keras = load_dataset(source(), write_archive(tmp_path, renamed))
    np.testing.assert_array_equal(keras.train.labels, arrays["train_labels"])
    arrays["pictures"] = arrays.pop("train_images")
    named = load_dataset(source(train_images="pictures"), write_archive(tmp_path, arrays))
    assert named.fingerprint() == keras.fingerprint()


def test_archive_table_needs_declared_ranges(tmp_path: Path) -> None:
    arrays = make_arrays()
    for part, count in (("train", 6), ("test", 3)):
        arrays[f"{part}_images"] = GENERATOR.uniform(size=(count, 2))
    path = write_archive(tmp_path, arrays)
    with pytest.raises(InputError, match=r"no bounds for 2 columns \(0, 1"):
        load_dataset(source(), path)
    assert load_dataset(source(range=(0, 1), ranges={"1": (0, 2)}), path).ranges == ((0, 1), (0, 2))
    assert load_dataset(source(normalise=Normalisation.NONE), path).ranges == ()


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train_images", np.zeros((6, 28, 28), np.float32), "train_images: expected images"),
        ("test_images", np.zeros((3, 784), np.uint8), "test_images: expected images"),
        ("test_images", np.zeros((3, 32, 32), np.uint8), "expected one shape"),
        ("train_labels", np.zeros(5, np.uint8), r"labels: .*\(6,\)"),
        ("test_labels", np.zeros(3), "test_labels: expected integer labels"),
        ("test_labels", np.zeros((3, 2), np.uint8), "test_labels: expected integer labels"),
        ("train_labels", np.array([{"a": 1}] * 6, dtype=object), "plain arrays"),
    ],
)
def test_archive_with_unfit_array_is_refused(tmp_path: Path, name: str, array: NDArray[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_dataset(source(), write_archive(tmp_path, {**make_arrays(), name: array}))


def test_archive_missing_keys_names_them_and_those_present(tmp_path: Path) -> None:
    arrays = make_arrays()
    del arrays["test_images"], arrays["test_labels"]
    with pytest.raises(InputError, match=r"lacks test_images, test_labels; it holds train_images, train_labels"):
        load_dataset(source(), write_archive(tmp_path, arrays))


def test_archive_that_is_none_says_so(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(b"not an archive")
    with pytest.raises(InputError, match=r"not an \.npz file"):
        load_dataset(source(), path)
    with pytest.raises(InputError, match=r"absent\.npz"):
        load_dataset(source(), tmp_path / "absent.npz")


# ---- IDX


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    content = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_idx_folder(folder: Path, arrays: Arrays, mark: str = "-", ending: str = "") -> Path:
    for prefix, part in (("train", "train"), ("t10k", "test")):
        write_idx(folder / f"{prefix}-images{mark}idx3-ubyte{ending}", arrays[f"{part}_images"])
        write_idx(folder / f"{prefix}-labels{mark}idx1-ubyte{ending}", arrays[f"{part}_labels"])
    return folder


@pytest.mark.parametrize(("mark", "ending"), [("-", ""), (".", ""), ("-", ".gz")])
def test_idx_folder_gives_the_data_of_the_archive(tmp_path: Path, mark: str, ending: str) -> None:
    arrays = make_arrays()
    expected = load_dataset(source(), write_archive(tmp_path, arrays))
    folder = tmp_path / "idx"
    folder.mkdir()
    found = load_dataset(source(), write_idx_folder(folder, arrays, mark, ending))
    assert found.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"\0\0\x08\x01" + bytes(12), "with 3 axes, found 00 00 08 01"),
        ("train-images-idx3-ubyte", b"\0\0", "found 00 00"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\3\0\1", r"states 3 values, of shape \(3,\); found 2"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\3\0\1\2\0", "states 3 values, .* found more"),
        ("t10k-labels-idx1-ubyte", None, "lacks t10k-labels-idx1-ubyte"),
    ],
)
def test_idx_file_that_is_damaged_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    folder = write_idx_folder(tmp_path, make_arrays())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_dataset(source(), folder)


def test_idx_file_that_is_not_gzip_is_refused(tmp_path: Path) -> None:
    folder = write_idx_folder(tmp_path, make_arrays(), ending=".gz")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(b"not compressed")
    with pytest.raises(InputError, match="cannot read"):
        load_dataset(source(), folder)


# ---- CIFAR-10


def write_cifar(folder: Path) -> Arrays:
    folder.mkdir(parents=True)
    arrays: Arrays = {}
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        labels = np.array([2 * number % 10, (2 * number + 1) % 10], np.uint8)
        arrays[name] = GENERATOR.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
        records = [np.append(label, image.ravel()) for label, image in zip(labels, arrays[name], strict=True)]
        np.concatenate(records).astype(np.uint8).tofile(folder / name)
    return arrays


@pytest.mark.parametrize("above", [False, True])
def test_cifar_folder_is_read_in_the_order_of_its_batches(tmp_path: Path, above: bool) -> None:
    arrays = write_cifar(tmp_path / "cifar-10-batches-bin")
    cifar = source(set="cifar10")
    data = load_dataset(cifar, tmp_path if above else tmp_path / "cifar-10-batches-bin")
    np.testing.assert_array_equal(data.train.inputs, np.concatenate(list(arrays.values())[:5]))
    np.testing.assert_array_equal(data.test.inputs, arrays["test_batch.bin"])
    assert data.train.labels.tolist() == list(range(10))
    assert data.class_name(9) == "truck"


def test_cifar_pickles_are_refused_unread(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps(Trap()))
    for path in (folder, tmp_path):
        with pytest.raises(InputError, match=r"python version .* Take the binary version"):
            load_dataset(source(set="cifar10"), path)
    assert not (tmp_path / "sprung").exists()


def test_cifar_batch_of_another_size_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar")
    (tmp_path / "cifar" / "data_batch_3.bin").write_bytes(bytes(3074))
    with pytest.raises(InputError, match=r"data_batch_3\.bin: expected records of 3073 bytes, found 3074"):
        load_dataset(source(), tmp_path / "cifar")
    (tmp_path / "cifar" / "data_batch_3.bin").unlink()
    with pytest.raises(InputError, match=r"cannot read .*data_batch_3\.bin"):
        load_dataset(source(), tmp_path / "cifar")


# ---- folders of images


def write_image(path: Path, mode: str = "L", size: tuple[int, int] = (12, 8)) -> NDArray[np.uint8]:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = GENERATOR.integers(0, 256, (size[1], size[0], 3) if mode == "RGB" else size[::-1], dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return pixels


def write_image_folder(folder: Path, mode: str = "L") -> Arrays:
    names = ("train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "test/cat/7.png", "test/dog/8.png")
    return {name: write_image(folder / name, mode) for name in names}


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_image_folder_is_read_in_the_order_of_its_names(tmp_path: Path, mode: str) -> None:
    arrays = write_image_folder(tmp_path, mode)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    data = load_dataset(source(), tmp_path)
    expected = np.stack(list(arrays.values())[:3])
    expected = expected.transpose(0, 3, 1, 2) if mode == "RGB" else expected[:, np.newaxis]
    np.testing.assert_array_equal(data.train.inputs, expected)
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("name", "mode", "size", "message"),
    [
        ("train/dog/3.png", "L", (8, 12), r"3\.png has shape \(1, 12, 8\).*expected one size"),
        ("test/dog/3.png", "RGB", (12, 8), "expected one size"),
        ("train/dog/3.png", "RGBA", (12, 8), "of mode RGBA"),
        ("train/dog/3.png", "P", (12, 8), "of mode P"),
        ("train/fox/3.png", "L", (12, 8), "fox is a class in one of train and test only"),
    ],
)
def test_image_folder_with_unfit_image_is_refused(
    tmp_path: Path, name: str, mode: str, size: tuple[int, int], message: str
) -> None:
    write_image_folder(tmp_path)
    write_image(tmp_path / name, mode, size)
    with pytest.raises(InputError, match=message):
        load_dataset(source(), tmp_path)


def test_image_folder_with_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "train" / "cat" / "3.jpg").write_bytes(b"\xff\xd8 not an image")
    with pytest.raises(InputError, match=r"3\.jpg is not an image"):
        load_dataset(source(), tmp_path)


# ---- tables


def write_table(path: Path, rows: list[str], header: str = "width,kind,height") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_table_folder_is_read_by_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv", ["1,round,2.5", "3,flat,4e-1"])
    write_table(tmp_path / "test.csv", ["5,round,6"])
    data = load_dataset(source(label="kind", range=(0, 10), ranges={"height": (0, 7)}), tmp_path)
    assert data.feature_names == ("width", "height")
    assert data.class_names == ("flat", "round")
    assert data.ranges == ((0, 10), (0, 7))
    np.testing.assert_array_equal(data.train.inputs, np.array([[1, 2.5], [3, 0.4]], np.float32))
    assert data.train.labels.tolist() == [1, 0]
    named = load_dataset(source(label="kind", range=(0, 10), class_names=("round", "flat")), tmp_path)
    assert named.train.labels.tolist() == [0, 1]


def test_table_of_one_file_is_split_as_declared(tmp_path: Path) -> None:
    path = write_table(tmp_path / "data.csv", [f"{n},{n % 11},{n / 2}" for n in range(110)])
    data = load_dataset(source(label="kind", range=(0, 110), test_fraction=0.2), path)
    assert (len(data.train), len(data.test)) == (88, 22)
    assert data.class_names == tuple(map(str, range(11)))  # by number, not by the alphabet
    rows = [*data.train.inputs[:, 0], *data.test.inputs[:, 0]]
    assert sorted(rows) == list(range(110))
    with pytest.raises(InputError, match="no test part: set test_fraction"):
        load_dataset(source(label="kind", range=(0, 110)), path)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (["1,a,2", "3,b,tall"], {}, r"row 3, column 'height': expected a number, found 'tall'"),
        (["1,a,2", ",b,4"], {}, r"row 3, column 'width': expected a number, found an empty cell"),
        (["1,a,2", "3,b"], {}, "row 3: expected 3 cells, found 2"),
        (["1,a,2", "3,b,nan"] * 4, {}, r"nan at record \d, feature 1 \(height\)"),
        (["1,a,2", "3,b,4"], {"label": "kinds"}, r"no column 'kinds', did you mean 'kind'\?"),
        (["1,a,2", "3,b,4"], {"class_names": ("a", "c")}, r"row 3: label 'b' is none of class_names: a, c"),
        (["1,a,2", "3,b,4"] * 4, {"ranges": {"hight": (0, 1)}}, r"no column 'hight', did you mean 'height'\?"),
        (["1,a,2", "3,a,4"] * 4, {}, "at least 2 classes"),
        ([], {}, "rows below it"),
    ],
)
def test_table_that_is_unfit_is_refused(
    tmp_path: Path, rows: list[str], settings: dict[str, Any], message: str
) -> None:
    path = write_table(tmp_path / "data.csv", rows)
    with pytest.raises(InputError, match=message):
        load_dataset(source(**{"label": "kind", "range": (0, 9), "test_fraction": 0.5, **settings}), path)


def test_table_parts_with_other_columns_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv", ["1,a,2"])
    write_table(tmp_path / "test.csv", ["1,a,2"], header="height,kind,width")
    with pytest.raises(InputError, match="have other columns"):
        load_dataset(source(label="kind"), tmp_path)


# ---- known sets


def load_known(name: str, path: Path | None = None, **settings: Any) -> Dataset:
    return load_dataset(source(set=name, **settings), path)


def test_breast_cancer_is_split_and_lies_in_its_published_ranges() -> None:
    data = load_known("breast_cancer")
    assert (len(data.train), len(data.test), data.input_shape) == (456, 113, (30,))  # 71 and 42 of 357 and 212
    assert data.class_names == ("malignant", "benign")
    low, high = np.array(data.ranges).T
    rows = np.concatenate([data.train.inputs, data.test.inputs])
    assert np.all(rows >= low)
    assert np.all(rows <= high)
    assert np.all(rows.max(axis=0) - rows.min(axis=0) > 0.7 * (high - low))  # rounded outwards, by little
    assert data.feature_names[0] == "mean radius"


def test_digits_are_images_of_whole_range() -> None:
    data = load_known("digits")
    assert (len(data.train) + len(data.test), data.input_shape, data.classes) == (1797, (1, 8, 8), 10)
    assert (data.train.inputs.min(), data.train.inputs.max()) == (0, 255)
    assert len(np.unique(data.train.inputs)) == 17


def test_pneumoniamnist_leaves_the_validation_part_out(shared: Path) -> None:
    path = shared / "data" / "pneumoniamnist.npz"
    data = load_known("pneumoniamnist", path)
    assert np.bincount(data.train.labels).tolist() == [1214, 3494]
    assert len(data.test) == 624
    assert len(load_known("pneumoniamnist", path, merge_validation=True).train) == 4708 + 524


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("digits", {"path": "digits.npz"}, "comes with scikit-learn; leave the path out"),
        ("mnist", {}, "name a file or folder"),
        ("digits", {"range": (0, 1)}, "are for tables"),
    ],
)
def test_known_set_with_unfit_settings_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_known(name, **settings)


def test_known_set_of_other_records_is_refused(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["train_images"], arrays["test_images"] = (
        GENERATOR.integers(0, 256, (10, 20, 20), dtype=np.uint8) for _ in "ab"
    )
    arrays["train_labels"] = arrays["test_labels"] = np.arange(10, dtype=np.uint8)
    with pytest.raises(InputError, match=r"mnist has records of shape \(1, 28, 28\), found \(1, 20, 20\)"):
        load_known("mnist", write_archive(tmp_path, arrays))


def test_folder_without_known_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no data set that is known"):
        load_dataset(source(), tmp_path)
    with pytest.raises(InputError, match="it does not exist"):
        load_dataset(source(), tmp_path / "absent")
