"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds within which what has to come comes on a busy machine as well.
PATIENCE_S = 30.0


def soon(condition: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Return whether something becomes true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def wait_for(condition: Callable[[], object], what: str = "it", within_s: float = PATIENCE_S) -> None:
    """Wait until something is true; it fails the test where that does not come."""
    assert soon(condition, within_s), f"never came: {what}"
