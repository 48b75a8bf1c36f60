"""Per-record losses: cross entropy, and distillation from a teacher that was trained on public data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from heinfer.training.privacy.gradients import LossFunction
from heinfer.training.private_trainer import Records
from heinfer.training.settings import Distillation


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every record, shape (records,)."""
    return functional.cross_entropy(logits, labels, reduction="none")


def make_distillation_loss(settings: Distillation) -> LossFunction:
    """Return the loss of Hinton, Vinyals and Dean (2015): (1 - w) CE(y) + w T^2 KL(teacher_T, student_T).

    It takes what `DistilledRecords` gives as labels.
    """
    temperature, weight = settings.temperature, settings.weight

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        labels, teacher = targets[:, 0].long(), targets[:, 1:]
        soft = functional.kl_div(
            functional.log_softmax(logits / temperature, dim=1),
            functional.log_softmax(teacher / temperature, dim=1),
            reduction="none",
            log_target=True,
        ).sum(dim=1)
        return (1 - weight) * cross_entropy(logits, labels) + weight * temperature**2 * soft

    return loss


class DistilledRecords:
    """Records whose labels carry a teacher's logits.

    A record's logits depend on that record alone, so the sensitivity of a step stays what it is.

    Args:
        records: inputs and labels.
        logits: of the teacher for every record, shape (records, classes).
    """

    def __init__(self, records: Records, logits: Tensor) -> None:
        self._records = records
        self._logits = logits

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    @property
    def augmented(self) -> bool:
        """Whether `select` returns several copies of a record."""
        return self._records.augmented

    def select(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """As those of the records, but labels are float32 (records, 1 + classes): the label, then the logits."""
        inputs, labels = self._records.select(indices, seed)
        logits = self._logits[indices.to(self._logits.device)]
        return inputs, torch.cat([labels[:, None].to(logits), logits], dim=1)
