"""Queue-driven prefetch: SSD -> DRAM for requests that wait (PCR, arXiv 2603.23049).

While a request waits, the chunks it will need are protected from eviction and those
that are only on SSD are read: nearest request first, root first, only what is missing,
a bounded number of bytes at a time. A half-done prefetch is usable: each chunk counts
as soon as it is there. Engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.look_ahead import LookAhead
from pcr_core.index.node import Disk, Host, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.read_in import ReadIn
from pcr_core.tiers.store.chunk_file import ChunkId


class Wanted(Protocol):
    """What a request that waits will need. Compared by identity.

    Attributes:
        keys: Keys of every full chunk of its prompt, root first.
        tokens: Its prompt.
        usable: How many leading chunks may be read rather than computed.
    """

    @property
    def keys(self) -> Sequence[ChunkKey]:
        """Root first."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids."""

    @property
    def usable(self) -> int:
        """At most ``len(keys)``."""


class Prefetcher:
    """Brings chunks to DRAM before the requests that need them run.

    Args:
        tree: Residency.
        look_ahead: Protects what the queue needs.
        reads: Starts and undoes reads.
        limit: Bytes that may be in flight at a time; 0 protects and reads nothing.
        adopt: Learns of chunks, by key, that another process may have stored.
        identify: Gives chunk ``index`` of a wanted prompt its identity.
        stats: Counters.
    """

    def __init__(
        self,
        tree: PrefixTree,
        look_ahead: LookAhead,
        reads: ReadIn,
        limit: int,
        *,
        adopt: Callable[[Sequence[ChunkKey]], None],
        identify: Callable[[Wanted, int], ChunkId],
        stats: StoreCounters,
    ) -> None:
        self._tree = tree
        self._look_ahead = look_ahead
        self._reads = reads
        self._limit = limit
        self._adopt = adopt
        self._identify = identify
        self._stats = stats
        self._window: list[Wanted] = []

    def update(self, window: Sequence[Wanted]) -> None:
        """Look at the queue again: protect, cancel, read. Call when anything changed.

        Args:
            window: The requests that will run next, nearest first.
        """
        known = set(map(id, self._window))
        for wanted in window:
            if id(wanted) not in known:
                self._adopt(wanted.keys[: wanted.usable])
        self._window = list(window)
        self._look_ahead.update([want.keys[: want.usable] for want in window])
        self._cancel_unwanted()
        for position, wanted in enumerate(window):
            if not self._fetch(wanted, position):
                return

    def _cancel_unwanted(self) -> None:
        ahead = [reading for reading in self._reads if reading.reader is None]
        if not ahead:
            return
        needed = set(chain.from_iterable(want.keys for want in self._window))
        for reading in ahead:
            if reading.node.key not in needed and self._reads.drop(reading):
                self._stats.prefetch_cancelled += 1

    def _fetch(self, wanted: Wanted, position: int) -> bool:
        """Start the reads of one request; False once no more may be started."""
        for index, node in enumerate(self._tree.match(wanted.keys[: wanted.usable])):
            if node is None or not _only_on_ssd(node):
                continue
            if self._reads.nbytes >= self._limit:
                return False
            chunk = self._identify(wanted, index)
            if self._reads.start(node, chunk, position) is None:
                return False  # whatever could make room belongs to nearer requests
            self._stats.prefetch_issued += 1
        return True


def _only_on_ssd(node: Node) -> bool:
    return node.host is Host.NONE and node.disk is Disk.STORED


class Hints:
    """Prompts that may be asked soon: bounded, newest first. Engine thread only.

    A hint protects what it brought until a request has used it or newer hints have
    pushed it out; every waiting request comes before it.

    Args:
        capacity: Hints kept.
    """

    def __init__(self, capacity: int = 16) -> None:
        self._hints: deque[Wanted] = deque(maxlen=capacity)

    def add(self, wanted: Wanted) -> None:
        """Add a hint in front of the older ones."""
        self._hints.appendleft(wanted)

    def used(self, keys: Sequence[ChunkKey]) -> None:
        """Drop the hints that a request with these chunks has fulfilled."""
        present = set(keys)
        kept = [h for h in self._hints if not h.keys or h.keys[-1] not in present]
        self._hints = deque(kept, self._hints.maxlen)

    def strike(self, forgotten: Callable[[ChunkKey], bool]) -> None:
        """Drop the hints that have any of the chunks that were forgotten."""
        kept = [hint for hint in self._hints if not any(map(forgotten, hint.keys))]
        self._hints = deque(kept, self._hints.maxlen)

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self._hints)

    def __len__(self) -> int:
        return len(self._hints)
