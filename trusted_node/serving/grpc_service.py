"""The node's gRPC server: the Open Inference Protocol v2, grpc's health service and reflection.

    with closing(GrpcServer(Address("127.0.0.1", 7900), models)) as server: ...
    tritonclient.grpc.InferenceServerClient("127.0.0.1:7900").infer("digits", [x]).as_numpy("y")

It runs on an event loop of its own, in a thread of its own; what is served is in grpc_calls, grpc_health, grpc_guard.

Transport. Plain text on loopback, or where it was allowed; else TLS, both sides with certificates. grpc brings a TLS of
its own (BoringSSL), which speaks 1.3 and, unlike the node's other sides, 1.2 with ephemeral keys and authenticated
ciphers: it has no switch against that. Tokens travel as metadata, `authorization: Bearer ...`; without one the health
service and ServerLive answer, and nothing else.

Compressed requests are refused: grpc unpacks a message in full before it compares its size with the limit, and 1 MB may
become 1 GB. Answers are not compressed either: their size would tell something of the result to who watches.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

import grpc
from grpc import aio

from heinfer.wire import Address, PlainText, Security, Tls, TokenFile
from heinfer.wire.address import TransportError
from heinfer.wire.query_service import check_serving
from heinfer.wire.security import check_private
from trusted_node.serving.grpc_calls import Calls
from trusted_node.serving.grpc_guard import Doorkeeper, LeftOut
from trusted_node.serving.grpc_health import add_health, add_reflection
from trusted_node.serving.interface import Models, Observer
from trusted_node.serving.limits import ServingLimits

logger = logging.getLogger(__name__)

#: Seconds after which a silent connection is probed, and in which its peer must answer.
_PROBE_S, _PROBE_ANSWER_S = 60, 20
#: Seconds between the pings of a client that says nothing else; one that pings more often is cut off in the end.
_OFTENEST_PING_S = 10
#: Bit 0 of grpc's set of compression algorithms: none.
_UNCOMPRESSED = 1


class GrpcServer:
    """Serves until stopped.

    Args:
        address: where to listen; port 0 takes a free one.
        models: what is served.
        limits: sizes and times; None: the defaults. `connections` bounds calls at a moment too.
        security: TLS with clients, or where plain text is allowed.
        tokens: the clients that are served; None: whoever connects.
        observer: is told of queries that are refused before they reach a model; models tell of the others.
        allow_control: whether clients may load and unload models; None: those with a token, and those on this machine.

    Attributes:
        address: where it listens.

    Raises:
        TransportError: the port is in use, the address is not this machine's, or this is no way to listen there.
    """

    def __init__(
        self,
        address: Address,
        models: Models,
        limits: ServingLimits | None = None,
        security: Security = PlainText.ON_LOOPBACK,
        tokens: TokenFile | None = None,
        observer: Observer | None = None,
        allow_control: bool | None = None,
    ) -> None:
        check_serving(address, security, tokens)
        self._models = models
        self._limits = limits or ServingLimits()
        self._credentials = _credentials(security) if isinstance(security, Tls) else None
        self._tokens = tokens
        control = address.is_loopback or tokens is not None if allow_control is None else allow_control
        self._calls = Calls(models, self._limits, control, observer)
        self._loop = asyncio.new_event_loop()
        self._grace: asyncio.Future[float] = self._loop.create_future()
        listening: Future[int] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(address, listening), name="heinfer-grpc-server", daemon=True
        )
        self._thread.start()
        try:
            self.address = Address(address.host, listening.result())
        except BaseException:
            self._thread.join()
            raise

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, let running ones end within the grace, then cancel them."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end, grace_s)
        self._thread.join()

    def close(self) -> None:
        """Stop without grace."""
        self.stop(0)

    def _end(self, grace_s: float) -> None:
        if not self._grace.done():
            self._grace.set_result(grace_s)

    def _run(self, address: Address, listening: Future[int]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(address, listening))

    async def _serve(self, address: Address, listening: Future[int]) -> None:
        stopping = asyncio.Event()
        server = self._server(stopping)
        try:
            try:
                port = _bind(server, address, self._credentials)
                await server.start()
            except Exception as error:
                listening.set_exception(error)
                return
            listening.set_result(port)
            logger.info("grpc on %s", Address(address.host, port))
            grace_s = await self._grace
            stopping.set()
            await server.stop(grace_s)
        finally:
            await server.stop(0)
            self._calls.close()

    def _server(self, stopping: asyncio.Event) -> aio.Server:
        limits = self._limits
        options = {
            "grpc.max_receive_message_length": limits.body_bytes,
            "grpc.max_send_message_length": -1,  # a result is bounded by its query's samples
            "grpc.max_metadata_size": limits.header_bytes,
            "grpc.absolute_max_metadata_size": limits.header_bytes,
            "grpc.max_allowed_incoming_connections": limits.connections,
            "grpc.server_handshake_timeout_ms": round(1e3 * limits.header_s),
            "grpc.max_connection_idle_ms": round(1e3 * limits.idle_s),
            "grpc.keepalive_time_ms": 1000 * _PROBE_S,
            "grpc.keepalive_timeout_ms": 1000 * _PROBE_ANSWER_S,
            "grpc.http2.min_recv_ping_interval_without_data_ms": 1000 * _OFTENEST_PING_S,
            "grpc.compression_enabled_algorithms_bitset": _UNCOMPRESSED,
            "grpc.so_reuseport": 0,  # otherwise a second server would share the port unnoticed
        }
        server = aio.server(
            interceptors=[] if self._tokens is None else [Doorkeeper(self._tokens)],
            options=list(options.items()),
            maximum_concurrent_rpcs=limits.connections,
        )
        server.add_generic_rpc_handlers((self._calls.handler(), LeftOut()))
        add_health(server, self._models, stopping, limits.header_s)
        add_reflection(server)
        return server


def _bind(server: aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> int:
    host, port = address.endpoint
    where = str(Address(host, port))
    try:
        return server.add_insecure_port(where) if credentials is None else server.add_secure_port(where, credentials)
    except RuntimeError as error:
        raise TransportError(
            f"cannot listen on {address}: the port is in use, or the address is not this machine's"
        ) from error


def _credentials(security: Tls) -> grpc.ServerCredentials:
    """Return what grpc's TLS needs: clients must show a certificate of our authority."""
    authorities, certificate, key = security.files
    check_private(key, "a private key")
    pair = (key.read_bytes(), certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authorities.read_bytes(), require_client_auth=True)
