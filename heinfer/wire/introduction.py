"""Hearing a peer that is not known yet: it has little time, however slowly it speaks.

    peer, at the default 16 KiB/s        has from 10 s on
    silent, or a byte now and then       0.000061 s more for each byte: it is late after 10 s
    a first message of 1 MiB             64 s more, as it comes: a slow line is no stranger's trick

A socket's own time limit is for one call, and begins anew with each byte. Here a clock runs over all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from heinfer.errors import RemoteProtocolError

Receive = Callable[[int, int], bytes]


class Hurried:
    """Reads from a connection, with an end.

    Args:
        receive: reads some bytes, b"" at the end; takes their number and flags.
        patience: sets how many seconds one call of it may wait.
        seconds: for all calls together.
        bytes_s: bytes per second; what has come brings the time that it takes at this speed.
    """

    def __init__(self, receive: Receive, patience: Callable[[float], None], seconds: float, bytes_s: float) -> None:
        self._receive = receive
        self._patience = patience
        self._seconds = seconds
        self._bytes_s = bytes_s
        self._deadline = time.monotonic() + seconds

    def receive(self, size: int, flags: int = 0) -> bytes:
        """Read as the connection does.

        Raises:
            RemoteProtocolError: the time is over.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        self._patience(left)
        try:
            data = self._receive(size, flags)
        except BlockingIOError:
            raise self._late() from None
        self._deadline += len(data) / self._bytes_s
        return data

    def _late(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"the peer did not say within {self._seconds:g} s what it wants")
