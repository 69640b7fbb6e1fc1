"""Room on SSD: how much there is, and what goes to make it.

The folder's own totals count, read when they are needed, so that the limits hold
whatever others write. What goes first is chosen among the chunks this process knows.
Engine thread only.
"""

from __future__ import annotations

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Event, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.catalogue import Catalogue
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.jobs import DeleteJob, Io
from pcr_core.tiers.store.chunk_file import ReadOutcome
from pcr_core.tiers.store.no_store import Store
from pcr_core.tiers.trouble import TroubleLog

_UNKNOWN_PART = 16
"""Others may hold one part in so many of a limit before all records are read again, so
that their chunks compete for room like ours. That costs as much as the folder is large,
and is paid once for every such part that they write."""


class SsdRoom:
    """Keeps the SSD tier within its budget, and this tenant within its quota.

    Args:
        tree: Says who goes next; this class moves the disk states of those who go.
        store: The SSD tier.
        io: Runs the removals.
        catalogue: What is there.
        size: Bytes of each file that is written here.
        stats: Where evictions are counted.
        trouble: Where failures are logged.
        log: Where departures are remembered.
    """

    def __init__(
        self,
        tree: PrefixTree,
        store: Store,
        io: Io,
        catalogue: Catalogue,
        size: int,
        *,
        stats: StoreCounters,
        trouble: TroubleLog,
        log: EvictionLog,
    ) -> None:
        self._tree = tree
        self._store = store
        self._io = io
        self._catalogue = catalogue
        self._size = size
        self._stats = stats
        self._trouble = trouble
        self._log = log
        self._deleting: dict[DeleteJob, tuple[int, bytes]] = {}
        self._coming = 0  # bytes of writes under way
        self._leaving = 0  # bytes of removals under way: all,
        self._own_leaving = 0  # this tenant's
        self._total = 0  # bytes once everything under way is done: all,
        self._own = 0  # this tenant's

    def measure(self, chunks: int) -> bool:
        """Read the totals. To be called before ``make``.

        Args:
            chunks: How many may be wanted.

        Returns:
            False if they cannot be read: then nothing should be written.
        """
        store, tree, wanted = self._store, self._tree, chunks * self._size
        quota = store.quota_bytes
        try:
            used = store.used_bytes()
            mine = store.tenant_bytes() if quota is not None else 0
        except OSError as error:
            self._refused(error)
            return False
        self._total = used + self._coming - self._leaving
        self._own = mine + self._coming - self._own_leaving
        # Writes may have been done that we have not heard of.
        ours = self._coming + len(self._catalogue.unreadable) * self._size
        unknown = used - ours - self._leaving - tree.disk_bytes
        crowded = _is_crowded(self._total + wanted, unknown, store.budget_bytes)
        if quota is not None:
            unknown = mine - ours - self._own_leaving - tree.tenant_bytes(store.tenant)
            crowded |= _is_crowded(self._own + wanted, unknown, quota)
        if crowded:
            self._catalogue.resync()
        return True

    def make(self, node: Node) -> bool:
        """Make room for a chunk, evicting others, and take it.

        Within the quota the tenant's own leaves go, within the budget anybody's, and
        none that was used after the chunk: a path longer than the budget keeps its
        head, whatever its length.

        Returns:
            False if there is not enough.
        """
        quota = self._store.quota_bytes
        while quota is not None and self._own + self._size > quota:
            if not self._evict_older(node, self._store.tenant, "quota"):
                return False
        while self._total + self._size > self._store.budget_bytes:
            if not self._evict_older(node, None, "ssd budget"):
                return False
        self._coming += self._size
        self._total += self._size
        self._own += self._size
        return True

    def settle(self) -> None:
        """A write for which room was made has ended, one way or the other."""
        self._coming -= self._size

    def delete(self, key: ChunkKey, size: int, tenant: bytes) -> None:
        """Remove a chunk, record and file."""
        job = DeleteJob([key])
        self._deleting[job] = size, tenant
        self._catalogue.leaving.add(key)
        self._leaving += size
        self._total -= size
        if tenant == self._store.tenant:
            self._own_leaving += size
            self._own -= size
        self._io.write(job)

    def apply(self, job: DeleteJob) -> None:
        """Take in a finished removal."""
        size, tenant = self._deleting.pop(job)
        self._catalogue.leaving.difference_update(job.keys)
        self._leaving -= size
        if tenant == self._store.tenant:
            self._own_leaving -= size

    def lost(self, node: Node, outcome: ReadOutcome) -> None:
        """A stored chunk could not be read: forget it, file and record too.

        If it was the system that refused, they stay, but are out of use until the chunk
        is written again or room is needed.
        """
        if node.disk is not Disk.STORED:
            return
        refused = outcome is ReadOutcome.FAILED
        size = node.disk_bytes
        self._log.note(node.key, "ssd", "unreadable" if refused else "damaged", by="")
        self._tree.advance_disk(node, Event.REMOVE)
        if refused:
            self._catalogue.unreadable[node.key] = None
        else:
            self.delete(node.key, size, node.tenant)

    def give_up(self, key: ChunkKey) -> None:
        """Remove a chunk that the system refused to read, if it is one."""
        if key in self._catalogue.unreadable:
            del self._catalogue.unreadable[key]
            self.delete(key, self._size, self._store.tenant)

    @property
    def exists(self) -> bool:
        """Whether there is an SSD tier at all."""
        return self._store.budget_bytes > 0

    def used_bytes(self) -> int:
        """Bytes of all chunk files; as far as known, if the index cannot be read."""
        try:
            return self._store.used_bytes()
        except OSError:
            return self._tree.disk_bytes

    def _evict_older(self, node: Node, tenant: bytes | None, reason: str) -> bool:
        """Evict one leaf that was used before ``node``; False if there is none.

        What cannot be read goes first: it is of no use to anybody here.
        """
        for key in self._catalogue.unreadable:
            self.give_up(key)
            return True
        while True:
            victim = self._tree.disk_victim(tenant)
            if victim is None or victim.last_used >= node.last_used:
                return False
            try:
                if self._catalogue.has(victim):
                    break  # otherwise another process has removed it, and has the room
            except OSError as error:
                self._refused(error)
                return False
        size = victim.disk_bytes
        self._log.note(victim.key, "ssd", reason)
        self._tree.advance_disk(victim, Event.EVICT)
        self._stats.ssd_evictions += 1
        self.delete(victim.key, size, victim.tenant)
        return True

    def _refused(self, error: OSError) -> None:
        self._trouble.once("index", "the cache index cannot be read", error)


def _is_crowded(wanted: int, unknown: int, limit: int) -> bool:
    """Whether room is short and too much of it has users that are not known here."""
    return wanted > limit and unknown > limit // _UNKNOWN_PART
