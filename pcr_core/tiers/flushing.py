"""Writes what is only in DRAM, from whichever thread asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from pcr_core.tiers.jobs import Io
from pcr_core.tiers.write_back import WriteBack

T = TypeVar("T")


class Caller(Protocol):
    """Has something done on the engine thread."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Do it, and return what it gives."""


def here(work: Callable[[], T], /) -> T:
    """The ``Caller`` of the engine thread itself."""
    return work()


class Flush:
    """Empties DRAM's backlog.

    Args:
        writes: Knows what is unsaved, and queues it.
        io: Does it.
        poll: Takes in what is done, which makes room for more.
    """

    def __init__(self, writes: WriteBack, io: Io, poll: Callable[[], None]) -> None:
        self._writes = writes
        self._io = io
        self._poll = poll

    def __call__(self, timeout: float | None, run: Caller) -> bool:
        """Write everything unsaved and wait for it; see ``TierManager.flush``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        run(self._begin)
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._io.flush(left):
                return False
            if not run(self._goes_on):
                return True

    def _begin(self) -> None:
        self._writes.write(self._writes.unsaved())
        self._writes.send_touches()

    def _goes_on(self) -> bool:
        self._poll()
        return self._writes.busy
