"""Files of arrays that are mapped, not read: what nobody uses takes no memory, and what is used is the system's cache.

    path --(open once, read-only)--> descriptor --(map)--> bytes --(digest, checked by the caller)--> arrays over them

ResNet-50's hints are 378 MB. Read, they are 378 MB of this process, which the system can't take back; mapped, they are
pages that it drops when memory is short and reads again.

What is verified. A digest is taken over the mapping itself, so the bytes that were verified are the bytes that are
used, whatever the path names by then: a file that is replaced, as `heinfer partition` and `--rotate` do, leaves the
mapping with the old content. Two things can happen to a file that is written to in place, which nothing of ours does:

    other bytes     arrays change after they were verified. `check_unchanged` finds it by size and time of last change,
                    for a system call; where the time alone has changed, as after a `touch`, it takes the digest again.
                    Whoever sets the time back, or the bytes before anybody looks, is not found. A server's answers are
                    checked by the node all the same, but for those of deep blocks, which nobody checks; hints are in
                    node/, whose owner has the secrets anyway
    fewer bytes     reading beyond the end kills the process (SIGBUS): no answer, nothing wrong

Format: https://github.com/huggingface/safetensors, eight bytes with the length of a header in JSON, the header, data.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import PlanError

logger = logging.getLogger(__name__)
#: Types of the format that numpy has.
_TYPES: Final[Mapping[str, str]] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
_LENGTH: Final = 8
#: Longest header that the format's own library reads.
_MAX_HEADER: Final = 100_000_000


class MappedFile:
    """A file, open and mapped read-only for as long as its arrays live.

    Args:
        path: a plain file.

    Raises:
        PlanError: missing, a link, no plain file, or not readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PlanError(f"{path} is missing; copy the folder again or partition again") from error
        except OSError as error:
            raise PlanError(f"can't read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PlanError(f"{path} does not belong in a bundle: expected a plain file")
        self.mode = found.st_mode
        self._state = found.st_size, found.st_mtime_ns
        self._verified: str | None = None
        self._is_spoilt = False
        self._looking = threading.Lock()
        self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if found.st_size else None
        self._bytes = memoryview(b"" if self._map is None else self._map)

    def digest(self) -> str:
        """Return the SHA-256 of the content, as mapped; the first one is what `check_unchanged` compares with.

        Who verifies the content in another way does so after this: what is written in between is found then.
        """
        digest = self._hash()
        if self._verified is None:
            self._verified = digest
        return digest

    def _hash(self) -> str:
        digest = sha256(self._bytes).hexdigest()
        self.release()
        return digest

    def release(self) -> None:
        """Give the pages back to the system's cache; whoever reads them again finds them there."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Check that the file is what it was when it was opened, as far as size and time tell.

        Where the time alone has changed the content is read, once: a `touch` is no harm. A file that is found to be
        another one stays refused, since copies may have been made of what it held.

        Raises:
            PlanError: somebody has written to it. The text goes to clients and names no file; the log does, once.
        """
        if self._look() != self._state:
            with self._looking:
                self._is_spoilt = self._is_spoilt or not self._is_same()
        if self._is_spoilt:
            raise PlanError(
                "a file of the model was written to while it was in use: what was verified is no longer there; the "
                "log where it lies says which file, and what to do"
            )

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _is_same(self) -> bool:
        """Return whether the content is what was verified, and remember the new time; say so where it is not."""
        found = self._look()  # before the content is read: what is written meanwhile has a later time
        if found == self._state:
            return True  # another thread has looked
        if found[0] == self._state[0] and self._hash() == self._verified:
            logger.info("%s has a new time of last change and its old content: nothing to do", self.path)
            self._state = found
            return True
        logger.error(
            "%s was written to while it was in use: what was verified is no longer there; copy the folder again, or "
            "partition again, and start again",
            self.path,
        )
        return False

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays, read-only, over the mapping; copied only where the file does not align them.

        Raises:
            PlanError: the file is not a safetensors file, or has a type that numpy lacks.
        """
        try:
            return self._read_arrays()
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:  # what a header can cause
            raise PlanError(f"{self.path} is not a safetensors file: {error}") from error

    def _read_arrays(self) -> dict[str, NDArray[Any]]:
        length = int.from_bytes(self._bytes[:_LENGTH], "little")
        start = _LENGTH + length
        if len(self._bytes) < _LENGTH or length > _MAX_HEADER or start > len(self._bytes):
            raise ValueError(f"a header of {length} bytes in a file of {len(self._bytes)}")
        header = json.loads(str(self._bytes[_LENGTH:start], "utf-8"), object_pairs_hook=_without_repetitions)
        header.pop("__metadata__", None)
        made: dict[str, NDArray[Any]] = {}
        expected = 0
        for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
            first, end = _offsets(entry)
            if entry["dtype"] not in _TYPES:
                raise ValueError(f"{name} is of type {entry['dtype']}, which numpy lacks")
            kind, shape = np.dtype(_TYPES[entry["dtype"]]), _sizes(entry["shape"])
            if first != expected or end - first != prod(shape) * kind.itemsize:
                raise ValueError(f"{name}: bytes {first} to {end} do not hold {kind} {shape}, or lie elsewhere")
            array = np.frombuffer(self._bytes[start + first : start + end], kind).reshape(shape)
            made[name] = array if array.flags.aligned else _read_only(array.copy())
            expected = end
        if start + expected != len(self._bytes):
            raise ValueError(f"{len(self._bytes) - start} bytes of data, of which arrays take {expected}")
        return made


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that is there twice")
    return found


def _offsets(entry: Any) -> tuple[int, int]:
    first, end = _sizes(entry["data_offsets"])
    return first, end


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"expected a list of sizes, found {values!r}")
    return tuple(values)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
