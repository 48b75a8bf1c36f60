"""Data sets as the four IDX files of MNIST (LeCun et al., http://yann.lecun.com/exdb/mnist/), plain or gzip.

A file begins with 0, 0, 8 (for uint8) and the number d of its axes; then come d sizes as big-endian 32-bit integers,
then the values.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Examples

_UINT8 = 8
#: Name of each part's files: MNIST, Fashion-MNIST and most that imitate them.
_PREFIXES = {"train": "train", "test": "t10k"}


def read_idx_folder(folder: Path) -> tuple[Examples, Examples]:
    """Read train-images-idx3-ubyte, train-labels-idx1-ubyte, and t10k- for the test part; .gz or not.

    Raises:
        InputError: a file is missing, or is not what its name says.
    """
    parts = []
    for prefix in _PREFIXES.values():
        images = read_idx(_find(folder, f"{prefix}-images", 3), axes=3)
        labels = read_idx(_find(folder, f"{prefix}-labels", 1), axes=1)
        parts.append(Examples(images[:, np.newaxis], labels.astype(np.int64)))
    train, test = parts
    return train, test


def is_idx_folder(folder: Path) -> bool:
    """Whether the folder holds IDX files under the names of MNIST."""
    return any(folder.glob("train-images?idx3-ubyte*"))


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Read one file of uint8 values.

    Args:
        path: plain, or compressed if the name ends in .gz.
        axes: number of axes that it must have.

    Raises:
        InputError: the file is not an IDX file of uint8 with that many axes, or its length is not what it states.
    """
    start = 4 + 4 * axes
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(start)
            if len(header) < start or header[:4] != bytes((0, 0, _UINT8, axes)):
                raise InputError(f"{path}: expected an IDX file of uint8 with {axes} axes, found {header[:4].hex(' ')}")
            shape = struct.unpack(f">{axes}I", header[4:])
            values = file.read(prod(shape) + 1)  # one more than stated, which must not be there
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if len(values) != prod(shape):
        found = "more" if len(values) > prod(shape) else str(len(values))
        raise InputError(f"{path} states {prod(shape)} values, of shape {shape}; found {found}")
    return np.frombuffer(values, np.uint8).reshape(shape).copy()  # torch warns of arrays that can't be written to


def _find(folder: Path, stem: str, axes: int) -> Path:
    """Find a file with a hyphen or a dot before `idx`, compressed or not."""
    names = [f"{stem}{mark}idx{axes}-ubyte{ending}" for ending in ("", ".gz") for mark in "-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder} lacks {names[0]} (or .gz); an IDX data set is four files, train- and t10k-")
