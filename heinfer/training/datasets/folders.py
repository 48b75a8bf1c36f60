"""Data sets as folders of images: train/CLASS/*.png and test/CLASS/*.png; also .jpg, .jpeg and .bmp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Examples

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp")
#: Modes of Pillow that are taken: grey and RGB of 8 bits.
_MODES = ("L", "RGB")


def read_image_folder(folder: Path) -> tuple[Examples, Examples, tuple[str, ...]]:
    """Read training and test part.

    Args:
        folder: holds train and test, which hold one folder for each class.

    Returns:
        Training part, test part, and the names of the classes: those of the folders, sorted.

    Raises:
        InputError: a folder is missing or empty, a class has no folder in one part, a file is no image, or the images
            are not of one size and mode.
    """
    classes = {part: _classes(folder / part) for part in ("train", "test")}
    if classes["train"] != classes["test"]:
        odd = sorted(set(classes["train"]) ^ set(classes["test"]))
        raise InputError(f"{folder}: {', '.join(odd)} is a class in one of train and test only")
    names = classes["train"]
    train, test = (_read_part(folder / part, names) for part in ("train", "test"))
    return train, test, names


def is_image_folder(folder: Path) -> bool:
    """Whether the folder holds folders train and test."""
    return (folder / "train").is_dir() and (folder / "test").is_dir()


def _classes(part: Path) -> tuple[str, ...]:
    if not part.is_dir():
        raise InputError(f"{part} is missing; expected train/CLASS/*.png and test/CLASS/*.png")
    return tuple(sorted(entry.name for entry in part.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _read_part(part: Path, names: tuple[str, ...]) -> Examples:
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    first = None
    for label, name in enumerate(names):
        for path in sorted((part / name).iterdir()):
            if path.suffix.lower() not in _ENDINGS:
                continue
            image = _read_image(path)
            first = first or (path, image.shape)
            if image.shape != first[1]:
                raise InputError(
                    f"{path} has shape {image.shape} (channels, height, width), {first[0].name} {first[1]}: expected "
                    "one size; scale or crop them first"
                )
            images.append(image)
            labels.append(label)
    if not images:
        raise InputError(f"{part}: no images; expected CLASS/*{', CLASS/*'.join(_ENDINGS)}")
    return Examples(np.stack(images), np.array(labels, np.int64))


def _read_image(path: Path) -> NDArray[np.uint8]:
    """Read one image: uint8, shape (1 or 3, height, width)."""
    try:
        with Image.open(path) as image:
            if image.mode not in _MODES:
                raise InputError(
                    f"{path} is of mode {image.mode}; expected grey or RGB with 8 bits ({' or '.join(_MODES)}): "
                    "convert it first"
                )
            pixels = np.asarray(image, np.uint8)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is not an image that can be read: {error}") from error
    return pixels[np.newaxis] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
