"""Read data sets and queries: .npz with samples and labels, .npy with samples."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.plan import TensorSpec

#: What numpy raises for a file that is missing, malformed, pickled, or announces more than there is memory.
_UNREADABLE = (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


#: Samples that calibration takes: ranges and fits hardly move beyond, and the exact model runs on them.
CALIBRATION_SAMPLES: Final = 2_000


@dataclass(frozen=True, slots=True)
class DataSet:
    """Samples ready for a model, their labels if any, and what was done to make them fit."""

    x: NDArray[Any]
    y: NDArray[np.int64] | None
    notes: tuple[str, ...]


def load_data(
    path: Path,
    spec: TensorSpec,
    *,
    x_key: str = "x",
    y_key: str | None = None,
    divide: float | None = None,
    samples: int | None = None,
) -> DataSet:
    """Read an .npz data set.

    Args:
        path: .npz file; pickled arrays are refused.
        spec: the model's input.
        x_key: name of the samples.
        y_key: name of the labels; "y" is used where there is one.
        divide: divisor, for integers.
        samples: how many to take from the front; all where None.

    Raises:
        InputError: missing file or array, or a shape or type that does not fit.
    """
    try:
        with path.open("rb") as file:  # numpy would leave it open where the archive is damaged
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InputError(f"{path} is no .npz file: expected named arrays, found one array")
            names = archive.files
            if x_key not in names:
                raise InputError(f"{path} has no array {x_key!r}, but {names}; name the samples with --x")
            if y_key is not None and y_key not in names:
                raise InputError(f"{path} has no array {y_key!r}, but {names}; name the labels with --y")
            label_key = y_key or ("y" if "y" in names else None)
            x = archive[x_key]
            y = archive[label_key] if label_key is not None else None
    except _UNREADABLE as error:
        raise InputError(f"can't read {path} as .npz: {error}") from error
    x, notes = fit(x, spec, divide)
    if y is not None:
        if y.dtype.kind not in "iu" or y.reshape(-1).shape != (len(x),):
            raise InputError(f"labels must be {len(x)} integers, found {y.dtype} {y.shape}")
        y = y.reshape(-1).astype(np.int64)[:samples]
    if samples is not None and samples > len(x):
        notes.append(f"{len(x)} samples, fewer than the {samples} asked for")
    return DataSet(x[:samples], y, tuple(notes))


def load_calibration(
    path: Path,
    specs: Sequence[TensorSpec],
    *,
    x_key: str = "x",
    divide: float | None = None,
    most: int = CALIBRATION_SAMPLES,
) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Read samples to calibrate deep blocks with, evenly taken from a data set where it holds more than are needed.

    Args:
        path: .npz file, as for `load_data`.
        specs: the model's inputs; a model of several finds each under its own name.
        x_key: name of the samples, for a model of one input.
        divide: divisor, for integers.
        most: how many are taken.

    Returns:
        Samples by input, and what was done to make them fit.

    Raises:
        InputError: as for `load_data`, or inputs have different numbers of samples.
    """
    taken, notes, counts = {}, [], set()
    for spec in specs:
        found = load_data(path, spec, x_key=x_key if len(specs) == 1 else spec.name, divide=divide)
        counts.add(len(found.x))
        chosen = np.arange(min(most, len(found.x))) * len(found.x) // min(most, len(found.x))
        taken[spec.name] = found.x[chosen]
        notes += [note for note in found.notes if note not in notes]
    if len(counts) != 1:
        raise InputError(f"{path}: expected as many samples for every input, found {sorted(counts)}")
    (count,) = counts
    if count > most:
        notes.append(f"calibration: {most:,} of {count:,} samples, evenly taken")
    return taken, tuple(notes)


def load_query(path: Path, spec: TensorSpec, divide: float | None = None) -> DataSet:
    """Read a .npy query: samples first, or one sample without a batch axis.

    Raises:
        InputError: missing or malformed file, or a shape or type that does not fit.
    """
    try:
        with path.open("rb") as file:
            x = np.load(file, allow_pickle=False)
    except _UNREADABLE as error:
        raise InputError(f"can't read {path} as .npy: {error}") from error
    if not isinstance(x, np.ndarray):
        raise InputError(f"{path} is no .npy file: expected one array")
    notes = []
    if x.shape == spec.shape:
        x, notes = x[None], ["one sample without a batch axis: added one"]
    fitted, more = fit(x, spec, divide)
    return DataSet(fitted, None, (*notes, *more))


def fit(x: NDArray[Any], spec: TensorSpec, divide: float | None = None) -> tuple[NDArray[Any], list[str]]:
    """Make samples fit a model's input: scale, add an axis of length 1, convert; return them and what was done.

    Raises:
        InputError: they don't fit.
    """
    notes = []
    expected = np.dtype(spec.dtype)
    if x.dtype.kind not in "fiub":
        raise InputError(f"expected numbers, found dtype {x.dtype}")
    if divide is not None:
        if not (np.isfinite(divide) and divide > 0):
            raise InputError(f"--divide must be positive, got {divide}")
        x = x.astype(np.float64) / divide
    if x.shape[1:] != spec.shape:
        axis = next((a for a in range(1, len(spec.shape) + 1) if (*x.shape[1:a], 1, *x.shape[a:]) == spec.shape), None)
        if x.ndim == 0 or axis is None:
            raise InputError(f"expected shape (samples, {', '.join(map(str, spec.shape))}), found {x.shape}")
        x = np.expand_dims(x, axis)
        notes.append(f"added an axis of length 1: samples are now {x.shape[1:]}")
    if expected.kind == "f" and x.dtype.kind != "f":
        raise InputError(f"expected {expected}, found {x.dtype}; scale integers with --divide (255 for images)")
    if expected.kind != "f" and x.dtype != expected:
        raise InputError(f"expected {expected}, found {x.dtype}; convert it")
    if len(x) == 0:
        raise InputError("found no samples")
    return x.astype(expected, copy=False), notes
