"""Ciphertexts of deep blocks in files, and the room that they have on the disk.

    budget of 20 GB:  request of 15 GB is let in | one of 15 GB is told to come again | one of 25 GB is refused for good

Files hold what a server may see, and are removed at the end. Room is taken before anything is written: all that a
request will take, from its first row to its answer, follows from its block. It must be free in the budget, where there
is one, and on the disk:

    40 GB free, 15 GB taken of which 5 GB are written  -->  30 GB are left to the next request

What other programs write later is not foreseen: a file that does not fit then can't be made, and fails its request.

A process that is killed removes nothing. So it holds a lock in every folder of its own, which ends with it, and folders
whose lock is free are removed by the next one that starts.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_PREFIX: Final = "heinfer-deep-"
#: Of what `stat` counts.
_BLOCK_BYTES: Final = 512


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
        self._parent = Path(tempfile.gettempdir()) if parent is None else parent
        self._used = 0
        self._folders: set[Path] = set()
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
                with self._changing:
                    self._folders.add(made)
                try:
                    yield made
                finally:
                    with self._changing:
                        self._folders.discard(made)
        finally:
            with self._changing:
                self._used -= amount

    def remove_leftovers(self) -> None:
        """Remove folders of ours that processes left which were killed."""
        removed = sum(_remove_if_left(folder) for folder in self._parent.glob(f"{_PREFIX}*"))
        if removed:
            logger.warning("removed %d folders of ciphertexts that a process left which was killed", removed)

    def _take(self, amount: int) -> None:
        try:
            self.check(amount)
            with self._changing:
                self._check_left(amount)
                self._used += amount
        except InputError as error:
            logger.warning("%s", error)  # sizes that follow from plan and disk; the node is told a code
            raise

    def _check_left(self, amount: int) -> None:
        """Check what others leave, of the budget and of the disk."""
        to_come = self._used - sum(map(_written_bytes, self._folders))
        on_disk = max(0, shutil.disk_usage(self._parent).free - max(0, to_come))
        left = on_disk if self.total is None else min(on_disk, self.total - self._used)
        if amount <= left:
            return
        needs = f"a request for a deep block takes {readable(amount)} of disk"
        if self._used:
            raise RefusedError(FailureCode.BUSY, f"{needs}, and others leave {readable(left)}: come again")
        raise InputError(f"{needs}, and {readable(left)} are free in {self._parent}: make room, or see --scratch")


def _written_bytes(folder: Path) -> int:
    """Return what the files of a folder have on the disk."""
    size = 0
    with suppress(FileNotFoundError):  # the folder is somebody's no more
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # removed meanwhile, when nothing reads it any more
                size += _BLOCK_BYTES * path.stat().st_blocks
    return size


_folders: set[Path] = set()


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """Make a folder for ciphertexts that is removed at the end, and hold its lock."""
    lock = None
    while lock is None:  # once more where a process that starts took it for left, before it was locked
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _lock(folder)
    _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Take a folder's lock; return its descriptor, None where somebody has it or has removed the folder.

    Raises:
        OSError: it can't be opened, or its file system has no locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():  # whoever had it may have removed it
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove_if_left(folder: Path) -> bool:
    """Remove a folder of our user whose lock is free; what can't be opened is left."""
    with suppress(OSError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        lock = _lock(folder)
        if lock is None:
            return False
        try:
            shutil.rmtree(folder)
        finally:
            os.close(lock)
        return True
    return False


@atexit.register
def _remove_folders() -> None:
    """Remove what threads that the end of the process cuts off did not."""
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
