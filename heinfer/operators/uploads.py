"""Uploads: a part of a value as the server gets it, and where its elements lie in ciphertexts.

    value --(elements)--> server input, row-major --(places)--> ciphertext * N + coefficient

How many ciphertexts an upload fills is known at once; arrays are made when they are asked for, so that cuts can be
compared cheaply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from heinfer.operators.planes import Plane
from heinfer.operators.steps import Shape

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Upload:
    """One server input.

    Attributes:
        value: number of the value that it is a part of.
        shape: as the server gets it.
        ciphertexts: how many it fills; its elements share none with other uploads.
        elements: makes, flat, which element of the value is uploaded, -1 for padding.
        places: makes, flat, where it lies, counted from the upload's first ciphertext on.
    """

    value: int
    shape: Shape
    ciphertexts: int
    elements: Callable[[], Indices]
    places: Callable[[], Indices]


def plane_upload(value: int, shape: Shape, plane: Plane, degree: int) -> Upload:
    """Upload a part of every channel of a value (C, H, W); a phase of a channel is a plane of a ciphertext."""

    def places() -> Indices:
        (rows, down), (columns, across) = (
            np.divmod(np.arange(length), count)
            for length, count in zip((plane.height, plane.width), plane.phases, strict=True)
        )
        number = np.arange(shape[0])[:, None, None] * prod(plane.phases)
        number = number + (down[:, None] * plane.phases[1] + across)
        return _in_planes(number, rows[:, None] * plane.columns + columns, plane.size, degree)

    sent = (shape[0], plane.height, plane.width)
    return Upload(value, sent, plane.ciphertexts(shape[0], degree), lambda: _elements(shape, plane), places)


def flat_plane_upload(value: int, shape: Shape, plane: Plane, degree: int) -> Upload:
    """Upload a part of every channel of a value (C, H, W) for dense hints alone: values lie as they come."""
    sent = (shape[0], plane.height, plane.width)
    return Upload(value, sent, -(-prod(sent) // degree), lambda: _elements(shape, plane), lambda: np.arange(prod(sent)))


def flat_upload(value: int, shape: Shape, degree: int) -> Upload:
    """Upload all of a value, as it lies."""
    count = prod(shape)
    return Upload(value, shape, -(-count // degree), lambda: np.arange(count), lambda: np.arange(count))


def token_upload(value: int, first: int, count: int, inputs: int, degree: int) -> Upload:
    """Upload some tokens; what shares a plane is one feature of all of them."""
    return Upload(
        value,
        (count, inputs),
        -(-inputs // (degree // count)),
        lambda: np.arange(first * inputs, (first + count) * inputs),
        lambda: _in_planes(np.arange(inputs)[None], np.arange(count)[:, None], count, degree),
    )


def _elements(shape: Shape, plane: Plane) -> Indices:
    """Return which element of a value every position of a plane is; positions outside of it are padding."""
    channels, height, width = shape
    y = plane.top + plane.strides[0] * np.arange(plane.height)
    x = plane.left + plane.strides[1] * np.arange(plane.width)
    inside = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))[None]
    offsets = np.where(inside, y[:, None] * width + x[None], 0).ravel()
    elements = np.arange(channels)[:, None] * (height * width) + offsets
    elements[:, ~inside.ravel()] = -1
    return elements.ravel()


def _in_planes(plane: Indices, position: Indices, size: int, degree: int) -> Indices:
    """Return where positions of planes lie: as many planes of a size share a ciphertext as fit."""
    shared = degree // size
    return (plane // shared * degree + plane % shared * size + position).ravel()
