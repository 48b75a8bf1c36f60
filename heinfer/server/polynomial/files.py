"""Ciphertexts of deep blocks in files, and the room that they have on the disk.

    budget of 20 GB:  request of 15 GB is let in | one of 15 GB is told to come again | one of 25 GB is refused for good

Files hold what a server may see, and are removed at the end. Room is taken before anything is written: all that a
request will take, from its first row to its answer, follows from its block.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError, ParameterError
from heinfer.units import size as readable
from heinfer.wire import FailureCode, RefusedError

logger = logging.getLogger(__name__)
Residues = NDArray[np.int64]
_WORD: Final = 8
#: What an operator may raise.
OPTION: Final = "--scratch-bytes"


@dataclass(frozen=True, slots=True)
class Store:
    """Ciphertexts of one value, or keys, in a file: int64 residues, shape (elements, 2, primes, N), transformed.

    Attributes:
        path: the file.
        shape: of the array.
    """

    path: Path
    shape: tuple[int, int, int, int]

    def create(self) -> Residues:
        """Make the file, all of it: on a disk that is full, writing to a mapped file of holes would end the process.

        Raises:
            OSError: there is no room.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, stored_bytes(self.shape))
        finally:
            os.close(descriptor)
        return self.open("r+")

    def open(self, mode: str = "r") -> Residues:
        """Map the file."""
        return np.memmap(self.path, np.int64, mode, shape=self.shape)  # type: ignore[call-overload, no-any-return]


def stored_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a file of residues."""
    return _WORD * prod(shape)


class ScratchSpace:
    """Folders for the ciphertexts of requests, and the room that all of them have together; safe to use from threads.

    Args:
        parent: where folders are made; the system's folder for temporary files where None.
        total: bytes; None: as many as the disk gives.

    Raises:
        ParameterError: total is not positive.
    """

    def __init__(self, parent: Path | None = None, total: int | None = None) -> None:
        if total is not None and total < 1:
            raise ParameterError(f"room for ciphertexts must be positive, got {total}; see {OPTION}")
        self.total = total
        self._parent = parent
        self._used = 0
        self._changing = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def check(self, amount: int) -> None:
        """Check that a request would fit if it were alone.

        Raises:
            InputError: it would not.
        """
        if self.total is not None and amount > self.total:
            raise InputError(
                f"a request for a deep block takes {readable(amount)} of disk, and {readable(self.total)} are there "
                f"for all: raise {OPTION}"
            )

    @contextmanager
    def folder(self, amount: int) -> Iterator[Path]:
        """Take room and make a folder, which is removed at the end.

        Raises:
            InputError: it would not fit alone.
            RefusedError: others hold the room.
        """
        self._take(amount)
        try:
            with _folder(self._parent) as made:
                yield made
        finally:
            with self._changing:
                self._used -= amount

    def _take(self, amount: int) -> None:
        try:
            self.check(amount)
        except InputError as error:
            logger.warning("%s", error)  # sizes that follow from the plan; the node is told a code
            raise
        with self._changing:
            if self.total is not None and self._used + amount > self.total:
                left = readable(self.total - self._used)
                raise RefusedError(
                    FailureCode.BUSY, f"a request takes {readable(amount)} of disk, and others left {left}: come again"
                )
            self._used += amount


_folders: set[Path] = set()


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """Make a folder for ciphertexts that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="heinfer-deep-", dir=parent))
    _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


@atexit.register
def _remove_folders() -> None:
    """Remove what threads that the end of the process cuts off did not."""
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
