"""Work that nobody waits for, on a thread that lives as long as there is any.

Predicting, tokenising and submitting take milliseconds. The thread that searches must
not spend them, and the engine's thread, on which completions report, must not either.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]
Post = Callable[[Work], None]
"""Has some work done soon, in the order given; returns at once."""


class Worker:
    """Does work in order, in the background. Any thread may post."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def post(self, work: Work) -> None:
        """Have ``work`` done; it must not raise."""
        with self._changed:
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="pcr-speculate", daemon=True
                )
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is done; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def restart(self) -> None:
        """In a forked child: the parent's thread is not here."""
        self._waiting.clear()
        self._changed = threading.Condition()
        self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                work = self._waiting.popleft()
            work()
            del work


WORKER = Worker()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKER.restart)
