"""Audit of the tiers in memory, and the report ``check`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.prefix_tree import Host, PrefixTree
from pcr_core.tiers.host_pool import HostPool, Slot


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What an audit found.

    Attributes:
        memory: Broken invariants of pool and tree: bugs in this library.
        store: Damage to files or index.
        fixed: Whether the damage to the store was removed.
        ssd_chunks: Chunks on SSD afterwards.
        ssd_bytes: Bytes of their files afterwards.
    """

    memory: list[str] = field(default_factory=list)
    store: list[str] = field(default_factory=list)
    fixed: bool = False
    ssd_chunks: int = 0
    ssd_bytes: int = 0

    @property
    def ok(self) -> bool:
        """True when nothing was wrong."""
        return not self.memory and not self.store

    def __str__(self) -> str:
        head = f"{self.ssd_chunks} chunks, {self.ssd_bytes} bytes on SSD: "
        if self.ok:
            return head + "no problem found"
        fate = "removed" if self.fixed else "not changed; check(fix=True) removes them"
        lines = [f"  memory: {text}" for text in self.memory]
        lines += [f"  store: {text} ({fate})" for text in self.store]
        return "\n".join([head + f"{len(lines)} problems", *lines])


def audit_memory(
    tree: PrefixTree, pool: HostPool, slots: Mapping[ChunkKey, Slot], pinned: int
) -> list[str]:
    """Compare tree, pool and slots with each other.

    Args:
        tree: Says which chunks have a DRAM copy.
        pool: Says how many slots are in use.
        slots: The slots in use, by chunk.
        pinned: Pins that open leases account for.

    Returns:
        One line per broken invariant.
    """
    problems = tree.audit()
    in_use = {node.key for node in tree.nodes() if node.host is not Host.NONE}
    if pool.free_count + len(in_use) != pool.capacity:
        problems.append(
            f"pool: {pool.free_count} free + {len(in_use)} filling or ready is not "
            f"{pool.capacity}"
        )
    if in_use != set(slots):
        problems.append("pool: slots and DRAM states do not belong together")
    if len({slot.index for slot in slots.values()}) != len(slots):
        problems.append("pool: two chunks share a slot")
    pins = sum(node.pins for node in tree.nodes())
    if pins != pinned:
        problems.append(f"tree: {pins} pins, but open leases hold {pinned}")
    return problems
