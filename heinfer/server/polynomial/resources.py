"""What all requests for deep blocks of a server share, of all its plans: places, room on the disk, and processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from heinfer.server.polynomial.files import ScratchSpace
from heinfer.server.polynomial.processes import KEEP_S, DeepProcesses
from heinfer.wire import FailureCode, RefusedError

#: Requests that are held at a time, one under way and one that waits: each may take gigabytes of disk.
MOST_REQUESTS: Final = 2


class DeepResources:
    """Places, room and processes; none of them is taken or started before it is needed.

    Files that servers left in the folder which were killed are removed at once.

    Args:
        folder: for ciphertexts; the system's for temporary files where None.
        scratch_bytes: that all requests may take there together; None: as many as the disk gives.
        workers: processes; the cores of this process where None, 0 for none.
        keep_s: seconds that processes stay when there is nothing to do.

    Attributes:
        space: on the disk.
        processes: that run units.

    Raises:
        ParameterError: scratch_bytes is not positive.
    """

    def __init__(
        self,
        folder: Path | None = None,
        scratch_bytes: int | None = None,
        workers: int | None = None,
        keep_s: float = KEEP_S,
    ) -> None:
        self.space = ScratchSpace(folder, scratch_bytes)
        self.space.remove_leftovers()
        self.processes = DeepProcesses(workers, keep_s)
        self._places = threading.BoundedSemaphore(MOST_REQUESTS)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take one of the places.

        Raises:
            RefusedError: all are taken.
        """
        if not self._places.acquire(blocking=False):
            raise RefusedError(FailureCode.BUSY, f"{MOST_REQUESTS} requests for deep blocks are held already")
        try:
            yield
        finally:
            self._places.release()

    def stop(self) -> None:
        """End what runs and refuse what comes; from any thread."""
        self.processes.stop()
