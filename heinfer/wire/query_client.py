"""A client's connections to one node: kept, and lent to one query at a time.

A query is sent once. A connection that the node has closed in the meantime is noticed before anything is sent on it and
replaced by a new one; whatever goes wrong later is an error of the query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from numpy.typing import NDArray

from heinfer.errors import RemoteProtocolError
from heinfer.wire.address import Address
from heinfer.wire.connecting import connect
from heinfer.wire.connection import CONNECT_S
from heinfer.wire.frames import query_framing
from heinfer.wire.lending import Lender
from heinfer.wire.limits import Limits
from heinfer.wire.queries import (
    Describe,
    Description,
    Greeting,
    QueryEvent,
    QueryFailedError,
    QueryFailure,
    QueryHeader,
    ResultEvent,
    Statistics,
    TensorChunk,
)
from heinfer.wire.query_codec import decode_result_event, encode_query_event
from heinfer.wire.security import PlainText, Security, check_connecting
from heinfer.wire.tensors import read_result

#: Connections that are kept for the next query; a node has other clients to serve.
_IDLE_CONNECTIONS = 4

Result = tuple[dict[str, NDArray[Any]], Statistics | None]


class QueryClient:
    """Asks one node; safe to use from several threads.

    Args:
        address: where the node listens; it is connected to when there is something to ask.
        limits: bounds of both directions.
        security: TLS, or where plain text is allowed.
        token: says who we are, for a node that wants one.
        model: that all questions are about; "": the node's only or first one.

    Raises:
        TransportError: this is no way to connect there.
    """

    def __init__(
        self,
        address: Address,
        limits: Limits,
        security: Security = PlainText.ON_LOOPBACK,
        token: str | None = None,
        model: str = "",
    ) -> None:
        check_connecting(address, security)
        greeting = None if token is None and not model else Greeting(token or "", model)
        self._lender = Lender(lambda: _QueryConnection(address, limits, security, greeting), _IDLE_CONNECTIONS)

    def describe(self) -> Description:
        """Ask the node what it serves; it has `CONNECT_S` seconds to connect, and as many to answer.

        Raises:
            QueryFailedError: the node refuses us: it is busy.
            RemoteProtocolError: it is not there, or its answer is malformed.
        """
        with self._lender.lend() as connection:
            return connection.describe()

    def ask(self, header: QueryHeader, chunks: Iterable[TensorChunk]) -> Result:
        """Send one query and wait for its result.

        There is no limit on the wait: a batch in standard mode takes minutes, and the client can't know how many. What
        ends it is the node's word, `close`, or TCP, which probes a silent node and gives one that is gone up (see
        `Limits.idle_s`). An exception in the waiting thread, KeyboardInterrupt too, closes the query's connection.

        Args:
            header: announces it, with the first chunk perhaps inside.
            chunks: the others.

        Returns:
            Arrays by name, and Statistics where the header asks for them.

        Raises:
            QueryFailedError: the node says that the query failed, perhaps before it was sent whole.
            RemoteProtocolError: the node is gone, or its answer is malformed.
            LocalProtocolError: the query can't be sent.
        """
        # A failure closes the connection too: only the node knows whether it still reads from it.
        with self._lender.lend() as connection:
            return connection.ask(header, chunks)

    def close(self) -> None:
        """Close all connections; whoever waits in one gets a RemoteProtocolError."""
        self._lender.close()


class _QueryConnection:
    """One connection to a node, for one question after the other."""

    def __init__(self, address: Address, limits: Limits, security: Security, greeting: Greeting | None) -> None:
        self._limits = limits
        self._connection = connect(address, limits, query_framing(limits), security)
        self._greeting = greeting  # said before the first question

    @property
    def usable(self) -> bool:
        return not self._connection.has_news

    def close(self) -> None:
        self._connection.close()

    def describe(self) -> Description:
        self._send(Describe())
        if not self._connection.await_news(CONNECT_S):
            raise RemoteProtocolError(f"the node did not answer within {CONNECT_S:g} s")
        match self._receive():
            case Description() as description:
                return description
            case event:
                raise _unexpected(event)

    def ask(self, header: QueryHeader, chunks: Iterable[TensorChunk]) -> Result:
        self._send(header)
        for chunk in chunks:
            if self._connection.has_news:
                raise _unexpected(self._receive())
            self._send(chunk)
        answered, tensors, statistics = read_result(self._answer(), self._limits, header.want_statistics)
        if answered.request_id != header.request_id:
            raise RemoteProtocolError(f"expected the result of query {header.request_id}, got {answered.request_id}'s")
        return tensors, statistics

    def _answer(self) -> Iterator[ResultEvent]:
        yield self._receive(idle=True)
        while True:
            yield self._receive()

    def _send(self, event: QueryEvent) -> None:
        if self._greeting is not None:
            greeting, self._greeting = self._greeting, None
            self._send(greeting)
        frame = encode_query_event(event, self._limits)
        try:
            self._connection.send(*frame)
        except RemoteProtocolError:
            if self._connection.has_news:  # why the node does not listen any more, if it said so
                raise _unexpected(self._receive()) from None
            raise

    def _receive(self, idle: bool = False) -> ResultEvent:
        message = self._connection.receive(idle)
        if message is None:
            raise RemoteProtocolError("the node closed the connection")
        return decode_result_event(*message, self._limits)


def _unexpected(event: ResultEvent) -> RemoteProtocolError:
    """The error for what the node says before a query was sent whole, or in place of a description."""
    if isinstance(event, QueryFailure):
        return QueryFailedError(event.code, event.message)
    return RemoteProtocolError(f"{type(event).__name__} came where none was due")
