"""DRAM -> SSD: which chunks are written, what makes room for them, what came of it.

Write-through and best effort: a chunk is queued as soon as it is complete, the queue is
bounded, and whatever cannot be written is dropped and counted. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from pcr_core.index.chunk import ChunkKey
from pcr_core.index.prefix_tree import Disk, Event, Host, Node, PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.chunk_file import ChunkFormat, ChunkId
from pcr_core.tiers.chunk_index import Record
from pcr_core.tiers.chunk_store import ChunkStore
from pcr_core.tiers.jobs import DeleteJob, Io, TouchJob, WriteJob, WriteOutcome

_TOUCH_BATCH = 512
"""Recency of this many chunks is kept back, at most, until a write carries it along."""


class TroubleLog:
    """Logs each kind of trouble once, so that a full disk does not fill the log too."""

    def __init__(self) -> None:
        self._log = logging.getLogger("pcr_core.tiers")
        self._seen: set[str] = set()

    def once(self, kind: str, message: str, error: BaseException | None = None) -> None:
        """Log ``message`` at warning level unless ``kind`` was logged before."""
        if kind not in self._seen:
            self._seen.add(kind)
            detail = f": {error}" if error is not None else ""
            self._log.warning("%s%s (further ones are only counted)", message, detail)


class WriteBack:
    """Keeps the SSD tier up to date with the DRAM tier, within the SSD budget.

    Args:
        tree: States; this class moves the disk states.
        store: The SSD tier.
        io: Runs the jobs.
        stats: Where outcomes are counted.
        trouble: Where failures are logged.
    """

    def __init__(
        self,
        tree: PrefixTree,
        store: ChunkStore,
        io: Io,
        stats: StoreCounters,
        trouble: TroubleLog,
    ) -> None:
        self._tree = tree
        self._store = store
        self._io = io
        self._stats = stats
        self._trouble = trouble
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

    def resync(self) -> None:
        """Bring the disk states in line with the index, after others changed it."""
        try:
            records = self._store.records()
        except OSError as error:
            self._trouble.once("index", "the cache index cannot be read", error)
            return
        for key, record in records.items():
            if not self._is_hidden(key):
                self._tree.add_stored(key, record.parent, record.size, record.stamp)
        for node in list(self._tree.nodes()):
            if node.disk is Disk.STORED and node.key not in records:
                self._tree.advance_disk(node, Event.REMOVE)

    # --- what is written and removed ---

    def store(
        self,
        path: list[Node],
        chunks: list[ChunkId],
        fmt: ChunkFormat,
        view: Callable[[Node], memoryview],
    ) -> None:
        """Queue every complete chunk of a path that is not on SSD, root first.

        Making room never evicts a chunk used more recently than the one to be
        written: a path longer than the budget keeps its head, whatever its length.
        """
        used = self._used_bytes(len(path) * fmt.file_nbytes)
        for node, chunk in zip(path, chunks, strict=True):
            if node.disk is Disk.STORED:
                self._touched[node.key] = node.last_used
            if node.host is not Host.READY or node.disk is not Disk.NONE:
                continue
            used -= self._make_room(node, used + fmt.file_nbytes)
            if used + fmt.file_nbytes > self._store.budget_bytes:
                self._stats.write_drops += 1
                continue
            used += fmt.file_nbytes
            self._tree.advance_disk(node, Event.WRITE)
            replace = node.key in self._unreadable
            job = WriteJob(fmt, chunk, view(node), node.last_used, replace=replace)
            self._writing[job] = node
            self._io.write(job)
        if len(self._touched) >= _TOUCH_BATCH:
            self.send_touches()

    def lost(self, node: Node, *, delete: bool) -> None:
        """A stored chunk could not be read: forget it.

        Args:
            node: The chunk.
            delete: Remove record and file too; False keeps them out of use until the
                chunk is written again, because the failure may have been the system's.
        """
        if node.disk is not Disk.STORED:
            return
        size = node.disk_bytes
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

    def apply(self, job: WriteJob | DeleteJob | TouchJob) -> None:
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

    def _make_room(self, node: Node, wanted: int) -> int:
        """Evict older leaves until ``wanted`` bytes fit; return the bytes freed."""
        freed = 0
        while wanted - freed > self._store.budget_bytes:
            victim = self._tree.disk_victim()
            if victim is None or victim.last_used >= node.last_used:
                break
            size = victim.disk_bytes
            self._tree.advance_disk(victim, Event.EVICT)
            self._stats.ssd_evictions += 1
            self._delete(victim.key, size)
            freed += size
        return freed

    def _delete(self, key: ChunkKey, size: int) -> None:
        job = DeleteJob([key])
        self._deleting[job] = size
        self._doomed.add(key)
        self._touched.pop(key, None)
        self._io.write(job)
