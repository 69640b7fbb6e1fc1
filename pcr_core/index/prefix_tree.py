"""The prefix tree: which chunks exist, in which tier, and who is using them.

Nodes are found by key and know their parent; a tier's copy is a small state with one
transition table. The tree holds no bytes and does no I/O. Engine thread only.

Holes are legal: a chunk's KV depends on the tokens before it, not on whether their KV
is stored, so ``match`` reports every key and does not stop at the first missing one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.eviction import EvictionPolicy, VictimQueue


class Host(enum.Enum):
    """State of a chunk's copy in DRAM. Only ``READY`` may be read or written back."""

    NONE = "none"
    FILLING = "filling"
    READY = "ready"


class Disk(enum.Enum):
    """State of a chunk's copy on SSD."""

    NONE = "none"
    WRITING = "writing"
    STORED = "stored"


class Event(enum.Enum):
    """What happens to a copy."""

    RESERVE = "reserve"
    FILL = "fill"
    RELEASE = "release"
    EVICT = "evict"
    FIND = "find"
    WRITE = "write"
    STORE = "store"
    DROP = "drop"
    REMOVE = "remove"


HOST_TRANSITIONS: dict[tuple[Host, Event], Host] = {
    (Host.NONE, Event.RESERVE): Host.FILLING,
    (Host.FILLING, Event.FILL): Host.READY,
    (Host.FILLING, Event.RELEASE): Host.NONE,
    (Host.READY, Event.EVICT): Host.NONE,
}
DISK_TRANSITIONS: dict[tuple[Disk, Event], Disk] = {
    (Disk.NONE, Event.FIND): Disk.STORED,
    (Disk.NONE, Event.WRITE): Disk.WRITING,
    (Disk.WRITING, Event.STORE): Disk.STORED,
    (Disk.WRITING, Event.DROP): Disk.NONE,
    (Disk.STORED, Event.REMOVE): Disk.NONE,
}


class IllegalTransitionError(RuntimeError):
    """A bug in this library: a chunk was asked to skip a state."""


class Node:
    """One chunk. Written by ``PrefixTree`` only; everybody else reads.

    Attributes:
        key: Its key.
        parent: The chunk before it, or ``None`` while that is unknown.
        host, disk: State of its copy in each tier.
        disk_bytes: Size of its file while ``disk`` is ``STORED``.
        pins: Leases that hold it.
        last_used: Stamp of the last committed use.
        children: Nodes whose parent it is; those with a copy in DRAM, on SSD.
    """

    __slots__ = (
        "children",
        "disk",
        "disk_bytes",
        "disk_children",
        "host",
        "host_children",
        "key",
        "last_used",
        "parent",
        "pins",
    )

    def __init__(self, key: ChunkKey) -> None:
        self.key = key
        self.parent: Node | None = None
        self.host = Host.NONE
        self.disk = Disk.NONE
        self.disk_bytes = 0
        self.pins = 0
        self.last_used = 0
        self.children = 0
        self.host_children = 0
        self.disk_children = 0


def host_evictable(node: Node) -> bool:
    """True for an unused DRAM leaf that no writer is reading."""
    return (
        node.host is Host.READY
        and node.pins == 0
        and node.host_children == 0
        and node.disk is not Disk.WRITING
    )


def disk_evictable(node: Node) -> bool:
    """True for an unused SSD leaf."""
    return node.disk is Disk.STORED and node.pins == 0 and node.disk_children == 0


class PrefixTree:
    """Nodes by key, with residency per tier, pins and recency. Engine thread only.

    A node without copy, pin and children is dropped at once, so memory is bounded by
    what the tiers hold.

    Args:
        policy: Ranks nodes for eviction in both tiers.

    Attributes:
        disk_bytes: Size of all files whose chunk is ``STORED``.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.disk_bytes = 0
        self._nodes: dict[ChunkKey, Node] = {}
        self._host_queue: VictimQueue[Node] = VictimQueue(policy, host_evictable)
        self._disk_queue: VictimQueue[Node] = VictimQueue(policy, disk_evictable)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> Iterable[Node]:
        """Every node, in no particular order."""
        return self._nodes.values()

    def match(self, keys: Sequence[ChunkKey]) -> list[Node | None]:
        """Return what is known of each key. Pure: no recency, no counter changes."""
        return [self._nodes.get(key) for key in keys]

    def grow(self, root: bytes, keys: Sequence[ChunkKey]) -> list[Node]:
        """Return the nodes of a path, adding those that are unknown.

        Pin them before the next call that changes the tree: a new node has no copy yet
        and goes away with the first clean-up that meets it.

        Args:
            root: Digest of the namespace, the parent of the first key.
            keys: Chunk keys, root first.
        """
        if not keys:
            return []
        parent = self._node(ChunkKey(root))
        path = []
        for key in keys:
            node = self._node(key)
            if node.parent is None:
                self._link(node, parent)
            path.append(node)
            parent = node
        return path

    def add_stored(self, key: ChunkKey, parent: bytes, nbytes: int, stamp: int) -> None:
        """Learn of a chunk found on SSD; one already known there is left alone."""
        node = self._node(key)
        if node.disk is not Disk.NONE:
            return
        if node.parent is None:
            self._link(node, self._node(ChunkKey(parent)))
        node.last_used = max(node.last_used, stamp)
        self._clock = max(self._clock, stamp)
        self.advance_disk(node, Event.FIND, nbytes)

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

    def commit(self, path: Sequence[Node], now: int) -> None:
        """Record one use of a path, leaf to root, so that parents are newest.

        Args:
            path: Its nodes, root first.
            now: Wall clock in nanoseconds; stamps never run backwards.
        """
        stamp = max(self._clock, now)
        for node in reversed(path):
            stamp += 1
            node.last_used = stamp
        self._clock = stamp

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
        self.disk_bytes -= node.disk_bytes
        node.disk_bytes = nbytes if new is Disk.STORED else 0
        self.disk_bytes += node.disk_bytes
        parent = node.parent
        if parent is not None and (old is Disk.NONE) != (new is Disk.NONE):
            parent.disk_children += 1 if old is Disk.NONE else -1
            self._offer(parent)
        self._settle(node)

    def host_victim(self) -> Node | None:
        """Return the chunk to evict from DRAM next, or ``None``."""
        return self._host_queue.peek()

    def disk_victim(self) -> Node | None:
        """Return the chunk to evict from SSD next, or ``None``."""
        return self._disk_queue.peek()

    def audit(self) -> list[str]:
        """Recount everything from the parent links; return what does not fit."""
        problems = []
        counts: dict[Node, list[int]] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                count = counts.setdefault(node.parent, [0, 0, 0])
                count[0] += 1
                count[1] += node.host is not Host.NONE
                count[2] += node.disk is not Disk.NONE
        for node in self._nodes.values():
            found = counts.pop(node, [0, 0, 0])
            kept = [node.children, node.host_children, node.disk_children]
            name = node.key.hex()[:12]
            if found != kept:
                problems.append(f"chunk {name}: has children {found}, counted {kept}")
            if _bare(node):
                problems.append(f"chunk {name}: is bare but was not dropped")
            if node.disk is Disk.WRITING and node.host is not Host.READY:
                problems.append(f"chunk {name}: is being written without a DRAM copy")
        problems += [f"chunk {node.key.hex()[:12]}: dropped parent" for node in counts]
        if self.disk_bytes != sum(node.disk_bytes for node in self._nodes.values()):
            problems.append(f"tree: {self.disk_bytes} bytes on SSD do not add up")
        return problems

    def _node(self, key: ChunkKey) -> Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key)
        return node

    def _link(self, node: Node, parent: Node) -> None:
        node.parent = parent
        parent.children += 1
        parent.host_children += node.host is not Host.NONE
        parent.disk_children += node.disk is not Disk.NONE

    def _settle(self, node: Node) -> None:
        """After a change: drop the node if it is bare, else offer it for eviction."""
        if not _bare(node):
            self._offer(node)
            return
        bare: Node | None = node
        while bare is not None and _bare(bare):
            if self._nodes.get(bare.key) is bare:
                del self._nodes[bare.key]
            above, bare.parent = bare.parent, None
            if above is not None:
                above.children -= 1
            bare = above

    def _offer(self, node: Node) -> None:
        if host_evictable(node):
            self._host_queue.offer(node)
        if disk_evictable(node):
            self._disk_queue.offer(node)


def _bare(node: Node) -> bool:
    return (
        node.host is Host.NONE
        and node.disk is Disk.NONE
        and node.pins == 0
        and node.children == 0
    )


def _illegal(node: Node, state: enum.Enum, event: Event) -> str:
    return f"chunk {node.key.hex()}: {event.name} is not possible in state {state}"
