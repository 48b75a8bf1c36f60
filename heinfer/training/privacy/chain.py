"""A file of JSON lines that can only grow, shared by processes, in which changes show.

Each line holds the SHA-256 of the entry before it (`previous`) and, last, its own over its bytes up to there
(`sha256`). A second file, `<name>.head`, holds number and hash of the last entry, so that missing last lines show as
well.

Writing takes an exclusive lock, first reads what others have added, and ends with fsync. A crash can leave the last
line incomplete, or the head one entry behind. The next writer ends such a line and lists its hash in its own entry
under `torn`; only so is a line that cannot be read accepted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heinfer.errors import InputError, IntegrityError

logger = logging.getLogger(__name__)

_NOTHING = "0" * 64
_SEAL = b',"sha256":"%s"}'
_SEAL_BYTES = len(_SEAL % _NOTHING.encode())


@dataclass(frozen=True, slots=True)
class Head:
    """Where a chain ended at some time; keep it elsewhere to notice that it was cut since.

    Attributes:
        entries: how many it had.
        sha256: hash of the last one, in hexadecimal; zeros for none.
    """

    entries: int = 0
    sha256: str = _NOTHING

    def to_bytes(self) -> bytes:
        """Return one line of always the same length, so that overwriting it is one write."""
        return f"{self.entries:020d} {self.sha256}\n".encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Head:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: it did not.
        """
        entries, sha256 = content.decode().split()
        head = cls(int(entries), sha256)
        if head.to_bytes() != content:
            raise ValueError("not a head")
        return head


@dataclass(slots=True)
class _Position:
    """How far the file was read."""

    offset: int = 0
    line: int = 0
    hashes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # hashes of lines that await an entry that lists them
    torn: bytes = b""  # the last line, where it has no end


class Chain:
    """Reads and extends such a file.

    Args:
        path: of the file.
        take: called with (line number from 1, content) of every entry once, in order, before anything is appended.
    """

    def __init__(self, path: Path, take: Callable[[int, Mapping[str, Any]], None]) -> None:
        self.path = path
        self._head_path = path.with_name(path.name + ".head")
        self._take = take
        self._at = _Position()

    @property
    def head(self) -> Head:
        """Where the chain ended when it was last read."""
        return Head(len(self._at.hashes), self._at.hashes[-1]) if self._at.hashes else Head()

    @property
    def torn_line(self) -> int | None:
        """Number of the last line if a crash left it incomplete and nothing was appended since."""
        return self._at.line + 1 if self._at.torn else None

    def contains(self, head: Head) -> bool:
        """Say whether the chain once ended like this."""
        return head == Head() or self._at.hashes[head.entries - 1 : head.entries] == [head.sha256]

    def read(self) -> None:
        """Take what was added since the last time.

        Raises:
            InputError: there is no such file.
            IntegrityError: the chain is broken; the message names the first bad line.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"cannot read the ledger {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            self._advance(descriptor)
        finally:
            os.close(descriptor)
        if self._at.torn:
            logger.warning(
                "line %d of %s is incomplete: a crash while it was written; the next entry will say so",
                self.torn_line,
                self.path,
            )

    @contextmanager
    def writing(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Hold the file alone, take what others added, and yield a function that appends an entry.

        An entry is on the disk when the function returns. The file is made where it is missing.

        Raises:
            InputError: the file can't be written.
            IntegrityError: as `read`.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InputError(f"cannot write the ledger {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_size == 0 and not self._head_path.exists():
                self._begin()
            self._advance(descriptor)
            yield lambda content: self._append(descriptor, content)
        finally:
            os.close(descriptor)

    def _begin(self) -> None:
        with self._head_path.open("xb") as file:
            file.write(Head().to_bytes())
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _append(self, descriptor: int, content: Mapping[str, Any]) -> None:
        torn = self._at.torn
        whole = _unseal(torn) is not None  # only the end of the line is missing
        if torn and whole:
            _write(descriptor, b"\n")
            self._advance(descriptor)
        elif torn:
            content = {**content, "torn": [_sha256(torn)]}
        head = self.head
        line = _seal({"entry": head.entries + 1, "previous": head.sha256, **content})
        _write(descriptor, b"\n" + line if torn and not whole else line)
        os.fsync(descriptor)
        self._advance(descriptor)
        self._keep_head()

    def _keep_head(self) -> None:
        """Overwrite the head in place; after a power failure it may be an older one, which does no harm."""
        descriptor = os.open(self._head_path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, self.head.to_bytes(), 0)
        finally:
            os.close(descriptor)

    def _advance(self, descriptor: int) -> None:
        try:
            self._take_new(descriptor)
        except Exception:
            self._at = _Position()  # what was taken is of no use; whoever reads again starts over
            raise

    def _take_new(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size < self._at.offset:
            raise IntegrityError(f"{self.path} has become shorter while it was in use: entries were removed")
        *lines, self._at.torn = _read(descriptor, self._at.offset, size).split(b"\n")
        for line in lines:
            self._at.line += 1
            self._take_line(line)
            self._at.offset += len(line) + 1
        if self._at.unreadable:
            raise self._broken(self._at.line, "was changed or damaged")
        self._check_head(size)

    def _take_line(self, line: bytes) -> None:
        at = self._at
        content = _unseal(line)
        if content is None:
            at.unreadable.append(_sha256(line))
            return
        if content.get("torn", []) != at.unreadable:
            raise self._broken(at.line - len(at.unreadable), "was changed or damaged")
        at.unreadable.clear()
        if content.get("previous") != self.head.sha256 or content.get("entry") != len(at.hashes) + 1:
            raise self._broken(
                at.line,
                f"is entry {content.get('entry')} where entry {len(at.hashes) + 1} of the chain was expected: lines "
                "are missing or in another order",
            )
        at.hashes.append(content["sha256"])
        self._take(at.line, content)

    def _check_head(self, size: int) -> None:
        try:
            known = Head.from_bytes(self._head_path.read_bytes())
        except FileNotFoundError:
            if size == 0:
                return
            raise IntegrityError(
                f"{self._head_path} is missing, without which nobody can tell whether {self.path.name} is complete; "
                "it belongs beside the ledger"
            ) from None
        except (ValueError, UnicodeDecodeError):
            raise IntegrityError(f"{self._head_path} was changed or damaged") from None
        if known.entries > len(self._at.hashes):
            raise self._broken(
                self._at.line + 1, f"and what follows is missing: {known.entries} entries were written in all"
            )
        if not self.contains(known):
            raise IntegrityError(f"entry {known.entries} of {self.path} is not the one that {self._head_path} names")

    def _broken(self, line: int, what: str) -> IntegrityError:
        return IntegrityError(f"line {line} of {self.path} {what}")


def _seal(content: Mapping[str, Any]) -> bytes:
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + _SEAL % _sha256(body).encode() + b"\n"


def _unseal(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line, or None if its hash is not the one of its bytes."""
    body = line[:-_SEAL_BYTES]
    if not body or line != body + _SEAL % _sha256(body).encode():
        return None
    content = json.loads(line)
    return content if isinstance(content, dict) else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(descriptor: int, start: int, end: int) -> bytes:
    parts = []
    while start < end and (part := os.pread(descriptor, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
