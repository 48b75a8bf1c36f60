r"""The journal of an evaluation: chunks of samples that are finished, so that a run that was cut off goes on.

    "heinfer journal 1\n" | header | chunk | chunk | ...       each: u32 length | u32 CRC-32 | that many bytes

    header    JSON: what is evaluated, hash of the plan, hash of the samples, mode, samples of a chunk
    chunk     u32 length of JSON | JSON | arrays, one after the other, in C order, little-endian

A chunk is on the disk (fsync) before it counts. One that was being written when the machine stopped is cut off and
evaluated again; damage anywhere else is refused, as are another model's journal and other samples'. Whoever holds a
journal can read results and error bounds: it is the client's, like the report, and only its owner may read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError

_MAGIC: Final = b"heinfer journal 1\n"
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
#: Arrays of a chunk: numbers, nothing that numpy would have to unpickle.
_KINDS: Final = "biuf"


@dataclass(frozen=True, slots=True)
class Task:
    """What is evaluated; a journal belongs to one.

    Attributes:
        plan: SHA-256 of the plan, in hexadecimal.
        samples: SHA-256 of the samples, their type and shape included.
        count: how many.
        mode: as asked for.
        chunk: samples of one chunk.
    """

    plan: str
    samples: str
    count: int
    mode: str
    chunk: int


@dataclass(frozen=True, slots=True)
class FinishedChunk:
    """Samples [start, start + len(outputs)).

    Attributes:
        start: number of the first.
        outputs: the model's.
        statistics: as the node states them.
        trace: values inside the model, where they were asked for.
        elapsed_s: seconds of evaluation up to this chunk, those of earlier runs included.
    """

    start: int
    outputs: NDArray[Any]
    statistics: dict[str, Any]
    trace: dict[str, NDArray[Any]]
    elapsed_s: float


def sample_hash(x: NDArray[Any]) -> str:
    """Return the SHA-256 of an array, its type and shape included, in hexadecimal."""
    array = np.ascontiguousarray(x)
    total = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    total.update(array.data.cast("B"))
    return total.hexdigest()


class Journal:
    """An open journal; `open_journal` makes one.

    Attributes:
        chunks: those that were finished before, by the number of their first sample.
    """

    def __init__(self, descriptor: int, path: Path, chunks: dict[int, FinishedChunk]) -> None:
        self._descriptor = descriptor
        self._path = path
        self.chunks = chunks

    def append(self, chunk: FinishedChunk) -> None:
        """Write a chunk; it is on the disk when this returns.

        Raises:
            OSError: it can't be written; the chunks before it are.
        """
        _append(self._descriptor, self._path, _pack(chunk))
        self.chunks[chunk.start] = chunk


@contextmanager
def open_journal(path: Path, task: Task, resume: bool) -> Iterator[Journal]:
    """Open a journal for a block of code, and hold it against other runs.

    Args:
        path: a file; where there is none, a new journal begins.
        task: what is evaluated.
        resume: whether finished chunks are wanted.

    Raises:
        InputError: it holds finished chunks and they are not wanted, it is another task's or no journal, it is damaged,
            or another run holds it.
        OSError: it can't be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{path} is in use: another run writes to it") from None
        content = path.read_bytes()
        chunks, whole = _read(content, path, task)
        if chunks and not resume:
            raise InputError(
                f"{path} holds {len(chunks)} finished chunks: --resume goes on with them, or name another journal"
            )
        if whole < len(content):  # what was being written when a run ended
            os.ftruncate(descriptor, whole)
        if not whole:
            _append(descriptor, path, json.dumps(asdict(task)).encode(), _MAGIC)
            _sync_folder(path)
        yield Journal(descriptor, path, chunks)
    finally:
        os.close(descriptor)


def read_journal(path: Path) -> dict[int, FinishedChunk]:
    """Return the finished chunks of any task's journal, by the number of their first sample.

    Raises:
        InputError: it is no journal, or damaged.
    """
    return _read(path.read_bytes(), path, None)[0]


def _read(content: bytes, path: Path, task: Task | None) -> tuple[dict[int, FinishedChunk], int]:
    """Return finished chunks, and the length of what is whole."""
    if _MAGIC.startswith(content):  # nothing, or a journal that was cut off in its first line
        return {}, 0
    if not content.startswith(_MAGIC):
        raise InputError(f"{path} is no journal of an evaluation: name another file")
    records = _records(content, path)
    header = next(records, None)
    if header is None:
        return {}, 0
    _check_task(header[0], path, task)
    chunks: dict[int, FinishedChunk] = {}
    whole = header[1]
    for payload, whole in records:  # noqa: B007 - the last one's end is returned
        chunk = _unpack(payload, path)
        if chunk.start in chunks:
            raise _damaged(path, f"has samples {chunk.start} and on twice")
        chunks[chunk.start] = chunk
    return chunks, whole


def _records(content: bytes, path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each whole record and where it ends; a torn one at the end is left out."""
    position = len(_MAGIC)
    while position + _HEAD.size <= len(content):
        length, check = _HEAD.unpack_from(content, position)
        if not length and not any(content[position:]):
            return  # a file system may leave zeros behind what it has written
        end = position + _HEAD.size + length
        payload = content[position + _HEAD.size : end]
        if len(payload) < length:
            return
        if zlib.crc32(payload) != check:
            if end == len(content):
                return  # its length was on the disk before its bytes
            raise _damaged(path, f"is damaged at byte {position}")
        yield payload, end
        position = end


def _check_task(payload: bytes, path: Path, task: Task | None) -> None:
    try:
        found = Task(**json.loads(payload))
    except (ValueError, TypeError):
        raise _damaged(path, "has no header that this version reads") from None
    if task is None or found == task:
        return
    names = {
        "plan": "another bundle, or another partitioning of it",
        "samples": "other samples",
        "count": "another number of samples",
        "mode": "another mode",
        "chunk": "chunks of another size",
    }
    different = [text for name, text in names.items() if getattr(found, name) != getattr(task, name)]
    raise InputError(f"{path} belongs to {different[0]}: name another journal")


def _append(descriptor: int, path: Path, payload: bytes, before: bytes = b"") -> None:
    end = os.fstat(descriptor).st_size
    record = memoryview(before + _HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
    try:
        while record:
            record = record[os.write(descriptor, record) :]
        os.fsync(descriptor)
    except OSError as error:
        os.ftruncate(descriptor, end)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _pack(chunk: FinishedChunk) -> bytes:
    arrays = {"outputs": chunk.outputs, **{f"trace:{name}": array for name, array in chunk.trace.items()}}
    described = [(name, array.dtype.newbyteorder("<").str, array.shape) for name, array in arrays.items()]
    facts = {"start": chunk.start, "elapsed_s": chunk.elapsed_s, "statistics": chunk.statistics, "arrays": described}
    text = json.dumps(facts).encode()
    parts = [array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values()]
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def _unpack(payload: bytes, path: Path) -> FinishedChunk:
    try:
        (length,) = _LENGTH.unpack_from(payload)
        facts = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
        position, arrays = _LENGTH.size + length, {}
        for name, kind, shape in facts["arrays"]:
            dtype = np.dtype(kind)
            if dtype.kind not in _KINDS:
                raise ValueError(kind)
            array = np.frombuffer(payload, dtype, prod(shape), position).reshape(shape)
            arrays[name] = array.astype(dtype.newbyteorder("="))
            position += array.nbytes
        trace = {name.removeprefix("trace:"): a for name, a in arrays.items() if name != "outputs"}
        return FinishedChunk(
            int(facts["start"]), arrays["outputs"], dict(facts["statistics"]), trace, float(facts["elapsed_s"])
        )
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"holds a chunk that this version does not read ({type(error).__name__})") from None


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} {what}: name another journal, and evaluate anew")


def _sync_folder(path: Path) -> None:
    """A new file's name is on the disk when its folder is."""
    folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
