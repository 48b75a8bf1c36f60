"""The one place that wraps gRPC: options, servers, channels. What runs on them is in `heinfer.wire.services`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from heinfer.errors import ParameterError
from heinfer.wire.address import Address, cannot_listen, refuse_plain_text
from heinfer.wire.limits import Limits

Options = tuple[tuple[str, int], ...]


def _common_options(limits: Limits) -> Options:
    return (
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        # A peer that vanished without closing is noticed by pings, not by waiting for TCP (hours).
        ("grpc.keepalive_time_ms", round(limits.idle_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(limits.idle_s * 1000)),
    )


def server_options(limits: Limits) -> Options:
    """Options of every server of ours."""
    return (
        *_common_options(limits),
        # On by default on Linux: a second server on the same port would start and take half of the connections.
        ("grpc.so_reuseport", 0),
        # The default, 300 s, would drop a client that pings as often as we ask it to.
        ("grpc.http2.min_ping_interval_without_data_ms", round(limits.idle_s * 500)),
    )


def channel_options(limits: Limits) -> Options:
    """Options of every channel of ours."""
    return (
        *_common_options(limits),
        ("grpc.http2.max_pings_without_data", 0),  # no cap: the server's minimum interval is the cap
        ("grpc.enable_http_proxy", 0),  # ciphertexts go where the operator said, not where the environment says
        ("grpc.enable_retries", 0),  # what is sent again, and under which attempt, is decided by the session's owner
        ("grpc.use_local_subchannel_pool", 1),  # a channel is a connection
        # A peer that comes back is found again within two seconds; the default waits up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
    )


def make_server(limits: Limits, workers: int) -> Any:
    """A server that is not bound and not started yet.

    Args:
        limits: what it accepts.
        workers: streams and calls served at the same time; the next one is told that the server is busy.

    Returns:
        A `grpc.Server`.

    Raises:
        ParameterError: workers is not positive.
    """
    if workers < 1:
        raise ParameterError(f"a server needs at least one worker, got {workers}")
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="heinfer-wire")
    return grpc.server(pool, options=server_options(limits), maximum_concurrent_rpcs=workers)


def bind(server: Any, address: Address) -> Address:
    """Let a server listen, in plain text.

    Returns:
        The address with the port that was bound, which port 0 leaves to the system.

    Raises:
        TransportError: the port is in use, the address is not this machine's, or not loopback.
    """
    refuse_plain_text(address)
    try:
        port = server.add_insecure_port(address.target)
    except RuntimeError:
        port = 0
    if port == 0:
        raise cannot_listen(address)
    return Address(address.host, port)


def open_channel(address: Address, limits: Limits) -> Any:
    """A channel in plain text; it connects with the first call.

    Returns:
        A `grpc.Channel`, to be closed by the caller; a context manager.

    Raises:
        TransportError: the address is not loopback.
    """
    refuse_plain_text(address)
    return grpc.insecure_channel(address.target, options=channel_options(limits))
