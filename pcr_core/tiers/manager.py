"""The tier manager: the only code that moves chunks between DRAM and SSD.

Engine thread only. Storage trouble shows as holes and counters, never as an exception
in the caller. The paper's decisions on edge cases are in PCR (arXiv 2603.23049) and in
``docs/storage-format.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pcr_core.errors import ConfigError
from pcr_core.index.chunk import ChunkKey, ChunkLayout, Namespace
from pcr_core.index.eviction import EvictionPolicy, Lru
from pcr_core.index.prefix_tree import Disk, Event, Host, Node, PrefixTree
from pcr_core.stats import CacheStats, StoreCounters
from pcr_core.tiers.audit import CheckReport, audit_memory
from pcr_core.tiers.chunk_file import ChunkFormat, ChunkId, ReadOutcome
from pcr_core.tiers.chunk_store import ChunkStore
from pcr_core.tiers.host_pool import HostPool, Slot
from pcr_core.tiers.io_pool import IoPool
from pcr_core.tiers.jobs import Io, ReadJob
from pcr_core.tiers.lease import Lease, PathChunk
from pcr_core.tiers.write_back import TroubleLog, WriteBack

_SMALL_QUEUE_BYTES = 64 * 2**20
_POPULATE_AHEAD = 64 * 2**20

ChunkState = Literal["none", "dram", "ssd"]


@dataclass(frozen=True, slots=True)
class _Read:
    """Where the bytes of a read go, and who waits for them."""

    node: Node
    slot: Slot
    index: int
    lease: Lease | None


class TierManager:
    """Makes chunks readable, keeps new ones, and keeps both budgets.

    Args:
        layout: Shape of a chunk.
        namespace: Whose chunks these are.
        pool: The DRAM tier.
        store: The SSD tier, or ``None`` to do without.
        io: Runs reads and writes on ``store``; ``None`` exactly when ``store`` is.
        policy: Ranks chunks for eviction in both tiers.
        stats: Counters to add to.
        clock: Nanoseconds, for recency that outlives the process.

    Raises:
        ConfigError: If the SSD budget holds no chunk.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        namespace: Namespace,
        pool: HostPool,
        store: ChunkStore | None,
        io: Io | None,
        *,
        policy: EvictionPolicy | None = None,
        stats: StoreCounters | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.stats = stats or StoreCounters()
        self._format = ChunkFormat(layout, namespace)
        self._root = namespace.root
        self._tokens = layout.chunk_tokens
        self._pool = pool
        self._store = store
        self._io = io
        self._clock = clock
        self._tree = PrefixTree(policy or Lru())
        self._slots: dict[ChunkKey, Slot] = {}
        self._reads: dict[ReadJob, _Read] = {}
        self._leases: set[Lease] = set()
        self._trouble = TroubleLog()
        self._writes: WriteBack | None = None
        self._closed = False
        if store is not None and io is not None:
            self._check_budget(store.budget_bytes)
            self._writes = WriteBack(self._tree, store, io, self.stats, self._trouble)
            self._writes.resync()

    @classmethod
    def open(
        cls,
        layout: ChunkLayout,
        namespace: Namespace,
        *,
        dram_bytes: int,
        cache_dir: Path,
        ssd_bytes: int,
        pin_memory: bool = False,
        policy: EvictionPolicy | None = None,
    ) -> TierManager:
        """Build both tiers with their threads; ``ssd_bytes=0`` leaves the SSD out.

        At most half of DRAM, or 64 MiB if that is more, may be waiting to be written,
        so that a slow disk cannot keep new chunks out.

        Raises:
            ConfigError: If a budget holds no chunk or the folder cannot be used.
            StoreError: If the folder is another version's or its index is broken.
        """
        pool = HostPool(layout, dram_bytes, pin_memory=pin_memory)
        if ssd_bytes == 0:
            return cls(layout, namespace, pool, None, None, policy=policy)
        store = ChunkStore(cache_dir, ssd_bytes)
        io = IoPool(store, max_write_bytes=max(pool.nbytes // 2, _SMALL_QUEUE_BYTES))
        try:
            return cls(layout, namespace, pool, store, io, policy=policy)
        except BaseException:
            io.close()
            store.close()
            raise

    def match(self, keys: Sequence[ChunkKey]) -> list[ChunkState]:
        """Say where each chunk could be read from now. Pure: nothing is re-ranked."""
        nodes = self._tree.match(keys)
        states = [_state(node) for node in nodes]
        if self._writes is not None:
            unknown = {key: i for i, key in enumerate(keys) if states[i] == "none"}
            for key in self._writes.find(unknown):
                states[unknown[key]] = "ssd"
        return states

    def lease(
        self, keys: Sequence[ChunkKey], tokens: Sequence[int], usable: int
    ) -> Lease:
        """Pin what is in DRAM, start reading what is on SSD, reserve room for the rest.

        Args:
            keys: Keys of every full chunk of the prompt, root first.
            tokens: The whole prompt.
            usable: How many leading chunks may be read rather than computed.

        Raises:
            ValueError: If the arguments do not fit each other.
        """
        if not 0 <= usable <= len(keys) or len(tokens) < len(keys) * self._tokens:
            raise ValueError(
                f"{len(keys)} chunks of {self._tokens} tokens with {usable} usable do "
                f"not fit a prompt of {len(tokens)} tokens"
            )
        self.poll()
        nodes = self._tree.grow(self._root, keys)
        self._tree.pin(nodes)
        lease = Lease(self, self._path(nodes, tokens), len(tokens))
        self._leases.add(lease)
        try:
            self._adopt(nodes)
            self._lend(lease, usable)
        except BaseException:
            lease.close()
            raise
        return lease

    def prepare(self) -> bool:
        """Do a little of what the next request would otherwise wait for.

        Returns:
            Whether there may be more to do.
        """
        return self._pool.populate_next(_POPULATE_AHEAD)

    def poll(self) -> None:
        """Take in finished I/O: publish what was read, free what was written."""
        if self._io is None or self._writes is None:
            return
        for job in self._io.poll():
            if isinstance(job, ReadJob):
                self._apply_read(job)
            else:
                self._writes.apply(job)
        self._writes.settle()

    def finish_reads(self, lease: Lease) -> None:
        """Wait for a lease's reads; see ``Lease.wait``."""
        if self._io is not None:
            self._io.wait(list(lease.reads.values()))
        self.poll()

    def release(self, lease: Lease) -> None:
        """End a lease; see ``Lease``."""
        self._leases.discard(lease)
        nodes = [chunk.node for chunk in lease.path]
        for job in lease.reads.values():
            read = self._reads[job]
            self._reads[job] = _Read(read.node, read.slot, read.index, None)
        self.poll()
        for index in lease.sinks:
            node = nodes[index]
            if index in lease.done:
                self._tree.advance_host(node, Event.FILL)
            else:
                self._free(node, Event.RELEASE)
        self._count(lease)
        self._tree.commit(nodes, self._clock())
        self._tree.unpin(nodes)
        if self._writes is not None and not self._closed:
            chunks = [chunk.id for chunk in lease.path]
            self._writes.store(nodes, chunks, self._format, self._view)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every queued write is durable or dropped.

        Args:
            timeout: Seconds; ``None`` waits as long as it takes.

        Returns:
            False if the timeout came first.
        """
        if self._io is None or self._writes is None:
            return True
        self._writes.send_touches()
        finished = self._io.flush(timeout)
        self.poll()
        return finished

    def check(self, *, fix: bool = False) -> CheckReport:
        """Audit memory, index and every byte of every file; reads the whole folder.

        Args:
            fix: Remove damaged chunks and stray files.

        Raises:
            StoreError: If the audit could not finish.
        """
        self.flush()
        held = sum(len(lease.path) for lease in self._leases)
        memory = audit_memory(self._tree, self._pool, self._slots, held)
        if self._store is None or self._writes is None:
            return CheckReport(memory=memory)
        problems = self._store.audit(fix=fix)
        if fix and problems:
            self._writes.resync()
        records = self._store.records()
        size = sum(record.size for record in records.values())
        return CheckReport(memory, problems, fix and bool(problems), len(records), size)

    def snapshot(self) -> CacheStats:
        """Return the counters together with how full the tiers are now."""
        self.poll()
        stats = self.stats
        ready = [node.key for node in self._tree.nodes() if node.host is Host.READY]
        stored = [n.disk_bytes for n in self._tree.nodes() if n.disk is Disk.STORED]
        stats.dram_chunks, stats.ssd_chunks = len(ready), len(stored)
        stats.dram_bytes = len(self._slots) * self._format.layout.nbytes
        stats.dram_budget = self._pool.nbytes
        stats.ssd_bytes = sum(stored)
        stats.ssd_budget = self._store.budget_bytes if self._store is not None else 0
        return stats.snapshot()

    def close(self, timeout: float = 10.0) -> None:
        """Finish writes for at most ``timeout`` seconds, drop the rest, end threads."""
        if self._closed:
            return
        if self._writes is not None:
            self._writes.send_touches()
        self._closed = True
        joined = True
        if self._io is not None:
            joined = self._io.close(timeout)
            self.poll()
        if self._store is not None and joined:
            # Closing the index under a thread that hangs in it would crash.
            self._store.close()
        self._slots = {}
        self._pool.close()

    # --- parts of a lease ---

    def _path(self, nodes: list[Node], tokens: Sequence[int]) -> list[PathChunk]:
        path = []
        parent = self._root
        for index, node in enumerate(nodes):
            span = tokens[index * self._tokens : (index + 1) * self._tokens]
            path.append(PathChunk(ChunkId(node.key, parent, span), node))
            parent = node.key
        return path

    def _adopt(self, nodes: list[Node]) -> None:
        """Learn of chunks that another engine or process has stored."""
        if self._writes is None:
            return
        bare = [n.key for n in nodes if n.host is Host.NONE and n.disk is Disk.NONE]
        for key, record in self._writes.find(bare).items():
            self._tree.add_stored(key, record.parent, record.size, record.stamp)

    def _lend(self, lease: Lease, usable: int) -> None:
        chunks = list(enumerate(lease.path))
        for index, chunk in chunks[:usable]:
            if chunk.node.host is Host.READY:
                lease.add_source(index, self._slots[chunk.node.key], "dram")
        for index, chunk in chunks[:usable]:
            if chunk.node.host is Host.NONE and chunk.node.disk is Disk.STORED:
                self._start_read(lease, index)
        for index, chunk in chunks:
            if chunk.node.host is Host.NONE:
                slot = self._reserve(chunk.node)
                if slot is None:
                    self.stats.bypassed_inserts += 1
                else:
                    lease.add_sink(index, slot)

    def _start_read(self, lease: Lease, index: int) -> None:
        chunk = lease.path[index]
        slot = self._reserve(chunk.node)
        if slot is None or self._io is None:
            return
        job = ReadJob(self._format, chunk.id, slot.view)
        self._reads[job] = _Read(chunk.node, slot, index, lease)
        lease.reads[index] = job
        self._io.read(job)

    def _apply_read(self, job: ReadJob) -> None:
        read = self._reads.pop(job)
        if read.lease is not None:
            del read.lease.reads[read.index]
        if job.outcome is ReadOutcome.OK:
            self._tree.advance_host(read.node, Event.FILL)
            self.stats.read += 1
            self.stats.read_bytes += self._format.file_nbytes
            if read.lease is not None:
                read.lease.add_source(read.index, read.slot, "ssd")
            return
        self._count_lost(job)
        if self._writes is not None:
            self._writes.lost(read.node, delete=job.outcome is not ReadOutcome.FAILED)
        if read.lease is not None:
            read.lease.add_sink(read.index, read.slot)
        else:
            self._free(read.node, Event.RELEASE)

    def _count_lost(self, job: ReadJob) -> None:
        name = job.chunk.key.hex()[:12]
        if job.outcome is ReadOutcome.CORRUPT:
            self.stats.corrupt += 1
            self._trouble.once("corrupt", f"chunk {name} is damaged and was removed")
        elif job.outcome is ReadOutcome.MISSING:
            self.stats.missing += 1
            self._trouble.once("missing", f"the file of chunk {name} is gone")
        else:
            self.stats.read_errors += 1
            self._trouble.once("read", f"chunk {name} cannot be read", job.error)

    def _count(self, lease: Lease) -> None:
        stats = self.stats
        found = list(lease.tiers.values())
        dram, ssd = found.count("dram"), found.count("ssd")
        stats.requests += 1
        stats.dram_hit_tokens += dram * self._tokens
        stats.ssd_hit_tokens += ssd * self._tokens
        stats.miss_tokens += lease.prompt_tokens - len(found) * self._tokens
        if found:
            stats.holes += max(lease.tiers) + 1 - len(found)

    # --- slots ---

    def _reserve(self, node: Node) -> Slot | None:
        """Get a slot for a chunk, evicting another if need be; ``None`` if none can."""
        slot = self._pool.allocate()
        if slot is None:
            victim = self._tree.host_victim()
            if victim is None:
                return None
            self._free(victim, Event.EVICT)
            self.stats.dram_evictions += 1
            slot = self._pool.allocate()
        if slot is not None:
            self._slots[node.key] = slot
            self._tree.advance_host(node, Event.RESERVE)
        return slot

    def _free(self, node: Node, event: Event) -> None:
        self._pool.free(self._slots.pop(node.key))
        self._tree.advance_host(node, event)

    def _view(self, node: Node) -> memoryview:
        return self._slots[node.key].view

    def _check_budget(self, budget: int) -> None:
        needed = self._format.file_nbytes
        if budget < needed:
            raise ConfigError(
                f"ssd_bytes is {budget} bytes but one chunk file of this model takes "
                f"{needed}; set ssd_bytes to at least {needed}, or to 0 to do without "
                "the SSD tier"
            )


def _state(node: Node | None) -> ChunkState:
    if node is None:
        return "none"
    if node.host is Host.READY:
        return "dram"
    return "ssd" if node.disk is Disk.STORED else "none"
