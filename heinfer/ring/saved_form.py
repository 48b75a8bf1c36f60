"""SEAL's saved form of ciphertexts, read and written as arrays; SEAL itself is not needed for it.

    header (16 bytes) | parms_id, is_ntt, size, N, primes, scale, correction | header (16) | count | residues
    header            | parms_id, powers, decompositions | one saved ciphertext each             (keys)

The header says whether what follows is compressed; SEAL compresses with zstd and loads what is not compressed too. The
binding saves to and loads from paths only, so ciphertexts pass through a file in memory. Source: SEAL 4.1,
native/src/seal/{serialization,ciphertext,dynarray,kswitchkeys}.h.
"""

from __future__ import annotations

import os
import struct
import weakref
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import zstandard
from numpy.typing import NDArray

from heinfer.errors import CiphertextError, ParameterError

_HEADER: Final = struct.Struct("<HBBBBHQ")
_MAGIC, _HEADER_BYTES, _VERSION = 0xA15E, 16, (4, 3)
_PLAIN, _ZSTD = 0, 2
_FIELDS: Final = struct.Struct("<4QB3QdQ")
#: Of keys: parms_id, powers of the secret, decompositions of each.
_KEYS: Final = struct.Struct("<4Q2Q")
#: Fields of a ciphertext, the nested header, and the count of residues.
PREFIX_BYTES: Final = _FIELDS.size + _HEADER_BYTES + 8


class MemoryFile:
    """A file in memory, for SEAL's save and load by path; a context manager. It ends with its last user at the latest.

    Raises:
        ParameterError: this system has none, and ciphertexts or keys would reach the disk.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ParameterError("this system has no files in memory (memfd_create, Linux): keys would reach the disk")
        self._descriptor = os.memfd_create("heinfer", os.MFD_CLOEXEC)
        self._ending = weakref.finalize(self, os.close, self._descriptor)

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give content and descriptor back; once more is no harm."""
        self._ending()

    @property
    def path(self) -> str:
        """Where it is, for this process.

        Raises:
            ParameterError: it is closed, so its number may be another file's.
        """
        return f"/proc/self/fd/{self._open()}"

    def read(self) -> bytes:
        """Return the content."""
        descriptor = self._open()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def write(self, *parts: bytes | memoryview) -> None:
        """Replace the content."""
        descriptor = self._open()
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(descriptor, view) :]

    def clear(self) -> None:
        """Drop the content."""
        os.ftruncate(self._open(), 0)

    def _open(self) -> int:
        if not self._ending.alive:
            raise ParameterError("this file in memory is closed: expected an open one, make another")
        return self._descriptor


@dataclass(frozen=True, slots=True)
class Fields:
    """What precedes the residues of a saved ciphertext.

    Attributes:
        parms_id: SEAL's name of the level.
        ntt: whether polynomials are transformed.
        size: polynomials.
        degree: N.
        primes: of the level.
        scale: that the message is multiplied by.
    """

    parms_id: tuple[int, int, int, int]
    ntt: bool
    size: int
    degree: int
    primes: int
    scale: float


def read_body(saved: bytes) -> bytes:
    """Return a saved object without its header, uncompressed.

    Raises:
        CiphertextError: this is not SEAL's saved form.
    """
    if len(saved) < _HEADER_BYTES:
        raise CiphertextError("SEAL's saved form is shorter than its header")
    magic, size, *_, compression, _reserved, _total = _HEADER.unpack_from(saved)
    if magic != _MAGIC or size != _HEADER_BYTES or compression not in (_PLAIN, _ZSTD):
        raise CiphertextError(f"SEAL's saved form is not the expected one: header {saved[:_HEADER_BYTES].hex()}")
    if compression == _PLAIN:
        return saved[_HEADER_BYTES:]
    return zstandard.ZstdDecompressor().decompressobj().decompress(saved[_HEADER_BYTES:])


def parse_ciphertext(saved: bytes) -> tuple[Fields, NDArray[np.int64]]:
    """Return fields and residues, shape (size, primes, N), of a saved ciphertext.

    Raises:
        CiphertextError: this is not one.
    """
    body = read_body(saved)
    *parms_id, ntt, size, degree, primes, scale, _ = _FIELDS.unpack_from(body)
    count = size * degree * primes
    if len(body) != PREFIX_BYTES + 8 * count:
        raise CiphertextError(f"a saved ciphertext has {len(body)} bytes, expected {PREFIX_BYTES + 8 * count}")
    residues = np.frombuffer(body, "<i8", offset=PREFIX_BYTES).reshape(size, primes, degree)
    return Fields(tuple(parms_id), bool(ntt), size, degree, primes, scale), residues


def format_ciphertext(fields: Fields, residues: NDArray[np.int64]) -> tuple[bytes, memoryview]:
    """Return the saved form of a ciphertext in two parts, uncompressed.

    Args:
        fields: as `parse_ciphertext` found them for the level; scale and size may differ.
        residues: int64, shape (size, primes, N), C-contiguous.
    """
    count = residues.size
    inner = _HEADER.pack(_MAGIC, _HEADER_BYTES, *_VERSION, _PLAIN, 0, _HEADER_BYTES + 8 + 8 * count)
    packed = _FIELDS.pack(*fields.parms_id, fields.ntt, len(residues), fields.degree, fields.primes, fields.scale, 1)
    prefix = packed + inner + struct.pack("<Q", count)
    outer = _HEADER.pack(_MAGIC, _HEADER_BYTES, *_VERSION, _PLAIN, 0, _HEADER_BYTES + len(prefix) + 8 * count)
    return outer + prefix, residues.reshape(-1).view(np.uint8).data


def parse_keys(saved: bytes) -> NDArray[np.int64]:
    """Return saved relinearisation keys as residues, shape (decompositions, 2, primes and P, N), transformed.

    Raises:
        CiphertextError: these are none, or for more than squares.
    """
    body = read_body(saved)
    if len(body) < _KEYS.size:
        raise CiphertextError("saved keys are shorter than their fields")
    *_, powers, count = _KEYS.unpack_from(body)
    if powers != 1:
        raise CiphertextError(f"saved keys are for {powers} powers of the secret, expected 1")
    keys, offset = [], _KEYS.size
    for _ in range(count):
        size = _HEADER.unpack_from(body, offset)[-1]
        keys.append(parse_ciphertext(body[offset : offset + size])[1])
        offset += size
    if offset != len(body) or len({key.shape for key in keys}) != 1:
        raise CiphertextError("saved keys do not end where they should, or differ in shape")
    return np.stack(keys)


def format_keys(parms_id: tuple[int, int, int, int], residues: NDArray[np.int64]) -> list[bytes | memoryview]:
    """Return the saved form of relinearisation keys in parts, uncompressed.

    Args:
        parms_id: SEAL's name of the level of keys.
        residues: as `parse_keys` returns them.
    """
    count, size, primes, degree = residues.shape
    fields = Fields(parms_id, True, size, degree, primes, 1.0)
    parts: list[bytes | memoryview] = []
    for key in residues:
        parts += format_ciphertext(fields, np.ascontiguousarray(key))
    total = _HEADER_BYTES + _KEYS.size + sum(memoryview(part).nbytes for part in parts)
    header = _HEADER.pack(_MAGIC, _HEADER_BYTES, *_VERSION, _PLAIN, 0, total)
    return [header, _KEYS.pack(*parms_id, 1, count), *parts]
