"""Frames, without sockets: what is on the wire between client and node, and between node and server.

    u32 envelope bytes | u32 payload bytes | envelope | payload        (little-endian)

The envelope is a protobuf message, the payload the bytes of the chunk that it announces, so that protobuf never copies
them. A request for a block of ResNet-20 is 8 + 80 + 115,200 bytes, a query of one CIFAR image 8 + 26 + 12,288.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire.limits import ENVELOPE_BYTES, Limits

#: What the side that connects sends first: a node to a server, and a client to a node. The last byte is the version of
#: the frames; that of the messages is in Hello and in Description.
SESSION_MAGIC = b"heinfer\x02"
QUERY_MAGIC = b"heinode\x01"

_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


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


def encode_header(envelope_bytes: int, payload_bytes: int, framing: Framing) -> bytes:
    """Return what comes before an envelope and a payload of these lengths.

    Raises:
        LocalProtocolError: one is longer than the framing allows.
    """
    if envelope_bytes > framing.envelope_bytes or payload_bytes > framing.payload_bytes:
        raise LocalProtocolError(_too_long(envelope_bytes, payload_bytes, framing))
    return _HEADER.pack(envelope_bytes, payload_bytes)


def decode_header(header: bytes, framing: Framing) -> tuple[int, int]:
    """Return the lengths of the envelope and of the payload that follow.

    Args:
        header: `HEADER_BYTES` bytes.
        framing: what we are willing to receive.

    Raises:
        RemoteProtocolError: one is longer than the framing allows.
    """
    envelope_bytes, payload_bytes = _HEADER.unpack(header)
    if envelope_bytes > framing.envelope_bytes or payload_bytes > framing.payload_bytes:
        raise RemoteProtocolError(_too_long(envelope_bytes, payload_bytes, framing))
    return envelope_bytes, payload_bytes


def _too_long(envelope_bytes: int, payload_bytes: int, framing: Framing) -> str:
    return (
        f"message of {envelope_bytes} bytes with a payload of {payload_bytes}: at most {framing.envelope_bytes} and "
        f"{framing.payload_bytes} are allowed"
    )
