"""Writes what is only in DRAM, in batches, from whichever thread asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from pcr_core.index.node import Node
from pcr_core.tiers.jobs import Io
from pcr_core.tiers.write_back import WriteBack

_BATCH_BYTES = 32 * 2**20
"""So much fits into the smallest write queue there is, twice."""

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
        file_nbytes: Bytes of a chunk's file.
    """

    def __init__(self, writes: WriteBack, io: Io, file_nbytes: int) -> None:
        self._writes = writes
        self._io = io
        self._batch = max(1, _BATCH_BYTES // file_nbytes)

    def __call__(self, timeout: float | None, run: Caller) -> bool:
        """Write everything unsaved and wait for it; see ``TierManager.flush``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for batch in run(self._batches):
            run(partial(self._queue, batch))
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._io.flush(left):
                return False
        return True

    def _batches(self) -> list[list[Node]]:
        """What is unsaved; never empty, as recency may have to be written."""
        nodes, size = self._writes.unsaved(), self._batch
        return [nodes[at : at + size] for at in range(0, len(nodes), size)] or [[]]

    def _queue(self, batch: list[Node]) -> None:
        self._writes.write(batch)
        self._writes.send_touches()
