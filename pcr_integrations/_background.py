"""Work that nobody waits for, on a thread that lives as long as there is any.

Predicting, tokenising and submitting take milliseconds. A retriever, a search and the
engine's thread, on which completions report, must not spend them.
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
    """Does work in order, in the background. Any thread may post.

    Args:
        name: Of its thread.
        most: Of what waits, the newest so many count; ``None`` for all.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._name = name
        self._waiting: deque[Work] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def post(self, work: Work) -> None:
        """Have ``work`` done; it must not raise."""
        with self._changed:
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=self._name, daemon=True
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


def process_wide(name: str, most: int | None = None) -> Worker:
    """Return a worker for the life of the process, and of children it forks."""
    worker = Worker(name, most)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=worker.restart)
    return worker
