"""Chunks that a request computes on while they are still being read, layer by layer.

All of them arrive together, so they are watched together: a read that fails loses its
own chunk; a disk that hangs, or turns out slower than computing, loses all that are not
there yet. Engine thread only, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from pcr_core.errors import ChunkLostError
from pcr_core.tiers.read_in import ReadIn, Reading
from pcr_core.tiers.store.chunk_file import ReadOutcome

HANGS = 60.0
"""Seconds without any progress of its reads after which a request waits no more."""

GLANCE = 0.125
"""Seconds between two looks at whether it is still wanted."""

_SAMPLE = 8
"""A convoy is judged by its speed after this part of the time that computing takes."""

_REASONS = {
    ReadOutcome.MISSING: "its file is gone",
    ReadOutcome.CORRUPT: "its file is damaged",
    ReadOutcome.DROPPED: "its read was dropped",
}


class Waiter(Protocol):
    """Who computes on them; ``Lease`` is one."""

    patience: float
    checkpoint: Callable[[], None]


class Convoy:
    """Reads side by side, and how long a request waits for them.

    Args:
        readings: The reads, by chunk index.
        reads: Where they run.
        waiter: The request.
        worth: Seconds that computing the chunks would take instead; infinite if that
            is no choice, or not known.
        clock: Seconds.

    Attributes:
        hangs: Nothing has come for so long that nothing more is waited for.
        slow: It has turned out that computing takes less time.
    """

    def __init__(
        self,
        readings: Mapping[int, Reading],
        reads: ReadIn,
        waiter: Waiter,
        worth: float,
        clock: Callable[[], float],
    ) -> None:
        self.hangs = False
        self.slow = False
        self._readings = readings
        self._reads = reads
        self._waiter = waiter
        self._worth = worth
        self._clock = clock
        self._begun = self._since = clock()
        self._done = 0

    @property
    def given_up(self) -> bool:
        """Whether nothing more is waited for."""
        return self.hangs or self.slow

    def reading(self, index: int) -> Reading:
        """The read of a chunk."""
        return self._readings[index]

    def is_awaited(self) -> bool:
        """Whether it pays to wait on; looks how far it has come."""
        self._judge()
        return not self.given_up

    def wait(self, index: int, layer: int) -> None:
        """Block until a layer of a chunk is verified; see ``Arrival.wait``."""
        reading, seconds = self._readings[index], min(GLANCE, self._waiter.patience)
        while not self._reads.wait_layer(reading, layer, seconds):
            self._judge()
            if self.given_up:
                why = "its read hangs" if self.hangs else "computing it is faster"
                raise ChunkLostError(index, why)
            self._waiter.checkpoint()
        if reading.job.layers <= layer:
            outcome = reading.job.outcome or ReadOutcome.FAILED
            raise ChunkLostError(index, _REASONS.get(outcome, "it cannot be read"))

    def _judge(self) -> None:
        """Look how far it has come in how much time."""
        now, jobs = self._clock(), [one.job for one in self._readings.values()]
        done = sum(job.layers for job in jobs)
        if done > self._done:
            self._done, self._since = done, now
        elif now - self._since >= min(HANGS, self._waiter.patience):
            self.hangs = True
        spent = now - self._begun
        left = sum(len(job.format.layout.layers) for job in jobs) - done
        # Nothing of it there yet says no more than that it takes longer than this.
        needed = spent * left / done if done else spent
        self.slow = spent > self._worth / _SAMPLE and needed > self._worth


class Arrival:
    """A chunk that is being read layer by layer, the first layer first."""

    __slots__ = ("_convoy", "_index", "_job")

    def __init__(self, convoy: Convoy, index: int) -> None:
        self._convoy = convoy
        self._index = index
        self._job = convoy.reading(index).job

    @property
    def convoy(self) -> Convoy:
        """What it comes with."""
        return self._convoy

    @property
    def reading(self) -> Reading:
        """Its read."""
        return self._convoy.reading(self._index)

    @property
    def layers(self) -> int:
        """Leading layers that are read and verified. Grows only. Any thread."""
        return self._job.layers

    def wait(self, layer: int) -> None:
        """Block until layer ``layer`` is read and verified, so ``layers > layer``.

        Calls the lease's checkpoint now and then, which may raise.

        Raises:
            ChunkLostError: If it will not come: the read failed, the file is damaged,
                or nothing comes any more. Tell ``Lease.lost``.
        """
        if self._job.layers <= layer:
            self._convoy.wait(self._index, layer)
