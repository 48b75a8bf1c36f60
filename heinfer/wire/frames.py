"""The frames of a session, without sockets: what is on the wire between node and server.

    u32 envelope bytes | u32 payload bytes | envelope | payload        (little-endian)

The envelope is a protobuf message of less than 200 bytes, the payload the bytes of the chunk that it announces, so that
protobuf never copies them. A request for a block of ResNet-20 is 8 + 80 + 115,200 bytes.
"""

from __future__ import annotations

import struct

from heinfer.errors import LocalProtocolError, RemoteProtocolError
from heinfer.wire.limits import ENVELOPE_BYTES, Limits

#: What a node sends first. The last byte is the version of the frames; that of the messages is in Hello.
MAGIC = b"heinfer\x02"

_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


def encode_header(envelope_bytes: int, payload_bytes: int, limits: Limits) -> bytes:
    """Return what comes before an envelope and a payload of these lengths.

    Raises:
        LocalProtocolError: one is longer than the limits allow.
    """
    if envelope_bytes > ENVELOPE_BYTES or payload_bytes > limits.chunk_bytes:
        raise LocalProtocolError(_too_long(envelope_bytes, payload_bytes, limits))
    return _HEADER.pack(envelope_bytes, payload_bytes)


def decode_header(header: bytes, limits: Limits) -> tuple[int, int]:
    """Return the lengths of the envelope and of the payload that follow.

    Args:
        header: `HEADER_BYTES` bytes.
        limits: what we are willing to receive.

    Raises:
        RemoteProtocolError: one is longer than the limits allow.
    """
    envelope_bytes, payload_bytes = _HEADER.unpack(header)
    if envelope_bytes > ENVELOPE_BYTES or payload_bytes > limits.chunk_bytes:
        raise RemoteProtocolError(_too_long(envelope_bytes, payload_bytes, limits))
    return envelope_bytes, payload_bytes


def _too_long(envelope_bytes: int, payload_bytes: int, limits: Limits) -> str:
    return (
        f"message of {envelope_bytes} bytes with a payload of {payload_bytes}: at most {ENVELOPE_BYTES} and "
        f"{limits.chunk_bytes} are allowed"
    )
