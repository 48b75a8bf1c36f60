"""Events of queries and results to bytes and back. Encoders and decoders raise as those of `heinfer.wire.codec`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from heinfer.errors import LocalProtocolError
from heinfer.wire.codec import decode, encode, number
from heinfer.wire.limits import Limits
from heinfer.wire.messages import Mode
from heinfer.wire.proto import heinfer_pb2 as pb
from heinfer.wire.queries import (
    Description,
    QueryEvent,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    ResultEvent,
    ResultHeader,
    Statistics,
    TensorChunk,
    TensorSpec,
)
from heinfer.wire.tensors import check_names, check_tensors

ANY_SIZE = -1  # a dimension that is the number of samples


def encode_query_event(event: QueryEvent, limits: Limits) -> bytes:
    """Encode what a client says to a node."""

    def convert() -> Any:
        match event:
            case QueryHeader():
                check_tensors(event.tensors, limits)
                return pb.QueryMessage(
                    header=pb.QueryHeader(
                        request_id=event.request_id,
                        tensors=_spec_messages(event.tensors),
                        want_statistics=event.want_statistics,
                        trace_samples=event.trace_samples,
                        first=_first_message(event.first),
                    )
                )
            case TensorChunk():
                return pb.QueryMessage(chunk=_tensor_chunk_message(event))

    return encode(convert, limits)


def decode_query_event(data: bytes, limits: Limits) -> QueryEvent:
    """Decode what a client said."""

    def convert(message: Any) -> QueryEvent:
        match message.WhichOneof("kind"):
            case "header":
                header = message.header
                specs = _spec_events(header.tensors)
                check_tensors(specs, limits)
                first = _first_event(header)
                return QueryHeader(header.request_id, specs, header.want_statistics, header.trace_samples, first)
            case "chunk":
                return _tensor_chunk_event(message.chunk)
            case kind:
                raise LocalProtocolError(f"message of unknown kind {kind}")

    return decode(pb.QueryMessage(), data, limits, convert)


def encode_result_event(event: ResultEvent, limits: Limits) -> bytes:
    """Encode what a node says to a client."""

    def convert() -> Any:
        match event:
            case ResultHeader():
                check_tensors(event.tensors, limits)
                return pb.ResultMessage(
                    header=pb.ResultHeader(
                        request_id=event.request_id,
                        tensors=_spec_messages(event.tensors),
                        first=_first_message(event.first),
                    )
                )
            case TensorChunk():
                return pb.ResultMessage(chunk=_tensor_chunk_message(event))
            case Statistics():
                return pb.ResultMessage(statistics=pb.Statistics(json=event.json))
            case QueryFailure():
                return pb.ResultMessage(failure=pb.QueryFailure(code=number(event.code), message=event.message))

    return encode(convert, limits)


def decode_result_event(data: bytes, limits: Limits) -> ResultEvent:
    """Decode what a node said to a client."""

    def convert(message: Any) -> ResultEvent:
        match message.WhichOneof("kind"):
            case "header":
                specs = _spec_events(message.header.tensors)
                check_tensors(specs, limits)
                return ResultHeader(message.header.request_id, specs, _first_event(message.header))
            case "chunk":
                return _tensor_chunk_event(message.chunk)
            case "statistics":
                return Statistics(message.statistics.json)
            case "failure":
                return QueryFailure(QueryFailureCode(message.failure.code), message.failure.message)
            case kind:
                raise LocalProtocolError(f"message of unknown kind {kind}")

    return decode(pb.ResultMessage(), data, limits, convert)


def encode_description(description: Description, limits: Limits) -> bytes:
    """Encode a node's description of itself."""

    def convert() -> Any:
        for specs in (description.inputs, description.outputs):
            check_names(specs, limits)
        return pb.Description(
            protocol_version=description.protocol_version,
            plan_hash=description.plan_hash,
            mode=number(description.mode),
            max_samples=description.max_samples,
            inputs=_spec_messages(description.inputs),
            outputs=_spec_messages(description.outputs),
        )

    return encode(convert, limits)


def decode_description(data: bytes, limits: Limits) -> Description:
    """Decode a node's description of itself."""

    def convert(message: Any) -> Description:
        inputs, outputs = _spec_events(message.inputs), _spec_events(message.outputs)
        check_names(inputs, limits)
        check_names(outputs, limits)
        return Description(
            plan_hash=message.plan_hash,
            inputs=inputs,
            outputs=outputs,
            max_samples=message.max_samples,
            mode=Mode(message.mode),
            protocol_version=message.protocol_version,
        )

    return decode(pb.Description(), data, limits, convert)


def _tensor_chunk_message(chunk: TensorChunk) -> Any:
    return pb.TensorChunk(tensor=chunk.tensor, offset=chunk.offset, data=chunk.data)


def _first_message(chunk: TensorChunk | None) -> Any:
    return None if chunk is None else _tensor_chunk_message(chunk)


def _first_event(header: Any) -> TensorChunk | None:
    return _tensor_chunk_event(header.first) if header.HasField("first") else None


def _tensor_chunk_event(message: Any) -> TensorChunk:
    return TensorChunk(message.tensor, message.offset, message.data)


def _spec_messages(specs: Iterable[TensorSpec]) -> list[Any]:
    return [
        pb.TensorSpec(
            name=spec.name, dtype=spec.dtype, dims=[ANY_SIZE if size is None else size for size in spec.shape]
        )
        for spec in specs
    ]


def _spec_events(messages: Iterable[Any]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(message.name, message.dtype, tuple(None if size == ANY_SIZE else size for size in message.dims))
        for message in messages
    )
