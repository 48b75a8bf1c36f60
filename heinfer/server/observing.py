"""What the server tells of a request that it has answered: shapes, bytes and times, which are all that it knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from heinfer.wire import Mode

#: Characters of a session's id by which log lines can be put together.
SESSION_DIGITS = 8


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request whose answer was sent.

    Attributes:
        model: the plan's name of it.
        block: index.
        mode: how its ciphertexts were made.
        samples: that it carried.
        bytes_up: of its rows.
        bytes_down: of its answer's.
        seconds: of the product, and of the wait for its turn.
    """

    model: str
    block: int
    mode: Mode
    samples: int
    bytes_up: int
    bytes_down: int
    seconds: float


class RequestObserver(Protocol):
    """Is told of every answered request; called from several threads, must be quick, and raises nothing."""

    def answered(self, request: AnsweredRequest) -> None:
        """Take note of a request."""


class Unobserved:
    """An observer that takes no note."""

    def answered(self, request: AnsweredRequest) -> None:
        """Do nothing."""
