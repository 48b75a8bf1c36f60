"""Data sets as .csv files: a header, one column with the label, numbers in all others."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Examples
from heinfer.training.datasets.splitting import split_examples
from heinfer.training.settings import DataSource, suggest


@dataclass(frozen=True, slots=True)
class Table:
    """One .csv file as read.

    Attributes:
        features: names of the columns, without the label's.
        values: float32, shape (rows, features).
        labels: the label column, as text.
    """

    features: tuple[str, ...]
    values: NDArray[np.float32]
    labels: tuple[str, ...]


def read_tables(path: Path, source: DataSource) -> tuple[Examples, Examples, tuple[str, ...], tuple[str, ...]]:
    """Read training and test part from a folder with train.csv and test.csv, or from one file that is split.

    Args:
        path: the folder or file.
        source: names the label column, the classes and, for one file, the part that is set aside.

    Returns:
        Training part, test part, names of the classes, names of the features.

    Raises:
        InputError: a file is missing or has no such column, a feature is no number, a label is unknown, or a single
            file comes without `test_fraction`.
    """
    if path.is_dir():
        train, test = (read_table(path / name, source.label) for name in ("train.csv", "test.csv"))
        if train.features != test.features:
            raise InputError(f"{path}: train.csv and test.csv have other columns; expected the same, in the same order")
        names = source.class_names or _class_names((*train.labels, *test.labels))
        parts = [_to_examples(path / f"{part}.csv", table, names) for part, table in (("train", train), ("test", test))]
        return parts[0], parts[1], names, train.features
    table = read_table(path, source.label)
    names = source.class_names or _class_names(table.labels)
    if source.test_fraction is None:
        raise InputError(
            f"{path} has no test part: set test_fraction in [data], or name a folder with train.csv and test.csv"
        )
    train_part, test_part = split_examples(_to_examples(path, table, names), source.test_fraction, source.split_seed)
    return train_part, test_part, names, table.features


def read_table(path: Path, label: str) -> Table:
    """Read one file.

    Args:
        path: a .csv file in UTF-8, with commas and a header.
        label: name of the label's column.

    Raises:
        InputError: as `read_tables`; names the first cell that is no number by its column and row (as a spreadsheet
            counts: the header is row 1).
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file, strict=True) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read the table {path}: {error}") from error
    if label not in header:
        raise InputError(f"{path} has no column {label!r}{suggest(label, header)}; name the label's in [data] label")
    if len(set(header)) != len(header) or len(header) < 2 or not rows:
        raise InputError(f"{path}: expected a header of two or more different names, and rows below it")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise InputError(f"{path}, row {number}: expected {len(header)} cells, found {len(row)}")
    position = header.index(label)
    columns = [index for index in range(len(header)) if index != position]
    values = np.empty((len(rows), len(columns)), np.float32)
    for number, row in enumerate(rows):
        for place, column in enumerate(columns):
            values[number, place] = _number(path, number + 2, header[column], row[column])
    return Table(tuple(header[index] for index in columns), values, tuple(row[position].strip() for row in rows))


def _number(path: Path, row: int, column: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        found = repr(cell) if cell.strip() else "an empty cell"
        raise InputError(
            f"{path}, row {row}, column {column!r}: expected a number, found {found}; replace categories by columns of "
            "0 and 1, and fill in what is missing"
        ) from None


def _class_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Names of the classes in order: as numbers where all are whole numbers, else by the alphabet."""
    names = set(labels)
    return tuple(sorted(names, key=int) if all(name.isascii() and name.isdigit() for name in names) else sorted(names))


def _to_examples(path: Path, table: Table, names: tuple[str, ...]) -> Examples:
    numbers = {name: number for number, name in enumerate(names)}
    for row, label in enumerate(table.labels, 2):
        if label not in numbers:
            raise InputError(f"{path}, row {row}: label {label!r} is none of class_names: {', '.join(names)}")
    return Examples(table.values, np.array([numbers[label] for label in table.labels], np.int64))
