"""From a recipe's table [data], and a path, to a data set that has been checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heinfer.errors import InputError
from heinfer.training.datasets.archives import read_archive
from heinfer.training.datasets.cifar import is_cifar_folder, read_cifar
from heinfer.training.datasets.dataset import Dataset, Examples
from heinfer.training.datasets.folders import is_image_folder, read_image_folder
from heinfer.training.datasets.idx import is_idx_folder, read_idx_folder
from heinfer.training.datasets.packaged import read_breast_cancer, read_digits
from heinfer.training.datasets.registry import SETS, KnownSet, Ranges
from heinfer.training.datasets.tables import read_tables
from heinfer.training.settings import DataFormat, DataSource, Normalisation, suggest


@dataclass(frozen=True, slots=True)
class _Read:
    """What a reader found."""

    train: Examples
    test: Examples
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()


def load_dataset(source: DataSource, path: Path | None = None) -> Dataset:
    """Read a data set and check it; nothing of it is spent or shown.

    Args:
        source: the recipe's table [data].
        path: the file or folder; by default the recipe's. Sets that come with scikit-learn need none.

    Raises:
        InputError: there is nothing to read, it is not what the recipe says, or it cannot be trained on.
    """
    known = None if source.set is None else SETS[source.set]
    read = _read(source, known, path)
    class_names = source.class_names or read.class_names or (() if known is None else known.class_names)
    largest = int(max(read.train.labels.max(), read.test.labels.max()))
    dataset = Dataset(
        name=source.name,
        train=read.train,
        test=read.test,
        classes=len(class_names) or largest + 1,
        class_names=class_names,
        feature_names=read.feature_names,
        ranges=_ranges(source, known, read),
    )
    if known is not None and dataset.input_shape != known.input_shape:
        raise InputError(
            f"{source.set} has records of shape {known.input_shape}, found {dataset.input_shape}: these are other data"
        )
    return dataset


def _read(source: DataSource, known: KnownSet | None, path: Path | None) -> _Read:
    if known is not None and known.packaged:
        if path is not None or source.path is not None:
            raise InputError(f"{source.set} comes with scikit-learn; leave the path out")
        return _Read(*read_digits()) if source.set == "digits" else _read_breast_cancer()
    place = path or (None if source.path is None else Path(source.path))
    if place is None:
        raise InputError(f"no data for {source.name}: name a file or folder with --data, or as path in [data]")
    match source.format or _find_format(place):
        case DataFormat.NPZ:
            return _Read(*read_archive(place, source))
        case DataFormat.IDX:
            return _Read(*read_idx_folder(place))
        case DataFormat.CIFAR:
            return _Read(*read_cifar(place))
        case DataFormat.FOLDER:
            return _Read(*read_image_folder(place))
        case DataFormat.CSV:
            return _Read(*read_tables(place, source))


def _read_breast_cancer() -> _Read:
    train, test, names = read_breast_cancer()
    return _Read(train, test, feature_names=names)


def _find_format(path: Path) -> DataFormat:
    """Say what a file or folder is, by its name and what it holds."""
    if not path.exists():
        raise InputError(f"cannot read the data {path}: it does not exist")
    if path.is_file():
        return DataFormat.CSV if path.suffix.lower() == ".csv" else DataFormat.NPZ
    if is_cifar_folder(path):
        return DataFormat.CIFAR
    if is_idx_folder(path):
        return DataFormat.IDX
    if (path / "train.csv").is_file():
        return DataFormat.CSV
    if is_image_folder(path):
        return DataFormat.FOLDER
    raise InputError(
        f"{path} holds no data set that is known: expected train/CLASS and test/CLASS with images, train.csv and "
        "test.csv, the four IDX files of MNIST, or the binary version of CIFAR-10; [data] format says which"
    )


def _ranges(source: DataSource, known: KnownSet | None, read: _Read) -> Ranges:
    """Find the declared bounds of every column of a table."""
    if read.train.inputs.ndim != 2:
        if source.range is not None or source.ranges:
            raise InputError(f"{source.name}: range and ranges are for tables; pixels are divided by 255")
        return ()
    if source.normalise is Normalisation.NONE:
        return ()
    names = read.feature_names or tuple(str(number) for number in range(read.train.inputs.shape[1]))
    unknown = [name for name in source.ranges if name not in names]
    if unknown:
        raise InputError(f"{source.name} has no column {unknown[0]!r}{suggest(unknown[0], names)}; see [data.ranges]")
    declared: Sequence[tuple[float, float] | None] = (known.ranges if known is not None else ()) or [None] * len(names)
    bounds = [
        source.ranges.get(name) or source.range or published for name, published in zip(names, declared, strict=True)
    ]
    open_ones = [name for name, found in zip(names, bounds, strict=True) if found is None]
    if open_ones:
        raise InputError(
            f"{source.name}: no bounds for {len(open_ones)} columns ({', '.join(open_ones[:3])} ...). Declare public "
            'ones as range = [low, high] or in [data.ranges], or set normalise = "none" where the columns are of one '
            "size already; they are not measured on the records, which are private"
        )
    return tuple(found for found in bounds if found is not None)
