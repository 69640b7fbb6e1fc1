"""How long searches still take after each of their stages."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

Clock = Callable[[], float]

KEPT = 8
"""Searches that an estimate goes by: the latest."""


class Pace:
    """Remembers how long after its stages a search was over. Any thread.

    Args:
        clock: Seconds, rising.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._left: dict[int, deque[float]] = {}

    def note(self, stages: Sequence[float], end: float) -> None:
        """Take note of a search.

        Args:
            stages: When each stage but the last was over.
            end: When the last was.
        """
        with self._lock:
            for index, at in enumerate(stages):
                self._left.setdefault(index, deque(maxlen=KEPT)).append(end - at)

    def left(self, stage: int) -> float | None:
        """Seconds from a stage, the first being 0, to the end: a median.

        Of a stage that no search has had yet, those from the last one before it, than
        which it has less; None if there is none.
        """
        with self._lock:
            known = [index for index in self._left if index <= stage]
            return statistics.median(self._left[max(known)]) if known else None
