"""Numpy arrays to chunks of bytes and back, for queries and results.

The receiving side grows a buffer as bytes arrive, so that a header alone, whatever it announces, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

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
_NAMES = {np.dtype(name): name for name in DTYPE_BYTES}  # the attribute `name` of a dtype takes far longer
Event = TypeVar("Event", bound=ResultEvent)


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
    return tuple(TensorSpec(name, _dtype_name(name, array), tuple(array.shape)) for name, array in tensors.items())


def _dtype_name(name: str, array: Array) -> str:
    found = _NAMES.get(array.dtype) or _NAMES.get(array.dtype.newbyteorder("="))
    if found is None:
        raise InputError(f"array {name!r} has dtype {array.dtype}: convert it to one of {', '.join(DTYPE_BYTES)}")
    return found


def iterate_tensor_chunks(tensors: Mapping[str, Array], limits: Limits) -> Iterator[TensorChunk]:
    """Cut arrays into chunks, in their order; an empty array has none.

    Their data are views, not copies: for whoever sends them before the arrays are changed.
    """
    for index, array in enumerate(tensors.values()):
        wire = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        for offset in range(0, wire.size, limits.chunk_bytes):
            part = wire[offset : offset + limits.chunk_bytes].data
            yield TensorChunk(index, offset, cast(bytes, part))


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
        self._sizes = [tensor_bytes(spec) for spec in specs]
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
        room = min(self._sizes[index] - chunk.offset, self._limits.chunk_bytes)
        if len(chunk.data) > room:
            raise RemoteProtocolError(
                f"chunk of tensor {chunk.tensor} at offset {chunk.offset} may have {room} bytes, got {len(chunk.data)}"
            )
        self._buffers[index] += chunk.data
        if len(self._buffers[index]) == self._sizes[index]:
            self._start_next()

    def finish(self) -> dict[str, Array]:
        """The arrays by name, writable and in native byte order.

        Raises:
            RemoteProtocolError: bytes are missing, or a bool is neither 0 nor 1.
        """
        if not self.complete:
            index = len(self._buffers) - 1
            raise RemoteProtocolError(
                f"tensor {self._specs[index].name!r} has {len(self._buffers[-1])} of {self._sizes[index]} bytes"
            )
        return {
            spec.name: _to_array(spec, buffer) for spec, buffer in zip(self._specs, self._buffers[:-1], strict=True)
        }

    def _start_next(self) -> None:
        self._buffers.append(bytearray())
        while not self.complete and self._sizes[len(self._buffers) - 1] == 0:
            self._buffers.append(bytearray())


def read_query(
    events: Iterable[QueryEvent], limits: Limits, check: Callable[[QueryHeader], None] | None = None
) -> tuple[QueryHeader, dict[str, Array]]:
    """Read one query to its last byte, and nothing after it.

    Args:
        events: what the client says.
        limits: what is accepted.
        check: may refuse a query by its header, before its values are read.

    Raises:
        QueryFailedError: messages out of order, or the stream ends too early; the code is INPUT, the client's fault.
    """
    stream = iter(events)
    header = next(stream, None)
    if not isinstance(header, QueryHeader):
        raise _bad_query(f"a query must begin with its header, got {type(header).__name__}")
    if check is not None:
        check(header)
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
    events: Iterable[ResultEvent], limits: Limits, want_statistics: bool
) -> tuple[ResultHeader, dict[str, Array], Statistics | None]:
    """Read one result to its last byte, and nothing after it.

    Args:
        events: what the node says.
        limits: what is accepted.
        want_statistics: as the query's header said; Statistics end the result if so, and only then.

    Raises:
        QueryFailedError: the node answered with a failure.
        RemoteProtocolError: messages out of order, or the stream ends too early.
    """
    stream = iter(events)
    header = _expect(ResultHeader, stream)
    assembler = TensorAssembler(header.tensors, limits)
    if header.first is not None:
        assembler.add(header.first)
    while not assembler.complete:
        assembler.add(_expect(TensorChunk, stream))
    return header, assembler.finish(), _expect(Statistics, stream) if want_statistics else None


def _expect(kind: type[Event], stream: Iterator[ResultEvent]) -> Event:
    """Return the next event of a result, which must be of that kind, or raise as `read_result`."""
    event = next(stream, None)
    if isinstance(event, kind):
        return event
    if isinstance(event, QueryFailure):
        raise QueryFailedError(event.code, event.message)
    if event is None:
        raise RemoteProtocolError(f"the stream ended where {kind.__name__} was due")
    raise RemoteProtocolError(f"{type(event).__name__} is out of order in a result: expected {kind.__name__}")


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
