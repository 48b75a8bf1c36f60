"""Large constants on disk while a model is partitioned: what nobody reads takes no memory.

    requires  a folder with room for the model's weights
    ensures   arrays over a file without a name, which is gone when they are, whatever becomes of the process

A model of 144 million weights is 575 MB in float32. Read, parsed, converted and serialised it would be in memory four
times; mapped, its pages are the system's to drop and to read again.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from heinfer.errors import PlanError

#: Constants of so many bytes are kept on disk.
LARGE_BYTES = 2**20
#: Bytes of one call: the system writes 2 GiB at most.
_WRITTEN = 2**28
#: Types of the format that are the same in memory and that numpy has.
_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)


class Scratch:
    """A file that large arrays are moved into; it is made when the first one comes.

    Args:
        folder: where, or the closest one above it that is there; None: where the system has temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        while folder is not None and not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        self._folder = folder or Path(tempfile.gettempdir())
        self._descriptor: int | None = None
        self._size = 0

    def keep(self, data: NDArray[Any]) -> NDArray[Any]:
        """Write a large array; return it as a read-only one over the file. A small one stays as it is.

        Raises:
            PlanError: the disk is full, or nothing can be written there.
        """
        size = data.nbytes
        if size < LARGE_BYTES:
            return data
        start = self._size + -self._size % mmap.ALLOCATIONGRANULARITY
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        written = 0
        try:
            descriptor = self._open()
            while written < size:
                written += os.pwrite(descriptor, view[written : written + _WRITTEN], start + written)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            remedy = "it needs room for the model's weights" if full else "the model's weights are kept there meanwhile"
            raise PlanError(f"can't write to {self._folder}: {error.strerror}; {remedy}") from error
        self._size = start + size
        mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ, offset=start)
        return np.frombuffer(mapped, data.dtype).reshape(data.shape)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor, name = tempfile.mkstemp(prefix=".heinfer-", dir=self._folder)
            weakref.finalize(self, os.close, self._descriptor)  # mappings have descriptors of their own
            os.unlink(name)
        return self._descriptor

    def take_weights(self, proto: onnx.ModelProto) -> dict[str, NDArray[Any]]:
        """Move a model's large initialisers here, and leave inputs in their place; they must fit their data.

        Returns:
            What was moved, by name.

        Raises:
            PlanError: as `keep`.
        """
        graph = proto.graph
        taken: dict[str, NDArray[Any]] = {}
        left: list[TensorProto] = []
        names = Counter(tensor.name for tensor in graph.initializer)  # two of one name are left to the checker
        for tensor in graph.initializer:
            if tensor.data_type in _TYPES and len(tensor.raw_data) >= LARGE_BYTES and names[tensor.name] == 1:
                taken[tensor.name] = self.keep(numpy_helper.to_array(tensor))
            else:
                left.append(tensor)
        inputs = {value.name for value in graph.input}
        graph.input.extend(
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in taken.items()
            if name not in inputs
        )
        del graph.initializer[:]
        graph.initializer.extend(left)
        return taken


def put_weights(model: ir.Model, weights: Mapping[str, NDArray[Any]]) -> None:
    """Make constants of the inputs that `Scratch.take_weights` has left."""
    inputs = {value.name: value for value in model.graph.inputs}
    for name, array in weights.items():
        value = inputs[name]
        value.const_value = ir.Tensor(array, name=name)
        model.graph.initializers[name] = value
