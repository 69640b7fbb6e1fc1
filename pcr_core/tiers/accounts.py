"""What each request counts for: recency, cost, hits, and how large requests are.

Counted once, when its lease ends. Moves nothing. Engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from pcr_core.cost import PrefillTimes
from pcr_core.index.adaptive import Adaptive
from pcr_core.index.look_ahead import window_size
from pcr_core.index.prefix_tree import PrefixTree
from pcr_core.stats import StoreCounters
from pcr_core.tiers.lease import Lease


class Accounts:
    """Keeps the books of requests.

    Args:
        tree: Where uses are counted.
        adaptive: The policy that learns from them, if that is the one in use.
        stats: Counters.
        prefill: How long computing takes.
        chunk_tokens: Tokens per chunk.
        clock: Nanoseconds, for recency that outlives the process.
    """

    def __init__(
        self,
        tree: PrefixTree,
        adaptive: Adaptive | None,
        stats: StoreCounters,
        prefill: PrefillTimes,
        chunk_tokens: int,
        clock: Callable[[], int],
    ) -> None:
        self._tree = tree
        self._adaptive = adaptive
        self._stats = stats
        self._prefill = prefill
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._mean_chunks = 0.0

    def window(self, capacity: int) -> int:
        """How many waiting requests of the usual size so many slots can hold."""
        return window_size(capacity, self._mean_chunks)

    def begin(self, chunks: int) -> None:
        """Keep the mean size of a request over the last dozen or so."""
        weight = 0.1 if self._mean_chunks else 1.0
        self._mean_chunks += weight * (chunks - self._mean_chunks)

    def end(self, lease: Lease) -> None:
        """Count one use of the whole path, what was found of it, what was missing."""
        found = self._found(lease)
        cached = sum(found.values())
        if lease.counted:
            self._count(lease, found)
        nodes = [chunk.node for chunk in lease.path]
        missed = [i for i in range(lease.covered, len(nodes)) if i not in lease.sources]
        computed = lease.prompt_tokens - cached
        cost = self._prefill.seconds(cached, computed) / max(1, computed)
        self._tree.commit(nodes, self._clock(), missed=missed, cost=cost)
        if self._adaptive is not None:
            self._adaptive.observe(lease.keys, cost=cost)

    def _found(self, lease: Lease) -> Mapping[str, int]:
        """Tokens that were not computed, by tier."""
        if lease.reused is not None:
            return lease.reused
        found = Counter(device=lease.covered * self._chunk_tokens)
        for tier in lease.tiers.values():
            found[tier] += self._chunk_tokens
        return found

    def _count(self, lease: Lease, found: Mapping[str, int]) -> None:
        stats = self._stats
        stats.requests += 1
        stats.device_hit_tokens += found.get("device", 0)
        stats.dram_hit_tokens += found.get("dram", 0)
        stats.ssd_hit_tokens += found.get("ssd", 0)
        stats.miss_tokens += lease.prompt_tokens - sum(found.values())
        if lease.tiers:
            stats.holes += max(lease.tiers) + 1 - lease.covered - len(lease.tiers)
