"""CIFAR-10 in its binary version: records of one label and 3072 pixels, red, green and blue plane after another.

The python version holds pickles, which can run any program when they are read; it is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Examples

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
#: What the archives of https://www.cs.toronto.edu/~kriz/cifar.html unpack to.
_BINARY, _PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
_BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = "test_batch.bin"


def read_cifar(folder: Path) -> tuple[Examples, Examples]:
    """Read data_batch_1.bin to data_batch_5.bin and test_batch.bin.

    Args:
        folder: where they lie, or the folder above cifar-10-batches-bin.

    Raises:
        InputError: a file is missing or no whole number of records, or these are the pickles of the python version.
    """
    if (folder / _BINARY).is_dir():
        folder = folder / _BINARY
    if not (folder / _TEST).is_file() and ((folder / "test_batch").is_file() or (folder / _PYTHON).is_dir()):
        raise InputError(
            f"{folder} holds the python version of CIFAR-10, whose files are pickles: reading them could run anything, "
            "so they are not read. Take the binary version, cifar-10-binary.tar.gz, of the same page"
        )
    batches = [_read_batch(folder / name) for name in _BATCHES]
    train = Examples(
        np.concatenate([batch.inputs for batch in batches]), np.concatenate([batch.labels for batch in batches])
    )
    return train, _read_batch(folder / _TEST)


def is_cifar_folder(folder: Path) -> bool:
    """Whether the folder holds CIFAR-10, in either version."""
    names = (_BINARY, _PYTHON, _TEST, "test_batch")
    return any((folder / name).exists() for name in names)


def _read_batch(path: Path) -> Examples:
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not content.size or content.size % _RECORD:
        raise InputError(f"{path}: expected records of {_RECORD} bytes, found {content.size} bytes")
    records = content.reshape(-1, _RECORD)
    return Examples(records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].astype(np.int64))
