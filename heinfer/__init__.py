"""heinfer: a model's answer about private data from a machine that never sees them.

    heinfer.partition("model.onnx", "bundle")
    with heinfer.local("bundle") as model:
        y = model.predict(x)
    report = heinfer.evaluate("bundle", x, labels)

Importing the package loads none of its parts; each name loads what it needs when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from heinfer.processes import prepare_environment

if TYPE_CHECKING:
    from heinfer.client import LocalModel, RemoteModel, Report, connect, evaluate, local
    from partitioner import partition

__version__ = "0.1.0"
__all__ = ["LocalModel", "RemoteModel", "Report", "__version__", "connect", "evaluate", "local", "partition"]

prepare_environment()

_HOMES = {"partition": "partitioner", **dict.fromkeys(__all__[:3] + __all__[4:7], "heinfer.client")}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
