"""Large constants on disk while a model is partitioned: what nobody reads takes no memory.

    requires  a folder with room for the model's weights
    ensures   arrays over a file without a name, which is gone when they are, however the process ends

A model of 144 million weights is 575 MB in float32. Read, parsed, converted and serialised it would be in memory four
times; mapped, its pages are the system's to drop and to read again.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto

from heinfer.errors import PlanError
from heinfer.plan.files import DISK_FULL
from partitioner.tensors import put_inputs

#: Arrays of so many bytes are kept on disk.
LARGE_BYTES = 2**20
#: Bytes of one call: the system writes 2 GiB at most.
_WRITTEN = 2**28
#: Where an array begins, in bytes.
_ALIGNMENT = 64
#: Types whose raw data are numpy's.
_TYPES: Mapping[int, str] = {TensorProto.FLOAT: "<f4", TensorProto.DOUBLE: "<f8", TensorProto.FLOAT16: "<f2"}
#: Fields of a tensor that hold data beside `raw_data`, or say that these are a part of them.
_OTHER_DATA = ("segment", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


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
        return data if data.nbytes < LARGE_BYTES else self._keep_all([data])[0]

    def take_weights(self, proto: onnx.ModelProto) -> dict[str, NDArray[Any]]:
        """Move a model's large initialisers here, and leave empty ones of their names.

        Those that onnx's checker would refuse, or that are no plain floating-point numbers, stay.

        Args:
            proto: a model whose constants have been checked (`check_tensors`).

        Returns:
            What was moved, by name.

        Raises:
            PlanError: as `keep`.
        """
        names = Counter(tensor.name for tensor in proto.graph.initializer)
        taken = [t for t in proto.graph.initializer if t.name and names[t.name] == 1 and _is_large(t)]
        arrays = self._keep_all(np.frombuffer(t.raw_data, _TYPES[t.data_type]).reshape(t.dims) for t in taken)
        for tensor in taken:
            tensor.ClearField("dims")
            tensor.dims.append(0)
            tensor.raw_data = b""
        return {tensor.name: array for tensor, array in zip(taken, arrays, strict=True)}

    def _keep_all(self, arrays: Iterable[NDArray[Any]]) -> list[NDArray[Any]]:
        """Write arrays; return them over one mapping, which takes one descriptor whatever their number."""
        first = self._size + -self._size % mmap.ALLOCATIONGRANULARITY
        self._size = first
        places: list[tuple[int, np.dtype[Any], tuple[int, ...]]] = []
        for array in arrays:
            self._size += -self._size % _ALIGNMENT
            places.append((self._size - first, array.dtype, array.shape))
            view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for start in range(0, len(view), _WRITTEN):
                self._write(view[start : start + _WRITTEN])
        if not places:
            return []
        with self._telling():
            mapped = mmap.mmap(self._open(), self._size - first, prot=mmap.PROT_READ, offset=first)
        return [np.ndarray(shape, kind, mapped, offset) for offset, kind, shape in places]

    def _write(self, view: memoryview) -> None:
        while view:
            with self._telling():
                written = os.pwrite(self._open(), view, self._size)
            view = view[written:]
            self._size += written

    def _open(self) -> int:
        if self._descriptor is None:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._descriptor)  # mappings have descriptors of their own
        return self._descriptor

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Raise what the system refuses as a PlanError that says what the folder is used for."""
        try:
            yield
        except OSError as error:
            full = error.errno in DISK_FULL
            remedy = "it needs room for the model's weights" if full else "the model's weights are kept there meanwhile"
            raise PlanError(f"can't write to {self._folder}: {error.strerror}; {remedy}") from error


def _is_large(tensor: TensorProto) -> bool:
    if tensor.data_type not in _TYPES or len(tensor.raw_data) < LARGE_BYTES:
        return False
    return not any(field.name in _OTHER_DATA for field, _ in tensor.ListFields())


def leave_inputs(proto: onnx.ModelProto, weights: Mapping[str, NDArray[Any]]) -> None:
    """Put inputs in place of the initialisers that `Scratch.take_weights` has left."""
    types = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in weights.items()}
    put_inputs(proto.graph, {name: (types[name], array.shape) for name, array in weights.items()})


def put_weights(model: ir.Model, weights: Mapping[str, NDArray[Any]]) -> None:
    """Make constants of the inputs that `leave_inputs` has left."""
    inputs = {value.name: value for value in model.graph.inputs}
    for name, array in weights.items():
        value = inputs[name]
        value.const_value = ir.Tensor(array, name=name)
        model.graph.initializers[name] = value
