"""Events of queries and results to frames and back. Encoders and decoders raise as those of `heinfer.wire.codec`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from heinfer.errors import LocalProtocolError
from heinfer.wire.codec import NO_PAYLOAD, Frame, number, parse, refuse_payload, serialise, stray
from heinfer.wire.limits import Limits
from heinfer.wire.messages import Mode
from heinfer.wire.proto import heinfer_pb2 as pb
from heinfer.wire.queries import (
    Describe,
    Description,
    Greeting,
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


def encode_query_event(event: QueryEvent, limits: Limits) -> Frame:
    """Encode what a client says to a node; the payload is the chunk's own bytes, not a copy."""
    return serialise(pb.QueryMessage(), lambda message: _fill_query(message, event, limits))


def _fill_query(message: Any, event: QueryEvent, limits: Limits) -> bytes:
    match event:
        case QueryHeader():
            check_tensors(event.tensors, limits)
            header = message.header
            header.request_id, header.want_statistics = event.request_id, event.want_statistics
            header.trace_samples, header.traceparent = event.trace_samples, event.traceparent
            _fill_specs(header.tensors, event.tensors)
            return _fill_first(header, event.first)
        case TensorChunk():
            return _fill_chunk(message.chunk, event)
        case Describe():
            message.describe.SetInParent()
            return NO_PAYLOAD
        case Greeting():
            message.greeting.SetInParent()
            message.greeting.token, message.greeting.model = event.token, event.model
            return NO_PAYLOAD
        case _:
            raise stray(event)


def decode_query_event(envelope: bytes, payload: bytes, limits: Limits) -> QueryEvent:
    """Decode what a client said."""
    return parse(pb.QueryMessage(), envelope, lambda message: _query_event(message, payload, limits))


def _query_event(message: Any, payload: bytes, limits: Limits) -> QueryEvent:
    match message.WhichOneof("kind"):
        case "header":
            header = message.header
            specs = _spec_events(header.tensors)
            check_tensors(specs, limits)
            first = _first_event(header, payload)
            return QueryHeader(
                header.request_id, specs, header.want_statistics, header.trace_samples, first, header.traceparent
            )
        case "chunk":
            return _chunk_event(message.chunk, payload)
        case "describe":
            refuse_payload(payload)
            return Describe()
        case "greeting":
            refuse_payload(payload)
            return Greeting(message.greeting.token, message.greeting.model)
        case kind:
            raise LocalProtocolError(f"message of unknown kind {kind}")


def encode_result_event(event: ResultEvent, limits: Limits) -> Frame:
    """Encode what a node says to a client; as above."""
    return serialise(pb.ResultMessage(), lambda message: _fill_result(message, event, limits))


def _fill_result(message: Any, event: ResultEvent, limits: Limits) -> bytes:
    payload = NO_PAYLOAD
    match event:
        case ResultHeader():
            check_tensors(event.tensors, limits)
            message.header.request_id = event.request_id
            _fill_specs(message.header.tensors, event.tensors)
            payload = _fill_first(message.header, event.first)
        case TensorChunk():
            payload = _fill_chunk(message.chunk, event)
        case Statistics():
            message.statistics.json = event.json
        case QueryFailure():
            message.failure.code, message.failure.message = number(event.code), event.message
        case Description():
            _fill_description(message.description, event, limits)
        case _:
            raise stray(event)
    return payload


def decode_result_event(envelope: bytes, payload: bytes, limits: Limits) -> ResultEvent:
    """Decode what a node said to a client."""
    return parse(pb.ResultMessage(), envelope, lambda message: _result_event(message, payload, limits))


def _result_event(message: Any, payload: bytes, limits: Limits) -> ResultEvent:
    match message.WhichOneof("kind"):
        case "header":
            specs = _spec_events(message.header.tensors)
            check_tensors(specs, limits)
            return ResultHeader(message.header.request_id, specs, _first_event(message.header, payload))
        case "chunk":
            return _chunk_event(message.chunk, payload)
        case kind:
            refuse_payload(payload)
    match kind:
        case "statistics":
            return Statistics(message.statistics.json)
        case "failure":
            return QueryFailure(QueryFailureCode(message.failure.code), message.failure.message)
        case "description":
            return _description_event(message.description, limits)
        case _:
            raise LocalProtocolError(f"message of unknown kind {kind}")


def _fill_description(message: Any, description: Description, limits: Limits) -> None:
    for specs in (description.inputs, description.outputs):
        check_names(specs, limits)
    message.protocol_version, message.plan_hash = description.protocol_version, description.plan_hash
    message.mode, message.max_samples = number(description.mode), description.max_samples
    message.model = description.model
    _fill_specs(message.inputs, description.inputs)
    _fill_specs(message.outputs, description.outputs)


def _description_event(message: Any, limits: Limits) -> Description:
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
        model=message.model,
    )


def _fill_first(header: Any, chunk: TensorChunk | None) -> bytes:
    header.SetInParent()  # where all its fields have their defaults
    return NO_PAYLOAD if chunk is None else _fill_chunk(header.first, chunk)


def _first_event(header: Any, payload: bytes) -> TensorChunk | None:
    if header.HasField("first"):
        return _chunk_event(header.first, payload)
    refuse_payload(payload)
    return None


def _fill_chunk(message: Any, chunk: TensorChunk) -> bytes:
    """Announce a chunk; return its bytes, which protobuf thus never copies."""
    message.SetInParent()  # tensor 0 from its first byte on: all fields have their defaults
    message.tensor, message.offset = chunk.tensor, chunk.offset
    return chunk.data


def _chunk_event(message: Any, payload: bytes) -> TensorChunk:
    return TensorChunk(message.tensor, message.offset, payload)


def _fill_specs(messages: Any, specs: Iterable[TensorSpec]) -> None:
    for spec in specs:
        dims = [ANY_SIZE if size is None else size for size in spec.shape]
        messages.add(name=spec.name, dtype=spec.dtype, dims=dims)


def _spec_events(messages: Iterable[Any]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(message.name, message.dtype, tuple(None if size == ANY_SIZE else size for size in message.dims))
        for message in messages
    )
