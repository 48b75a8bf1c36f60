"""A server of sessions: a thread that accepts, and a thread for every connection, up to a fixed number.

What a handler raises never leaks to the untrusted network: the node is told one of the fixed codes. Log lines hold the
kind of an error and no more, since messages may quote data.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from heinfer.errors import ParameterError, ProtocolError
from heinfer.wire.address import Address, cannot_listen, refuse_plain_text
from heinfer.wire.codec import decode_node_event, encode_server_event
from heinfer.wire.connection import Connection
from heinfer.wire.limits import Limits
from heinfer.wire.messages import End, Failure, FailureCode, NodeEvent, ServerEvent, failure_code

logger = logging.getLogger(__name__)

SessionHandler = Callable[[Iterator[NodeEvent]], Iterator[ServerEvent | End]]

#: Connections that are being told that the server is busy; those beyond are closed without a word.
_REFUSALS = 16
#: Connections that wait to be accepted; the next one would try again after a second.
_BACKLOG = 128
#: Seconds before the next try where the system has no descriptor for one more connection.
_PAUSE_S = 0.1
#: Seconds that threads get to end once their connections are closed.
_CLOSE_S = 1.0


def serve_sessions(address: Address, handler: SessionHandler, limits: Limits, workers: int) -> SessionServer:
    """Serve sessions until stopped, in plain text.

    Args:
        address: where to listen; port 0 takes a free one.
        handler: called once a connection, in a thread of its own, with the node's events, which end where the node
            closes its half. What it yields is sent; `End`, or its return, ends the connection. The node's events raise
            RemoteProtocolError for a message that is no event and for a node that went away in the middle of one. What
            the handler raises ends the session with `Failure(failure_code(error))`.
        limits: bounds of both directions.
        workers: connections served at the same time; the next one is told that the server is busy.

    Raises:
        ParameterError: workers is not positive.
        TransportError: the port is in use, the address is not this machine's, or not loopback.
    """
    return SessionServer(address, handler, limits, workers)


class SessionServer:
    """What `serve_sessions` returns.

    Attributes:
        address: where it listens, with the port that was bound.
    """

    def __init__(self, address: Address, handler: SessionHandler, limits: Limits, workers: int) -> None:
        if workers < 1:
            raise ParameterError(f"a server needs at least one worker, got {workers}")
        refuse_plain_text(address)
        self._handler = handler
        self._limits = limits
        self._workers = workers
        self._stopping = False
        self._lock = threading.Lock()
        self._serving: dict[Connection, threading.Thread] = {}
        self._refusing: dict[Connection, threading.Thread] = {}
        self._listener = _listen(address)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="heinfer-accept", daemon=True)
        self._acceptor.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Accept nothing more, end idle sessions, let running answers end within the grace, then close."""
        self._stopping = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = {**self._serving, **self._refusing}
        for connection in threads:
            connection.end_input()
        _join(threads.values(), grace_s)
        for connection in threads:
            connection.close()
        _join(threads.values(), _CLOSE_S)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    logger.warning("no connection accepted: %s", type(error).__name__)
                    time.sleep(_PAUSE_S)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Give a connection to a thread that serves or refuses it."""
        with self._lock:
            busy = len(self._serving) >= self._workers
            table, target = (self._refusing, self._refuse) if busy else (self._serving, self._serve)
            if busy and len(self._refusing) >= _REFUSALS:
                sock.close()
                return
            try:
                connection = Connection(sock, self._limits)
            except OSError:  # the peer is gone already
                sock.close()
                return
            arguments = (table, target, connection)
            thread = threading.Thread(target=self._run, args=arguments, name="heinfer-session", daemon=True)
            table[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._forget(table, connection)

    def _run(
        self,
        table: dict[Connection, threading.Thread],
        target: Callable[[Connection], None],
        connection: Connection,
    ) -> None:
        try:
            connection.expect_magic()
        except ProtocolError:
            logger.warning("connection refused: not our protocol")
        else:
            target(connection)
            connection.finish()
        finally:
            self._forget(table, connection)

    def _forget(self, table: dict[Connection, threading.Thread], connection: Connection) -> None:
        connection.close()
        with self._lock:
            del table[connection]

    def _serve(self, connection: Connection) -> None:
        try:
            for event in self._handler(_events(connection)):
                if isinstance(event, End):
                    break
                connection.send(*encode_server_event(event))
        except Exception as error:
            logger.warning("session ended by %s", type(error).__name__)
            _say_last(connection, Failure(failure_code(error)))

    @staticmethod
    def _refuse(connection: Connection) -> None:
        logger.warning("connection refused: all workers are busy")
        _say_last(connection, Failure(FailureCode.BUSY))


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        # On Linux SO_REUSEADDR, which this sets, does not let two servers share a port.
        return socket.create_server(address.endpoint, family=family, backlog=_BACKLOG)
    except OSError:
        raise cannot_listen(address) from None


def _events(connection: Connection) -> Iterator[NodeEvent]:
    message = connection.receive()  # a greeting is due
    while message is not None:
        yield decode_node_event(*message)
        message = connection.receive(idle=True)


def _say_last(connection: Connection, event: ServerEvent) -> None:
    with suppress(ProtocolError):  # the node is gone, so it need not be told
        connection.send(*encode_server_event(event))


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
