"""Which chunk goes first: a policy ranks, a queue finds the lowest rank cheaply.

The policy is a small pure object, tested without a cache. The queue is a heap with
lazy entries: an entry may be out of date and is corrected when it reaches the top, so
that using a chunk costs nothing here and evicting one costs O(log n) amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """What a policy may look at."""

    @property
    def last_used(self) -> int:
        """Stamp of the last committed use; larger is later."""


class EvictionPolicy(Protocol):
    """Orders chunks for eviction. Pure: ranking changes nothing."""

    def rank(self, node: Ranked) -> float:
        """Return the chunk's rank; the lowest rank is evicted first."""


class Lru:
    """Least recently used first.

    A path is stamped leaf to root, so parents are newer than their children and the
    order is leaf-first on its own.
    """

    def rank(self, node: Ranked) -> float:
        """Return the stamp of the last use."""
        return node.last_used


N = TypeVar("N", bound=Ranked)


class VictimQueue(Generic[N]):
    """Finds the evictable node of the lowest rank.

    The owner calls ``offer`` whenever a node becomes evictable or its rank falls. A
    rank that rises, and a node that stops being evictable, need no call.

    Args:
        policy: Ranks the nodes.
        evictable: Whether a node may be evicted at this moment.
    """

    __slots__ = ("_count", "_evictable", "_heap", "_policy", "_queued")

    def __init__(self, policy: EvictionPolicy, evictable: Callable[[N], bool]) -> None:
        self._policy = policy
        self._evictable = evictable
        self._heap: list[tuple[float, int, N]] = []
        self._queued: dict[N, float] = {}
        self._count = 0

    def __len__(self) -> int:
        """Entries in the heap, out-of-date ones included."""
        return len(self._heap)

    def offer(self, node: N) -> None:
        """Make ``node`` a candidate."""
        rank = self._policy.rank(node)
        queued = self._queued.get(node)
        if queued is None or rank < queued:
            self._push(rank, node)

    def peek(self) -> N | None:
        """Return the node to evict next, or ``None`` when none is evictable.

        The node stays a candidate until it stops being evictable.
        """
        heap = self._heap
        while heap:
            rank, _, node = heap[0]
            if self._queued.get(node) != rank:
                heapq.heappop(heap)
                continue
            if not self._evictable(node):
                heapq.heappop(heap)
                del self._queued[node]
                continue
            current = self._policy.rank(node)
            if current == rank:
                return node
            heapq.heappop(heap)
            self._push(current, node)
        return None

    def _push(self, rank: float, node: N) -> None:
        self._count += 1
        self._queued[node] = rank
        heapq.heappush(self._heap, (rank, self._count, node))
