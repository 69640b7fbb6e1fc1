"""The tier manager: the only code that moves chunks between DRAM and SSD.

It owns the states and puts the parts together: ``DramTier`` (slots), ``ReadIn`` (SSD to
DRAM), ``Prefetcher`` (the same, ahead of time), ``Loading`` (what a request reads and
what it computes), ``WriteBack`` (DRAM to SSD). Engine thread only, where nothing else
is said. Storage trouble shows as holes and counters, never as an exception in the
caller. The edge cases are those of PCR (arXiv 2603.23049) and of
``docs/storage-format.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pcr_core.cost import PrefillTimes
from pcr_core.index.chunk import ChunkKey, ChunkLayout, Namespace, chunk_keys
from pcr_core.index.look_ahead import window_size
from pcr_core.index.node import Disk, Event, Host, Node
from pcr_core.memory import collector_paused
from pcr_core.stats import CacheStats, Decisions, StoreCounters
from pcr_core.tiers.assembly import Shared, assemble
from pcr_core.tiers.audit import CheckReport, audit_memory
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.forgetting import Removed
from pcr_core.tiers.host_pool import HostPool
from pcr_core.tiers.io_pool import InlineIo, IoPool
from pcr_core.tiers.jobs import ForgetJob, Io, ReadJob
from pcr_core.tiers.lease import Lease, PathChunk
from pcr_core.tiers.prefetch import Hints, Wanted
from pcr_core.tiers.settings import TierSettings
from pcr_core.tiers.store.chunk_file import ChunkFormat
from pcr_core.tiers.store.chunk_store import ChunkStore
from pcr_core.tiers.store.no_store import NoStore, Store

_SMALL_QUEUE_BYTES = 64 * 2**20
_POPULATE_AHEAD = 64 * 2**20

ChunkState = Literal["none", "dram", "ssd"]


class TierManager:
    """Makes chunks readable, keeps new ones, and keeps both budgets.

    Args:
        layout: Shape of a chunk.
        namespace: Whose chunks these are.
        pool: The DRAM tier.
        store: The SSD tier; ``NoStore`` to do without.
        io: Runs reads and writes on ``store``.
        settings: Policies.
        clock: Nanoseconds, for recency that outlives the process.
        timer: Seconds, for how long a request waits.

    Attributes:
        stats: The counters.
        prefill_times: How long computing takes; whoever computes tells it.
        departures: Why chunks are gone.
        chunk_tokens: Tokens per chunk.
        version: Changes whenever chunks may have come or gone.

    Raises:
        ConfigError: If the SSD budget holds no chunk.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        namespace: Namespace,
        pool: HostPool,
        store: Store,
        io: Io,
        settings: TierSettings | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or TierSettings()
        self.stats = StoreCounters()
        self.prefill_times = PrefillTimes()
        self.departures = EvictionLog()
        self.version = 0
        self.chunk_tokens = layout.chunk_tokens
        self._namespace = namespace
        self._root = namespace.root
        self._settings = settings
        self._pool = pool
        self._store = store
        self._io = io
        self._clock = clock
        self._leases: set[Lease] = set()
        self._hints = Hints()
        self._closed = False
        self._mean_chunks = 0.0
        parts = assemble(
            ChunkFormat(layout, namespace),
            pool,
            store,
            io,
            settings,
            Shared(self.stats, self.departures, self.prefill_times, self.poll, timer),
        )
        self._format = parts.format
        self._tree = parts.tree
        self._adaptive = parts.adaptive
        self._dram = parts.dram
        self._catalogue = parts.catalogue
        self._room = parts.room
        self._writes = parts.writes
        self._reads = parts.reads
        self._loading = parts.loading
        self._prefetcher = parts.prefetcher
        self._forgetting = parts.forgetting
        with collector_paused():
            self._catalogue.resync()

    @classmethod
    def open(
        cls,
        layout: ChunkLayout,
        namespace: Namespace,
        settings: TierSettings | None = None,
        *,
        dram_bytes: int,
        cache_dir: Path,
        ssd_bytes: int,
        pin_memory: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> TierManager:
        """Build both tiers with their threads; ``ssd_bytes=0`` leaves the SSD out.

        At most half of DRAM, or 64 MiB if that is more, may be waiting to be written,
        so that a slow disk cannot keep new chunks out.

        Args:
            layout: As for the class.
            namespace: As for the class.
            settings: As for the class.
            dram_bytes: Hard budget of the DRAM tier.
            cache_dir: Folder of the store.
            ssd_bytes: Hard budget of the SSD tier.
            pin_memory: Page-lock the DRAM tier.
            on_progress: Called on other threads when there is something to ``poll``.

        Raises:
            ConfigError: If a budget holds no chunk or the folder cannot be used.
            StoreError: If the folder is another version's or its index is broken.
        """
        settings = settings or TierSettings()
        pool = HostPool(layout, dram_bytes, pin_memory=pin_memory)
        if ssd_bytes == 0:
            nothing = NoStore()
            return cls(layout, namespace, pool, nothing, InlineIo(nothing), settings)
        store = ChunkStore(
            cache_dir,
            ssd_bytes,
            tenant=settings.tenant,
            quota_bytes=settings.quota_bytes,
        )
        io = IoPool(
            store,
            max_write_bytes=max(pool.nbytes // 2, _SMALL_QUEUE_BYTES),
            on_progress=on_progress,
        )
        try:
            return cls(layout, namespace, pool, store, io, settings)
        except BaseException:
            io.close()
            store.close()
            raise

    # --- requests ---

    def keys_of(self, tokens: Sequence[int]) -> list[ChunkKey]:
        """Keys of every full chunk of a prompt."""
        return chunk_keys(self._namespace, tokens, self.chunk_tokens)

    def match(self, keys: Sequence[ChunkKey]) -> list[ChunkState]:
        """Say where each chunk could be read from now. Pure: nothing is re-ranked."""
        states = [_state(node) for node in self._tree.match(keys)]
        unknown = {key: i for i, key in enumerate(keys) if states[i] == "none"}
        for key in self._catalogue.find(unknown):
            states[unknown[key]] = "ssd"
        return states

    @property
    def dram_chunks(self) -> int:
        """Chunks that DRAM holds: a request's new ones all pass through it at once."""
        return self._pool.capacity

    def lease(
        self, keys: Sequence[ChunkKey], tokens: Sequence[int], usable: int
    ) -> Lease:
        """Pin what is in DRAM, start reading what is on SSD, reserve room for the rest.

        Call ``catch_up`` and ``register`` before, in this order: a request belongs to
        the epoch in which its documents were registered.

        Args:
            keys: Keys of every full chunk of the prompt, root first.
            tokens: The whole prompt.
            usable: How many leading chunks may be read rather than computed.

        Raises:
            ValueError: If the arguments do not fit each other.
        """
        if not 0 <= usable <= len(keys) or len(tokens) < len(keys) * self.chunk_tokens:
            raise ValueError(
                f"{len(keys)} chunks of {self.chunk_tokens} tokens with {usable} "
                f"usable do not fit a prompt of {len(tokens)} tokens"
            )
        self.poll()
        self._note_size(len(keys))
        self.departures.cause = f"request {self.stats.requests + len(self._leases) + 1}"
        nodes = self._tree.grow(self._root, keys, self._settings.tenant)
        self._tree.pin(nodes)
        path = [
            PathChunk(self._format.chunk(keys, tokens, index), node)
            for index, node in enumerate(nodes)
        ]
        lease = Lease(self, path, keys, len(tokens))
        self._leases.add(lease)
        try:
            self._catalogue.adopt(keys)
            self._loading.lend(lease, usable)
        except BaseException:
            lease.close()
            raise
        return lease

    def settle(self, lease: Lease, index: int) -> None:
        """Decide what becomes of a chunk being read; see ``Lease.settle``."""
        self._loading.settle(lease, index)

    def release(self, lease: Lease) -> None:
        """End a lease; see ``Lease``."""
        self._leases.discard(lease)
        if self._closed:  # its slots have gone already
            lease.readings.clear()
            return
        self._loading.leave(lease)
        self.poll()
        nodes = [chunk.node for chunk in lease.path]
        for index in lease.sinks:
            if index in lease.done:
                self._tree.advance_host(nodes[index], Event.FILL)
            else:
                self._dram.free(nodes[index], Event.RELEASE)
        self._count(lease)
        self._commit(lease, nodes)
        self._tree.unpin(nodes)
        doomed = self._forgetting.is_doomed
        kept = [(c.node, c.id) for c in lease.path if not doomed(c.node)]
        self._writes.used(kept, lease.keys)
        self._forgetting.sweep()
        self.version += 1

    # --- the queue ---

    @property
    def window(self) -> int:
        """How many waiting requests are looked at: set, or derived from the budget."""
        if self._settings.window is not None:
            return self._settings.window
        return window_size(self._pool.capacity, self._mean_chunks)

    def look_ahead(self, queue: Sequence[Wanted]) -> None:
        """Protect and fetch what waiting requests need, and what was hinted at.

        Args:
            queue: The next ``window`` requests, nearest first.
        """
        window = [*queue, *self._hints]
        if self._adaptive is not None:
            self._adaptive.look_ahead([want.keys[: want.usable] for want in window])
        with self.departures.on_account_of("reading ahead"):
            self._prefetcher.update(window)

    def hint(self, wanted: Wanted) -> None:
        """Fetch, and protect for a while, a prompt that may be asked soon."""
        self._hints.add(wanted)
        self.version += 1

    # --- documents ---

    @property
    def epoch(self) -> int:
        """Number of the last removal in the folder that memory has followed.

        Any thread.
        """
        return self._writes.epoch

    def forgotten_since(self, epoch: int) -> Removed | None:
        """What memory has been rid of since an earlier ``epoch``, if anything."""
        return self._forgetting.since(epoch)

    def register(self, heads: Mapping[bytes, ChunkKey]) -> None:
        """Remember where documents begin; see ``Forgetting.register``."""
        self._forgetting.register(heads)

    def heads_of(self, document: bytes) -> set[ChunkKey]:
        """Chunks at which a document begins; see ``Forgetting.heads_of``."""
        return self._forgetting.heads_of(document)

    def begin_forget(
        self, document: bytes, heads: Iterable[ChunkKey] = ()
    ) -> ForgetJob:
        """Have everything that contains or follows a document removed from the store.

        Args:
            document: Its digest.
            heads: First chunks that are not registered yet.
        """
        return self._forgetting.begin(document, heads)

    def wait_for(self, job: ForgetJob) -> None:
        """Block until a job has ended. Any thread."""
        self._io.wait([job])

    def end_forget(self, job: ForgetJob) -> Removed:
        """Drop from memory what a job is about, as far as that is known by now.

        To be called at once, so that nothing depends on who waits for the job, and
        again when it has ended.
        """
        self.poll()
        self.version += 1
        removed = self._forgetting.finish(job)
        self._hints.strike(removed.covers)
        return removed

    def catch_up(self) -> Removed | None:
        """Drop what any process has had forgotten since the last call, if anything."""
        removed = self._forgetting.catch_up()
        if removed is not None:
            self._hints.strike(removed.covers)
            self.version += 1
        return removed

    def sibling_tokens(self, keys: Sequence[ChunkKey], index: int) -> list[int]:
        """Token ids of a stored chunk that begins where chunk ``index`` would.

        For ``explain`` only: looks at every node. Empty if there is none.
        """
        parent = keys[index - 1] if index else self._root
        for node in self._tree.nodes():
            above = node.parent.key if node.parent is not None else None
            if above == parent and node.disk is Disk.STORED and node.key != keys[index]:
                return self._store.tokens_of(node.key)
        return []

    # --- between steps ---

    def prepare(self) -> bool:
        """Do a little of what the next request would otherwise wait for.

        Returns:
            Whether there may be more to do.
        """
        return self._pool.populate_next(_POPULATE_AHEAD)

    def poll(self) -> None:
        """Take in finished I/O: publish what was read, free what was written."""
        jobs = self._io.poll()
        for job in jobs:
            if isinstance(job, ReadJob):
                self._reads.apply(job)
            else:
                self._writes.apply(job)
        if jobs:
            self.version += 1
        self._forgetting.sweep()

    # --- the whole ---

    def flush(self, timeout: float | None = None) -> bool:
        """Write everything that is only in DRAM, and wait until it is durable.

        Args:
            timeout: Seconds; ``None`` waits as long as it takes.

        Returns:
            False if the timeout came first.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for batch in self.unsaved():
            self.save(batch)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.wait_for_writer(left):
                return False
        return True

    def unsaved(self) -> list[list[Node]]:
        """What ``flush`` writes, in batches that fit the write queue; never empty."""
        nodes = self._writes.unsaved()
        size = max(1, _SMALL_QUEUE_BYTES // self._format.file_nbytes // 2)
        return [nodes[at : at + size] for at in range(0, len(nodes), size)] or [[]]

    def save(self, batch: Sequence[Node]) -> None:
        """Queue a batch of ``unsaved``, and the recency seen so far."""
        self._writes.write(batch)
        self._writes.send_touches()

    def wait_for_writer(self, timeout: float | None = None) -> bool:
        """Block until the writer has nothing to do. Any thread.

        Returns:
            False if ``timeout`` seconds passed first.
        """
        return self._io.flush(timeout)

    def check(self, *, fix: bool = False) -> CheckReport:
        """Audit memory, index and every byte of every file; reads the whole folder.

        Args:
            fix: Remove damaged chunks and stray files.

        Raises:
            StoreError: If the audit could not finish.
        """
        self.flush()
        return self.report(self.check_memory(), self.check_store(fix=fix), fix=fix)

    def check_memory(self) -> list[str]:
        """Audit tree, slots and pins."""
        self.poll()
        held = sum(len(lease.path) for lease in self._leases)
        return audit_memory(self._tree, self._pool, self._dram.slots, held)

    def check_store(self, *, fix: bool) -> list[str]:
        """Audit index and files; see ``ChunkStore.audit``. Any thread."""
        return self._store.audit(fix=fix)

    def report(self, memory: list[str], store: list[str], *, fix: bool) -> CheckReport:
        """Put an audit together, after catching up with what it removed."""
        self.poll()
        fixed = fix and bool(store)
        if fixed:
            self._catalogue.resync()
        records = self._store.records()
        size = sum(record.size for record in records.values())
        return CheckReport(memory, store, fixed, len(records), size)

    def snapshot(self) -> CacheStats:
        """Return the counters together with how full the tiers are now."""
        self.poll()
        stats, tree = self.stats, self._tree
        stats.dram_chunks, stats.ssd_chunks = tree.host_ready, tree.disk_stored
        stats.dram_bytes = len(self._dram.slots) * self._format.layout.nbytes
        stats.dram_budget = self._pool.nbytes
        stats.ssd_bytes = self._room.used_bytes()
        stats.ssd_budget = self._store.budget_bytes
        stats.namespace_bytes = tree.tenant_bytes(self._settings.tenant)
        stats.namespace_budget = self._settings.quota_bytes or 0
        return stats.snapshot()

    def decisions(self, longest: int) -> Decisions:
        """What steers the tiers now.

        Args:
            longest: Tokens of the longest prompt there may be.
        """
        adaptive, prefill = self._adaptive, self.prefill_times
        rated = Decisions.RATED
        rate = rated / prefill.seconds(0, rated) if prefill.ready else 0.0
        return Decisions(
            eviction=adaptive.current if adaptive else self._settings.eviction,
            hit_rates=dict(adaptive.rates) if adaptive else {},
            lookahead_window=self.window,
            read_bandwidth=self._reads.times.bandwidth,
            prefill_rate=rate,
            crossover_tokens=self._loading.planner.crossover(longest),
        )

    def close(self, timeout: float = 10.0) -> None:
        """Finish writes for at most ``timeout`` seconds, drop the rest, end threads."""
        if self._closed:
            return
        started = time.monotonic()
        self.flush(timeout)
        self._closed = True
        joined = self._io.close(max(0.1, timeout - (time.monotonic() - started)))
        self.poll()
        if joined:
            # Closing the index under a thread that hangs in it would crash.
            self._store.close()
        self._dram.close()

    # --- inside ---

    def _note_size(self, chunks: int) -> None:
        """Keep the mean size of a request over the last dozen or so."""
        weight = 0.1 if self._mean_chunks else 1.0
        self._mean_chunks += weight * (chunks - self._mean_chunks)

    def _commit(self, lease: Lease, nodes: Sequence[Node]) -> None:
        """Count one use of the whole path, and what its missing part cost."""
        missed = [index for index in range(len(nodes)) if index not in lease.sources]
        cached = len(lease.sources) * self.chunk_tokens
        computed = lease.prompt_tokens - cached
        cost = self.prefill_times.seconds(cached, computed) / max(1, computed)
        self._tree.commit(nodes, self._clock(), missed=missed, cost=cost)
        if self._adaptive is not None:
            self._adaptive.observe(lease.keys, cost=cost)
        self._hints.used(lease.keys)

    def _count(self, lease: Lease) -> None:
        stats = self.stats
        found = list(lease.tiers.values())
        dram, ssd = found.count("dram"), found.count("ssd")
        stats.requests += 1
        stats.dram_hit_tokens += dram * self.chunk_tokens
        stats.ssd_hit_tokens += ssd * self.chunk_tokens
        stats.miss_tokens += lease.prompt_tokens - len(found) * self.chunk_tokens
        if found:
            stats.holes += max(lease.tiers) + 1 - len(found)


def _state(node: Node | None) -> ChunkState:
    if node is None:
        return "none"
    if node.host is Host.READY:
        return "dram"
    return "ssd" if node.disk is Disk.STORED else "none"
