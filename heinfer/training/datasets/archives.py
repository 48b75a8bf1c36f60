"""Data sets as one .npz archive: four plain arrays, six where there is a validation part (as in MedMNIST)."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Examples, Inputs
from heinfer.training.settings import DataSource

_Named = tuple[str, NDArray[Any]]

#: Keys of the recipe, where it names none.
_DEFAULT = ("train_images", "train_labels", "test_images", "test_labels")
#: Keys of archives that Keras made, tried where those of the recipe, left at their defaults, are absent.
_KERAS = ("x_train", "y_train", "x_test", "y_test")
_VALIDATION = ("val_images", "val_labels")


def read_archive(path: Path, source: DataSource) -> tuple[Examples, Examples]:
    """Read training and test part.

    Args:
        path: an .npz file.
        source: names the keys, and says whether the validation part is trained on.

    Raises:
        InputError: the file is missing or not an .npz file, a key is missing, or an array is no images, table or
            labels.
    """
    train_inputs, train_labels, test_inputs, test_labels, *validation = _load(path, source)
    train, test = _to_examples(train_inputs, train_labels), _to_examples(test_inputs, test_labels)
    if not validation:
        return train, test
    more = _to_examples(*validation)
    if more.inputs.shape[1:] != train.inputs.shape[1:]:
        raise InputError(
            f"{path}: validation records have shape {more.inputs.shape[1:]}, training records "
            f"{train.inputs.shape[1:]}: expected one shape"
        )
    merged = np.concatenate([train.inputs, more.inputs])
    return Examples(merged, np.concatenate([train.labels, more.labels])), test


def _load(path: Path, source: DataSource) -> list[_Named]:
    """Read inputs and labels of training part, test part and, where it is asked for, validation part."""
    keys = (source.train_images, source.train_labels, source.test_images, source.test_labels)
    try:
        with zipfile.ZipFile(path) as archive:
            present = {name.removesuffix(".npy") for name in archive.namelist()}
        if keys == _DEFAULT and present.isdisjoint(keys) and present.issuperset(_KERAS):
            keys = _KERAS
        wanted = (*keys, *(_VALIDATION if source.merge_validation else ()))
        missing = [key for key in wanted if key not in present]
        if missing:
            raise InputError(
                f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(present)) or 'nothing'}. "
                "Name its keys in the recipe's table [data]"
            )
        with np.load(path, allow_pickle=False) as arrays:
            return [(key, arrays[key]) for key in wanted]
    except OSError as error:
        raise InputError(f"cannot read the data {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError) as error:
        raise InputError(f"{path} is not an .npz file of plain arrays: {error}") from error


def _to_examples(inputs: _Named, labels: _Named) -> Examples:
    return Examples(to_inputs(*inputs), to_labels(*labels))


def to_inputs(name: str, array: NDArray[Any]) -> Inputs:
    """Bring images to (records, channels, height, width), and tables to float32.

    Args:
        name: of the array, for messages.
        array: uint8 images, grey (records, height, width) or with 1 or 3 channels last or first; or a table of
            floating-point numbers, shape (records, features).

    Raises:
        InputError: neither of these.
    """
    if array.dtype == np.uint8 and array.ndim == 3:
        return array[:, np.newaxis]
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3):
        return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[1] in (1, 3):
        return array
    if array.dtype.kind == "f" and array.ndim == 2:
        return array.astype(np.float32)
    raise InputError(
        f"{name}: expected images, uint8 of shape (records, height, width) or with 1 or 3 channels, or a table of "
        f"floating-point numbers of shape (records, features), found {array.dtype} of shape {array.shape}"
    )


def to_labels(name: str, array: NDArray[Any]) -> NDArray[np.int64]:
    """Bring integer labels, shape (records,) or (records, 1), to int64.

    Raises:
        InputError: the labels are no integers, or of another shape.
    """
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.dtype.kind not in "iu" or flat.ndim != 1:
        raise InputError(
            f"{name}: expected integer labels of shape (records,), found {array.dtype} of shape {array.shape}; number "
            "the classes from 0"
        )
    return flat.astype(np.int64)
