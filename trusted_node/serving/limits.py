"""Sizes and times that bound what a client of the node's interfaces may ask for.

    a body of 256 MiB     hardly ever met: 85,000 digits of 28x28 in binary
    JSON of 16 MiB        two million numbers as text; whoever has more sends them in binary
    all bodies, 1 GiB     what is read, waits or runs at a moment; more are told to come again

JSON takes many times its size once it is read, so it counts `JSON_WEIGHT` times, and so does what a gRPC message holds
beside its raw values. `ServingLimits.within` makes all of them fit a share of the node's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from heinfer.errors import ParameterError
from heinfer.units import size as readable

KIB, MIB, GIB = 2**10, 2**20, 2**30
#: Bytes of memory for a byte of JSON, at most, measured: "0.5," makes an object of 24 bytes of its four characters, and
#: a pointer in each of two lists; "{}," an empty object of 64 bytes of three.
JSON_WEIGHT = 28
#: With less, a query of one image of 3x224x224 would not fit, in binary.
_LEAST_MEMORY = 16 * MIB


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Bounds of HTTP and gRPC. All are inclusive.

    Attributes:
        body_bytes: of one request, uncompressed, and of one gRPC message.
        json_bytes: of the JSON in a request.
        total_bytes: of all requests that are there at a moment.
        header_bytes: of a request's line and headers.
        connections: at a moment, idle ones too.
        header_s: seconds until a connection's next request is complete up to its body, counted from its first byte.
        body_s: seconds for a body to come, and one more for each `slowest_bytes_s` of it.
        slowest_bytes_s: bytes per second that a body must keep up with.
        idle_s: seconds after which a connection without a request is closed.
        query_s: seconds that a query may take where the client names no time, and at most.
        retry_after_s: what a client is told that comes at a bad moment.
    """

    body_bytes: int = 256 * MIB
    json_bytes: int = 16 * MIB
    total_bytes: int = GIB
    header_bytes: int = 32 * KIB
    connections: int = 1024
    header_s: float = 10.0
    body_s: float = 10.0
    slowest_bytes_s: float = 16 * KIB
    idle_s: float = 75.0
    query_s: float = 600.0
    retry_after_s: int = 1

    @classmethod
    def within(cls, memory: int) -> ServingLimits:
        """Return the usual limits for so many bytes of memory; a quarter of them is the largest body.

        Raises:
            ParameterError: that is too little to serve anything.
        """
        if memory < _LEAST_MEMORY:
            raise ParameterError(
                f"HTTP and gRPC need {readable(_LEAST_MEMORY)} of memory each for requests, found {readable(memory)}: "
                "give --memory more"
            )
        body = min(256 * MIB, memory // 4)
        return cls(body_bytes=body, json_bytes=min(16 * MIB, body, memory // (2 * JSON_WEIGHT)), total_bytes=memory)

    def __post_init__(self) -> None:
        """Refuse limits that are not positive or contradict each other.

        Raises:
            ParameterError: they are.
        """
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ParameterError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.json_bytes <= self.body_bytes <= self.total_bytes:
            raise ParameterError(
                "expected json_bytes <= body_bytes <= total_bytes, got "
                f"{self.json_bytes}, {self.body_bytes} and {self.total_bytes}"
            )
