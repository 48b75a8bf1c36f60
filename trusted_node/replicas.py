"""Servers that serve the same plan, and which of them is asked next.

    healthy before failing, then fewest recent failures, then who was asked longest ago

A server that fails is left alone for a while, twice as long after every failure, 50 ms to 2 s; the lengths are
jittered, so that nodes that lost a server together do not come back together. One in quarantine is never asked.

    A fails   A rests 0.05 s, B is asked
    B fails   both rest; whoever's rest ends first is asked then
    A answers its failures are forgotten
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from heinfer.errors import IntegrityError, ParameterError, RemoteProtocolError
from trusted_node.link import LinkSession, ServerLink

#: Seconds that a server is left alone after its first failure, and at most.
FIRST_REST_S: Final = 0.05
LONGEST_REST_S: Final = 2.0
_jitter = secrets.SystemRandom()


@dataclass(slots=True)
class _Standing:
    """What is known of one server."""

    link: ServerLink
    failures: int = 0
    rests_until: float = 0.0
    asked: int = 0
    repetitions: int = 0

    @property
    def in_quarantine(self) -> bool:
        return self.link.conduct.in_quarantine


class Replicas:
    """Chooses servers; safe to use from several threads.

    Args:
        links: connections to servers of one plan, at least one.

    Raises:
        ParameterError: there is none.
    """

    def __init__(self, links: Sequence[ServerLink]) -> None:
        if not links:
            raise ParameterError("a node needs at least one server")
        self.links = tuple(links)
        self._standings = [_Standing(link) for link in links]
        self._asked = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def acquire(
        self, avoid: Collection[ServerLink], deadline: float, not_before: Mapping[ServerLink, float] | None = None
    ) -> tuple[ServerLink, LinkSession]:
        """Choose a server and open a session, after the rest of the one that is ready first.

        Args:
            avoid: servers that are not to be asked.
            deadline: when waiting is over (`time.monotonic`).
            not_before: moments before which servers are not to be asked, by who asks here; others may.

        Raises:
            ServerError: the chosen server can't be reached, or refuses us.
            RemoteProtocolError: no server is left, or none is ready in time, or we were closed.
            IntegrityError: the only ones left are in quarantine.
        """
        while True:
            standing, pause = self._choose(avoid, not_before or {})
            if pause > max(0.0, deadline - time.monotonic()):
                raise RemoteProtocolError(f"no server is ready in time: {self}")
            if self._closed.wait(pause) if pause > 0 else self._closed.is_set():
                raise RemoteProtocolError("the connection was closed")
            try:
                return standing.link, standing.link.acquire()
            except Exception as error:
                # By another upload's failure it came into quarantine after it was chosen; it won't be chosen again.
                if not (isinstance(error, IntegrityError) and standing.in_quarantine):
                    raise ServerError(standing.link, error) from error

    def record_failure(self, link: ServerLink) -> None:
        """Leave a server alone for a while; failures that come together count once."""
        with self._lock:
            standing = self._of(link)
            now = time.monotonic()
            if now < standing.rests_until:
                return
            rest = min(LONGEST_REST_S, FIRST_REST_S * 2**standing.failures)
            standing.failures += 1
            standing.rests_until = now + rest * _jitter.uniform(0.5, 1.0)

    def record_repetition(self, link: ServerLink) -> None:
        """Count an upload that is sent again, there or elsewhere, after this server failed or was busy."""
        with self._lock:
            self._of(link).repetitions += 1

    def repetitions(self, link: ServerLink) -> int:
        """Return how many uploads were sent again after this server failed."""
        return self._of(link).repetitions

    def failures(self, link: ServerLink) -> int:
        """Return how often in a row this server failed of late."""
        return self._of(link).failures

    def is_resting(self, link: ServerLink) -> bool:
        """Whether this server is left alone for now."""
        return self._of(link).rests_until > time.monotonic()

    @property
    def in_quarantine(self) -> bool:
        """Whether all servers are."""
        return all(standing.in_quarantine for standing in self._standings)

    def record_success(self, link: ServerLink) -> None:
        """Forget what a server did before."""
        standing = self._of(link)
        standing.failures, standing.rests_until = 0, 0.0

    def close(self) -> None:
        """End all sessions; whoever waits in one, or for one, gets an error."""
        self._closed.set()
        for link in self.links:
            link.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def has_other(self, avoid: Collection[ServerLink]) -> bool:
        """Whether there is a server that may be asked."""
        return any(s.link not in avoid and not s.in_quarantine for s in self._standings)

    def __str__(self) -> str:
        return ", ".join(link.conduct.name for link in self.links)

    def _choose(self, avoid: Collection[ServerLink], not_before: Mapping[ServerLink, float]) -> tuple[_Standing, float]:
        """Return a server, and for how many seconds it still rests, or is to be left alone."""
        with self._lock:
            left = [s for s in self._standings if s.link not in avoid]
            usable = [s for s in left if not s.in_quarantine]
            if not usable:
                for standing in left:
                    standing.link.conduct.check()
                raise RemoteProtocolError(f"no server is left to ask: {self}")
            now = time.monotonic()
            pauses = {s.link: max(0.0, max(s.rests_until, not_before.get(s.link, now)) - now) for s in usable}
            best = min(usable, key=lambda s: (pauses[s.link], s.failures, s.asked))
            self._asked += 1
            best.asked = self._asked
            return best, pauses[best.link]

    def _of(self, link: ServerLink) -> _Standing:
        return next(s for s in self._standings if s.link is link)


class ServerError(Exception):
    """What happened while a session was opened, and with whom; never leaves the node's own code.

    Attributes:
        link: the server.
        error: what happened.
    """

    def __init__(self, link: ServerLink, error: Exception) -> None:
        self.link = link
        self.error = error
        super().__init__(str(error))
