"""Bodies of HTTP requests: bounded while they come, and while they are decompressed.

    Content-Length: 300000000     refused by its announcement, before a byte of it is read
    1 MB of gzip, 1 GB of zeros   refused when the first 256 MiB are out

A body is room in memory that is taken before it is filled (`Room`); what would not fit beside the others is told to
come again.
"""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from heinfer.errors import HeinferError, InputError
from heinfer.units import size as readable
from trusted_node.serving.interface import QueueFullError
from trusted_node.serving.limits import ServingLimits

#: wbits of zlib for each coding: "deflate" is the zlib format (RFC 9110, section 8.4.1.2).
_CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_FIRST_BYTES = 2**16
#: Of a coding that is undone, in and out.
_PIECE_BYTES = 2**20
#: Answers smaller than this are sent as they are.
_WORTH_COMPRESSING = 1024
_LEVEL = 1
#: How many times the largest body is let go by.
_PASSED_OVER = 4


class TooLargeError(InputError):
    """A body is larger than the node takes."""


class CodingError(InputError):
    """A body has a content coding that the node does not know."""


class FramingError(InputError):
    """Where a body ends is said twice."""


class LateError(HeinferError):
    """A body did not come in time."""


class Room:
    """Bytes for all requests that are there; used from the event loop's thread only."""

    def __init__(self, limits: ServingLimits) -> None:
        self._left = limits.total_bytes

    def take(self, amount: int) -> None:
        """Take bytes.

        Raises:
            QueueFullError: so many are not left.
        """
        if amount > self._left:
            raise QueueFullError("the node holds as many requests as it has memory for; ask again later")
        self._left -= amount

    def give(self, amount: int) -> None:
        """Give bytes back."""
        self._left += amount


class Share:
    """What one request holds of the room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held = 0

    def grow_to(self, amount: int) -> None:
        """Hold so many bytes. Raises QueueFullError."""
        if amount > self._held:
            self._room.take(amount - self._held)
            self._held = amount

    def shrink_to(self, amount: int) -> None:
        """Hold so many bytes, where it holds more."""
        if amount < self._held:
            self._room.give(self._held - amount)
            self._held = amount

    def close(self) -> None:
        """Give all of it back."""
        self.shrink_to(0)


@contextmanager
def share_of(room: Room) -> Iterator[Share]:
    """Hold a share as long as the block runs."""
    share = Share(room)
    try:
        yield share
    finally:
        share.close()


async def read_body(request: Request, limits: ServingLimits, share: Share) -> bytes | bytearray:
    """Return a request's body, uncompressed.

    Raises:
        TooLargeError: it has more bytes than a body may have, compressed or not.
        CodingError: its coding is unknown.
        FramingError: where it ends is said twice.
        InputError: it is damaged.
        QueueFullError: there is no room for it now.
        LateError: it came too slowly.
        ClientDisconnect: the client went away.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity" and coding not in _CODINGS:
        raise CodingError(f"Content-Encoding: expected {', '.join(_CODINGS)} or none")
    announced = _announced(request)
    if announced is not None:
        if announced > limits.body_bytes:
            await _pass_over(request, limits, announced)
        check_size(announced, limits.body_bytes)
        share.grow_to(announced)
    body = bytearray()

    def take(part: bytes) -> None:
        check_size(len(body) + len(part), limits.body_bytes)
        share.grow_to(len(body) + len(part))
        body.extend(part)

    await _receive(request, limits, take)
    if coding == "identity":
        return body
    if len(body) <= _FIRST_BYTES:
        return decompress(body, coding, limits, share)
    return await _decompress_aside(body, coding, limits, share)


def check_size(size: int, largest: int, remedy: str = "uncompressed; send fewer samples at a time") -> None:
    """Raise TooLargeError where a body is too large."""
    if size > largest:
        raise TooLargeError(f"a request may have {readable(largest)} {remedy}")


def decompress(body: bytes | bytearray, coding: str, limits: ServingLimits, share: Share) -> bytearray:
    """Undo a content coding. Raises as `read_body`."""
    out = bytearray()
    for part in _decompressed(body, coding, limits.body_bytes):
        out += part
        share.grow_to(len(body) + len(out))
    return out


async def _decompress_aside(body: bytearray, coding: str, limits: ServingLimits, share: Share) -> bytearray:
    """Undo a content coding a piece at a time, each in a thread, so that the event loop goes on."""
    out = bytearray()
    pieces = _decompressed(body, coding, limits.body_bytes)
    while (part := await asyncio.to_thread(next, pieces, None)) is not None:
        out += part
        share.grow_to(len(body) + len(out))
    return out


def _decompressed(body: bytes | bytearray, coding: str, largest: int) -> Iterator[bytes]:
    engine = zlib.decompressobj(_CODINGS[coding])
    size = position = 0
    try:
        while position < len(body) and not engine.eof:  # a piece at a time: zlib copies what it has not unpacked yet
            rest = bytes(body[position : position + _PIECE_BYTES])
            position += len(rest)
            while rest and not engine.eof:
                part = engine.decompress(rest, _PIECE_BYTES)
                size += len(part)
                check_size(size, largest)
                rest = engine.unconsumed_tail
                yield part
    except zlib.error:
        raise InputError(f"the body is not {coding}, as Content-Encoding says") from None
    if not engine.eof or engine.unused_data or position < len(body):
        raise InputError(f"the body is not one whole {coding} stream")


def compress(body: bytes, coding: str) -> bytes:
    """Apply a content coding."""
    return gzip.compress(body, _LEVEL, mtime=0) if coding == "gzip" else zlib.compress(body, _LEVEL)


def wanted_coding(request: Request, size: int) -> str | None:
    """Return the coding that an answer is to have.

    Only who names a single one gets it: libraries list several out of habit, and a compressed answer's size tells of
    its content to whoever watches an encrypted connection.
    """
    named = request.headers.get("accept-encoding", "").partition(";")[0].strip().lower()
    return named if named in _CODINGS and size >= _WORTH_COMPRESSING else None


def _announced(request: Request) -> int | None:
    text = request.headers.get("content-length")
    if text is None:
        return None
    if "transfer-encoding" in request.headers:  # a proxy before us may believe the other (RFC 9112, section 6.3)
        raise FramingError("the request has Content-Length and Transfer-Encoding: send one of them")
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise InputError("Content-Length is no number")
    return int(text)


async def _pass_over(request: Request, limits: ServingLimits, announced: int) -> None:
    """Let a body go by that is somewhat too large.

    Most clients read no answer before they have sent everything, and would see a broken connection instead of the
    reason. Who announces far too much, or asks first (Expect), is answered at once.
    """
    if announced <= _PASSED_OVER * limits.body_bytes and "expect" not in request.headers:
        await _receive(request, limits, lambda _: None)


async def _receive(request: Request, limits: ServingLimits, take: Callable[[bytes], None]) -> None:
    """Take a body's parts as they come, as long as they keep up with the slowest pace."""
    started, size = time.monotonic(), 0
    try:
        async with asyncio.timeout(limits.body_s) as clock:
            async for part in request.stream():
                take(part)
                size += len(part)
                clock.reschedule(_loop_time(started + limits.body_s + size / limits.slowest_bytes_s))
    except TimeoutError:
        raise LateError(f"the request's body did not come at {readable(limits.slowest_bytes_s)}/s at least") from None


def _loop_time(moment: float) -> float:
    return asyncio.get_running_loop().time() + moment - time.monotonic()
