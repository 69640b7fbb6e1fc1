"""The fixed eviction policies: small objects that order chunks, one per tier.

They know nothing of tiers, capacities or bytes, and are tested without a cache.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pcr_core.index.node import Node

Rank = tuple[float, ...]


class EvictionPolicy(Protocol):
    """Orders the chunks of one tier for eviction. Engine thread only.

    The rank of a chunk may rise at any time. It may fall when the chunk is used, when
    its reservation ends or moves back in the queue, and with a new ``epoch``: then the
    tree has the chunk ranked again. It must not fall otherwise.
    """

    @property
    def epoch(self) -> int:
        """Changes when any rank may have changed for another reason than a use."""

    def rank(self, node: Node) -> Rank:
        """Return the chunk's rank; the lowest goes first.

        Two ranks of one epoch differ before the shorter one ends, or are as long.
        """

    def used(self, node: Node) -> None:
        """A request used the chunk; its stamps and counts are up to date."""

    def evicted(self, node: Node) -> None:
        """The chunk lost its copy in this tier to make room. Moves clocks."""


@runtime_checkable
class StatefulPolicy(EvictionPolicy, Protocol):
    """A policy that keeps something per chunk."""

    def dropped(self, node: Node) -> None:
        """The tree no longer knows the chunk: let go of it."""


class Lru:
    """Least recently used first.

    A path is stamped leaf to root, so parents are newer than their children and the
    order is leaf-first on its own.
    """

    epoch = 0

    def rank(self, node: Node) -> Rank:
        """Return the stamp of the last use."""
        return (0, node.last_used)

    def used(self, node: Node) -> None:
        """Nothing to note."""

    def evicted(self, node: Node) -> None:
        """Nothing to note."""


class LookAheadLru(Lru):
    """Least recently used first, but what waiting requests need goes last.

    Among reserved chunks the one whose request runs latest goes first: when all leaves
    are reserved, the latest reservation gives way (PCR, arXiv 2603.23049, look-ahead
    LRU; what happens when everything is reserved is ours).
    """

    def rank(self, node: Node) -> Rank:
        """Return the stamp of the last use, or the place in the queue above all."""
        if node.reserved is None:
            return (0, node.last_used)
        return (1, -node.reserved, node.last_used)


class Pgdsf:
    """Prefix-aware Greedy-Dual-Size-Frequency (RAGCache, arXiv 2404.12457, 5.1).

    Priority = clock + uses x mean cost of computing one token, stamped when the chunk
    is used, with the clock of that moment; computing it afresh with the current clock
    would cancel the clock and with it all ageing. The clock rises to the priority of
    each evicted chunk. Size cancels, because the cost is per token. Ties go to the
    least recently used.

    A copy that arrives without a use (found on SSD, prefetched) is stamped when it is
    first ranked. A chunk that was never computed here counts as of average cost.

    Attributes:
        clock: Priority of the dearest chunk evicted so far.
    """

    epoch = 0

    def __init__(self) -> None:
        self.clock = 0.0
        self._stamps: dict[Node, float] = {}
        self._mean_cost = 0.0

    def rank(self, node: Node) -> Rank:
        """Return the stamped priority, then the stamp of the last use."""
        stamp = self._stamps.get(node)
        if stamp is None:
            self.used(node)
            stamp = self._stamps[node]
        return (stamp, node.last_used)

    def used(self, node: Node) -> None:
        """Stamp the priority."""
        misses = node.misses
        if misses == 0:
            cost = self._mean_cost
        else:
            cost = node.cost_sum / misses
            if misses == node.uses:  # just computed, or nearly so
                self._learn(cost)
        self._stamps[node] = self.clock + node.uses * cost

    def evicted(self, node: Node) -> None:
        """Let the clock rise to the priority of the victim."""
        self.clock = max(self.clock, self._stamps.pop(node, 0.0))

    def dropped(self, node: Node) -> None:
        """Forget the priority."""
        self._stamps.pop(node, None)

    def _learn(self, cost: float) -> None:
        """Move the mean over about the last thousand computed chunks."""
        weight = 1e-3 if self._mean_cost else 1.0
        self._mean_cost += weight * (cost - self._mean_cost)
