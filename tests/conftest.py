"""What all tests share: process settings, hypothesis settings, the folder ../shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from heinfer.processes import prepare_environment

prepare_environment()  # before a test module imports numpy

# The first example of a test may compile kernels, which takes seconds; pytest-timeout watches over hanging tests.
settings.register_profile("heinfer", parent=settings(), deadline=None)
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
