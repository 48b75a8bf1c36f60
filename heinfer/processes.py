"""How a heinfer process sets itself up, before numpy, torch or numba are imported.

Three processes share a machine in tests and trials, so nobody may spin while waiting. OpenMP and BLAS read their
settings from the environment once, when their libraries are loaded; `prepare_environment` therefore runs first in
every entry point, and `child_environment` hands the same settings to processes that we start.
"""

from __future__ import annotations

import os

#: OpenMP threads sleep while they wait. BLAS runs on one thread: heinfer cuts products into tiles and runs the tiles
#: on threads of its own, which sleep in a queue between products.
SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GRPC_VERBOSITY": "NONE",  # a client could fill the log from its C core, which knows nothing of our format
    "NUMBA_THREADING_LAYER": "threadsafe",  # tbb or OpenMP; never workqueue, which aborts under two threads
}


def prepare_environment() -> None:
    """Set what this process needs; settings that the user made are kept."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def child_environment() -> dict[str, str]:
    """Environment for a heinfer process that we start: ours, with the settings filled in."""
    return {**SETTINGS, **os.environ, "PYTHONUNBUFFERED": "1"}


def core_count() -> int:
    """Cores that this process may use (its affinity, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
