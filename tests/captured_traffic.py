"""A plain TCP proxy on loopback that keeps every byte, and readers of the frames and events in them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import zlib
from dataclasses import replace

import xxhash

from heinfer.wire import Address, BlockAnswer, BlockRequest, End, NodeEvent, ServerEvent

MAGIC = b"heinfer\x03"
Frame = tuple[bytes, bytes]
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


def messages(data: bytes) -> list[Frame]:
    """Return (envelope, payload) of every frame that a node sent over a connection, the last of which is whole.

    Reads the format's description (heinfer/wire/proto/heinfer.proto), not our code.
    """
    assert data.startswith(MAGIC)
    found, position = [], len(MAGIC)
    while position < len(data):
        envelope_bytes, payload_bytes, check, own_check = struct.unpack_from("<IIII", data, position)
        assert own_check == zlib.crc32(data[position : position + 12])
        middle = position + 16 + envelope_bytes
        position = middle + payload_bytes
        assert position <= len(data), "the last frame is cut"
        found.append((data[middle - envelope_bytes : middle], data[middle : middle + payload_bytes]))
        assert check == content_check(*found[-1])
    return found


def content_check(envelope: bytes, payload: bytes) -> int:
    """Return the checksum of a frame's content."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(envelope)) % 2**32


def framed(envelope_bytes: int, payload_bytes: int, content: bytes = b"") -> bytes:
    """Return a frame that announces these lengths, with right checksums; its content may be cut or of any kind."""
    check = content_check(content[:envelope_bytes], content[envelope_bytes:])
    lengths = struct.pack("<III", envelope_bytes, payload_bytes, check)
    return lengths + struct.pack("<I", zlib.crc32(lengths)) + content


def without_payloads(data: bytes) -> bytes:
    """Return what a node sent over a connection less the bytes of its chunks: magic, lengths, envelopes."""
    parts = [MAGIC]
    for envelope, payload in messages(data):
        parts += [struct.pack("<II", len(envelope), len(payload)), envelope]
    return b"".join(parts)


def flatten(event: Event) -> list[Event]:
    """Return an event, and after it the chunk that travelled inside it, as if the two had been sent one by one."""
    if isinstance(event, BlockRequest | BlockAnswer) and event.first is not None:
        return [replace(event, first=None), event.first]
    return [event]
