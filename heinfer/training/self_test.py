"""What a run verifies on its own network before the first private record is read; the results are on the card.

The records are random, so none of it costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from heinfer.errors import IntegrityError
from heinfer.training.assembly import make_clipping, require_privacy, training_device
from heinfer.training.datasets.dataset import Dataset
from heinfer.training.losses import cross_entropy
from heinfer.training.privacy.gradients import ClippedGradients
from heinfer.training.privacy.randomness import KeyedRandomness, Purpose
from heinfer.training.recipe import Recipe

_RECORDS = 16
_NUMBERS = 100_000
#: Standard errors that a sum of random numbers may be off; happens once in 10^11 runs.
_ERRORS = 7.0
#: Rounding of float32 sums, relative.
_ROUNDING = 1e-4


def verify_mechanism(
    network: nn.Module,
    recipe: Recipe,
    data: Dataset,
    randomness: KeyedRandomness,
    features: nn.Module | None = None,
) -> Mapping[str, str]:
    """Verify clipping and noise.

    Args:
        network: what is trained.
        recipe: with a table [privacy].
        data: for the shape of its records and the number of classes.
        randomness: of the run; numbers of the purpose AUDIT are drawn.
        features: what comes before the network, if it is a head.

    Returns:
        Lines for the card, by what was verified.

    Raises:
        IntegrityError: a record moves the sum by more than the sensitivity, or the noise is not of deviation 1.
    """
    sensitivity, moved = _largest_move(network, recipe, data, features)
    if not moved <= sensitivity * (1 + _ROUNDING):
        raise IntegrityError(f"one record moves the sum by {moved:.6g}, more than the sensitivity {sensitivity:.6g}")
    normal = randomness.normal(Purpose.AUDIT, 0, _NUMBERS)
    variance, mean = float(np.square(normal).mean()), float(normal.mean())
    if abs(variance - 1) > _ERRORS * math.sqrt(2 / _NUMBERS) or abs(mean) > _ERRORS / math.sqrt(_NUMBERS):
        raise IntegrityError(f"the noise has mean {mean:.4f} and variance {variance:.4f}, expected 0 and 1")
    return {
        "clipping": f"one record of {_RECORDS} moved the sum by at most {moved / sensitivity:.4f} of the sensitivity",
        "noise": f"deviation {math.sqrt(variance):.4f} of 1 over {_NUMBERS} numbers",
        "sampler": "Poisson: every record by itself, from the run's generator",
        "batch statistics": "no layer mixes records (checked by changing one)",
    }


def _largest_move(network: nn.Module, recipe: Recipe, data: Dataset, features: nn.Module | None) -> tuple[float, float]:
    """Return the sensitivity, and by how much leaving one record out moves the clipped sum at most."""
    device = training_device()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(_RECORDS, *data.input_shape, generator=generator).to(device)
    labels = torch.randint(data.classes, (_RECORDS,), generator=generator).to(device)
    if features is not None:
        with torch.no_grad():
            inputs = features(inputs)
    clipping = make_clipping(require_privacy(recipe))
    gradients = ClippedGradients(network, cross_entropy)
    everyone = gradients.sum(inputs, labels, clipping).sums
    moves = []
    for left_out in range(_RECORDS):
        kept = torch.arange(_RECORDS, device=device) != left_out
        others = gradients.sum(inputs[kept], labels[kept], clipping).sums
        moves.append(math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(everyone, others, strict=True))))
    return clipping.sensitivity, max(moves)
