"""A test part set aside from records that come without one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Examples


def split_examples(examples: Examples, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """Set a fraction of every class aside, at random; what remains keeps its order.

    Args:
        examples: all records.
        fraction: part of each class that is set aside, in (0, 1); rounded to records.
        seed: decides which; the split depends on it, the labels and their order only.

    Returns:
        Training part and test part.

    Raises:
        InputError: one of the two would be empty.
    """
    generator = np.random.default_rng(seed)
    aside: NDArray[np.bool_] = np.zeros(len(examples), np.bool_)
    for label in np.unique(examples.labels):
        members = np.flatnonzero(examples.labels == label)
        aside[generator.permutation(members)[: round(fraction * len(members))]] = True
    if aside.all() or not aside.any():
        raise InputError(
            f"test_fraction = {fraction} of {len(examples)} records leaves one part empty; choose another, or bring a "
            "test part"
        )
    return examples.select(~aside), examples.select(aside)
