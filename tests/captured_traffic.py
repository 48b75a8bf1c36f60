"""A plain TCP proxy on loopback that keeps every byte, and readers of the gRPC messages and events in them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

from heinfer.wire import Address, BlockAnswer, BlockRequest, Chunk, End, NodeEvent, ServerEvent

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, PADDED = 0, 0x8
Event = NodeEvent | ServerEvent | End


class Connection:
    """Bytes of one connection, each way."""

    def __init__(self) -> None:
        self.up = bytearray()
        self.down = bytearray()


class Proxy:
    """Forwards to one address until closed; a context manager."""

    def __init__(self, target: Address) -> None:
        self._target = (target.host, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.connections: list[Connection] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)

    @property
    def up(self) -> bytes:
        """All bytes towards the target, connection after connection."""
        return b"".join(bytes(c.up) for c in self.connections)

    def _run(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            kept = Connection()
            self.connections.append(kept)
            self._sockets += [near, far]
            self._run(self._copy, near, far, kept.up)
            self._run(self._copy, far, near, kept.down)

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (type, flags, stream, payload) of every complete HTTP/2 frame (RFC 9113, section 4.1), preface skipped."""
    position = len(PREFACE) if data.startswith(PREFACE) else 0
    while position + 9 <= len(data):
        length = int.from_bytes(data[position : position + 3], "big")
        kind, flags = data[position + 3], data[position + 4]
        stream = int.from_bytes(data[position + 5 : position + 9], "big")
        payload = data[position + 9 : position + 9 + length]
        if len(payload) < length:
            return
        yield kind, flags, stream, payload
        position += 9 + length


def messages(data: bytes) -> list[bytes]:
    """Return the gRPC messages of one direction of a connection, in the order in which they were complete."""
    found: list[bytes] = []
    pending: dict[int, bytearray] = {}
    for kind, flags, stream, payload in frames(data):
        if kind != DATA:
            continue
        assert not flags & PADDED, "gRPC does not pad"
        buffer = pending.setdefault(stream, bytearray())
        buffer += payload
        while len(buffer) >= 5:
            compressed, length = struct.unpack_from(">BI", buffer)
            assert compressed == 0
            if len(buffer) < 5 + length:
                break
            found.append(bytes(buffer[5 : 5 + length]))
            del buffer[: 5 + length]
    return found


def other_payloads(data: bytes) -> Iterator[bytes]:
    """Yield what is not in a DATA frame: headers, settings, pings, window updates."""
    return (payload for kind, _, _, payload in frames(data) if kind != DATA)


def flatten(event: Event) -> list[Event]:
    """Return an event, and after it the chunk that travelled inside it, as if the two had been sent one by one."""
    if isinstance(event, BlockRequest | BlockAnswer) and event.first is not None:
        return [replace(event, first=None), event.first]
    return [event]


def without_payload(message: bytes, event: Event) -> bytes:
    """Return an encoded event less the bytes of its chunk."""
    for part in flatten(event):
        if isinstance(part, Chunk):
            message = message.replace(part.data, b"")
    return message
