"""Random changes of training images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from heinfer.training.settings import Augmentation


def augment(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Shift, rotate and mirror every image at random; pixels from outside are zero, values between pixels bilinear.

    Args:
        images: float32, shape (batch, channels, height, width).
        augmentation: largest shift and rotation, and whether to mirror; nothing of it returns the images as they are.
        generator: source of the draws, on the CPU.

    Returns:
        float32, the shape of `images`.
    """
    if not augmentation.changes_images:
        return images
    batch, _, height, width = images.shape
    draws = 2 * torch.rand(batch, 3, generator=generator) - 1
    angles = torch.deg2rad(draws[:, 0] * augmentation.rotation_degrees)
    # affine_grid's coordinates run from -1 to 1 across the image: a pixel is 2/width or 2/height of that.
    shift_x = draws[:, 1] * augmentation.shift_pixels * 2 / width
    shift_y = draws[:, 2] * augmentation.shift_pixels * 2 / height
    # The rotation's off-diagonal terms carry the aspect ratio, so that images that are not square are not sheared.
    transforms = torch.stack(
        [
            torch.stack([angles.cos(), -angles.sin() * height / width, shift_x], dim=1),
            torch.stack([angles.sin() * width / height, angles.cos(), shift_y], dim=1),
        ],
        dim=1,
    )
    if augmentation.flip:
        mirrored = torch.rand(batch, generator=generator) < 0.5
        transforms[mirrored, :, 0] *= -1
    grid = functional.affine_grid(transforms, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid.to(images.device), padding_mode="zeros", align_corners=False)
