"""A proxy on loopback that meddles: cuts connections, damages frames, stalls; and keeps what went through."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from heinfer.wire import Address

#: What comes first on a connection, towards the server.
_MAGIC_BYTES = 8
_HEADER_BYTES = 16
#: From (generator, frame) to the bytes to forward; None: cut the connection after half of the frame.
Meddling = Callable[[random.Random, bytes], bytes | None]


@dataclass
class Passed:
    """Frames of one connection as they came, header included, towards the server and from it."""

    up: list[bytes] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)


class Meddler:
    """Forwards frames to one address; a context manager.

    Attributes:
        address: where it listens.
        passed: what came, by connection.
        meddled: frames that were changed or cut.
        up: what is done with frames towards the server; `down`: with those from it.
    """

    def __init__(
        self, target: Address, up: Meddling | None = None, down: Meddling | None = None, seed: int = 1
    ) -> None:
        self.target = target
        self.up, self.down = up or leave, down or leave
        self.passed: list[Passed] = []
        self.meddled = self.frames = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Meddler:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            _end(sock)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self.target.host, self.target.port), timeout=5)
            except OSError:
                _end(near)
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            passed = Passed()
            self.passed.append(passed)
            for source, sink, kept, name in ((near, far, passed.up, "up"), (far, near, passed.down, "down")):
                threading.Thread(target=self._copy, args=(source, sink, kept, name), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, kept: list[bytes], name: str) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as stream:
            if name == "up":
                sink.sendall(stream.read(_MAGIC_BYTES))
            while len(header := stream.read(_HEADER_BYTES)) == _HEADER_BYTES:
                frame = header + stream.read(sum(struct.unpack_from("<II", header)))
                kept.append(frame)
                with self._lock:
                    self.frames += 1
                    given = getattr(self, name)(self._random, frame)
                    self.meddled += given != frame
                if given is None:
                    sink.sendall(frame[: len(frame) // 2])
                    break
                sink.sendall(given)
            else:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
        _end(source)
        _end(sink)


def leave(_: random.Random, frame: bytes) -> bytes:
    """Meddle with nothing."""
    return frame


def damage(share: float) -> Meddling:
    """Change a byte of some frames: of the header, the envelope or the payload."""

    def change(generator: random.Random, frame: bytes) -> bytes:
        if generator.random() >= share:
            return frame
        changed = bytearray(frame)
        end = len(frame) if generator.random() < 0.5 else min(len(frame), 100)  # or envelopes would hardly be hit
        changed[generator.randrange(end)] ^= generator.randrange(1, 256)
        return bytes(changed)

    return change


def cut(share: float) -> Meddling:
    """Cut the connection in the middle of some frames."""
    return lambda generator, frame: None if generator.random() < share else frame


def cut_number(*numbers: int) -> Meddling:
    """Cut the connection at the frames with these numbers, counted over all connections in this direction."""
    seen = 0

    def count(_: random.Random, frame: bytes) -> bytes | None:
        nonlocal seen
        seen += 1
        return None if seen in numbers else frame

    return count


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()
