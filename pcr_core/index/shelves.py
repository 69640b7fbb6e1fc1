"""The SSD tier by tenant: how much each has there, and what would go first."""

from __future__ import annotations

from collections.abc import Iterable

from pcr_core.index.audit import audit_queue
from pcr_core.index.node import Disk, Node, disk_evictable
from pcr_core.index.policies import EvictionPolicy
from pcr_core.index.victim_queue import VictimQueue


class _Shelf:
    """What one tenant has on SSD."""

    __slots__ = ("chunks", "nbytes", "queue")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.chunks = 0
        self.nbytes = 0
        self.queue = VictimQueue(policy, disk_evictable)


class Shelves:
    """Accounts for stored chunks and queues them for eviction, tenant by tenant.

    Engine thread only.

    Args:
        policy: Ranks the chunks of all tenants.

    Attributes:
        nbytes: Size of all files.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.nbytes = 0
        self._policy = policy
        self._shelves: dict[bytes, _Shelf] = {}

    def add(self, node: Node) -> None:
        """Count a chunk that is now stored."""
        shelf = self._shelves.get(node.tenant)
        if shelf is None:
            shelf = self._shelves[node.tenant] = _Shelf(self._policy)
        shelf.chunks += 1
        shelf.nbytes += node.disk_bytes
        self.nbytes += node.disk_bytes

    def remove(self, node: Node) -> None:
        """Take off a chunk that is stored no longer."""
        shelf = self._shelves[node.tenant]
        shelf.queue.discard(node)
        shelf.chunks -= 1
        shelf.nbytes -= node.disk_bytes
        self.nbytes -= node.disk_bytes
        if shelf.chunks == 0:
            del self._shelves[node.tenant]

    def offer(self, node: Node) -> None:
        """Make a stored chunk a candidate for eviction."""
        self._shelves[node.tenant].queue.offer(node)

    @property
    def chunks(self) -> int:
        """Stored chunks of all tenants."""
        return sum(shelf.chunks for shelf in self._shelves.values())

    def tenant_bytes(self, tenant: bytes) -> int:
        """Size of one tenant's files."""
        shelf = self._shelves.get(tenant)
        return shelf.nbytes if shelf is not None else 0

    def victim(self, tenant: bytes | None) -> Node | None:
        """Return the chunk that goes next, of one tenant or (``None``) of all."""
        if tenant is not None:
            shelf = self._shelves.get(tenant)
            return shelf.queue.peek() if shelf is not None else None
        # Tenants are few; a queue over all of them would double the memory.
        victims = (shelf.queue.peek() for shelf in self._shelves.values())
        found = [node for node in victims if node is not None]
        if len(found) < 2:
            return found[0] if found else None
        return min(found, key=self._policy.rank)

    def audit(self, nodes: Iterable[Node]) -> list[str]:
        """Compare with the states of all nodes; return what does not fit."""
        problems = []
        theirs: dict[bytes, list[Node]] = {tenant: [] for tenant in self._shelves}
        for node in nodes:
            if node.disk is Disk.STORED:
                theirs.setdefault(node.tenant, []).append(node)
        for tenant, stored in theirs.items():
            shelf = self._shelves.get(tenant) or _Shelf(self._policy)
            counted = (shelf.chunks, shelf.nbytes)
            found = (len(stored), sum(node.disk_bytes for node in stored))
            if counted != found or not stored:
                problems.append(
                    f"tenant {tenant.hex()[:12]}: has (chunks, bytes) {found} on SSD, "
                    f"counted {counted}"
                )
            problems += audit_queue(shelf.queue, stored, disk_evictable)
        if self.nbytes != sum(shelf.nbytes for shelf in self._shelves.values()):
            problems.append(f"tree: {self.nbytes} bytes on SSD do not add up")
        return problems
