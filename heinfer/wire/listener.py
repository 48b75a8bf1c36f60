"""A server of frames: a thread that accepts, and a thread for every connection, up to a fixed number.

What is said on a connection is a `Dialect`: sessions are in `heinfer.wire.session_service`, queries in
`heinfer.wire.query_service`. Log lines hold the kind of an error and no more, since messages may quote data.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from heinfer.errors import ParameterError, ProtocolError
from heinfer.wire.address import Address, cannot_listen
from heinfer.wire.codec import Frame
from heinfer.wire.connection import Connection
from heinfer.wire.frames import Framing
from heinfer.wire.limits import Limits
from heinfer.wire.messages import End
from heinfer.wire.security import HandshakeError, PlainText, Security, Tls, check_listening

logger = logging.getLogger(__name__)

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A handler's word that the peer may be here, where it has nothing to tell it yet."""


class Heard(Iterator[Incoming]):
    """What a peer says, as it comes, and whether it is still there.

    Args:
        messages: what it says.
        connection: to it.
    """

    def __init__(self, messages: Iterator[Incoming], connection: Connection) -> None:
        self._messages = messages
        self._connection = connection

    def __next__(self) -> Incoming:
        """Wait for what it says next."""
        return next(self._messages)

    @property
    def gone(self) -> bool:
        """Whether the peer has closed its half, or can't be reached any more, though we have not heard all it said."""
        return self._connection.peer_gone


Handler = Callable[[Heard[Incoming]], Generator[Outgoing | End | Admitted, None, None]]

#: Connections that are being told that the server is busy; those beyond are closed without a word.
_REFUSALS = 16
#: Connections that wait to be accepted; the next one would try again after a second.
_BACKLOG = 128
#: Seconds before the next try where the system has no descriptor for one more connection.
_PAUSE_S = 0.1
#: Seconds that threads get to end once their connections are closed.
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Incoming, Outgoing]):
    """What is said on the connections of a server.

    Attributes:
        name: what the log calls a connection.
        framing: how they begin, and the sizes of frames.
        decode: envelope and payload to what the peer said; raises RemoteProtocolError where that is nothing.
        encode: what we say to envelope and payload.
        busy: the last word to a peer that comes when all workers are busy.
        stopping: the last word to a peer that comes, or still speaks, when the server is stopping.
        failure: the last word to a peer whose connection an error ends.
    """

    name: str
    framing: Framing
    decode: Callable[[bytes, bytes], Incoming]
    encode: Callable[[Outgoing], Frame]
    busy: Outgoing
    stopping: Outgoing
    failure: Callable[[Exception], Outgoing]


@dataclass(frozen=True, slots=True)
class ConnectionCounts:
    """What has become of a server's connections; all but the first since it began.

    Attributes:
        served: now.
        busy: refused because all workers were.
        stopping: refused because the server was stopping.
        handshake: refused because of TLS.
        protocol: refused because they spoke another protocol, or nothing.
        failed: ended by an error after that.
    """

    served: int = 0
    busy: int = 0
    stopping: int = 0
    handshake: int = 0
    protocol: int = 0
    failed: int = 0


class FrameServer(Generic[Incoming, Outgoing]):
    """Serves connections until stopped.

    Args:
        address: where to listen; port 0 takes a free one.
        dialect: what is said.
        handler: called once a connection, in a thread of its own, with what the peer says, which ends where the peer
            closes its half. What it yields is sent; `End`, or its return, ends the connection. Until it yields
            something, be it `Admitted`, the peer is a stranger, who makes room when places are short. What the peer
            says raises RemoteProtocolError for a message that is none and for a peer that went away in the middle of
            one. What the handler raises ends the connection with the dialect's failure.
        limits: times; a connection on which nothing is said for `max_idle_s` is closed. The first message has
            `CONNECT_S` seconds.
        workers: connections served at the same time; the next one is told that the server is busy.
        security: TLS, or where plain text is allowed. A peer that fails the handshake is closed without a word, and the
            log says why; it has `CONNECT_S` seconds, on its own thread.

    Attributes:
        address: where it listens, with the port that was bound.

    Raises:
        ParameterError: workers is not positive.
        TransportError: the port is in use, the address is not this machine's, or this is no way to listen there.
    """

    def __init__(
        self,
        address: Address,
        dialect: Dialect[Incoming, Outgoing],
        handler: Handler[Incoming, Outgoing],
        limits: Limits,
        workers: int,
        security: Security = PlainText.ON_LOOPBACK,
    ) -> None:
        if workers < 1:
            raise ParameterError(f"a server needs at least one worker, got {workers}")
        check_listening(address, security)
        self._security = security
        self._dialect = dialect
        self._handler = handler
        self._limits = limits
        self._workers = workers
        self._stopping = False  # nobody new is served
        self._closed = False  # nobody is even accepted
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()  # fields of ConnectionCounts
        self._serving: dict[Connection, threading.Thread] = {}
        self._refusing: dict[Connection, threading.Thread] = {}
        self._arriving: dict[Connection, None] = {}  # of those served: strangers, in the order in which they came
        self._listener = _listen(address)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="heinfer-accept", daemon=True)
        self._acceptor.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Serve nobody new, end idle connections, let running answers end within the grace, then close.

        During the grace whoever connects is told that the server is stopping.
        """
        with self._lock:
            self._stopping = True
            threads = dict(self._serving)
        for connection in threads:
            connection.end_input()
        _join(threads.values(), grace_s)
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = {**self._serving, **self._refusing}
        for connection in threads:
            connection.close()
        _join(threads.values(), _CLOSE_S)

    def connections(self) -> ConnectionCounts:
        """Return what has become of the connections."""
        with self._lock:
            return ConnectionCounts(len(self._serving), **self._counts)

    def _count(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    logger.warning("no connection accepted: %s", type(error).__name__)
                    time.sleep(_PAUSE_S)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Give a connection to a thread that serves or refuses it."""
        with self._lock:
            refused = self._stopping or (len(self._serving) >= self._workers and not self._make_room())
            table, target = (self._refusing, self._refuse) if refused else (self._serving, self._serve)
            if refused and len(self._refusing) >= _REFUSALS:
                self._counts["stopping" if self._stopping else "busy"] += 1
                sock.close()
                return
            try:
                connection = Connection(sock, self._limits, self._dialect.framing)
            except OSError:  # the peer is gone already
                sock.close()
                return
            arguments = (table, target, connection)
            name = f"heinfer-{self._dialect.name}"
            thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
            table[connection] = thread
            if not refused:
                self._arriving[connection] = None
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._forget(table, connection)

    def _make_room(self) -> bool:
        """Close the connection that is a stranger's for longest, if one is: strangers take nobody's place."""
        stalled = next(iter(self._arriving), None)
        if stalled is None:
            return False
        del self._arriving[stalled]
        stalled.close()
        return True

    def _run(
        self,
        table: dict[Connection, threading.Thread],
        target: Callable[[Connection], None],
        connection: Connection,
    ) -> None:
        try:
            if isinstance(self._security, Tls):
                connection.encrypt(self._security)
            connection.expect_magic()
        except HandshakeError as error:
            self._count("handshake")
            logger.warning("connection from %s refused: %s", connection.peer, error)
        except ProtocolError:
            self._count("protocol")
            logger.warning(
                "connection refused: %s", "closed before it spoke" if connection.closed else "not our protocol"
            )
        else:
            target(connection)
            connection.finish()
        finally:
            self._forget(table, connection)

    def _forget(self, table: dict[Connection, threading.Thread], connection: Connection) -> None:
        connection.close()
        with self._lock:
            del table[connection]
            self._arriving.pop(connection, None)

    def _serve(self, connection: Connection) -> None:
        dialect = self._dialect
        try:
            with closing(self._handler(Heard(self._hear(connection), connection))) as events:
                for event in events:
                    if connection in self._arriving:
                        self._admitted(connection)
                    if isinstance(event, End):
                        break
                    if not isinstance(event, Admitted):
                        connection.send(*dialect.encode(event))
        except Exception as error:
            self._count("failed")
            logger.warning("%s ended by %s", dialect.name, type(error).__name__)
            cut = self._stopping and isinstance(error, ProtocolError)  # we hear no more
            self._say_last(connection, dialect.stopping if cut else dialect.failure(error))

    def _admitted(self, connection: Connection) -> None:
        with self._lock:
            self._arriving.pop(connection, None)

    def _refuse(self, connection: Connection) -> None:
        stopping = self._stopping
        self._count("stopping" if stopping else "busy")
        logger.warning("connection refused: %s", "stopping" if stopping else "all workers are busy")
        self._say_last(connection, self._dialect.stopping if stopping else self._dialect.busy)

    def _hear(self, connection: Connection) -> Iterator[Incoming]:
        message = connection.receive_first()  # who has just connected has something to say
        while message is not None:
            yield self._dialect.decode(*message)
            if not connection.await_news(self._limits.max_idle_s):
                return  # the peer connects again when it has something to say
            message = connection.receive()

    def _say_last(self, connection: Connection, event: Outgoing) -> None:
        with suppress(ProtocolError):  # the peer is gone, so it need not be told
            connection.send(*self._dialect.encode(event))


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        # On Linux SO_REUSEADDR, which this sets, does not let two servers share a port.
        return socket.create_server(address.endpoint, family=family, backlog=_BACKLOG)
    except OSError:
        raise cannot_listen(address) from None


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread.ident is not None:  # or it is about to be started
            thread.join(max(0.0, deadline - time.monotonic()))
