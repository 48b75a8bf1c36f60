"""How good a trained model is: exactly on public test records, or with noise that is paid for.

A noisy accuracy is a count with Gaussian noise. One record more or less moves the count by one, so its sensitivity
is 1, and noise of deviation z costs what `GaussianRelease(z)` costs. The accountant adds it to the training's cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from heinfer.training.datasets.dataset import Examples
from heinfer.training.privacy.mechanisms import GaussianRelease
from heinfer.training.privacy.randomness import KeyedRandomness, Purpose
from heinfer.training.private_trainer import Records

#: Records in a forward pass; bounds memory, does not change the result.
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Quality:
    """What is known of a model's accuracy.

    Attributes:
        accuracy: fraction of the test records that are classified correctly.
        auc: area under the ROC curve where there are two classes and the test records are public, None otherwise.
        records: number of test records.
        deviation: standard deviation of the noise on the accuracy; 0 where it is exact.
    """

    accuracy: float
    auc: float | None
    records: int
    deviation: float

    def to_json(self) -> dict[str, Any]:
        """Return what the card says."""
        return {
            "accuracy": self.accuracy,
            "auc": self.auc,
            "test_records": self.records,
            "test_noise": self.deviation,
            "test_data": "public" if self.deviation == 0 else "private, paid from the budget",
        }


def measure_quality(logits: NDArray[np.float32], test: Examples) -> Quality:
    """Measure accuracy, and AUC for two classes, on public records.

    Args:
        logits: of the model, shape (records, classes).
        test: the records' labels are taken.
    """
    correct = logits.argmax(axis=1) == test.labels
    auc = None
    if logits.shape[1] == 2 and len(np.unique(test.labels)) == 2:
        auc = area_under_curve(logits[:, 1].astype(np.float64) - logits[:, 0], test.labels)
    return Quality(float(correct.mean()), auc, len(test), 0.0)


@torch.no_grad()
def measure_accuracy(network: nn.Module, records: Records) -> float:
    """Return the fraction of records that a network classifies correctly.

    Args:
        network: in evaluation mode.
        records: not augmented.
    """
    correct = 0
    for indices in torch.split(torch.arange(len(records)), _BATCH):
        inputs, labels = records.select(indices, 0)
        correct += int((network(inputs).argmax(dim=1) == labels).sum())
    return correct / len(records)


def area_under_curve(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Area under the ROC curve: how often a record of class 1 has a higher score than one of class 0.

    Ties count one half (Mann and Whitney 1947).

    Args:
        scores: higher for class 1, shape (records,).
        labels: 0 or 1, both present.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = int(labels.sum())
    negatives = len(labels) - positives
    return float((ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def measure_privately(
    logits: NDArray[np.float32], test: Examples, release: GaussianRelease, randomness: KeyedRandomness
) -> Quality:
    """Measure accuracy on private records, with noise that has been paid for.

    Args:
        logits: of the model, shape (records, classes).
        test: private records; their number is public.
        release: what was paid.
        randomness: the run's.
    """
    correct = int((logits.argmax(axis=1) == test.labels).sum())
    (normal,) = randomness.normal(Purpose.EVALUATION, 0, 1)
    noisy = (correct + release.noise_multiplier * float(normal)) / len(test)
    return Quality(min(1.0, max(0.0, noisy)), None, len(test), release.noise_multiplier / len(test))
