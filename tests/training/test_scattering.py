"""Scattering features are those of kymatio, whatever the images, and so are those of the exported model."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from heinfer.errors import InputError  # noqa: E402
from heinfer.training.export import export_network, run_model  # noqa: E402
from heinfer.training.scattering import (  # noqa: E402
    ANGLES,
    FEATURES_PER_CHANNEL,
    ScatteringFeatures,
    make_low_pass,
    make_wavelets,
    scatter,
)

#: Orders of the features of one channel.
pytestmark = pytest.mark.usefixtures("operators_registered_once")

ORDERS = (slice(0, 1), slice(1, 1 + 2 * ANGLES), slice(1 + 2 * ANGLES, FEATURES_PER_CHANNEL))


def kymatio_features(images: NDArray[np.uint8]) -> torch.Tensor:
    """The oracle: shape (images, channels, 81, height / 4, width / 4)."""
    pytest.importorskip("kymatio")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kymatio's own, on being imported
        from kymatio.torch import Scattering2D

        transform = Scattering2D(J=2, shape=images.shape[2:], L=ANGLES)
    features: torch.Tensor = transform(torch.from_numpy(images).float() / 255)
    return features


def assert_agreement(images: NDArray[np.uint8], tolerance: float = 1e-3) -> None:
    expected = kymatio_features(images)
    found = scatter(images).unflatten(1, expected.shape[1:3])
    assert found.shape == expected.shape
    for order in ORDERS:
        difference = (found[:, :, order] - expected[:, :, order]).norm()
        assert difference <= tolerance * expected[:, :, order].norm()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 24, 40)])
def test_scatter_noise_gives_kymatio_features(shape: tuple[int, int, int]) -> None:
    assert_agreement(np.random.default_rng(1).integers(0, 256, (4, *shape), dtype=np.uint8))


def test_scatter_edges_give_kymatio_features() -> None:
    images = np.zeros((3, 1, 28, 28), np.uint8)  # what lies at a border shows how it is continued
    images[0, 0, 0, 0] = images[1, 0, :, 27] = images[2, 0, 20:] = 255
    assert_agreement(images, tolerance=2e-3)


def test_scatter_digits_give_kymatio_features(shared: Path) -> None:
    with np.load(shared / "data" / "mnist.npz") as archive:
        assert_agreement(archive["test_images"][:50, np.newaxis])


def test_scatter_in_batches_gives_what_the_module_gives() -> None:
    images = np.random.default_rng(2).integers(0, 256, (7, 1, 16, 16), dtype=np.uint8)
    transform = ScatteringFeatures((1, 16, 16))
    expected = transform(torch.from_numpy(images) / 255)
    assert expected.shape[1:] == transform.output_shape == (81, 4, 4)
    torch.testing.assert_close(scatter(images, batch=3), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(scatter(images.astype(np.float32) / 255), expected, rtol=1e-5, atol=1e-7)


def test_features_have_no_weights() -> None:
    transform = ScatteringFeatures((1, 28, 28))
    assert not list(transform.parameters())
    assert not transform.state_dict()


def test_features_export_to_few_static_operators() -> None:
    shape = (2, 16, 16)
    images = np.random.default_rng(3).random((3, *shape), dtype=np.float32)
    transform = ScatteringFeatures(shape)
    model = export_network(transform, shape)
    np.testing.assert_allclose(run_model(model, images), transform(torch.from_numpy(images)), rtol=0, atol=1e-5)
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Conv") == 3
    assert operators.count("MatMul") == 4


@pytest.mark.parametrize("octave", [0, 1])
def test_make_wavelets_ignore_the_mean_and_are_hermitian(octave: int) -> None:
    wavelets = make_wavelets(octave)
    np.testing.assert_allclose(wavelets.sum(axis=(2, 3)), 0, atol=1e-12)
    mirrored = wavelets[:, :, ::-1, ::-1]
    np.testing.assert_allclose(mirrored[0::2], wavelets[0::2], atol=1e-12)
    np.testing.assert_allclose(mirrored[1::2], -wavelets[1::2], atol=1e-12)


def test_make_low_pass_keeps_the_mean() -> None:
    for matrix in make_low_pass(28):
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-4)  # of a sampled Gaussian: 2 exp(-2 (pi sigma)^2)


@pytest.mark.parametrize("shape", [(1, 30, 28), (1, 28, 8)])
def test_features_of_other_sizes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="divisible by 4"):
        ScatteringFeatures(shape)
