"""What is remembered of chunks that are gone: how often they were used, at what cost.

Without it a chunk starts from nothing each time it comes back, and frequency says
little in a cache that holds a small part of what is asked for.
"""

from __future__ import annotations

from collections import OrderedDict

from pcr_core.index.chunk import ChunkKey

Counts = tuple[int, float, int]
"""Uses, sum of costs, misses: see ``Node``."""

REMEMBERED_PER_CHUNK = 8
"""Entries that pay, per chunk of the tier: half as many cost up to a point of hit rate
where the tier is small (12 requests), more gain nothing (measured with the simulator
on repeating, drifting and local traffic)."""


class Ghosts:
    """A bounded table of use counts by key; the least recently dropped goes.

    About 300 bytes an entry. Engine thread only.

    Args:
        capacity: Most entries; 0 remembers nothing.
    """

    __slots__ = ("_counts", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # A plain dict finds its oldest entry by walking over all deleted ones.
        self._counts: OrderedDict[ChunkKey, Counts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._counts

    def remember(self, key: ChunkKey, counts: Counts) -> None:
        """Note the counts of a chunk that goes, as the newest entry."""
        self._counts.pop(key, None)
        self._counts[key] = counts
        if len(self._counts) > self.capacity:
            self._counts.popitem(last=False)

    def recall(self, key: ChunkKey) -> Counts | None:
        """Take out the counts of a chunk that comes back."""
        return self._counts.pop(key, None)
