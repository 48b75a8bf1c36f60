"""Scattering features: what is worth knowing of an image before anything has been learned from private data.

A 28x28 image becomes 81 maps of 7x7: its local mean, 16 averaged responses to Morlet wavelets, and 64 averaged
responses of those responses. Nothing in them is trained, so they cost no privacy, and a small model on top of them is
the strongest baseline for training from scratch with differential privacy (Tramer and Boneh, "Differentially private
learning needs better features (or much more data)", 2021).

The transform is that of Bruna and Mallat, "Invariant scattering convolution networks" (2013), of order 2 over two
octaves and eight angles, with the filters, the padding and the order of the features of kymatio's
`Scattering2D(J=2, shape=..., L=8)` (Andreux et al. 2020), which works in Fourier space. Here it is plain convolutions
and matrix products, so that it exports to ONNX and runs under encryption as any other layer:

    x        reflected by 4 pixels on every side, periodic beyond that
    U1(a)    |x * psi(0, a)| at every pixel, |x * psi(1, a)| at every second one: convolutions and modulus
    U2(a, b) |U1(a) * psi(1, b)| for the wavelets a of the first octave, at every second pixel
    S        low-passes of x, U1 and U2 at every fourth pixel: two products with constant matrices

Kernels are cut where the envelope of the wavelet has fallen to `exp(-TRUNCATION**2 / 2)` along its long axis. Against
kymatio this changes the features of digits, photographs and noise by less than 1e-3 of their norm, for each order by
itself (2e-4 for all of them together), and those of single lines by less than 2e-3; the tests hold it to that.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from heinfer.errors import InputError

#: Octaves and angles. Other numbers would need other code: the sub-sampling below is that of two octaves.
OCTAVES = 2
ANGLES = 8
#: Features per channel: the mean, one per wavelet, one per pair of wavelets of the first and the second octave.
FEATURES_PER_CHANNEL = 1 + OCTAVES * ANGLES + ANGLES**2
#: Step of the features' grid, in pixels.
STRIDE = 2**OCTAVES
#: Border that is reflected, in pixels on every side; kymatio's choice for sizes divisible by 4.
BORDER = 4
#: Width of the envelopes in the first octave, in pixels; doubles with every octave. From kymatio, as the next two.
ENVELOPE = 0.8
#: Frequency of the wavelets of the first octave, in radians per pixel; halves with every octave.
FREQUENCY = 3 / 4 * math.pi
#: Width of an envelope along the wave divided by that across it.
SLANT = 4 / ANGLES
#: Half the size of a kernel, in units of the envelope's longer width: 5 and 10 pixels.
TRUNCATION = 3.125
#: Images that `scatter` takes at a time: few, so that they stay in the processor's cache.
BATCH = 25

PIXEL_MAXIMUM = 255


class ScatteringFeatures(nn.Module):
    """The scattering transform as a module without weights; real and imaginary parts are neighbouring channels.

    The modulus has no derivative at zero: gradients don't pass through these features, nor do they have to.

    Attributes:
        output_shape: shape of one image's features.
    """

    def __init__(self, input_shape: tuple[int, int, int]) -> None:
        """Compute the filters.

        Args:
            input_shape: channels, height and width of the images.

        Raises:
            InputError: height or width is below 16 or not divisible by 4.
        """
        super().__init__()
        channels, height, width = input_shape
        if height % STRIDE or width % STRIDE or min(height, width) < 16:
            raise InputError(
                f"scattering features need a height and width of at least 16 and divisible by {STRIDE}, "
                f"found {height}x{width}; pad or crop the images"
            )
        self.output_shape = (channels * FEATURES_PER_CHANNEL, height // STRIDE, width // STRIDE)
        arrays = {
            "wavelets_0": make_wavelets(0),
            "wavelets_1": make_wavelets(1),
            "rows": make_low_pass(height)[0],
            "columns": make_low_pass(width)[0].T,
            "coarse_rows": make_low_pass(height)[1],
            "coarse_columns": make_low_pass(width)[1].T,
        }
        for name, array in arrays.items():
            self.register_buffer(name, torch.tensor(array, dtype=torch.float32), persistent=False)
        self.wavelets_0: Tensor
        self.wavelets_1: Tensor
        self.rows: Tensor
        self.columns: Tensor
        self.coarse_rows: Tensor
        self.coarse_columns: Tensor

    def forward(self, image: Tensor) -> Tensor:
        """Compute the features.

        Args:
            image: float32, shape (batch, channels, height, width).

        Returns:
            float32, shape (batch, channels * 81, height / 4, width / 4); the features of a channel lie together:
            the mean, eight angles of the first octave, eight of the second, then the pairs, angle of the first octave
            first.
        """
        padded = functional.pad(image, (BORDER,) * 4, mode="reflect")
        fine = _modulus(_convolve(padded, self.wavelets_0, stride=1))
        coarse = _modulus(_convolve(padded, self.wavelets_1, stride=2))
        second = _modulus(_convolve(fine, self.wavelets_1, stride=2))
        averages = self.rows @ torch.cat([padded, fine], dim=1) @ self.columns
        coarse_averages = self.coarse_rows @ torch.cat([coarse, second], dim=1) @ self.coarse_columns
        return self._in_order(averages, coarse_averages)

    def _in_order(self, averages: Tensor, coarse_averages: Tensor) -> Tensor:
        """Bring the features of every channel together."""
        channels = self.output_shape[0] // FEATURES_PER_CHANNEL
        sizes = [channels, channels * ANGLES]
        first = torch.split(averages, sizes, dim=1)
        second = torch.split(coarse_averages, [sizes[1], sizes[1] * ANGLES], dim=1)
        if channels == 1:
            return torch.cat([*first, *second], dim=1)
        height, width = self.output_shape[1:]
        parts = [part.reshape(-1, channels, part.shape[1] // channels, height, width) for part in (*first, *second)]
        return torch.cat(parts, dim=2).reshape(-1, *self.output_shape)


def scatter(images: Tensor | NDArray[np.uint8] | NDArray[np.float32], batch: int = BATCH) -> Tensor:
    """Compute the features of many images, once and for all: 60,000 MNIST digits take 90 seconds of one core.

    Args:
        images: shape (images, channels, height, width); uint8, which is divided by 255, or float32. The features are
            computed on the device where a tensor lies.
        batch: images at a time; bounds memory, does not change the result.

    Returns:
        float32, shape (images, channels * 81, height / 4, width / 4).

    Raises:
        InputError: as `ScatteringFeatures`.
    """
    source = torch.as_tensor(images)
    _, channels, height, width = source.shape
    transform = ScatteringFeatures((channels, height, width)).to(source.device)
    features = torch.empty(len(source), *transform.output_shape, device=source.device)
    with torch.inference_mode():
        for start in range(0, len(source), batch):
            part = source[start : start + batch]
            part = part / PIXEL_MAXIMUM if part.dtype == torch.uint8 else part.float()
            features[start : start + batch] = transform(part)
    return features


def make_wavelets(octave: int) -> NDArray[np.float64]:
    """Make the Morlet wavelets of one octave: g(u) (exp(i f.u) - k), with g a Gaussian and k such that the sum is 0.

    Args:
        octave: 0 or 1.

    Returns:
        Shape (16, 1, size, size): real and imaginary part for each of eight angles, from 3/8 pi down to -pi/2.
    """
    sigma, frequency = ENVELOPE * 2**octave, FREQUENCY / 2**octave
    radius = round(TRUNCATION * sigma / SLANT)
    row, column = np.mgrid[-radius : radius + 1, -radius : radius + 1].astype(np.float64)
    parts = []
    for number in range(ANGLES):
        angle = (ANGLES // 2 - 1 - number) * math.pi / ANGLES
        along = math.cos(angle) * row + math.sin(angle) * column
        across = -math.sin(angle) * row + math.cos(angle) * column
        envelope = np.exp(-(along**2 + (SLANT * across) ** 2) / (2 * sigma**2)) * SLANT / (2 * math.pi * sigma**2)
        wave = envelope * np.exp(1j * frequency * along)
        wave -= wave.sum() / envelope.sum() * envelope
        parts += [wave.real, wave.imag]
    return np.stack(parts)[:, np.newaxis]


def make_low_pass(size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Make the low-pass along one axis as matrices: a periodic Gaussian, evaluated at every fourth pixel of the image.

    The second matrix takes every second pixel. Its filter is the Gaussian without the frequencies that such a grid
    can't carry; as in kymatio, of the highest it keeps the negative one only.

    Args:
        size: pixels of the image along the axis, without its border.

    Returns:
        Shapes (size / 4, size + 8) and (size / 4, (size + 8) / 2).
    """
    padded = size + 2 * BORDER
    sigma = ENVELOPE * 2 ** (OCTAVES - 1)
    position = np.arange(padded)
    period = np.arange(-2, 3)[:, np.newaxis] * padded
    fine = np.exp(-((position + period) ** 2) / (2 * sigma**2)).sum(axis=0) / (math.sqrt(2 * math.pi) * sigma)
    spectrum = np.fft.fft(fine).real
    kept = padded // 4
    coarse = np.fft.ifft(np.concatenate([spectrum[:kept], spectrum[-kept:]])).real
    centres = BORDER + STRIDE * np.arange(size // STRIDE)[:, np.newaxis]
    return fine[centres - position], coarse[centres // 2 - np.arange(padded // 2)]


def _convolve(image: Tensor, kernels: Tensor, stride: int) -> Tensor:
    """Convolve every channel of a periodic image with every kernel: (batch, c, h, w) to (batch, c * kernels, ...).

    Torch correlates; of a real image with these wavelets that gives the complex conjugate, whose modulus is the same.
    """
    radius = kernels.shape[-1] // 2
    padded = functional.pad(image, (radius,) * 4, mode="circular")
    channels = image.shape[1]
    if torch.compiler.is_exporting():
        return functional.conv2d(padded, kernels.repeat(channels, 1, 1, 1), stride=stride, groups=channels)
    # The same, with the channels as images of their own: 2.5 times as fast, but ONNX models keep samples apart.
    alone = functional.conv2d(padded.flatten(0, 1).unsqueeze(1), kernels, stride=stride)
    return alone.reshape(-1, channels * len(kernels), *alone.shape[2:])


def _modulus(parts: Tensor) -> Tensor:
    """Modulus of complex channels: (batch, 2 c, height, width) to (batch, c, height, width)."""
    pairs = parts.reshape(-1, parts.shape[1] // 2, 2, *parts.shape[2:])
    return pairs.square().sum(dim=2).sqrt()
