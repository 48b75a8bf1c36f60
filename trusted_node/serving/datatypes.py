"""Element types as the Open Inference Protocol v2 names them, and as plans and numpy do.

    datatype_of("float32") -> "FP32"        dtype_of("FP32") -> dtype("<f4")

`DATATYPES` holds every type that has both names. BYTES (strings) and BF16 have no numpy type that a plan may use, and
are refused by name. Raw tensors are little-endian, row-major, and without padding: BOOL is a byte, 0 or 1.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from heinfer.errors import InputError

#: The protocol's name to numpy's type, in the byte order of raw tensors.
DATATYPES = MappingProxyType(
    {
        "BOOL": np.dtype("?"),
        "INT8": np.dtype("<i1"),
        "INT16": np.dtype("<i2"),
        "INT32": np.dtype("<i4"),
        "INT64": np.dtype("<i8"),
        "UINT8": np.dtype("<u1"),
        "UINT16": np.dtype("<u2"),
        "UINT32": np.dtype("<u4"),
        "UINT64": np.dtype("<u8"),
        "FP16": np.dtype("<f2"),
        "FP32": np.dtype("<f4"),
        "FP64": np.dtype("<f8"),
    }
)
_NAMES = MappingProxyType({dtype.name: name for name, dtype in DATATYPES.items()})
#: Names of the protocol that no model here takes.
UNSUPPORTED = ("BYTES", "BF16")


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return numpy's type of a name of the protocol.

    Raises:
        InputError: it is no such name, or none that a model here takes.
    """
    found = DATATYPES.get(datatype)
    if found is None:
        problem = "is not supported" if datatype in UNSUPPORTED else "is unknown"
        raise InputError(f"datatype {datatype[:32]!r} {problem}: expected one of {', '.join(DATATYPES)}")
    return found


def datatype_of(dtype: str) -> str:
    """Return the protocol's name of an element type as numpy and plans name it.

    Raises:
        InputError: the protocol has none.
    """
    found = _NAMES.get(dtype)
    if found is None:
        raise InputError(f"element type {dtype!r} has no name in the Open Inference Protocol")
    return found
