"""Counters of the cache: plain numbers, written by the engine thread only.

The engine thread adds to a ``StoreCounters``; ``snapshot()`` gives a frozen
``CacheStats`` that may be read, printed or kept by anybody. Metric names follow the
list in the paper notes (hits in tokens, not in requests).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from pcr_core.document_use import DocumentTotals
from pcr_core.table import as_html, as_text


@dataclass(slots=True)
class StoreCounters:
    """What the tiers have done so far, and how full they are. Engine thread only.

    Attributes:
        requests: Leases that have ended.
        device_hit_tokens: Prompt tokens whose KV was in the request's row already.
        dram_hit_tokens: Prompt tokens whose KV was read from DRAM.
        ssd_hit_tokens: Prompt tokens whose KV was read from SSD.
        miss_tokens: Prompt tokens that had to be computed.
        holes: Chunks recomputed although a later chunk of the prompt was reused.
        dram_bytes, dram_budget: DRAM in use by chunks, and what all chunks it has room
            for would take, in bytes.
        dram_allocated: Bytes taken from the system for it, in whole pages. They grow
            with use, in slabs, and never pass the ``dram_bytes`` of the configuration.
        dram_pinned: Those of them that are page-locked for copies to a GPU.
        ssd_bytes, ssd_budget: The same for chunk files on SSD, header included, of all
            that use the folder.
        namespace_bytes, namespace_budget: The part of this namespace, and its quota; 0
            for no quota.
        dram_chunks, ssd_chunks: Chunks that are complete in that tier, as far as this
            engine knows: what others store or remove is noticed when it matters.
        dram_evictions, ssd_evictions: Chunks evicted from that tier.
        bypassed_inserts: Chunks computed but not kept, because every DRAM slot was
            pinned or being written.
        recomputed: Chunks computed although they were on SSD: that was faster.
        read, read_bytes: Chunks and bytes read from SSD and found good.
        prefetch_issued: Chunks whose read was started before their request ran.
        prefetch_used: Those that a request then found in DRAM. Counted as SSD hits.
        prefetch_late: Those whose request came first, and waited for them.
        prefetch_wasted: Those evicted again before anybody used them.
        prefetch_cancelled: Those whose read was taken back in time.
        written, written_bytes: Chunks and bytes made durable on SSD.
        write_drops: Chunks not written to SSD: the queue was full or, everything
            stored being more recently used, there was no room.
        write_errors: Chunk writes that failed (disk full, read-only, folder removed).
        read_errors: Chunk reads that the system refused (EIO, permissions).
        read_timeouts: Chunk reads that did not end in time; the chunk was computed.
        corrupt: Chunk files that were truncated or altered; each was removed.
        missing: Indexed chunks whose file was gone; each record was removed.
        pin_errors: Slabs of DRAM that could not be page-locked: copies from there are
            slower.
        forgotten: Chunks removed from either tier because a document was forgotten.
    """

    requests: int = 0
    device_hit_tokens: int = 0
    dram_hit_tokens: int = 0
    ssd_hit_tokens: int = 0
    miss_tokens: int = 0
    holes: int = 0
    dram_bytes: int = 0
    dram_budget: int = 0
    dram_allocated: int = 0
    dram_pinned: int = 0
    ssd_bytes: int = 0
    ssd_budget: int = 0
    namespace_bytes: int = 0
    namespace_budget: int = 0
    dram_chunks: int = 0
    ssd_chunks: int = 0
    dram_evictions: int = 0
    ssd_evictions: int = 0
    bypassed_inserts: int = 0
    recomputed: int = 0
    read: int = 0
    read_bytes: int = 0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_cancelled: int = 0
    written: int = 0
    written_bytes: int = 0
    write_drops: int = 0
    write_errors: int = 0
    read_errors: int = 0
    read_timeouts: int = 0
    corrupt: int = 0
    missing: int = 0
    pin_errors: int = 0
    forgotten: int = 0

    def snapshot(self) -> CacheStats:
        """Return an immutable copy that later requests do not change."""
        return CacheStats(*(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Immutable copy of a ``StoreCounters``, with the same fields. Any thread.

    ``print(stats)`` gives a short table; a notebook shows it as HTML.
    """

    requests: int
    device_hit_tokens: int
    dram_hit_tokens: int
    ssd_hit_tokens: int
    miss_tokens: int
    holes: int
    dram_bytes: int
    dram_budget: int
    dram_allocated: int
    dram_pinned: int
    ssd_bytes: int
    ssd_budget: int
    namespace_bytes: int
    namespace_budget: int
    dram_chunks: int
    ssd_chunks: int
    dram_evictions: int
    ssd_evictions: int
    bypassed_inserts: int
    recomputed: int
    read: int
    read_bytes: int
    prefetch_issued: int
    prefetch_used: int
    prefetch_late: int
    prefetch_wasted: int
    prefetch_cancelled: int
    written: int
    written_bytes: int
    write_drops: int
    write_errors: int
    read_errors: int
    read_timeouts: int
    corrupt: int
    missing: int
    pin_errors: int
    forgotten: int

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens whose KV was reused, from any tier."""
        return self.device_hit_tokens + self.dram_hit_tokens + self.ssd_hit_tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens whose KV was reused; 0.0 before the first request."""
        total = self.hit_tokens + self.miss_tokens
        return self.hit_tokens / total if total else 0.0

    def _dram(self) -> str:
        text = _level(self.dram_chunks, self.dram_bytes, self.dram_budget)
        text += f" ({_mib(self.dram_allocated)} allocated"
        if self.dram_pinned:
            text += f", {_mib(self.dram_pinned)} pinned"
        return (
            f"{text}), {self.dram_evictions} evicted, {self.bypassed_inserts} not kept"
        )

    def _ssd(self) -> str:
        if not self.ssd_budget:
            return "off"
        text = _level(self.ssd_chunks, self.ssd_bytes, self.ssd_budget)
        if self.namespace_budget:
            used, quota = _mib(self.namespace_bytes), _mib(self.namespace_budget)
            text += f" (this namespace {used} of {quota})"
        failed = self.write_drops + self.write_errors
        return (
            f"{text}, {self.ssd_evictions} evicted, {self.written} written, "
            f"{failed} not written"
        )

    def __str__(self) -> str:
        return as_text(self.rows())

    def _repr_html_(self) -> str:
        return as_html(self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the table."""
        trouble = {
            "write errors": self.write_errors,
            "read errors": self.read_errors,
            "read timeouts": self.read_timeouts,
            "corrupt": self.corrupt,
            "missing": self.missing,
            "slabs not pinned": self.pin_errors,
        }
        found = ", ".join(f"{count} {name}" for name, count in trouble.items() if count)
        return [
            ("requests", f"{self.requests}"),
            (
                "reused tokens",
                f"{self.hit_tokens} ({self.hit_rate:.0%}): "
                f"{self.device_hit_tokens} device, {self.dram_hit_tokens} DRAM, "
                f"{self.ssd_hit_tokens} SSD",
            ),
            ("computed tokens", f"{self.miss_tokens} ({self.holes} holes)"),
            ("DRAM", self._dram()),
            ("SSD", self._ssd()),
            (
                "prefetch",
                f"{self.prefetch_issued} chunks read ahead: {self.prefetch_used} used, "
                f"{self.prefetch_late} late, {self.prefetch_wasted} wasted, "
                f"{self.prefetch_cancelled} cancelled",
            ),
            ("storage trouble", found or "none"),
        ]


def _level(chunks: int, used: int, budget: int) -> str:
    return f"{chunks} chunks, {_mib(used)} of {_mib(budget)}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Decisions:
    """What steers the tiers at this moment. Immutable; any thread.

    Attributes:
        eviction: The policy in charge of DRAM.
        hit_rates: With ``adaptive``: share of chunks that each fixed policy would have
            hit lately, from 0 to 1. Empty otherwise.
        lookahead_window: Waiting requests that are looked at.
        read_bandwidth: Bytes per second from SSD, measured; 0.0 before the first read.
        prefill_rate: Tokens per second of an uncached prompt of ``RATED`` tokens,
            measured; 0.0 before the first prefill.
        crossover_tokens: Depth in a prompt from which on reading a chunk from SSD beats
            computing it: 0.0 always, ``inf`` never, ``None`` while unknown.
    """

    RATED: ClassVar[int] = 1024

    eviction: str
    hit_rates: dict[str, float]
    lookahead_window: int
    read_bandwidth: float
    prefill_rate: float
    crossover_tokens: float | None

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the table."""
        rates = ", ".join(f"{name} {rate:.0%}" for name, rate in self.hit_rates.items())
        return [
            (
                "eviction",
                f"{self.eviction}, looks {self.lookahead_window} requests ahead"
                + (f" (would hit: {rates})" if rates else ""),
            ),
            (
                "load or compute",
                f"{self._crossover()} ({_mib(int(self.read_bandwidth))}/s from SSD, "
                f"{self.prefill_rate:.0f} tokens/s computed)",
            ),
        ]

    def __str__(self) -> str:
        return as_text(self.rows())

    def _repr_html_(self) -> str:
        return as_html(self.rows())

    def _crossover(self) -> str:
        at = self.crossover_tokens
        if at is None:
            return "both are not measured yet"
        if at == 0:
            return "loading is always faster"
        if at == float("inf"):
            return "computing is always faster"
        return f"loading is faster from token {at:.0f} on"


_DECODING = {
    "invariant": "rows change no bit of each other",
    "close": "rows may change each other's rounding",
    "serial": "rows run in turns",
}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How an engine runs and what it has done. Immutable; any thread.

    Attributes:
        model, device, dtype: What runs where.
        threads: torch's intra-op threads.
        chunk_tokens: Tokens per chunk.
        prefill_cuts: ``"shape-independent"`` (exact, one forward), ``"grid"`` (exact,
            chunk-sized forwards) or ``"free"`` (not exact); the start-up probe and
            the ``exact`` setting decide.
        exact: Whether reuse is promised to change no bit of a result.
        namespace: Short name of the KV namespace.
        overlap: Which copies of KV run beside compute: ``"none"``, ``"up"``,
            ``"down"`` or ``"both"``.
        overlap_ratios: What the start-up probe measured for each mode: time of a hit
            relative to ``"none"``. Empty if the mode was set, or copies cost too
            little for any mode to matter.
        copying: Share of a hit's time that copies took without overlap, as the probe
            measured; 0.0 if it did not.
        decoding: What requests that run together do to each other's bits:
            ``"invariant"``: nothing, each answer is that of a request alone, bit for
            bit; ``"close"``: they may round differently; ``"serial"``: this model's
            code takes one row at a time, so they run in turns.
        cuda_graphs: Whether decode steps are recorded once and replayed (on a GPU).
        cuda_graph_ratios: What the start-up probe measured: time of a recorded step
            relative to an ordinary one, by number of rows. Empty if it did not.
        cuda_graphs_reason: Why they are not recorded; empty on a CPU.
        cpu_kernels: ``"compiled"`` if what is between matrix products was compiled for
            this machine, or ``"torch"``.
        cpu_kernels_reason: Why it was not; empty where the model has no such layers,
            and on a GPU.
        running, waiting: Requests that have a row, and that wait for one.
        preempted: How often a running request was put back into the queue, as
            ``row_bytes`` was used up.
        finished, cancelled, failed: Requests that ended so.
        working_bytes: KV memory where the model computes, beside the DRAM tier: of the
            running requests, and of finished ones that keep theirs.
        weight_bytes: Weights that are in memory twice while the engine is open: the
            output head, packed for decode steps beside the model's own.
        decisions: What steers the tiers now.
        cache: Counters of the tiers.
        documents: What finished requests have reused of each document named with them,
            the one used last first; the latest 1024 documents. What ``forget`` was
            told of is not among them.
    """

    model: str
    device: str
    dtype: str
    threads: int
    chunk_tokens: int
    prefill_cuts: str
    exact: bool
    namespace: str
    overlap: str
    overlap_ratios: dict[str, float]
    copying: float
    decoding: str
    cuda_graphs: bool
    cuda_graph_ratios: dict[int, float]
    cuda_graphs_reason: str
    cpu_kernels: str
    cpu_kernels_reason: str
    running: int
    waiting: int
    preempted: int
    finished: int
    cancelled: int
    failed: int
    working_bytes: int
    weight_bytes: int
    decisions: Decisions
    cache: CacheStats
    documents: tuple[DocumentTotals, ...] = ()

    def __str__(self) -> str:
        return as_text(self.rows())

    def _repr_html_(self) -> str:
        return as_html(self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the table."""
        exact = f"exact ({self.prefill_cuts})" if self.exact else "not exact"
        return [
            ("model", f"{self.model}, {self.dtype} on {self.device}"),
            (
                "prefill",
                f"{exact}, chunks of {self.chunk_tokens} tokens",
            ),
            ("overlap", self._overlap_text()),
            (
                "batch",
                f"{_DECODING[self.decoding]}; {self.running} running, "
                f"{self.waiting} waiting, {self.preempted} times put back",
            ),
            *self._kernels(),
            *self._graphs(),
            (
                "finished",
                f"{self.finished} ({self.cancelled} cancelled, {self.failed} failed)",
            ),
            *self.decisions.rows(),
            *self.cache.rows(),
            *self._documents(),
        ]

    def _kernels(self) -> list[tuple[str, str]]:
        """Nothing where there was nothing to compile."""
        if self.cpu_kernels == "compiled":
            return [("kernels", "compiled for this CPU")]
        reason = self.cpu_kernels_reason
        return [("kernels", f"torch ({reason})")] if reason else []

    def _graphs(self) -> list[tuple[str, str]]:
        """Nothing on a device that has none."""
        ratios = self.cuda_graph_ratios
        times = ", ".join(f"{ratio:.2f}" for ratio in ratios.values())
        rows = ", ".join(str(rows) for rows in ratios)
        measured = f"a step of {rows} rows takes {times} of an ordinary one"
        about = [self.cuda_graphs_reason, measured if ratios else ""]
        text = "; ".join(part for part in about if part)
        state = "on" if self.cuda_graphs else "off"
        return [("CUDA graphs", f"{state} ({text})")] if text else []

    def _documents(self) -> list[tuple[str, str]]:
        if not self.documents:
            return []
        tokens = sum(one.tokens for one in self.documents)
        cached = sum(one.cached_tokens for one in self.documents)
        named = f"{len(self.documents)} named; {cached} of their {tokens} tokens"
        return [("documents", f"{named} reused ({cached / tokens:.0%})")]

    def _overlap_text(self) -> str:
        ratios = ", ".join(f"{k} {v:.2f}" for k, v in self.overlap_ratios.items())
        if ratios:
            return f"{self.overlap} (measured, times none: {ratios})"
        if self.copying:
            return f"{self.overlap} (copies take {self.copying:.1%} of a hit)"
        return self.overlap
