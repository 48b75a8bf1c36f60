"""The node's service to its clients: any number of questions on a connection, one after the other.

The client is in the node's domain of trust, so it is told why a query failed. Log lines hold the kind of an error and
no more, since messages may quote data.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from heinfer.errors import HeinferError, InputError, IntegrityError, ParameterError, RemoteProtocolError
from heinfer.wire.address import Address, TransportError
from heinfer.wire.budget import MemoryBudget
from heinfer.wire.frames import query_framing
from heinfer.wire.limits import Limits
from heinfer.wire.listener import Admitted, Dialect, FrameServer, Heard
from heinfer.wire.messages import FailureCode, RefusedError
from heinfer.wire.queries import (
    MAX_REASON_CHARACTERS,
    Describe,
    Description,
    Greeting,
    QueryEvent,
    QueryFailedError,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    ResultEvent,
)
from heinfer.wire.query_codec import decode_query_event, encode_result_event
from heinfer.wire.security import PlainText, Security, check_listening
from heinfer.wire.tensors import read_query
from heinfer.wire.tokens import TokenFile

logger = logging.getLogger(__name__)

#: Connections held at the same time. A client keeps a few that are idle: these cost a sleeping thread each.
MAX_CONNECTIONS = 128
_BUSY = "the node is busy: try again later"
_STOPPING = "the node is stopping: ask another one, or this one when it is back"
#: The same for a client without a token and for one with a wrong one.
_REFUSED = "the node refuses this client: it wants a token that it knows; ask its operator"


class QueryHandler(Protocol):
    """What a node does with questions; called from several threads at once."""

    def describe(self) -> Description:
        """Return what this node serves."""

    def check(self, header: QueryHeader) -> None:
        """Refuse a query by its header, before its values are read, by raising."""

    def needs(self, header: QueryHeader) -> int:
        """Return the bytes of memory that a query takes, its values and its result together; `check` has passed."""

    def answer(
        self, header: QueryHeader, tensors: dict[str, NDArray[Any]], gone: Callable[[], bool]
    ) -> Iterator[ResultEvent]:
        """Yield the answer to a query: a ResultHeader, its chunks and, where the query wants them, Statistics.

        Args:
            header: of the query.
            tensors: its values by name.
            gone: whether the client has closed its half or is gone: it wants no answer any more.
        """


def serve_queries(
    address: Address,
    handler: QueryHandler,
    limits: Limits,
    workers: int,
    connections: int = MAX_CONNECTIONS,
    security: Security = PlainText.ON_LOOPBACK,
    tokens: TokenFile | None = None,
    memory: MemoryBudget | None = None,
    about: Callable[[str], QueryHandler] | None = None,
) -> FrameServer[QueryEvent, ResultEvent]:
    """Serve queries until stopped.

    Args:
        address: where to listen; port 0 takes a free one.
        handler: answers. What it raises ends the query with a QueryFailure: with the message of a HeinferError, without
            that of any other exception.
        limits: bounds of both directions.
        workers: queries read, run or answered at the same time; the next one is told that the node is busy.
        connections: connections held at the same time, idle ones too; likewise.
        security: TLS with clients, or where plain text is allowed.
        tokens: the clients that are served; None: whoever connects.
        memory: for all queries together, which wait for room before they are read; None: no bound.
        about: who answers about a model that a client names, or raises InputError; None: models have no names here.

    Raises:
        ParameterError: workers or connections is not positive.
        TransportError: the port is in use, the address is not this machine's, or this is no way to listen there:
            beyond this machine clients show a certificate or a token.
    """
    if workers < 1:
        raise ParameterError(f"a node needs at least one worker, got {workers}")
    check_serving(address, security, tokens)
    dialect: Dialect[QueryEvent, ResultEvent] = Dialect(
        name="query",
        framing=query_framing(limits),
        decode=partial(decode_query_event, limits=limits),
        encode=partial(encode_result_event, limits=limits),
        busy=QueryFailure(QueryFailureCode.BUSY, _BUSY),
        stopping=QueryFailure(QueryFailureCode.STOPPING, _STOPPING),
        failure=query_failure,
    )
    desk = _Desk(handler, limits, workers, tokens, memory, about)
    return FrameServer(address, dialect, desk.serve, limits, connections, security)


def check_serving(address: Address, security: Security, tokens: TokenFile | None) -> None:
    """Raise TransportError where this is no way to serve clients there."""
    check_listening(address, security)
    if isinstance(security, PlainText) and tokens is None and not address.is_loopback:
        raise TransportError(
            f"in plain text on {address} anybody would be a client of this node: give it a file of tokens "
            "(`heinfer token` makes one), or certificates for TLS"
        )


class _Desk:
    """Takes the questions of all connections, and lets so many queries in at a time."""

    def __init__(
        self,
        handler: QueryHandler,
        limits: Limits,
        workers: int,
        tokens: TokenFile | None,
        memory: MemoryBudget | None,
        about: Callable[[str], QueryHandler] | None,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._places = threading.Semaphore(workers)
        self._tokens = tokens
        self._memory = memory
        self._about = about

    def serve(self, said: Heard[QueryEvent]) -> Generator[ResultEvent | Admitted, None, None]:
        """Answer one connection's questions; an error ends the connection."""
        handler, events = self._greeted(_clients(said))
        yield Admitted()
        for event in events:
            if isinstance(event, Describe):
                yield handler.describe()
            else:
                yield from self._serve_query(handler, itertools.chain((event,), events), lambda: said.gone)

    def _greeted(self, events: Iterator[QueryEvent]) -> tuple[QueryHandler, Iterator[QueryEvent]]:
        """Who answers the client, if it may be served, and what it says after its greeting."""
        first = next(events, None)
        if first is None:
            return self._handler, iter(())
        greeting = first if isinstance(first, Greeting) else None
        if self._tokens is not None:
            _admit(greeting, self._tokens)
        if greeting is None:
            return self._handler, itertools.chain((first,), events)
        return self._handler_of(greeting.model), events

    def _handler_of(self, model: str) -> QueryHandler:
        if not model:
            return self._handler
        if self._about is None:
            raise QueryFailedError(QueryFailureCode.INPUT, "this node has one model, without a name: ask for none")
        return self._about(model)

    def _serve_query(
        self, handler: QueryHandler, events: Iterator[QueryEvent], gone: Callable[[], bool]
    ) -> Iterator[ResultEvent]:
        if not self._places.acquire(blocking=False):
            raise QueryFailedError(QueryFailureCode.BUSY, _BUSY)
        try:
            with ExitStack() as held:
                # An error here leaves bytes of the query unread, so it ends the connection. One after it does not.
                header, tensors = read_query(events, self._limits, lambda header: self._let_in(handler, header, held))
                try:
                    yield from handler.answer(header, tensors, gone)
                except Exception as error:
                    logger.warning("query ended by %s", type(error).__name__)
                    yield query_failure(error)
        finally:
            self._places.release()

    def _let_in(self, handler: QueryHandler, header: QueryHeader, held: ExitStack) -> None:
        """Check a query's header and take room for it; meanwhile nothing more of it is read."""
        handler.check(header)
        if self._memory is not None:
            held.enter_context(self._memory.room(handler.needs(header)))


def _admit(greeting: Greeting | None, tokens: TokenFile) -> None:
    """Raise QueryFailedError, which says the same whatever is wrong, unless the token is a client's."""
    problem = "it shows no token"
    if greeting is not None and greeting.token:
        try:
            name = tokens.name_of(greeting.token)
        except InputError as error:
            name, problem = None, f"no token can be looked up: {error}"
        else:
            problem = "its token is not in the file"
        if name is not None:
            logger.info("client greeted with the token of %s", name)
            return
    logger.warning("client refused: %s", problem)
    raise QueryFailedError(QueryFailureCode.REFUSED, _REFUSED)


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
        case RefusedError(code=FailureCode.BUSY | FailureCode.STOPPING):
            code = QueryFailureCode.BUSY
        case RemoteProtocolError():
            code = QueryFailureCode.SERVER
        case _:
            code = QueryFailureCode.FAILED
    text = str(error) if isinstance(error, HeinferError) else "internal error, see the node's log"
    return QueryFailure(code, text.encode("utf-8", "replace").decode()[:MAX_REASON_CHARACTERS])
