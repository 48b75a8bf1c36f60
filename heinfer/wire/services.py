"""The node's service to its clients as iterators of events: nothing above this module sees protobuf or gRPC.

Log lines hold the kind of an error and no more, since messages may quote data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import grpc

from heinfer.errors import HeinferError, InputError, IntegrityError, ProtocolError, RemoteProtocolError
from heinfer.wire import query_codec
from heinfer.wire.limits import Limits
from heinfer.wire.messages import FailureCode, RefusedError
from heinfer.wire.proto import heinfer_pb2 as pb
from heinfer.wire.queries import (
    MAX_REASON_CHARACTERS,
    Description,
    QueryEvent,
    QueryFailedError,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    ResultEvent,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S")

NODE = pb.DESCRIPTOR.services_by_name["Node"].full_name

QueryHandler = Callable[[Iterator[QueryEvent]], Iterator[ResultEvent]]


class EventStream(Generic[T]):
    """What the peer says in a call, event by event.

    Iterating raises RemoteProtocolError when the peer is gone or sends what is no event, and RefusedError (BUSY)
    when it has no free worker. What the iterator of outgoing events raises is raised here too.
    """

    def __init__(
        self, method: Any, outgoing: Iterator[bytes] | bytes, timeout_s: float | None, decode: Callable[[bytes], T]
    ) -> None:
        self._decode = decode
        self._error: Exception | None = None
        request = outgoing if isinstance(outgoing, bytes) else self._watched(outgoing)
        self._call = method(request, timeout=timeout_s)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            data = next(self._call)
        except grpc.RpcError as error:
            raise (self._error or _translate(error)) from None
        try:
            return self._decode(data)
        except ProtocolError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give the call up. Iterating, in whatever thread, then raises RemoteProtocolError."""
        self._call.cancel()

    def _watched(self, outgoing: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from outgoing
        except Exception as error:  # ours, in a thread of gRPC's, which would report it as the peer's
            self._error = error
            raise


def call_infer(
    channel: Any, events: Iterable[QueryEvent], limits: Limits, timeout_s: float | None = None
) -> EventStream[ResultEvent]:
    """Send a query to a node.

    Args:
        channel: from `open_channel`.
        events: what to send; consumed in a thread of gRPC's.
        limits: bounds of both directions.
        timeout_s: seconds for the whole query; None for no end.
    """
    method = channel.stream_stream(f"/{NODE}/Infer")
    return EventStream(
        method,
        (query_codec.encode_query_event(event, limits) for event in events),
        timeout_s,
        lambda data: query_codec.decode_result_event(data, limits),
    )


def call_ask(
    channel: Any, header: QueryHeader, limits: Limits, timeout_s: float | None = None
) -> EventStream[ResultEvent]:
    """Send a query that is one message, all its values inside: half a millisecond less than a stream.

    Raises:
        LocalProtocolError: the header can't be encoded.
    """
    method = channel.unary_stream(f"/{NODE}/Ask")
    data = query_codec.encode_query_event(header, limits)
    return EventStream(method, data, timeout_s, lambda data: query_codec.decode_result_event(data, limits))


def call_describe(channel: Any, limits: Limits, timeout_s: float | None = None) -> Description:
    """Ask a node what it serves.

    Raises:
        RemoteProtocolError: it is not there, or its answer is malformed.
    """
    method = channel.unary_unary(f"/{NODE}/Describe")
    try:
        data = method(pb.DescribeRequest().SerializeToString(), timeout=timeout_s)
    except grpc.RpcError as error:
        raise _translate(error) from None
    return query_codec.decode_description(data, limits)


def add_node(server: Any, describe: Callable[[], Description], handler: QueryHandler, limits: Limits) -> None:
    """Serve Node.Describe, Node.Infer and Node.Ask.

    Args:
        server: from `make_server`.
        describe: what this node serves.
        handler: called once a query, in a worker thread, with the client's events. What it raises ends the query
            with a QueryFailure: with the message of a HeinferError, without that of any other exception.
        limits: bounds of both directions.
    """

    def decode(data: bytes) -> QueryEvent:
        try:
            return query_codec.decode_query_event(data, limits)
        except RemoteProtocolError as error:
            raise QueryFailedError(QueryFailureCode.INPUT, str(error)) from None

    def infer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        events = _decoded(requests, decode)
        try:
            for event in handler(events):
                yield query_codec.encode_result_event(event, limits)
        except Exception as error:
            logger.warning("query ended by %s", type(error).__name__)
            yield query_codec.encode_result_event(query_failure(error), limits)

    handlers: dict[str, Any] = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            lambda request, context: query_codec.encode_description(describe(), limits)
        ),
        "Infer": grpc.stream_stream_rpc_method_handler(infer),
        "Ask": grpc.unary_stream_rpc_method_handler(lambda request, context: infer(iter((request,)), context)),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NODE, handlers),))


def query_failure(error: Exception) -> QueryFailure:
    """What a node tells its client about an error."""
    match error:
        case QueryFailedError():
            code = error.code
        case InputError():
            code = QueryFailureCode.INPUT
        case IntegrityError():
            code = QueryFailureCode.INTEGRITY
        case RefusedError(code=FailureCode.BUSY):
            code = QueryFailureCode.BUSY
        case RemoteProtocolError():
            code = QueryFailureCode.SERVER
        case _:
            code = QueryFailureCode.FAILED
    text = str(error) if isinstance(error, HeinferError) else "internal error, see the node's log"
    return QueryFailure(code, text.encode("utf-8", "replace").decode()[:MAX_REASON_CHARACTERS])


def _decoded(requests: Iterator[bytes], decode: Callable[[bytes], S]) -> Iterator[S]:
    while True:
        try:
            data = next(requests)
        except StopIteration:
            return
        except Exception as error:  # gRPC raises a bare Exception when the call is gone
            raise RemoteProtocolError("the peer went away") from error
        yield decode(data)


def _translate(error: Any) -> RemoteProtocolError:
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "Concurrent RPC limit" in details:
        return RefusedError(FailureCode.BUSY, "the peer has no free worker: try again later")
    return RemoteProtocolError(f"the peer is gone or refused ({status.name}): {details[:200]}")
