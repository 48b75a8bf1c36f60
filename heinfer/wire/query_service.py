"""The node's service to its clients: any number of questions on a connection, one after the other.

The client is in the node's domain of trust, so it is told why a query failed. Log lines hold the kind of an error and
no more, since messages may quote data.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from heinfer.errors import HeinferError, InputError, IntegrityError, ParameterError, RemoteProtocolError
from heinfer.wire.address import Address
from heinfer.wire.frames import query_framing
from heinfer.wire.limits import Limits
from heinfer.wire.listener import Dialect, FrameServer
from heinfer.wire.messages import FailureCode, RefusedError
from heinfer.wire.queries import (
    MAX_REASON_CHARACTERS,
    Describe,
    Description,
    QueryEvent,
    QueryFailedError,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    ResultEvent,
)
from heinfer.wire.query_codec import decode_query_event, encode_result_event
from heinfer.wire.tensors import read_query

logger = logging.getLogger(__name__)

#: Connections held at the same time. A client keeps a few that are idle: these cost a sleeping thread each.
MAX_CONNECTIONS = 128
_BUSY = "the node is busy: try again later"


class QueryHandler(Protocol):
    """What a node does with questions; called from several threads at once."""

    def describe(self) -> Description:
        """Return what this node serves."""

    def check(self, header: QueryHeader) -> None:
        """Refuse a query by its header, before its values are read, by raising."""

    def answer(self, header: QueryHeader, tensors: dict[str, NDArray[Any]]) -> Iterator[ResultEvent]:
        """Yield the answer to a query: a ResultHeader, its chunks and, where the query wants them, Statistics."""


def serve_queries(
    address: Address, handler: QueryHandler, limits: Limits, workers: int, connections: int = MAX_CONNECTIONS
) -> FrameServer[QueryEvent, ResultEvent]:
    """Serve queries until stopped, in plain text.

    Args:
        address: where to listen; port 0 takes a free one.
        handler: answers. What it raises ends the query with a QueryFailure: with the message of a HeinferError, without
            that of any other exception.
        limits: bounds of both directions.
        workers: queries read, run or answered at the same time; the next one is told that the node is busy.
        connections: connections held at the same time, idle ones too; likewise.

    Raises:
        ParameterError: workers or connections is not positive.
        TransportError: the port is in use, the address is not this machine's, or not loopback.
    """
    if workers < 1:
        raise ParameterError(f"a node needs at least one worker, got {workers}")
    dialect: Dialect[QueryEvent, ResultEvent] = Dialect(
        name="query",
        framing=query_framing(limits),
        decode=partial(decode_query_event, limits=limits),
        encode=partial(encode_result_event, limits=limits),
        busy=QueryFailure(QueryFailureCode.BUSY, _BUSY),
        failure=query_failure,
    )
    return FrameServer(address, dialect, _Desk(handler, limits, workers).serve, limits, connections)


class _Desk:
    """Takes the questions of all connections, and lets so many queries in at a time."""

    def __init__(self, handler: QueryHandler, limits: Limits, workers: int) -> None:
        self._handler = handler
        self._limits = limits
        self._places = threading.Semaphore(workers)

    def serve(self, said: Iterator[QueryEvent]) -> Generator[ResultEvent, None, None]:
        """Answer one connection's questions; an error ends the connection."""
        events = _clients(said)
        for event in events:
            if isinstance(event, Describe):
                yield self._handler.describe()
            else:
                yield from self._serve_query(itertools.chain((event,), events))

    def _serve_query(self, events: Iterator[QueryEvent]) -> Iterator[ResultEvent]:
        if not self._places.acquire(blocking=False):
            raise QueryFailedError(QueryFailureCode.BUSY, _BUSY)
        try:
            # An error here leaves bytes of the query unread, so it ends the connection. One after it does not.
            header, tensors = read_query(events, self._limits, self._handler.check)
            try:
                yield from self._handler.answer(header, tensors)
            except Exception as error:
                logger.warning("query ended by %s", type(error).__name__)
                yield query_failure(error)
        finally:
            self._places.release()


def _clients(said: Iterator[QueryEvent]) -> Iterator[QueryEvent]:
    """What the client says; what is wrong with it is the client's fault."""
    try:
        yield from said
    except RemoteProtocolError as error:
        raise QueryFailedError(QueryFailureCode.INPUT, str(error)) from None


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
