"""Files of a bundle: hashing, checked reading of plan.json and safetensors, atomic writing of folders."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from heinfer.errors import PlanError
from heinfer.plan.mapping import MappedFile
from heinfer.plan.schema import Plan

PLAN_FILE = "plan.json"
#: Renewed by `heinfer partition --rotate` while the plan stays, so it has a digest of its own.
HINTS_FILE = "hints.safetensors"
#: Likewise.
CHECKS_FILE = "checks.safetensors"
#: Covers all the others (`heinfer.plan.signing`).
SIGNATURE_FILE = "bundle.sig"
_ADAPTER = TypeAdapter(Plan)
_OS_ERROR = re.compile(r"os error ([0-9]+)")
#: What a disk that is full says: no space, a quota, a limit on files.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan as JSON."""
    path.write_bytes(_ADAPTER.dump_json(plan, indent=1) + b"\n")


def read_plan(folder: Path) -> tuple[Plan, bytes]:
    """Read and check the plan of a bundle or of one party's folder.

    Returns:
        The plan and its hash (32 bytes, SHA-256 of the file).

    Raises:
        PlanError: no such file, not a plan, another format version, or inconsistent.
        ParameterError: ring parameters outside the security table.
    """
    path = folder / PLAN_FILE
    content = _read(path)
    try:
        plan = _ADAPTER.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PlanError(
            f"{path} is not a plan that this version reads: {where}: {first['msg']}; partition the model again"
        ) from error
    return plan, hashlib.sha256(content).digest()


def folder_digest(folder: Path, mapped: Sequence[MappedFile] = ()) -> str:
    """Return the SHA-256 over names and contents of all files of a folder; plan, hints, checks and signature aside.

    Args:
        folder: a party's.
        mapped: files of it whose content is taken from there, whatever the folder has by now.

    Raises:
        PlanError: the folder is missing or holds something that is not a plain file.
    """
    if not folder.is_dir():
        raise PlanError(f"{folder} is missing: expected a folder written by `heinfer partition`")
    known = {file.path: file.digest() for file in mapped}
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise PlanError(f"{path} does not belong in a bundle: expected plain files only")
        if path.name not in (PLAN_FILE, HINTS_FILE, CHECKS_FILE, SIGNATURE_FILE):
            total.update(f"{path.name}\0{known.get(path) or _file_digest(path)}\n".encode())
    return total.hexdigest()


def check_folder(folder: Path, expected: str, mapped: Sequence[MappedFile] = ()) -> None:
    """Check a party's folder against the digest in its plan; `mapped` as in `folder_digest`.

    Raises:
        PlanError: a file was changed, added or lost since partitioning.
    """
    if folder_digest(folder, mapped) != expected:
        raise PlanError(
            f"{folder} is not what was partitioned: a file was changed, added or lost; "
            "copy the folder again or partition again"
        )


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read a safetensors file.

    Raises:
        PlanError: missing or malformed.
    """
    if not path.is_file():
        raise PlanError(f"{path} is missing; copy the folder again or partition again")
    try:
        return load_file(path)
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:  # types that numpy lacks
        raise PlanError(f"{path} is not a safetensors file: {error}") from error


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it can't be written.
    """
    try:
        save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, path)
    except SafetensorError as error:  # which is what it makes of the system's errors
        code = _OS_ERROR.search(str(error))
        number = int(code[1]) if code is not None else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all; what is no plain file (/dev/stdout, a pipe) is written to directly.

    Raises:
        OSError: it can't be written; an earlier file is left as it was.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        work = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            work.write_bytes(content)
            os.replace(work, path)
        finally:
            work.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None  # a full disk names no file


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends without an error; else nothing is left.

    An existing bundle (a folder with a plan.json) or an empty folder is replaced; anything else is refused.

    Raises:
        PlanError: `target` exists and is something else, its parent can't be written, or the disk is full.
    """
    if target.exists() and not (target.is_dir() and ((target / PLAN_FILE).is_file() or not any(target.iterdir()))):
        raise PlanError(f"{target} exists and is no bundle: choose another folder for -o, or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise PlanError(f"can't write {target}: {error.strerror}") from error
    try:
        yield work
        work.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            os.replace(target, old / "bundle")
            os.replace(work, target)
            shutil.rmtree(old)
        else:
            os.replace(work, target)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise PlanError(f"can't write {target}: {error.strerror}; what was there is left as it was") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise PlanError(f"{path} is missing: expected a folder written by `heinfer partition`") from error
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror}") from error
