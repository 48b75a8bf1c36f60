"""Numpy arrays to chunks of bytes and back, for queries and results.

The receiving side grows a buffer as bytes arrive, so that a header alone, whatever it announces, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from heinfer.errors import InputError, LocalProtocolError, RemoteProtocolError
from heinfer.wire.limits import Limits
from heinfer.wire.queries import (
    DTYPE_BYTES,
    QueryEvent,
    QueryFailedError,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    ResultEvent,
    ResultHeader,
    Statistics,
    TensorChunk,
    TensorSpec,
)

Array = npt.NDArray[Any]


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor on the wire.

    Raises:
        LocalProtocolError: its shape is not concrete.
    """
    return math.prod(_concrete(spec)) * DTYPE_BYTES[spec.dtype]


def check_names(specs: Sequence[TensorSpec], limits: Limits) -> None:
    """Check the number of tensors, and that no two have the same name.

    Raises:
        LocalProtocolError: otherwise.
    """
    if len(specs) > limits.max_tensors:
        raise LocalProtocolError(f"{len(specs)} tensors announced, at most {limits.max_tensors} are allowed")
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise LocalProtocolError(f"tensor names must differ, got {names}")


def check_tensors(specs: Sequence[TensorSpec], limits: Limits) -> None:
    """Check what a header announces: names, concrete shapes, and the bytes of all tensors together.

    Raises:
        LocalProtocolError: otherwise.
    """
    check_names(specs, limits)
    for spec in specs:
        # Zeros left out: numpy multiplies the other dimensions even where the array is empty.
        extent = math.prod(size for size in _concrete(spec) if size) * DTYPE_BYTES[spec.dtype]
        if extent > limits.max_request_bytes:
            raise LocalProtocolError(
                f"tensor {spec.name!r} of shape {spec.shape} exceeds {limits.max_request_bytes} bytes"
            )
    total = sum(tensor_bytes(spec) for spec in specs)
    if total > limits.max_request_bytes:
        raise LocalProtocolError(f"tensors of {total} bytes announced, at most {limits.max_request_bytes} are allowed")


def describe_tensors(tensors: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
    """The specs that announce these arrays, in their order.

    Raises:
        InputError: an element type that does not travel.
    """
    for name, array in tensors.items():
        if array.dtype.name not in DTYPE_BYTES:
            raise InputError(f"array {name!r} has dtype {array.dtype}: convert it to one of {', '.join(DTYPE_BYTES)}")
    return tuple(TensorSpec(name, array.dtype.name, tuple(array.shape)) for name, array in tensors.items())


def iterate_tensor_chunks(tensors: Mapping[str, Array], limits: Limits) -> Iterator[TensorChunk]:
    """Cut arrays into chunks, in their order; an empty array has none."""
    for index, array in enumerate(tensors.values()):
        wire = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        for offset in range(0, wire.size, limits.chunk_bytes):
            yield TensorChunk(index, offset, wire[offset : offset + limits.chunk_bytes].tobytes())


class TensorAssembler:
    """Puts the chunks of announced tensors together, in order.

    Args:
        specs: what the header announced.
        limits: what is accepted.

    Raises:
        RemoteProtocolError: the header announces too much.
    """

    def __init__(self, specs: Sequence[TensorSpec], limits: Limits) -> None:
        try:
            check_tensors(specs, limits)
        except LocalProtocolError as error:
            raise RemoteProtocolError(str(error)) from None
        self._specs = tuple(specs)
        self._limits = limits
        self._buffers: list[bytearray] = []
        self._start_next()

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""
        return len(self._buffers) > len(self._specs)

    def add(self, chunk: TensorChunk) -> None:
        """Take the next chunk.

        Raises:
            RemoteProtocolError: it is not the next one, or too long.
        """
        index = len(self._buffers) - 1
        if self.complete or chunk.tensor != index or chunk.offset != len(self._buffers[index]):
            raise RemoteProtocolError(f"chunk of tensor {chunk.tensor} at offset {chunk.offset} is not the next one")
        room = min(tensor_bytes(self._specs[index]) - chunk.offset, self._limits.chunk_bytes)
        if len(chunk.data) > room:
            raise RemoteProtocolError(
                f"chunk of tensor {chunk.tensor} at offset {chunk.offset} may have {room} bytes, got {len(chunk.data)}"
            )
        self._buffers[index] += chunk.data
        if len(self._buffers[index]) == tensor_bytes(self._specs[index]):
            self._start_next()

    def finish(self) -> dict[str, Array]:
        """The arrays by name, writable and in native byte order.

        Raises:
            RemoteProtocolError: bytes are missing, or a bool is neither 0 nor 1.
        """
        if not self.complete:
            raise RemoteProtocolError(
                f"tensor {self._specs[len(self._buffers) - 1].name!r} has {len(self._buffers[-1])} of "
                f"{tensor_bytes(self._specs[len(self._buffers) - 1])} bytes"
            )
        return {
            spec.name: _to_array(spec, buffer) for spec, buffer in zip(self._specs, self._buffers[:-1], strict=True)
        }

    def _start_next(self) -> None:
        self._buffers.append(bytearray())
        while not self.complete and tensor_bytes(self._specs[len(self._buffers) - 1]) == 0:
            self._buffers.append(bytearray())


def read_query(events: Iterable[QueryEvent], limits: Limits) -> tuple[QueryHeader, dict[str, Array]]:
    """Read one query to its last byte.

    Raises:
        QueryFailedError: messages out of order, or the stream ends too early; the code is INPUT, the client's fault.
    """
    stream = iter(events)
    header = next(stream, None)
    if not isinstance(header, QueryHeader):
        raise _bad_query(f"a query must begin with its header, got {type(header).__name__}")
    try:
        assembler = TensorAssembler(header.tensors, limits)
        if header.first is not None:
            assembler.add(header.first)
        while not assembler.complete:
            chunk = next(stream, None)
            if not isinstance(chunk, TensorChunk):
                raise _bad_query(f"expected a chunk of query {header.request_id}, got {type(chunk).__name__}")
            assembler.add(chunk)
        return header, assembler.finish()
    except QueryFailedError:
        raise
    except RemoteProtocolError as error:
        raise _bad_query(str(error)) from None


def read_result(
    events: Iterable[ResultEvent], limits: Limits
) -> tuple[ResultHeader, dict[str, Array], Statistics | None]:
    """Read one result to the end of its stream; no Statistics where none were sent.

    Raises:
        QueryFailedError: the node answered with a failure.
        RemoteProtocolError: messages out of order, or the stream ends too early.
    """
    header: ResultHeader | None = None
    statistics: Statistics | None = None
    assembler = TensorAssembler((), limits)
    for event in events:
        match event:
            case QueryFailure():
                raise QueryFailedError(event.code, event.message)
            case ResultHeader() if header is None:
                header, assembler = event, TensorAssembler(event.tensors, limits)
                if event.first is not None:
                    assembler.add(event.first)
            case TensorChunk() if header is not None:
                assembler.add(event)
            case Statistics() if header is not None and assembler.complete and statistics is None:
                statistics = event
            case _:
                raise RemoteProtocolError(f"{type(event).__name__} is out of order in a result")
    if header is None:
        raise RemoteProtocolError("the stream ended without a result")
    return header, assembler.finish(), statistics


def _bad_query(message: str) -> QueryFailedError:
    return QueryFailedError(QueryFailureCode.INPUT, message)


def _concrete(spec: TensorSpec) -> tuple[int, ...]:
    sizes = tuple(size for size in spec.shape if size is not None)
    if len(sizes) < len(spec.shape):
        raise LocalProtocolError(f"tensor {spec.name!r} needs a concrete shape, got {spec.shape}")
    return sizes


def _to_array(spec: TensorSpec, buffer: bytearray) -> Array:
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if spec.dtype == "bool" and raw.size and int(raw.max()) > 1:
        raise RemoteProtocolError(f"tensor {spec.name!r} of bools holds a byte that is neither 0 nor 1")
    dtype = np.dtype(spec.dtype)
    array: Array = raw.view(dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(_concrete(spec))
    return array
