"""One chunk as the tree knows it: its place, its copies, its history. No behaviour.

The states of a copy and the one table of their transitions are here, because policies,
queues and the tree all speak of them.
"""

from __future__ import annotations

import enum
from typing import Final

from pcr_core.index.chunk import ChunkKey


class Host(enum.Enum):
    """State of a chunk's copy in DRAM. Only ``READY`` may be read or written back."""

    # Members are singletons; Enum's own hash is Python code, and every transition
    # would pay for it twice.
    __hash__ = object.__hash__

    NONE = "none"
    FILLING = "filling"
    READY = "ready"


class Disk(enum.Enum):
    """State of a chunk's copy on SSD."""

    __hash__ = object.__hash__

    NONE = "none"
    WRITING = "writing"
    STORED = "stored"


class Event(enum.Enum):
    """What happens to a copy.

    ``EVICT`` is a loss that makes room and is reported to the tier's policy; ``REMOVE``
    is any other loss of a complete copy (damaged, deleted by others, forgotten).
    """

    __hash__ = object.__hash__

    RESERVE = "reserve"
    FILL = "fill"
    RELEASE = "release"
    EVICT = "evict"
    FIND = "find"
    WRITE = "write"
    STORE = "store"
    DROP = "drop"
    REMOVE = "remove"


# Before Python 3.12 a look-up on an Enum class costs as much as ten of these.
HOST_NONE: Final = Host.NONE
HOST_READY: Final = Host.READY
DISK_NONE: Final = Disk.NONE
DISK_WRITING: Final = Disk.WRITING
DISK_STORED: Final = Disk.STORED

HOST_TRANSITIONS: dict[tuple[Host, Event], Host] = {
    (Host.NONE, Event.RESERVE): Host.FILLING,
    (Host.FILLING, Event.FILL): Host.READY,
    (Host.FILLING, Event.RELEASE): Host.NONE,
    (Host.READY, Event.EVICT): Host.NONE,
    (Host.READY, Event.REMOVE): Host.NONE,
}
DISK_TRANSITIONS: dict[tuple[Disk, Event], Disk] = {
    (Disk.NONE, Event.FIND): Disk.STORED,
    (Disk.NONE, Event.WRITE): Disk.WRITING,
    (Disk.WRITING, Event.STORE): Disk.STORED,
    (Disk.WRITING, Event.DROP): Disk.NONE,
    (Disk.STORED, Event.EVICT): Disk.NONE,
    (Disk.STORED, Event.REMOVE): Disk.NONE,
}


class IllegalTransitionError(RuntimeError):
    """A bug in this library: a chunk was asked to skip a state."""


class Node:
    """One chunk. Written by ``PrefixTree`` only; everybody else reads.

    Attributes:
        key: Its key.
        tenant: Whose it is; a path has one tenant.
        parent: The chunk before it, or ``None`` while that is unknown.
        host, disk: State of its copy in each tier.
        disk_bytes: Size of its file while ``disk`` is ``STORED``.
        pins: Leases that hold it.
        children: Nodes whose parent it is.
        host_children, disk_children: Those with a copy in DRAM, on SSD.
        last_used: Stamp of the last committed use.
        uses: Committed uses, remembered ones included.
        misses: How many of them found no copy and computed it.
        cost_sum: Seconds per computed token, summed over those misses.
        reserved: Queue position of the nearest waiting request that needs it, or
            ``None``.
    """

    __slots__ = (
        "children",
        "cost_sum",
        "disk",
        "disk_bytes",
        "disk_children",
        "host",
        "host_children",
        "key",
        "last_used",
        "misses",
        "parent",
        "pins",
        "reserved",
        "tenant",
        "uses",
    )

    def __init__(self, key: ChunkKey, tenant: bytes = b"") -> None:
        self.key = key
        self.tenant = tenant
        self.parent: Node | None = None
        self.host: Host = HOST_NONE
        self.disk: Disk = DISK_NONE
        self.disk_bytes = 0
        self.pins = 0
        self.children = 0
        self.host_children = 0
        self.disk_children = 0
        self.last_used = 0
        self.uses = 0
        self.misses = 0
        self.cost_sum = 0.0
        self.reserved: int | None = None


def host_evictable(node: Node) -> bool:
    """True for an unused DRAM leaf that no writer is reading."""
    return (
        node.pins == 0
        and node.host_children == 0
        and node.host is HOST_READY
        and node.disk is not DISK_WRITING
    )


def disk_evictable(node: Node) -> bool:
    """True for an unused SSD leaf."""
    return node.pins == 0 and node.disk_children == 0 and node.disk is DISK_STORED


def is_bare(node: Node) -> bool:
    """True for a node that nothing needs: no copy, no pin, no child."""
    return (
        node.pins == 0
        and node.children == 0
        and node.host is HOST_NONE
        and node.disk is DISK_NONE
    )
