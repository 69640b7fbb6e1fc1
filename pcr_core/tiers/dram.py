"""The DRAM tier: which chunk has which slot, and what leaves to make room.

The pool hands out slots and the tree says who is next to go; this module brings the two
together and moves the host states. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Event, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.host_pool import HostPool, Slot
from pcr_core.tiers.siblings import Siblings
from pcr_core.tiers.store.chunk_file import ChunkId

RUNNING = -1
"""Queue position of a request that runs: before everybody who waits."""


class DramTier:
    """Slots by chunk, under the pool's budget.

    Args:
        pool: The slots.
        tree: States and eviction order; this class moves the host states.
        stats: Where evictions are counted.
        log: Where they are remembered.

    Attributes:
        save: Asked about each victim; returns True if the chunk is being written to
            SSD now and must stay until that is done.
        fetched: Chunks that were brought here ahead of their first use.
        siblings: The chunks with a slot, by what they hold.
    """

    def __init__(
        self, pool: HostPool, tree: PrefixTree, stats: StoreCounters, log: EvictionLog
    ) -> None:
        self.save: Callable[[Node], bool] = lambda victim: False
        self.fetched: set[Node] = set()
        self.siblings = Siblings()
        self._pool = pool
        self._tree = tree
        self._stats = stats
        self._log = log
        self._slots: dict[ChunkKey, Slot] = {}

    @property
    def slots(self) -> Mapping[ChunkKey, Slot]:
        """The slots in use, by chunk."""
        return MappingProxyType(self._slots)

    @property
    def capacity(self) -> int:
        """Slots altogether."""
        return self._pool.capacity

    @property
    def spare(self) -> int:
        """Slots in nobody's use."""
        return self._pool.free_count

    def slot(self, node: Node) -> Slot:
        """The slot of a chunk that has one."""
        return self._slots[node.key]

    def view(self, node: Node) -> memoryview:
        """The bytes of a chunk that has a slot."""
        return self._slots[node.key].view

    def reserve(
        self, node: Node, chunk: ChunkId, position: int = RUNNING
    ) -> Slot | None:
        """Get a slot for a chunk, evicting others if need be.

        Args:
            node: The chunk; its host state becomes ``FILLING``.
            chunk: Its identity.
            position: Queue position of the request that wants it. Chunks reserved for
                a request at this position or before it are not evicted.

        Returns:
            The slot, or ``None`` if everything is pinned, being written, or reserved
            for requests that come first.
        """
        slot = self._pool.allocate()
        while slot is None:
            victim = self._tree.host_victim()
            if victim is None or not _gives_way(victim, position):
                return None
            if self.save(victim):
                continue
            self.evict(victim)
            slot = self._pool.allocate()
        self._slots[node.key] = slot
        self.siblings.add(node, chunk.parent, chunk.tokens)
        self._tree.advance_host(node, Event.RESERVE)
        return slot

    def evict(self, victim: Node) -> None:
        """Take an evictable chunk's slot back to make room."""
        self._log.note(victim.key, "dram", "dram budget")
        self._stats.dram_evictions += 1
        if victim in self.fetched:
            self._stats.prefetch_wasted += 1
        self.free(victim, Event.EVICT)

    def free(self, node: Node, event: Event) -> None:
        """Take a chunk's slot back."""
        self.fetched.discard(node)
        self._pool.free(self._slots.pop(node.key))
        self.siblings.remove(node)
        self._tree.advance_host(node, event)

    def take_fetched(self, node: Node) -> bool:
        """Whether the chunk was brought ahead and is used for the first time now."""
        if node not in self.fetched:
            return False
        self.fetched.discard(node)
        self._stats.prefetch_used += 1
        return True

    def close(self) -> None:
        """Let go of all slots."""
        self._slots = {}
        self.fetched.clear()
        self.siblings = Siblings()
        self._pool.close()


def _gives_way(victim: Node, position: int) -> bool:
    return victim.reserved is None or victim.reserved > position
