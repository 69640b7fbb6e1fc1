"""Finds the chunk to evict next without looking at all of them.

A heap with lazy entries: an entry may be out of date and is corrected when it reaches
the top, so that using a chunk costs nothing here and evicting one costs O(log n)
amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from pcr_core.index.node import Node
from pcr_core.index.policies import EvictionPolicy, Rank

Entry = tuple[Any, ...]
"""A rank, then a running number and the node. Flat, because comparing a tuple within a
tuple costs half as much again; the number keeps nodes from being compared."""

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
        self._heap: list[Entry] = []
        self._queued: dict[Node, Entry] = {}  # the one valid entry of each node
        self._count = 0

    def __len__(self) -> int:
        """Entries in the heap, out-of-date ones included."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Make ``node`` a candidate."""
        rank = self._policy.rank(node)
        queued = self._queued.get(node)
        if queued is None:
            heapq.heappush(self._heap, self._entry(rank, node))
        elif rank < queued[:-2]:
            heapq.heappush(self._heap, self._entry(rank, node))
            self._trim()

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
            entry = heap[0]
            node: Node = entry[-1]
            if queued.get(node) is not entry:
                heapq.heappop(heap)
            elif not self._evictable(node):
                heapq.heappop(heap)
                del queued[node]
            else:
                rank = self._policy.rank(node)
                if rank == entry[:-2]:
                    return node
                heapq.heapreplace(heap, self._entry(rank, node))
        return None

    def misplaced(self, node: Node) -> bool:
        """True if ``peek`` could pass over an evictable ``node``: a bug."""
        queued = self._queued.get(node)
        if queued is None:
            return True
        current = self._policy.epoch == self._epoch
        return current and bool(self._policy.rank(node) < queued[:-2])

    def _entry(self, rank: Rank, node: Node) -> Entry:
        self._count += 1
        entry = self._queued[node] = (*rank, self._count, node)
        return entry

    def _trim(self) -> None:
        """Drop out-of-date entries once they are the majority: O(1) amortised."""
        heap, queued = self._heap, self._queued
        if len(heap) > 2 * len(queued) + _SLACK:
            heap[:] = [entry for entry in heap if queued.get(entry[-1]) is entry]
            heapq.heapify(heap)

    def _rank_all(self) -> None:
        self._epoch = self._policy.epoch
        rank = self._policy.rank
        self._heap = [self._entry(rank(node), node) for node in self._queued]
        heapq.heapify(self._heap)
