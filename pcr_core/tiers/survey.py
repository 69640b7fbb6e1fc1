"""What the tiers hold, what steers them, and whether all of it fits together.

Looks and changes nothing. Engine thread only.
"""

from __future__ import annotations

from pcr_core.stats import CacheStats, Decisions
from pcr_core.tiers.assembly import Parts, Shared
from pcr_core.tiers.audit import CheckReport, audit_memory
from pcr_core.tiers.host_pool import HostPool
from pcr_core.tiers.settings import TierSettings
from pcr_core.tiers.store.no_store import Store


class Survey:
    """Reports on the tiers. Whoever asks has polled before.

    Args:
        parts: The parts it looks at.
        pool: The slots.
        store: The SSD tier.
        settings: Policies.
        shared: Counters and times.
    """

    def __init__(
        self,
        parts: Parts,
        pool: HostPool,
        store: Store,
        settings: TierSettings,
        shared: Shared,
    ) -> None:
        self._parts = parts
        self._pool = pool
        self._store = store
        self._settings = settings
        self._stats = shared.stats
        self._prefill = shared.prefill

    def memory(self, pinned: int) -> list[str]:
        """Audit tree, slots and pins; open leases account for ``pinned`` of them."""
        parts = self._parts
        return audit_memory(parts.tree, self._pool, parts.dram.slots, pinned)

    def report(self, memory: list[str], store: list[str], *, fix: bool) -> CheckReport:
        """Put an audit together, after catching up with what it removed."""
        fixed = fix and bool(store)
        if fixed:
            self._parts.catalogue.resync()
        records = self._store.records()
        size = sum(record.size for record in records.values())
        return CheckReport(memory, store, fixed, len(records), size)

    def snapshot(self) -> CacheStats:
        """Return the counters together with how full the tiers are now."""
        stats, parts = self._stats, self._parts
        tree = parts.tree
        stats.dram_chunks, stats.ssd_chunks = tree.host_ready, tree.disk_stored
        stats.dram_bytes = len(parts.dram.slots) * parts.format.layout.nbytes
        stats.dram_budget = self._pool.nbytes
        stats.dram_allocated = self._pool.allocated_bytes
        stats.dram_pinned = self._pool.pinned_bytes
        stats.pin_errors = self._pool.pin_errors
        stats.ssd_bytes = parts.room.used_bytes()
        stats.ssd_budget = self._store.budget_bytes
        stats.namespace_bytes = tree.tenant_bytes(self._settings.tenant)
        stats.namespace_budget = self._settings.quota_bytes or 0
        return stats.snapshot()

    def decisions(self, longest: int, window: int) -> Decisions:
        """What steers the tiers now.

        Args:
            longest: Tokens of the longest prompt there may be.
            window: Waiting requests that are looked at.
        """
        adaptive, prefill = self._parts.adaptive, self._prefill
        rated = Decisions.RATED
        rate = rated / prefill.seconds(0, rated) if prefill.ready else 0.0
        return Decisions(
            eviction=adaptive.current if adaptive else self._settings.eviction,
            hit_rates=dict(adaptive.rates) if adaptive else {},
            lookahead_window=window,
            read_bandwidth=self._parts.reads.times.bandwidth,
            prefill_rate=rate,
            crossover_tokens=self._parts.loading.planner.crossover(longest),
        )
