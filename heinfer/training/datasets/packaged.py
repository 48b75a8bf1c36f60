"""Data sets that come with scikit-learn, so that there is nothing to download.

Both are split once and for all: a fifth of every class, drawn with seed 0, is the test part.
"""

from __future__ import annotations

import numpy as np

from heinfer.training.datasets.dataset import PIXEL_MAXIMUM, Examples
from heinfer.training.datasets.splitting import split_examples

TEST_FRACTION = 0.2
SPLIT_SEED = 0
#: Largest value of the digits, which are counts of pixels in 4x4 squares.
_COUNTS = 16


def read_breast_cancer() -> tuple[Examples, Examples, tuple[str, ...]]:
    """Read 569 tumours: 30 measures of cell nuclei, label 0 malignant, 1 benign.

    Returns:
        Training part, test part, and the names of the measures.
    """
    from sklearn.datasets import load_breast_cancer  # type: ignore[import-untyped]

    bunch = load_breast_cancer()
    examples = Examples(bunch.data.astype(np.float32), bunch.target.astype(np.int64))
    train, test = split_examples(examples, TEST_FRACTION, SPLIT_SEED)
    return train, test, tuple(str(name) for name in bunch.feature_names)


def read_digits() -> tuple[Examples, Examples]:
    """Read 1,797 digits of 8x8 pixels; counts from 0 to 16 become pixels from 0 to 255, rounded."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (PIXEL_MAXIMUM / _COUNTS)).astype(np.uint8)
    examples = Examples(pixels[:, np.newaxis], bunch.target.astype(np.int64))
    return split_examples(examples, TEST_FRACTION, SPLIT_SEED)
