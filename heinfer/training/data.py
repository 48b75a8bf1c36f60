"""Labelled images from one .npz file.

The file holds four uint8 arrays: training images and labels, test images and labels, in the manner of MNIST. They stay
uint8 in memory; `as_unit_range` makes the values in [0, 1] that a network takes.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.recipe import DataSource

#: Largest pixel value; the images that a network takes are multiples of its inverse.
PIXEL_MAXIMUM = 255


@dataclass(frozen=True, slots=True)
class ImageData:
    """Images with labels, split into training and test part.

    Attributes:
        train_images: uint8, shape (images, height, width).
        train_labels: uint8, shape (images,).
        test_images: uint8, shape (images, height, width).
        test_labels: uint8, shape (images,).
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Refuse arrays that are not labelled images with an `InputError`."""
        for part, images, labels in (
            ("train", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            if images.dtype != np.uint8 or images.ndim != 3:
                raise InputError(
                    f"{part} images: expected uint8 of shape (images, height, width), "
                    f"found {images.dtype} of shape {images.shape}"
                )
            if labels.dtype != np.uint8 or labels.shape != images.shape[:1]:
                raise InputError(
                    f"{part} labels: expected uint8 of shape {images.shape[:1]}, one for each image, "
                    f"found {labels.dtype} of shape {labels.shape}"
                )
            if not len(images):
                raise InputError(f"{part} images: expected at least one image, found none")
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise InputError(
                f"training images are {self.train_images.shape[1:]}, test images {self.test_images.shape[1:]}: "
                "expected one size"
            )

    def require(self, image_shape: tuple[int, int, int], classes: int, held_out_images: int = 0) -> None:
        """Check that a network can be trained on these images.

        Args:
            image_shape: channels, height and width that the network takes.
            classes: number of classes that it tells apart.
            held_out_images: training images that are set aside.

        Raises:
            InputError: the images have another shape, a label is not below `classes`, or no image is left to train on.
        """
        found = (1, *self.train_images.shape[1:])
        if found != image_shape:
            raise InputError(f"the architecture takes images of shape {image_shape}, the data have {found}")
        largest = int(max(self.train_labels.max(), self.test_labels.max()))
        if largest >= classes:
            raise InputError(f"the architecture tells {classes} classes apart, the data have a label {largest}")
        if held_out_images >= len(self.train_images):
            raise InputError(
                f"held_out_images = {held_out_images} leaves none of the {len(self.train_images)} training images; "
                "lower it in the recipe"
            )

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of name, dtype, shape and bytes of the four arrays; blind to how they are stored."""
        digest = hashlib.sha256()
        for name in ("train_images", "train_labels", "test_images", "test_labels"):
            array: NDArray[np.uint8] = getattr(self, name)
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def load_images(path: Path, source: DataSource) -> ImageData:
    """Read images and labels.

    Args:
        path: an .npz file.
        source: names the keys of the four arrays.

    Raises:
        InputError: the file is missing or not an .npz file, a key is missing, or an array has the wrong dtype or shape.
    """
    keys = (source.train_images, source.train_labels, source.test_images, source.test_labels)
    try:
        with zipfile.ZipFile(path) as archive:
            present = {name.removesuffix(".npy") for name in archive.namelist()}
        missing = [key for key in keys if key not in present]
        if missing:
            raise InputError(
                f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(present)) or 'nothing'}. "
                "Name its keys in the recipe's table [data]"
            )
        with np.load(path, allow_pickle=False) as arrays:
            return ImageData(*(arrays[key] for key in keys))
    except OSError as error:
        raise InputError(f"cannot read the data {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError) as error:
        raise InputError(f"{path} is not an .npz file of plain arrays: {error}") from error


def as_unit_range(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels as a network takes them.

    Args:
        images: uint8, shape (images, height, width).

    Returns:
        float32 multiples of 1/255 in [0, 1], shape (images, 1, height, width).
    """
    return images[:, np.newaxis].astype(np.float32) / np.float32(PIXEL_MAXIMUM)
