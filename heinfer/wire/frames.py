"""Frames, without sockets: what is on the wire between client and node, and between node and server.

    u32 envelope bytes | u32 payload bytes | u32 checksum | u32 CRC-32 of these 12 bytes | envelope | payload

All little-endian. The envelope is a protobuf message, the payload the bytes of the chunk that it announces, so that
protobuf never copies them. A request for a block of ResNet-20 is 16 + 80 + 115,200 bytes, a query of one CIFAR image
16 + 26 + 12,288.

Checksums tell damage on the way, after which the same bytes are sent again, from forgery, after which a server is not
trusted. They keep nobody from anything: that is what TLS and the check of answers are for. Under TLS, which notices all
damage by itself, the checksum of a frame is 0; otherwise it is the lower half of XXH3-64 of the payload, seeded with
XXH3-64 of the envelope: 4 microseconds for 115 KB.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import xxhash

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire.limits import ENVELOPE_BYTES, Limits
from heinfer.wire.messages import FailureCode, RefusedError

#: What the side that connects sends first: a node to a server, and a client to a node. The last byte is the version of
#: the frames; that of the messages is in Hello and in Description.
SESSION_MAGIC = b"heinfer\x03"
QUERY_MAGIC = b"heinode\x02"

_LENGTHS = struct.Struct("<III")
_HEADER = struct.Struct("<IIII")
HEADER_BYTES = _HEADER.size
_LOWER_HALF: Final = 2**32 - 1


class DamagedError(RefusedError):
    """What came is not what was sent. The peer may send it again, on another connection."""

    def __init__(self) -> None:
        super().__init__(FailureCode.DAMAGED, "a message was damaged on the way: its checksum does not fit")


@dataclass(frozen=True, slots=True)
class Framing:
    """How one kind of connection begins, and how long its frames may be.

    Attributes:
        magic: what the side that connects sends first.
        envelope_bytes: of one envelope, at most.
        payload_bytes: of one payload, at most.
    """

    magic: bytes
    envelope_bytes: int
    payload_bytes: int


def session_framing(limits: Limits) -> Framing:
    """Between node and server: envelopes hold ids and counters."""
    return Framing(SESSION_MAGIC, ENVELOPE_BYTES, limits.chunk_bytes)


def query_framing(limits: Limits) -> Framing:
    """Between client and node: envelopes may also hold names and shapes of many tensors, statistics, reasons."""
    return Framing(QUERY_MAGIC, limits.message_bytes, limits.chunk_bytes)


def checksum(envelope: bytes, payload: bytes | memoryview) -> int:
    """Return the checksum of a frame's content, as the module's docstring defines it."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(envelope)) & _LOWER_HALF


def encode_header(envelope_bytes: int, payload_bytes: int, framing: Framing, check: int = 0) -> bytes:
    """Return what comes before an envelope and a payload of these lengths.

    Args:
        envelope_bytes: of the envelope.
        payload_bytes: of the payload.
        framing: what may be sent.
        check: the content's `checksum`.

    Raises:
        LocalProtocolError: one is longer than the framing allows.
    """
    if envelope_bytes > framing.envelope_bytes or payload_bytes > framing.payload_bytes:
        raise LocalProtocolError(_too_long(envelope_bytes, payload_bytes, framing))
    beginning = _LENGTHS.pack(envelope_bytes, payload_bytes, check)
    return beginning + zlib.crc32(beginning).to_bytes(4, "little")


def decode_header(header: bytes, framing: Framing) -> tuple[int, int, int]:
    """Return the lengths of the envelope and of the payload that follow, and their checksum.

    Args:
        header: `HEADER_BYTES` bytes.
        framing: what we are willing to receive.

    Raises:
        DamagedError: the header is not what was sent.
        RemoteProtocolError: a part is longer than the framing allows.
    """
    envelope_bytes, payload_bytes, check, own_check = _HEADER.unpack(header)
    if zlib.crc32(header[: _LENGTHS.size]) != own_check:
        raise DamagedError
    if envelope_bytes > framing.envelope_bytes or payload_bytes > framing.payload_bytes:
        raise RemoteProtocolError(_too_long(envelope_bytes, payload_bytes, framing))
    return envelope_bytes, payload_bytes, check


def _too_long(envelope_bytes: int, payload_bytes: int, framing: Framing) -> str:
    return (
        f"message of {envelope_bytes} bytes with a payload of {payload_bytes}: at most {framing.envelope_bytes} and "
        f"{framing.payload_bytes} are allowed"
    )
