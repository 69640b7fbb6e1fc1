"""Finds the chunk to evict next without looking at all of them.

A heap with lazy entries: an entry may be out of date and is corrected when it reaches
the top, and new candidates are ranked when somebody asks. So using or finding a chunk
costs next to nothing here, and evicting one O(log n) amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from pcr_core.index.node import Node
from pcr_core.index.policies import EvictionPolicy

Entry = tuple[Any, ...]
"""A rank, then the node. Flat, because to compare a tuple within a tuple costs half as
much again."""

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

    __slots__ = ("_epoch", "_evictable", "_heap", "_offered", "_policy", "_queued")

    def __init__(
        self, policy: EvictionPolicy, evictable: Callable[[Node], bool]
    ) -> None:
        self._policy = policy
        self._evictable = evictable
        self._epoch = policy.epoch
        self._offered: set[Node] = set()  # not ranked yet
        self._heap: list[Entry] = []
        self._queued: dict[Node, Entry] = {}  # the one valid entry of each node

    def __len__(self) -> int:
        """How much is kept, out-of-date entries included."""
        return len(self._heap) + len(self._offered)

    def offer(self, node: Node) -> None:
        """Make ``node`` a candidate."""
        self._offered.add(node)

    def discard(self, node: Node) -> None:
        """``node`` is no candidate any more, until it is offered again."""
        self._offered.discard(node)
        if self._queued.pop(node, None) is not None:
            self._trim()

    def peek(self) -> Node | None:
        """Return the node to evict next, or ``None`` when none is evictable.

        The node stays a candidate until it stops being evictable.
        """
        if self._policy.epoch != self._epoch:
            self._rank_all()
        if self._offered:
            self._take_in()
        heap, queued = self._heap, self._queued
        while heap:
            entry = heap[0]
            node: Node = entry[-1]
            if queued.get(node) is not entry:
                heapq.heappop(heap)
            elif not self._evictable(node):
                heapq.heappop(heap)
                del queued[node]
            else:
                rank = self._policy.rank(node)
                if rank == entry[:-1]:
                    return node
                entry = queued[node] = (*rank, node)
                heapq.heapreplace(heap, entry)
        return None

    def misplaced(self, node: Node) -> bool:
        """True if ``peek`` could pass over an evictable ``node``: a bug."""
        if node in self._offered:
            return False
        queued = self._queued.get(node)
        if queued is None:
            return True
        current = self._policy.epoch == self._epoch
        return current and bool(self._policy.rank(node) < queued[:-1])

    def _take_in(self) -> None:
        queued, policy = self._queued, self._policy
        for node in self._offered:
            if self._evictable(node):
                rank, old = policy.rank(node), queued.get(node)
                if old is None or rank < old[:-1]:
                    entry = queued[node] = (*rank, node)
                    heapq.heappush(self._heap, entry)
        self._offered.clear()
        self._trim()

    def _trim(self) -> None:
        """Drop out-of-date entries once they are the majority: O(1) amortised."""
        heap, queued = self._heap, self._queued
        if len(heap) > 2 * len(queued) + _SLACK:
            heap[:] = [entry for entry in heap if queued.get(entry[-1]) is entry]
            heapq.heapify(heap)

    def _rank_all(self) -> None:
        self._epoch = self._policy.epoch
        rank = self._policy.rank
        self._queued = {node: (*rank(node), node) for node in self._queued}
        self._heap = list(self._queued.values())
        heapq.heapify(self._heap)
