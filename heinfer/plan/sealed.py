"""Files of arrays that belong to one plan and are renewed while it stays: the node's hints and checks.

seed      32 bytes
plan      the plan's hash, 32 bytes
created   seconds since 1970, int64
digest    SHA-256 over everything else, 32 bytes: finds damage and mix-ups, not malice
...       what the file is for
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import PlanError
from heinfer.plan.files import write_arrays
from heinfer.plan.mapping import MappedFile

SEED_BYTES: Final = 32
_REMEDY: Final = "copy the folder again, or renew it with `heinfer partition --rotate`"
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A checked file.

    Attributes:
        seed: 32 bytes.
        created: when it was made, seconds since 1970.
        arrays: all arrays, over the file's mapping.
        file: the file.
    """

    seed: bytes
    created: int
    arrays: Arrays
    file: MappedFile


def write_sealed(path: Path, seed: bytes, plan_hash: bytes, arrays: Arrays, *, private: bool = False) -> None:
    """Write a file as a whole or not at all.

    Args:
        path: the file, in node/ of a bundle.
        seed: 32 bytes.
        plan_hash: of the plan that it belongs to.
        arrays: what it is for.
        private: whether nobody but its owner may read it.
    """
    content: dict[str, NDArray[Any]] = {
        "seed": np.frombuffer(seed, np.uint8),
        "plan": np.frombuffer(plan_hash, np.uint8),
        "created": np.array([int(time.time())], np.int64),
        **arrays,
    }
    content["digest"] = _digest(content)
    mode = 0o600 if private else 0o644
    # Not in node/: what an interruption leaves there would not load.
    work = path.parent.parent / f".{path.name}.{os.getpid()}"
    work.unlink(missing_ok=True)
    try:
        os.close(os.open(work, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        write_arrays(work, content)
        work.chmod(mode)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def read_sealed(path: Path, plan_hash: bytes, *, private: bool = False) -> Sealed:
    """Read and check a file.

    Args:
        path: the file.
        plan_hash: of the plan that it must belong to.
        private: whether to refuse a file that others may read.

    Raises:
        PlanError: missing, damaged, of another plan, or not private.
    """
    file = MappedFile(path)
    file.digest()  # before the content is verified, see there
    content = file.arrays()
    if private and file.mode & 0o077:
        raise PlanError(f"{path} may be read by others, who could forge answers with it: chmod 600 {path}")
    wanted = ("seed", "plan", "created", "digest")
    if any(name not in content for name in wanted) or _digest(content).tobytes() != content["digest"].tobytes():
        raise PlanError(f"{path} is damaged: {_REMEDY}")
    if content["plan"].tobytes() != plan_hash:
        raise PlanError(f"{path} belongs to another plan: {_REMEDY}")
    seed, created = content["seed"].tobytes(), content["created"]
    if len(seed) != SEED_BYTES or created.shape != (1,) or created.dtype != np.int64:
        raise PlanError(f"{path} is malformed: {_REMEDY}")
    file.release()
    return Sealed(seed, int(created[0]), content, file)


def _digest(content: Arrays) -> NDArray[np.uint8]:
    total = hashlib.sha256()
    for name in sorted(content):
        if name != "digest":
            array = np.ascontiguousarray(content[name])
            total.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            total.update(array.data)
    return np.frombuffer(total.digest(), np.uint8)
