"""The prefix tree: which chunks exist, in which tier, and who is using them.

Nodes are found by key and know their parent; a tier's copy is a small state with one
transition table. The tree holds no bytes and does no I/O. Engine thread only.

Holes are legal: a chunk's KV depends on the tokens before it, not on whether their KV
is stored, so ``match`` reports every key and does not stop at the first missing one.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

from pcr_core.index.audit import audit_links, audit_queue
from pcr_core.index.chunk import ChunkKey
from pcr_core.index.ghosts import Ghosts
from pcr_core.index.node import (
    DISK_TRANSITIONS,
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


class _Shelf:
    """What one tenant has on SSD."""

    __slots__ = ("chunks", "nbytes", "queue")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.chunks = 0
        self.nbytes = 0
        self.queue = VictimQueue(policy, disk_evictable)


class PrefixTree:
    """Nodes by key, with residency per tier, pins and history. Engine thread only.

    A node without copy, pin and children is dropped at once, so memory is bounded by
    what the tiers hold.

    Args:
        host_policy: Ranks nodes for eviction from DRAM.
        disk_policy: The same for SSD; ``None`` shares the other, which is right only
            for a policy without state (clocks belong to one tier).
        remembered: Dropped nodes whose use counts are kept for their return.

    Attributes:
        disk_bytes: Size of all files whose chunk is ``STORED``.
    """

    def __init__(
        self,
        host_policy: EvictionPolicy,
        disk_policy: EvictionPolicy | None = None,
        *,
        remembered: int = 0,
    ) -> None:
        self.disk_bytes = 0
        self._nodes: dict[ChunkKey, Node] = {}
        self._host_policy = host_policy
        self._disk_policy = disk_policy or host_policy
        policies = {id(p): p for p in (self._host_policy, self._disk_policy)}.values()
        self._used = [policy.used for policy in policies]
        self._dropped = [p.dropped for p in policies if isinstance(p, StatefulPolicy)]
        self._host_queue = VictimQueue(host_policy, host_evictable)
        self._shelves: dict[bytes, _Shelf] = {}
        self._reserved: dict[ChunkKey, int] = {}
        self._ghosts = Ghosts(remembered)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

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
        if node.disk is not Disk.NONE:
            return
        if node.parent is None:
            self._link(node, self._node(ChunkKey(parent), tenant))
        node.last_used = max(node.last_used, stamp)
        self._clock = max(self._clock, stamp)
        self.advance_disk(node, Event.FIND, nbytes)

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
        # From each node up to the first one with a verdict: every node is met once.
        inside = {node for node in self.match(list(heads)) if node is not None}
        depths: dict[Node, int] = {}
        found = []
        for node in self._nodes.values():
            way = []
            above: Node | None = node
            while above is not None and above not in depths:
                way.append(above)
                above = above.parent
            depth = -1 if above is None else depths[above]
            for below in reversed(way):
                depth += 1
                depths[below] = depth
                if below.parent in inside:
                    inside.add(below)
                if below in inside:
                    found.append(below)
        return sorted(found, key=depths.__getitem__, reverse=True)

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
                self._settle(node)

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
            self._set_reserved(key, None)
        for key, position in self._reserved.items():
            if old.get(key) != position:
                self._set_reserved(key, position)

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
        if new is Host.NONE:
            self._host_queue.discard(node)
            if event is Event.EVICT:
                self._host_policy.evicted(node)
        parent = node.parent
        if parent is not None and (old is Host.NONE) != (new is Host.NONE):
            parent.host_children += 1 if old is Host.NONE else -1
            self._offer(parent)
        self._settle(node)

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
        if new is Disk.STORED:
            self._shelve(node, nbytes)
        elif old is Disk.STORED:
            self._unshelve(node)
            if event is Event.EVICT:
                self._disk_policy.evicted(node)
        parent = node.parent
        if parent is not None and (old is Disk.NONE) != (new is Disk.NONE):
            parent.disk_children += 1 if old is Disk.NONE else -1
            self._offer(parent)
        self._settle(node)

    def host_victim(self) -> Node | None:
        """Return the chunk to evict from DRAM next, or ``None``."""
        return self._host_queue.peek()

    def disk_victim(self, tenant: bytes | None = None) -> Node | None:
        """Return the chunk to evict from SSD next, or ``None``.

        Args:
            tenant: Whose chunk to take; ``None`` takes the lowest rank of all.
        """
        if tenant is not None:
            shelf = self._shelves.get(tenant)
            return shelf.queue.peek() if shelf is not None else None
        victims = [shelf.queue.peek() for shelf in self._shelves.values()]
        found = [node for node in victims if node is not None]
        if len(found) < 2:
            return found[0] if found else None
        return min(found, key=self._disk_policy.rank)

    def tenant_bytes(self, tenant: bytes) -> int:
        """Size of all files of a tenant whose chunk is ``STORED``."""
        shelf = self._shelves.get(tenant)
        return shelf.nbytes if shelf is not None else 0

    def audit(self) -> list[str]:
        """Recount everything from the nodes; return what does not fit."""
        problems = audit_links(self._nodes)
        stored = [node for node in self._nodes.values() if node.disk is Disk.STORED]
        if self.disk_bytes != sum(node.disk_bytes for node in stored):
            problems.append(f"tree: {self.disk_bytes} bytes on SSD do not add up")
        problems += audit_queue(self._host_queue, self._nodes.values(), host_evictable)
        for tenant in self._shelves.keys() | {node.tenant for node in stored}:
            theirs = [node for node in stored if node.tenant == tenant]
            shelf = self._shelves.get(tenant)
            if shelf is None or not theirs:
                problems.append(f"tenant {tenant!r}: {len(theirs)} chunks, no shelf")
                continue
            total = sum(node.disk_bytes for node in theirs)
            if (shelf.chunks, shelf.nbytes) != (len(theirs), total):
                problems.append(f"tenant {tenant!r}: does not hold {total} bytes")
            problems += audit_queue(shelf.queue, theirs, disk_evictable)
        for node in self._nodes.values():
            if node.reserved != self._reserved.get(node.key):
                problems.append(f"chunk {node.key.hex()[:12]}: wrong reservation")
            if node.key in self._ghosts:
                problems.append(f"chunk {node.key.hex()[:12]}: is alive and a ghost")
        if len(self._ghosts) > self._ghosts.capacity:
            problems.append(f"tree: remembers {len(self._ghosts)} chunks, too many")
        return problems

    # --- parts ---

    def _node(self, key: ChunkKey, tenant: bytes) -> Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, tenant)
            node.reserved = self._reserved.get(key)
            counts = self._ghosts.recall(key)
            if counts is not None:
                node.uses, node.cost_sum, node.misses = counts
        return node

    def _link(self, node: Node, parent: Node) -> None:
        node.parent = parent
        parent.children += 1
        parent.host_children += node.host is not Host.NONE
        parent.disk_children += node.disk is not Disk.NONE

    def _set_reserved(self, key: ChunkKey, position: int | None) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.reserved = position
            self._offer(node)

    def _shelve(self, node: Node, nbytes: int) -> None:
        shelf = self._shelves.get(node.tenant)
        if shelf is None:
            shelf = self._shelves[node.tenant] = _Shelf(self._disk_policy)
        node.disk_bytes = nbytes
        shelf.chunks += 1
        shelf.nbytes += nbytes
        self.disk_bytes += nbytes

    def _unshelve(self, node: Node) -> None:
        shelf = self._shelves[node.tenant]
        shelf.queue.discard(node)
        shelf.chunks -= 1
        shelf.nbytes -= node.disk_bytes
        self.disk_bytes -= node.disk_bytes
        node.disk_bytes = 0
        if shelf.chunks == 0:
            del self._shelves[node.tenant]

    def _settle(self, node: Node) -> None:
        """After a change: drop the node if it is bare, else offer it for eviction."""
        if is_bare(node):
            self._drop(node)
        else:
            self._offer(node)

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
        if host_evictable(node):
            self._host_queue.offer(node)
        if disk_evictable(node):
            self._shelves[node.tenant].queue.offer(node)


def _illegal(node: Node, state: enum.Enum, event: Event) -> str:
    return f"chunk {node.key.hex()}: {event.name} is not possible in state {state}"
