"""What all tests share: process settings, hypothesis settings, the folder ../shared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from heinfer.processes import prepare_environment

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from heinfer.client import LocalModel
    from tests.parties import WatchedPool

prepare_environment()  # before a test module imports numpy

# The first example of a test may compile kernels, which takes seconds on a busy machine; pytest-timeout watches over
# hanging tests.
settings.register_profile("heinfer", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("heinfer")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need ../shared, so that `-m "not shared"` leaves them out."""
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with data sets and models: HEINFER_SHARED, or shared/ beside the repository.

    Where it is absent the test is skipped; with HEINFER_REQUIRE_SHARED=1, as in CI, it fails.
    """
    folder = Path(os.environ.get("HEINFER_SHARED") or REPOSITORY.parent / "shared")
    if folder.is_dir():
        return folder
    reason = f"needs the folder shared, expected at {folder} (HEINFER_SHARED names another)"
    if os.environ.get("HEINFER_REQUIRE_SHARED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def operators_registered_once() -> Iterator[None]:
    """Let torch's newer exporter make its table of operators once: made for every export, it takes half of the time."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="session")
def lenet_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released LeNet-5, partitioned."""
    from partitioner import partition

    folder = tmp_path_factory.mktemp("lenet")
    partition(REPOSITORY / "models" / "released" / "mnist_lenet5" / "model.onnx", folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="session", params=["standard", "prepared"])
def lenet(lenet_bundle: Path, request: pytest.FixtureRequest) -> Iterator[LocalModel]:
    """The released LeNet-5 behind a node and a server that are processes of their own; the node traces. Each mode."""
    from heinfer.client import local

    with local(lenet_bundle, allow_trace=True, mode=request.param) as model:
        yield model


@pytest.fixture(scope="session")
def lenet_samples() -> dict[str, NDArray[Any]]:
    """x, float32 in [0, 1], and y: a thousand MNIST test digits."""
    import numpy as np

    with np.load(REPOSITORY / "models" / "released" / "mnist_lenet5" / "samples.npz") as archive:
        return {"x": archive["x"], "y": archive["y"]}


@pytest.fixture(scope="session")
def dense_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two small dense layers, partitioned; the model lies beside the bundle."""
    from partitioner import partition
    from tests.small_models import dense_model

    folder = tmp_path_factory.mktemp("dense")
    partition(dense_model(folder / "dense.onnx"), folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="session", params=["standard", "prepared"])
def dense(dense_bundle: Path, request: pytest.FixtureRequest) -> Iterator[LocalModel]:
    """The small dense model behind processes of its own, in each mode; the node does not trace."""
    from heinfer.client import local

    with local(dense_bundle, mode=request.param) as model:
        yield model


@pytest.fixture(scope="session")
def pool() -> Iterator[WatchedPool]:
    """A node's worker for the default ring, watched."""
    from heinfer.ring import RingParameters
    from tests.parties import WatchedPool

    with WatchedPool(RingParameters.default(), workers=1) as pool:
        yield pool
