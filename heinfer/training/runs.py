"""The folder of a run, and what a later process needs to go on with it.

    run.json                        name, recipe, data fingerprint, ledger, state; nothing secret
    private/checkpoint.safetensors  while it runs; holds the key of the noise, and goes when the run ends
    private/tensorboard/            losses and gradient norms are private values: for the operator's eyes
    private/steps.jsonl             the same as text
    model.onnx, card.json, samples.npz, report.html    the release, once the run has ended

Everything under private/ stays with the owner of the data; the rest may be handed on.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heinfer.errors import InputError

RUN_FILE = "run.json"
RELEASE_FILES = ("model.onnx", "card.json", "samples.npz", "report.html")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What run.json says.

    Attributes:
        run_id: name in the ledger.
        recipe: the recipe, as JSON values.
        data: fingerprint of the private records.
        ledger: path of the ledger.
        allowance: epsilon that all runs in the ledger together may reach, None for no such limit.
        finished: whether the run has ended.
    """

    run_id: str
    recipe: Mapping[str, Any]
    data: str
    ledger: str
    allowance: float | None = None
    finished: bool = False
    format: int = field(default=_FORMAT)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def private(self) -> Path:
        """Folder of what is not to be handed on."""
        return self.path / "private"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint."""
        return self.private / "checkpoint.safetensors"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's files."""
        return self.private / "tensorboard"

    @property
    def steps(self) -> Path:
        """What every step did, a line each."""
        return self.private / "steps.jsonl"

    def read(self) -> RunRecord | None:
        """Return what run.json says, None where there is none.

        Raises:
            InputError: it is damaged.
        """
        path = self.path / RUN_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise InputError(f"{path} has format {content['format']}, expected {_FORMAT}")
            return RunRecord(**content)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is damaged: {error}") from None

    def write(self, record: RunRecord) -> None:
        """Write run.json, all or nothing."""
        staging = self.path / f".{RUN_FILE}.new"
        staging.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
        sync(staging)
        staging.replace(self.path / RUN_FILE)
        sync(self.path)

    def create(self) -> None:
        """Make the folder for a new run.

        Raises:
            InputError: something is there already, or it cannot be made.
        """
        if self.path.exists() and (
            not self.path.is_dir() or {entry.name for entry in self.path.iterdir()} - {"private"}
        ):
            record = self.read() if self.path.is_dir() else None
            if record is None:
                raise InputError(f"{self.path} is not empty; name another folder for the run")
            hint = "name another folder" if record.finished else "add --resume to go on with it, or name another folder"
            raise InputError(f"{self.path} holds a run that has {'' if record.finished else 'not '}ended; {hint}")
        try:
            self.private.mkdir(parents=True, exist_ok=True)
            self.private.chmod(0o700)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}; name another folder") from None

    def require_unfinished(self) -> RunRecord:
        """Return the record of a run to go on with.

        Raises:
            InputError: there is none, or it has ended.
        """
        record = self.read()
        if record is None:
            raise InputError(f"{self.path} holds no run to resume; leave --resume out to begin one")
        if record.finished:
            self.checkpoint.unlink(missing_ok=True)  # where the process was killed just before it did so
            raise InputError(f"the run in {self.path} has ended: its model is there, and nothing is left to resume")
        return record

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from running in this folder.

        Raises:
            InputError: one does.
        """
        descriptor = os.open(self.private / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(f"another process trains in {self.path}; wait for it, or name another folder") from None
        try:
            yield
        finally:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_run_id(name: str) -> str:
    """Return a name for a run that no other has."""
    return f"{name}-{secrets.token_hex(4)}"


def default_ledger(folder: Path, fingerprint: str) -> Path:
    """Return the ledger that all runs on the same data beside each other share."""
    return folder.parent / f"ledger-{fingerprint[:12]}.jsonl"
