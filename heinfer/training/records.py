"""Private records on the training device, as the private loop selects them."""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor, nn

from heinfer.training.augmentation import augment
from heinfer.training.datasets import PIXEL_MAXIMUM, Examples
from heinfer.training.settings import Augmentation


class AugmentedRecords:
    """Records as they came, changed at random each time they are selected.

    Args:
        examples: images or rows of a table.
        augmentation: how; its `copies` copies of a record are drawn independently.
        device: where they are trained on, and kept.
    """

    def __init__(self, examples: Examples, augmentation: Augmentation, device: torch.device) -> None:
        self._inputs = torch.tensor(examples.inputs, device=device)
        self._labels = torch.tensor(examples.labels, device=device)
        self._augmentation = augmentation

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._labels)

    @property
    def augmented(self) -> bool:
        """Whether `select` returns several copies of a record."""
        return self._augmentation.copies > 1

    def select(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """See `heinfer.training.private_trainer.Records`."""
        chosen = indices.to(self._labels.device)
        inputs, labels = self._inputs[chosen], self._labels[chosen]
        if inputs.dtype == torch.uint8:
            inputs = inputs.float() / PIXEL_MAXIMUM
            generator = torch.Generator().manual_seed(seed)
            copies = self._augmentation.copies
            inputs = augment(inputs.repeat_interleave(copies, dim=0), self._augmentation, generator)
            if self.augmented:
                inputs = inputs.reshape(len(labels), copies, *inputs.shape[1:])
        return inputs, labels


class FeatureRecords:
    """Fixed features of records, computed once.

    Args:
        examples: images.
        features: without weights.
        device: where they are trained on, and kept.
        cache: keeps the features for other runs; None computes them for this one.
    """

    augmented = False

    def __init__(
        self, examples: Examples, features: nn.Module, device: torch.device, cache: FeatureCache | None = None
    ) -> None:
        compute = compute_features if cache is None else cache.compute
        self._features = compute(features, examples, device)
        self._labels = torch.tensor(examples.labels, device=device)
        self._chosen = self._features.new_empty(0)  # memory that is used again: fresh pages cost more than the copy

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._labels)

    def select(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """See `heinfer.training.private_trainer.Records`; the inputs hold until the next call."""
        chosen = indices.to(self._labels.device)
        if len(self._chosen) < len(chosen):
            self._chosen = self._features.new_empty(len(chosen) * 9 // 8, *self._features.shape[1:])
        inputs = self._chosen[: len(chosen)]
        torch.index_select(self._features, 0, chosen, out=inputs)
        return inputs, self._labels[chosen]


class FeatureCache:
    """Features of records, computed once for all runs of one process."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, str], Tensor] = {}
        self._examples: dict[int, Examples] = {}  # held, so that no other object takes over a key's number

    def compute(self, features: nn.Module, examples: Examples, device: torch.device) -> Tensor:
        """See `compute_features`; the same module on the same records is applied once."""
        self._examples[id(examples)] = examples
        key = (id(examples), _digest(features), str(device))
        if key not in self._found:
            self._found[key] = compute_features(features, examples, device)
        return self._found[key]


def _digest(module: nn.Module) -> str:
    """What decides a module's output: its layers, and all its numbers."""
    digest = sha256(repr(module).encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def compute_features(features: nn.Module, examples: Examples, device: torch.device, batch: int = 50) -> Tensor:
    """Apply a module without weights to all records.

    Args:
        features: from (records, *input_shape) in [0, 1] to features.
        examples: images.
        device: where to compute and to keep the result.
        batch: records at a time; bounds memory, does not change the result.

    Returns:
        float32, records first.
    """
    module = features.to(device).eval()
    inputs = torch.tensor(examples.inputs)
    found: Tensor | None = None
    with torch.no_grad():
        for start in range(0, len(inputs), batch):
            piece = inputs[start : start + batch].to(device)
            part = module(piece.float() / PIXEL_MAXIMUM if piece.dtype == torch.uint8 else piece)
            if found is None:
                found = part.new_empty(len(inputs), *part.shape[1:])
            found[start : start + batch] = part
    assert found is not None  # a data set has records
    return found
