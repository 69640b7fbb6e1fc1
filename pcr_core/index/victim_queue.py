"""Finds the chunk to evict next without looking at all of them.

A heap with lazy entries: an entry may be out of date and is corrected when it reaches
the top, so that using a chunk costs nothing here and evicting one costs O(log n)
amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pcr_core.index.node import Node
from pcr_core.index.policies import EvictionPolicy, Rank

_SLACK = 64
"""Out-of-date entries that are never worth a clean-up."""


class VictimQueue:
    """Finds the evictable node of the lowest rank. Engine thread only.

    The owner calls ``offer`` whenever a node becomes evictable or its rank falls, and
    ``discard`` when it loses its copy. A rank that rises, and a node that is pinned or
    gets a child, need no call.

    Args:
        policy: Ranks the nodes.
        evictable: Whether a node may be evicted at this moment.
    """

    __slots__ = ("_count", "_epoch", "_evictable", "_heap", "_policy", "_queued")

    def __init__(
        self, policy: EvictionPolicy, evictable: Callable[[Node], bool]
    ) -> None:
        self._policy = policy
        self._evictable = evictable
        self._epoch = policy.epoch
        self._heap: list[tuple[Rank, int, Node]] = []
        self._queued: dict[Node, Rank] = {}  # the one valid entry of each node
        self._count = 0

    def __len__(self) -> int:
        """Entries in the heap, out-of-date ones included."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Make ``node`` a candidate."""
        rank = self._policy.rank(node)
        queued = self._queued.get(node)
        if queued is None or rank < queued:
            self._push(rank, node)

    def discard(self, node: Node) -> None:
        """``node`` is no candidate any more, until it is offered again."""
        if self._queued.pop(node, None) is not None:
            self._trim()

    def peek(self) -> Node | None:
        """Return the node to evict next, or ``None`` when none is evictable.

        The node stays a candidate until it stops being evictable.
        """
        if self._policy.epoch != self._epoch:
            self._rank_all()
        heap, queued = self._heap, self._queued
        while heap:
            rank, _, node = heap[0]
            if queued.get(node) is not rank:
                heapq.heappop(heap)
                continue
            if not self._evictable(node):
                heapq.heappop(heap)
                del queued[node]
                continue
            current = self._policy.rank(node)
            if current == rank:
                return node
            self._count += 1
            queued[node] = current
            heapq.heapreplace(heap, (current, self._count, node))
        return None

    def misplaced(self, node: Node) -> bool:
        """True if ``peek`` could pass over an evictable ``node``: a bug."""
        if self._policy.epoch != self._epoch:
            return node not in self._queued
        queued = self._queued.get(node)
        return queued is None or queued > self._policy.rank(node)

    def _push(self, rank: Rank, node: Node) -> None:
        self._count += 1
        self._queued[node] = rank
        heapq.heappush(self._heap, (rank, self._count, node))
        self._trim()

    def _trim(self) -> None:
        """Drop out-of-date entries once they are the majority: O(1) amortised."""
        heap, queued = self._heap, self._queued
        if len(heap) > 2 * len(queued) + _SLACK:
            heap[:] = [entry for entry in heap if queued.get(entry[2]) is entry[0]]
            heapq.heapify(heap)

    def _rank_all(self) -> None:
        self._epoch = self._policy.epoch
        rank = self._policy.rank
        self._queued = {node: rank(node) for node in self._queued}
        self._heap = [
            (rank, count, node)
            for count, (node, rank) in enumerate(self._queued.items())
        ]
        self._count = len(self._heap)
        heapq.heapify(self._heap)
