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
from functools import partial

from pcr_core.cost import PrefillTimes
from pcr_core.index.chunk import ChunkKey, ChunkLayout, Namespace, chunk_keys
from pcr_core.index.node import Event, Host
from pcr_core.memory import collector_paused
from pcr_core.stats import CacheStats, Decisions, StoreCounters
from pcr_core.tiers.assembly import Parts, Shared, assemble
from pcr_core.tiers.audit import CheckReport
from pcr_core.tiers.catalogue import ChunkState
from pcr_core.tiers.eviction_log import EvictionLog
from pcr_core.tiers.flushing import Caller, Flush, here
from pcr_core.tiers.forgetting import Removed
from pcr_core.tiers.host_pool import HostPool
from pcr_core.tiers.jobs import ForgetJob, Io, ReadJob
from pcr_core.tiers.lease import Lease, PathChunk
from pcr_core.tiers.prefetch import Hints, Wanted
from pcr_core.tiers.settings import TierSettings
from pcr_core.tiers.store.chunk_file import ChunkFormat
from pcr_core.tiers.store.no_store import Store
from pcr_core.tiers.survey import Survey

_POPULATE_AHEAD = 64 * 2**20


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
        self._root = ChunkKey(namespace.root)
        self._settings = settings
        self._pool = pool
        self._store = store
        self._io = io
        self._leases: set[Lease] = set()
        self._hints = Hints()
        self._closed = False
        shared = Shared(
            self.stats, self.departures, self.prefill_times, self.poll, clock, timer
        )
        fmt = ChunkFormat(layout, namespace)
        parts = assemble(fmt, pool, store, io, settings, shared)
        self._survey = Survey(parts, pool, store, settings, shared)
        self._flush = Flush(parts.writes, io, self.poll)
        self._take(parts)
        with collector_paused():
            self._catalogue.resync()

    # --- requests ---

    def keys_of(self, tokens: Sequence[int]) -> list[ChunkKey]:
        """Keys of every full chunk of a prompt."""
        return chunk_keys(self._namespace, tokens, self.chunk_tokens)

    def match(self, keys: Sequence[ChunkKey]) -> list[ChunkState]:
        """Say where each chunk could be read from now. Pure: nothing is re-ranked."""
        return self._catalogue.states(keys)

    def is_reading(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether any of these chunks is being read, or computed. Pure."""
        if not self._reads.nbytes and not self._leases:
            return False
        nodes = self._tree.match(keys)
        return any(node is not None and node.host is Host.FILLING for node in nodes)

    @property
    def dram_chunks(self) -> int:
        """Chunks that DRAM holds: a request's new ones all pass through it at once."""
        return self._pool.capacity

    def lease(
        self,
        keys: Sequence[ChunkKey],
        tokens: Sequence[int],
        usable: int,
        resident: int = 0,
    ) -> Lease:
        """Pin what is in DRAM, start reading what is on SSD, reserve room for the rest.

        Call ``catch_up`` and ``register`` before, in this order: a request belongs to
        the epoch in which its documents were registered.

        Args:
            keys: Keys of every full chunk of the prompt, root first.
            tokens: The whole prompt.
            usable: How many leading chunks may be read rather than computed.
            resident: Leading tokens that the device holds already.

        Raises:
            ValueError: If the arguments do not fit each other.
        """
        if not 0 <= usable <= len(keys) or len(tokens) < len(keys) * self.chunk_tokens:
            raise ValueError(
                f"{len(keys)} chunks of {self.chunk_tokens} tokens with {usable} "
                f"usable do not fit a prompt of {len(tokens)} tokens"
            )
        self.poll()
        self._accounts.begin(len(keys))
        self.departures.cause = f"request {self.stats.requests + len(self._leases) + 1}"
        nodes = self._tree.grow(self._root, keys, self._settings.tenant)
        self._tree.pin(nodes)
        path = [
            PathChunk(self._format.chunk(keys, tokens, index), node)
            for index, node in enumerate(nodes)
        ]
        covered = min(resident // self.chunk_tokens, len(keys))
        lease = Lease(self._loading, self.release, path, keys, len(tokens), covered)
        self._leases.add(lease)
        try:
            self._catalogue.adopt(keys)
            heads = self._heads.find(keys, tokens, usable, resident)
            self._tree.pin([head.node for head in heads.values()])
            lease.heads = heads
            self._loading.lend(lease, usable)
        except BaseException:
            lease.close()
            raise
        return lease

    def heads(
        self,
        keys: Sequence[ChunkKey],
        tokens: Sequence[int],
        usable: int,
        resident: int = 0,
    ) -> dict[int, int]:
        """Tokens of each head that ``lease`` would lend, by chunk index. Pure."""
        found = self._heads.find(keys, tokens, usable, resident)
        return {index: head.tokens for index, head in found.items()}

    def release(self, lease: Lease) -> None:
        """End a lease; see ``Lease``."""
        self._leases.discard(lease)
        if self._closed:  # its slots have gone already
            lease.readings.clear()
            return
        self._loading.leave(lease)
        nodes = [chunk.node for chunk in lease.path]
        for index in lease.sinks:
            if index in lease.done:
                self._tree.advance_host(nodes[index], Event.FILL)
            else:
                self._dram.free(nodes[index], Event.RELEASE)
        self._accounts.end(lease)
        self._hints.used(lease.keys)
        self._tree.unpin(lease.pinned)
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
        return self._accounts.window(self._pool.capacity)

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
        return self._catalogue.tokens_below(parent, keys[index])

    # --- between steps ---

    def prepare(self) -> bool:
        """Do a little of what the next request would otherwise wait for.

        Returns:
            Whether there may be more to do.
        """
        return self._pool.populate_next(_POPULATE_AHEAD)

    def poll(self) -> None:
        """Take in finished I/O: publish what was read, free what was written."""
        while jobs := self._io.poll():
            for job in jobs:
                if isinstance(job, ReadJob):
                    self._reads.apply(job)
                else:
                    self._writes.apply(job)
            self._writes.advance()
            self.version += 1
        self._forgetting.sweep()

    # --- the whole ---

    def flush(self, timeout: float | None = None, *, run: Caller = here) -> bool:
        """Write everything that is only in DRAM, and wait until it is durable.

        Args:
            timeout: Seconds; ``None`` waits as long as it takes.
            run: Has something done on the engine thread and returns what it gives. With
                it any thread may call; the engine thread does not wait meanwhile.

        Returns:
            False if the timeout came first.
        """
        done = self._flush(timeout, run)
        run(self.poll)
        return done

    def check(self, *, fix: bool = False, run: Caller = here) -> CheckReport:
        """Audit memory, index and every byte of every file; reads the whole folder.

        Args:
            fix: Remove damaged chunks and stray files.
            run: As for ``flush``; requests go on while files are read.

        Raises:
            StoreError: If the audit could not finish.
        """
        self.flush(run=run)
        memory = run(self.check_memory)
        store = self._store.audit(fix=fix)
        return run(partial(self._report, memory, store, fix))

    def check_memory(self) -> list[str]:
        """Audit tree, slots and pins."""
        self.poll()
        return self._survey.memory(sum(len(lease.pinned) for lease in self._leases))

    def snapshot(self) -> CacheStats:
        """Return the counters together with how full the tiers are now."""
        self.poll()
        return self._survey.snapshot()

    def decisions(self, longest: int) -> Decisions:
        """What steers the tiers now; ``longest`` is in tokens, of any prompt."""
        return self._survey.decisions(longest, self.window)

    def close(self, timeout: float = 10.0) -> None:
        """Finish writes for at most ``timeout`` seconds, drop the rest, end threads."""
        if self._closed:
            return
        started = time.monotonic()
        self.flush(timeout)
        self._closed = True
        self._writes.abandon()
        joined = self._io.close(max(0.1, timeout - (time.monotonic() - started)))
        self.poll()
        if joined:
            # Closing the index under a thread that hangs in it would crash.
            self._store.close()
        self._dram.close()

    # --- inside ---

    def _take(self, parts: Parts) -> None:
        self._format = parts.format
        self._tree = parts.tree
        self._adaptive = parts.adaptive
        self._accounts = parts.accounts
        self._dram = parts.dram
        self._catalogue = parts.catalogue
        self._room = parts.room
        self._writes = parts.writes
        self._reads = parts.reads
        self._loading = parts.loading
        self._prefetcher = parts.prefetcher
        self._forgetting = parts.forgetting
        self._heads = parts.heads

    def _report(self, memory: list[str], store: list[str], fix: bool) -> CheckReport:
        self.poll()
        return self._survey.report(memory, store, fix=fix)
