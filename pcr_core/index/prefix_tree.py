"""The prefix tree: which chunks exist, in which tier, and who is using them.

Nodes are found by key and know their parent; a tier's copy is a small state with one
transition table. The tree holds no bytes and does no I/O. Engine thread only.

Holes are legal: a chunk's KV depends on the tokens before it, not on whether their KV
is stored, so ``match`` reports every key and does not stop at the first missing one.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

from pcr_core.index.audit import audit_links, audit_marks, audit_queue
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.ghosts import Ghosts
from pcr_core.index.node import (
    DISK_NONE,
    DISK_STORED,
    DISK_TRANSITIONS,
    DISK_WRITING,
    EVICT,
    FIND,
    HOST_NONE,
    HOST_READY,
    HOST_TRANSITIONS,
    Disk,
    Event,
    Host,
    IllegalTransitionError,
    Node,
    disk_evictable,
    host_evictable,
    is_bare,
)
from pcr_core.index.policies import EvictionPolicy, StatefulPolicy
from pcr_core.index.shelves import Shelves
from pcr_core.index.subtree import subtree
from pcr_core.index.victim_queue import VictimQueue

__all__ = [
    "DISK_TRANSITIONS",
    "HOST_TRANSITIONS",
    "Disk",
    "Event",
    "Host",
    "IllegalTransitionError",
    "Node",
    "PrefixTree",
    "disk_evictable",
    "host_evictable",
]


class PrefixTree:
    """Nodes by key, with residency per tier, pins and history. Engine thread only.

    A node without copy, pin and children is dropped at once, so memory is bounded by
    what the tiers hold and what is pinned.

    Args:
        host_policy: Ranks nodes for eviction from DRAM.
        disk_policy: The same for SSD; ``None`` shares the other, which is right only
            for a policy without state (clocks belong to one tier).
        remembered: Dropped nodes whose use counts are kept for their return.

    Attributes:
        host_ready: Chunks whose DRAM copy is ``READY``.
    """

    def __init__(
        self,
        host_policy: EvictionPolicy,
        disk_policy: EvictionPolicy | None = None,
        *,
        remembered: int = 0,
    ) -> None:
        self.host_ready = 0
        self._nodes: dict[ChunkKey, Node] = {}
        self._host_policy = host_policy
        self._disk_policy = host_policy if disk_policy is None else disk_policy
        policies = {id(p): p for p in (self._host_policy, self._disk_policy)}.values()
        self._used = [policy.used for policy in policies]
        self._dropped = [p.dropped for p in policies if isinstance(p, StatefulPolicy)]
        self._host_queue = VictimQueue(host_policy, host_evictable)
        self._shelves = Shelves(self._disk_policy)
        self._reserved: dict[ChunkKey, int] = {}
        self._ghosts = Ghosts(remembered)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def disk_bytes(self) -> int:
        """Size of all files whose chunk is ``STORED``."""
        return self._shelves.nbytes

    def nodes(self) -> Iterable[Node]:
        """Every node, in no particular order."""
        return self._nodes.values()

    # --- what is known ---

    def match(self, keys: Sequence[ChunkKey]) -> list[Node | None]:
        """Return what is known of each key. Pure: no recency, no counter changes."""
        return list(map(self._nodes.get, keys))

    def grow(
        self, root: bytes, keys: Sequence[ChunkKey], tenant: bytes = b""
    ) -> list[Node]:
        """Return the nodes of a path, adding those that are unknown.

        Pin them before the next call that changes the tree: a new node has no copy yet
        and goes away with the first clean-up that meets it.

        Args:
            root: Digest of the namespace, the parent of the first key.
            keys: Chunk keys, root first.
            tenant: Whose chunks these are; a known node stays with its tenant.
        """
        if not keys:
            return []
        parent = self._node(ChunkKey(root), tenant)
        path = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                node = self._node(key, tenant)
            if node.parent is None:
                self._link(node, parent)
            path.append(node)
            parent = node
        return path

    def add_stored(
        self,
        key: ChunkKey,
        parent: bytes,
        nbytes: int,
        stamp: int,
        tenant: bytes = b"",
    ) -> None:
        """Learn of a chunk found on SSD; one already known there is left alone.

        Args:
            key: Its key.
            parent: Key of the chunk before it, or the root.
            nbytes: Size of its file.
            stamp: When it was last used.
            tenant: Whose it is.
        """
        node = self._node(key, tenant)
        if node.disk is not DISK_NONE:
            return
        if node.parent is None:
            self._link(node, self._node(ChunkKey(parent), tenant))
        if stamp > node.last_used:
            node.last_used = stamp
            self._clock = max(self._clock, stamp)
            self._offer_host(node)  # under some policies a later use ranks lower
        self.advance_disk(node, FIND, nbytes)

    def add_known(self, key: ChunkKey, parent: bytes, tenant: bytes = b"") -> None:
        """Learn the parent of a chunk that has no copy, but stored descendants.

        The order in which a path becomes known does not matter. A chunk whose
        descendants never come stays until ``prune``.
        """
        node = self._node(key, tenant)
        if node.parent is None:
            self._link(node, self._node(ChunkKey(parent), tenant))

    def prune(self) -> None:
        """Drop what ``add_known`` brought in for nothing. Looks at every node."""
        for node in [node for node in self._nodes.values() if is_bare(node)]:
            self._drop(node)

    def subtree(self, heads: Iterable[ChunkKey]) -> list[Node]:
        """Return all nodes at or below some heads, leaves first.

        Looks at every node, so that nodes need not know their children: only
        ``forget`` asks for this. Unknown heads are ignored.
        """
        return subtree(self._nodes.values(), self.match(list(heads)))

    # --- who uses it, who will ---

    def pin(self, path: Iterable[Node]) -> None:
        """Protect nodes from eviction in both tiers."""
        for node in path:
            node.pins += 1

    def unpin(self, path: Sequence[Node]) -> None:
        """Undo one ``pin``; bare nodes are dropped, leaf first."""
        for node in reversed(path):
            if node.pins == 0:
                raise IllegalTransitionError(f"{node.key.hex()} was unpinned twice")
            node.pins -= 1
            if node.pins == 0:
                if is_bare(node):
                    self._drop(node)
                else:
                    self._offer(node)

    def commit(
        self,
        path: Sequence[Node],
        now: int,
        *,
        missed: Collection[int] = (),
        cost: float = 0.0,
    ) -> None:
        """Record one use of a path, once per request, when it has run.

        Recency goes leaf to root, so that parents are newest.

        Args:
            path: Its nodes, root first.
            now: Wall clock in nanoseconds; stamps never run backwards.
            missed: Positions in ``path`` of the chunks that were computed.
            cost: What that took, in seconds per computed token of the request.
        """
        for index in missed:
            node = path[index]
            node.misses += 1
            node.cost_sum += cost
        stamp = max(self._clock, now)
        for node in reversed(path):
            stamp += 1
            node.last_used = stamp
            node.uses += 1
            for used in self._used:
                used(node)
            if node.pins == 0:
                self._offer(node)
        self._clock = stamp

    def reserve(self, positions: Mapping[ChunkKey, int]) -> None:
        """Replace all reservations.

        A node that comes to be later under a reserved key is reserved from birth.

        Args:
            positions: For each chunk that a waiting request needs, the queue position
                of the nearest such request; 0 runs next.
        """
        old, self._reserved = self._reserved, dict(positions)
        for key in old.keys() - self._reserved.keys():
            node = self._nodes.get(key)
            if node is not None:
                node.reserved = None
                self._offer(node)
        for key, position in self._reserved.items():
            before = old.get(key)
            node = self._nodes.get(key) if before != position else None
            if node is not None:
                node.reserved = position
                if before is not None and position > before:
                    self._offer(node)

    # --- where it is ---

    def advance_host(self, node: Node, event: Event) -> None:
        """Move the DRAM copy to its next state.

        Raises:
            IllegalTransitionError: If the table has no such transition.
        """
        old = node.host
        new = HOST_TRANSITIONS.get((old, event))
        if new is None:
            raise IllegalTransitionError(_illegal(node, old, event))
        node.host = new
        self.host_ready += (new is HOST_READY) - (old is HOST_READY)
        parent = node.parent
        if new is HOST_READY:
            self._offer_host(node)
        elif new is HOST_NONE:
            self._host_queue.discard(node)
            if event is EVICT:
                self._host_policy.evicted(node)
            if parent is not None:
                parent.host_children -= 1
                self._offer_host(parent)
            if is_bare(node):
                self._drop(node)
        elif parent is not None:
            parent.host_children += 1

    def advance_disk(self, node: Node, event: Event, nbytes: int = 0) -> None:
        """Move the SSD copy to its next state.

        Args:
            node: The chunk.
            event: What happened.
            nbytes: Size of the file, for the events that end in ``STORED``.

        Raises:
            IllegalTransitionError: If the table has no such transition.
        """
        old = node.disk
        new = DISK_TRANSITIONS.get((old, event))
        if new is None:
            raise IllegalTransitionError(_illegal(node, old, event))
        node.disk = new
        parent = node.parent
        if old is DISK_NONE and parent is not None:
            parent.disk_children += 1
        if new is DISK_STORED:
            node.disk_bytes = nbytes
            self._shelves.add(node)
            self._offer_disk(node)
        elif new is DISK_NONE:
            if old is DISK_STORED:
                self._shelves.remove(node)
                node.disk_bytes = 0
            if event is EVICT:
                self._disk_policy.evicted(node)
            if parent is not None:
                parent.disk_children -= 1
                self._offer_disk(parent)
            if is_bare(node):
                self._drop(node)
        if old is DISK_WRITING:
            self._offer_host(node)  # its writer no longer reads it

    def host_victim(self) -> Node | None:
        """Return the chunk to evict from DRAM next, or ``None``."""
        return self._host_queue.peek()

    def disk_victim(self, tenant: bytes | None = None) -> Node | None:
        """Return the chunk to evict from SSD next, or ``None``.

        Args:
            tenant: Whose chunk to take; ``None`` takes the lowest rank of all.
        """
        return self._shelves.victim(tenant)

    @property
    def disk_stored(self) -> int:
        """Chunks whose SSD copy is ``STORED``."""
        return self._shelves.chunks

    def tenant_bytes(self, tenant: bytes) -> int:
        """Size of all files of a tenant whose chunk is ``STORED``."""
        return self._shelves.tenant_bytes(tenant)

    def audit(self) -> list[str]:
        """Recount everything from the nodes; return what does not fit."""
        nodes = self._nodes.values()
        problems = audit_links(self._nodes)
        problems += audit_queue(self._host_queue, nodes, host_evictable)
        problems += self._shelves.audit(nodes)
        problems += audit_marks(nodes, self._reserved, self._ghosts)
        return problems

    # --- parts ---

    def _node(self, key: ChunkKey, tenant: bytes) -> Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, tenant)
            if self._reserved:
                node.reserved = self._reserved.get(key)
            counts = self._ghosts.recall(key) if self._ghosts.capacity else None
            if counts is not None:
                node.uses, node.cost_sum, node.misses = counts
        return node

    def _link(self, node: Node, parent: Node) -> None:
        node.parent = parent
        parent.children += 1
        parent.host_children += node.host is not HOST_NONE
        parent.disk_children += node.disk is not DISK_NONE

    def _drop(self, node: Node) -> None:
        """Drop a bare node, and its ancestors as far as they become bare."""
        bare: Node | None = node
        while bare is not None and is_bare(bare):
            if self._nodes.get(bare.key) is bare:
                del self._nodes[bare.key]
                if self._ghosts.capacity and bare.uses:
                    counts = (bare.uses, bare.cost_sum, bare.misses)
                    self._ghosts.remember(bare.key, counts)
                for dropped in self._dropped:
                    dropped(bare)
            above, bare.parent = bare.parent, None
            if above is not None:
                above.children -= 1
            bare = above

    def _offer(self, node: Node) -> None:
        self._offer_host(node)
        self._offer_disk(node)

    def _offer_host(self, node: Node) -> None:
        if host_evictable(node):
            self._host_queue.offer(node)

    def _offer_disk(self, node: Node) -> None:
        if disk_evictable(node):
            self._shelves.offer(node)


def _illegal(node: Node, state: enum.Enum, event: Event) -> str:
    return f"chunk {node.key.hex()}: {event.name} is not possible in state {state}"
