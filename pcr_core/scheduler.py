"""Which request is next. Pure: no tensors, no I/O, no clock of its own."""

from __future__ import annotations

from collections import deque

from pcr_core.request import Request


class Scheduler:
    """Waiting requests, first come first served. Engine thread only."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        self._waiting.append(request)

    def next(self) -> Request | None:
        """Take the request to run next, or ``None`` if none waits."""
        return self._waiting.popleft() if self._waiting else None

    def drop_cancelled(self) -> list[Request]:
        """Take out the waiting requests whose callers have given up."""
        gone = [r for r in self._waiting if r.completion.cancelled]
        if gone:
            self._waiting = deque(
                r for r in self._waiting if not r.completion.cancelled
            )
        return gone

    def drain(self) -> list[Request]:
        """Take all waiting requests, for a closing engine to fail."""
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def __len__(self) -> int:
        return len(self._waiting)
