"""Which request is next. Pure: no tensors, no I/O, no clock of its own."""

from __future__ import annotations

from collections import deque
from itertools import islice

from pcr_core.request import Request


class Scheduler:
    """Waiting requests, first come first served. Engine thread only.

    Attributes:
        version: Changes whenever the queue does.
    """

    def __init__(self) -> None:
        self.version = 0
        self._waiting: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        self.version += 1
        self._waiting.append(request)

    def next(self) -> Request | None:
        """Take the request to run next, or ``None`` if none waits."""
        self.version += 1
        return self._waiting.popleft() if self._waiting else None

    def upcoming(self, count: int) -> list[Request]:
        """The ``count`` requests that will run next, nearest first. Pure."""
        return list(islice(self._waiting, count))

    def waiting(self) -> list[Request]:
        """All waiting requests, nearest first. Pure."""
        return list(self._waiting)

    def drop_cancelled(self) -> list[Request]:
        """Take out the waiting requests whose callers have given up."""
        gone = [r for r in self._waiting if r.completion.cancelled]
        if gone:
            self.version += 1
            self._waiting = deque(
                r for r in self._waiting if not r.completion.cancelled
            )
        return gone

    def drain(self) -> list[Request]:
        """Take all waiting requests, for a closing engine to fail."""
        self.version += 1
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def __len__(self) -> int:
        return len(self._waiting)
