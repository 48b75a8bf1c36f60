"""Architectures have the shapes that the registry states."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from heinfer.errors import InputError  # noqa: E402
from heinfer.training.architectures import ARCHITECTURES, LeNet5, find_architecture  # noqa: E402


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize("batch", [1, 3])
def test_architecture_forward_gives_one_logit_per_class(name: str, batch: int) -> None:
    architecture = find_architecture(name)
    logits = architecture.build()(torch.rand(batch, *architecture.image_shape))
    assert logits.shape == (batch, architecture.classes)
    assert logits.dtype == torch.float32


def test_lenet5_layers_have_the_documented_number_of_weights() -> None:
    convolutions = (25 * 1 + 1) * 6 + (25 * 6 + 1) * 16
    linear = (256 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 10
    assert sum(weight.numel() for weight in LeNet5().parameters()) == convolutions + linear == 44_426


def test_lenet5_normalises_inside() -> None:
    normalising, plain = LeNet5(mean=0.25, deviation=0.5), LeNet5(mean=0.0, deviation=1.0)
    plain.load_state_dict(normalising.state_dict())
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(normalising(images), plain((images - 0.25) / 0.5))


def test_find_architecture_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'resnet'.*lenet5"):
        find_architecture("resnet")
