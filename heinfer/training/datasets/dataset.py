"""Labelled records, split into a training part, which is private, and a test part.

Images stay uint8 in memory and become multiples of 1/255 in `model_inputs`; tables are float32 and stay what they are:
the network that is trained on them clips and scales them itself, by ranges that are declared and not measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.datasets.registry import Ranges

#: Largest pixel value; the images that a network takes are multiples of its inverse.
PIXEL_MAXIMUM = 255

Inputs = NDArray[np.uint8] | NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Records and their labels.

    Attributes:
        inputs: images, uint8 of shape (records, channels, height, width), or a table, float32 of shape (records,
            features).
        labels: int64, shape (records,).
    """

    inputs: Inputs
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Refuse arrays that are not labelled images or rows of a table with an `InputError`."""
        images = self.inputs.dtype == np.uint8 and self.inputs.ndim == 4
        table = self.inputs.dtype == np.float32 and self.inputs.ndim == 2
        if not images and not table:
            raise InputError(
                "inputs: expected images, uint8 of shape (records, channels, height, width), or a table, float32 of "
                f"shape (records, features), found {self.inputs.dtype} of shape {self.inputs.shape}"
            )
        if self.labels.dtype != np.int64 or self.labels.shape != self.inputs.shape[:1]:
            raise InputError(
                f"labels: expected int64 of shape {self.inputs.shape[:1]}, one for each record, "
                f"found {self.labels.dtype} of shape {self.labels.shape}"
            )
        if not self.inputs.size:
            raise InputError(f"inputs: expected at least one record that is not empty, found shape {self.inputs.shape}")

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)

    def select(self, indices: NDArray[Any]) -> Examples:
        """Return some of the records, given by their numbers or by a mask."""
        return Examples(self.inputs[indices], self.labels[indices])


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A data set that can be trained on.

    Attributes:
        name: the set's name, for messages.
        train: private records.
        test: records that are read once, after the training.
        classes: number of classes; public, as are their names.
        class_names: names of the labels 0, 1, ...; empty where they have none.
        feature_names: names of a table's columns; empty for images.
        ranges: declared bounds of a table's columns; empty for images.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    ranges: Ranges = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be trained on with an `InputError`."""
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            raise InputError(
                f"{self.name}: training records have shape {self.train.inputs.shape[1:]}, test records "
                f"{self.test.inputs.shape[1:]}: expected one shape"
            )
        if self.classes < 2:
            raise InputError(f"{self.name}: expected at least 2 classes, found {self.classes}: nothing to tell apart")
        features = self.train.inputs.shape[1]
        for what, found, expected in (
            ("class_names", len(self.class_names), self.classes),
            ("feature_names", len(self.feature_names), features),
            ("ranges", len(self.ranges), features),
        ):
            if found not in (0, expected):
                raise InputError(f"{self.name}: expected {expected} {what}, found {found}")
        for part, examples in (("train", self.train), ("test", self.test)):
            _check_labels(f"{self.name}, {part} part", examples.labels, self.classes)
            _check_finite(f"{self.name}, {part} part", examples.inputs, self.feature_names)
        missing = np.flatnonzero(np.bincount(self.train.labels, minlength=self.classes) == 0)
        if missing.size:
            names = ", ".join(self.class_name(int(label)) for label in missing)
            raise InputError(f"{self.name}: no training record of class {names}")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record: (channels, height, width) or (features,)."""
        return self.train.inputs.shape[1:]

    @property
    def is_table(self) -> bool:
        """Whether the records are rows of a table, not images."""
        return len(self.input_shape) == 1

    def class_name(self, label: int) -> str:
        """Return a label's name, the number itself where it has none."""
        return self.class_names[label] if self.class_names else str(label)

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of both parts: which data a model was trained and measured on.

        Over name, dtype, shape and bytes of the four arrays, however they were stored: images of one channel as
        (records, height, width), labels as uint8 where 256 classes are enough.
        """
        return _digest((("train", self.train), ("test", self.test)), self.classes)

    def private_fingerprint(self) -> str:
        """SHA-256 of the training part alone: a budget belongs to these records, whatever they are tested on."""
        return _digest((("train", self.train),), self.classes)


def model_inputs(inputs: Inputs) -> NDArray[np.float32]:
    """Records as a network and its exported model take them.

    Args:
        inputs: as in `Examples`.

    Returns:
        float32 of the same shape: pixels as multiples of 1/255 in [0, 1], tables as they are.
    """
    if inputs.dtype == np.uint8:
        return inputs.astype(np.float32) / np.float32(PIXEL_MAXIMUM)
    return np.asarray(inputs, np.float32)


def count_duplicates(examples: Examples) -> int:
    """Count records that repeat an earlier one exactly, label included.

    Someone whose record is there twice is protected for one of them only; the count itself is a private value.
    """
    labels = examples.labels[:, np.newaxis].view(np.uint8)
    pairs = zip(_rows(examples), labels, strict=True)
    return len(examples) - len({hashlib.sha256(row.tobytes() + label.tobytes()).digest() for row, label in pairs})


def record_digests(examples: Examples) -> set[bytes]:
    """Return the SHA-256 of every record's inputs, without its label: to find records that two data sets share."""
    return {hashlib.sha256(row.tobytes()).digest() for row in _rows(examples)}


def _rows(examples: Examples) -> NDArray[np.uint8]:
    """The bytes of every record's inputs, shape (records, bytes)."""
    return np.ascontiguousarray(examples.inputs).reshape(len(examples), -1).view(np.uint8)


def _check_labels(where: str, labels: NDArray[np.int64], classes: int) -> None:
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if outside.size:
        raise InputError(
            f"{where}: expected labels from 0 to {classes - 1}, found {labels[outside[0]]} at record {outside[0]} "
            f"(and {outside.size - 1} more); labels are numbered from 0"
        )


def _check_finite(where: str, inputs: Inputs, names: Sequence[str]) -> None:
    if inputs.dtype == np.uint8 or np.isfinite(inputs).all():
        return
    row, column = (int(index) for index in np.argwhere(~np.isfinite(inputs))[0])
    name = f" ({names[column]})" if names else ""
    raise InputError(
        f"{where}: {inputs[row, column]} at record {row}, feature {column}{name}; expected finite numbers: remove the "
        "record or fill in a value that does not depend on the other records"
    )


def _digest(parts: Sequence[tuple[str, Examples]], classes: int) -> str:
    digest = hashlib.sha256()
    for part, examples in parts:
        images = examples.inputs.dtype == np.uint8
        inputs = examples.inputs[:, 0] if images and examples.inputs.shape[1] == 1 else examples.inputs
        labels = examples.labels.astype(np.uint8) if classes <= 256 else examples.labels
        for name, array in (("images" if images else "features", inputs), ("labels", labels)):
            digest.update(f"{part}_{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
