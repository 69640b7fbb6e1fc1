"""DRAM -> SSD: which chunks are written, what makes room for them, what came of it.

Best effort: a policy says when a chunk is worth writing, the queue is bounded, and
whatever cannot be written is dropped and counted. Nothing here blocks. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.node import Disk, Event, Host, Node
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.chunk_file import ChunkFormat, ChunkId, ReadOutcome
from pcr_core.tiers.chunk_index import Record
from pcr_core.tiers.dram import DramTier
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.jobs import (
    DeleteJob,
    Io,
    TouchJob,
    WriteJob,
    WriteOutcome,
    WriterJob,
)
from pcr_core.tiers.no_store import Store
from pcr_core.tiers.trouble import TroubleLog
from pcr_core.tiers.write_policy import WritePolicy

_LEAVING = 16
"""Writes under way beyond which a chunk that leaves DRAM is dropped, not written."""
_TOUCH_BATCH = 512
"""Recency of this many chunks is kept back, at most, until a write carries it along."""


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What it takes to write a chunk that is only in DRAM.

    Attributes:
        chunk: Its identity.
        ancestors: Keys of the prompt it was computed for, root first.
    """

    chunk: ChunkId
    ancestors: Sequence[ChunkKey]


class WriteBack:
    """Keeps the SSD tier up to date with the DRAM tier, within the SSD budget.

    Args:
        tree: States; this class moves the disk states.
        dram: Where the bytes are.
        store: The SSD tier.
        io: Runs the jobs.
        fmt: What a chunk file looks like.
        policy: When a chunk is written.
        stats: Where outcomes are counted.
        trouble: Where failures are logged.
        log: Where departures are remembered.

    Attributes:
        epoch: The store's epoch that DRAM is up to date with; goes with every write, so
            that one which was queued before a ``forget`` is not carried out after it.
    """

    def __init__(
        self,
        tree: PrefixTree,
        dram: DramTier,
        store: Store,
        io: Io,
        fmt: ChunkFormat,
        policy: WritePolicy,
        *,
        stats: StoreCounters,
        trouble: TroubleLog,
        log: EvictionLog,
    ) -> None:
        self._tree = tree
        self._dram = dram
        self._store = store
        self._io = io
        self._format = fmt
        self._policy = policy
        self._stats = stats
        self._trouble = trouble
        self._log = log
        self.epoch = 0
        self._unsaved: dict[Node, Unsaved] = {}
        self._writing: dict[WriteJob, Node] = {}
        self._deleting: dict[DeleteJob, int] = {}
        self._doomed: set[ChunkKey] = set()
        self._unreadable: dict[ChunkKey, int] = {}
        self._touched: dict[ChunkKey, int] = {}
        self._must_resync = False

    # --- what is there ---

    def find(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Record]:
        """Look for chunks that another engine or process may have stored. Pure."""
        wanted = [key for key in keys if not self._is_hidden(key)]
        if not wanted:
            return {}
        try:
            return self._store.lookup(wanted)
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return {}

    def adopt(self, keys: Sequence[ChunkKey]) -> None:
        """Take in those chunks of a prompt that another engine or process has stored.

        Args:
            keys: Of its chunks, root first.
        """
        known = zip(keys, self._tree.match(keys), strict=True)
        unknown = [key for key, node in known if node is None or not _is_held(node)]
        found = self.find(unknown)
        parent = ChunkKey(self._format.namespace.root)
        for key in keys if found else ():
            record = found.pop(key, None)
            if record is not None:
                self._add(key, record)
            elif found:  # there is more behind it, which must be found through it
                self._tree.add_known(key, parent, self._store.tenant)
            parent = key

    def resync(self) -> None:
        """Bring the disk states in line with the index, after others changed it."""
        try:
            contents = self._store.contents()
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return
        for key, record in contents.bare.items():
            self._tree.add_known(key, record.parent, record.tenant)
        for key, record in contents.stored.items():
            if self._is_hidden(key):
                self._tree.add_known(key, record.parent, record.tenant)
            else:
                self._add(key, record)
        for node in list(self._tree.nodes()):
            if node.disk is Disk.STORED and node.key not in contents.stored:
                self._log.note(node.key, "ssd", "removed by another process", by="")
                self._tree.advance_disk(node, Event.REMOVE)
        self._tree.prune()

    def _add(self, key: ChunkKey, record: Record) -> None:
        self._tree.add_stored(
            key, record.parent, record.size, record.stamp, record.tenant
        )

    # --- what is written and removed ---

    def used(
        self, path: Iterable[tuple[Node, ChunkId]], keys: Sequence[ChunkKey]
    ) -> None:
        """A request has used a path: queue what the policy wants written, root first.

        Making room never evicts a chunk used more recently than the one to be
        written: a path longer than the budget keeps its head, whatever its length.

        Args:
            path: Its chunks, without those that must not be written.
            keys: Of all its chunks.
        """
        wanted = []
        for node, chunk in path:
            if node.disk is Disk.STORED:
                self._touched[node.key] = node.last_used
            elif node.host is Host.READY and node.disk is Disk.NONE:
                self._unsaved[node] = Unsaved(chunk, keys)
                if self._policy.when_used(node):
                    wanted.append(node)
        self.write(wanted)
        self._write_ahead()
        if len(self._touched) >= _TOUCH_BATCH:
            self.send_touches()

    def write(self, nodes: Sequence[Node]) -> None:
        """Queue chunks for writing, as far as they are unsaved and there is room."""
        nodes = [node for node in nodes if self._is_unsaved(node)]
        if not nodes:
            return
        size = self._format.file_nbytes
        used = self._used_bytes(len(nodes) * size)
        for node in nodes:
            if not self._is_unsaved(node):
                continue  # another process has stored it, as we have just learnt
            used -= self._make_room(node, used + size)
            if used + size > self._store.budget_bytes or self._over_quota(size):
                self._stats.write_drops += 1
                continue
            used += size
            self._queue(node)

    def disown(self, node: Node) -> None:
        """Never write a chunk that is only in DRAM: it was forgotten."""
        self._unsaved.pop(node, None)
        self._touched.pop(node.key, None)

    def save_leaving(self, victim: Node) -> bool:
        """Asked before a chunk leaves DRAM; see ``DramTier.save``."""
        if not self._is_unsaved(victim):
            self._unsaved.pop(victim, None)
            return False
        if self._policy.when_leaving(victim):
            if len(self._writing) < _LEAVING:
                self.write([victim])
                if victim.disk is Disk.WRITING:
                    return True
            else:
                self._stats.write_drops += 1
        self._unsaved.pop(victim, None)
        return False

    def unsaved(self) -> list[Node]:
        """Chunks that are complete in DRAM and not on SSD, oldest first."""
        return [node for node in self._unsaved if self._is_unsaved(node)]

    def _write_ahead(self) -> None:
        """Write the oldest chunks while a few others can still leave without it."""
        safe = self._dram.spare + self._tree.host_ready - len(self._unsaved)
        for node in list(self._unsaved):
            if safe >= _LEAVING or len(self._writing) >= _LEAVING:
                return
            if self._is_unsaved(node) and self._policy.when_leaving(node):
                self.write([node])
                safe += 1

    def _is_unsaved(self, node: Node) -> bool:
        return (
            node in self._unsaved and node.host is Host.READY and node.disk is Disk.NONE
        )

    def _queue(self, node: Node) -> None:
        unsaved = self._unsaved[node]
        self._tree.advance_disk(node, Event.WRITE)
        job = WriteJob(
            self._format,
            unsaved.chunk,
            self._dram.view(node),
            node.last_used,
            replace=node.key in self._unreadable,
            ancestors=unsaved.ancestors,
            epoch=self.epoch,
        )
        self._writing[job] = node
        self._io.write(job)

    def lost(self, node: Node, outcome: ReadOutcome) -> None:
        """A stored chunk could not be read: forget it, file and record too.

        If it was the system that refused, they stay, but are out of use until the chunk
        is written again.
        """
        delete = outcome is not ReadOutcome.FAILED
        if node.disk is not Disk.STORED:
            return
        size = node.disk_bytes
        self._log.note(node.key, "ssd", "damaged" if delete else "unreadable", by="")
        self._tree.advance_disk(node, Event.REMOVE)
        if delete:
            self._delete(node.key, size)
        else:
            self._unreadable[node.key] = size

    def send_touches(self) -> None:
        """Have the recency seen so far recorded in the index."""
        if self._touched:
            self._io.write(TouchJob(self._touched))
            self._touched = {}

    # --- what came of it ---

    def apply(self, job: WriterJob) -> None:
        """Take in a finished job of the writer."""
        if isinstance(job, WriteJob):
            self._apply_write(job)
            return
        if isinstance(job, DeleteJob):
            del self._deleting[job]
            self._doomed.difference_update(job.keys)
        if job.error is not None:
            self._trouble.once("index write", "the cache index refused", job.error)

    def settle(self) -> None:
        """After a round of ``apply``: catch up with other users of the folder."""
        if self._must_resync:
            self._must_resync = False
            self.resync()

    @property
    def idle(self) -> bool:
        """True when no write or removal is under way."""
        return not self._writing and not self._deleting

    def _apply_write(self, job: WriteJob) -> None:
        node = self._writing.pop(job)
        if job.outcome is WriteOutcome.STORED:
            self._tree.advance_disk(node, Event.STORE, job.nbytes)
            self._unsaved.pop(node, None)
            self._unreadable.pop(node.key, None)
            self._stats.written += 1
            self._stats.written_bytes += job.nbytes
            return
        self._tree.advance_disk(node, Event.DROP)
        if job.outcome is WriteOutcome.FAILED:
            self._stats.write_errors += 1
            kind = getattr(job.error, "errno", None) or type(job.error).__name__
            message = "a chunk could not be written"
            self._trouble.once(f"write {kind}", message, job.error)
            return
        if job.outcome is WriteOutcome.FORGOTTEN:
            self.disown(node)
            return
        self._stats.write_drops += 1
        self._must_resync |= job.outcome is WriteOutcome.NO_ROOM

    def _is_hidden(self, key: ChunkKey) -> bool:
        """Whether a record that exists must not be used."""
        return key in self._doomed or key in self._unreadable

    def _used_bytes(self, coming: int) -> int:
        """Bytes on SSD once everything queued is done.

        If room is short and the folder holds more than the tree knows of, others have
        written; their chunks are taken in, so that they compete for room like ours.

        Args:
            coming: Bytes that may be wanted next.
        """
        try:
            used = self._store.used_bytes()
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return self._store.budget_bytes
        leaving = sum(self._deleting.values())
        queued = sum(job.nbytes for job in self._writing)
        known = (
            self._tree.disk_bytes + leaving + queued + sum(self._unreadable.values())
        )
        if used > known and used + coming > self._store.budget_bytes:
            self.resync()
        return used + queued - leaving

    def _over_quota(self, coming: int) -> bool:
        """Whether this tenant would have more than its share."""
        quota = self._store.quota_bytes
        return quota is not None and self._tenant_bytes() + coming > quota

    def _tenant_bytes(self) -> int:
        """Bytes of this tenant on SSD once everything queued is done, as known here."""
        queued = sum(job.nbytes for job in self._writing)
        return self._tree.tenant_bytes(self._store.tenant) + queued

    def _make_room(self, node: Node, wanted: int) -> int:
        """Evict older leaves until ``wanted`` bytes fit; return the bytes freed.

        Within the quota the tenant's own leaves go, within the budget anybody's.
        """
        freed = 0
        size = self._format.file_nbytes
        while self._over_quota(size):
            gone = self._evict_older(node, self._store.tenant, "quota")
            if not gone:
                break
            freed += gone
        while wanted - freed > self._store.budget_bytes:
            gone = self._evict_older(node, None, "ssd budget")
            if not gone:
                break
            freed += gone
        return freed

    def _evict_older(self, node: Node, tenant: bytes | None, reason: str) -> int:
        """Evict one leaf that was used before ``node``; return its bytes, 0 if none."""
        victim = self._tree.disk_victim(tenant)
        if victim is None or victim.last_used >= node.last_used:
            return 0
        size = victim.disk_bytes
        self._log.note(victim.key, "ssd", reason)
        self._tree.advance_disk(victim, Event.EVICT)
        self._stats.ssd_evictions += 1
        self._delete(victim.key, size)
        return size

    def _delete(self, key: ChunkKey, size: int) -> None:
        job = DeleteJob([key])
        self._deleting[job] = size
        self._doomed.add(key)
        self._touched.pop(key, None)
        self._io.write(job)


def _is_held(node: Node) -> bool:
    """Whether a chunk has a copy in any state."""
    return node.host is not Host.NONE or node.disk is not Disk.NONE
