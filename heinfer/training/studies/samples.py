"""The records of a study: a file that the caller names, or scikit-learn's digits, and a part of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from heinfer.training.datasets.dataset import Dataset, Examples
from heinfer.training.datasets.loading import load_dataset
from heinfer.training.datasets.registry import SETS
from heinfer.training.settings import DataSource

#: Decides which records a part has.
_SEED = 0
#: Brings digits of 8x8 pixels to the 28x28 that the studies' network is for.
_FACTOR, _MARGIN = 3, 2


def load_records(path: Path | None) -> Dataset:
    """Read a data set that is public, or taken as such.

    Args:
        path: a file or folder as in recipes, for example mnist.npz; None takes scikit-learn's digits, enlarged.

    Raises:
        InputError: it cannot be read.
    """
    if path is None:
        digits = load_dataset(_known("digits"))
        return replace(digits, train=_enlarge(digits.train), test=_enlarge(digits.test))
    name = path.stem if path.stem in SETS and not SETS[path.stem].packaged else None
    return load_dataset(_known(name) if name else DataSource(path.stem, "as stated for the data", "unknown"), path)


def take_part(data: Dataset, records: int) -> Dataset:
    """Keep some training records, drawn at random but always the same; all test records stay.

    Args:
        data: all records.
        records: how many to keep; all where there are not more.

    Raises:
        InputError: a class has none among them.
    """
    if records >= len(data.train):
        return data
    chosen = np.random.default_rng(_SEED).permutation(len(data.train))[:records]
    return replace(data, train=data.train.select(np.sort(chosen)))


def _known(name: str) -> DataSource:
    known = SETS[name]
    return DataSource(known.title, known.license, known.credit, set=name)


def _enlarge(examples: Examples) -> Examples:
    """Repeat every pixel, and surround the image with black."""
    large = np.asarray(examples.inputs, np.uint8).repeat(_FACTOR, axis=2).repeat(_FACTOR, axis=3)
    framed = np.pad(large, ((0, 0), (0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN)))
    return Examples(framed.astype(np.uint8), examples.labels)
